"""Where the sequences of a batch lie: SequenceDescriptor, and the places of tokens that visibility follows from."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_engine_jax.ops.attention.options import Attention

Pair = tuple[Any, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SequenceDescriptor:
    """Which tokens of queries and keys belong to which sequence; make one with a `from_...` method.

    Every field is a pair, of the queries and of the keys, or None. A pytree: pass it through jit, vmap and scan.

    seqlens: i32[B] or [B, N] tokens of each sequence; below 1 where there is none.
    seq_offsets: i32[B, N + 1] the token where each sequence starts; -1 where there is none. None: one after another.
    segment_ids: i32[B, S] the same number, not 0, for the tokens of one sequence; 0 is padding.
    segment_pos: i32[B, S] positions of tokens in their sequence. None: counted from where the segment id changes.
    """

    seqlens: Pair | None = None
    seq_offsets: Pair | None = None
    segment_ids: Pair | None = None
    segment_pos: Pair | None = None

    @classmethod
    def from_seqlens(cls, seqlens) -> SequenceDescriptor:
        """One sequence a row, then padding; or several packed one after another.

        Args:
          seqlens: i32[B] or [B, N]; or a pair of them, of queries and of keys.

        Raises:
          ValueError: another rank or dtype.
        """
        return cls(seqlens=_pair("seqlens", seqlens, (1, 2)))

    @classmethod
    def from_seqlens_and_offsets(cls, seqlens, seq_offsets) -> SequenceDescriptor:
        """Packed sequences that may have padding between them.

        Args:
          seqlens: i32[B, N], -1 or 0 where there is none; or a pair of them, of queries and of keys.
          seq_offsets: i32[B, N + 1] the token each starts at, -1 where there is none; or a pair of them.

        Raises:
          ValueError: another rank or dtype, or numbers of sequences that differ.
        """
        seqlens, offsets = _pair("seqlens", seqlens, (2,)), _pair("seq_offsets", seq_offsets, (2,))
        for n, starts in zip(seqlens, offsets):
            if starts.shape != (n.shape[0], n.shape[1] + 1):
                raise ValueError(
                    f"SequenceDescriptor: seq_offsets: expected {[n.shape[0], n.shape[1] + 1]}, one more than the "
                    f"seqlens{list(n.shape)}, got {list(starts.shape)}"
                )
        return cls(seqlens=seqlens, seq_offsets=offsets)

    @classmethod
    def from_segment_ids_and_pos(cls, segment_ids, segment_pos=None) -> SequenceDescriptor:
        """Tokens that say themselves which sequence they belong to.

        Args:
          segment_ids: i32[B, S], 0 is padding; or a pair of them, of queries and of keys.
          segment_pos: i32[B, S] positions in the sequence, a pair, or None to count from where the id changes.

        Raises:
          ValueError: another rank or dtype, or shapes that differ.
        """
        ids = _pair("segment_ids", segment_ids, (2,))
        positions = None if segment_pos is None else _pair("segment_pos", segment_pos, (2,))
        for i, p in zip(ids, positions or ()):
            if i.shape != p.shape:
                raise ValueError(f"SequenceDescriptor: segment_pos: expected {list(i.shape)}, got {list(p.shape)}")
        return cls(segment_ids=ids, segment_pos=positions)

    def check(self, batch: int, q_len: int, k_len: int) -> None:
        """Raises ValueError where the descriptor does not fit queries [B, q_len, ...] and keys [B, k_len, ...]."""
        needed = "seqlens" if self.segment_ids is None else "segment_ids"
        pair = getattr(self, needed)
        if not isinstance(pair, tuple | list) or [hasattr(x, "shape") for x in pair] != [True, True]:
            raise ValueError(
                f"sequence_descriptor: {needed}: expected a pair of arrays, of the queries and of the keys, got "
                f"{jax.tree.map(jnp.shape, pair)}; make one with a from_... method, such as "
                "SequenceDescriptor.from_seqlens(lengths)"
            )
        pairs = {"seqlens": self.seqlens, "segment_ids": self.segment_ids}
        for name, pair in pairs.items():
            for side, x, size in zip(("queries", "keys"), pair or (), (q_len, k_len)):
                expected = [batch, size] if name == "segment_ids" else [batch, *x.shape[1:]]
                if list(x.shape) != expected:
                    raise ValueError(
                        f"sequence_descriptor: {name} of the {side}: expected {expected}, got {list(x.shape)}"
                    )


def _pair(name: str, x, ranks: tuple[int, ...]) -> Pair:
    pair = x if isinstance(x, tuple | list) else (x, x)
    if len(pair) != 2:
        raise ValueError(f"SequenceDescriptor: {name}: expected an array or a pair of arrays, got {len(pair)} of them")
    pair = tuple(map(jnp.asarray, pair))
    for a in pair:
        if a.ndim not in ranks or not jnp.issubdtype(a.dtype, jnp.integer):
            raise ValueError(
                f"SequenceDescriptor: {name}: expected integers of rank {' or '.join(map(str, ranks))}, "
                f"got {a.dtype}{list(a.shape)}"
            )
    return tuple(a.astype(jnp.int32) for a in pair)


class Places(NamedTuple):
    """Where tokens stand.

    position: i32[B or 1, S] the number that causality and window compare.
    segment: i32[B, S] the sequence it belongs to, 0 for padding; None: all of one row belong together.
    """

    position: jax.Array
    segment: jax.Array | None = None


def places(sequences: SequenceDescriptor | None, q_len: int, k_len: int, options: Attention) -> tuple[Places, Places]:
    """Places of the queries and of the keys."""
    found = []
    for side, size in enumerate((q_len, k_len)):
        of_side = lambda pair, side=side: None if pair is None else pair[side]
        if sequences is None:
            place, length = Places(jnp.arange(size, dtype=jnp.int32)[None]), size
        elif sequences.segment_ids is not None:
            place = _from_ids(of_side(sequences.segment_ids), of_side(sequences.segment_pos))
            length = _sizes(place.segment) if options.bottom_right else 0
        else:
            place, length = _from_lengths(of_side(sequences.seqlens), of_side(sequences.seq_offsets), size)
        found.append(place._replace(position=place.position - length) if options.bottom_right else place)
    return found[0], found[1]


def starts_and_lengths(seqlens: jax.Array, offsets: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """i32[B, N] each: first token and number of tokens, 0 where there is no sequence."""
    lengths = jnp.maximum(seqlens.reshape(seqlens.shape[0], math.prod(seqlens.shape[1:])), 0)
    if offsets is None:
        return jnp.cumsum(lengths, axis=1) - lengths, lengths
    return offsets[:, :-1], jnp.where(offsets[:, :-1] < 0, 0, lengths)


def _from_lengths(seqlens, offsets, size: int) -> tuple[Places, jax.Array]:
    """Places, and the length of each token's sequence."""
    starts, lengths = (x[:, None, :] for x in starts_and_lengths(seqlens, offsets))
    token = jnp.arange(size, dtype=jnp.int32)[:, None]
    inside = (token >= starts) & (token < starts + lengths)  # [B, S, N]

    def of_own(x):
        return jnp.sum(jnp.where(inside, x, 0), axis=-1, dtype=jnp.int32)

    number = jnp.arange(1, lengths.shape[-1] + 1, dtype=jnp.int32)
    return Places(of_own(token - starts), of_own(number)), of_own(lengths)


def _run_starts(x) -> jax.Array:
    """i32[B, S]: the index at which the run of equal numbers began that each entry is in."""
    changed = jnp.concatenate([jnp.ones_like(x[:, :1], bool), x[:, 1:] != x[:, :-1]], axis=1)
    return jax.lax.cummax(jnp.where(changed, jnp.arange(x.shape[1], dtype=jnp.int32), 0), axis=1)


def _from_ids(ids, positions) -> Places:
    if positions is None:
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32) - _run_starts(ids)
    return Places(positions, ids)


def _sizes(ids) -> jax.Array:
    """i32[B, S]: how many tokens of the row have this token's id, wherever they are."""
    # Sorted, they are runs; comparing all with all would take memory that grows with the square of the length.
    token = jnp.zeros_like(ids) + jnp.arange(ids.shape[1], dtype=jnp.int32)
    ordered, origin = jax.lax.sort((ids, token), dimension=1, num_keys=1)
    ends = ids.shape[1] - jnp.flip(_run_starts(jnp.flip(ordered, 1)), 1)
    _, sizes = jax.lax.sort((origin, ends - _run_starts(ordered)), dimension=1, num_keys=1)
    return sizes


def visible(options: Attention, queries: Places, keys: Places, mask: jax.Array | None) -> jax.Array | None:
    """bool[B or 1, H or 1, Q, K] what each query sees; None where that is everything. mask: True is masked out."""
    left, right = options.reach
    seen = None if mask is None else jnp.logical_not(mask)
    ahead = keys.position[:, None, None, :] - queries.position[:, None, :, None]
    conditions = [ahead >= -left] if left >= 0 else []
    conditions += [ahead <= right] if right >= 0 else []
    if keys.segment is not None:
        own, theirs = queries.segment[:, None, :, None], keys.segment[:, None, None, :]
        conditions.append((own == theirs) & (theirs != 0))
    for condition in conditions:
        seen = condition if seen is None else seen & condition
    return seen
