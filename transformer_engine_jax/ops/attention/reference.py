"""Attention in plain JAX: what every backend must equal, and what runs where no other can.

Logits and softmax are in f32. A query that sees no key gets zeros. Where the logits of all queries would take much
memory, blocks of queries are computed one after another, and again in the backward pass: memory then grows with the
number of keys, not with its square.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.ops.attention.sequences import Places, visible

# Logits of one block: 64 MiB in f32. Larger blocks are no faster, and several such arrays live at once.
LOGITS_PER_BLOCK = 2**24
# Fewer rows than this would leave a matrix product little to do.
LEAST_ROWS = 16


class Rows(NamedTuple):
    """What belongs to queries: a block of them has a part of each. None is absent, or the same for every query."""

    query: jax.Array  # [B, Q, H, D]
    index: jax.Array  # i32[Q]
    position: jax.Array  # i32[B or 1, Q]
    segment: jax.Array | None  # i32[B, Q]
    mask: jax.Array | None  # bool[B or 1, H or 1, Q, K or 1]
    bias: jax.Array | None  # [B or 1, H or 1, Q, K or 1]
    o: jax.Array | None = None  # [B, Q, H, Dv] of a forward pass, for its backward
    stats: jax.Array | None = None  # f32[B, Q, H] likewise, the logarithm of each softmax's sum


_ROW_AXES = Rows(query=1, index=0, position=1, segment=1, mask=2, bias=2, o=1, stats=1)


class Shared(NamedTuple):
    """What every query needs."""

    key: jax.Array  # [B, K, G, D]
    value: jax.Array  # [B, K, G, Dv]
    places: Places
    mask: jax.Array | None  # bool[B or 1, H or 1, 1, K or 1]
    bias: jax.Array | None  # [B or 1, H or 1, 1, K or 1]
    softmax_offset: jax.Array | None  # f32[H]
    dropout_key: jax.Array | None


def rows_per_block(batch: int, heads: int, q_len: int, k_len: int) -> int:
    """All queries where their logits are few; else a part of them, equal blocks up to rounding.

    Sizes that jax.export is not told count as 1.
    """
    batch, heads, k_len = (n if isinstance(n, int) else 1 for n in (batch, heads, k_len))
    if not isinstance(q_len, int):
        return q_len
    most = max(LOGITS_PER_BLOCK // max(batch * heads * k_len, 1), LEAST_ROWS)
    blocks = -(-q_len // most)
    return q_len if blocks <= 1 else -(-q_len // blocks)


def in_blocks(query, k_len: int) -> bool:
    """Whether the logits of query [B, Q, H, D] and so many keys are too many to be there at once."""
    batch, q_len, heads, _ = query.shape
    return isinstance(q_len, int) and rows_per_block(batch, heads, q_len, k_len) < q_len


def attention_reference(
    options: Attention, query, key, value, *,
    queries: Places, keys: Places, mask, bias, softmax_offset, dropout_key, first_row=0,
) -> jax.Array:  # fmt: skip
    """[B, Q, H, Dv] in query's dtype; arguments as in `dot_product_attention`, with places for sequences.

    first_row: the number of the first query, where these are a part: dropout is the same as of the whole.
    """
    arrays = (query, key, value, queries, keys, mask, bias, softmax_offset, dropout_key)
    rows, shared = rows_and_shared(*arrays, first_row)
    return by_blocks(partial(_attend, options), rows, shared)


def rows_and_shared(query, key, value, queries, keys, mask, bias, softmax_offset, dropout_key, first_row=0):
    varies = lambda x: x is not None and x.shape[2] != 1
    of_rows = lambda x: x if varies(x) else None
    of_all = lambda x: None if varies(x) else x
    index = first_row + jnp.arange(query.shape[1], dtype=jnp.int32)
    rows = Rows(query, index, queries.position, queries.segment, of_rows(mask), of_rows(bias))
    return rows, Shared(key, value, keys, of_all(mask), of_all(bias), softmax_offset, dropout_key)


def by_blocks(attend, rows: Rows, shared: Shared):
    """attend(rows, shared), a pytree of [B, Q, ..], computed block by block where the logits of all rows are too many.

    What blocks make of the gradients of what they share is added up in f32.
    """
    k_len = shared.key.shape[1]
    if not in_blocks(rows.query, k_len):
        return attend(rows, shared)
    batch, q_len, heads, _ = rows.query.shape
    size = rows_per_block(batch, heads, q_len, k_len)
    blocks = [None if x is None else _in_blocks(x, axis, size) for x, axis in zip(rows, _ROW_AXES)]
    summed = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x, shared)

    @partial(jax.checkpoint, prevent_cse=False)
    def of_block(rows: Rows):
        return attend(rows, jax.tree.map(_with_gradients_of, shared, summed))

    out = jax.lax.map(of_block, Rows(*blocks))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :q_len], out)


@jax.custom_jvp
def _value(x, wide):
    return x


_value.defjvp(lambda primals, tangents: (_value(*primals), tangents[1].astype(primals[0].dtype)))


def _with_gradients_of(x, wide) -> jax.Array:
    """x, whose gradients go to the same in a wider dtype: there a loop adds them up."""
    return x if wide is x else _value(jax.lax.stop_gradient(x), wide)


def _in_blocks(x, axis: int, size: int) -> jax.Array:
    """[.., S, ..] -> [blocks, .., size, ..]; the last block is filled with zeros."""
    count = -(-x.shape[axis] // size)
    filled = [(0, 0)] * x.ndim
    filled[axis] = (0, count * size - x.shape[axis])
    x = jnp.pad(x, filled).reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def scores_of(options: Attention, rows: Rows, shared: Shared) -> tuple[jax.Array, jax.Array | None]:
    """Scores f32[B, H, Q, K], and what is seen of them, None where that is everything."""
    batch, q_len, heads, dim = rows.query.shape
    k_len, groups = shared.key.shape[1:3]
    grouped = rows.query.reshape(batch, q_len, groups, heads // groups, dim)
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", grouped, shared.key, preferred_element_type=jnp.float32)
    scores = _modified(options, scores.reshape(batch, heads, q_len, k_len), rows, shared)
    scores = checkpoint_name(scores, "logits")  # for policies; what is computed in blocks is not kept
    mask = shared.mask if rows.mask is None else rows.mask
    return scores, visible(options, Places(rows.position, rows.segment), shared.places, mask)


def weighted(weights, value) -> jax.Array:
    """f32[B, Q, H, Dv] of weights f32[B, H, Q, K] and value[B, K, G, Dv]."""
    batch, heads, q_len, k_len = weights.shape
    groups = value.shape[2]
    weights = weights.astype(value.dtype).reshape(batch, groups, heads // groups, q_len, k_len)
    out = jnp.einsum("bgrqk,bkgd->bqgrd", weights, value, preferred_element_type=jnp.float32)
    return out.reshape(batch, q_len, heads, value.shape[-1])


def _attend(options: Attention, rows: Rows, shared: Shared) -> jax.Array:
    scores, seen = scores_of(options, rows, shared)
    weights = _softmax(scores, seen, _offset(options, shared.softmax_offset))
    weights = dropped(weights, shared.dropout_key, options.dropout, rows.index)
    return weighted(weights, shared.value).astype(rows.query.dtype)


def _modified(options: Attention, scores, rows: Rows, shared: Shared) -> jax.Array:
    """Scores [B, H, Q, K] with scale, bias and score_mod."""
    bias = shared.bias if rows.bias is None else rows.bias
    bias = 0.0 if bias is None else bias.astype(jnp.float32)
    scores = (scores + bias) * options.scale if options.bias_before_scale else scores * options.scale + bias
    if options.score_mod is None:
        return scores
    modified = options.score_mod(scores, rows.position[:, None, :, None], shared.places.position[:, None, None, :])
    if jnp.shape(modified) != scores.shape:
        raise ValueError(f"attention: score_mod: expected scores{list(scores.shape)} back, got {jnp.shape(modified)}")
    return modified.astype(jnp.float32)


def _offset(options: Attention, softmax_offset) -> jax.Array | None:
    """f32[1, H or 1, 1, 1], one more logit of every query, or None."""
    if options.softmax_type == "vanilla":
        return None
    offset = jnp.zeros(1, jnp.float32) if options.softmax_type == "off_by_one" else softmax_offset
    return offset.astype(jnp.float32)[None, :, None, None]


def powers(scores, seen, offset=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(exp(scores - top) of what is seen, else 0; top, the largest of them and of `offset`; the powers' sum)."""
    if seen is not None:
        scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
    top = jax.lax.stop_gradient(top if offset is None else jnp.maximum(top, offset))
    weights = jnp.exp(scores - top)
    if seen is not None:
        weights = jnp.where(seen, weights, 0.0)
    return weights, top, jnp.sum(weights, axis=-1, keepdims=True)


def _softmax(scores, seen, offset) -> jax.Array:
    """Softmax over the last axis of what is seen; zeros where nothing is. `offset` counts in the denominator."""
    weights, top, total = powers(scores, seen, offset)
    if offset is not None:
        total = total + jnp.exp(offset - top)
    return weights / jnp.where(total > 0, total, 1.0)


def dropped(weights, key, rate: float, index) -> jax.Array:
    """Weights [B, H, Q, K] with dropout; each row from a key of its own, so that blocks draw what the whole would."""
    if rate == 0 or key is None:
        return weights
    batch, heads, _, k_len = weights.shape
    key = jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")  # rbg has none by row
    of_row = lambda i: jax.random.bernoulli(jax.random.fold_in(key, i), jnp.float32(1 - rate), (batch, heads, k_len))
    kept = jnp.moveaxis(jax.vmap(of_row)(index), 0, 2)
    return jnp.where(kept, weights / (1.0 - rate), 0.0)


# --- Keys that come in parts -----------------------------------------------------------------------------------------


class Running(NamedTuple):
    """Attention of queries over the keys so far: a softmax whose maximum and total are still growing."""

    options: Attention
    query: jax.Array  # [B, Q, H, D]
    sums: jax.Array  # f32[B, Q, H, Dv] of the values, with weights exp(score - top)
    top: jax.Array  # f32[B, Q, H] the largest score
    total: jax.Array  # f32[B, Q, H] of the weights

    def over(self, key, value, *, queries: Places, keys: Places, mask, bias) -> Running:
        """With these keys too; their scores are computed again in the backward pass."""

        @jax.checkpoint
        def merged(query, key, value, sums, top, total):
            rows, shared = rows_and_shared(query, key, value, queries, keys, mask, bias, None, None)
            new = by_blocks(partial(_partial, self.options), rows, shared)
            highest = jax.lax.stop_gradient(jnp.maximum(top, new[1]))
            old, new_weight = jnp.exp(top - highest), jnp.exp(new[1] - highest)
            sums = sums * old[..., None] + new[0] * new_weight[..., None]
            return sums, highest, total * old + new[2] * new_weight

        return Running(self.options, self.query, *merged(self.query, key, value, self.sums, self.top, self.total))

    def result(self) -> jax.Array:
        """[B, Q, H, Dv] in query's dtype."""
        total = jnp.where(self.total > 0, self.total, 1.0)[..., None]
        return (self.sums / total).astype(self.query.dtype)


def running_attention(options: Attention, query, value_size: int, softmax_offset) -> Running:
    """Attention of query [B, Q, H, D] before the first keys; softmax_offset as in `dot_product_attention`."""
    shape = query.shape[:3]
    offset = _offset(options, softmax_offset)
    if offset is None:
        top, total = jnp.full(shape, jnp.finfo(jnp.float32).min), jnp.zeros(shape, jnp.float32)
    else:  # one more logit, of no value
        top, total = jnp.broadcast_to(offset[:, None, :, 0, 0], shape), jnp.ones(shape, jnp.float32)
    return Running(options, query, jnp.zeros((*shape, value_size), jnp.float32), top, total)


def _partial(options: Attention, rows: Rows, shared: Shared) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sums, top, total) as in Running, of these keys alone."""
    weights, top, total = powers(*scores_of(options, rows, shared))
    by_row = lambda x: jnp.moveaxis(x[..., 0], 1, 2)
    return weighted(weights, shared.value), by_row(top), by_row(total)
