"""MultiHeadAttention: projections, RoPE, norms of queries and keys, the KV cache, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer_engine_jax.flax.attention_stages import (
    CHECKPOINT_NAMES,
    QK_NORMS,
    SCOPES,
    adapts,
    check_kind,
    check_ranks,
    in_one_array,
    l2norm,
    named_results,
    own_order,
    positions,
    rotated,
    rotated_qkv,
    rotations,
    unstacked,
)
from transformer_engine_jax.flax.base import (
    canonical_tuple,
    check_common,
    check_positive,
    default_kernel_init,
    flat_kernel_init,
)
from transformer_engine_jax.flax.dense import DenseGeneral, LayerNormDenseGeneral, Projection
from transformer_engine_jax.flax.dot_product_attention import DotProductAttention, one_of
from transformer_engine_jax.flax.layernorm import LayerNorm
from transformer_engine_jax.ops.attention import SequenceDescriptor
from transformer_engine_jax.ops.attention.decode import KVCache
from transformer_engine_jax.ops.dropout import Residual
from transformer_engine_jax.ops.layernorm import Norm
from transformer_engine_jax.ops.layernorm_projections import layernorm_projections
from transformer_engine_jax.precision import Product, in_fp8
from transformer_engine_jax.quantizers import keep
from transformer_engine_jax.sharding import activation_axes, constrain


class MultiHeadAttention(nn.Module):
    """Norm, projections, attention and the output projection; returns (out, the norm's output or None).

    Submodules `qkv` | `query`, `kv` | `query`, `key`, `value`, and `out`. scale_attn_logits=False leaves 1 /
    sqrt(head_dim) to the query kernel's initial value (scaled_query_init). rotary_pos_emb_windows: (min, max)
    wavelengths over 2 pi. qk_norm_type: a norm of each head's query and key, "layernorm" or "rmsnorm" (submodules
    `query_norm` and `key_norm`, zero-centred as the other) or "l2norm", which has no parameters; after RoPE, or before
    with qk_norm_before_rope; best with scale_attn_logits. enable_sequence_parallel: between the products, the sequence
    is sharded over the mesh axis of tensor parallelism. context_parallel_*: see DotProductAttention.
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
    qk_norm_type: str | None = None
    qk_norm_epsilon: float = 1e-6
    qk_norm_before_rope: bool = False
    checkpoint_core_attention: bool = False
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"

    @nn.compact
    def __call__(
        self,
        inputs_q,
        inputs_kv=None,
        mask=None,
        bias=None,
        *,
        decode: bool = False,
        deterministic: bool = False,
        sequence_descriptor: SequenceDescriptor | None = None,
        rotary_pos_emb=None,
        residual: Residual = False,
    ):
        """inputs_q [B, Sq, h], inputs_kv [B, Sk, h] -> ([B, Sq, h], normed inputs_q or None).

        Args:
          inputs_q, inputs_kv: it is self-attention, with fused projections, where inputs_kv is None or the very object
            that inputs_q is; nn.remat, nn.jit and jax.jit make two of one, so leave inputs_kv out there.
          mask: bool, broadcastable to [B, H, Sq, Sk], True is masked out; for attn_mask_type with "padding".
          bias: likewise, added to the logits.
          decode: self-attention to the KV cache, `cached_key` and `cached_value` [B, S, G, D] and `cache_index` i32[]
            in the collection "cache". init, or a first apply with mutable=["cache"], makes it, as long as its inputs;
            each apply then takes the next token, or several, which see those up to the last of them, as far as the mask
            type lets them. mask and bias are of the cache's length, [.., 1 or Sq or S, S]. Tokens past the end of the
            cache come out NaN. Of cross-attention, only RoPE heeds it.
          sequence_descriptor: the sequences of rows that are padded or packed; in place of a mask.
          rotary_pos_emb: RoPE in place of what the fields say: frequencies f32[F], F <= head_dim / 2, in radians per
            position, or angles f32[T, F] of the positions 0 to T - 1; or a pair, for queries and for keys.
          residual: add inputs_q to the result, inside the output projection; or a function that does, see Residual.

        Raises:
          ValueError: shapes or options do not fit.
        """
        one_of(self, "low_rank_adaptation_scope", SCOPES)
        one_of(self, "qk_norm_type", QK_NORMS)
        check_common(self)
        check_positive(self, "head_dim", "num_attention_heads", "num_gqa_groups")
        is_self = inputs_kv is None or inputs_kv is inputs_q
        inputs_q = jnp.asarray(inputs_q)
        inputs_kv = inputs_q if is_self else jnp.asarray(inputs_kv)
        check_ranks(inputs_q, inputs_kv)
        check_kind(self, is_self, self.variables.get("params", {}))
        turns = rotations(self, rotary_pos_emb)
        others = mask, bias, sequence_descriptor, decode or None
        in_one = is_self and in_one_array(self, self._core_attention(parent=None).options(), inputs_q, turns, others)
        results, normed, past = self._project(inputs_q, inputs_kv, residual, split=not in_one)
        results, start = [self._by_head(x) for x in results], None
        if in_one:
            results = [rotated_qkv(self, turns[0], *results)]
        else:
            results, start = self._turned(*results, is_self, turns, decode, sequence_descriptor)
        core = self._core_attention(qkv_layout="bs3hd") if in_one else self._core_attention()
        context = core(
            *results, sequence_descriptor=sequence_descriptor, bias=bias, mask=mask, deterministic=deterministic,
            cache_index=start if is_self else None,
        )  # fmt: skip
        context = context.reshape(*context.shape[:2], self.num_attention_heads * self.head_dim)
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
            input_axes=self._axes("heads"),
            output_axes=self._axes(between=True),
            name="out",
        )(
            jnp.swapaxes(context, 0, 1) if self.transpose_batch_sequence else context,
            past if residual is True else None,
        )
        out = constrain(checkpoint_name(out, "out_proj"), self._axes(between=True))
        return residual(out, past) if callable(residual) else out, normed

    def _axes(self, features: str = "embed_activations", between: bool = False) -> tuple[str, ...]:
        """Logical axes of activations at a product or, sharded along the sequence, between products."""
        if not self.enable_sequence_parallel:
            return ()
        return activation_axes(features, transposed=self.transpose_batch_sequence, sequence_parallel=between)

    def _turned(self, query, key, value, is_self: bool, turns, decode: bool, sequences):
        """([query, key, value] turned and normed, in decoding those of the cache; the first token's place in it)."""
        start, cached = None, self.has_variable("cache", "cache_index")
        if decode and (is_self or turns[0] is not None):
            index = self._cache("cache_index", (), jnp.int32)
            start = index.value
            index.value = start + (query.shape[1] if cached else 0)
        sequences = sequences if "padding" in self.attn_mask_type else None
        at_q, at_k = positions(query, key, start, sequences, own_order(self, is_self))
        query = self._normed_and_turned("query_norm", query, turns[0], at_q)
        key = self._normed_and_turned("key_norm", key, turns[1], at_k if is_self or start is None else None)
        if decode and is_self:
            key, value = self._cached(key, value, start, cached)
        return [query, key, value], start

    def _by_head(self, x) -> jax.Array:
        """x [B, S, .., heads * head_dim], or transposed, as [B, S, .., heads, head_dim]."""
        x = x.reshape(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)
        return jnp.swapaxes(x, 0, 1) if self.transpose_batch_sequence else x

    def _normed_and_turned(self, name: str, x, turn, at) -> jax.Array:
        if not self.qk_norm_before_rope:
            x = rotated(self, turn, x, at)
        if self.qk_norm_type == "l2norm":
            x = l2norm(x, self.qk_norm_epsilon)
        elif self.qk_norm_type is not None:
            x = LayerNorm(
                epsilon=self.qk_norm_epsilon,
                layernorm_type=self.qk_norm_type,
                zero_centered_gamma=self.zero_centered_gamma,
                scale_axes=(None,),
                bias_axes=(None,),
                dtype=self.dtype,
                name=name,
            )(x)
        return rotated(self, turn, x, at) if self.qk_norm_before_rope else x

    def _cache(self, name: str, shape, dtype) -> nn.Variable:
        if not self.is_mutable_collection("cache"):
            raise ValueError(
                "MultiHeadAttention: decode=True writes the KV cache, but the collection is not mutable; call "
                "apply(variables, ..., decode=True, mutable=['cache']), with the 'cache' that init(..., decode=True) "
                "makes for inputs of the greatest length"
            )
        return self.variable("cache", name, jnp.zeros, shape, dtype)

    def _cached(self, key, value, start, cached: bool):
        """Keys and values of the cache with these in it; the call that makes the cache leaves it empty."""
        variables = [self._cache(f"cached_{n}", x.shape, x.dtype) for n, x in (("key", key), ("value", value))]
        if not cached:
            return key, value
        cache = KVCache(*[v.value for v in variables], start).append(key, value)
        variables[0].value, variables[1].value = cache.key, cache.value
        return cache.key, cache.value

    @nn.nowrap
    def _core_attention(self, **fields) -> DotProductAttention:
        return DotProductAttention(
            head_dim=self.head_dim,
            num_attention_heads=self.num_attention_heads,
            num_gqa_groups=self.num_gqa_groups,
            attention_dropout=self.attention_dropout,
            attn_mask_type=self.attn_mask_type,
            attn_bias_type=self.attn_bias_type,
            dropout_rng_name=self.dropout_rng_name,
            float32_logits=self.float32_logits,
            scale_factor=None if self.scale_attn_logits else 1.0,
            window_size=self.window_size,
            softmax_type=self.softmax_type,
            score_mod=self.score_mod,
            checkpoint_core_attention=self.checkpoint_core_attention,
            context_parallel_causal_load_balanced=self.context_parallel_causal_load_balanced,
            context_parallel_axis=self.context_parallel_axis,
            context_parallel_strategy=self.context_parallel_strategy,
            **{"name": "core_attention", **fields},
        )

    def _project(self, inputs_q, inputs_kv, residual: Residual, split: bool):
        """([query, key, value], normed inputs_q or None, inputs_q or None), the first three [.., heads * head_dim].

        Not split, they are one [.., 3, heads * head_dim]. Those of self-attention share one quantized copy of the
        norm's output, where no more of it is asked for.
        """
        is_self = inputs_q is inputs_kv
        layout = self._layout(is_self)
        if is_self and not (self.return_layernorm_output or adapts(self.low_rank_adaptation_scope, "qkv_proj")):
            return self._project_together(inputs_q, layout, residual, split)
        (name, features, init), *others = layout
        wants_norm = self.return_layernorm_output or (is_self and bool(others))
        first = self._projection(
            LayerNormDenseGeneral, name, features, init,
            layernorm_input_axes=self._axes(between=True), dot_input_axes=self._axes(),
            return_layernorm_output=wants_norm, **self._norm_fields,
        )  # fmt: skip
        y, normed = first(inputs_q)
        outputs = [checkpoint_name(y, CHECKPOINT_NAMES[name])]
        source = normed if is_self else inputs_kv
        for name, features, init in others:
            y = self._projection(DenseGeneral, name, features, init, input_axes=self._axes())(source)
            outputs.append(checkpoint_name(y, CHECKPOINT_NAMES[name]))
        if split:
            outputs = [part for y, (_, features, _) in zip(outputs, layout) for part in unstacked(y, features)]
        return outputs, normed if self.return_layernorm_output else None, inputs_q if residual else None

    @nn.nowrap
    def _project_together(self, x, layout, residual: Residual, split: bool):
        fp8, scope = in_fp8([Product.of(x, 1, canonical_tuple(features)) for _, features, _ in layout])
        fields = [self._norm_fields, *[{"enable_layernorm": False}] * (len(layout) - 1)]
        parts = [
            self._projection(Projection, *of, inputs=x.shape[-1], fp8=fp8, **norm).parts
            for of, norm in zip(layout, fields)
        ]
        with scope:
            results, past = layernorm_projections(
                x,
                parts[0].gamma,
                parts[0].beta,
                [part.kernel for part in parts],
                [part.bias for part in parts],
                norm_options=Norm(self.layernorm_epsilon, self.zero_centered_gamma) if self.input_layernorm else None,
                quantizers=[part.quantizers for part in parts] if fp8 else None,
                return_input=bool(residual),
                split=split,
                norm_input_axes=self._axes(between=True),
                dot_input_axes=self._axes(),
                kernel_axes=[part.kernel_axes for part in parts],
            )
        results = named_results(results, [(name, features) for name, features, _ in layout], split)
        return [keep(results[0], [part.unused for part in parts]), *results[1:]], None, past

    @nn.nowrap
    def _layout(self, is_self: bool) -> list[tuple[str, int | tuple[int, int], Callable]]:
        """(name, features, kernel_init) of each projection."""
        width_q = self.num_attention_heads * self.head_dim
        width_kv = (self.num_gqa_groups or self.num_attention_heads) * self.head_dim
        init = self.kernel_init or default_kernel_init
        scaled = self.scaled_query_init and not self.scale_attn_logits
        query_scale = float(self.head_dim**-0.5) if scaled else 1.0
        if self.fuse_qkv_params and is_self and width_q == width_kv:
            return [("qkv", (3, width_q), flat_kernel_init(init, 1, scales=(query_scale, 1.0, 1.0)))]
        query = ("query", width_q, flat_kernel_init(init, 1, scales=(query_scale,)))
        if self.fuse_qkv_params:
            return [query, ("kv", (2, width_kv), flat_kernel_init(init, 1, scales=(1.0, 1.0)))]
        return [query, ("key", width_kv, init), ("value", width_kv, init)]

    @property
    def _norm_fields(self) -> dict[str, Any]:
        return dict(
            enable_layernorm=self.input_layernorm,
            layernorm_type=self.layernorm_type,
            epsilon=self.layernorm_epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
        )

    @nn.nowrap
    def _projection(self, module: type, name: str, features, kernel_init, **fields):
        stacked = isinstance(features, tuple)
        return module(
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
            **fields,
        )
