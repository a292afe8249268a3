"""A state that a step does not use stays what it was when it is next read, summed or scaled as it may be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_engine_jax import autocast, recipe
from transformer_engine_jax.ops.quantize import E4M3, E5M2
from transformer_engine_jax.ops.state import mended, report
from transformer_engine_jax.quantized import QuantizerStates, update
from transformer_engine_jax.quantizers import QuantizerSpec, attach, keep

DELAYED = recipe.DelayedScaling(amax_history_len=4)
MOST_RECENT = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")


class Single(QuantizerStates):
    TENSORS = ("only",)


def state_after(amaxes, r=DELAYED, dtype=E4M3):
    state = Single.create(r)
    for amax in amaxes:
        state = update(state, [report(jnp.float32(amax))], r, [dtype])
    return state


def mend(state, r=DELAYED, dtype=E4M3):
    """The state as a step starts from it."""
    return Single(mended(state.packed, float(jnp.finfo(dtype).max), 1.0, r.amax_compute_algo == "most_recent"))


def _scale(quantizer):
    return quantizer.scaling.scales(quantizer.scale, quantizer.spec.dtype).scale


def apart(state, y):
    return keep(y, [state])


def unused(state, calls):
    """The state after a step in which so many calls, each a function of its own to JAX, do not use it."""
    call = jax.jit(apart)
    return jax.jit(jax.grad(lambda s: sum(jnp.sum(call(s, jnp.ones(3))) for _ in range(calls))))(state)


@pytest.mark.parametrize("r", [DELAYED, MOST_RECENT], ids=["max", "most_recent"])
def test_states_that_go_unused_out_of_sight_of_one_another_do_not_grow(r):
    states = [mend(unused(state_after([8, 2], r), 3), r)]
    state = unused(state_after([8, 2], r), 3)
    for _ in range(8):
        state = unused(state, 3)
        states.append(mend(state, r))
    newest = states[0].only.amax_history[1]
    assert 2 <= newest <= 3 * 2 and states[0].only.scale == 448 / (newest if r is MOST_RECENT else 8)
    for other in states[1:]:
        np.testing.assert_allclose(other.packed, states[0].packed, 1e-6)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("r", [DELAYED, MOST_RECENT], ids=["max", "most_recent"])
def test_a_sum_that_goes_unused_is_still_one_when_it_is_read(r, steps):
    """Of two calls, which saw 10 and 0.01: the scale of each may not be mistaken for that of both."""
    added = Single(sum(state_after([1, amax], r).packed for amax in (10, 0.01)))
    expected, kept = mend(added, r), added
    for _ in range(steps):
        kept = unused(kept, 1)
    np.testing.assert_allclose(mend(kept, r).packed, expected.packed, 1e-6)
    assert expected.only.scale <= 448 / 10
    own = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=lambda history: jnp.max(history))
    with autocast(True, own):
        assert _scale(attach(kept, [QuantizerSpec(own, E4M3, (), False)])[0]) <= 448 / 10


def test_states_that_go_unused_are_kept_as_what_they_were_before_they_were_scaled():
    state = state_after([2])
    got = unused(jax.tree.map(lambda x: x / 8, state), 1)
    np.testing.assert_allclose(mend(got).packed, state.packed, 1e-6)


def test_a_state_that_was_scaled_is_rescaled_for_another_format():
    state = state_after([2], dtype=E5M2)
    for factor in (1, 0.5, 3):  # of a sum of three the newest amax may be as many times too large
        got = jax.tree.map(lambda x: factor * x, state).rescaled(DELAYED).only
        assert (
            got.uses == 1 and got.scale == 448 / got.amax_history[1] and 2 <= got.amax_history[1] <= 2 * max(factor, 1)
        )
