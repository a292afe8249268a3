"""Quantized tensors, the state that follows them through training, and the rule that updates it.

The state's new value leaves a step as its "gradient". Ops only report the amax they observed, as the cotangent of
Quantizer.observed; `attach`, an identity placed where the state enters the step, turns the sum of the reports into
the next state. So a module used twice, scanned, vmapped or summed over microbatches updates its state once.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import set_current_trace

from transformer_engine_jax.autocast import current
from transformer_engine_jax.kernel import differentiable
from transformer_engine_jax.recipe import DelayedScaling, Recipe, delayed_scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """original ~ data * scale_inv, with the contracted axes last."""

    data: jax.Array  # fp8[.., K]
    scale_inv: jax.Array  # f32[]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizerState:
    """What is remembered of one quantized tensor between steps."""

    scale: jax.Array  # f32[] multiply by this before the cast
    amax_history: jax.Array  # f32[H] newest first, behind the slot that the coming step fills
    uses: jax.Array  # f32[] how many updated states were added up here; 1 unless `attach` could not prevent it

    @classmethod
    def create(cls, recipe: DelayedScaling) -> QuantizerState:
        history = jnp.zeros((recipe.amax_history_len,), jnp.float32)
        return cls(jnp.ones((), jnp.float32), history, jnp.ones((), jnp.float32))


def update(state: QuantizerState, amax: jax.Array, recipe: DelayedScaling, dtype) -> QuantizerState:
    """The state after a step that observed this amax f32[]; 0 says that nothing usable was observed."""
    history = state.amax_history.at[0].set(jnp.where(jnp.isfinite(amax), amax, 0.0))
    scale = delayed_scale(recipe, history, state.scale, dtype)
    return QuantizerState(scale, jnp.roll(history, 1), jnp.ones_like(scale))


def mend(state: QuantizerState, recipe: DelayedScaling, dtype) -> QuantizerState:
    """The state to start a step from: itself, unless it is a sum of states, or of none.

    In a sum of n updated states of one step all but the newest amax are n times what they were; the newest ones add
    up to at most n times their maximum, which is kept: an amax may be too large, never too small. A state that no
    output depended on comes back as zeros, and starts anew.
    """
    n = jnp.maximum(state.uses, 1.0)
    newest = 1 % recipe.amax_history_len
    history = (state.amax_history / n).at[newest].set(state.amax_history[newest])
    usable = (state.scale > 0) & jnp.isfinite(state.scale)
    last = jnp.where(usable, state.scale / n, 1.0)
    scale = jnp.where(n > 1, delayed_scale(recipe, jnp.roll(history, -1), last, dtype), last)
    return QuantizerState(scale, history, jnp.ones_like(scale))


# --- How observed amaxes add up --------------------------------------------------------------------------------------
#
# JAX combines the cotangents of a value that is used twice by adding them, while amaxes combine by max. So an
# amax is reported one-hot, in the bin of its leading bits: the highest bin that is not empty after any number of
# additions holds the largest amax, exactly where it was the only one of its bin, and else at most one bin's width
# (25 %) too large. The bins cover 2**-64 to 2**64; beyond, amaxes share the outermost ones.

_BINS_PER_BINADE = 4
_BINS = 128 * _BINS_PER_BINADE
_SHIFT = 21  # drops all but two bits of an f32's mantissa
_FIRST = (127 - 64) << 2


def report(amax: jax.Array) -> jax.Array:
    """amax f32[] as f32[bins] that may be added to other reports; all zeros for 0, NaN and Inf."""
    usable = jnp.isfinite(amax) & (amax > 0)
    bits = jax.lax.bitcast_convert_type(jnp.where(usable, amax, 0.0), jnp.int32)
    bin_ = jnp.clip((bits >> _SHIFT) - _FIRST, 0, _BINS - 1)
    return jnp.where((jnp.arange(_BINS) == bin_) & usable, amax, 0.0)


def read(reports: jax.Array) -> jax.Array:
    """The largest reported amax f32[] of a sum of reports f32[bins]; 0 where there was none."""
    top = jnp.max(jnp.where(reports > 0, jnp.arange(_BINS), -1))
    total = jnp.max(jnp.where(jnp.arange(_BINS) == top, reports, 0.0))
    edge = jax.lax.bitcast_convert_type((top + 1 + _FIRST) << _SHIFT, jnp.float32)
    return jnp.where(top == _BINS - 1, total, jnp.minimum(total, edge))


# --- One step's view of the state ------------------------------------------------------------------------------------


class QuantizerSpec(NamedTuple):
    """The static part of a Quantizer."""

    recipe: Recipe
    dtype: np.dtype
    amax_axes: tuple[str, ...]
    calibrating: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How one tensor becomes FP8 in this step; what ops take."""

    scale: jax.Array | None  # f32[], None where the recipe takes it from the tensor itself
    observed: jax.Array | None  # f32[bins] zeros; its cotangent carries the reports
    spec: QuantizerSpec = dataclasses.field(metadata={"static": True})


class GemmQuantizers(NamedTuple):
    """The Quantizers of one GEMM's operands: the input, the kernel, and the gradient of the output."""

    x: Any
    kernel: Any
    grad: Any


def _attach_forward(spec: QuantizerSpec, state: QuantizerState):
    state = mend(state, spec.recipe, spec.dtype)
    return (state.scale, jnp.zeros((_BINS,), jnp.float32)), state


def _attach_backward(spec: QuantizerSpec, state: QuantizerState, cotangent):
    return (update(state, read(cotangent[1]), spec.recipe, spec.dtype),)


_attach = differentiable(_attach_forward, _attach_backward)

def _attach_once(spec: QuantizerSpec, state: QuantizerState) -> Quantizer:
    """_attach at the level of tracing where the state lives, and once there.

    Attaching inside the body of a scan, or in each of two calls of one model, would add up updated states, and
    double the scale, where adding up the reports is what is wanted.
    """
    leaf = state.scale
    here = jax.sharding.get_abstract_mesh().manual_axes or jax.config.jax_check_tracer_leaks
    if here or not isinstance(leaf, jax.core.Tracer):
        return Quantizer(*_attach(spec, state), spec)
    # Remembered on the trace itself, and so gone with it.
    trace = leaf._trace
    owner = trace if hasattr(trace, "__dict__") else getattr(trace, "frame", None)
    attached = owner.__dict__.setdefault("_te_attached", {}) if hasattr(owner, "__dict__") else {}
    key = (spec, id(leaf), id(state.amax_history))
    if key not in attached:
        with set_current_trace(trace):
            quantizer = Quantizer(*_attach(spec, state), spec)
        attached[key] = (state, quantizer)  # the state too, lest an id be used again
    return attached[key][1]


def quantizer_spec(*, backward: bool = False) -> QuantizerSpec:
    """The spec of a tensor of the forward (or backward) pass under the context in force."""
    context = current()
    recipe = context.recipe
    dtype = recipe.backward_dtype if backward else recipe.forward_dtype
    return QuantizerSpec(recipe, dtype, context.amax_axes, context.calibrating)


def attach(state: QuantizerState | None, spec: QuantizerSpec) -> Quantizer:
    """This step's Quantizer; the gradient with respect to `state` will be the next state.

    Raises:
      ValueError: the recipe needs a state and there is none, or its history has another length.
    """
    if not spec.recipe.stateful:
        return Quantizer(None, None, spec)
    if state is None:
        raise ValueError(f"attach: {type(spec.recipe).__name__} needs a QuantizerState, got None")
    length = (spec.recipe.amax_history_len,)
    if jnp.shape(state.amax_history) != length or jnp.shape(state.scale) != ():
        raise ValueError(
            f"attach: expected a state of scale f32[] and amax_history f32{list(length)} (the recipe's "
            f"amax_history_len), got {jnp.shape(state.scale)} and {jnp.shape(state.amax_history)}; "
            "initialise the state under the recipe that it is used with"
        )
    return _attach_once(spec, state)


def _keep_forward(_, y, states):
    return y, states


def _keep_backward(_, states, cotangent):
    return cotangent, states


_keep = differentiable(_keep_forward, _keep_backward)


def keep(y: jax.Array, states: Any) -> jax.Array:
    """y, tied to states that this step does not use: their gradient is their own value, not zero."""
    return _keep(None, y, states) if jax.tree.leaves(states) else y
