"""SequenceDescriptor: rows that are padded, or hold several sequences, are those sequences by themselves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy_attention
import pytest
from emulated import F32, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import Attention, SequenceDescriptor, dot_product_attention
from transformer_engine_jax.ops.attention.sequences import places, runs

B, S, H, G, D = 3, 16, 4, 2, 8
QUERY, KEY, VALUE, DY = normal(5, (B, S, H, D), (B, S, G, D), (B, S, G, D), (B, S, H, D))

# Rows of (first token, length): one full, two that leave padding, with sequences of one token and of none.
ROWS = [[(0, 16)], [(0, 5), (5, 1), (6, 7)], [(2, 3), (5, 0), (9, 4)]]


def described(how: str, rows=ROWS, size: int = S):
    """The rows as a descriptor's arrays: (offsets and lengths) or (ids and positions)."""
    most = max(map(len, rows))
    lengths, starts = np.full((len(rows), most), -1), np.full((len(rows), most + 1), -1)
    ids, positions = np.zeros((len(rows), size), int), np.zeros((len(rows), size), int)
    for row, sequences in enumerate(rows):
        for n, (start, length) in enumerate(sequences):
            lengths[row, n], starts[row, n] = length, start
            ids[row, start : start + length] = 7 * n + 3  # any number but 0
            positions[row, start : start + length] = range(length)
    return {
        "offsets": (lengths, starts),
        "ids": (ids,),
        "ids and positions": (ids, positions),
        "lengths": (np.maximum(lengths, 0),),
    }[how]


MAKE = {
    "offsets": SequenceDescriptor.from_seqlens_and_offsets,
    "ids": SequenceDescriptor.from_segment_ids_and_pos,
    "ids and positions": SequenceDescriptor.from_segment_ids_and_pos,
    "lengths": SequenceDescriptor.from_seqlens,
}

OPTIONS = {
    "all": Attention(0.3),
    "causal": Attention(0.3, causal=True),
    "bottom right": Attention(0.3, causal=True, bottom_right=True),
    "window": Attention(0.3, window=(2, 1)),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("how", ["offsets", "ids", "ids and positions"])
def test_packed_sequences_are_those_sequences_by_themselves(how, options):
    sequences = MAKE[how](*described(how))

    @jax.jit
    def step(query, key, value, dy, sequences=None):
        run = partial(dot_product_attention, options=options, sequence_descriptor=sequences)
        out, vjp = jax.vjp(run, query, key, value)
        return out, *vjp(dy)

    got = step(QUERY, KEY, VALUE, DY, sequences)
    covered = np.zeros((B, S), bool)
    for row, lengths in enumerate(ROWS):
        for start, length in lengths:
            part = np.s_[row : row + 1, start : start + length]
            covered[part] = True
            if length and how == "offsets":  # each length compiles anew; the other forms are compared below
                alone = step(*(x[part] for x in (QUERY, KEY, VALUE, DY)))
                testing.assert_close([x[part] for x in got], list(alone), F32, f"{row}, {start}: ")
    both_ways = [[(q0, n, q0, n) for q0, n in row] for row in ROWS]
    seen = numpy_attention.seen_keys(options, B, S, S, both_ways)
    out, grads = numpy_attention.attention(options, seen, QUERY, KEY, VALUE, DY)
    testing.assert_close(list(got), [out, *grads], F32)
    for x in got:
        assert not np.asarray(x)[~covered].any()


@pytest.mark.parametrize("bottom_right", [False, True])
def test_lengths_of_padded_rows(bottom_right):
    """One, none and all of the tokens; queries and keys of different lengths."""
    q_lengths, k_lengths = [S, 1, 7], [5, S, 0]
    options = Attention(0.3, causal=True, bottom_right=bottom_right)
    rows = [[(0, q, 0, k)] for q, k in zip(q_lengths, k_lengths)]
    seen = numpy_attention.seen_keys(options, B, S, S, rows)
    out, grads = numpy_attention.attention(options, seen, QUERY, KEY, VALUE, DY)
    for lengths in (np.array([q_lengths, k_lengths]), np.array([q_lengths, k_lengths])[..., None]):
        sequences = SequenceDescriptor.from_seqlens(tuple(lengths))
        op = lambda *args, sequences=sequences: dot_product_attention(*args, options=options, sequence_descriptor=sequences)  # noqa: E501  # fmt: skip
        got, vjp = jax.vjp(jax.jit(op), QUERY, KEY, VALUE)
        testing.assert_close([got, *vjp(jnp.asarray(DY))], [out, *grads], F32)


def test_bottom_right_counts_from_where_a_mask_ends():
    """As with lengths; so that the last query that is left sees the last key that is."""
    q_lengths, k_lengths = np.array([S, 1, 7]), np.array([5, S, 9])
    padding = lambda lengths: np.arange(S) >= lengths[:, None]
    mask = padding(q_lengths)[:, :, None] | padding(k_lengths)[:, None, :]
    options = Attention(0.3, causal=True, bottom_right=True)
    run = lambda **given: partial(dot_product_attention, options=options, **given)
    by_mask = run(mask=jnp.asarray(mask[:, None]))
    by_lengths = run(sequence_descriptor=SequenceDescriptor.from_seqlens((q_lengths, k_lengths)))
    got, expected = (jax.vjp(jax.jit(f), QUERY, KEY, VALUE) for f in (by_mask, by_lengths))
    dy = jnp.where(padding(q_lengths)[:, :, None, None], 0, DY)
    testing.assert_close([got[0], *got[1](dy)], [expected[0], *expected[1](dy)], F32)


def test_bottom_right_counts_from_the_last_position_that_is_given():
    """Of queries that are the last tokens of a sequence, and say so, each sees the keys up to itself."""
    ids, positions = jnp.ones((B, S), jnp.int32), jnp.zeros((B, S), jnp.int32) + jnp.arange(S, dtype=jnp.int32)
    rows = slice(S - 4, S, 3)  # some are left out
    sequences = SequenceDescriptor.from_segment_ids_and_pos((ids[:, rows], ids), (positions[:, rows], positions))
    run = lambda query, **given: dot_product_attention(
        query, KEY, VALUE, options=Attention(0.3, causal=True, bottom_right=True, window=(5, 0)), **given
    )
    testing.assert_close(run(QUERY[:, rows], sequence_descriptor=sequences), run(QUERY)[:, rows], F32)


@pytest.mark.parametrize("of", ["keys", "queries"])
def test_a_mask_of_one_side_does_not_tell_where_the_other_ends(of):
    """So bottom_right is that of the arrays: queries and keys of one sequence stay where they are."""
    padding = jnp.arange(S) >= jnp.array([5, S, 9])[:, None, None, None]
    mask = padding if of == "keys" else jnp.swapaxes(padding, 2, 3)
    run = lambda **fields: dot_product_attention(
        QUERY, KEY, VALUE, options=Attention(0.3, causal=True, **fields), mask=mask
    )
    testing.assert_same_bytes(run(bottom_right=True), run())
    nothing = dot_product_attention(
        QUERY,
        KEY[:, :0],
        VALUE[:, :0],
        options=Attention(0.3, causal=True, bottom_right=True),
        mask=jnp.zeros((B, 1, S, 0), bool),
    )
    assert nothing.shape == QUERY.shape and not nothing.any()


def test_lists_are_arrays_and_tuples_are_pairs():
    lengths = [[3, 5], [9, 7]]
    array = SequenceDescriptor.from_seqlens(jnp.asarray(lengths))
    pair = SequenceDescriptor.from_seqlens((jnp.asarray(lengths[0]), jnp.asarray(lengths[1])))
    testing.assert_same_bytes(SequenceDescriptor.from_seqlens(lengths), array)
    for of_arrays in (tuple(lengths), [*map(np.asarray, lengths)]):
        testing.assert_same_bytes(SequenceDescriptor.from_seqlens(of_arrays), pair)
    traced = jax.jit(lambda a, b: [SequenceDescriptor.from_seqlens(x) for x in (([3, a], [b, 7]), [[3, a], [b, 7]])])
    testing.assert_same_bytes(traced(5, 9), [pair, array])
    for numbers in ([16, 4], (16, 4), np.array([16, 4]), list(np.array([16, 4]))):
        testing.assert_same_bytes(
            SequenceDescriptor.from_seqlens(numbers), SequenceDescriptor.from_seqlens(np.array([16, 4]))
        )


def test_what_lies_in_the_padding_does_not_matter():
    sequences = SequenceDescriptor.from_seqlens(np.array([S, 5, 0]))
    hidden = (np.arange(S) >= np.array([[S], [5], [0]]))[..., None, None]

    @jax.jit
    def step(args, dy):
        run = partial(dot_product_attention, options=Attention(0.3), sequence_descriptor=sequences)
        out, vjp = jax.vjp(run, *args)
        return out, vjp(dy)

    clean = step([QUERY, KEY, VALUE], DY)
    testing.assert_same_bytes(step([np.where(hidden, np.nan, x) for x in (QUERY, KEY, VALUE)], DY), clean)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(clean))


def test_where_there_is_no_sequence():
    """Lengths below 1 take no room, and a sequence that starts below 0 is none, whatever its length."""
    lengths = SequenceDescriptor.from_seqlens
    at = SequenceDescriptor.from_seqlens_and_offsets
    for got, expected in (
        (lengths(np.array([[3, -1, 4]])), lengths(np.array([[3, 0, 4]]))),
        (at(np.array([[3, 4]]), np.array([[0, -1, -1]])), at(np.array([[3, 0]]), np.array([[0, -1, -1]]))),
    ):
        found, wanted = (places(one, S, S, Attention(1.0)) for one in (got, expected))
        testing.assert_same_bytes(found, wanted)
        testing.assert_same_bytes(runs(got)[1::2], runs(expected)[1::2])


# --- The promise of max_segments -------------------------------------------------------------------------------------


def attention_of(sequences, options=Attention(0.3, causal=True)):
    run = partial(dot_product_attention, options=options, sequence_descriptor=sequences)
    out, vjp = jax.vjp(jax.jit(run), QUERY, KEY, VALUE)
    return out, *vjp(jnp.asarray(DY))


@pytest.mark.parametrize("how", ["ids", "ids and positions"])
@pytest.mark.parametrize("most", [3, 7])
def test_a_promise_that_is_kept_changes_nothing(how, most):
    make = partial(SequenceDescriptor.from_segment_ids_and_pos, *described(how))
    testing.assert_same_bytes(attention_of(make(max_segments=most)), attention_of(make()))
    assert make().of_at_most(most).max_segments == most and make(max_segments=2).of_at_most(most).max_segments == 2


BROKEN = {
    "too many": (2, lambda ids, positions: None),
    "in two places": (4, lambda ids, positions: ids.__setitem__((1, slice(13, 16)), ids[1, 0])),
    "positions that skip": (4, lambda ids, positions: positions.__setitem__((1, 8), 5)),
    "positions that fall": (4, lambda ids, positions: positions.__setitem__((1, slice(6, 13)), range(7)[::-1])),
}


@pytest.mark.parametrize("case", BROKEN)
def test_rows_that_break_the_promise_are_nan(case):
    most, change = BROKEN[case]
    ids, positions = described("ids and positions", [[(0, 16)], [(0, 5), (5, 1), (6, 7)], [(2, 3), (9, 4)]])
    change(ids, positions)
    make = partial(SequenceDescriptor.from_segment_ids_and_pos, ids, positions)
    got, expected = attention_of(make(max_segments=most)), attention_of(make())
    assert np.isnan(got[0][1]).all()
    assert not any(np.asarray(x[1]).any() for x in got[1:]), "gradients of NaN"
    for row in (0, 2):
        testing.assert_same_bytes([x[row] for x in got], [x[row] for x in expected])


def test_where_segments_lie():
    """Queries and keys by their ids, in whatever order; ids that only one of them has; rows of padding."""
    q_ids = np.array([[3, 3, 0, 5, 5, 5, 9, 0], [0] * 8, [0, 0, 4, 4, 4, 4, 4, 4]])
    k_ids = np.array([[5, 5, 0, 0, 3, 3, 3, 8], [1] * 8, [4, 4, 4, 0, 0, 0, 0, 0]])
    at = runs(SequenceDescriptor.from_segment_ids_and_pos((q_ids, k_ids), max_segments=3))
    assert at.kept.all()
    found = np.asarray(jnp.stack(at[:4], axis=-1))
    assert found.tolist() == [[[0, 2, 4, 3], [3, 3, 0, 2], [6, 1, 0, 0]], [[0] * 4] * 3, [[2, 6, 0, 3], *[[0] * 4] * 2]]
    shifted = np.arange(8) + np.array([[0], [0], [7]])  # one id, whose positions begin elsewhere in keys
    sequences = SequenceDescriptor.from_segment_ids_and_pos(
        (np.ones((3, 8), int),) * 2, (np.arange(8) + np.zeros((3, 1), int), shifted), max_segments=1
    )
    at = runs(sequences)
    assert at.kept.tolist() == [True, True, False] and at.q_len[:, 0].tolist() == [8, 8, 0]


# --- Order -----------------------------------------------------------------------------------------------------------


def test_moving_a_sequence_in_its_row_moves_its_output():
    options = Attention(0.3, causal=True)
    lengths = np.array([[6]] * B)

    @jax.jit
    def run(start, *args):
        offsets = jnp.broadcast_to(jnp.stack([start, start + 6]), (B, 2))
        sequences = SequenceDescriptor.from_seqlens_and_offsets(lengths, offsets)
        return dot_product_attention(*args, options=options, sequence_descriptor=sequences)

    first = run(0, QUERY, KEY, VALUE)
    moved = run(4, *(np.roll(x, 4, axis=1) for x in (QUERY, KEY, VALUE)))
    testing.assert_close(np.roll(moved, -4, axis=1), first, F32)


@pytest.mark.parametrize("how", MAKE)
def test_where_ranks_must_agree(how):
    """jax_numpy_rank_promotion="raise", which some set for all of a program."""
    options = Attention(0.3, causal=True, window=(4, 0), softmax_type="off_by_one")
    for promised in (None, 3) if how.startswith("ids") else (None,):
        sequences = MAKE[how](*described(how))
        sequences = sequences if promised is None else sequences.of_at_most(promised)
        expected = attention_of(sequences, options)
        with jax.numpy_rank_promotion("raise"):
            testing.assert_same_bytes(attention_of(sequences, options), expected)


def test_causality_and_the_order_of_keys():
    """Later keys do not matter under a causal mask; without one, keys may come in any order."""
    changed = [np.concatenate([x[:, :9], -x[:, 9:]], axis=1) for x in (KEY, VALUE)]
    causal = jax.jit(lambda *args: dot_product_attention(*args, options=Attention(0.3, causal=True)))
    testing.assert_same_bytes(causal(QUERY, *changed)[:, :9], causal(QUERY, KEY, VALUE)[:, :9])
    assert (np.asarray(causal(QUERY, *changed))[:, 9:] != np.asarray(causal(QUERY, KEY, VALUE))[:, 9:]).all()
    order = np.random.default_rng(0).permutation(S)
    free = jax.jit(lambda *args: dot_product_attention(*args, options=Attention(0.3)))
    testing.assert_close(free(QUERY, KEY[:, order], VALUE[:, order]), free(QUERY, KEY, VALUE), F32)


def test_vmap_over_descriptors():
    lengths = np.array([[3, 16, 0], [5, 1, 9]])
    args = [np.stack([x, x[::-1]]) for x in (QUERY, KEY, VALUE)]

    def run(lengths, *args):
        sequences = SequenceDescriptor.from_seqlens(lengths)
        return dot_product_attention(*args, options=Attention(0.3, causal=True), sequence_descriptor=sequences)

    together = jax.jit(jax.vmap(run))(lengths, *args)
    alone = jax.jit(run)
    for i in range(2):
        testing.assert_close(together[i], alone(lengths[i], *(x[i] for x in args)), F32)


ONES = np.ones((B, S), int)


@pytest.mark.parametrize(
    "make, arrays, message",
    [
        ("lengths", (np.ones(B),), r"seqlens: expected integers of rank 1 or 2, got float32\[3\]"),
        ("lengths", (np.ones((B, S, 1), int),), r"seqlens: .* got int32\[3, 16, 1\]"),
        ("lengths", ((ONES,) * 3,), "seqlens: expected an array or a pair of arrays, got 3"),
        (
            "lengths",
            ([[3, 5], [9]],),
            r"seqlens: expected an array, or a pair of them as a tuple, got \[\[3, 5\], \[9\]\]",
        ),
        ("lengths", ((np.ones(B, int), 4),), r"seqlens: expected integers of rank 1 or 2, got int32\[\]"),
        ("lengths", (np.ones(2, int),), r"seqlens of the queries: expected \[3\], got \[2\]"),
        ("offsets", (ONES[:, :2], ONES[:, :2]), r"seq_offsets: expected \[3, 3\]"),
        ("ids", (ONES[0],), r"segment_ids: expected integers of rank 2, got int32\[16\]"),
        ("ids", (ONES, ONES[:, :2]), r"segment_pos: expected \[3, 16\], got \[3, 2\]"),
        ("ids", ((ONES, ONES[:, :8]),), r"segment_ids of the keys: expected \[3, 16\], got \[3, 8\]"),
        ("bounded ids", (ONES, 0), "max_segments: expected how many sequences a row has at most, 1 or more, .* got 0"),
        ("bounded ids", (ONES, 2.0), "max_segments: expected how many .* got 2.0"),
        ("nothing", (), "seqlens: expected a pair of arrays, .* got None; make one with a from_... method"),
        ("fields", ((ONES[:, 0], None),), r"seqlens: expected a pair of arrays, .* got \(\(3,\), None\)"),
        ("fields", (None, None, (None, ONES)), r"segment_ids: expected a pair of arrays, .* got \(None, \(3, 16\)\)"),
        ("fields", (ONES[:, 0],), r"seqlens: expected a pair of arrays, .* got \(3,\)"),
    ],
)
def test_misuse_is_named(make, arrays, message):
    bounded = lambda ids, most: SequenceDescriptor.from_segment_ids_and_pos(ids, max_segments=most)
    with pytest.raises(ValueError, match=message):
        sequences = {**MAKE, "bounded ids": bounded}.get(make, SequenceDescriptor)(*arrays)
        dot_product_attention(QUERY, KEY, VALUE, options=Attention(1.0), sequence_descriptor=sequences)


# --- Options drawn at random -----------------------------------------------------------------------------------------


@st.composite
def cases(draw):
    """(options, seed, batch, lengths, heads, groups, head sizes, kind of visibility, bias shape or None)."""
    sizes = st.integers(1, 8)
    groups, repeats = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    batch, q_len, k_len, heads = draw(st.integers(1, 2)), draw(sizes), draw(sizes), groups * repeats
    reach = st.integers(-1, 4)
    options = Attention(
        scale=draw(st.sampled_from([0.25, 1.0])),
        causal=draw(st.booleans()),
        bottom_right=draw(st.booleans()),
        window=draw(st.none() | st.tuples(reach, reach)),
        bias_before_scale=draw(st.booleans()),
        softmax_type=draw(st.sampled_from(["vanilla", "off_by_one", "learnable"])),
    )
    kind = draw(st.sampled_from(["all", "mask", *MAKE]))
    full = (batch, heads, q_len, k_len)
    axes = draw(st.none() | st.tuples(*[st.booleans()] * 4))
    bias = None if axes is None else tuple(n if whole else 1 for n, whole in zip(full, axes))
    return options, draw(st.integers(0, 99)), full, groups, (draw(sizes), draw(sizes)), kind, bias


def cut(rng, rows: int, size: int, most: int, gaps: bool) -> list[list[tuple[int, int]]]:
    """Rows of up to `most` sequences (first token, length), some of them empty, with or without gaps between them."""
    out = []
    for _ in range(rows):
        ends = np.sort(rng.integers(0, size + 1, 2 * most if gaps else most))
        starts = ends[::2] if gaps else np.concatenate([[0], ends[:-1]])
        out.append([(int(a), int(b - a)) for a, b in zip(starts, ends[1::2] if gaps else ends)])
    return out


@settings(deadline=None, max_examples=40, derandomize=True)
@given(cases())
def test_any_shapes_masks_and_options(case):
    options, seed, (batch, heads, q_len, k_len), groups, (size, v_size), kind, bias_shape = case
    rng = np.random.default_rng(seed)
    shapes = (batch, q_len, heads, size), (batch, k_len, groups, size), (batch, k_len, groups, v_size)
    query, key, value, dy, offset = normal(seed, *shapes, (batch, q_len, heads, v_size), (heads,))
    bias = None if bias_shape is None else normal(seed, bias_shape)[0]
    mask = rng.random((batch, 1, q_len, k_len)) < 0.4 if kind == "mask" else None
    sequences = rows = None
    if kind in MAKE:
        gaps = kind != "lengths"
        q_rows, k_rows = (cut(rng, batch, n, 3, gaps) for n in (q_len, k_len))
        rows = [[(*q, *k) for q, k in zip(*both)] for both in zip(q_rows, k_rows)]
        sides = [described(kind, side, n) for side, n in ((q_rows, q_len), (k_rows, k_len))]
        sequences = MAKE[kind](*zip(*sides))

    extra = {} if bias is None else {"bias": bias}
    extra |= {"softmax_offset": offset} if options.softmax_type == "learnable" else {}
    run = lambda *args: dot_product_attention(
        *args[:3], options=options, mask=mask, sequence_descriptor=sequences, **dict(zip(extra, args[3:]))
    )

    @jax.jit
    def step(dy, *args):
        out, vjp = jax.vjp(run, *args)
        return out, list(vjp(dy))

    got = step(dy, query, key, value, *extra.values())
    seen = numpy_attention.seen_keys(options, batch, q_len, k_len, rows, mask)
    expected = numpy_attention.attention(options, seen, query, key, value, dy, bias, extra.get("softmax_offset"))
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        # Gradients of a few logits may cancel: the error is that of their terms, of size 1, and not of what is left.
        assert g.shape == e.shape and np.linalg.norm(g - e) <= F32 * (np.linalg.norm(e) + np.sqrt(e.size))
