"""DotProductAttention, MultiHeadAttention with RoPE, and T5's RelativePositionBiases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from transformer_engine_jax import flax as linen
from transformer_engine_jax.flax.attention import SCOPES, adapts
from transformer_engine_jax.flax.dot_product_attention import one_of
from transformer_engine_jax.initializers import default_kernel_init, flat_kernel_init
from transformer_engine_jax.nnx.base import Fp8Module, array, dropping, make_dropout, module
from transformer_engine_jax.nnx.dense import DenseGeneral, LayerNormDenseGeneral
from transformer_engine_jax.ops.rope import rope, rope_frequencies


@module
class DotProductAttention(Fp8Module):
    """Attention of queries over keys and values, by head; heads / groups > 1 is GQA.

    Fields, arguments and the param `softmax_offset` of softmax_type="learnable" are those of the Linen module; rngs is
    needed for attention_dropout only.
    """

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
    max_segments_per_seq: int = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"
    score_mod: Callable | None = None
    rngs: InitVar[nnx.Rngs | None] = None

    def __post_init__(self, rngs):
        self.freeze_fields()
        self.dropout = make_dropout(self.attention_dropout, (), self.dropout_rng_name, rngs)
        self.softmax_offset = nnx.data(None)
        if self.softmax_type == "learnable":  # starts at zero, so any stream does
            shape, zeros = (self.num_attention_heads,), nn.initializers.zeros
            self.make_param("softmax_offset", zeros, ("heads",), shape, jnp.float32, rngs or nnx.Rngs(0))

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
    ):
        """query [B, S, H, D] (or packed as qkv_layout says), key [B, S, G, D], value [B, S, G, Dv] -> [B, S, H, Dv].

        sequence_descriptor: the sequences of rows that are padded or packed. mask: bool, broadcastable to
        [B, H, Sq, Sk], True is masked out. bias: likewise. deterministic: switches dropout off; None is what
        model.train() and model.eval() said.
        """
        # Without state, the Linen module is a pure function, and says what the options mean.
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        attend = linen.DotProductAttention(**fields, parent=None)
        keys = {self.dropout_rng_name: self.dropout.rngs()} if dropping(self.dropout, deterministic) else {}
        params = {} if self.softmax_offset is None else {"softmax_offset": array(self.softmax_offset)}
        return attend.apply(
            {"params": params},
            query,
            key,
            value,
            sequence_descriptor,
            bias,
            deterministic=not keys,
            mask=mask,
            rngs=keys,
        )


@module
class MultiHeadAttention(Fp8Module):
    """Norm, projections, attention and the output projection; returns (out, the norm's output or None).

    in_features: of the queries and of the output. in_kv_features: None makes it self-attention; given, keys and values
    come from other inputs of that size. Submodules `qkv` | `query`, `kv` | `query`, `key`, `value`, `out` and
    `core_attention`. scale_attn_logits=False leaves 1 / sqrt(head_dim) to the query kernel's initial value
    (scaled_query_init). rotary_pos_emb_windows: (min, max) wavelengths over 2 pi.
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
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, kernel_init, bias_init, rngs):
        self.freeze_fields()
        one_of(self, "low_rank_adaptation_scope", SCOPES)
        one_of(self, "enable_sequence_parallel", (False,), " (not available yet)")
        self._make_projections(kernel_init or default_kernel_init, bias_init, rngs)
        self.core_attention = DotProductAttention(
            head_dim=self.head_dim,
            num_attention_heads=self.num_attention_heads,
            num_gqa_groups=self.num_gqa_groups,
            attention_dropout=self.attention_dropout,
            attn_mask_type=self.attn_mask_type,
            attn_bias_type=self.attn_bias_type,
            dropout_rng_name=self.dropout_rng_name,
            float32_logits=self.float32_logits,
            scale_factor=None if self.scale_attn_logits else 1.0,
            transpose_batch_sequence=self.transpose_batch_sequence,
            window_size=self.window_size,
            softmax_type=self.softmax_type,
            score_mod=self.score_mod,
            rngs=rngs,
        )
        self.out = DenseGeneral(
            self.num_attention_heads * self.head_dim,
            self.in_features,
            kernel_init=kernel_init,
            kernel_axes=("heads", "embed"),
            bias_axes=("embed",),
            **self._product_fields("output_proj", bias_init, rngs),
        )

    def _product_fields(self, projection: str, bias_init, rngs) -> dict[str, Any]:
        return dict(
            use_bias=self.use_bias,
            bias_init=bias_init,
            enable_low_rank_adaptation=adapts(self.low_rank_adaptation_scope, projection),
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha,
            dtype=self.dtype,
            rngs=rngs,
        )

    def _make_projections(self, init, bias_init, rngs) -> None:
        """`qkv`, or `query` and `kv`, or `query`, `key` and `value`; the first of them has the norm."""
        width_q = self.num_attention_heads * self.head_dim
        width_kv = (self.num_gqa_groups or self.num_attention_heads) * self.head_dim
        is_self = self.in_kv_features is None
        scaled = self.scaled_query_init and not self.scale_attn_logits
        query_scale = float(self.head_dim**-0.5) if scaled else 1.0
        common = self._product_fields("qkv_proj", bias_init, rngs)

        def normed(features, scales: tuple[float, ...], axes: tuple[str, ...], wants_norm: bool):
            return LayerNormDenseGeneral(
                self.in_features,
                features,
                kernel_init=flat_kernel_init(init, 1, scales=scales),
                kernel_axes=("embed", *axes),
                bias_axes=axes,
                enable_layernorm=self.input_layernorm,
                layernorm_type=self.layernorm_type,
                epsilon=self.layernorm_epsilon,
                zero_centered_gamma=self.zero_centered_gamma,
                return_layernorm_output=wants_norm,
                **common,
            )

        def plain(features, kernel_init, axes: tuple[str, ...]):
            size = self.in_features if is_self else self.in_kv_features
            fields = dict(kernel_init=kernel_init, kernel_axes=("embed", *axes), bias_axes=axes, **common)
            return DenseGeneral(size, features, **fields)

        if self.fuse_qkv_params and is_self and width_q == width_kv:
            scales = (query_scale, 1.0, 1.0)
            self.qkv = normed((3, width_q), scales, ("qkv", "heads"), self.return_layernorm_output)
            return
        self.query = normed(width_q, (query_scale,), ("heads",), self.return_layernorm_output or is_self)
        if self.fuse_qkv_params:
            self.kv = plain((2, width_kv), flat_kernel_init(init, 1, scales=(1.0, 1.0)), ("qkv", "heads"))
        else:
            self.key, self.value = plain(width_kv, init, ("heads",)), plain(width_kv, init, ("heads",))

    def __call__(self, inputs_q, inputs_kv=None, mask=None, bias=None, *, deterministic: bool | None = None):
        """inputs_q [B, Sq, in_features], inputs_kv [B, Sk, in_kv_features] -> ([B, Sq, in_features], its norm or None).

        inputs_kv: for self-attention, None or the very object that inputs_q is. deterministic: switches dropout off;
        None is what model.train() and model.eval() said.
        """
        is_self = self.in_kv_features is None
        if (is_self and inputs_kv is not None and inputs_kv is not inputs_q) or (not is_self and inputs_kv is None):
            raise ValueError(
                f"MultiHeadAttention: inputs_kv: expected {'None or inputs_q itself' if is_self else 'an array'} where "
                f"in_kv_features={self.in_kv_features}, got {'None' if inputs_kv is None else 'another array'}; "
                "make the module with in_kv_features=size for keys and values of other inputs"
            )
        inputs_q = jnp.asarray(inputs_q)
        query, key, value, normed = self._project(inputs_q, inputs_q if is_self else jnp.asarray(inputs_kv))

        def heads(x, count):
            return x.reshape(*x.shape[:-1], count, self.head_dim)

        groups = self.num_gqa_groups or self.num_attention_heads
        query, key, value = heads(query, self.num_attention_heads), heads(key, groups), heads(value, groups)
        if self.enable_rotary_pos_emb:
            query, key = self._rotate(query), self._rotate(key)
        context = self.core_attention(query, key, value, bias=bias, mask=mask, deterministic=deterministic)
        out = self.out(context.reshape(*context.shape[:-2], self.num_attention_heads * self.head_dim))
        return checkpoint_name(out, "out_proj"), normed

    def _rotate(self, x):
        x = jnp.swapaxes(x, 0, 1) if self.transpose_batch_sequence else x
        frequencies = rope_frequencies(self.head_dim, self.rotary_pos_emb_windows)
        x = rope(x, frequencies, group=self.rotary_pos_emb_group_method)
        return jnp.swapaxes(x, 0, 1) if self.transpose_batch_sequence else x

    def _project(self, inputs_q, inputs_kv):
        """(query, key, value, normed inputs_q or None), the first three [.., heads * head_dim]."""
        if hasattr(self, "qkv"):
            qkv, normed = self.qkv(inputs_q)
            qkv = checkpoint_name(qkv, "combined_qkv_proj")
            return qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :], normed
        query, normed = self.query(inputs_q)
        source = normed if self.in_kv_features is None else inputs_kv
        if self.fuse_qkv_params:
            kv = checkpoint_name(self.kv(source), "combined_kv_proj")
            key, value = kv[..., 0, :], kv[..., 1, :]
        else:
            key = checkpoint_name(self.key(source), "key_proj")
            value = checkpoint_name(self.value(source), "value_proj")
        query = checkpoint_name(query, "query_proj")
        return query, key, value, normed if self.return_layernorm_output else None


@module
class RelativePositionBiases(Fp8Module):
    """T5's relative position biases (Raffel et al., 2019); param `rel_embedding` [heads, num_buckets]."""

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    _: KW_ONLY
    embedding_init: InitVar[Callable] = nn.initializers.uniform(scale=1.0)
    embedding_axes: tuple[str | None, ...] = ("heads", "relpos_buckets")
    dtype: Any = jnp.float32
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, embedding_init, rngs):
        self.freeze_fields()
        shape = (self.num_attention_heads, self.num_buckets)
        self.make_param("rel_embedding", embedding_init, self.embedding_axes, shape, self.dtype, rngs)

    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> jax.Array:
        """Lengths -> biases [1, heads, q_seqlen, k_seqlen]."""
        # The buckets are the Linen module's, a pure function of its table.
        biases = linen.RelativePositionBiases(
            self.num_buckets, self.max_distance, self.num_attention_heads, parent=None
        )
        table = {"params": {"rel_embedding": array(self.rel_embedding)}}
        return biases.apply(table, q_seqlen, k_seqlen, bidirectional)
