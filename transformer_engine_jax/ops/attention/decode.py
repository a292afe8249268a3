"""Attention of the next tokens over a cache that holds the keys and values of the earlier ones."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from transformer_engine_jax.decisions import platform, shards
from transformer_engine_jax.ops.attention.backends import attention_backend
from transformer_engine_jax.ops.attention.op import check_broadcast, dot_product_attention
from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.ops.attention.reference import in_blocks
from transformer_engine_jax.ops.attention.sequences import Places, SequenceDescriptor, visible
from transformer_engine_jax.sharding import sharded_as


class KVCache(NamedTuple):
    """Keys and values of the tokens so far.

    key: [B, S, G, D] and value: [B, S, G, Dv] of at most S tokens; zeros where none is written.
    index: i32[] the number of tokens that went in.
    """

    key: jax.Array
    value: jax.Array
    index: jax.Array

    def append(self, key, value) -> KVCache:
        """The cache with the next tokens' key [B, Q, G, D] and value written; dropped is what is past its end, and all
        of a negative index.

        Raises:
          ValueError: batch, groups or head size are not the cache's, there are more tokens than it holds, or places.
        """
        for name, new, cached in (("key", key, self.key), ("value", value, self.value)):
            batch, length, *heads = cached.shape
            if new.ndim != 4 or (new.shape[0], *new.shape[2:]) != (batch, *heads) or new.shape[1] > length:
                raise ValueError(
                    f"KV cache: {name}: expected [{batch}, 1 to {length} tokens, {', '.join(map(str, heads))}], "
                    f"got {list(new.shape)}; the cache is as long as the inputs it was made for, by init or init_cache"
                )
        _check_index(self.index)

        def written(cached, new):
            cached = jnp.asarray(cached)
            own, length = jax.typeof(new).sharding, cached.shape[1]
            if own.mesh.explicit_axes and jax.typeof(cached).sharding.mesh.empty:  # nobody has put it there
                cached = jax.sharding.reshard(cached, own.update(spec=P(own.spec[0], None, *own.spec[2:])))
            new = sharded_as(new.astype(cached.dtype), cached)
            whole = shards(cached) == 1 and not any(jax.typeof(cached).sharding.spec[1:2])
            if new.shape[1] == 1 and whole:  # in one kernel, where a scatter takes three; shards would be gathered
                old = jax.lax.dynamic_slice_in_dim(cached, self.index, 1, axis=1)
                new = jnp.where((0 <= self.index) & (self.index < length), new, old)
                return jax.lax.dynamic_update_slice_in_dim(cached, new, self.index, axis=1)
            places = jnp.where(self.index < 0, length, self.index + jnp.arange(new.shape[1], dtype=jnp.int32))
            return cached.at[:, places].set(new, mode="drop", indices_are_sorted=True, unique_indices=True)

        return KVCache(written(self.key, key), written(self.value, value), self.index + key.shape[1])


def _check_index(index) -> None:
    if jnp.shape(index) != ():
        raise ValueError(
            f"KV cache: index: expected i32[], one place for all rows, got {list(jnp.shape(index))}; jax.vmap over "
            "rows gives them places of their own"
        )


def decode_attention(
    query, key, value, *,
    index, options: Attention, mask=None, bias=None, softmax_offset=None, dropout_key=None, quantizers=None,
) -> jax.Array:  # fmt: skip
    """dot_product_attention of the tokens index, .., index + Q - 1 over a cache that holds them and those before.

    Args:
      query: [B, Q, H, D].
      key, value: [B, S, G, D] of the cache. Its tokens from index + Q on are not there yet, and hidden; finite numbers.
      index: i32[] where in the cache the first query stands. Causality, window and score_mod compare places there.
      mask, bias: as of dot_product_attention, [.., Q or 1, S]; or of all tokens, [.., S, S], whose rows are taken.
      options, softmax_offset, dropout_key: as of dot_product_attention.
      quantizers: as of dot_product_attention; their states are kept, as attention over a cache is never in FP8.

    Returns:
      [B, Q, H, Dv] in query's dtype; NaN for queries past the end of the cache, and for all of a negative index.
    """
    options.check()
    _check_index(index)
    q_len, k_len = query.shape[1], key.shape[1]
    whole = mask is None and bias is None and dropout_key is None
    lengths = _as_lengths(options, index, query, key, value) if whole else None
    if lengths is not None:
        lengths |= dict(softmax_offset=softmax_offset, quantizers=quantizers)
        if q_len == 1:  # before the product: XLA has rotated the query in the same kernel
            return dot_product_attention(_without_end(query, index, k_len), key, value, **lengths)
        return _without_end(dot_product_attention(query, key, value, **lengths), index, k_len)
    rows, tokens = index + jnp.arange(q_len, dtype=jnp.int32), jnp.arange(k_len, dtype=jnp.int32)
    mask, bias = (_rows_of(x, rows, k_len) for x in (mask, bias))
    mask = check_broadcast("mask", mask, query, key)
    hidden = (tokens >= index + q_len)[None, None, None]
    hidden = hidden if mask is None else hidden | mask
    others = dict(bias=bias, softmax_offset=softmax_offset, dropout_key=dropout_key, quantizers=quantizers)
    if _is_long(options, query, key, value, hidden, bias, dropout_key):
        options, sequences = options._replace(bottom_right=False), _those_seen(hidden, rows, tokens, query.shape[0])
        context = dot_product_attention(query, key, value, options=options, sequence_descriptor=sequences, **others)
        return _without_end(context, index, k_len)
    seen = visible(options, Places(rows[None]), Places(tokens[None]), hidden)
    score_mod = options.score_mod
    options = options._replace(
        causal=False, window=None, bottom_right=False,
        score_mod=score_mod and (lambda scores, q, k: score_mod(scores, q + index, k)),
    )  # fmt: skip
    context = dot_product_attention(query, key, value, options=options, mask=~seen, **others)
    return _without_end(context, index, k_len)


def _as_lengths(options: Attention, index, query, key, value) -> dict | None:
    """Of dot_product_attention, where lengths say what is seen and cuDNN, on a GPU, can be told so: it reads no more of
    the cache. None elsewhere."""
    plain = options.score_mod is None and options.softmax_type == "vanilla"
    q_len, k_len = query.shape[1], key.shape[1]
    known = isinstance(q_len, int) and isinstance(k_len, int)  # not of what is exported
    if not (plain and (options.causal or options.reach == (-1, -1)) and known and q_len < k_len):
        return None
    options, sequences = options._replace(bottom_right=True), _so_far(index, query, key)
    by_cudnn = attention_backend(options, query, key, value, sequence_descriptor=sequences)[0] == "cudnn"
    return dict(options=options, sequence_descriptor=sequences) if by_cudnn or platform() != "gpu" else None


def _so_far(index, query, key) -> SequenceDescriptor:
    """The tokens so far, and the queries among them; at least one, though past the end of the cache there are none."""
    (batch, q_len), k_len = query.shape[:2], key.shape[1]
    counts = 1 if q_len == 1 else jnp.clip(k_len - index, 1, q_len), jnp.clip(index + q_len, 1, k_len)
    lengths = tuple(jnp.full(batch, n, jnp.int32) for n in counts)
    return dataclasses.replace(SequenceDescriptor.from_seqlens(lengths), cached=True)


def _is_long(options: Attention, query, key, value, hidden, bias, dropout_key) -> bool:
    """Whether a mask [.., Q, S] would take more memory than what else is there; where cuDNN is given it, it stays."""
    if hidden.shape[1:3] != (1, 1) or not in_blocks(query, key.shape[1]):
        return False
    mask = jax.ShapeDtypeStruct((hidden.shape[0], 1, query.shape[1], key.shape[1]), bool)
    given = dict(mask=mask, bias=bias, dropout_key=dropout_key)
    return attention_backend(options, query, key, value, **given)[0] == "reference"


def _those_seen(hidden, rows, tokens, batch: int) -> SequenceDescriptor:
    """One sequence of the queries at these places, and of the tokens that are not hidden, bool[B or 1, 1, 1, S]."""
    ids = jnp.ones((1, rows.shape[0]), jnp.int32), jnp.logical_not(hidden[:, 0, 0]).astype(jnp.int32)
    of_all = lambda x: jnp.broadcast_to(x, (batch, x.shape[1]))
    return SequenceDescriptor.from_segment_ids_and_pos(*jax.tree.map(of_all, (ids, (rows[None], tokens[None]))))


def _without_end(x, index, k_len: int) -> jax.Array:
    """x [B, Q, ..], NaN for queries past the end of the cache, and for all of a negative index."""
    rows = index + jnp.arange(x.shape[1], dtype=jnp.int32)
    return jnp.where(((index >= 0) & (rows < k_len))[None, :, None, None], x, jnp.nan)


def _rows_of(x, rows, k_len: int):
    """Of a mask or bias [.., S, S] over the whole cache, the rows of the queries; others as they are."""
    whole = x is not None and jnp.ndim(x) == 4 and x.shape[2] == k_len
    return jnp.take(x, rows, axis=2, mode="clip") if whole else x
