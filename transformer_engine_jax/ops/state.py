"""Kernels of the FP8 state: from reported amaxes to scales. What the numbers mean is said in quantized.py.

They are kernels, tiny as they are, because XLA would need six launches for each, and because its division on GPUs is
not correctly rounded: scales are to be the same bits everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.recipe import scale_from_amax

# --- How observed amaxes add up --------------------------------------------------------------------------------------
#
# JAX combines the cotangents of a value that is used twice by adding them, while amaxes combine by max. So an
# amax is reported one-hot, in the bin of its leading bits: the highest bin that is not empty after any number of
# additions holds the largest amax, exactly where it was the only one of its bin, and else at most one bin's width
# (25 %) too large. The bins cover 2**-64 to 2**64; beyond, amaxes share the outermost ones.

BINS = 128 * 4  # four to a binade
_SHIFT = 21  # drops all but two bits of an f32's mantissa
_FIRST = (127 - 64) * 4


def report(amax: jax.Array) -> jax.Array:
    """amax f32[..] as f32[.., bins] that may be added to other reports; all zeros for 0, NaN and Inf."""
    usable = jnp.isfinite(amax) & (amax > 0)
    bits = jax.lax.bitcast_convert_type(jnp.where(usable, amax, 0.0), jnp.int32)
    bin_ = jnp.clip((bits >> _SHIFT) - _FIRST, 0, BINS - 1)
    return jnp.where((jnp.arange(BINS, dtype=jnp.int32) == bin_[..., None]) & usable[..., None], amax[..., None], 0.0)


def read(reports: jax.Array) -> jax.Array:
    """The largest reported amax of sums of reports f32[.., bins]; 0 where there was none."""
    bins = jnp.arange(BINS, dtype=jnp.int32)
    edges = jax.lax.bitcast_convert_type((bins + 1 + _FIRST) << _SHIFT, jnp.float32)
    within = jnp.where(bins < BINS - 1, jnp.minimum(reports, edges), reports)  # the last one has none
    return jnp.max(within, axis=-1, initial=0.0)


# --- Scales -----------------------------------------------------------------------------------------------------------


def packed(scale: jax.Array, uses: jax.Array, history: jax.Array) -> jax.Array:
    """f32[.., 2 + H] of scale f32[..], uses f32[..] and history f32[.., H]."""
    return jnp.concatenate([scale[..., None], uses[..., None], history], axis=-1)


def unpacked(state: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(scale, uses, history) of `packed`."""
    return state[..., 0], state[..., 1], state[..., 2:]


def in_use(uses: jax.Array) -> jax.Array:
    """Whether a state came out of a step at all, by its uses f32[..]; 0 is the gradient of one that did not."""
    return (uses != 0) & jnp.isfinite(uses)


def states_in(uses: jax.Array) -> jax.Array:
    """How many updated states f32[..] were added together: less than 1 if their sum was scaled, 1 for a sum of none."""
    return jnp.where(in_use(uses), uses, 1.0)


def scale_of_each(scale: jax.Array, uses: jax.Array) -> jax.Array:
    """The scale of the states whose scales add up to this one; 1 where that is none."""
    scale = scale / states_in(uses)
    return jnp.where((scale > 0) & jnp.isfinite(scale), scale, 1.0)


def mended(state: jax.Array, fp8_max: float, two_to_margin: float, most_recent: bool) -> jax.Array:
    """The state f32[.., 2 + H] to start a step from: itself, unless it is a sum of `uses` states, or of none.

    In a sum of n updated states of one step all but the newest amax are n times what they were; the newest ones add up
    to at most n times their maximum, which is kept: an amax may be too large, never too small. A state that no output
    depended on comes back as zeros, and starts anew. One that was scaled with the gradients among which it came, by a
    loss scale or by clipping, has less than one use, or a negative one: divided by that it is what it was, and a sum of
    several their mean.
    """
    scale, uses, history = unpacked(state)
    n = states_in(uses)
    newest = 1 % history.shape[-1]
    each = history / n[..., None]
    history = each.at[..., newest].set(jnp.where(n > 1, history[..., newest], each[..., newest]))
    history = jnp.where((history > 0) & jnp.isfinite(history), history, 0.0)
    last = scale_of_each(scale, uses)
    window = history[..., newest] if most_recent else jnp.max(history, axis=-1)
    scale = jnp.where(n == 1, last, scale_from_amax(window, last, fp8_max, two_to_margin))
    return packed(scale, jnp.ones_like(uses), history)


def current_scale(amax: jax.Array, fp8_max: float, amax_epsilon: float, power_of_2: bool) -> jax.Array:
    """The scale f32[..] of tensors with these amaxes f32[..], 1 where one is 0 or not finite."""
    amax = jnp.where(amax < amax_epsilon, jnp.float32(amax_epsilon), amax)
    scale = scale_from_amax(amax, jnp.ones_like(amax), fp8_max)
    if not power_of_2:
        return scale
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32) & jnp.uint32(0xFF800000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


class Scales(NamedTuple):
    scale: jax.Array  # f32[..]
    scale_inv: jax.Array  # f32[..]


class Scaling(NamedTuple):
    """Where the scale of a cast comes from: the attribute `scaling` of the kernels that cast.

    So no kernel has to run between one that measures and one that casts.
    """

    scale_from: str = "scale"  # what the operand `scale` holds: that, f32[]; "amax" f32[]; or "states" f32[T, 2 + H]
    amax_epsilon: float = 0.0  # amax: as `current_scale`
    power_of_2: bool = False
    two_to_margin: float = 1.0  # states: as `mended`
    most_recent: bool = False
    tensor: int = 0  # states: whose

    def scales(self, operand: jax.Array | None, dtype) -> Scales | None:
        """The scale f32[] for a cast to `dtype`, and its reciprocal; None without an operand."""
        if operand is None:
            return None
        of_states = self.scale_from == "states"
        if operand.ndim != 2 * of_states or (of_states and self.tensor >= len(operand)):
            expected = f"f32[T, 2 + H] of more than {self.tensor} states" if of_states else "f32[]"
            raise ValueError(f"scale: expected {expected}, got {operand.dtype}{list(operand.shape)}")
        fp8_max = float(jnp.finfo(dtype).max)
        if self.scale_from == "amax":
            scale = current_scale(operand, fp8_max, self.amax_epsilon, self.power_of_2)
        elif of_states:
            scale = unpacked(mended(operand[self.tensor], fp8_max, self.two_to_margin, self.most_recent))[0]
        else:
            scale = operand
        return Scales(scale, 1.0 / scale)


GIVEN = Scaling()


# --- Kernels ---------------------------------------------------------------------------------------------------------


# What belongs to one GEMM, up to three tensors, is one array and takes one launch: each array that a step takes and
# returns costs the host 10 to 30 us.


@kernel("... t h, ... r, ... r, ... r -> ... t h", whole="thr")
def update_state(
    states, reports_0, reports_1=None, reports_2=None,
    *, fp8_max_0, fp8_max_1=0.0, fp8_max_2=0.0, two_to_margin, most_recent,
):  # fmt: skip
    """The states f32[.., T, 2 + H] after a step that observed the reports f32[.., bins] of each of the T tensors.

    The reported amax enters the history, and sets the scale alone or with the others. The step may have started from
    sums of states, or of none, as `mended` has them.
    """
    reports = [r for r in (reports_0, reports_1, reports_2) if r is not None]
    if states.shape[-2] != len(reports):
        raise ValueError(f"update_state: states: expected those of {len(reports)} tensors, got {states.shape[-2]}")

    def update(state, report, fp8_max):
        scale, uses, history = unpacked(mended(state, fp8_max, two_to_margin, most_recent))
        amax = read(report)
        history = jnp.concatenate([amax[..., None], history[..., 1:]], axis=-1)
        window = amax if most_recent else jnp.max(history, axis=-1)
        scale = scale_from_amax(window, scale, fp8_max, two_to_margin)
        return packed(scale, jnp.ones_like(uses), jnp.roll(history, 1, axis=-1))

    largest = (fp8_max_0, fp8_max_1, fp8_max_2)
    of_each = [update(states[..., i, :], r, fp8_max) for i, (r, fp8_max) in enumerate(zip(reports, largest))]
    return jnp.stack(of_each, axis=-2)
