"""Kernels of the FP8 state: the same bits from handler, reference and numpy, on every platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_engine_jax import testing
from transformer_engine_jax.ops.state import (
    BINS,
    current_scale,
    in_threes,
    mend_state,
    packed,
    report,
    report_amax,
    unpacked,
    update_state,
)

RULE = {"fp8_max_0": 448.0, "two_to_margin": 2.0, "most_recent": False}
AMAXES = np.exp2(np.random.default_rng(0).uniform(-60, 60, 200)).astype(np.float32)


def on_each_platform(f, *args):
    for platform in testing.platforms():
        with jax.default_device(jax.devices(platform)[0]):
            yield f(*jax.device_put(args, jax.devices(platform)[0]))


def test_reports_are_one_hot():
    """Those of one call, with axes before them or without, each in the bin of its leading bits; none of bad amaxes."""
    bad = np.float32([0, np.nan, np.inf, -1])
    amaxes = np.stack([AMAXES[:4], AMAXES[4:8], bad])
    bins = np.clip((AMAXES[:8].view(np.int32) >> 21) - (127 - 64) * 4, 0, BINS - 1)
    expected = np.zeros((3, 4, BINS), np.float32)
    expected.reshape(12, BINS)[np.arange(8), bins] = AMAXES[:8]
    for out in on_each_platform(lambda x: report_amax(*x), jnp.asarray(amaxes)):
        np.testing.assert_array_equal(out, expected)
    for out in on_each_platform(report_amax, jnp.asarray(AMAXES[5])):
        np.testing.assert_array_equal(out.report_0, expected[1, 1])
        assert out.report_1 is None and out.report_2 is None
    edges = np.float32([1e-30, 2.0**-64, 3e38])
    for out in on_each_platform(report_amax, jnp.asarray(edges)):
        np.testing.assert_array_equal(np.argmax(out.report_0, axis=1), [0, 0, BINS - 1])
        np.testing.assert_array_equal(np.max(out.report_0, axis=1), edges)


@pytest.mark.parametrize("most_recent", [False, True])
def test_update_is_ieee_arithmetic(most_recent):
    reports = jnp.stack([report(jnp.float32(a)) for a in AMAXES[:50]])
    history = AMAXES[50:].reshape(50, 3) * np.float32(0.01)
    scale = np.ones(50, np.float32)
    history[0] = 0
    rule = {**RULE, "most_recent": most_recent}
    window = AMAXES[:50] if most_recent else np.maximum(AMAXES[:50], history[:, 1:].max(1))
    expected = np.float32(448) / window / np.float32(2)
    turned = np.roll(np.concatenate([AMAXES[:50, None], history[:, 1:]], 1), 1, axis=1)
    states = packed(*map(jnp.asarray, (scale, scale + 1, history)))
    for out in on_each_platform(lambda *a: update_state(*in_threes([a]), **rule), reports, states):
        got_scale, got_uses, got_history = unpacked(out.state_0)
        np.testing.assert_array_equal(got_scale, expected)
        np.testing.assert_array_equal(got_history, turned)
        assert out.state_1 is None and (got_uses == 1).all()


def test_states_of_one_call_do_not_mix():
    rule = {**RULE, "fp8_max_1": 448.0, "fp8_max_2": 57344.0}
    amaxes = AMAXES[:3]
    one = jnp.float32(1)
    of_each = [(report(jnp.float32(a)), packed(one, one, jnp.zeros(4).at[1].set(a / 2))) for a in amaxes]
    for out in on_each_platform(lambda x: update_state(*in_threes(x), **rule), of_each):
        for (scale, _, history), amax, largest in zip(map(unpacked, out), amaxes, (448, 448, 57344)):
            assert scale == np.float32(largest) / amax / np.float32(2)
            np.testing.assert_array_equal(history, np.float32([0, amax, amax / 2, 0]))
    of_each = [(packed(jnp.float32(2 * a), jnp.float32(2), jnp.full(3, 2 * a)),) for a in amaxes]
    for out in on_each_platform(lambda x: mend_state(*in_threes(x[:2]), **rule), of_each):
        assert out.scale_2 is None
        for i, amax in enumerate(amaxes[:2]):
            scale, scale_inv, state = out[3 * i : 3 * i + 3]
            np.testing.assert_array_equal(state[2:], np.float32([amax, 2 * amax, amax]))
            assert scale == np.float32(448) / (2 * amax) / np.float32(2) and scale_inv == np.float32(1) / scale
            assert state[0] == scale and state[1] == 1


def test_current_scale_is_ieee_arithmetic():
    for options, expected in (
        (dict(amax_epsilon=0.0, power_of_2=False), np.float32(448) / AMAXES),
        (dict(amax_epsilon=1.0, power_of_2=False), np.float32(448) / np.maximum(AMAXES, np.float32(1))),
        (dict(amax_epsilon=0.0, power_of_2=True), np.exp2(np.floor(np.log2(np.float32(448) / AMAXES)))),
    ):
        for out in on_each_platform(lambda a, o=options: current_scale(a, fp8_max=448.0, **o), AMAXES):
            np.testing.assert_array_equal(out.scale, expected)
            np.testing.assert_array_equal(out.scale_inv, np.float32(1) / expected)


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_current_scale_of_nothing_usable_is_one(bad):
    for out in on_each_platform(
        lambda a: current_scale(a, fp8_max=448.0, amax_epsilon=0.0, power_of_2=False), np.float32(bad)
    ):
        assert out.scale == 1 and out.scale_inv == 1


def test_kernels_hold_under_all_transformations():
    key = jax.random.key(1)
    reports = jnp.stack([report(a) + report(2 * a) for a in jnp.asarray(AMAXES[:4])])
    scale, history = jnp.asarray(AMAXES[4:8]), jnp.abs(jax.random.normal(key, (4, 16)))
    uses = jnp.array([1.0, 2.0, 0.0, 5.0])
    state, short = packed(scale, uses, history), packed(scale, uses, history[:, :1])
    check = lambda kernel, operands, rule: testing.check_kernel(kernel, operands, rule, same)
    three = {**RULE, "fp8_max_1": 448.0, "fp8_max_2": 57344.0}
    check(update_state, in_threes([(reports, state)]), RULE)
    check(update_state, in_threes([(reports, short)]), {**RULE, "most_recent": True})
    check(update_state, in_threes([(reports * n, state) for n in (1, 2, 3)]), three)
    check(mend_state, in_threes([(state,)]), RULE)
    check(mend_state, in_threes([(short * n,) for n in (1, 2, 3)]), three)
    check(current_scale, [scale], {"fp8_max": 57344.0, "amax_epsilon": 0.0, "power_of_2": True})


def same(got, expected):
    # XLA divides by multiplying with a reciprocal where it can, and on GPUs to 2 ulp; the handlers round once.
    testing.assert_close(got, expected, 2.0**-22)


def call(target, results, *operands, **attributes):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results]
    return jax.block_until_ready(jax.ffi.ffi_call(target, shapes)(*operands, **attributes))


MALFORMED = {
    "no history": ((2,), (jnp.zeros(BINS), jnp.zeros(2)), "state: expected a scale, its uses and at least one amax"),
    "reports": ((5,), (jnp.zeros((2, BINS)), jnp.zeros(5)), "reports: expected one row"),
    "dtype": ((5,), (jnp.zeros(BINS), jnp.zeros(5, jnp.int32)), "state: expected f32"),
    "result": ((6,), (jnp.zeros(BINS), jnp.zeros(5)), "next: expected"),
}


@pytest.mark.parametrize("result, operands, message", MALFORMED.values(), ids=MALFORMED)
def test_malformed_calls_raise(result, operands, message):
    largest = {f"fp8_max_{i}": np.float32(448) for i in range(3)}
    rule = {**largest, "two_to_margin": np.float32(1), "most_recent": False}
    absent = [jnp.zeros(0)] * 4
    with pytest.raises(Exception, match=message):
        call("te_update_state", [result, (0,), (0,)], *operands, *absent, **rule)


def test_states_of_one_call_are_alike():
    rule = {f"fp8_max_{i}": np.float32(448) for i in range(3)} | {"two_to_margin": np.float32(1), "most_recent": False}
    for reports, state, message in (
        (2 * BINS, 5, "reports: expected as many bins as the first state's"),
        (BINS, 6, "state: expected the shape of the first"),
    ):
        operands = (jnp.zeros(BINS), jnp.zeros(5), jnp.zeros(reports), jnp.zeros(state), *[jnp.zeros(0)] * 2)
        with pytest.raises(Exception, match=message):
            call("te_update_state", [(5,), (state,), (0,)], *operands, **rule)
