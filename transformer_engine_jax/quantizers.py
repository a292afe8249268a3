"""One step's view of the state: quantizers, which ops take, and the way of what they report into the next state.

The state's new value leaves a step as its "gradient". Ops only report the amax they observed, as the cotangent of
Quantizer.observed; `attach`, an identity placed where the state enters the step, turns the sum of the reports into
the next state. So a module used twice, scanned, vmapped or summed over microbatches updates its state once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.alignment import align
from transformer_engine_jax.autocast import autocast, current
from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.ops.state import BINS, Scaling
from transformer_engine_jax.quantized import AttentionState, GemmState, QuantizerStates, scaling_of, start, update
from transformer_engine_jax.recipe import DelayedScaling, Recipe
from transformer_engine_jax.tracing import made, once


class QuantizerSpec(NamedTuple):
    """The static part of a Quantizer."""

    recipe: Recipe
    dtype: np.dtype
    amax_axes: tuple[str, ...]
    calibrating: bool
    checkpoint_name: str | None = None  # of what is quantized, for checkpoint policies

    @property
    def rule(self) -> tuple:
        """All that the next state depends on."""
        recipe = self.recipe
        given = recipe if recipe.scaling_factor_compute_algo else None  # to that function
        return recipe.margin, recipe.amax_compute_algo, given, self.dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How one tensor becomes FP8 in this step; what ops take."""

    scale: jax.Array | None  # as `scaling` has it; None where the recipe takes it from the tensor itself
    observed: jax.Array | None  # f32[bins] zeros; its cotangent carries the reports
    spec: QuantizerSpec = dataclasses.field(metadata={"static": True})
    tensor: int = dataclasses.field(default=0, metadata={"static": True})  # which of those whose states are one array

    @property
    def scaling(self) -> Scaling:
        """How kernels that cast take the scale."""
        return scaling_of(self.spec.recipe, self.tensor)


class GemmQuantizers(NamedTuple):
    """The Quantizers of one GEMM's operands: the input, the kernel, and the gradient of the output."""

    x: Quantizer
    kernel: Quantizer
    grad: Quantizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionQuantizers:
    """How query, key and value become FP8 in this step, where attention can be computed so; what attention takes.

    Only there is the state attached: elsewhere attention keeps it as it is.
    """

    state: AttentionState | None
    spec: QuantizerSpec = dataclasses.field(metadata={"static": True})

    def attached(self) -> list[Quantizer]:
        """The Quantizers of query, key and value."""
        return attach(self.state, 3 * (self.spec,))


def _attach_forward(specs: tuple[QuantizerSpec, ...], states: QuantizerStates):
    started, scales = start(states, specs[0].recipe, [spec.dtype for spec in specs])
    # Zeros that vmap takes for as many as there are states: it adds up the reports to what states have in common.
    zeros = [jax.lax.select(scale.ravel()[0] > 0, jnp.float32(0), jnp.float32(0)) for scale in scales]
    return [(scale, jnp.broadcast_to(zero, (BINS,))) for scale, zero in zip(scales, zeros)], started


def _attach_backward(specs: tuple[QuantizerSpec, ...], states: QuantizerStates, cotangents):
    reports = [report for _, report in cotangents]
    return (update(states, reports, specs[0].recipe, [spec.dtype for spec in specs]),)


_attach = differentiable(_attach_forward, _attach_backward)


def _attach_once(specs: tuple[QuantizerSpec, ...], states: QuantizerStates) -> list[Quantizer]:
    """_attach at the level of tracing where the states live, and once there.

    Attaching inside the body of a scan, or in each of two calls of one model, would add up updated states, and
    double the scale, where adding up the reports is what is wanted. So would adding an updated state to one that a call
    before kept: that is attached which the other hands on. Recipes that update states alike attach them together.
    """
    if kept := made("kept", [states.packed]):
        _, states = kept

    def attached() -> list[tuple[jax.Array, jax.Array]]:
        views = _attach(specs, states)
        once("attached", [states.packed], lambda: views)  # whatever the specs: see _kept_once
        return views

    views = once(("attached", tuple(spec.rule for spec in specs)), [states.packed], attached)
    return [Quantizer(*view, spec, i) for i, (view, spec) in enumerate(zip(views, specs))]


def quantizer_spec(*, backward: bool = False, checkpoint_name: str | None = None) -> QuantizerSpec:
    """The spec of a tensor of the forward (or backward) pass under the context in force."""
    context = current()
    recipe = context.recipe
    dtype = recipe.backward_dtype if backward else recipe.forward_dtype
    return QuantizerSpec(recipe, dtype, context.amax_axes, context.calibrating, checkpoint_name)


def attach(states: QuantizerStates | None, specs: Sequence[QuantizerSpec]) -> list[Quantizer]:
    """This step's Quantizers, of up to three tensors under one recipe.

    The gradient with respect to the states will be the next states.

    Raises:
      ValueError: the recipe needs states and there are none, or of another number, or with histories of another length.
    """
    recipe = specs[0].recipe
    if not recipe.stateful:
        return [Quantizer(None, None, spec) for spec in specs]
    _check_states(states, recipe, len(specs))
    return _attach_once(tuple(specs), states)


def _check_states(states: QuantizerStates | None, recipe: DelayedScaling, tensors: int) -> None:
    if not isinstance(states, QuantizerStates) or states.packed is None:
        raise ValueError(
            f"quantizers of {type(recipe).__name__}: expected the states of what it quantizes, got {states}; "
            "GemmState.create() and AttentionState.create() make them"
        )
    if states.packed.dtype != jnp.float32:
        raise ValueError(
            f"quantizers: FP8 state: expected f32, got {states.packed.dtype}; cast parameters alone, "
            "variables['params'], and leave the state as it is"
        )
    if states.layout != ((), tensors, recipe.amax_history_len):
        stacked, got, length = states.layout
        raise ValueError(
            f"quantizers: expected {tensors} states of scale f32[] and amax_history f32[{recipe.amax_history_len}] "
            f"(the recipe's amax_history_len), got {got} of f32{list(stacked)} and f32{[*stacked, length]}; "
            "initialise the state under the recipe that it is used with, as te_flax.init_state does"
        )


def under(recipe: Recipe | None) -> contextlib.AbstractContextManager:
    """The context in force, with this recipe where one is given."""
    if recipe is None:
        return contextlib.nullcontext()
    calibrating = current().calibrating
    return autocast(not calibrating, recipe, calibrating=calibrating)


def _of_kind(op: str, kind: type[QuantizerStates], state: Any, needed: bool) -> QuantizerStates | None:
    """The state, also of what was restored without a target; TypeError where it is something else, and needed."""
    state = kind.of(state)
    if isinstance(state, Recipe) or (needed and state is not None and not isinstance(state, kind)):
        raise TypeError(
            f"{op}: state: expected None, {kind.__name__}.create(recipe) or {{'packed': array}}, as a checkpoint has "
            f"it, got {type(state).__name__}; the recipe is the second argument"
        )
    return state if needed else None


def gemm_quantizers(
    state: GemmState | None = None, recipe: Recipe | None = None, *, checkpoint_name: str | None = None
) -> GemmQuantizers | None:
    """This step's quantizers of one GEMM, what ops such as `dense` take; the gradient of `state` is the next state.

    Args:
      state: of GemmState.create(recipe), or the "gradient" that the step before returned for it. A recipe that keeps
        no history ignores it, and so is it where FP8 is off. Its gradient is then zero, which the next step takes for a
        new state; te.update_collections(gradient, state) keeps it.
      recipe: None means that of the autocast in force.
      checkpoint_name: a name that checkpoint policies see on what is quantized.

    Returns:
      The quantizers, or None where neither names a recipe: ops then compute in their operands' precision.

    Raises:
      ValueError: the recipe needs a state and there is none, or its history has another length.
      TypeError: the state is something else.
    """
    with under(recipe):
        recipe = current().recipe
        state = _of_kind("gemm_quantizers", GemmState, state, needed=recipe is not None and recipe.stateful)
        if recipe is None:
            return None
        forward = quantizer_spec(checkpoint_name=checkpoint_name)
        backward = quantizer_spec(backward=True, checkpoint_name=checkpoint_name)
        return GemmQuantizers(*attach(state, (forward, forward, backward)))


def needs_attention_state() -> bool:
    """Whether attention under the context in force needs an AttentionState."""
    recipe = current().recipe
    return recipe is not None and recipe.stateful and recipe.fp8_dpa


def attention_quantizers(
    state: AttentionState | None = None, recipe: Recipe | None = None
) -> AttentionQuantizers | None:
    """This step's quantizers of attention, what `dot_product_attention` takes; the gradient of `state` is the next one.

    Args:
      state: of AttentionState.create(recipe), or the "gradient" that the step before returned for it; a recipe that
        keeps no history ignores it.
      recipe: None means that of the autocast in force.

    Returns:
      The quantizers, or None where neither names a recipe with fp8_dpa: attention then computes in high precision.

    Raises:
      ValueError: the recipe needs a state and there is none, or its history has another length.
      TypeError: the state is something else.
    """
    with under(recipe):
        recipe = current().recipe
        state = _of_kind("attention_quantizers", AttentionState, state, needed=needs_attention_state())
        if recipe is None or not recipe.fp8_dpa:
            return None
        if recipe.stateful:
            _check_states(state, recipe, len(AttentionState.TENSORS))
        return AttentionQuantizers(state if recipe.stateful else None, quantizer_spec())


def _keep_forward(_, state):
    first = state.packed.ravel()[0]
    return (jax.lax.select(first > 0, jnp.float32(0), jnp.float32(0)), state), state


def _keep_backward(_, state, cotangents):
    _, updated = cotangents
    return (updated.or_where_unused(state.kept()),)


_keep = differentiable(_keep_forward, _keep_backward, waits=False)


def _tie_forward(_, y, token):
    del token
    return y, None


def _tie_backward(_, residuals, cotangent):
    del residuals
    return align(cotangent, jnp.float32(0))


_tie = differentiable(_tie_forward, _tie_backward, waits=False)


def keep(y: Any, states: Any) -> Any:
    """y unchanged. The gradient of `states`, which this step does not use, is then their own value and not zero.

    However often they go unused: as with `_attach_once` it is seen to where the states live, and once there.
    """
    for state in jax.tree.leaves(states, is_leaf=lambda x: isinstance(x, QuantizerStates)):
        if getattr(state, "packed", None) is None:  # none, or of nobody's
            continue
        token = _kept_once(state)
        y = jax.tree.map(lambda x: _tie(None, x, token) if _differentiable(x) else x, y)
    return y


def _differentiable(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)


def _kept_once(state: QuantizerStates) -> jax.Array:
    """f32[] 0, of which any cotangent makes the state's the state, unless a call updates it."""
    if attached := made("attached", [state.packed]):
        (_, observed), *_ = attached
        return observed[0]
    return once("kept", [state.packed], lambda: _keep(None, state))[0]
