"""The kernels of packed rows: handlers, references, shards, malformed calls.

On a GPU the handlers are cuDNN's; elsewhere the kernels are their references.
"""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import numpy_attention
import pytest
from hopper import of_handlers
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import Attention, SequenceDescriptor, flash, flash_packed
from transformer_engine_jax.ops.attention.flash_packed import (
    attention_blank,
    attention_packed_bwd,
    attention_packed_fwd,
    packed_attention,
)
from transformer_engine_jax.ops.attention.sequences import Runs, attending, runs

GPU = jax.default_backend() == "gpu"
TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-5}

B, Q, K = 8, 40, 56
# (first query, queries, first key, keys): gaps, a sequence without keys, one without queries, none, one of all.
ROWS = [
    [(0, 9, 0, 20), (9, 1, 20, 1), (12, 20, 30, 7)],
    [(0, Q, 0, K)],
    [],
    [(3, 5, 0, 0), (8, 0, 4, 9), (39, 1, 55, 1)],
]


@pytest.fixture(autouse=True)
def handlers():
    if GPU and flash.missing():
        pytest.skip(flash.missing())


def sequences() -> list[jax.Array]:
    """q_start, q_len, k_start and k_len i32[B, 3] of ROWS, each twice; queries without keys have no length."""
    at = np.full((4, B, 3), -1)
    at[[1, 3]] = 0
    for row in range(B):
        for n, (q0, q_size, k0, k_size) in enumerate(ROWS[row % 4]):
            some = q_size > 0 and k_size > 0
            at[:, row, n] = q0, q_size if some else 0, k0, k_size if some else 0
    return [jnp.asarray(x, jnp.int32) for x in at]


def operands(groups: int, repeats: int, size: int, dtype) -> list[jax.Array]:
    """q, k, v and do, zeros between sequences, as the op has them."""
    shapes = [(B, Q, groups, repeats, size), *[(B, K, groups, size)] * 2, (B, Q, groups, repeats, size)]
    q, k, v, do = (jnp.asarray(x, dtype) for x in emulated.normal(6, *shapes))
    at = sequences()
    hide = lambda x, start, length: attention_blank.reference(x, start, length)
    return [hide(q, *at[:2]), hide(k, *at[2:]), hide(v, *at[2:]), hide(do, *at[:2])]


@pytest.mark.parametrize("dtype, size", of_handlers(("bfloat16", 64), ("bfloat16", 128), ("float16", 48)))
@pytest.mark.parametrize("fields", [dict(), dict(causal=True), dict(causal=True, left=7)], ids=str)
@pytest.mark.parametrize("heads", ["groups", "repeats"])  # those that the mesh splits
def test_kernels_are_their_references(dtype, size, fields, heads):
    q, k, v, do = operands(2, 2, size, dtype)
    attributes = dict(scale=size**-0.5, **fields)
    options = Attention(1.0, causal="causal" in fields, window=(fields["left"], 0) if "left" in fields else None)
    at = attending(options, Runs(*sequences(), None), Q, K)[:4]  # statistics of queries that see nothing are infinite
    of_keys = P("data", None, "model" if heads == "groups" else None)
    of_queries = of_keys if heads == "groups" else P("data", None, None, "model")
    compare = lambda got, expected: testing.assert_close(list(got), list(expected), TOLERANCE[dtype])
    specs = [of_queries, *2 * [of_keys], *4 * [P("data")], None]
    testing.check_kernel(attention_packed_fwd, [q, k, v, *at, None], attributes, compare, specs=specs)
    out = attention_packed_fwd.reference(q, k, v, *at, None, **attributes)
    specs = [*2 * [of_queries], *2 * [of_keys], *2 * [of_queries], *4 * [P("data")]]
    testing.check_kernel(attention_packed_bwd, [out.stats, q, k, v, out.o, do, *at], attributes, compare, specs=specs)


@pytest.mark.parametrize("dtype, shape", [("bfloat16", (2, 3, 16)), ("float32", (5,)), ("float16", (3,))])
def test_blank_is_its_reference(dtype, shape):
    x, at = jnp.asarray(emulated.normal(7, (B, Q, *shape))[0], dtype).at[:, 10].set(jnp.nan), sequences()[:2]
    specs = [P("data", None, *len(shape) * [None]), P("data"), P("data")]
    testing.check_kernel(attention_blank, [x, *at], {}, testing.assert_same_bytes, specs=specs)
    got, covered = np.asarray(attention_blank(x, *at), np.float32), np.zeros((B, Q), bool)
    for row in range(B):
        for q0, q_size, _, k_size in ROWS[row % 4]:
            covered[row, q0 : q0 + (q_size if k_size else 0)] = True
    assert not got[~covered].any()
    testing.assert_same_bytes(got[covered], np.asarray(x, np.float32)[covered])
    if GPU:
        elsewhere = jax.ffi.ffi_call("te_attention_blank", jax.ShapeDtypeStruct(x.shape, x.dtype))
        testing.assert_same_bytes(jax.jit(elsewhere)(x, *at), attention_blank(x, *at))


@pytest.mark.parametrize("offset", [None, (0.5, -2.0, 3.0, 0.0)], ids=["", "offset"])
@pytest.mark.parametrize("heads, devices", [((4, 4), 1), ((4, 2), 1), ((4, 2), 4)], ids=str)
def test_what_lies_between_sequences_does_not_matter(heads, devices, offset, monkeypatch):
    """Not where it is NaN, in operands and in the output's gradient; devices: that heads are repeated for."""
    dtype, size = "bfloat16" if GPU else "float32", 32
    monkeypatch.setattr(flash, "shards", lambda _: devices)
    shapes = [(B, Q, heads[0], size), *[(B, K, heads[1], size)] * 2, (B, Q, heads[0], size)]
    q, k, v, do = (jnp.asarray(x, dtype) for x in emulated.normal(8, *shapes))
    options = Attention(0.2, causal=True, softmax_type="learnable" if offset else "vanilla")
    at = Runs(*sequences(), None)
    inside = lambda x, start, length: attention_blank.reference(jnp.ones_like(x), start, length) > 0
    within = inside(q, *at[:2]), inside(k, *at[2:4])
    dirty = [jnp.where(within[i], x, jnp.nan) for x, i in ((q, 0), (k, 1), (v, 1), (do, 0))]
    offset = [] if offset is None else [jnp.asarray(offset)]
    out, vjp = jax.vjp(jax.jit(lambda q, k, v, *s: packed_attention(options, q, k, v, at, *s)), *dirty[:3], *offset)
    seen = numpy_attention.seen_keys(options, B, Q, K, [ROWS[row % 4] for row in range(B)])
    exact = (np.asarray(x, np.float32) for x in (q, k, v, do))
    expected = numpy_attention.attention(options, seen, *exact, None, *(np.asarray(s) for s in offset))
    testing.assert_close((out, list(vjp(dirty[3]))), expected, TOLERANCE[dtype])


def test_sequences_end_where_their_row_does():
    """cuDNN would go on into the next row, and past the array."""
    at = Runs(
        *(jnp.array([n], jnp.int32) for n in ([0, 30, 50, 8], [50, 30, 5, 0], [0, 50, 0, 0], [5, 30, 9, 4])), None
    )
    got = attending(Attention(1.0), at, Q, K)
    assert got.q_len.tolist() == [[40, 10, 0, 0]] and got.k_len.tolist() == [[5, 6, 0, 0]]


@pytest.mark.parametrize(
    "described",
    [
        SequenceDescriptor.from_segment_ids_and_pos(np.ones((1, 4), int), np.arange(4)[None], max_segments=2),
        SequenceDescriptor.from_seqlens(np.array([[2, 2]])),
        SequenceDescriptor.from_seqlens_and_offsets(np.array([[2, 1]]), np.array([[0, 3, -1]])),
    ],
    ids=["ids", "lengths", "offsets"],
)
def test_handlers_get_32_bits_whatever_jax_counts_in(described):
    with jax.enable_x64(True):
        at = attending(Attention(1.0, causal=True, window=(2, 0)), runs(described), 4, 4)
    assert {x.dtype for x in at[:4]} == {np.dtype("int32")}


def test_rows_that_are_not_kept_are_nan():
    dtype = "bfloat16" if GPU else "float32"
    q, k, v, do = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in operands(2, 1, 32, dtype))
    kept = jnp.arange(B) != 1
    at = Runs(*(jnp.where(kept[:, None], x, 0) for x in sequences()), kept)
    out, vjp = jax.vjp(jax.jit(lambda *args: packed_attention(Attention(0.2), *args, at)), q, k, v)
    grads = vjp(do)
    assert np.isnan(np.asarray(out[1], np.float32)).all()
    assert np.isfinite(np.asarray(jnp.delete(out, 1, axis=0), np.float32)).all()
    assert all(np.isfinite(np.asarray(x, np.float32)).all() and not np.asarray(x[1]).any() for x in grads)


# --- The handlers ----------------------------------------------------------------------------------------------------


def test_lowered_for_cuda_needs_no_gpu():
    x, at = jnp.ones((2, 64, 4, 64), jnp.bfloat16), jnp.ones((2, 3), jnp.int32)
    rows = Runs(*4 * [at], jnp.ones(2, bool))
    loss = lambda *args: jnp.sum(packed_attention(Attention(0.125), *args, rows).astype(jnp.float32))
    text = jax.jit(jax.grad(loss)).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert all(f"te_{name}" in text for name in ("attention_packed_fwd", "attention_packed_bwd", "attention_blank"))


def test_scratch_memory_grows_with_tokens_and_not_with_sequences(monkeypatch):
    monkeypatch.setattr(flash, "on_hopper", lambda: True)
    q, k, start = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4, 4000, 8, 4, 128), (4, 4096, 8, 128), (4, 64)))
    offsets = 3 * 2304  # of 257 sequences, 8 bytes each, in pages of 256
    assert attention_packed_fwd.workspace(q, k, k, start) == (1 << 20) + offsets
    rows, shared = 4 * 4000 * 32, 2 * 4 * 4096 * 32 * 128
    assert attention_packed_bwd.workspace(None, q, k, k, None, None, start) == (1 << 20) + offsets + 4 * (
        rows * 130 + shared
    )


MALFORMED = {
    "dtype": (dict(q=jnp.zeros((2, 64, 4, 1, 64))), {}, "te_attention_packed_fwd: q: expected bf16 or f16, got f32"),
    "head size": (
        {name: jnp.zeros((2, 64, 4, *one, 24), jnp.bfloat16) for name, one in (("q", (1,)), ("k", ()), ("v", ()))},
        {},
        "q: expected a head size in multiples of 16",
    ),
    "lengths": (dict(q_len=jnp.ones((2, 4), jnp.int32)), {}, r"q_start: expected \[2,4\], got s32\[2,3\]"),
    "kept": (dict(kept=jnp.ones(3, bool)), {}, r"kept: expected \[2\], got pred\[3\]"),
    "window": ({}, dict(left=np.int64(3)), "left: expected a window only where causal"),
}

if GPU:  # elsewhere there is no handler

    @pytest.mark.parametrize("case", MALFORMED)
    def test_malformed_calls_raise(case):
        replaced, attributes, message = MALFORMED[case]
        q, kv, at = (
            jnp.zeros((2, 64, 4, 1, 64), jnp.bfloat16),
            jnp.zeros((2, 64, 4, 64), jnp.bfloat16),
            jnp.ones((2, 3)),
        )
        names = "q_start", "q_len", "k_start", "k_len"
        given = dict(q=q, k=kv, v=kv) | dict.fromkeys(names, at.astype(jnp.int32)) | dict(kept=jnp.zeros(0)) | replaced
        results = [
            jax.ShapeDtypeStruct(given["q"].shape, given["q"].dtype),
            jax.ShapeDtypeStruct((2, 64, 4, 1), jnp.float32),
            jax.ShapeDtypeStruct((64 << 20,), jnp.uint8),
        ]
        static = (
            dict(scale=np.float32(1.0), causal=False, left=np.int64(-1), buffers=np.zeros(0, np.int64)) | attributes
        )
        with pytest.raises(Exception, match=message):
            call = jax.ffi.ffi_call("te_attention_packed_fwd", results)
            jax.block_until_ready(call(*given.values(), **static))

    def test_segment_ids_with_a_bound_run_the_handlers():
        q = jnp.asarray(emulated.normal(9, (2, 256, 4, 64))[0], jnp.bfloat16)
        ids = jnp.asarray(np.arange(256) // 90 + 1 + np.zeros((2, 1), int))
        attend = lambda q, most: te.dot_product_attention(
            q, q, q, options=Attention(0.125, causal=True),
            sequence_descriptor=SequenceDescriptor.from_segment_ids_and_pos(ids, max_segments=most),
        )  # fmt: skip
        compiled = jax.jit(partial(attend, most=3)).lower(q).compile().as_text()
        assert flash_packed.packs() and "te_attention_packed_fwd" in compiled
        testing.assert_close(attend(q, 3), attend(q, None), TOLERANCE["bfloat16"])
