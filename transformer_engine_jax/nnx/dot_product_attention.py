"""DotProductAttention: the NNX module around the op of that name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx

from transformer_engine_jax import flax as linen
from transformer_engine_jax.flax.base import STATE_COLLECTION
from transformer_engine_jax.nnx.base import Fp8Module, array, dropping, helper, make_dropout, module
from transformer_engine_jax.quantized import AttentionState
from transformer_engine_jax.quantizers import needs_attention_state


@module
class DotProductAttention(Fp8Module):
    """Attention of queries over keys and values, by head; heads / groups > 1 is GQA.

    Fields, arguments and the param `softmax_offset` of softmax_type="learnable" are those of the Linen module; rngs is
    needed for attention_dropout only. Its FP8 state is there where it is made under a recipe with fp8_dpa.
    """

    FP8_STATES: ClassVar = {"attention_state": AttentionState}

    head_dim: int
    num_attention_heads: int
    _: KW_ONLY
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: float | None = None
    transpose_batch_sequence: bool = False
    window_size: tuple[int, int] | None = None
    max_segments_per_seq: int | None = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"
    score_mod: Callable | None = None
    checkpoint_core_attention: bool = False
    rngs: InitVar[nnx.Rngs | None] = None

    def __post_init__(self, rngs):
        self.dropout = make_dropout(self.attention_dropout, (), self.dropout_rng_name, rngs)
        self.softmax_offset = nnx.data(None)
        if self.softmax_type == "learnable":  # starts at zero, so any stream does
            shape, zeros = (self.num_attention_heads,), nn.initializers.zeros
            self.make_param("softmax_offset", zeros, ("heads",), shape, jnp.float32, rngs or nnx.Rngs(0))
        self.make_attention_state()

    def __call__(
        self,
        query,
        key=None,
        value=None,
        sequence_descriptor=None,
        bias=None,
        *,
        deterministic: bool | None = None,
        mask=None,
        cache_index=None,
        attn_mask_type: str | None = None,
        qkv_layout: str | None = None,
    ):
        """query [B, S, H, D] (or packed as qkv_layout says), key [B, S, G, D], value [B, S, G, Dv] -> [B, S, H, Dv].

        sequence_descriptor: the sequences of rows that are padded or packed, or a mask. mask: bool, broadcastable to
        [B, H, Sq, Sk], True is masked out. bias: likewise. deterministic: switches dropout off; None is what
        model.train() and model.eval() said. cache_index: i32[] where keys and values are those of a KV cache, the place
        in it of the first query. attn_mask_type, qkv_layout: in place of the fields of these names.
        """
        attend = self.as_linen(
            attn_mask_type=attn_mask_type or self.attn_mask_type, qkv_layout=qkv_layout or self.qkv_layout
        )
        keys = {self.dropout_rng_name: self.dropout.rngs()} if dropping(self.dropout, deterministic) else {}
        params = {} if self.softmax_offset is None else {"softmax_offset": array(self.softmax_offset)}
        state = self.state_in_use("attention_state", needs_attention_state())
        states = {} if state is None else {"attention_state": state}
        return attend.apply(
            {"params": params, STATE_COLLECTION: states},
            query,
            key,
            value,
            sequence_descriptor,
            bias,
            deterministic=not keys,
            mask=mask,
            cache_index=cache_index,
            rngs=keys,
        )

    @helper
    def as_linen(self, **others) -> linen.DotProductAttention:
        """The Linen module of these fields and others: given its state it is a pure function, and knows the options."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return linen.DotProductAttention(**{**fields, **others}, parent=None)
