"""Attention of the next tokens over a cache that holds the keys and values of the earlier ones."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from transformer_engine_jax.decisions import platform
from transformer_engine_jax.ops.attention.flash import MOST_HEAD_SIZE, Flash, missing, on_hopper
from transformer_engine_jax.ops.attention.op import check_broadcast, dot_product_attention
from transformer_engine_jax.ops.attention.options import Attention
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
        """The cache with the next tokens' key [B, Q, G, D] and value written; what is past its end is dropped.

        Raises:
          ValueError: batch, groups or head size are not the cache's, or there are more tokens than it holds.
        """
        for name, new, cached in (("key", key, self.key), ("value", value, self.value)):
            batch, length, *heads = cached.shape
            if new.ndim != 4 or (new.shape[0], *new.shape[2:]) != (batch, *heads) or new.shape[1] > length:
                raise ValueError(
                    f"KV cache: {name}: expected [{batch}, 1 to {length} tokens, {', '.join(map(str, heads))}], "
                    f"got {list(new.shape)}"
                )
        places = self.index + jnp.arange(key.shape[1], dtype=jnp.int32)

        def written(cached, new):
            options, own = dict(mode="drop", indices_are_sorted=True, unique_indices=True), jax.typeof(new).sharding
            if own.mesh.explicit_axes and jax.typeof(cached).sharding.mesh.empty:  # nobody has put it there
                cached = jax.sharding.reshard(cached, own.update(spec=P(own.spec[0], None, *own.spec[2:])))
            return cached.at[:, places].set(sharded_as(new.astype(cached.dtype), cached), **options)

        return KVCache(written(self.key, key), written(self.value, value), self.index + key.shape[1])


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
      [B, Q, H, Dv] in query's dtype; NaN for queries past the end of the cache.
    """
    options.check()
    q_len, k_len = query.shape[1], key.shape[1]
    if mask is None and bias is None and dropout_key is None and _by_lengths(options, query, key, value):
        context = dot_product_attention(
            query, key, value,
            options=options._replace(bottom_right=True), sequence_descriptor=_so_far(index, query, key),
            softmax_offset=softmax_offset, quantizers=quantizers,
        )  # fmt: skip
        return _without_end(context, index, k_len)
    rows, tokens = index + jnp.arange(q_len, dtype=jnp.int32), jnp.arange(k_len, dtype=jnp.int32)
    mask, bias = (_rows_of(x, rows, k_len) for x in (mask, bias))
    mask = check_broadcast("mask", mask, query, key)
    hidden = (tokens >= index + q_len)[None, None, None]
    seen = visible(options, Places(rows[None]), Places(tokens[None]), hidden if mask is None else hidden | mask)
    score_mod = options.score_mod
    context = dot_product_attention(
        query, key, value,
        options=options._replace(
            causal=False, window=None, bottom_right=False,
            score_mod=score_mod and (lambda scores, q, k: score_mod(scores, q + index, k)),
        ),
        mask=~seen, bias=bias, softmax_offset=softmax_offset, dropout_key=dropout_key, quantizers=quantizers,
    )  # fmt: skip
    return _without_end(context, index, k_len)


def _by_lengths(options: Attention, query, key, value) -> bool:
    """Whether lengths say what is seen, and cuDNN, where it is here, can be told so: it reads no more of the cache."""
    plain = options.score_mod is None and options.softmax_type == "vanilla"
    told = plain and (options.causal or options.reach == (-1, -1))
    q_len, k_len = query.shape[1], key.shape[1]
    known = isinstance(q_len, int) and isinstance(k_len, int)  # not of what is exported
    if not (told and known and q_len < k_len):
        return False
    narrow = max(query.shape[-1], value.shape[-1]) <= MOST_HEAD_SIZE
    as_it_lies = Flash.of(options, query, key).repeats == 1
    return platform() != "gpu" or (narrow and as_it_lies and on_hopper() and not missing())


def _so_far(index, query, key) -> SequenceDescriptor:
    """The tokens so far, and the queries among them; at least one, though past the end of the cache there are none."""
    (batch, q_len), k_len = query.shape[:2], key.shape[1]
    counts = jnp.clip(k_len - index, 1, q_len), jnp.clip(index + q_len, 1, k_len)
    lengths = tuple(jnp.broadcast_to(n, (batch,)) for n in counts)
    return dataclasses.replace(SequenceDescriptor.from_seqlens(lengths), cached=True)


def _without_end(context, index, k_len: int) -> jax.Array:
    """context, NaN for queries past the end of the cache."""
    rows = index + jnp.arange(context.shape[1], dtype=jnp.int32)
    return jnp.where((rows < k_len)[None, :, None, None], context, jnp.nan)


def _rows_of(x, rows, k_len: int):
    """Of a mask or bias [.., S, S] over the whole cache, the rows of the queries; others as they are."""
    whole = x is not None and jnp.ndim(x) == 4 and x.shape[2] == k_len and len(rows) != k_len
    return jnp.take(x, rows, axis=2, mode="clip") if whole else x
