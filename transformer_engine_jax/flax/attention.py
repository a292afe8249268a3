"""MultiHeadAttention with RoPE, and T5's RelativePositionBiases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from transformer_engine_jax.flax.base import default_kernel_init, flat_kernel_init
from transformer_engine_jax.flax.dense import DenseGeneral, LayerNormDenseGeneral
from transformer_engine_jax.flax.dot_product_attention import DotProductAttention, one_of
from transformer_engine_jax.ops.rope import rope, rope_frequencies

SCOPES = ("none", "all", *(f"{how}{what}" for how in ("", "exclude_") for what in ("qkv_proj", "output_proj", "mlp")))


def adapts(scope: str, projection: str) -> bool:
    """Whether a low_rank_adaptation_scope, one of SCOPES, gives this projection its LoRA branch."""
    return scope in ("all", projection) or (scope.startswith("exclude_") and scope != f"exclude_{projection}")


class MultiHeadAttention(nn.Module):
    """Norm, projections, attention and the output projection; returns (out, the norm's output or None).

    Submodules `qkv` | `query`, `kv` | `query`, `key`, `value`, and `out`. scale_attn_logits=False leaves 1 /
    sqrt(head_dim) to the query kernel's initial value (scaled_query_init). rotary_pos_emb_windows: (min, max)
    wavelengths over 2 pi.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    dropout_rng_name: str = "dropout"
    input_layernorm: bool = True
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    kernel_init: Callable | None = None
    use_bias: bool = False
    bias_init: Callable = nn.initializers.zeros
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

    @nn.compact
    def __call__(
        self, inputs_q, inputs_kv=None, mask=None, bias=None, *, decode: bool = False, deterministic: bool = False
    ):
        """inputs_q [B, Sq, h], inputs_kv [B, Sk, h] -> ([B, Sq, h], normed inputs_q or None).

        Self-attention, whose projections are fused, where inputs_kv is None or the very object that inputs_q is.
        """
        one_of(self, "low_rank_adaptation_scope", SCOPES)
        one_of(self, "enable_sequence_parallel", (False,), " (not available yet)")
        if decode:
            raise ValueError("MultiHeadAttention: decode=True, a KV cache, is not available yet")
        is_self = inputs_kv is None or inputs_kv is inputs_q
        inputs_q = jnp.asarray(inputs_q)
        inputs_kv = inputs_q if is_self else jnp.asarray(inputs_kv)
        query, key, value, normed = self._project(inputs_q, inputs_kv)

        def heads(x, count):
            return x.reshape(*x.shape[:-1], count, self.head_dim)

        groups = self.num_gqa_groups or self.num_attention_heads
        query, key, value = heads(query, self.num_attention_heads), heads(key, groups), heads(value, groups)
        if self.enable_rotary_pos_emb:
            query, key = self._rotate(query), self._rotate(key)
        context = DotProductAttention(
            head_dim=self.head_dim,
            num_attention_heads=self.num_attention_heads,
            num_gqa_groups=groups,
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
            name="core_attention",
        )(query, key, value, bias=bias, mask=mask, deterministic=deterministic)
        context = context.reshape(*context.shape[:-2], self.num_attention_heads * self.head_dim)
        out = DenseGeneral(
            features=inputs_q.shape[-1],
            kernel_init=self.kernel_init,
            kernel_axes=("heads", "embed"),
            use_bias=self.use_bias,
            bias_init=self.bias_init,
            bias_axes=("embed",),
            enable_low_rank_adaptation=adapts(self.low_rank_adaptation_scope, "output_proj"),
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha,
            dtype=self.dtype,
            name="out",
        )(context)
        return checkpoint_name(out, "out_proj"), normed

    def _rotate(self, x):
        x = jnp.swapaxes(x, 0, 1) if self.transpose_batch_sequence else x
        x = rope(
            x, rope_frequencies(self.head_dim, self.rotary_pos_emb_windows), group=self.rotary_pos_emb_group_method
        )
        return jnp.swapaxes(x, 0, 1) if self.transpose_batch_sequence else x

    def _project(self, inputs_q, inputs_kv):
        """(query, key, value, normed inputs_q or None), the first three [.., heads * head_dim]."""
        width_q = self.num_attention_heads * self.head_dim
        width_kv = (self.num_gqa_groups or self.num_attention_heads) * self.head_dim
        init = self.kernel_init or default_kernel_init
        scaled = self.scaled_query_init and not self.scale_attn_logits
        query_scale = float(self.head_dim**-0.5) if scaled else 1.0
        is_self = inputs_q is inputs_kv

        def product(name: str, features, kernel_init, *, normed: bool, wants_norm: bool = False):
            stacked = isinstance(features, tuple)
            fields: dict[str, Any] = dict(
                features=features,
                kernel_init=kernel_init,
                kernel_axes=("embed", "qkv", "heads") if stacked else ("embed", "heads"),
                use_bias=self.use_bias,
                bias_init=self.bias_init,
                bias_axes=("qkv", "heads") if stacked else ("heads",),
                enable_low_rank_adaptation=adapts(self.low_rank_adaptation_scope, "qkv_proj"),
                low_rank_adaptation_dim=self.low_rank_adaptation_dim,
                low_rank_adaptation_alpha=self.low_rank_adaptation_alpha,
                dtype=self.dtype,
                name=name,
            )
            if not normed:
                return DenseGeneral(**fields)
            return LayerNormDenseGeneral(
                **fields,
                enable_layernorm=self.input_layernorm,
                layernorm_type=self.layernorm_type,
                epsilon=self.layernorm_epsilon,
                zero_centered_gamma=self.zero_centered_gamma,
                return_layernorm_output=wants_norm,
            )

        query_init = flat_kernel_init(init, 1, scales=(query_scale,))
        if self.fuse_qkv_params and is_self and width_q == width_kv:
            qkv_init = flat_kernel_init(init, 1, scales=(query_scale, 1.0, 1.0))
            qkv, normed = product("qkv", (3, width_q), qkv_init, normed=True, wants_norm=self.return_layernorm_output)(
                inputs_q
            )
            qkv = checkpoint_name(qkv, "combined_qkv_proj")
            return qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :], normed
        wants_norm = self.return_layernorm_output or is_self
        query, normed = product("query", width_q, query_init, normed=True, wants_norm=wants_norm)(inputs_q)
        source = normed if is_self else inputs_kv
        if self.fuse_qkv_params:
            kv_init = flat_kernel_init(init, 1, scales=(1.0, 1.0))
            kv = checkpoint_name(product("kv", (2, width_kv), kv_init, normed=False)(source), "combined_kv_proj")
            key, value = kv[..., 0, :], kv[..., 1, :]
        else:
            key = checkpoint_name(product("key", width_kv, init, normed=False)(source), "key_proj")
            value = checkpoint_name(product("value", width_kv, init, normed=False)(source), "value_proj")
        query = checkpoint_name(query, "query_proj")
        return query, key, value, normed if self.return_layernorm_output else None


class RelativePositionBiases(nn.Module):
    """T5's relative position biases (Raffel et al., 2019); param `rel_embedding` [heads, num_buckets]."""

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Callable = nn.initializers.uniform(scale=1.0)
    embedding_axes: tuple[str | None, ...] = ("heads", "relpos_buckets")
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> jax.Array:
        """Lengths -> biases [1, heads, q_seqlen, k_seqlen]."""
        init = nn.with_logical_partitioning(self.embedding_init, self.embedding_axes)
        table = self.param("rel_embedding", init, (self.num_attention_heads, self.num_buckets), self.dtype)
        distance = np.arange(k_seqlen)[None, :] - np.arange(q_seqlen)[:, None]
        return jnp.take(table, self._bucket(distance, bidirectional), axis=1)[None]

    def _bucket(self, distance: np.ndarray, bidirectional: bool) -> np.ndarray:
        """Half of the buckets count small distances exactly, the others grow with their logarithm."""
        buckets, first = self.num_buckets, np.zeros_like(distance)
        if bidirectional:
            buckets //= 2
            first = np.where(distance > 0, buckets, 0)
            distance = np.abs(distance)
        else:
            distance = np.maximum(-distance, 0)
        exact = buckets // 2
        ratio = np.log(np.maximum(distance, 1) / exact) / np.log(self.max_distance / exact)
        far = np.minimum(exact + (ratio * (buckets - exact)).astype(np.int32), buckets - 1)
        return first + np.where(distance < exact, distance, far)
