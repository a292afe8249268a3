"""MultiHeadAttention: projections, what is done to queries and keys, the core of it; checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer_engine_jax.autocast import current
from transformer_engine_jax.initializers import default_kernel_init, flat_kernel_init
from transformer_engine_jax.modules.checks import canonical_tuple
from transformer_engine_jax.modules.dense import ProjectionParts
from transformer_engine_jax.ops.attention import Attention, SequenceDescriptor
from transformer_engine_jax.ops.attention.context_parallel import ContextParallel, places_in_order
from transformer_engine_jax.ops.attention.cudnn import reads_qkv
from transformer_engine_jax.ops.dropout import Residual
from transformer_engine_jax.ops.layernorm import Norm
from transformer_engine_jax.ops.layernorm_projections import layernorm_projections
from transformer_engine_jax.ops.rope import rope, rope_frequencies, rope_qkv, rope_table
from transformer_engine_jax.precision import Product, in_fp8
from transformer_engine_jax.quantizers import keep
from transformer_engine_jax.sharding import activation_axes, with_whole_heads, with_whole_parts

CHECKPOINT_NAMES = {
    "qkv": "combined_qkv_proj",
    "kv": "combined_kv_proj",
    "query": "query_proj",
    "key": "key_proj",
    "value": "value_proj",
}


def adapts(scope: str, projection: str) -> bool:
    """Whether a low_rank_adaptation_scope, one of SCOPES, gives this projection its LoRA branch."""
    return scope in ("all", projection) or (scope.startswith("exclude_") and scope != f"exclude_{projection}")


def check_ranks(inputs_q, inputs_kv) -> None:
    """ValueError where the inputs of a MultiHeadAttention are not of rank 3."""
    for name, x in (("inputs_q", inputs_q), ("inputs_kv", inputs_kv)):
        if x.ndim != 3:
            raise ValueError(f"MultiHeadAttention: {name}: expected [B, S, features], got {list(x.shape)}")


def fuses_qkv(module) -> bool:
    """Whether queries, keys and values of self-attention are one product."""
    return module.fuse_qkv_params and module.num_gqa_groups in (None, module.num_attention_heads)


def check_kind(module, is_self: bool, params) -> None:
    """ValueError where the parameters are those of self-attention and the call is not, or the other way round."""
    if fuses_qkv(module) and params and ("qkv" in params) != is_self:
        made, got = ("self", "one that is another object") if "qkv" in params else ("cross", "none, or inputs_q itself")
        raise ValueError(
            f"MultiHeadAttention: inputs_kv: expected what fits parameters of {made}-attention, {sorted(params)}, got "
            f"{got}; leave it out for self-attention, since nn.remat, nn.jit and jax.jit make two arrays of one"
        )


def rotations(module, rotary_pos_emb) -> tuple:
    """What turns the queries and what turns the keys of a MultiHeadAttention, None for nothing.

    rotary_pos_emb: frequencies f32[F], angles f32[T, F], a pair of them, or None for what the module's fields say.
    """
    if rotary_pos_emb is None and module.enable_rotary_pos_emb:
        if module.head_dim % 2:
            raise ValueError(
                "MultiHeadAttention.head_dim: expected an even size for RoPE, which turns pairs of features, got "
                f"{module.head_dim}; give rotary_pos_emb of {module.head_dim // 2} frequencies to leave one as it is"
            )
        rotary_pos_emb = rope_frequencies(module.head_dim, module.rotary_pos_emb_windows)
    pair = rotary_pos_emb if isinstance(rotary_pos_emb, tuple | list) else (rotary_pos_emb, rotary_pos_emb)
    if len(pair) != 2 or any(x is not None and jnp.ndim(x) not in (1, 2) for x in pair):
        raise ValueError(
            "MultiHeadAttention: rotary_pos_emb: expected frequencies [F] or angles [T, F], or a pair of them for "
            f"queries and keys, got {[list(jnp.shape(x)) for x in pair]}"
        )
    return tuple(pair)


def rotated(module, rotation, x, positions) -> jax.Array:
    """x [B, S, heads, head_dim], turned by one of the `rotations` where its tokens stand; None counts from 0."""
    if rotation is None:
        return x
    turn = rope if jnp.ndim(rotation) == 1 else rope_table
    return turn(x, rotation, positions=positions, group=module.rotary_pos_emb_group_method)


def rotated_qkv(module, frequencies, qkv) -> jax.Array:
    """qkv [B, S, 3, heads, head_dim], its queries and keys turned, counting from 0; as it is without frequencies."""
    if frequencies is None:
        return qkv
    return rope_qkv(qkv, frequencies, group=module.rotary_pos_emb_group_method)


def context_parallel(module) -> ContextParallel | None:
    """How the sequence is sharded, by the fields of an attention module; None where no mesh axis shards it."""
    axis, strategy = module.context_parallel_axis, module.context_parallel_strategy
    balanced = module.context_parallel_causal_load_balanced
    if axis:
        return ContextParallel(axis, strategy, balanced)
    if strategy != "DEFAULT" or balanced:
        raise ValueError(
            f"{type(module).__name__}.context_parallel_axis: expected the mesh axis that shards the sequence, for "
            f"context_parallel_strategy={strategy!r} and context_parallel_causal_load_balanced={balanced}, got ''"
        )
    return None


def own_order(module, is_self: bool) -> ContextParallel | None:
    """The context parallelism that stores tokens in an order of its own, None where they come one after another."""
    parallel = context_parallel(module)
    if parallel is None or not parallel.load_balanced:
        return None
    if not is_self:
        raise ValueError(
            "MultiHeadAttention.context_parallel_causal_load_balanced: expected False in cross-attention, which has no "
            "causality to balance"
        )
    return parallel


def positions(query, key, start, sequences: SequenceDescriptor | None, order: ContextParallel | None) -> tuple:
    """Where queries [B, Sq, ..] and keys [B, Sk, ..] stand: i32[S] or [B, S]; None counts from 0.

    start: place in the KV cache of the first token, or None. sequences: with one, positions in them. order: of
    own_order.
    """
    lengths = query.shape[1], key.shape[1]
    if isinstance(sequences, SequenceDescriptor):
        sequences.check(query.shape[0], *lengths)
        found = places_in_order(order, sequences, *lengths, Attention(scale=1.0, causal=True))
        return tuple(side.position for side in found)
    if order is not None:
        return tuple(side.position[0] for side in places_in_order(order, None, *lengths, Attention(scale=1.0)))
    return tuple(None if start is None else start + jnp.arange(n, dtype=jnp.int32) for n in lengths)


def in_one_array(module, options: Attention, x, turns, others: Sequence) -> bool:
    """Whether queries, keys and values of self-attention to x [B, S, features] stay in the array that a product gives.

    options: of the attention. turns: of `rotations`. others: what else is said of the parts; None for nothing.
    """
    heads, recipe = module.num_attention_heads, current().recipe
    fused = fuses_qkv(module) and turns[0] is turns[1] and (turns[0] is None or jnp.ndim(turns[0]) == 1)
    apart = module.transpose_batch_sequence or module.qk_norm_type or module.context_parallel_axis
    apart = apart or (recipe is not None and recipe.fp8_dpa)
    if not fused or apart or any(other is not None for other in others):
        return False
    return reads_qkv(options, jax.ShapeDtypeStruct((*x.shape[:2], heads, module.head_dim), x.dtype))


def l2norm(x, epsilon: float) -> jax.Array:
    """x[.., D] / sqrt(sum of squares + epsilon), in f32 arithmetic."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide**2, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def normed_and_turned(module: Any, norm: Callable | None, x, turn, at) -> jax.Array:
    """Queries or keys x [B, S, heads, head_dim] after `norm` and the rotation `turn`, in the order of the fields.

    norm: of the features of a head, where it has parameters. at: where the tokens stand, as `rotated` takes it.
    """
    if not module.qk_norm_before_rope:
        x = rotated(module, turn, x, at)
    if module.qk_norm_type is not None:
        x = l2norm(x, module.qk_norm_epsilon) if norm is None else norm(x)
    return rotated(module, turn, x, at) if module.qk_norm_before_rope else x


def by_head(module: Any, x) -> jax.Array:
    """x [B, S, .., heads * head_dim], or transposed, as [B, S, .., heads, head_dim]."""
    heads = x.shape[-1] // module.head_dim
    x = with_whole_parts(x, heads).reshape(*x.shape[:-1], heads, module.head_dim)
    x = with_whole_heads(x, x.ndim - 2)
    return jnp.swapaxes(x, 0, 1) if module.transpose_batch_sequence else x


def heads_joined(module: Any, context) -> jax.Array:
    """context [B, S, heads, head_dim] as [B, S, heads * head_dim], or transposed."""
    context = with_whole_heads(context, 2)
    context = context.reshape(*context.shape[:2], module.num_attention_heads * module.head_dim)
    return jnp.swapaxes(context, 0, 1) if module.transpose_batch_sequence else context


def axes_of(module: Any, features: str = "embed_activations", between: bool = False) -> tuple[str, ...]:
    """Logical axes of activations at a product or, sharded along the sequence, between products."""
    if not module.enable_sequence_parallel:
        return ()
    return activation_axes(features, transposed=module.transpose_batch_sequence, sequence_parallel=between)


# --- Fields that a MultiHeadAttention hands down ---------------------------------------------------------------------


def core_fields(module: Any) -> dict[str, Any]:
    """Of its DotProductAttention."""
    return dict(
        head_dim=module.head_dim,
        num_attention_heads=module.num_attention_heads,
        num_gqa_groups=module.num_gqa_groups,
        attention_dropout=module.attention_dropout,
        attn_mask_type=module.attn_mask_type,
        attn_bias_type=module.attn_bias_type,
        dropout_rng_name=module.dropout_rng_name,
        float32_logits=module.float32_logits,
        scale_factor=None if module.scale_attn_logits else 1.0,
        window_size=module.window_size,
        softmax_type=module.softmax_type,
        score_mod=module.score_mod,
        checkpoint_core_attention=module.checkpoint_core_attention,
        context_parallel_causal_load_balanced=module.context_parallel_causal_load_balanced,
        context_parallel_axis=module.context_parallel_axis,
        context_parallel_strategy=module.context_parallel_strategy,
    )


def qk_norm_fields(module: Any) -> dict[str, Any]:
    """Of the LayerNorm of queries or keys."""
    return dict(
        epsilon=module.qk_norm_epsilon,
        layernorm_type=module.qk_norm_type,
        zero_centered_gamma=module.zero_centered_gamma,
        scale_axes=(None,),
        bias_axes=(None,),
        dtype=module.dtype,
    )


def _product_fields(module: Any, projection: str) -> dict[str, Any]:
    return dict(
        use_bias=module.use_bias,
        enable_low_rank_adaptation=adapts(module.low_rank_adaptation_scope, projection),
        low_rank_adaptation_dim=module.low_rank_adaptation_dim,
        low_rank_adaptation_alpha=module.low_rank_adaptation_alpha,
        dtype=module.dtype,
    )


def output_fields(module: Any) -> dict[str, Any]:
    """Of the DenseGeneral of the output."""
    return dict(
        kernel_axes=("heads", "embed"),
        bias_axes=("embed",),
        input_axes=axes_of(module, "heads"),
        output_axes=axes_of(module, between=True),
        **_product_fields(module, "output_proj"),
    )


# --- Projections -----------------------------------------------------------------------------------------------------


class Projection(NamedTuple):
    """One product that gives queries, keys, values, or several of them."""

    name: str
    features: int | tuple[int, int]  # (how many, size of each), or one size
    product: dict[str, Any]  # fields of its DenseGeneral or, where it is the first, LayerNormDenseGeneral
    source: dict[str, Any]  # more of them, of what comes before the product


def projections(module: Any, kernel_init: Callable | None, is_self: bool) -> list[Projection]:
    """`qkv`, or `query` and `kv`, or `query`, `key` and `value`; the first of them has the norm."""
    width_q = module.num_attention_heads * module.head_dim
    width_kv = (module.num_gqa_groups or module.num_attention_heads) * module.head_dim
    init = kernel_init or default_kernel_init
    scaled = module.scaled_query_init and not module.scale_attn_logits
    query_scale = float(module.head_dim**-0.5) if scaled else 1.0
    fused = lambda *scales: flat_kernel_init(init, 1, scales=scales)
    if is_self and fuses_qkv(module):
        layout = [("qkv", (3, width_q), fused(query_scale, 1.0, 1.0))]
    elif module.fuse_qkv_params:
        layout = [("query", width_q, fused(query_scale)), ("kv", (2, width_kv), fused(1.0, 1.0))]
    else:
        layout = [("query", width_q, fused(query_scale)), ("key", width_kv, init), ("value", width_kv, init)]
    first = dict(
        enable_layernorm=module.input_layernorm,
        layernorm_type=module.layernorm_type,
        epsilon=module.layernorm_epsilon,
        zero_centered_gamma=module.zero_centered_gamma,
        return_layernorm_output=module.return_layernorm_output or (is_self and len(layout) > 1),
        layernorm_input_axes=axes_of(module, between=True),
        dot_input_axes=axes_of(module),
    )
    found = []
    for name, features, init in layout:
        axes = ("qkv", "heads") if isinstance(features, tuple) else ("heads",)
        product = dict(kernel_init=init, kernel_axes=("embed", *axes), bias_axes=axes)
        source = dict(input_axes=axes_of(module)) if found else first
        found.append(Projection(name, features, product | _product_fields(module, "qkv_proj"), source))
    return found


def project(
    module: Any,
    inputs_q,
    inputs_kv,
    is_self: bool,
    layout: Sequence[tuple[str, int | tuple[int, int]]],
    modules: Callable[[], Sequence[Callable]],
    parts: Callable[[bool], Sequence[ProjectionParts]],
    residual: Residual,
    split: bool,
) -> tuple[list[jax.Array], jax.Array | None, jax.Array | None]:
    """([query, key, value], normed inputs_q or None, inputs_q or None), the first three [.., heads * head_dim].

    Not split, they are one [.., 3, heads * head_dim]. Those of self-attention share one quantized copy of the norm's
    output, where no more of it is asked for.

    layout: (name, features) of the projections. modules: makes them, to be called one by one. parts: makes what they
    hold, to be computed together; given whether autocast applies.
    """
    if is_self and not (module.return_layernorm_output or adapts(module.low_rank_adaptation_scope, "qkv_proj")):
        return _project_together(module, inputs_q, layout, parts, residual, split)
    first, *others = modules()
    y, normed = first(inputs_q)
    source = normed if is_self else inputs_kv
    results = [y, *[projection(source) for projection in others]]
    results = [checkpoint_name(y, CHECKPOINT_NAMES[name]) for y, (name, _) in zip(results, layout)]
    if split:
        results = [part for y, (_, features) in zip(results, layout) for part in _unstacked(y, features)]
    return results, normed if module.return_layernorm_output else None, inputs_q if residual else None


def _project_together(module, x, layout, parts, residual: Residual, split: bool):
    of = lambda features: (x, 1, canonical_tuple(features), module.dtype)
    fp8, scope = in_fp8([Product.of(*of(features), casts_x=not module.input_layernorm) for _, features in layout])
    parts = parts(fp8)
    with scope:
        results, past = layernorm_projections(
            x,
            parts[0].gamma,
            parts[0].beta,
            [part.kernel for part in parts],
            [part.bias for part in parts],
            norm_options=Norm(module.layernorm_epsilon, module.zero_centered_gamma) if module.input_layernorm else None,
            quantizers=[part.quantizers for part in parts] if fp8 else None,
            return_input=bool(residual),
            split=split,
            norm_input_axes=axes_of(module, between=True),
            dot_input_axes=axes_of(module),
            kernel_axes=[part.kernel_axes for part in parts],
        )
    names = [name for name, features in layout for _ in (_unstacked(None, features) if split else [0])]
    results = [checkpoint_name(y, CHECKPOINT_NAMES[name]) for y, name in zip(results, names)]
    return [keep(results[0], [part.unused for part in parts]), *results[1:]], None, past


def _unstacked(y, features) -> list:
    """The results [.., N] in y[.., P, N], of features (P, N); y itself where features is N."""
    return [y if y is None else y[..., i, :] for i in range(features[0])] if isinstance(features, tuple) else [y]
