"""Attention with its forward pass in FP8: values, gradients, casts, states; what it can't do is done in high precision.

On a GPU cuDNN computes it, elsewhere the references of its kernels, through the same op.
"""

import re
from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import numpy_attention
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.ops.attention import Attention, SequenceDescriptor, flash, fp8
from transformer_engine_jax.ops.attention.flash import attention_fp8_fwd
from transformer_engine_jax.ops.quantize import E4M3, cast

B, S, H, D = 2, 64, 4, 64
GPU = jax.default_backend() == "gpu"
DELAYED = recipe.DelayedScaling(fp8_dpa=True, amax_history_len=4)
CURRENT = recipe.Float8CurrentScaling(fp8_dpa=True)
LENGTHS = np.array([S, 40]), np.array([33, S])
ROWS = [[(0, q, 0, k)] for q, k in zip(*LENGTHS)]

# Weights and output are rounded to E4M3, and cuDNN rounds weights of another scale: exp(score - the largest so far).
ROUNDED = emulated.fp8_bound(E4M3, E4M3)
# The same roundings by both sides, of f32 values that differ in the last bits.
SAME = emulated.fp8_bound(*4 * [E4M3]) if GPU else emulated.FLIP
# Of the backward, where products and weights are rounded to bf16, f16 or f32.
BACKWARD = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-5}

# heads, groups, queries, keys, head size; options; lengths
CASES = {
    "all": ((H, H, S, S, D), dict(), None),
    "causal": ((H, H, S, S, D), dict(causal=True), None),
    "head size 128": ((H, H, 200, 128, 128), dict(causal=True), None),
    "head size 16": ((H, H, S, S, 16), dict(), None),
    "odd lengths": ((3, 3, 33, 57, D), dict(), None),
    "more keys": ((H, H, 40, S, D), dict(causal=True), None),
    "more queries": ((H, H, S, 40, D), dict(causal=True), None),
    "groups": ((H, 2, S, S, D), dict(causal=True), None),
    "one group": ((H, 1, S, 48, 128), dict(), None),
    "window": ((H, 2, S, S, D), dict(causal=True, window=(9, 0)), None),
    "lengths": ((H, H, S, S, D), dict(), LENGTHS),
    "causal lengths": ((H, 2, S, S, 128), dict(causal=True), LENGTHS),
    "window of lengths": ((H, H, S, S, D), dict(causal=True, window=(9, 0)), LENGTHS),
    "window wider than any": ((H, H, S, S, D), dict(causal=True, window=(2**31 - 1, 0)), LENGTHS),
}
SEVERAL = [*((case, "bfloat16") for case in CASES), ("causal", "float16"), ("causal lengths", "float16")]


@pytest.fixture(autouse=True)
def handlers():
    if GPU and flash.missing():
        pytest.skip(flash.missing())


def inputs(sizes, dtype=jnp.bfloat16, batch=B):
    heads, groups, q_len, k_len, size = sizes
    shapes = [(batch, q_len, heads, size), *[(batch, k_len, groups, size)] * 2, (batch, q_len, heads, size)]
    # Of different magnitudes, so that a scale of another tensor shows; and keys of one sign more than of the other.
    query, key, value, dy = emulated.normal(5, *shapes)
    return [jnp.asarray(x, dtype) for x in (2 * query, 0.5 * key + 0.1, 3 * value, dy)]


def the_op(size, fields, rec, lengths=None):
    options = Attention(size**-0.5, **fields)
    sequences = None if lengths is None else SequenceDescriptor.from_seqlens(lengths)

    def op(query, key, value, state=None):
        quantizers = None if rec is None else te.attention_quantizers(state, rec)
        given = dict(options=options, sequence_descriptor=sequences, quantizers=quantizers)
        return te.dot_product_attention(query, key, value, **given)

    return op


@partial(jax.jit, static_argnums=0)
def step(op, *arrays):
    """(out, gradients) under the last of the arrays as cotangent."""
    out, vjp = jax.vjp(op, *arrays[:-1])
    return out, list(vjp(arrays[-1]))


def assert_same(got, expected):
    """The same bytes; on a GPU nearly so, where cuDNN adds up gradients in any order."""
    return (
        testing.assert_close(got, expected, BACKWARD["bfloat16"]) if GPU else testing.assert_same_bytes(got, expected)
    )


def amax(x) -> np.float32:
    return np.abs(np.asarray(x, np.float32)).max()


def within(x, lengths):
    """x [B, S, ..] with zeros past the lengths."""
    seen = np.arange(x.shape[1]) < (np.full(x.shape[0], x.shape[1]) if lengths is None else lengths)[:, None]
    return np.where(seen[..., None, None], np.asarray(x, np.float32), 0).astype(x.dtype)


def rounded(x, scale) -> np.ndarray:
    """f64 values of E4M3 codes of x * scale."""
    return np.asarray(cast(jnp.asarray(x, jnp.float32) * scale, E4M3), np.float64) / scale


def as_rounded(x) -> jax.Array:
    return jnp.asarray(rounded(x, np.float32(448) / amax(x)), x.dtype)


def plain(options, seen, query, key, value, *, with_roundings: bool):
    """(out, stats) in f64, by the formula, of query, key and value rounded to E4M3 with scales of their amax."""
    scales = [np.float32(448) / amax(x) for x in (query, key, value)]
    query, key, value = map(rounded, (query, key, value), scales)
    key, value = (np.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) * options.scale
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    total = np.where(total > 0, total, 1.0)
    powers = rounded(powers, np.float32(fp8.WEIGHT_SCALE)) if with_roundings else powers
    out = np.einsum("bhqk,bkhd->bqhd", powers, value) / np.moveaxis(total, 1, 2)
    return rounded(out, scales[2]) if with_roundings else out, (top + np.log(total))[..., 0]


def plain_gradients(options, seen, stats, query, key, value, out, dy):
    """In f64, of the rounded operands, with the output and statistics of the forward pass in FP8."""
    query, key, value = (rounded(x, np.float32(448) / amax(x)) for x in (query, key, value))
    out, dy = (np.asarray(x, np.float64) for x in (out, dy))
    groups, repeats = key.shape[2], query.shape[2] // key.shape[2]
    key, value = (np.repeat(x, repeats, axis=2) for x in (key, value))
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) * options.scale
    weights = np.where(seen, np.exp(np.where(seen, scores, 0.0) - stats[..., None]), 0.0)
    mean = np.moveaxis((dy * out).sum(-1), 2, 1)[..., None]
    dscores = weights * (np.einsum("bqhd,bkhd->bhqk", dy, value) - mean) * options.scale
    of_groups = lambda x: x.reshape(*x.shape[:2], groups, repeats, -1).sum(3)
    dkey, dvalue = (np.einsum("bhqk,bqhd->bkhd", a, x) for a, x in ((dscores, query), (weights, dy)))
    return [np.einsum("bhqk,bkhd->bqhd", dscores, key), of_groups(dkey), of_groups(dvalue)]


# --- Values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case, dtype", SEVERAL if GPU else [*SEVERAL, ("groups", "float32"), ("lengths", "float32")])
def test_value_and_gradients(case, dtype):
    sizes, fields, lengths = CASES[case]
    arrays = inputs(sizes, dtype)
    op = the_op(sizes[-1], fields, CURRENT, lengths)
    out, grads = step(op, *arrays)
    assert [x.dtype for x in (out, *grads)] == 4 * [jnp.dtype(dtype)]
    options = Attention(sizes[-1] ** -0.5, **fields)
    heads, _, q_len, k_len, _ = sizes
    rows = None if lengths is None else ROWS
    seen = np.broadcast_to(numpy_attention.seen_keys(options, B, q_len, k_len, rows), (B, heads, q_len, k_len))
    q_lens, k_lens = lengths or (None, None)
    query, key, value, dy = (within(x, n) for x, n in zip(arrays, (q_lens, k_lens, k_lens, q_lens)))
    expected, stats = plain(options, seen, query, key, value, with_roundings=False)
    testing.assert_close(out, expected, ROUNDED)
    emulation, _ = plain(options, seen, query, key, value, with_roundings=True)
    testing.assert_close(out, emulation, SAME + testing.epsilon(dtype))
    expected = plain_gradients(options, seen, stats, query, key, value, out, dy)
    testing.assert_close(grads, expected, BACKWARD[dtype] + (1e-3 if GPU else 0))


@pytest.mark.parametrize("rec", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_is_in_fp8_and_near_high_precision(rec):
    arrays = inputs((H, 2, S, S, D))
    state = te.AttentionState.create(rec)
    for _ in range(2):  # the second step's scales are of the first one's amaxes
        out, grads = step(the_op(D, dict(causal=True), rec), *arrays[:3], state, arrays[3])
        state = grads.pop()
    exact = step(the_op(D, dict(causal=True), None), *arrays)
    for error in (testing.relative_error(out, exact[0]), *map(testing.relative_error, grads[:2], exact[1][:2])):
        assert 0.01 < error < 0.1
    assert testing.relative_error(grads[2], exact[1][2]) < 0.05


@pytest.mark.parametrize("size, bound", [(4, 0.2), (8, 0.3)])
def test_gradients_of_large_logits_are_no_worse_than_those_of_rounded_operands(size, bound):
    """Where rounding moves logits by 1 to 10: of the original operands weights would be off by the exponential."""
    query, key, value, dy = inputs((H, 2, S, S, D))
    arrays = [query * size, key * 4, value, dy]
    grads, exact, of_rounded = (
        step(the_op(D, {}, rec), *(as_rounded(x) if rounds else x for x in arrays[:3]), dy)[1]
        for rec, rounds in ((CURRENT, False), (None, False), (None, True))
    )
    for got, expected, best in zip(grads, exact, of_rounded):
        assert testing.relative_error(got, expected) < 1.2 * testing.relative_error(best, expected) + 0.05
    assert testing.relative_error(grads[2], exact[2]) < bound


@pytest.mark.parametrize("rec", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_operands_of_the_kernel_are_the_exact_casts(rec, monkeypatch):
    seen = []

    def spy(*operands, **attributes):
        seen.append(operands)
        return attention_fp8_fwd(*operands, **attributes)

    monkeypatch.setattr(fp8, "attention_fp8_fwd", spy)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    query, key, value, _ = inputs((H, 2, S, S, D))
    state = settled(64.0, 300.0, 37.0) if rec is DELAYED else None
    the_op(D, {}, rec)(query, key, value, state)
    ((q, k, v, *scales), *_) = seen
    for codes, descale, x, name in zip((q, k, v), scales[:3], (query, key, value), te.AttentionState.TENSORS):
        scale = getattr(state, name).scale if rec is DELAYED else np.float32(448) / amax(x)
        expected = cast(x.astype(jnp.float32) * scale, E4M3)  # 300 saturates
        testing.assert_same_bytes(codes.reshape(x.shape), expected)
        np.testing.assert_array_equal(np.float32(descale), np.float32(1) / np.float32(scale))
    assert [float(x) for x in scales[3:5]] == [256, 1 / 256]
    assert q.shape == (B, S, 2, 2, D)


# --- States ----------------------------------------------------------------------------------------------------------


def settled(*scales: float) -> te.AttentionState:
    """With these scales, of histories that give them."""
    states = [te.QuantizerState(jnp.float32(s), jnp.full(4, jnp.float32(448 / s))) for s in scales]
    return te.AttentionState.pack(**dict(zip(te.AttentionState.TENSORS, states)))


def stepped(op, query, key, value, state, dy):
    return step(op, query, key, value, state, dy)[1][3]


def test_states_follow_the_delayed_rule_exactly():
    query, key, value, dy = inputs((H, 2, S, S, D))
    state, history = te.AttentionState.create(DELAYED), []
    for factor in (1.0, 4.0, 0.5, 0.25, 0.125, 2.0):
        state = stepped(the_op(D, {}, DELAYED), factor * query, key, 2 * factor * value, state, dy)
        history = [factor, *history][: DELAYED.amax_history_len]
        for one, x, factors in zip(state.states().values(), (query, key, value), (1.0, 0.0, 2.0)):
            times = [factors * f if factors else 1.0 for f in history]
            np.testing.assert_array_equal(np.roll(one.amax_history, -1)[: len(times)], amax(x) * np.float32(times))
            assert one.scale == np.float32(448) / (amax(x) * np.float32(max(times)))


def test_nan_and_zeros_leave_the_scale():
    query, key, value, dy = inputs((H, 2, S, S, D))
    state = stepped(the_op(D, {}, DELAYED), query, key, value, te.AttentionState.create(DELAYED), dy)
    new = stepped(the_op(D, {}, DELAYED), query.at[0, 0].set(jnp.nan), 0 * key, value, state, dy)
    scales = lambda state: [one.scale for one in state.states().values()]
    assert scales(new) == scales(state)
    assert new.query.amax_history[0] == 0 and np.isfinite(new.packed).all()


def looped(op, wrap):
    def f(query, key, value, state):
        body = wrap(lambda factor: op(factor * query, key, value, state))
        return jax.lax.map(body, jnp.asarray([1.0, 3.0, 0.5], query.dtype)).sum(0)

    return f


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["scan", "scan of remat"])
def test_used_several_times_in_a_step(wrap):
    query, key, value, dy = inputs((H, 2, S, S, D))
    create = te.AttentionState.create(DELAYED)
    new = stepped(looped(the_op(D, {}, DELAYED), wrap), query, key, value, create, dy)
    for one, largest in zip(new.states().values(), (3 * amax(query), amax(key), amax(value))):
        assert largest <= one.amax_history.max() <= 1.25 * largest and (one.amax_history > 0).sum() == 1
        assert 448 / largest / 1.25 <= one.scale <= 448 / largest * (1 + 1e-6)
        assert one.uses == 1


def test_calibrating_records_and_computes_in_high_precision():
    query, key, value, dy = inputs((H, 2, S, S, D))
    op = the_op(D, dict(causal=True), DELAYED)
    with te.autocast(calibrating=True, recipe=DELAYED):
        state = te.AttentionState.create(DELAYED)

        def calibrated(query, key, value, state):
            quantizers = te.attention_quantizers(state)
            options = Attention(D**-0.5, causal=True)
            return te.dot_product_attention(query, key, value, options=options, quantizers=quantizers)

        out, grads = step(calibrated, query, key, value, state, dy)
    assert_same((out, grads[:3]), step(the_op(D, dict(causal=True), None), query, key, value, dy))
    jax.tree.map(np.testing.assert_array_equal, grads[3], stepped(op, query, key, value, state, dy))


# --- Several devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_sharded_is_unsharded(groups, explicit, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)  # of the mesh, which has CPUs where there are few GPUs
    mesh = testing.mesh_of((2, 4), ("data", "model"), explicit=explicit)
    arrays = inputs((4, groups, S, S, D), batch=8)
    state = te.AttentionState.create(DELAYED)
    lengths = np.arange(8) * 8 + 8
    op = the_op(D, dict(causal=True), DELAYED, (lengths, lengths))
    with jax.default_device(mesh.devices.flat[0]):
        out, grads = step(op, *arrays[:3], state, arrays[3])
    result = P("data", None, "model")
    specs = [result, *2 * [P("data", None, "model" if groups == 4 else None)], result]
    query, key, value, dy = testing.shard(mesh, arrays, specs)
    with testing.on_mesh(mesh):
        sharded = step(op, query, key, value, jax.device_put(state, NamedSharding(mesh, P())), dy)
    testing.assert_close(sharded[0], out, SAME)
    testing.assert_close(sharded[1][:3], grads[:3], BACKWARD["bfloat16"])
    testing.assert_same_bytes(jax.device_get(sharded[1][3]), jax.device_get(grads[3]))
    if explicit:  # which arrays tell, where no mesh is in force
        outside = step(op, query, key, value, jax.device_put(state, NamedSharding(mesh, P())), dy)
        testing.assert_close(jax.device_get(outside[0]), jax.device_get(out), SAME)


def test_keys_are_repeated_over_several_devices(monkeypatch):
    arrays = inputs((H, 2, S, S, D))
    results = []
    for devices in (8, 1):
        monkeypatch.setattr(jax, "device_count", lambda devices=devices: devices)
        results.append(step(the_op(D, {}, CURRENT), *arrays))
        jax.clear_caches()
    testing.assert_close(*results, max(SAME, BACKWARD["bfloat16"]))


def test_vmap_is_one_by_one():
    arrays = [x.reshape(3, 2, *x.shape[1:]) for x in inputs((H, 2, S, S, D), batch=6)]
    got = jax.vmap(partial(step, the_op(D, {}, CURRENT)))(*arrays)
    for i in range(3):
        one = step(the_op(D, {}, CURRENT), *(x[i] for x in arrays))
        testing.assert_close(jax.tree.map(lambda x, i=i: x[i], got), one, max(SAME, BACKWARD["bfloat16"]))


# --- What is done in high precision ----------------------------------------------------------------------------------

F = dict(causal=True)
MASK = np.zeros((1, 1, S, S), bool)
PACKED = SequenceDescriptor.from_segment_ids_and_pos(jnp.ones((B, S), jnp.int32))
INSTEAD = {
    "mask": ((H, H, S, S, D), {}, dict(mask=MASK), "told no mask"),
    "packed": ((H, H, S, S, D), {}, dict(sequence_descriptor=PACKED), "told no mask"),
    "bias": ((H, H, S, S, D), F, dict(bias=jnp.zeros((1, 1, S, S))), "has no bias"),
    "score_mod": ((H, H, S, S, D), dict(score_mod=lambda s, q, k: s), {}, "has no score_mod"),
    "off_by_one": ((H, H, S, S, D), dict(softmax_type="off_by_one"), {}, "has no off_by_one softmax"),
    "dropout": ((H, H, S, S, D), dict(dropout=0.5), dict(dropout_key=jax.random.key(0)), "has no dropout"),
    "bottom right": ((H, H, 40, S, D), dict(causal=True, bottom_right=True), {}, "told no mask"),
    "window ahead": ((H, H, S, S, D), dict(window=(3, 3)), {}, "told no mask"),
    "one token": ((H, H, 1, 1, D), {}, {}, "more than one query"),
    "one query": ((H, H, 1, S, D), {}, {}, "more than one query"),
    "head size 136": ((H, H, S, S, 136), {}, {}, r"head sizes in multiples of 16 up to 128, not \[136\]"),
    "head size 24": ((H, H, S, S, 24), {}, {}, r"multiples of 16 up to 128, not \[24\]"),
    "f32 on a GPU": ((H, H, S, S, D), {}, {}, "FP8 attention casts one of"),
}


@pytest.mark.parametrize("case", [c for c in INSTEAD if c != "f32 on a GPU" or GPU])
@pytest.mark.filterwarnings("ignore:dot_product_attention. computed")
def test_what_it_cannot_do_is_done_in_high_precision_and_keeps_states(case):
    sizes, fields, call, why = INSTEAD[case]
    query, key, value, dy = inputs(sizes, jnp.float32 if case == "f32 on a GPU" else jnp.bfloat16)
    state = settled(2.0, 3.0, 5.0)

    def op(query, key, value, state, quantized=True):
        quantizers = te.attention_quantizers(state, DELAYED) if quantized else None
        options = Attention(sizes[-1] ** -0.5, **fields)
        return te.dot_product_attention(query, key, value, options=options, quantizers=quantizers, **call)

    out, grads = step(op, query, key, value, state, dy)
    testing.assert_same_bytes(grads[3], state)
    assert_same((out, grads[:3]), step(partial(op, state=None, quantized=False), query, key, value, dy))
    (reason, *_) = {row.why for row in te.explain(op, query, key, value, state).rows if "attention:" in row.why}
    assert reason.startswith("attention: ") and "attention: fp8" not in reason and "fp8_dpa: FP8 attention" in reason
    assert re.search(why, reason), reason
