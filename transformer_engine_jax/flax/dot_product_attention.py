"""DotProductAttention: the Linen module around the op of that name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from transformer_engine_jax.flax.base import Fp8Module, with_axes
from transformer_engine_jax.modules.attention import context_parallel
from transformer_engine_jax.modules.checks import check_common, check_positive, check_rate
from transformer_engine_jax.ops.attention import Attention, SequenceDescriptor, dot_product_attention
from transformer_engine_jax.ops.attention.decode import decode_attention
from transformer_engine_jax.ops.attention.layouts import is_packed, unpack
from transformer_engine_jax.ops.attention.op import check_broadcast
from transformer_engine_jax.ops.attention.options import as_window
from transformer_engine_jax.quantizers import keep
from transformer_engine_jax.tracing import level_of_user


class DotProductAttention(Fp8Module):
    """Attention of queries over keys and values, by head; heads / groups > 1 is GQA.

    Its forward pass runs in FP8 under a recipe with fp8_dpa, where `te.explain` does not say why it can't.

    attn_mask_type: "no_mask", "causal" or "causal_bottom_right" (the last query sees the last key), each with
    "padding" too, which needs a sequence_descriptor or a mask; bottom_right counts from where the sequences end: the
    last tokens of which a mask [.., Sq, Sk] leaves anything, or the arrays' ends if it has one row or one column.
    attn_bias_type: None takes post_scale_bias where a bias is given. qkv_layout: "bs3hd" is query, key and value in one
    array, "bshd_bs2hd" key and value in one; the same with t for bs are rows [B, S, ...] that hold several sequences.
    scale_factor: None means 1 / sqrt(head_dim). window_size: (left, right) keys seen, -1 for all. softmax_type:
    "off_by_one" has one more logit, 0; "learnable" has one a head, the param `softmax_offset` f32[H]. score_mod: see
    ops.attention.Attention. transpose_batch_sequence: inputs are [S, B, ...]. checkpoint_core_attention: the backward
    pass computes the attention anew, and nothing of it is kept. float32_logits: logits and softmax always are.
    max_segments_per_seq: above 1, the `max_segments` of descriptors of segment ids that have none (see
    te.SequenceDescriptor). context_parallel_axis: the mesh axis that shards the sequence; strategy "ALL_GATHER" (the
    default) or "RING"; causal_load_balanced: tokens come in the order of te.reorder_causal_load_balancing, as do masks,
    biases, and a descriptor's ids and positions; its lengths are as without.
    """

    head_dim: int
    num_attention_heads: int
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

    @nn.compact
    def __call__(
        self,
        query,
        key=None,
        value=None,
        sequence_descriptor: SequenceDescriptor | None = None,
        bias=None,
        *,
        deterministic: bool = False,
        mask=None,
        cache_index=None,
    ) -> jax.Array:
        """query [B, S, H, D] (or packed as qkv_layout says), key [B, S, G, D], value [B, S, G, Dv] -> [B, S, H, Dv].

        sequence_descriptor: the sequences of rows that are padded or packed; or a mask, as NVIDIA's module has it.
        mask: bool, four axes that broadcast to [B, H, Sq, Sk], True is masked out. bias: likewise. cache_index: i32[]
        where keys and values are those of a KV cache, the place in it of the first query: see ops.attention.decode.
        """
        options = self.options()
        if mask is None and getattr(sequence_descriptor, "ndim", 0) == 4:
            mask, sequence_descriptor = sequence_descriptor, None
        self._check_call(sequence_descriptor, bias, mask, cache_index)
        given = query
        query, key, value = unpack(type(self).__name__, (query, key, value), self.qkv_layout)
        self._check_heads(query, key, value)
        # In one array as it was given, which cuDNN may read.
        in_one = self.qkv_layout == "bs3hd" and not self.transpose_batch_sequence and cache_index is None
        if self.transpose_batch_sequence:
            query, key, value = (jnp.swapaxes(x, 0, 1) for x in (query, key, value))
        padded = "padding" in self.attn_mask_type
        dropping = self.attention_dropout > 0 and not deterministic
        quantizers, unused = self.attention_quantizers()
        if cache_index is None:
            check_broadcast("mask", mask, query, key)  # also one that the mask type ignores
            sequences = sequence_descriptor if padded else None
            if sequences is not None and (self.max_segments_per_seq or 1) > 1:
                sequences = sequences.of_at_most(self.max_segments_per_seq)
            where = dict(sequence_descriptor=sequences, context_parallel=context_parallel(self))
            attend = partial(dot_product_attention, options=options, quantizers=quantizers, **where)
        else:
            attend = partial(decode_attention, options=options, quantizers=quantizers, index=cache_index)
        context = (jax.checkpoint(attend) if self.checkpoint_core_attention else attend)(
            *([given] if in_one else [query, key, value]),
            mask=mask if padded else None,
            bias=bias,
            softmax_offset=self._softmax_offset(),
            dropout_key=self.make_rng(self.dropout_rng_name) if dropping else None,
        )
        context = jnp.swapaxes(context, 0, 1) if self.transpose_batch_sequence else context
        return keep(checkpoint_name(context, self.context_checkpoint_name), unused)

    @nn.nowrap
    def options(self) -> Attention:
        """What the fields say of the attention; ValueError where they can't be."""
        self._check()
        return Attention(
            scale=1.0 / float(np.sqrt(self.head_dim)) if self.scale_factor is None else float(self.scale_factor),
            causal="causal" in self.attn_mask_type,
            window=as_window(self.window_size),
            bias_before_scale=self.attn_bias_type == "pre_scale_bias",
            dropout=self.attention_dropout,
            bottom_right="bottom_right" in self.attn_mask_type,
            softmax_type=self.softmax_type,
            score_mod=self.score_mod,
        )

    def _softmax_offset(self) -> jax.Array | None:
        if self.softmax_type != "learnable":
            return self.check_absent("softmax_type", "softmax_offset")
        shape = (self.num_attention_heads,)
        init = with_axes(self, "softmax_offset", nn.initializers.zeros, ("heads",), shape)
        return self.param("softmax_offset", init, shape, jnp.float32)

    @nn.nowrap
    def _error(self, text: str) -> ValueError:
        return ValueError(f"{type(self).__name__}: {text}")

    @nn.nowrap
    def _check(self) -> None:
        check_common(self)
        check_positive(self, "head_dim", "num_attention_heads", "num_gqa_groups", "max_segments_per_seq")
        check_rate(self, "attention_dropout")
        groups = self.num_gqa_groups or self.num_attention_heads
        if self.num_attention_heads % groups:
            raise self._error(f"{self.num_attention_heads} heads do not divide into {groups} groups")
        if is_packed(self.qkv_layout) and "padding" not in self.attn_mask_type:
            raise self._error(
                f"qkv_layout={self.qkv_layout!r}, of packed sequences, needs a padding mask, such as "
                f"'padding_causal', got attn_mask_type={self.attn_mask_type!r}"
            )

    def _check_call(self, sequence_descriptor, bias, mask, cache_index) -> None:
        if sequence_descriptor is not None and not isinstance(sequence_descriptor, SequenceDescriptor):
            got = type(sequence_descriptor).__name__
            if hasattr(sequence_descriptor, "shape"):
                got = f"{sequence_descriptor.dtype}{list(sequence_descriptor.shape)}"
            raise self._error(
                "sequence_descriptor: expected a SequenceDescriptor, such as SequenceDescriptor.from_seqlens(lengths), "
                f"or a mask [B, H, Sq, Sk], got {got}"
            )
        if sequence_descriptor is not None and cache_index is not None:
            raise self._error(
                "sequence_descriptor: expected None with a KV cache, which holds one sequence a row and counts places "
                "from its start; pad shorter prompts on the left, and give mask=, True for the padding"
            )
        if cache_index is not None and self.context_parallel_axis:
            raise self._error("context_parallel_axis: expected '' with a KV cache, which is not sharded by tokens")
        if sequence_descriptor is not None and mask is not None:
            raise self._error("got both mask and sequence_descriptor; give padding as one of them")
        given = next(
            (n for n, x in (("sequence_descriptor", sequence_descriptor), ("mask", mask)) if x is not None), None
        )
        if "padding" in self.attn_mask_type and given is None:
            kind = f"attn_mask_type={self.attn_mask_type!r}"
            if cache_index is None:
                raise self._error(f"{kind} needs mask=, True where masked out, or sequence_descriptor=")
            warnings.warn(
                f"{type(self).__name__}: {kind} without mask=: all tokens of the KV cache so far are seen; where rows "
                "begin with padding, give the mask in each call",
                stacklevel=level_of_user(),
            )
        if "padding" not in self.attn_mask_type and given is not None:
            warnings.warn(
                f"{type(self).__name__}: {given}= is ignored with attn_mask_type={self.attn_mask_type!r}",
                stacklevel=level_of_user(),
            )
        if bias is not None and self.attn_bias_type == "no_bias":
            raise self._error("attn_bias_type='no_bias' but a bias was given")
        if bias is None and self.attn_bias_type not in (None, "no_bias"):
            raise self._error(f"attn_bias_type={self.attn_bias_type!r} needs bias=, or is to be None")

    def _check_heads(self, query, key, value) -> None:
        groups = self.num_gqa_groups or self.num_attention_heads
        for name, x, heads in (
            ("query", query, self.num_attention_heads),
            ("key", key, groups),
            ("value", value, groups),
        ):
            size = x.shape[-1] if name == "value" else self.head_dim
            if x.ndim != 4 or x.shape[2:] != (heads, size):
                raise self._error(f"{name}: expected [B, S, {heads}, {size}], got {list(x.shape)}")
