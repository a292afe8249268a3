"""Scales and the FP8 state: the same bits from handlers, references and numpy, on every platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_engine_jax import testing
from transformer_engine_jax.ops.activation import activation_bwd, activation_fwd
from transformer_engine_jax.ops.layernorm import layernorm_fwd, rmsnorm_fwd
from transformer_engine_jax.ops.quantize import E4M3, E5M2, measure, quantize, quantize_stack, scaled_cast
from transformer_engine_jax.ops.state import (
    BINS,
    Scaling,
    mended,
    packed,
    read,
    report,
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
    """In the bin of the leading bits, of the largest of all tensors; none of 0, NaN and Inf."""
    few = jnp.asarray([*AMAXES[:8], 0, np.nan, np.inf, 1e-30, 2.0**-64, 3e38], jnp.float32)
    bins = np.clip((np.asarray(few).view(np.int32) >> 21) - (127 - 64) * 4, 0, BINS - 1)
    expected = np.zeros((few.size, BINS), np.float32)
    usable = np.isfinite(few) & (few > 0)
    expected[np.arange(few.size)[usable], bins[usable]] = few[usable]
    for out in on_each_platform(jax.jit(jax.vmap(report_of)), few):
        np.testing.assert_array_equal(out, expected)
    for amax, row in zip(few, expected):
        for out in on_each_platform(report_of, amax):
            np.testing.assert_array_equal(out, row)
        x = jnp.full((5, 40), -amax / 2).at[3, 17].set(-amax)
        for out in on_each_platform(lambda x: quantize(x, 1.0, dtype=E4M3, amax=False, report=True).report, x):
            np.testing.assert_array_equal(out, row)


def report_of(amax):
    small = jnp.zeros((3, 8)).at[1, 2].set(amax / 4)
    return measure(small, small.at[0, 0].set(-amax), small, amax=False, report=True).report


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
    states = packed(*map(jnp.asarray, (scale, scale, history)))[:, None]
    for out in on_each_platform(lambda *a: update_state(*a, **rule), states, reports):
        got_scale, got_uses, got_history = unpacked(out[:, 0])
        np.testing.assert_array_equal(got_scale, expected)
        np.testing.assert_array_equal(got_history, turned)
        assert out.shape == states.shape and (got_uses == 1).all()


def test_states_of_one_call_do_not_mix():
    rule = {**RULE, "fp8_max_1": 448.0, "fp8_max_2": 57344.0}
    amaxes = AMAXES[:3]
    one = jnp.float32(1)
    states = jnp.stack([packed(one, one, jnp.zeros(4).at[1].set(a / 2)) for a in amaxes])
    for out in on_each_platform(lambda *a: update_state(*a, **rule), states, *[report(jnp.float32(a)) for a in amaxes]):
        for (scale, _, history), amax, largest in zip(map(unpacked, out), amaxes, (448, 448, 57344)):
            assert scale == np.float32(largest) / amax / np.float32(2)
            np.testing.assert_array_equal(history, np.float32([0, amax, amax / 2, 0]))


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("length", [1, 3, 16])
@pytest.mark.parametrize("uses", [0.0, 2.0, 5.0, 0.3, -0.25])
def test_an_update_starts_from_the_mended_state(uses, length, most_recent):
    """A step that started from a sum of states, of none or scaled, ends as if from what stands for them."""
    rule = {**RULE, "most_recent": most_recent}
    history = jnp.asarray(AMAXES[:length]) * min(uses, 1.0)
    state = packed(jnp.float32(7 * uses), jnp.float32(uses), history)[None]
    sound = mended(state, 448.0, 2.0, most_recent)
    for amax in (0.0, 3.0):
        expected = update_state.reference(sound, report(jnp.float32(amax)), **rule)
        for out in on_each_platform(lambda *a: update_state(*a, **rule), state, report(jnp.float32(amax))):
            testing.assert_close(out, expected, 2.0**-22)  # as `same` says


# --- What kernels that cast make of an amax or a state ---------------------------------------------------------------


def cast_with(operand, scaling, dtype=E4M3):
    """(FP8 of 1 / 64, its scale_inv), of a tensor and of one without elements."""
    out = quantize(jnp.full((2, 16), 2.0**-6), operand, dtype=dtype, scaling=scaling, scale_inv=True)
    empty = quantize(jnp.zeros((0, 16)), operand, dtype=dtype, scaling=scaling, scale_inv=True)
    return out.q[0, 0], out.scale_inv, empty.scale_inv


def assert_cast_with(operand, scaling, scale, dtype=E4M3):
    expected = scaled_cast(jnp.float32(2.0**-6), jnp.float32(scale), dtype)
    for q, scale_inv, of_empty in on_each_platform(lambda x: cast_with(x, scaling, dtype), jnp.asarray(operand)):
        assert q.view(jnp.uint8) == expected.view(jnp.uint8)
        assert scale_inv == of_empty == np.float32(1) / np.float32(scale)


@pytest.mark.parametrize(
    "options, scale",
    [
        ({}, lambda a: np.float32(448) / a),
        ({"amax_epsilon": 1.0}, lambda a: np.float32(448) / np.maximum(a, np.float32(1))),
        ({"power_of_2": True}, lambda a: np.exp2(np.floor(np.log2(np.float32(448) / a)))),
    ],
    ids=["plain", "epsilon", "power of 2"],
)
def test_a_current_scale_is_ieee_arithmetic(options, scale):
    for amax in AMAXES[:30]:
        assert_cast_with(amax, Scaling("amax", **options), scale(amax))
    assert_cast_with(AMAXES[0], Scaling("amax"), np.float32(57344) / AMAXES[0], E5M2)


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_a_current_scale_of_nothing_usable_is_one(bad):
    assert_cast_with(np.float32(bad), Scaling("amax"), 1)


def test_the_scale_of_a_state_is_its_own():
    for scales in AMAXES[:12].reshape(4, 3):
        states = packed(jnp.asarray(scales), jnp.ones(3), jnp.asarray(AMAXES[:15].reshape(3, 5)))
        for tensor, scale in enumerate(scales):
            assert_cast_with(states, Scaling("states", two_to_margin=2.0, tensor=tensor), scale)


def test_the_scale_of_added_or_missing_states_is_mended():
    one = jnp.float32(1)
    assert_cast_with(packed(0 * one, 0 * one, jnp.zeros(3))[None], Scaling("states"), 1)
    assert_cast_with(packed(jnp.nan * one, one, jnp.ones(3))[None], Scaling("states"), 1)
    # Three updated states, added: all but the newest amax, which is in slot 1, are three times what they were.
    history = jnp.float32([3 * 7.0, 5.0, 3 * 2.0])
    for most_recent, window in ((False, 7.0), (True, 5.0)):
        scaling = Scaling("states", two_to_margin=2.0, most_recent=most_recent)
        assert_cast_with(packed(3 * one, 3 * one, history)[None], scaling, np.float32(448) / np.float32(window) / 2)
    assert_cast_with(packed(3 * one, 3 * one, jnp.zeros(3))[None], Scaling("states"), 1)  # no amax: of each


@pytest.mark.parametrize("factor", [2.0**-15, -0.5])
@pytest.mark.parametrize("most_recent, window", [(False, 9), (True, 3)])
def test_a_state_that_was_scaled_is_what_it_was(factor, most_recent, window):
    """As gradients are, by a loss scale, a clip or the sign of what is maximized."""
    scale = np.float32(448) / np.float32(window) / 2
    state = packed(jnp.float32(scale), jnp.float32(1), jnp.float32([5, 3, 9, 0]))
    testing.assert_close(mended(factor * state, 448.0, 2.0, most_recent), state, 2.0**-22)  # as `same` says
    assert_cast_with((factor * state)[None], Scaling("states", two_to_margin=2.0, most_recent=most_recent), scale)
    rule = {**RULE, "most_recent": most_recent}
    for out in on_each_platform(lambda s, r: update_state(s[None], r, **rule)[0], factor * state, report_of(4.0)):
        scale = np.float32(448) / np.float32(4 if most_recent else 9) / 2
        np.testing.assert_array_equal(out, jnp.float32([scale, 1, 0, 4, 3, 9]))


def test_a_sum_that_was_scaled_has_the_scale_of_its_history():
    """Not the mean of the scales, which a step that saw little would dominate."""
    added = packed(jnp.float32(1e6), jnp.float32(4), jnp.float32([4 * 5, 8, 4 * 9, 0]))
    assert_cast_with(added[None] / 1024, Scaling("states", two_to_margin=2.0), np.float32(448) / np.float32(9) / 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_state_of_no_numbers_starts_anew(bad):
    state = jnp.full(6, bad, jnp.float32)
    np.testing.assert_array_equal(mended(state, 448.0, 1.0, False), jnp.float32([1, 1, 0, 0, 0, 0]))
    assert_cast_with(state[None], Scaling("states"), 1)
    for out in on_each_platform(lambda s, r: update_state(s[None], r, **RULE)[0], state, report_of(4.0)):
        np.testing.assert_array_equal(out, jnp.float32([448 / 4 / 2, 1, 0, 4, 0, 0]))


@pytest.mark.parametrize("kind", ["quantize", "quantize_stack", "layernorm", "rmsnorm", "activation", "its gradient"])
def test_every_cast_takes_its_scale_from_amaxes_and_states(kind):
    """The same bytes as with the scale itself, batched too."""
    x, g = jax.random.normal(jax.random.key(0), (48, 64)), jnp.ones(64)
    casts = {
        "quantize": lambda s, **o: quantize(x, s, q_t=True, amax=False, **o),
        "quantize_stack": lambda s, **o: quantize_stack(x, 2 * x, None, s, q_t=True, amax=False, **o),
        "layernorm": lambda s, **o: layernorm_fwd(x, g, g, s, epsilon=1e-6, y_t=True, **o),
        "rmsnorm": lambda s, **o: rmsnorm_fwd(x, g, s, epsilon=1e-6, y_t=True, **o),
        "activation": lambda s, **o: activation_fwd(x[:, None], s, activation="gelu", y_t=True, **o),
        "its gradient": lambda s, **o: activation_bwd(x, x[:, None], s, activation="gelu", dz_t=True, **o),
    }
    cast, amax, scale = casts[kind], jnp.float32(3.7), jnp.float32(448) / jnp.float32(3.7)
    wanted = {"dtype": E4M3, "report": True, "scale_inv": True}

    def all_ways(amax, scale, state):
        from_state = lambda s: cast(s, scaling=Scaling("states", tensor=1), **wanted)
        batched = jax.vmap(from_state)(jnp.stack([state, state]))
        others = cast(amax, scaling=Scaling("amax"), **wanted), from_state(state), jax.tree.map(lambda y: y[1], batched)
        return cast(scale, **wanted), others

    states = packed(jnp.stack([scale, 2 * scale]), jnp.ones(2), jnp.full((2, 16), 9.0))[::-1]
    for expected, others in on_each_platform(all_ways, amax, scale, states):
        assert read(expected.report) > 0 and expected.scale_inv == np.float32(1) / scale
        for got in others:
            testing.assert_same_bytes(got, expected, kind)


def test_casts_of_nothing_report_nothing():
    x, g = jnp.zeros((0, 64)), jnp.ones(64)
    wanted = {"dtype": E4M3, "report": True, "scale_inv": True, "scaling": Scaling("amax")}
    for out in on_each_platform(
        lambda a: [
            quantize(x, a, amax=False, **wanted),
            quantize_stack(x, x, None, a, amax=False, **wanted),
            layernorm_fwd(x, g, g, a, epsilon=1e-6, **wanted),
            rmsnorm_fwd(x, g, a, epsilon=1e-6, **wanted),
            activation_fwd(x[:, None], a, activation="gelu", **wanted),
            activation_bwd(x, x[:, None], a, activation="gelu", **wanted),
            measure(x, amax=False, report=True),
        ],
        jnp.float32(4.0),
    ):
        for of_kernel in out:
            assert of_kernel.report.shape == (BINS,) and not np.asarray(of_kernel.report).any()
        assert all(of_kernel.scale_inv == 4 / 448 for of_kernel in out[:-1])


def test_mistakes_in_a_scale():
    x = jnp.ones((4, 16))
    for match, scale, options in (
        (r"f32\[T, 2 \+ H\] of more than 0 states, got float32\[\]", jnp.float32(1), {"scaling": Scaling("states")}),
        (r"more than 2 states, got float32\[2, 5\]", jnp.ones((2, 5)), {"scaling": Scaling("states", tensor=2)}),
        (r"expected f32\[\], got float32\[18\]", jnp.ones(18), {"scaling": Scaling("amax")}),
        ("report: expected none beside amax", jnp.float32(1), {"report": True}),
    ):
        with pytest.raises(ValueError, match=f"quantize: .*{match}"):
            quantize(x, scale, dtype=E4M3, **options)


def test_kernels_hold_under_all_transformations():
    key = jax.random.key(1)
    reports = jnp.stack([report(a) + report(2 * a) for a in jnp.asarray(AMAXES[:4])])
    scale, history = jnp.asarray(AMAXES[4:8]), jnp.abs(jax.random.normal(key, (4, 16)))
    uses = jnp.array([1.0, 2.0, 0.0, 5.0])
    state, short = packed(scale, uses, history), packed(scale, uses, history[:, :1])
    check = lambda kernel, operands, rule: testing.check_kernel(kernel, operands, rule, same)
    three = {**RULE, "fp8_max_1": 448.0, "fp8_max_2": 57344.0}
    check(update_state, [state[:, None], reports], RULE)
    check(update_state, [short[:, None], reports], {**RULE, "most_recent": True})
    check(update_state, [jnp.stack(3 * [state], axis=1), reports, 2 * reports, 3 * reports], three)


def same(got, expected):
    # XLA divides by multiplying with a reciprocal where it can, and on GPUs to 2 ulp; the handlers round once.
    testing.assert_close(got, expected, 2.0**-22)


def call(target, results, *operands, **attributes):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results]
    return jax.block_until_ready(jax.ffi.ffi_call(target, shapes)(*operands, **attributes))


ONE = jnp.zeros((1, 5))
MALFORMED = {
    "no axis of tensors": ((5,), (jnp.zeros(5), jnp.zeros(BINS)), "states: expected at least 2 axes"),
    "no history": ((1, 2), (jnp.zeros((1, 2)), jnp.zeros(BINS)), "states: expected a scale, its uses and at least one"),
    "reports": ((1, 5), (ONE, jnp.zeros((2, BINS))), "reports: expected one row"),
    "dtype": ((1, 5), (jnp.zeros((1, 5), jnp.int32), jnp.zeros(BINS)), "states: expected f32"),
    "result": ((6,), (ONE, jnp.zeros(BINS)), "next: expected"),
    "bins": ((2, 5), (jnp.zeros((2, 5)), jnp.zeros(BINS), jnp.zeros(2 * BINS)), "reports: expected as many bins as"),
    "tensors": ((1, 5), (ONE, jnp.zeros(BINS), jnp.zeros(BINS)), "states: expected those of as many tensors as have"),
}


@pytest.mark.parametrize("result, operands, message", MALFORMED.values(), ids=MALFORMED)
def test_malformed_calls_raise(result, operands, message):
    largest = {f"fp8_max_{i}": np.float32(448) for i in range(3)}
    absent = [jnp.zeros(0)] * (4 - len(operands))
    with pytest.raises(Exception, match=message):
        call("te_update_state", [result], *operands, *absent, **largest, two_to_margin=np.float32(1), most_recent=False)


def test_as_many_reports_as_states():
    with pytest.raises(ValueError, match="update_state: states: expected those of 1 tensors, got 2"):
        update_state(jnp.ones((2, 5)), jnp.zeros(BINS), **RULE)
