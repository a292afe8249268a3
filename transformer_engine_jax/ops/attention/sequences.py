"""Where the sequences of a batch lie: SequenceDescriptor, and the places of tokens that visibility follows from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.sharding import with_whole_rows

Pair = tuple[Any, Any]

# Tokens with sequences: of a million and a thousand these would take gigabytes, where XLA does not fuse what they are
# compared for, as it does not on CPUs.
MOST_COMPARED = 2**24


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SequenceDescriptor:
    """Which tokens of queries and keys belong to which sequence; make one with a `from_...` method.

    Every field is a pair, of the queries and of the keys, or None. A pytree: pass it through jit, vmap and scan.

    seqlens: i32[B] or [B, N] tokens of each sequence; below 1 where there is none.
    seq_offsets: i32[B, N + 1] the token where each sequence starts; -1 where there is none. None: one after another.
    segment_ids: i32[B, S] the same number, not 0, for the tokens of one sequence; 0 is padding.
    segment_pos: i32[B, S] positions of tokens in their sequence. None: counted from where the segment id changes.
    max_segments: a promise, see `from_segment_ids_and_pos`.
    cached: decode_attention's promise, with options.bottom_right: keys are those of a KV cache, of which a row's
      queries are the last, and finite past their ends.
    alike: whether one array was given for queries and keys: like max_segments known when tracing, and a part of the
      pytree's structure. Do not replace one side of what is alike; make another.
    """

    seqlens: Pair | None = None
    seq_offsets: Pair | None = None
    segment_ids: Pair | None = None
    segment_pos: Pair | None = None
    max_segments: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    cached: bool = dataclasses.field(default=False, metadata=dict(static=True))
    alike: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @classmethod
    def from_seqlens(cls, seqlens) -> SequenceDescriptor:
        """One sequence a row, then padding; or several packed one after another.

        Args:
          seqlens: i32[B] or [B, N]; or a pair of them, a tuple, of queries and of keys.

        Raises:
          ValueError: another rank or dtype.
        """
        return cls(seqlens=_pair("seqlens", seqlens, (1, 2)), alike=_alike(seqlens))

    @classmethod
    def from_seqlens_and_offsets(cls, seqlens, seq_offsets) -> SequenceDescriptor:
        """Packed sequences that may have padding between them.

        Args:
          seqlens: i32[B, N], -1 or 0 where there is none; or a pair of them, a tuple, of queries and of keys.
          seq_offsets: i32[B, N + 1] the token each starts at, -1 where there is none; or a pair of them.

        Raises:
          ValueError: another rank or dtype, or numbers of sequences that differ.
        """
        alike = _alike(seqlens) and _alike(seq_offsets)
        seqlens, offsets = _pair("seqlens", seqlens, (2,)), _pair("seq_offsets", seq_offsets, (2,))
        for n, starts in zip(seqlens, offsets):
            if starts.shape != (n.shape[0], n.shape[1] + 1):
                raise ValueError(
                    f"SequenceDescriptor: seq_offsets: expected {[n.shape[0], n.shape[1] + 1]}, one more than the "
                    f"seqlens{list(n.shape)}, got {list(starts.shape)}"
                )
        return cls(seqlens=seqlens, seq_offsets=offsets, alike=alike)

    @classmethod
    def from_segment_ids_and_pos(
        cls, segment_ids, segment_pos=None, *, max_segments: int | None = None
    ) -> SequenceDescriptor:
        """Tokens that say themselves which sequence they belong to.

        Args:
          segment_ids: i32[B, S], 0 is padding; or a pair of them, a tuple, of queries and of keys.
          segment_pos: i32[B, S] positions in the sequence, a pair, or None to count from where the id changes.
          max_segments: the promise that no row has more sequences than so many, that the tokens of each lie side by
            side, and that their positions count up by one, from the same number in queries and keys. On a GPU it is
            worth much: without it, attention computes what sequences do not see of each other, and hides it. A row
            that breaks the promise gives NaN.

        Raises:
          ValueError: another rank or dtype, shapes that differ, or max_segments below 1.
        """
        if max_segments is not None and not (isinstance(max_segments, int | np.integer) and max_segments >= 1):
            raise ValueError(
                "SequenceDescriptor: max_segments: expected how many sequences a row has at most, 1 or more, or None, "
                f"got {max_segments!r}"
            )
        alike = _alike(segment_ids) and _alike(segment_pos)
        ids = _pair("segment_ids", segment_ids, (2,))
        positions = None if segment_pos is None else _pair("segment_pos", segment_pos, (2,))
        for i, p in zip(ids, positions or ()):
            if i.shape != p.shape:
                raise ValueError(f"SequenceDescriptor: segment_pos: expected {list(i.shape)}, got {list(p.shape)}")
        most = None if max_segments is None else int(max_segments)
        return cls(segment_ids=ids, segment_pos=positions, max_segments=most, alike=alike)

    def of_at_most(self, max_segments: int) -> SequenceDescriptor:
        """This, with the promise of so many sequences a row where it is of segment ids and makes none."""
        if self.segment_ids is None or self.max_segments is not None:
            return self
        return dataclasses.replace(self, max_segments=max_segments)

    def most(self) -> int:
        """How many sequences a row has at most, of lengths or with max_segments."""
        return self.max_segments if self.segment_ids is not None else math.prod(self.seqlens[0].shape[1:])

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


def _is_pair(x) -> bool:
    """A list of numbers, or of lists of them, is one array; a tuple of lists, and a list of arrays, are several."""
    is_list = lambda a: isinstance(a, tuple | list)
    return is_list(x) and any((is_list(a) and isinstance(x, tuple)) or getattr(a, "ndim", 0) > 0 for a in x)


def _alike(x) -> bool:
    """Whether x, an array or a pair, is the same of queries and of keys."""
    return not _is_pair(x) or all(each is x[0] for each in x)


def _pair(name: str, x, ranks: tuple[int, ...]) -> Pair:
    pair = x if _is_pair(x) else (x, x)
    if len(pair) != 2:
        raise ValueError(f"SequenceDescriptor: {name}: expected an array or a pair of arrays, got {len(pair)} of them")
    for a in pair:
        _check_range(name, a)
    try:
        pair = tuple(map(jnp.asarray, pair))
    except ValueError as error:  # lists of several lengths
        raise ValueError(
            f"SequenceDescriptor: {name}: expected an array, or a pair of them as a tuple, got {x!r}: {error}"
        ) from error
    for a in pair:
        if a.ndim not in ranks or not jnp.issubdtype(a.dtype, jnp.integer):
            raise ValueError(
                f"SequenceDescriptor: {name}: expected integers of rank {' or '.join(map(str, ranks))}, "
                f"got {a.dtype}{list(a.shape)}"
            )
        _check_range(name, a)
    return tuple(a.astype(jnp.int32) for a in pair)


def _check_range(name: str, a) -> None:
    """ValueError for an array whose numbers are known and would become others: they are cut to 32 bits.

    Before JAX has an array of NumPy's, which it cuts, and after, as it keeps 64 bits under jax_enable_x64.
    """
    known = isinstance(a, np.ndarray) or (isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer))
    if not known or a.dtype.kind not in "iu" or a.dtype.itemsize <= 4 or not a.size:
        return
    if a.min() < -(2**31) or a.max() >= 2**31:
        raise ValueError(
            f"SequenceDescriptor: {name}: expected numbers of 32 bits, as np.unique(ids, return_inverse=True) makes of "
            f"any, got {a.dtype} from {a.min()} to {a.max()}"
        )


class Places(NamedTuple):
    """Where tokens stand.

    position: i32[B or 1, S] the number that causality and window compare.
    segment: i32[B, S] the sequence it belongs to, 0 for padding; None: all of one row belong together.
    """

    position: jax.Array
    segment: jax.Array | None = None


def places(sequences: SequenceDescriptor | None, q_len: int, k_len: int, options: Attention) -> tuple[Places, Places]:
    """Places of the queries and of the keys."""
    sequences, found = _with_whole_rows(sequences), []
    for side, size in enumerate((q_len, k_len)):
        of_side = lambda pair, side=side: None if pair is None else pair[side]
        if sequences is None:
            place, length = Places(jnp.arange(size, dtype=jnp.int32)[None]), size
        elif sequences.segment_ids is not None:
            place = _from_ids(of_side(sequences.segment_ids), of_side(sequences.segment_pos))
            length = _ends(place.segment, of_side(sequences.segment_pos)) if options.bottom_right else 0
        else:
            at = starts_and_lengths(of_side(sequences.seqlens), of_side(sequences.seq_offsets))
            place, length = places_of(*at, size)
        found.append(place._replace(position=place.position - length) if options.bottom_right else place)
    return found[0], found[1]


def _with_whole_rows(sequences: SequenceDescriptor | None) -> SequenceDescriptor | None:
    """The same with rows of ids and positions whole on each device, as to count in them wants."""
    if sequences is None or sequences.segment_ids is None:
        return sequences
    ids, positions = jax.tree.map(with_whole_rows, (sequences.segment_ids, sequences.segment_pos))
    return dataclasses.replace(sequences, segment_ids=ids, segment_pos=positions)


def counted_back(queries: Places, keys: Places, mask) -> tuple[Places, Places]:
    """Places counted back from where the mask ends, not the arrays: from the last token of which it leaves anything.

    Of a mask that is the same for all queries, or for all keys, and so does not tell where these end: as they are.

    Args:
      queries, keys: counted back from the end of the arrays.
      mask: bool [B or 1, H or 1, Q or 1, K or 1], True is masked out.
    """
    if any(n == 1 < place.position.shape[1] for n, place in zip(mask.shape[2:], (queries, keys))):
        return queries, keys
    found = []
    for place, others in ((queries, (1, 3)), (keys, (1, 2))):
        seen = jnp.any(jnp.logical_not(mask), axis=others)  # [B or 1, S or 1]
        none = -place.position.shape[1]  # where the array starts
        ends = jnp.max(jnp.where(seen, place.position + 1, none), axis=1, keepdims=True, initial=none)
        found.append(place._replace(position=place.position - ends))
    return found[0], found[1]


def starts_and_lengths(seqlens: jax.Array, offsets: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """i32[B, N] each: first token and number of tokens, 0 where there is no sequence."""
    lengths = jnp.maximum(seqlens.reshape(seqlens.shape[0], math.prod(seqlens.shape[1:])), 0)
    if offsets is None:
        return jnp.cumsum(lengths, axis=1) - lengths, lengths
    return offsets[:, :-1], jnp.where(offsets[:, :-1] < 0, 0, lengths)


# --- Segments that lie side by side ----------------------------------------------------------------------------------


class Runs(NamedTuple):
    """The sequences of each row: the n-th of queries sees the n-th of keys."""

    q_start: jax.Array  # i32[B, N] the token each begins at, below 0 where there is none
    q_len: jax.Array  # i32[B, N] its tokens, 0 where there is none
    k_start: jax.Array
    k_len: jax.Array
    kept: jax.Array | None  # bool[B] whether the row keeps the promise of max_segments; None: there is none


class _Side(NamedTuple):
    start: jax.Array  # i32[B, N]
    length: jax.Array
    id: jax.Array
    position: jax.Array  # of the first token
    kept: jax.Array  # bool[B]


def runs(sequences: SequenceDescriptor) -> Runs:
    """Where sequences begin and how long they are, of a descriptor of lengths or with max_segments.

    Of a row that breaks the promise, none.
    """
    if sequences.segment_ids is None:
        offsets = sequences.seq_offsets or (None, None)
        (q_start, q_len), (k_start, k_len) = map(starts_and_lengths, sequences.seqlens, offsets)
        return Runs(q_start, q_len, k_start, k_len, None)
    sequences = _with_whole_rows(sequences)
    positions = sequences.segment_pos or (None, None)
    queries, keys = (_side(*side, sequences.max_segments) for side in zip(sequences.segment_ids, positions))
    # [B, N of queries, N of keys]
    same = queries.id[:, :, None] == keys.id[:, None, :]
    of_query = lambda x: jnp.sum(jnp.where(same, x[:, None, :], 0), axis=-1, dtype=jnp.int32)
    together = ~same | (queries.position[:, :, None] == keys.position[:, None, :])
    kept = queries.kept & keys.kept & jnp.all(together, axis=(1, 2))
    q_len, k_len = (jnp.where(kept[:, None], x, 0) for x in (queries.length, of_query(keys.length)))
    return Runs(queries.start, q_len, of_query(keys.start), k_len, kept)


def attending(options: Attention, at: Runs, queries: int, keys: int) -> Runs:
    """Within rows of so many queries and keys, which cuDNN trusts to be so, and without the queries that see nothing:
    those of empty keys, and those past keys and window."""
    q_len = jnp.clip(queries - at.q_start, 0, at.q_len)
    k_len = jnp.clip(keys - at.k_start, 0, at.k_len)
    left, _ = options.reach
    q_len = jnp.minimum(q_len, k_len + left) if left >= 0 else q_len
    some = (q_len > 0) & (k_len > 0)
    return at._replace(q_len=jnp.where(some, q_len, 0), k_len=jnp.where(some, k_len, 0))


def _side(ids, positions, most: int) -> _Side:
    token = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    before = jnp.pad(ids[:, :-1], ((0, 0), (1, 0)))
    begins = (ids != 0) & (ids != before)
    number = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    positions_there = jnp.zeros_like(ids) if positions is None else positions

    def of_those(n):
        own = (number[:, None, :] == 1 + n[None, :, None]) & (ids != 0)[:, None, :]  # [B, N, S]
        first = own & begins[:, None, :]
        of_first = lambda x: jnp.sum(jnp.where(first, x[:, None, :], 0), axis=-1, dtype=jnp.int32)
        length = jnp.sum(own, axis=-1, dtype=jnp.int32)
        return of_first(jnp.broadcast_to(token, ids.shape)), length, of_first(ids), of_first(positions_there)

    start, length, id, position = _in_parts(of_those, most, ids.shape)
    others = (id[:, :, None] == id[:, None, :]) & (length[:, None, :] > 0) & ~np.eye(most, dtype=bool)[None]
    kept = jnp.all(number <= most, axis=1) & ~jnp.any(others, axis=(1, 2))
    if positions is None:
        return _Side(start, length, id, position, kept)
    counts_up = (positions == jnp.pad(positions[:, :-1], ((0, 0), (1, 0))) + 1) | begins | (ids == 0)
    return _Side(start, length, id, position, kept & jnp.all(counts_up, axis=1))


def places_of(starts, lengths, size: int) -> tuple[Places, jax.Array]:
    """Places of tokens of sequences that start and end so, i32[B, N] each; and the length of each token's sequence."""
    number = jnp.arange(1, lengths.shape[1] + 1, dtype=jnp.int32)[None, None]

    def of_those(token):
        at, starts_at, lengths_at = token[None, :, None], starts[:, None, :], lengths[:, None, :]
        inside = (at >= starts_at) & (at < starts_at + lengths_at)  # [B, S, N]
        of_own = lambda x: jnp.sum(jnp.where(inside, x, 0), axis=-1, dtype=jnp.int32)
        return of_own(at - starts_at), of_own(number), of_own(lengths_at)

    position, segment, length = _in_parts(of_those, size, lengths.shape)
    return Places(position, segment), length


def only(tokens, x) -> jax.Array:
    """x[B, S, ...] of these tokens, bool[B, S], alone: elsewhere zeros, whatever was there, in gradients too."""
    return jnp.where(tokens[..., None, None], x, jnp.zeros((), x.dtype))


def _in_parts(of_those: Callable, count, others):
    """of_those(0, .., count - 1 as i32[n]), a pytree of [B, n]: at once, or in parts where too much is compared.

    others: with what it compares each, [B, m] numbers. Sizes that jax.export is not told are few.
    """
    if not all(isinstance(n, int) for n in (count, *others)) or count * math.prod(others) <= MOST_COMPARED:
        return of_those(jnp.arange(count, dtype=jnp.int32))
    size = max(MOST_COMPARED // math.prod(others), 1)
    parts = jnp.arange(-(-count // size) * size, dtype=jnp.int32).reshape(-1, size)
    found = jax.lax.map(of_those, parts)  # [parts, B, size]
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(others[0], -1)[:, :count], found)


def _run_starts(x) -> jax.Array:
    """i32[B, S]: the index at which the run of equal numbers began that each entry is in."""
    changed = jnp.concatenate([jnp.ones_like(x[:, :1], bool), x[:, 1:] != x[:, :-1]], axis=1)
    return jax.lax.cummax(jnp.where(changed, jnp.arange(x.shape[1], dtype=jnp.int32)[None], 0), axis=1)


def _from_ids(ids, positions) -> Places:
    if positions is None:
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] - _run_starts(ids)
    return Places(positions, ids)


def _ends(ids, positions) -> jax.Array:
    """i32[B, S]: the position behind the last token of the row with this token's id, or without positions how many
    there are, wherever they are."""
    # Sorted, they are runs; comparing all with all would take memory that grows with the square of the length.
    token = jnp.zeros_like(ids) + jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    given = (ids, token) if positions is None else (ids, positions, token)
    ordered, *last, origin = jax.lax.sort(given, dimension=1, num_keys=2)
    behind = ids.shape[1] - jnp.flip(_run_starts(jnp.flip(ordered, 1)), 1)
    ends = 1 + jnp.take_along_axis(last[0], behind - 1, axis=1) if last else behind - _run_starts(ordered)
    return jax.lax.sort((origin, ends), dimension=1, num_keys=1)[1]


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
