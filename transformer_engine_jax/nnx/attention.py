"""MultiHeadAttention: projections, RoPE, norms of queries and keys, the KV cache, attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from transformer_engine_jax.modules.attention import (
    axes_of,
    by_head,
    check_ranks,
    core_fields,
    heads_joined,
    in_one_array,
    normed_and_turned,
    output_fields,
    own_order,
    positions,
    project,
    projections,
    qk_norm_fields,
    rotated_qkv,
    rotations,
)
from transformer_engine_jax.modules.checks import check_positive
from transformer_engine_jax.nnx.base import Fp8Module, module
from transformer_engine_jax.nnx.dense import DenseGeneral, LayerNormDenseGeneral
from transformer_engine_jax.nnx.dot_product_attention import DotProductAttention
from transformer_engine_jax.nnx.layernorm import LayerNorm
from transformer_engine_jax.ops.attention import SequenceDescriptor
from transformer_engine_jax.ops.attention.decode import KVCache
from transformer_engine_jax.ops.attention.layouts import MASK_TYPES, respelled
from transformer_engine_jax.ops.dropout import Residual
from transformer_engine_jax.sharding import constrain


@module
class MultiHeadAttention(Fp8Module):
    """Norm, projections, attention and the output projection; returns (out, the norm's output or None).

    in_features: of the queries and of the output. in_kv_features: None makes it self-attention; given, keys and values
    come from other inputs of that size. Submodules `qkv` | `query`, `kv` | `query`, `key`, `value`, `out`,
    `core_attention`, and `query_norm` and `key_norm` with a qk_norm_type that has parameters. Fields are those of the
    Linen module.
    """

    in_features: int
    head_dim: int
    num_attention_heads: int
    _: KW_ONLY
    in_kv_features: int | None = None
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    dropout_rng_name: str = "dropout"
    input_layernorm: bool = True
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    kernel_init: InitVar[Callable | None] = None
    use_bias: bool = False
    bias_init: InitVar[Callable] = nn.initializers.zeros
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: Any = jnp.float32
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    float32_logits: bool = False
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Callable | None = None
    qk_norm_type: str | None = None
    qk_norm_epsilon: float = 1e-6
    qk_norm_before_rope: bool = False
    checkpoint_core_attention: bool = False
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, kernel_init, bias_init, rngs):
        check_positive(self, "head_dim", "num_attention_heads", "num_gqa_groups")
        self.cached_key = self.cached_value = self.cache_index = nnx.data(None)
        inits, is_self = dict(bias_init=bias_init, rngs=rngs), self.in_kv_features is None
        first, *others = projections(self, kernel_init, is_self)
        normed = LayerNormDenseGeneral(self.in_features, first.features, **first.product, **first.source, **inits)
        setattr(self, first.name, normed)
        inputs = self.in_features if is_self else self.in_kv_features
        for p in others:
            setattr(self, p.name, DenseGeneral(inputs, p.features, **p.product, **p.source, **inits))
        self.core_attention = DotProductAttention(**core_fields(self), rngs=rngs)
        self.hand_on("score_mod")
        for name in ("query_norm", "key_norm"):
            setattr(self, name, self._make_qk_norm(rngs))
        width = self.num_attention_heads * self.head_dim
        self.out = DenseGeneral(width, self.in_features, kernel_init=kernel_init, **output_fields(self), **inits)

    def _make_qk_norm(self, rngs) -> LayerNorm | None:
        if self.qk_norm_type in (None, "l2norm"):
            return nnx.data(None)
        return LayerNorm(self.head_dim, **qk_norm_fields(self), rngs=rngs)

    def init_cache(self, input_shape: tuple[int, ...], dtype=jnp.float32) -> None:
        """Makes an empty KV cache, nnx.Cache variables, for calls with decode=True.

        Args:
          input_shape: of the inputs, [B, S, in_features] or transposed, S being the greatest length.
          dtype: of keys and values, the inputs'.

        Raises:
          ValueError: another rank.
        """
        if len(input_shape) != 3:
            raise ValueError(f"MultiHeadAttention: input_shape: expected [B, S, in_features], got {list(input_shape)}")
        self.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))
        if self.in_kv_features is None:
            tokens = input_shape[1::-1] if self.transpose_batch_sequence else input_shape[:2]
            shape = (*tokens, self.num_gqa_groups or self.num_attention_heads, self.head_dim)
            axes = ("batch", None, "heads", None)
            zeros = (constrain(jnp.zeros(shape, dtype), axes) for _ in range(2))
            self.cached_key, self.cached_value = map(nnx.Cache, zeros)

    def __call__(
        self,
        inputs_q,
        inputs_kv=None,
        mask=None,
        bias=None,
        *,
        decode: bool = False,
        deterministic: bool | None = None,
        sequence_descriptor: SequenceDescriptor | None = None,
        rotary_pos_emb=None,
        attn_mask_type: str | None = None,
        residual: Residual = False,
    ):
        """inputs_q [B, Sq, in_features], inputs_kv [B, Sk, in_kv_features] -> ([B, Sq, in_features], its norm or None).

        inputs_kv: for self-attention, None or the very object that inputs_q is. deterministic: switches dropout off;
        None is what model.train() and model.eval() said. decode: attends to the KV cache that `init_cache` makes, and
        puts the tokens into it. attn_mask_type: in place of the field. The other arguments are those of the Linen
        module.
        """
        is_self = self.in_kv_features is None
        if (is_self and inputs_kv is not None and inputs_kv is not inputs_q) or (not is_self and inputs_kv is None):
            raise ValueError(
                f"MultiHeadAttention: inputs_kv: expected {'None or inputs_q itself' if is_self else 'an array'} where "
                f"in_kv_features={self.in_kv_features}, got {'None' if inputs_kv is None else 'another array'}; "
                "make the module with in_kv_features=size for keys and values of other inputs"
            )
        inputs_q = jnp.asarray(inputs_q)
        inputs_kv = inputs_q if is_self else jnp.asarray(inputs_kv)
        check_ranks(inputs_q, inputs_kv)
        turns = rotations(self, rotary_pos_emb)
        mask_type = respelled(attn_mask_type or self.attn_mask_type, MASK_TYPES)
        others = mask, bias, sequence_descriptor, decode or None
        options = self.core_attention.as_linen(attn_mask_type=mask_type).options()
        in_one = is_self and in_one_array(self, options, inputs_q, turns, others)
        results, normed, past = self._project(inputs_q, inputs_kv, residual, split=not in_one)
        results, start = [by_head(self, x) for x in results], None
        if in_one:
            results = [rotated_qkv(self, turns[0], *results)]
        else:
            sequences = sequence_descriptor if "padding" in mask_type else None
            results, start = self._turned(*results, is_self, turns, decode, sequences)
        context = self.core_attention(
            *results, sequence_descriptor=sequence_descriptor, bias=bias, mask=mask, deterministic=deterministic,
            cache_index=start if is_self else None, attn_mask_type=mask_type, qkv_layout="bs3hd" if in_one else None,
        )  # fmt: skip
        if start is not None:  # a call that was refused has moved nothing
            self.cache_index.set_value(start + context.shape[1])
        out = self.out(heads_joined(self, context), past if residual is True else None)
        out = constrain(checkpoint_name(out, "out_proj"), axes_of(self, between=True))
        return residual(out, past) if callable(residual) else out, normed

    def _turned(self, query, key, value, is_self: bool, turns, decode: bool, sequences):
        """([query, key, value] turned and normed, in decoding those of the cache; the first token's place in it)."""
        start = self._place() if decode and (is_self or turns[0] is not None) else None
        at_q, at_k = positions(query, key, start, sequences, own_order(self, is_self))
        query = normed_and_turned(self, self.query_norm, query, turns[0], at_q)
        key = normed_and_turned(self, self.key_norm, key, turns[1], at_k if is_self or start is None else None)
        if decode and is_self:
            cache = KVCache(self.cached_key.get_value(), self.cached_value.get_value(), start).append(key, value)
            key, value = cache.key, cache.value
            self.cached_key.set_value(key)
            self.cached_value.set_value(value)
        return [query, key, value], start

    def _place(self) -> jax.Array:
        """The place in the cache of the next token."""
        if getattr(self, "cache_index", None) is None:  # not there after nnx.pop
            raise ValueError(
                "MultiHeadAttention: decode=True needs a KV cache; call init_cache(input_shape), of the greatest "
                "length, before the first token"
            )
        return self.cache_index.get_value()

    def _project(self, inputs_q, inputs_kv, residual: Residual, split: bool):
        """As modules.attention.project."""
        names = [name for name in ("qkv", "query", "kv", "key", "value") if hasattr(self, name)]
        modules = [getattr(self, name) for name in names]
        return project(
            self, inputs_q, inputs_kv, self.in_kv_features is None, [(n, m.features) for n, m in zip(names, modules)],
            lambda: modules, lambda fp8: [each.parts(fp8) for each in modules], residual, split,
        )  # fmt: skip
