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
    """amax f32[] as f32[bins] that may be added to other reports; all zeros for 0, NaN and Inf."""
    usable = jnp.isfinite(amax) & (amax > 0)
    bits = jax.lax.bitcast_convert_type(jnp.where(usable, amax, 0.0), jnp.int32)
    bin_ = jnp.clip((bits >> _SHIFT) - _FIRST, 0, BINS - 1)
    return jnp.where((jnp.arange(BINS) == bin_) & usable, amax, 0.0)


def read(reports: jax.Array) -> jax.Array:
    """The largest reported amax of sums of reports f32[.., bins]; 0 where there was none."""
    edges = jax.lax.bitcast_convert_type((jnp.arange(1, BINS + 1) + _FIRST) << _SHIFT, jnp.float32)
    return jnp.max(jnp.minimum(reports, edges.at[-1].set(jnp.inf)), axis=-1, initial=0.0)


# --- Kernels ---------------------------------------------------------------------------------------------------------


class UpdatedState(NamedTuple):
    scale: jax.Array  # f32[..]
    history: jax.Array  # f32[.., H]
    uses: jax.Array  # f32[..] ones: a constant would be copied, which is a launch


class MendedState(NamedTuple):
    scale: jax.Array  # f32[..]
    scale_inv: jax.Array  # f32[..]
    history: jax.Array  # f32[.., H]


class Scales(NamedTuple):
    scale: jax.Array  # f32[..]
    scale_inv: jax.Array  # f32[..]


@kernel("... r, ..., ... h -> ..., ... h, ...", whole="rh")
def update_state(reports, scale, history, *, fp8_max, two_to_margin, most_recent) -> UpdatedState:
    """The state after a step: the reported amax enters the history, and sets the scale alone or with the others."""
    amax = read(reports)
    history = jnp.concatenate([amax[..., None], history[..., 1:]], axis=-1)
    window = amax if most_recent else jnp.max(history, axis=-1)
    scale = scale_from_amax(window, scale, fp8_max, two_to_margin)
    return UpdatedState(scale, jnp.roll(history, 1, axis=-1), jnp.ones_like(scale))


@kernel("..., ... h, ... -> ..., ..., ... h", whole="h")
def mend_state(scale, history, uses, *, fp8_max, two_to_margin, most_recent) -> MendedState:
    """The state to start a step from: itself, unless it is a sum of `uses` states, or of none."""
    n = jnp.maximum(uses, 1.0)
    newest = 1 % history.shape[-1]
    history = (history / n[..., None]).at[..., newest].set(history[..., newest])
    last = jnp.where((scale > 0) & jnp.isfinite(scale), scale / n, 1.0)
    window = history[..., newest] if most_recent else jnp.max(history, axis=-1)
    mended = jnp.where(n > 1, scale_from_amax(window, last, fp8_max, two_to_margin), last)
    return MendedState(mended, 1.0 / mended, history)


@kernel("... -> ..., ...")
def current_scale(amax, *, fp8_max, amax_epsilon, power_of_2) -> Scales:
    """The scale of a tensor with this amax, 1 where amax is 0 or not finite."""
    amax = jnp.where(amax < amax_epsilon, jnp.float32(amax_epsilon), amax)
    scale = scale_from_amax(amax, jnp.ones_like(amax), fp8_max)
    if power_of_2:
        bits = jax.lax.bitcast_convert_type(scale, jnp.uint32) & jnp.uint32(0xFF800000)
        scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return Scales(scale, 1.0 / scale)
