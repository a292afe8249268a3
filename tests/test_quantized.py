"""The state and its update rule: exactly the documented arithmetic, robust however often cotangents are added."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_engine_jax import autocast, recipe
from transformer_engine_jax.ops.quantize import E4M3, E5M2, observe
from transformer_engine_jax.ops.state import mended, read, report
from transformer_engine_jax.quantized import GemmState, QuantizerState, QuantizerStates
from transformer_engine_jax.quantized import update as update_from_reports
from transformer_engine_jax.quantizers import QuantizerSpec, attach, attention_quantizers, keep

DELAYED = recipe.DelayedScaling(amax_history_len=4)


def spec(r=DELAYED, dtype=E4M3):
    return QuantizerSpec(r, dtype, (), False)


class Single(QuantizerStates):
    TENSORS = ("only",)


def update(state, amax, r, dtype):
    return update_from_reports(state, [report(amax)], r, [dtype])


def mend(state, r, dtype):
    most_recent = r.amax_compute_algo == "most_recent"
    return Single(mended(state.packed, float(jnp.finfo(dtype).max), 2.0**r.margin, most_recent))


def scale_of(quantizer):
    return quantizer.scaling.scales(quantizer.scale, quantizer.spec.dtype).scale


def state_after(amaxes, r=DELAYED, dtype=E4M3):
    state = Single.create(r)
    for a in amaxes:
        state = update(state, jnp.float32(a), r, dtype)
    return state


# --- The rule --------------------------------------------------------------------------------------------------------


def test_initial_state():
    state = Single.create(recipe.DelayedScaling())
    assert state.only.scale == 1 and state.only.amax_history.shape == (16,) and not state.only.amax_history.any()


@pytest.mark.parametrize("dtype, fp8_max", [(E4M3, 448.0), (E5M2, 57344.0)])
@pytest.mark.parametrize("margin", [0, 1, -2])
def test_scale_is_fp8_max_over_amax_over_two_to_the_margin(dtype, fp8_max, margin):
    r = recipe.DelayedScaling(margin=margin)
    state = update(Single.create(r), jnp.float32(3.3), r, dtype)
    assert state.only.scale == np.float32(np.float32(fp8_max) / np.float32(3.3)) / np.float32(2.0**margin)


def test_max_over_the_history_includes_this_step_and_forgets_after_its_length():
    scales = [float(state_after([8, 1, 1, 1, 2][: n + 1]).only.scale) for n in range(5)]
    assert scales == [448 / 8] * 4 + [448 / 2]


def test_most_recent_uses_this_step_only():
    r = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
    assert [float(state_after([8, 1, 4][: n + 1], r).only.scale) for n in range(3)] == [56, 448, 112]


def test_history_of_one():
    r = recipe.DelayedScaling(amax_history_len=1)
    assert [float(state_after([8, 1, 4][: n + 1], r).only.scale) for n in range(3)] == [56, 448, 112]


def test_functions_for_amax_and_scale():
    r = recipe.DelayedScaling(
        amax_history_len=2,
        amax_compute_algo=lambda history: jnp.min(history),
        scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: fp8_max / (2 * amax),
    )
    first = update(Single.create(r), jnp.float32(4), r, E4M3)
    assert first.only.scale == 1  # the smallest of the history is still 0
    assert update(first, jnp.float32(8), r, E4M3).only.scale == 448 / 8


@pytest.mark.parametrize(
    "field, f",
    [("amax_compute_algo", lambda history: history), ("scaling_factor_compute_algo", lambda *_: jnp.ones(4))],
)
def test_a_function_that_returns_no_number(field, f):
    r = recipe.DelayedScaling(amax_history_len=4, **{field: f})
    with pytest.raises(ValueError, match=rf"DelayedScaling.{field}: expected a function .* returns the shape \[4\]"):
        update(Single.create(r), jnp.float32(4), r, E4M3)


def test_a_function_s_scale_has_a_reciprocal():
    r = recipe.DelayedScaling(scaling_factor_compute_algo=lambda *_: jnp.float32(3e38))
    assert update(Single.create(r), jnp.float32(4), r, E4M3).only.scale == 2.0**126


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_zero_and_not_finite_amaxes_keep_the_scale_and_stay_out_of_the_history(bad, algo):
    r = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=algo)
    state = state_after([4, bad], r)
    assert state.only.scale == 112 and jnp.isfinite(state.only.amax_history).all()


@pytest.mark.parametrize("amax", [1e-45, 1e-38, 1e-30, 3e38])
def test_scales_and_their_inverses_stay_finite_and_normal(amax):
    scale = float(state_after([amax]).only.scale)
    tiny = np.finfo(np.float32).tiny
    assert np.isfinite(scale) and scale >= tiny and 1 / scale >= tiny


# --- Reports of amaxes -----------------------------------------------------------------------------------------------

AMAXES = [1e-30, 2.0**-64, 1e-6, 0.9999, 1.0, 1.2499, 448.0, 57344.0, 3e9, 2.0**63.9, 1e30, 3e38]


@pytest.mark.parametrize("amax", AMAXES)
def test_one_report_is_exact(amax):
    assert read(report(jnp.float32(amax))) == np.float32(amax)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_nothing_usable_reports_nothing(bad):
    assert not report(jnp.float32(bad)).any() and read(report(jnp.float32(bad))) == 0


def test_sums_of_reports_never_lose_the_maximum_and_exceed_it_by_a_bin_at_most():
    rng = np.random.default_rng(0)
    for count in (2, 8, 100):
        amaxes = np.exp2(rng.uniform(-40, 40, count)).astype(np.float32)
        amaxes[: count // 2] = amaxes.max()  # many in the same bin
        total = sum(report(jnp.float32(a)) for a in amaxes)
        assert amaxes.max() <= read(total) <= 1.25 * amaxes.max()


def test_a_report_never_poisons_another():
    total = report(jnp.float32(jnp.nan)) + report(jnp.float32(3.0)) + report(jnp.float32(jnp.inf))
    assert read(total) == 3


# --- The gradient of a state is the next state -----------------------------------------------------------------------


def used(state, amax, times=1):
    """A loss that observes `amax` so many times."""

    @jax.custom_vjp
    def use(quantizer):
        return jnp.zeros(())

    use.defvjp(lambda q: (jnp.zeros(()), q), lambda q, g: (*observe([q], [report(jnp.float32(amax))]),))
    quantizer = attach(state, [spec()])[0]
    return sum(use(quantizer) for _ in range(times))


def test_the_gradient_is_the_updated_state():
    state = state_after([2])
    assert_equal = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
    assert_equal(jax.grad(used)(state, 7.0), update(state, jnp.float32(7), DELAYED, E4M3))
    assert_equal(jax.jit(jax.grad(used), static_argnums=1)(state, 7.0), update(state, jnp.float32(7), DELAYED, E4M3))


@pytest.mark.parametrize("times", [2, 3, 16])
def test_uses_in_one_step_update_once(times):
    state = Single.create(DELAYED)
    new = jax.grad(lambda s: used(s, 7.0, times))(state)
    assert (new.only.amax_history > 0).sum() == 1
    assert 7 <= new.only.amax_history.max() <= 7 * 1.25 and 448 / 7 / 1.25 <= new.only.scale <= 448 / 7


def test_losses_summed_over_microbatches_update_once():
    def loss(state):
        return jax.lax.scan(lambda total, _: (total + used(state, 7.0), None), 0.0, None, length=8)[0]

    new = jax.grad(loss)(Single.create(DELAYED))
    assert (new.only.amax_history > 0).sum() == 1 and 448 / 7 / 1.25 <= new.only.scale <= 448 / 7


def test_a_state_that_came_back_as_zeros_counts_as_new():
    zeros = jax.tree.map(jnp.zeros_like, Single.create(DELAYED))
    assert scale_of(attach(zeros, [spec()])[0]) == 1
    assert jax.grad(used)(zeros, 7.0).only.scale == 64


def test_keep_returns_states_as_their_own_gradient():
    state = state_after([2])
    got = jax.grad(lambda s: jnp.sum(keep(jnp.ones(3), {"a": s})) * 5)(state)
    jax.tree.map(np.testing.assert_array_equal, got, state)


def test_what_is_no_array_is_kept_as_it_is():
    assert keep((1.0, "label"), [Single.create(DELAYED)]) == (1.0, "label")


def test_attention_asks_for_its_state_at_once():
    with pytest.raises(ValueError, match="expected the states of what it quantizes, got None"):
        attention_quantizers(None, recipe.DelayedScaling(fp8_dpa=True))


def test_states_that_go_unused_several_times_stay_as_they_are():
    state = state_after([2])

    def scanned(s):
        return jax.lax.scan(lambda y, _: (keep(y, s), None), jnp.ones(3), None, length=3)[0]

    for uses in (lambda s: keep(keep(jnp.ones(3), [s]), [s]), scanned, jax.jit(scanned), jax.checkpoint(scanned)):
        got = jax.jit(jax.grad(lambda s, uses=uses: jnp.sum(uses(s))))(state)
        jax.tree.map(np.testing.assert_array_equal, got, state)


def test_errors_of_attach():
    for wrong, got in ((None, "None"), (Single(None), r"Single\(packed=None\)"), ({"a": 1}, r"\{'a': 1\}")):
        with pytest.raises(ValueError, match=f"expected the states of what it quantizes, got {got}"):
            attach(wrong, [spec()])
    with pytest.raises(ValueError, match=r"expected 1 states.*f32\[4\].*got 1 of f32\[\] and f32\[16\]"):
        attach(Single.create(recipe.DelayedScaling()), [spec()])
    with pytest.raises(ValueError, match=r"expected 2 states.*got 1 of"):
        attach(Single.create(DELAYED), [spec()] * 2)


def test_current_scaling_needs_no_state():
    with autocast(True, recipe.Float8CurrentScaling()):
        quantizer = attach(None, [spec(recipe.Float8CurrentScaling())])[0]
    assert quantizer.scale is None and not jax.tree.leaves(quantizer)


def test_each_scan_step_and_each_call_attaches_at_the_level_of_the_state():
    """Also where the state is closed over: the gradient holds one updated state, not a sum of them."""

    def loss(state):
        def body(total, _):
            return total + used(state, 7.0), None

        return (
            used(state, 3.0) + jax.lax.scan(body, 0.0, None, length=4)[0] + jax.lax.fori_loop(0, 3, lambda i, t: t, 0.0)
        )

    for run in (jax.grad(loss), jax.jit(jax.grad(loss))):
        new = run(Single.create(DELAYED)).only
        assert new.uses == 1 and 7 <= new.amax_history.max() <= 7 * 1.25 and 448 / 7 / 1.25 <= new.scale <= 448 / 7


def test_states_by_their_names():
    one, two = state_after([2]).only, state_after([5, 3]).only
    states = GemmState.pack(grad=two, x=one, kernel=one)
    jax.tree.map(np.testing.assert_array_equal, states.states(), {"x": one, "kernel": one, "grad": two})
    jax.tree.map(np.testing.assert_array_equal, states.replace(x=two).x, two)
    stacked = jax.tree.map(lambda packed: jnp.stack([packed, 2 * packed]), states)
    np.testing.assert_array_equal(stacked.grad.amax_history[1], 2 * two.amax_history)
    assert stacked.layout == ((2,), 3, 4) and GemmState.create(DELAYED, (2,)).layout == ((2,), 3, 4)
    shapes = jax.eval_shape(lambda: states)
    assert shapes.kernel.amax_history.shape == (4,)
    with pytest.raises(AttributeError, match="GemmState has no 'query'; it has packed and x, kernel, grad"):
        _ = states.query
    with pytest.raises(ValueError, match=r"GemmState.pack: expected states of \['x', 'kernel', 'grad'\], got \['x'\]"):
        GemmState.pack(x=one)


def test_a_mapping_need_not_say_that_a_state_is_of_one_step():
    one = state_after([2]).only
    mapping = {"scale": one.scale, "amax_history": one.amax_history}
    got = GemmState.of(dict.fromkeys(GemmState.TENSORS, mapping))
    jax.tree.map(np.testing.assert_array_equal, got, GemmState.pack(x=one, kernel=one, grad=one))


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit], ids=["remat", "inner jit"])
def test_states_that_were_added_up_are_mended_when_read(wrap):
    """Two calls that each see the state as an argument of their own trace: their updated states add up."""
    state = state_after([9, 2, 5])
    once = wrap(lambda s: used(s, 7.0))
    total = jax.jit(jax.grad(lambda s: once(s) + once(s)))(state)
    assert total.only.uses == 2
    sound = mend(total, DELAYED, E4M3)
    expected = update(state, jnp.float32(7), DELAYED, E4M3)
    assert sound.only.uses == 1 and scale_of(attach(total, [spec()])[0]) == sound.only.scale
    np.testing.assert_array_equal(sound.only.amax_history[2:], expected.only.amax_history[2:])
    assert 7 <= sound.only.amax_history[1] <= 14 and 448 / 14 <= sound.only.scale <= expected.only.scale
    # The next step, whatever it observes, goes on from there.
    later = jax.grad(used)(total, 1.0)
    assert later.only.uses == 1 and 448 / 14 <= later.only.scale <= 448 / 7


def test_mending_a_sound_state_changes_nothing():
    state = state_after([9, 2, 5])
    jax.tree.map(np.testing.assert_array_equal, mend(state, DELAYED, E4M3), state)


def test_no_tracer_outlives_its_trace():
    with jax.checking_leaks():
        jax.jit(jax.grad(used), static_argnums=1)(Single.create(DELAYED), 7.0)
        jax.jit(jax.grad(jax.checkpoint(used, static_argnums=1)), static_argnums=1)(Single.create(DELAYED), 7.0)


# --- What casts are told of a recipe ---------------------------------------------------------------------------------


def scale_taken(r, state, amax=None) -> float:
    """The scale that a cast takes in a step that starts from this state."""
    (quantizer,) = attach(state, [spec(r)])
    operand = amax if quantizer.scale is None else quantizer.scale
    return float(quantizer.scaling.scales(operand, E4M3).scale)


# Of three added states, each with a scale of 10 and amaxes (7, 5, 2), newest second.
THREE = Single.pack(only=QuantizerState(jnp.float32(30), jnp.float32([21, 5, 6]), jnp.float32(3)))
RULES = {
    "max, margin": (dict(margin=1), 448 / 7 / 2),
    "most recent, margin": (dict(margin=1, amax_compute_algo="most_recent"), 448 / 5 / 2),
    "a function of the history": (dict(amax_compute_algo=lambda history: history[0]), 448 / 5),
    "a function of the amax": (dict(scaling_factor_compute_algo=lambda amax, s, largest, r: largest / amax / 4), 16),
}


@pytest.mark.parametrize("fields, scale", RULES.values(), ids=RULES)
def test_a_step_starts_from_added_states_by_the_recipe_s_rule(fields, scale):
    r = recipe.DelayedScaling(amax_history_len=3, **fields)
    np.testing.assert_allclose(scale_taken(r, THREE), scale, rtol=1e-6)
    empty = Single.pack(only=QuantizerState(jnp.float32(30), jnp.zeros(3), jnp.float32(3)))
    assert scale_taken(r, empty) == 10, "without an amax that of each"


def test_two_recipes_in_one_step_have_quantizers_of_their_own():
    recipes = DELAYED, recipe.DelayedScaling(amax_history_len=4, margin=2)
    state = Single.create(DELAYED)

    def step(state):
        return [q.spec.recipe for r in (*recipes, *recipes) for q in attach(state, [spec(r)])]

    found = []
    jax.eval_shape(lambda state: found.extend(step(state)), state)
    assert found == [*recipes, *recipes]


def test_current_scaling_hands_on_what_the_recipe_says():
    assert scale_taken(recipe.Float8CurrentScaling(amax_epsilon=2.0), None, jnp.float32(0.5)) == 448 / 2
    assert scale_taken(recipe.Float8CurrentScaling(use_power_2_scales=True), None, jnp.float32(3)) == 128


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_function_s_scale_that_cannot_be_is_not_taken(bad):
    r = recipe.DelayedScaling(amax_history_len=2, scaling_factor_compute_algo=lambda *_: jnp.float32(bad))
    assert recipe.delayed_scale(r, jnp.float32([4, 0]), jnp.float32(3), E4M3) == 3


def test_states_that_are_not_stacked_along_leading_axes_are_not_read():
    state = GemmState(jnp.ones((3, 2, 6)))  # of two layers, along axis 1
    with pytest.raises(ValueError, match=r"GemmState: expected f32\[.., 3, 2 \+ history\] .* got \[3, 2, 6\]"):
        _ = state.x
