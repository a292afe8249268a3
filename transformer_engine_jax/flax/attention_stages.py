"""What MultiHeadAttention of Linen and of NNX share: checks, what is done to queries and keys, names of results."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer_engine_jax.autocast import current
from transformer_engine_jax.flax.dot_product_attention import context_parallel
from transformer_engine_jax.ops.attention import Attention, SequenceDescriptor
from transformer_engine_jax.ops.attention.context_parallel import ContextParallel, balanced_order
from transformer_engine_jax.ops.attention.cudnn import reads_qkv
from transformer_engine_jax.ops.attention.sequences import places
from transformer_engine_jax.ops.rope import rope, rope_frequencies, rope_qkv, rope_table

SCOPES = ("none", "all", *(f"{how}{what}" for how in ("", "exclude_") for what in ("qkv_proj", "output_proj", "mlp")))


QK_NORMS = (None, "layernorm", "rmsnorm", "l2norm")


CHECKPOINT_NAMES = {
    "qkv": "combined_qkv_proj",
    "kv": "combined_kv_proj",
    "query": "query_proj",
    "key": "key_proj",
    "value": "value_proj",
}


def unstacked(y, features) -> list:
    """The results [.., N] in y[.., P, N], of features (P, N); y itself where features is N."""
    return [y] if isinstance(features, int) else [y if y is None else y[..., i, :] for i in range(features[0])]


def named_results(results, layout: Sequence[tuple[str, int | tuple[int, int]]], split: bool) -> list[jax.Array]:
    """Results of projections, (name, features) each, under the names that checkpoint policies know."""
    names = [CHECKPOINT_NAMES[name] for name, features in layout for _ in (unstacked(None, features) if split else [0])]
    return [checkpoint_name(y, name) for y, name in zip(results, names)]


def adapts(scope: str, projection: str) -> bool:
    """Whether a low_rank_adaptation_scope, one of SCOPES, gives this projection its LoRA branch."""
    return scope in ("all", projection) or (scope.startswith("exclude_") and scope != f"exclude_{projection}")


def check_ranks(inputs_q, inputs_kv) -> None:
    """ValueError where the inputs of a MultiHeadAttention are not of rank 3."""
    for name, x in (("inputs_q", inputs_q), ("inputs_kv", inputs_kv)):
        if x.ndim != 3:
            raise ValueError(f"MultiHeadAttention: {name}: expected [B, S, features], got {list(x.shape)}")


def check_kind(module, is_self: bool, params) -> None:
    """ValueError where the parameters are those of self-attention and the call is not, or the other way round."""
    fused = module.fuse_qkv_params and module.num_gqa_groups in (None, module.num_attention_heads)
    if fused and params and ("qkv" in params) != is_self:
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
        return tuple(side.position for side in places(sequences, *lengths, Attention(scale=1.0)))
    if order is not None:
        return tuple(jnp.asarray(balanced_order(n, order.size())) for n in lengths)
    return tuple(None if start is None else start + jnp.arange(n, dtype=jnp.int32) for n in lengths)


def in_one_array(module, options: Attention, x, turns, others: Sequence) -> bool:
    """Whether queries, keys and values of self-attention to x [B, S, features] stay in the array that a product gives.

    options: of the attention. turns: of `rotations`. others: what else is said of the parts; None for nothing.
    """
    heads, recipe = module.num_attention_heads, current().recipe
    fused = module.fuse_qkv_params and module.num_gqa_groups in (None, heads)
    fused = fused and turns[0] is turns[1] and (turns[0] is None or jnp.ndim(turns[0]) == 1)
    apart = module.transpose_batch_sequence or module.qk_norm_type or module.context_parallel_axis
    apart = apart or (recipe is not None and recipe.fp8_dpa)
    if not fused or apart or any(other is not None for other in others):
        return False
    return reads_qkv(options, jax.ShapeDtypeStruct((*x.shape[:2], heads, module.head_dim), x.dtype))


def l2norm(x, epsilon: float) -> jax.Array:
    """x[.., D] / sqrt(sum of squares + epsilon), in f32 arithmetic."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide**2, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)
