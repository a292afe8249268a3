"""Which backend is chosen and why; what cuDNN is told, shown by a stand-in; and cuDNN itself where there is a GPU."""

import contextlib
import re
import warnings
from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import numpy_attention
import pytest
from cudnn_stand_in import replace_cudnn
from emulated import BF16, F32
from hopper import choose_as_on_hopper
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import (
    Attention,
    SequenceDescriptor,
    attention_backend,
    backends,
    cudnn,
    dot_product_attention,
    flash_packed,
)
from transformer_engine_jax.ops.attention.cudnn import _as_query, cudnn_attention
from transformer_engine_jax.ops.attention.sequences import places

B, Q, K, H, G, D, DV = 3, 32, 24, 4, 2, 24, 16
QUERY, KEY, VALUE, DY = emulated.normal(2, (B, Q, H, D), (B, K, G, D), (B, K, G, DV), (B, Q, H, DV))
BIAS, = emulated.normal(3, (1, H, Q, K))  # fmt: skip
MASK = np.random.default_rng(0).random((B, 1, Q, K)) < 0.3
MASK[0, :, 3] = True  # a query that sees nothing

Q_LENGTHS, K_LENGTHS = np.array([Q, 1, 20]), np.array([10, K, 0])
PADDED = SequenceDescriptor.from_seqlens((Q_LENGTHS, K_LENGTHS))
PADDED_ROWS = [[(0, q, 0, k)] for q, k in zip(Q_LENGTHS, K_LENGTHS)]
# (first query, queries, first key, keys); a sequence without keys, one without queries, gaps.
PACKED_ROWS = [[(0, Q, 0, K)], [(0, 5, 0, 6), (5, 7, 8, 0), (12, 0, 8, 4), (14, 9, 12, 12)], [(3, 20, 2, 9)]]


def packed() -> SequenceDescriptor:
    n = np.full((2, B, 4), -1)
    starts = np.full((2, B, 5), -1)
    for row, sequences in enumerate(PACKED_ROWS):
        for i, (q0, q_size, k0, k_size) in enumerate(sequences):
            n[:, row, i], starts[:, row, i] = (q_size, k_size), (q0, k0)
    return SequenceDescriptor.from_seqlens_and_offsets(tuple(n), tuple(starts))


IDS = SequenceDescriptor.from_segment_ids_and_pos(np.ones((B, K), int))

# form of visibility, options, descriptor, rows, mask, bias
CASES = {
    "all": ("plain", dict(), None, None, None, None),
    "causal": ("plain", dict(causal=True), None, None, None, None),
    "causal, bias": ("plain", dict(causal=True), None, None, None, BIAS),
    "bias before scale": ("plain", dict(bias_before_scale=True), None, None, None, BIAS[:, :, :1]),
    "window": ("mask", dict(causal=True, window=(9, 0)), None, None, None, None),
    "window of few": ("mask", dict(causal=True, window=(2, 0)), None, None, None, None),
    "window both ways": ("mask", dict(window=(9, 3)), None, None, None, None),
    "bottom right": ("mask", dict(causal=True, bottom_right=True), None, None, None, None),
    "mask": ("mask", dict(), None, None, MASK, None),
    "causal mask, bias": ("mask", dict(causal=True), None, None, MASK, BIAS),
    "lengths": ("lengths", dict(), PADDED, PADDED_ROWS, None, None),
    "causal lengths": ("lengths", dict(causal=True), PADDED, PADDED_ROWS, None, None),
    "window of lengths": ("lengths", dict(causal=True, window=(4, 0)), PADDED, PADDED_ROWS, None, None),
    "lengths, bottom right": ("mask", dict(causal=True, bottom_right=True), PADDED, PADDED_ROWS, None, None),
    "packed": ("packed", dict(), packed(), PACKED_ROWS, None, None),
    "causal packed": ("packed", dict(causal=True), packed(), PACKED_ROWS, None, None),
    "window of packed": ("packed", dict(causal=True, window=(4, 0)), packed(), PACKED_ROWS, None, None),
}


@pytest.fixture
def stand_in(monkeypatch, request):
    """Of JAX's calls; packed rows have handlers of ours, and references."""
    packed = "packed" in request.node.callspec.params["case"]
    monkeypatch.setattr(backends, "packs", lambda: packed)
    monkeypatch.setattr(cudnn, "_has_handlers", lambda *_: False)
    if jax.default_backend() != "gpu" or request.function is not test_odd_lengths:
        replace_cudnn(monkeypatch)


def run_step(call, bias, dtype=jnp.float32, place=None):
    """place: puts queries, keys, values and the cotangent where they are to be; the bias stays."""
    *qkv, dy = (jnp.asarray(x, dtype) for x in (QUERY, KEY, VALUE, DY))
    if place is not None:
        *qkv, dy = map(place, (*qkv, dy))
    args = [*qkv, *([] if bias is None else [jnp.asarray(bias, dtype)])]

    @jax.jit
    def step(dy, *args):
        out, vjp = jax.vjp(call, *args)
        return out, list(vjp(dy))

    return step(dy, *args)


@pytest.mark.parametrize("case", CASES)
def test_what_cudnn_is_told(case, stand_in):
    form, fields, sequences, rows, mask, bias = CASES[case]
    options = Attention(0.3, **fields)
    assert backends.visibility_form(options, Q, K, sequences, mask) == form
    queries, keys = places(sequences, Q, K, options)

    def call(query, key, value, bias=None):
        return cudnn_attention(
            options, query, key, value,
            sequence_descriptor=sequences, queries=queries, keys=keys, mask=mask, bias=bias,
        )  # fmt: skip

    seen = numpy_attention.seen_keys(options, B, Q, K, rows, mask)
    expected = numpy_attention.attention(options, seen, QUERY, KEY, VALUE, DY, bias)
    with testing.reference_kernels():
        testing.assert_close(run_step(call, bias), expected, F32)


@pytest.mark.parametrize("explicit", [False, True], ids=["", "explicit"])
@pytest.mark.parametrize("case", CASES)
def test_cudnn_itself(case, explicit):
    """On a GPU, cuDNN in bf16; elsewhere the op, which says that it is not cuDNN. Also on explicit mesh axes."""
    _, fields, sequences, rows, mask, bias = CASES[case]
    options = Attention(0.3, **fields)
    described = dict(sequence_descriptor=sequences, mask=mask)
    bf16 = [jnp.asarray(x, jnp.bfloat16) for x in (QUERY, KEY, VALUE)]
    backend, why = attention_backend(options, *bf16, bias=bias, **described)
    assert backend == ("cudnn" if jax.default_backend() == "gpu" else "reference"), why
    queries, keys = places(sequences, Q, K, options)

    def call(query, key, value, bias=None):
        if backend == "cudnn":
            where = dict(queries=queries, keys=keys)
            return cudnn_attention(options, query, key, value, bias=bias, **described, **where)
        return dot_product_attention(query, key, value, options=options, bias=bias, **described)

    seen = numpy_attention.seen_keys(options, B, Q, K, rows, mask)
    rounded = [np.asarray(x, np.float32) for x in (*bf16, jnp.asarray(DY, jnp.bfloat16))]
    bias = None if bias is None else np.asarray(jnp.asarray(bias, jnp.bfloat16), np.float32)
    expected = numpy_attention.attention(options, seen, *rounded, bias)
    mesh = testing.mesh_of((1, 1), ("data", "model"), explicit=True)
    with testing.on_mesh(mesh) if explicit else contextlib.nullcontext():
        place = partial(jax.device_put, device=NamedSharding(mesh, P("data", None, "model"))) if explicit else None
        got = run_step(call, bias, jnp.bfloat16, place)
    # Roundings of weights, of their gradients, of the results; and of gradients of groups, twice.
    testing.assert_close(jax.device_get(got), expected, 5 * BF16)


def test_cudnn_itself_in_a_window():
    """Causal windows of as many keys as queries need no mask."""
    x = emulated.normal(4, *((B, Q, heads, D) for heads in (H, G, G, H)))
    x = [jnp.asarray(a, jnp.bfloat16) for a in x]
    options = Attention(0.3, causal=True, window=(9, 0))
    assert backends.visibility_form(options, Q, Q, None, None) == "plain"
    seen = numpy_attention.seen_keys(options, B, Q, Q, None, None)
    expected = numpy_attention.attention(options, seen, *(np.asarray(a, np.float32) for a in x), None)
    out, vjp = jax.vjp(partial(dot_product_attention, options=options), *x[:3])
    testing.assert_close((out, list(vjp(x[3]))), expected, 5 * BF16)


OF_31_AND_23 = SequenceDescriptor.from_seqlens((np.array([31, 8, 20]), np.array([10, 23, 9])))
OF_31_AND_23_ROWS = [[(0, 31, 0, 10)], [(0, 8, 0, 23)], [(0, 20, 0, 9)]]
ODD = {  # queries, keys, options, mask, bias, rows of OF_31_AND_23
    "all": (31, 23, dict(), None, None, None),
    "causal": (31, 24, dict(causal=True), None, None, None),
    "window": (23, 23, dict(causal=True, window=(9, 0)), None, None, None),
    "mask": (31, 24, dict(causal=True), MASK[:, :, :-1], None, None),
    "bias": (32, 23, dict(causal=True), None, BIAS[..., :-1], None),
    "bias of one query": (1, 23, dict(), None, BIAS[:, :, :1, :-1], None),
    "mask and bias": (31, 23, dict(), MASK[:1, :, :1, :-1], BIAS[:, :1, :1, :-1], None),
    "lengths": (31, 23, dict(causal=True), None, None, OF_31_AND_23_ROWS),
    "lengths and bias": (31, 23, dict(), None, BIAS[:, :, :-1, :-1], OF_31_AND_23_ROWS),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_lengths(case, stand_in):
    """JAX's call, as for head sizes above 128, is given even ones. On a GPU itself, in bf16; elsewhere the stand-in."""
    q_len, k_len, fields, mask, bias, rows = ODD[case]
    gpu, options = jax.default_backend() == "gpu", Attention(0.3, **fields)
    dtype, bound = (jnp.bfloat16, 5 * BF16) if gpu else (jnp.float32, F32)
    arrays = [QUERY[:, :q_len], KEY[:, :k_len], VALUE[:, :k_len], DY[:, :q_len]]
    *qkv, dy = (jnp.asarray(x, dtype) for x in arrays)
    bias = None if bias is None else jnp.asarray(bias, dtype)
    sequences = None if rows is None else OF_31_AND_23
    queries, keys = places(sequences, q_len, k_len, options)

    def call(*args):
        at = dict(sequence_descriptor=sequences, queries=queries, keys=keys, mask=mask)
        return cudnn_attention(options, *args[:3], bias=args[3] if args[3:] else None, **at)

    seen = numpy_attention.seen_keys(options, B, q_len, k_len, rows, mask)
    wide = [None if x is None else np.asarray(x, np.float32) for x in (*qkv, dy, bias)]
    out, vjp = jax.vjp(call, *qkv, *([] if bias is None else [bias]))
    testing.assert_close((out, list(vjp(dy))), numpy_attention.attention(options, seen, *wide), bound)


LENGTHS = dict(sequence_descriptor=SequenceDescriptor.from_seqlens(np.array([16, 9])))
SEGMENTS = SequenceDescriptor.from_segment_ids_and_pos(np.repeat([[1, 2]], 8, axis=1).repeat(2, axis=0))


@pytest.mark.parametrize(
    "heads, size, devices, missing, fields, call, ours",
    [
        ((4, 2), 64, 1, "", {}, {}, "attention_fwd"),
        ((4, 2), 64, 1, "", dict(causal=True, window=(9, 0)), {}, "attention_fwd"),
        ((4, 4), 64, 4, "", {}, {}, "attention_fwd"),
        ((4, 2), 64, 4, "", {}, {}, ""),  # keys and values would be repeated
        ((4, 2), 256, 1, "", {}, {}, ""),
        ((4, 2), 64, 1, "no headers", {}, {}, ""),
        ((4, 2), 64, 1, "", {}, dict(bias=jnp.zeros((1, 1, 16, 16))), ""),
        ((4, 2), 64, 1, "", {}, dict(mask=jnp.zeros((1, 1, 16, 16), bool)), ""),
        ((4, 2), 64, 1, "", {}, LENGTHS, "attention_packed_fwd"),
        ((4, 2), 72, 1, "", {}, LENGTHS, "attention_fwd"),  # for the other, heads would be widened
        ((4, 2), 64, 1, "", dict(softmax_type="off_by_one", causal=True, window=(9, 0)), {}, "attention_fwd"),
        ((4, 2), 64, 1, "", dict(softmax_type="off_by_one"), LENGTHS, "attention_packed_fwd"),
        ((4, 2), 64, 1, "", dict(dropout=0.1), dict(**LENGTHS, dropout_key=jax.random.key(0)), "attention_fwd"),
        ((4, 2), 64, 1, "no headers", {}, LENGTHS, ""),
        ((4, 2), 72, 4, "", {}, dict(sequence_descriptor=SEGMENTS.of_at_most(2)), "attention_packed_fwd"),
        ((4, 2), 64, 1, "no headers", {}, dict(sequence_descriptor=SEGMENTS.of_at_most(2)), ""),
        ((4, 2), 64, 1, "", {}, dict(sequence_descriptor=SEGMENTS), ""),
    ],
    ids=str,
)
def test_which_of_cudnns_calls(heads, size, devices, missing, fields, call, ours, monkeypatch):
    monkeypatch.setattr(backends, "platform", lambda: "gpu")  # nothing is compiled
    for module in (backends, cudnn, flash_packed):
        monkeypatch.setattr(module, "missing", lambda: missing)
    monkeypatch.setattr(cudnn, "on_hopper", lambda: True)
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda query, *_, **__: query)
    query, key = (jax.ShapeDtypeStruct((2, 16, n, size), jnp.bfloat16) for n in heads)
    attend = partial(dot_product_attention, options=Attention(0.3, **fields), **call)
    text = str(jax.make_jaxpr(attend)(query, key, key))
    assert set(re.findall(r"\battention[a-z_]*_fwd", text)) == ({ours} if ours else set())


@pytest.mark.parametrize(
    "capabilities, missing, deterministic, packs",
    [
        ([9.0], "", False, True),
        ([10.0], "", False, True),
        ([9.0, 12.0], "", False, False),
        ([8.9], "", False, False),
        ([9.0], "no headers", False, False),
        ([9.0], "", True, False),
    ],
)
def test_where_packed_rows_have_handlers(capabilities, missing, deterministic, packs, monkeypatch):
    monkeypatch.setattr(flash_packed, "compute_capabilities", lambda: capabilities)
    monkeypatch.setattr(flash_packed, "missing", lambda: missing)
    monkeypatch.setattr(flash_packed, "deterministic", lambda: deterministic)
    assert flash_packed.packs() == packs
    for sequences in (packed(), IDS.of_at_most(1)):
        assert backends.visibility_form(Attention(1.0), K, K, sequences, None) == ("packed" if packs else "mask")
    none = SequenceDescriptor.from_seqlens(np.ones((B, 0), int))  # of which a kernel would write nothing
    assert backends.visibility_form(Attention(1.0), K, K, none, None) == "mask"


def test_jaxs_call_where_ours_was_not_measured(monkeypatch):
    query = jnp.zeros((2, 16, 4, 64))
    monkeypatch.setattr(cudnn, "missing", lambda: "")
    for hopper in (True, False):
        monkeypatch.setattr(cudnn, "on_hopper", lambda hopper=hopper: hopper)
        monkeypatch.setattr(jax, "device_count", lambda: 1)
        assert cudnn._has_handlers(Attention(0.3), query, query) == hopper


def test_whose_sequences_are_packed(monkeypatch):
    """Lengths that have offsets, and as many of queries as of keys."""
    monkeypatch.setattr(backends, "packs", lambda: True)
    form = partial(backends.visibility_form, Attention(1.0), Q, K, mask=None)
    ones = lambda n: np.ones((B, n), int)
    assert form(SequenceDescriptor.from_seqlens(ones(1))) == "lengths"
    assert form(SequenceDescriptor.from_seqlens_and_offsets(ones(1), ones(2))) == "packed"
    assert form(SequenceDescriptor.from_seqlens((ones(2), ones(3)))) == "mask"


# --- The choice ------------------------------------------------------------------------------------------------------


def of_long(examples_and_heads: tuple[int, int]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*examples_and_heads, 2**15, 2**14), jnp.bool_)


@pytest.mark.parametrize(
    "shapes, fields, call, why",
    [
        ({}, {}, {}, "has all that is asked for"),
        ({"dtype": jnp.float32}, {}, {}, r"bf16 or f16, not \['float32'\]"),
        ({"d": 256}, {}, {}, "has all that is asked for"),
        ({"d": 264}, {}, {}, "head sizes up to 256, not 264"),
        ({"d": 20}, {}, {}, "has all that is asked for"),
        ({"k": 0}, {}, {}, "more than one query or key"),
        ({"q": 1, "k": 1}, {}, {}, "more than one query or key"),
        ({"k": 25}, {"causal": True}, {}, "has all that is asked for"),
        ({"k": 25}, {"causal": True, "bottom_right": True}, {}, "has all that is asked for"),
        ({"q": 31}, {}, {"bias": BIAS[:, :, :1]}, "has all that is asked for"),
        ({}, {"softmax_type": "off_by_one"}, {}, "has all that is asked for"),
        ({}, {"softmax_type": "off_by_one"}, {"bias": BIAS}, "off_by_one softmax has no masks, biases or sequences"),
        ({"d": 32}, {"softmax_type": "off_by_one"}, {"sequence_descriptor": PADDED}, "has all that is asked for"),
        ({}, {"softmax_type": "off_by_one"}, {"sequence_descriptor": packed()}, "has all that is asked for"),
        ({"q": K}, {"softmax_type": "off_by_one"}, {"sequence_descriptor": IDS}, "has no masks, biases or sequences"),
        ({}, {"score_mod": lambda s, q, k: s}, {}, "no score_mod"),
        ({}, {"dropout": 0.1}, {"dropout_key": 1}, "the extension was built without"),
        ({}, {"dropout": 0.1}, {}, "has all that is asked for"),
        ({"q": 2**15, "k": 2**15}, {"window": (5, 5)}, {}, r"only as a mask, of 2.0 GiB"),
        ({"q": 2**15, "k": 2**15}, {"window": (5, 5), "causal": True}, {}, "has all that is asked for"),
        ({"q": 2**15, "k": 2**14}, {}, {"mask": of_long((1, 1))}, "has all that is asked for"),
        ({"q": 2**15, "k": 2**14}, {}, {"mask": of_long((B, 1))}, r"only as a mask, of 3.0 GiB"),
        ({"q": 2**15, "k": 2**14}, {}, {"mask": of_long((1, H))}, r"only as a mask, of 4.0 GiB"),
        ({}, {}, {"sequence_descriptor": packed(), "bias": BIAS}, "no bias for packed sequences"),
        ({"q": 2**23}, {}, {"sequence_descriptor": packed()}, "has all that is asked for"),
        ({"q": K}, {}, {"sequence_descriptor": IDS}, "has all that is asked for, but is told segment ids as a mask"),
    ],
)  # fmt: skip
def test_the_choice_names_its_reason(shapes, fields, call, why, monkeypatch):
    monkeypatch.setattr(backends, "platform", lambda: "gpu")
    monkeypatch.setattr(backends, "most_head_size", lambda: 256)
    monkeypatch.setattr(backends, "missing", lambda: "the extension was built without it")
    monkeypatch.setattr(backends, "packs", lambda: True)
    q, k, d, dtype = ({"q": Q, "k": K, "d": D, "dtype": jnp.bfloat16} | shapes).values()
    query, key = (jax.ShapeDtypeStruct((B, n, heads, d), dtype) for n, heads in ((q, H), (k, G)))
    backend, reason = attention_backend(Attention(1.0, **fields), query, key, key, **call)
    assert backend == ("cudnn" if why.startswith("has all") else "reference")
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(reason)


@pytest.mark.parametrize("sizes", ["2, s", "b, 16"])
@pytest.mark.parametrize("given", ["", "size", "mask", "bias", "window"])
def test_jaxs_call_has_no_sizes_that_are_known_at_run_time_only(sizes, given, monkeypatch):
    choose_as_on_hopper(monkeypatch)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    batch, length = jax.export.symbolic_shape(sizes)
    x = jax.ShapeDtypeStruct((batch, length, 4, 136 if given == "size" else 8), jnp.bfloat16)
    array = jax.ShapeDtypeStruct((batch, 1, length, length), jnp.bool_)
    call = {given: array} if given in ("mask", "bias") else {}
    backend, why = attention_backend(Attention(0.3, window=(3, 2) if given == "window" else None), x, x, x, **call)
    assert (backend, "known at trace time" in why) == (("reference", True) if given else ("cudnn", False))


def test_the_choice_heeds_each_array(monkeypatch):
    monkeypatch.setattr(backends, "platform", lambda: "gpu")
    query, key = jnp.zeros((2, 16, 4, 64), jnp.bfloat16), jnp.zeros((2, 16, 4, 64), jnp.float16)
    assert "bf16 or f16, not ['bfloat16', 'float16']" in attention_backend(Attention(1.0), query, key, key)[1]


@pytest.mark.parametrize("capabilities, hopper", [([9.0, 10.0], True), ([9.0, 8.9], False), ([], True)])
def test_the_oldest_gpu_decides(capabilities, hopper, monkeypatch):
    monkeypatch.setattr(backends, "compute_capabilities", lambda: capabilities)
    monkeypatch.setattr(backends, "platform", lambda: "gpu")
    monkeypatch.setattr(backends, "missing", lambda: "")
    assert backends.from_hopper_on() == hopper and backends.most_head_size() == (256 if hopper else 128)
    x = jnp.zeros((2, 16, 4, 64), jnp.bfloat16)
    backend, why = attention_backend(Attention(1.0), x, x, x, fp8=True)
    assert backend == ("fp8" if hopper else "cudnn") and ("FP8 attention needs Hopper or newer" in why) != hopper
    x = x.astype(jnp.float32)
    assert (
        "FP8 attention casts one of ['bfloat16', 'float16']" in attention_backend(Attention(1.0), x, x, x, fp8=True)[1]
    )


def test_the_choice_follows_the_default_device(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert backends.platform() == "gpu"
    for device in (jax.devices("cpu")[0], "cpu"):
        with jax.default_device(device):
            assert backends.platform() == "cpu"


def test_a_fallback_on_a_gpu_warns_once_for_each_reason(monkeypatch):
    monkeypatch.setattr(backends, "platform", lambda: "gpu")
    backends._warn.cache_clear()
    run = partial(dot_product_attention, QUERY, KEY, VALUE)
    with pytest.warns(
        UserWarning, match=r"in plain JAX, not by cuDNN: cuDNN needs bf16 or f16, not \['float32'\]"
    ) as warned:
        jax.jit(run, static_argnames="options")(options=Attention(1.0))
    assert warned[0].filename == __file__, "where the user's code is"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(options=Attention(2.0))


@pytest.mark.parametrize("heads", [1, H])
def test_lengths_and_masks_go_where_the_queries_are(heads):
    mesh = testing.mesh_of((3, 2), ("data", "model"))
    x = np.arange(B * heads * 4 * 5).reshape(B, heads, 4, 5)
    query, replicated = testing.shard(mesh, [QUERY, x], [P("data", None, "model"), P()])
    with testing.on_mesh(mesh):
        got = jax.jit(_as_query)(query, replicated)
    np.testing.assert_array_equal(got, x)
    assert got.sharding.spec == (P("data") if heads == 1 else P("data", "model"))
