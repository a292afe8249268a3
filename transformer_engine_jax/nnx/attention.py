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

from transformer_engine_jax.flax.attention_stages import (
    CHECKPOINT_NAMES,
    QK_NORMS,
    SCOPES,
    adapts,
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
from transformer_engine_jax.flax.base import canonical_tuple, check_positive
from transformer_engine_jax.flax.dot_product_attention import one_of
from transformer_engine_jax.initializers import default_kernel_init, flat_kernel_init
from transformer_engine_jax.nnx.base import Fp8Module, array, module
from transformer_engine_jax.nnx.dense import DenseGeneral, LayerNormDenseGeneral
from transformer_engine_jax.nnx.dot_product_attention import DotProductAttention
from transformer_engine_jax.nnx.layernorm import LayerNorm
from transformer_engine_jax.ops.attention import SequenceDescriptor
from transformer_engine_jax.ops.attention.decode import KVCache
from transformer_engine_jax.ops.dropout import Residual
from transformer_engine_jax.ops.layernorm import Norm
from transformer_engine_jax.ops.layernorm_projections import layernorm_projections
from transformer_engine_jax.precision import Product, in_fp8
from transformer_engine_jax.quantizers import keep
from transformer_engine_jax.sharding import activation_axes, constrain


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
        self.freeze_fields()
        one_of(self, "low_rank_adaptation_scope", SCOPES)
        one_of(self, "qk_norm_type", QK_NORMS)
        check_positive(self, "head_dim", "num_attention_heads", "num_gqa_groups")
        self.cached_key = self.cached_value = self.cache_index = nnx.data(None)
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
            window_size=self.window_size,
            softmax_type=self.softmax_type,
            score_mod=self.score_mod,
            checkpoint_core_attention=self.checkpoint_core_attention,
            context_parallel_causal_load_balanced=self.context_parallel_causal_load_balanced,
            context_parallel_axis=self.context_parallel_axis,
            context_parallel_strategy=self.context_parallel_strategy,
            rngs=rngs,
        )
        for name in ("query_norm", "key_norm"):
            setattr(self, name, self._make_qk_norm(rngs))
        self.out = DenseGeneral(
            self.num_attention_heads * self.head_dim,
            self.in_features,
            kernel_init=kernel_init,
            kernel_axes=("heads", "embed"),
            bias_axes=("embed",),
            input_axes=self._axes("heads"),
            output_axes=self._axes(between=True),
            **self._product_fields("output_proj", bias_init, rngs),
        )

    def _make_qk_norm(self, rngs) -> LayerNorm | None:
        if self.qk_norm_type in (None, "l2norm"):
            return nnx.data(None)
        return LayerNorm(
            self.head_dim,
            epsilon=self.qk_norm_epsilon,
            layernorm_type=self.qk_norm_type,
            zero_centered_gamma=self.zero_centered_gamma,
            scale_axes=(None,),
            bias_axes=(None,),
            dtype=self.dtype,
            rngs=rngs,
        )

    def _axes(self, features: str = "embed_activations", between: bool = False) -> tuple[str, ...]:
        """Logical axes of activations at a product or, sharded along the sequence, between products."""
        if not self.enable_sequence_parallel:
            return ()
        return activation_axes(features, transposed=self.transpose_batch_sequence, sequence_parallel=between)

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
                layernorm_input_axes=self._axes(between=True),
                dot_input_axes=self._axes(),
                **common,
            )

        def plain(features, kernel_init, axes: tuple[str, ...]):
            size = self.in_features if is_self else self.in_kv_features
            fields = dict(kernel_init=kernel_init, kernel_axes=("embed", *axes), bias_axes=axes, **common)
            return DenseGeneral(size, features, input_axes=self._axes(), **fields)

        if self.fuse_qkv_params and is_self and width_q == width_kv:
            scales = (query_scale, 1.0, 1.0)
            self.qkv = normed((3, width_q), scales, ("qkv", "heads"), self.return_layernorm_output)
            return
        self.query = normed(width_q, (query_scale,), ("heads",), self.return_layernorm_output or is_self)
        if self.fuse_qkv_params:
            self.kv = plain((2, width_kv), flat_kernel_init(init, 1, scales=(1.0, 1.0)), ("qkv", "heads"))
        else:
            self.key, self.value = plain(width_kv, init, ("heads",)), plain(width_kv, init, ("heads",))

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
            self.cached_key, self.cached_value = (nnx.Cache(jnp.zeros(shape, dtype)) for _ in range(2))

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
        turns, mask_type = rotations(self, rotary_pos_emb), attn_mask_type or self.attn_mask_type
        others = mask, bias, sequence_descriptor, decode or None
        options = self.core_attention.as_linen(attn_mask_type=mask_type).options()
        in_one = is_self and in_one_array(self, options, inputs_q, turns, others)
        results, normed, past = self._project(inputs_q, inputs_kv, residual, split=not in_one)
        results, start = [self._by_head(x) for x in results], None
        if in_one:
            results = [rotated_qkv(self, turns[0], *results)]
        else:
            sequences = sequence_descriptor if "padding" in mask_type else None
            results, start = self._turned(*results, is_self, turns, decode, sequences)
        context = self.core_attention(
            *results, sequence_descriptor=sequence_descriptor, bias=bias, mask=mask, deterministic=deterministic,
            cache_index=start if is_self else None, attn_mask_type=mask_type, qkv_layout="bs3hd" if in_one else None,
        )  # fmt: skip
        context = context.reshape(*context.shape[:2], self.num_attention_heads * self.head_dim)
        context = jnp.swapaxes(context, 0, 1) if self.transpose_batch_sequence else context
        out = self.out(context, past if residual is True else None)
        out = constrain(checkpoint_name(out, "out_proj"), self._axes(between=True))
        return residual(out, past) if callable(residual) else out, normed

    def _turned(self, query, key, value, is_self: bool, turns, decode: bool, sequences):
        """([query, key, value] turned and normed, in decoding those of the cache; the first token's place in it)."""
        start = self._advance(query.shape[1]) if decode and (is_self or turns[0] is not None) else None
        at_q, at_k = positions(query, key, start, sequences, own_order(self, is_self))
        query = self._normed_and_turned(self.query_norm, query, turns[0], at_q)
        key = self._normed_and_turned(self.key_norm, key, turns[1], at_k if is_self or start is None else None)
        if decode and is_self:
            cache = KVCache(self.cached_key.get_value(), self.cached_value.get_value(), start).append(key, value)
            key, value = cache.key, cache.value
            self.cached_key.set_value(key)
            self.cached_value.set_value(value)
        return [query, key, value], start

    def _advance(self, tokens: int) -> jax.Array:
        """The place in the cache of the first of these tokens, which are counted."""
        if self.cache_index is None:
            raise ValueError(
                "MultiHeadAttention: decode=True needs a KV cache; call init_cache(input_shape), of the greatest "
                "length, before the first token"
            )
        start = self.cache_index.get_value()
        self.cache_index.set_value(start + tokens)
        return start

    def _by_head(self, x) -> jax.Array:
        """x [B, S, .., heads * head_dim], or transposed, as [B, S, .., heads, head_dim]."""
        x = x.reshape(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)
        return jnp.swapaxes(x, 0, 1) if self.transpose_batch_sequence else x

    def _normed_and_turned(self, norm: LayerNorm | None, x, turn, at) -> jax.Array:
        if not self.qk_norm_before_rope:
            x = rotated(self, turn, x, at)
        if self.qk_norm_type is not None:
            x = l2norm(x, self.qk_norm_epsilon) if norm is None else norm(x)
        return rotated(self, turn, x, at) if self.qk_norm_before_rope else x

    def _project(self, inputs_q, inputs_kv, residual: Residual, split: bool):
        """([query, key, value], normed inputs_q or None, inputs_q or None), the first three [.., heads * head_dim].

        Not split, they are one [.., 3, heads * head_dim]. Those of self-attention share one quantized copy of the
        norm's output, where no more of it is asked for.
        """
        is_self = self.in_kv_features is None
        names = [name for name in ("qkv", "query", "kv", "key", "value") if hasattr(self, name)]
        projections = [getattr(self, name) for name in names]
        if is_self and not (self.return_layernorm_output or adapts(self.low_rank_adaptation_scope, "qkv_proj")):
            return self._project_together(inputs_q, names, projections, residual, split)
        y, normed = projections[0](inputs_q)
        source = normed if is_self else inputs_kv
        outputs = [y, *[projection(source) for projection in projections[1:]]]
        outputs = [checkpoint_name(y, CHECKPOINT_NAMES[name]) for y, name in zip(outputs, names)]
        if split:
            outputs = [part for y, p in zip(outputs, projections) for part in unstacked(y, p.features)]
        return outputs, normed if self.return_layernorm_output else None, inputs_q if residual else None

    def _project_together(self, x, names, projections, residual: Residual, split: bool):
        kernels_and_biases = [projection._kernel_and_bias() for projection in projections]
        fp8, scope = in_fp8([Product.of(x, 1, canonical_tuple(projection.features)) for projection in projections])
        quantizers, unused = zip(*[projection.gemm_quantizers("gemm", fp8) for projection in projections])
        norm = projections[0]
        with scope:
            results, past = layernorm_projections(
                x,
                array(norm.scale) if self.input_layernorm else None,
                array(norm.ln_bias) if self.input_layernorm else None,
                [kernel for kernel, _ in kernels_and_biases],
                [bias for _, bias in kernels_and_biases],
                norm_options=Norm(self.layernorm_epsilon, self.zero_centered_gamma) if self.input_layernorm else None,
                quantizers=quantizers if fp8 else None,
                return_input=bool(residual),
                split=split,
                norm_input_axes=self._axes(between=True),
                dot_input_axes=self._axes(),
                kernel_axes=[projection.kernel_axes for projection in projections],
            )
        results = named_results(results, [(name, p.features) for name, p in zip(names, projections)], split)
        return [keep(results[0], list(unused)), *results[1:]], None, past
