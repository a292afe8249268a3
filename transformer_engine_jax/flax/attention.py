"""MultiHeadAttention: projections, RoPE, norms of queries and keys, the KV cache, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer_engine_jax.flax.base import SHAPES_ALONE, Fp8Module
from transformer_engine_jax.flax.dense import DenseGeneral, LayerNormDenseGeneral, LayerNormDenseParts
from transformer_engine_jax.flax.dot_product_attention import DotProductAttention
from transformer_engine_jax.flax.layernorm import LayerNorm
from transformer_engine_jax.modules.attention import (
    axes_of,
    by_head,
    check_kind,
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
from transformer_engine_jax.modules.checks import check_common, check_positive
from transformer_engine_jax.modules.dense import ProjectionParts
from transformer_engine_jax.ops.attention import SequenceDescriptor
from transformer_engine_jax.ops.attention.decode import KVCache
from transformer_engine_jax.ops.dropout import Residual
from transformer_engine_jax.sharding import constrain


class MultiHeadAttention(Fp8Module):
    """Norm, projections, attention and the output projection; returns (out, the norm's output or None).

    With return_layernorm_output and no norm the second is inputs_q. Submodules `qkv` | `query`, `kv` | `query`, `key`,
    `value`, `out`, and `core_attention` where that has an offset or a state. scale_attn_logits=False leaves
    1 / sqrt(head_dim) to the query kernel's initial value (scaled_query_init). rotary_pos_emb_windows: (min, max)
    wavelengths over 2 pi; rotary_pos_emb_group_method: "consecutive" turns features 2i and 2i + 1 together, "alternate"
    i and i + head_dim / 2. low_rank_adaptation_scope: LoRA of "none", "all", "qkv_proj" or "output_proj", or of all but
    one, "exclude_qkv_proj" or "exclude_output_proj". qk_norm_type: a norm of each head's query and key, "layernorm" or
    "rmsnorm" (submodules `query_norm` and `key_norm`, zero-centred as the other) or "l2norm", which has no parameters;
    after RoPE, or before with qk_norm_before_rope; best with scale_attn_logits. enable_sequence_parallel: between the
    products, the sequence is sharded over the mesh axis of tensor parallelism. context_parallel_*: see
    DotProductAttention. dtype: of the parameters; all is computed in the inputs'.
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
          mask: bool, four axes that broadcast to [B, H, Sq, Sk], True is masked out; for attn_mask_type with "padding".
          bias: likewise, added to the logits.
          decode: self-attention to the KV cache, `cached_key` and `cached_value` [B, S, G, D] and `cache_index` i32[]
            in the collection "cache". init makes it, empty and as long as its inputs; each apply, with
            mutable=["cache"], then takes the next token, or several, which see those up to the last of them, as far as
            the mask type lets them. mask and bias are of the cache's length, [.., 1 or Sq or S, S]. Tokens past the end
            of the cache come out NaN. Of cross-attention, only RoPE heeds it.
          sequence_descriptor: the sequences of rows that are padded or packed; in place of a mask.
          rotary_pos_emb: RoPE in place of what the fields say: frequencies f32[F], F <= head_dim / 2, in radians per
            position, or angles f32[T, F] of the positions 0 to T - 1; or a pair, for queries and for keys.
          residual: add inputs_q to the result, inside the output projection; or a function that does, see Residual.

        Raises:
          ValueError: shapes or options do not fit.
          TypeError: a SequenceDescriptor in place of mask or bias.
        """
        check_common(self)
        check_positive(self, "head_dim", "num_attention_heads", "num_gqa_groups")
        is_self = inputs_kv is None or inputs_kv is inputs_q
        inputs_q = jnp.asarray(inputs_q)
        inputs_kv = inputs_q if is_self else jnp.asarray(inputs_kv)
        check_ranks(inputs_q, inputs_kv)
        check_kind(self, is_self, self.variables.get("params", {}))
        if decode and not is_self and self.has_variable("cache", "cached_key"):
            raise ValueError(
                "MultiHeadAttention: inputs_kv: expected none, or inputs_q itself, with a KV cache of self-attention, "
                "got another array; leave it out, since nn.remat, nn.jit and jax.jit make two arrays of one"
            )
        turns = rotations(self, rotary_pos_emb)
        others = mask, bias, sequence_descriptor, decode or None
        in_one = is_self and in_one_array(self, self._core_attention(parent=None).options(), inputs_q, turns, others)
        results, normed, past = self._project(inputs_q, inputs_kv, residual, split=not in_one)
        results, start = [by_head(self, x) for x in results], None
        if in_one:
            results = [rotated_qkv(self, turns[0], *results)]
        else:
            results, start = self._turned(*results, is_self, turns, decode, sequence_descriptor)
        core = self._core_attention(qkv_layout="bs3hd") if in_one else self._core_attention()
        context = core(
            *results, sequence_descriptor=sequence_descriptor, bias=bias, mask=mask, deterministic=deterministic,
            cache_index=start if is_self else None,
        )  # fmt: skip
        out = DenseGeneral(
            inputs_q.shape[-1], self.kernel_init, bias_init=self.bias_init, name="out", **output_fields(self)
        )(heads_joined(self, context), past if residual is True else None)
        out = constrain(checkpoint_name(out, "out_proj"), axes_of(self, between=True))
        return residual(out, past) if callable(residual) else out, normed

    def _turned(self, query, key, value, is_self: bool, turns, decode: bool, sequences):
        """([query, key, value] turned and normed, in decoding those of the cache; the first token's place in it)."""
        start, cache = None, {}
        if decode and (is_self or turns[0] is not None):
            held = dict(cached_key=key, cached_value=value) if is_self else {}
            cache = self._cache(cache_index=jnp.zeros((), jnp.int32), **held)
            start = cache["cache_index"].value
        filled = bool(cache) and not self.is_initializing()  # init leaves it empty
        if filled:
            cache["cache_index"].value = start + query.shape[1]
        sequences = sequences if "padding" in self.attn_mask_type else None
        at_q, at_k = positions(query, key, start, sequences, own_order(self, is_self))
        query = normed_and_turned(self, self._qk_norm("query_norm"), query, turns[0], at_q)
        at_k = at_k if is_self or start is None else None
        key = normed_and_turned(self, self._qk_norm("key_norm"), key, turns[1], at_k)
        if filled and is_self:
            now = KVCache(cache["cached_key"].value, cache["cached_value"].value, start).append(key, value)
            cache["cached_key"].value, cache["cached_value"].value = key, value = now.key, now.value
        return [query, key, value], start

    @nn.nowrap
    def _qk_norm(self, name: str) -> LayerNorm | None:
        if self.qk_norm_type in (None, "l2norm"):
            return self.check_absent("qk_norm_type", name)
        return LayerNorm(name=name, **qk_norm_fields(self))

    def _cache(self, **like) -> dict[str, nn.Variable]:
        """The variables of the cache, which init makes as zeros, on a mesh sharded by examples and heads."""
        there = [name for name in like if self.has_variable("cache", name)]
        made, mutable = self.is_initializing() or SHAPES_ALONE.value is not None, self.is_mutable_collection("cache")
        if not mutable or not (made or len(there) == len(like)):
            got = f"{there or 'none'}{'' if mutable else ', not mutable'}"
            raise ValueError(
                f"MultiHeadAttention: decode=True needs a KV cache, {sorted(like)} in a collection that is mutable, "
                f"got {got}; take it from init(..., decode=True) with inputs of the greatest length, and call "
                "apply({**variables, 'cache': cache}, ..., decode=True, mutable=['cache'])"
            )
        empty = lambda x: constrain(jnp.zeros_like(x), ("batch", None, "heads", None)[: x.ndim])
        return {name: self.variable("cache", name, empty, x) for name, x in like.items()}

    @nn.nowrap
    def _core_attention(self, **fields) -> DotProductAttention:
        return DotProductAttention(**core_fields(self) | {"name": "core_attention"} | fields)

    def _project(self, inputs_q, inputs_kv, residual: Residual, split: bool):
        """As modules.attention.project."""
        is_self = inputs_q is inputs_kv
        layout = projections(self, self.kernel_init, is_self)

        def modules() -> list[nn.Module]:
            kinds = [LayerNormDenseGeneral, *[DenseGeneral] * (len(layout) - 1)]
            return [
                kind(p.features, bias_init=self.bias_init, name=p.name, **p.product, **p.source)
                for kind, p in zip(kinds, layout)
            ]

        def parts(fp8: bool) -> list[ProjectionParts]:
            common = dict(inputs=inputs_q.shape[-1], fp8=fp8, bias_init=self.bias_init)
            norms = [layout[0].source, *[dict(enable_layernorm=False)] * (len(layout) - 1)]
            return [
                LayerNormDenseParts(p.features, name=p.name, **common, **p.product, **norm).parts()
                for p, norm in zip(layout, norms)
            ]

        names = [(p.name, p.features) for p in layout]
        return project(self, inputs_q, inputs_kv, is_self, names, modules, parts, residual, split)
