"""Quantized tensors, the state that follows them through training, and the rule that updates it.

The state's new value leaves a step as its "gradient". Ops only report the amax they observed, as the cotangent of
Quantizer.observed; `attach`, an identity placed where the state enters the step, turns the sum of the reports into
the next state. So a module used twice, scanned, vmapped or summed over microbatches updates its state once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import set_current_trace

from transformer_engine_jax.autocast import autocast, current
from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.ops.state import (
    BINS,
    GIVEN,
    Scaling,
    in_threes,
    mended,
    packed,
    read,
    unpacked,
    update_state,
)
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
    """What is remembered of one quantized tensor between steps: `packed`, one array, and what it holds by name."""

    packed: jax.Array  # f32[2 + H] scale, uses, amax_history

    FIELDS: ClassVar[tuple[str, ...]] = ("scale", "amax_history", "uses")

    @property
    def scale(self) -> jax.Array:
        """f32[] multiply by this before the cast."""
        return self._named()[0]

    @property
    def uses(self) -> jax.Array:
        """f32[] how many updated states were added up here; 1 unless `attach` could not prevent it."""
        return self._named()[1]

    @property
    def amax_history(self) -> jax.Array:
        """f32[H] newest first, behind the slot that the coming step fills."""
        return self._named()[2]

    def _named(self) -> tuple:
        abstract = isinstance(self.packed, jax.ShapeDtypeStruct)  # of jax.eval_shape
        return jax.eval_shape(unpacked, self.packed) if abstract else unpacked(self.packed)

    @property
    def history_len(self) -> int:
        """H."""
        return jnp.shape(self.packed)[-1] - 2

    @classmethod
    def pack(cls, scale, amax_history, uses) -> QuantizerState:
        """The state of these; each may have the same leading axes."""
        return cls(packed(*(jnp.asarray(x, jnp.float32) for x in (scale, uses, amax_history))))

    def replace(self, **fields) -> QuantizerState:
        """The state with other values of some of FIELDS."""
        return self.pack(**{name: fields.get(name, getattr(self, name)) for name in self.FIELDS})

    @classmethod
    def of(cls, state: Any) -> Any:
        """The state that a mapping stands for, as restored without a target; anything else as it is."""
        if isinstance(state, Mapping) and set(state) == {"packed"}:
            return cls(jnp.asarray(state["packed"], jnp.float32))
        if isinstance(state, Mapping) and set(state) == set(cls.FIELDS):
            return cls.pack(**state)
        return state

    @classmethod
    def create(cls, recipe: DelayedScaling, stacked: tuple[int, ...] = ()) -> QuantizerState:
        """The state before the first step, or as many as there are places on the axes `stacked`."""
        ones = jnp.ones(stacked, jnp.float32)
        return cls.pack(ones, jnp.zeros((*stacked, recipe.amax_history_len), jnp.float32), ones)


class GemmState(NamedTuple):
    """What is remembered of one GEMM's operands: states for a recipe with a history, None for one without."""

    x: QuantizerState | None
    kernel: QuantizerState | None
    grad: QuantizerState | None  # of the gradient of the output

    @classmethod
    def create(cls, recipe: Recipe | None = None) -> GemmState:
        """The state before the first step; recipe None means DelayedScaling()."""
        recipe = recipe or DelayedScaling()
        return cls(*[QuantizerState.create(recipe) if recipe.stateful else None for _ in cls._fields])


class AttentionState(NamedTuple):
    """What is remembered of attention's operands under a recipe with fp8_dpa; None for one without a history."""

    query: QuantizerState | None
    key: QuantizerState | None
    value: QuantizerState | None

    @classmethod
    def create(cls, recipe: Recipe | None = None) -> AttentionState:
        """The state before the first step; recipe None means DelayedScaling(fp8_dpa=True)."""
        recipe = recipe or DelayedScaling(fp8_dpa=True)
        return cls(*[QuantizerState.create(recipe) if recipe.stateful else None for _ in cls._fields])


def _arithmetic(recipe: DelayedScaling, dtypes: Sequence[np.dtype]) -> dict[str, Any]:
    """The recipe as attributes of the kernels of states for tensors of these formats."""
    return {f"fp8_max_{i}": float(jnp.finfo(dtype).max) for i, dtype in enumerate(dtypes)} | {
        "two_to_margin": float(2.0**recipe.margin),
        "most_recent": recipe.amax_compute_algo == "most_recent",
    }


def _has_own_algorithm(recipe: DelayedScaling) -> bool:
    return callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None


def update(
    states: Sequence[QuantizerState], reports: Sequence[jax.Array], recipe: DelayedScaling, dtypes: Sequence[np.dtype]
) -> list[QuantizerState]:
    """Up to three states after a step that observed the amaxes of `reports`, f32[bins] for each.

    The states are those that the step started from: as they were given, or mended where the recipe has functions.
    """
    if _has_own_algorithm(recipe):
        updated = []
        for state, report, dtype in zip(states, reports, dtypes):
            history = state.amax_history.at[0].set(read(report))
            scale = delayed_scale(recipe, history, state.scale, dtype)
            updated.append(QuantizerState.pack(scale, jnp.roll(history, 1), jnp.ones_like(scale)))
        return updated
    operands = in_threes([(report, state.packed) for state, report in zip(states, reports)])
    results = update_state(*operands, **_arithmetic(recipe, dtypes))
    return [QuantizerState(result) for result in results[: len(states)]]


def _scaling(recipe: Recipe) -> Scaling:
    if not recipe.stateful:
        return Scaling("amax", amax_epsilon=float(recipe.amax_epsilon), power_of_2=recipe.use_power_2_scales)
    if _has_own_algorithm(recipe):
        return GIVEN
    most_recent = recipe.amax_compute_algo == "most_recent"
    return Scaling("state", two_to_margin=float(2.0**recipe.margin), most_recent=most_recent)


def start(
    states: Sequence[QuantizerState], recipe: DelayedScaling, dtypes: Sequence[np.dtype]
) -> list[tuple[QuantizerState, jax.Array]]:
    """For each of up to three states (the state to start a step from, what kernels that cast take as its scale).

    Kernels and `update` mend a sum of states themselves, as ops/state.py says; not so for a recipe's own functions.
    """
    if not _has_own_algorithm(recipe):
        return [(state, state.packed) for state in states]
    starts = []
    for old, dtype in zip(states, dtypes):
        state = QuantizerState(mended(old.packed, 448.0, 1.0, False))  # whose scale is replaced
        n = jnp.maximum(old.uses, 1.0)
        last = jnp.where((old.scale > 0) & jnp.isfinite(old.scale), old.scale / n, 1.0)
        scale = jnp.where(n > 1, delayed_scale(recipe, jnp.roll(state.amax_history, -1), last, dtype), last)
        starts.append((state.replace(scale=scale), scale))
    return starts


# --- One step's view of the state ------------------------------------------------------------------------------------


class QuantizerSpec(NamedTuple):
    """The static part of a Quantizer."""

    recipe: Recipe
    dtype: np.dtype
    amax_axes: tuple[str, ...]
    calibrating: bool
    checkpoint_name: str | None = None  # of what is quantized, for checkpoint policies


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How one tensor becomes FP8 in this step; what ops take."""

    scale: jax.Array | None  # as `scaling` has it; None where the recipe takes it from the tensor itself
    observed: jax.Array | None  # f32[bins] zeros; its cotangent carries the reports
    spec: QuantizerSpec = dataclasses.field(metadata={"static": True})

    @property
    def scaling(self) -> Scaling:
        """How kernels that cast take the scale."""
        return _scaling(self.spec.recipe)


class GemmQuantizers(NamedTuple):
    """The Quantizers of one GEMM's operands: the input, the kernel, and the gradient of the output."""

    x: Any
    kernel: Any
    grad: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionQuantizers:
    """How query, key and value become FP8 in this step, where attention can be computed so; what attention takes.

    Only there are the states attached: elsewhere attention keeps them as they are.
    """

    state: AttentionState
    spec: QuantizerSpec = dataclasses.field(metadata={"static": True})

    def attached(self) -> list[Quantizer]:
        """The Quantizers of query, key and value."""
        return attach(self.state, 3 * (self.spec,))


def _attach_forward(specs: tuple[QuantizerSpec, ...], *states: QuantizerState):
    starts = start(states, specs[0].recipe, [spec.dtype for spec in specs])
    views = []
    for _, scale in starts:
        # Zeros that vmap takes for as many as there are states: it adds up the reports to what states have in common.
        zero = jax.lax.select(scale.ravel()[0] > 0, jnp.float32(0), jnp.float32(0))
        views.append((scale, jnp.broadcast_to(zero, (BINS,))))
    return views, [state for state, _ in starts]


def _attach_backward(specs: tuple[QuantizerSpec, ...], states: list[QuantizerState], cotangents):
    reports = [cotangent[1] for cotangent in cotangents]
    return tuple(update(states, reports, specs[0].recipe, [spec.dtype for spec in specs]))


_attach = differentiable(_attach_forward, _attach_backward)


def kept_on(trace, name: str) -> dict:
    """A dictionary that lives on a trace under this name, and so is gone with it."""
    owner = trace if hasattr(trace, "__dict__") else getattr(trace, "frame", None)
    return owner.__dict__.setdefault(name, {}) if hasattr(owner, "__dict__") else {}


def _attach_once(specs: tuple[QuantizerSpec, ...], states: tuple[QuantizerState, ...]) -> list[Quantizer]:
    """_attach at the level of tracing where the states live, and once there.

    Attaching inside the body of a scan, or in each of two calls of one model, would add up updated states, and
    double the scale, where adding up the reports is what is wanted.
    """

    def attached() -> list[Quantizer]:
        return [Quantizer(*view, spec) for view, spec in zip(_attach(specs, *states), specs)]

    leaves = [state.packed for state in states]
    if len({id(getattr(leaf, "_trace", None)) for leaf in leaves}) > 1:  # states of several levels: each at its own
        return [_attach_once((spec,), (state,))[0] for spec, state in zip(specs, states)]
    here = jax.sharding.get_abstract_mesh().manual_axes or jax.config.jax_check_tracer_leaks
    if here or not isinstance(leaves[0], jax.core.Tracer):
        return attached()
    trace = leaves[0]._trace
    known = kept_on(trace, "_te_attached")
    key = (specs, *[id(leaf) for leaf in leaves])
    if key not in known:
        with set_current_trace(trace):
            quantizers = attached()
        known[key] = (states, quantizers)  # the states too, lest an id be used again
    return known[key][1]


def quantizer_spec(*, backward: bool = False, checkpoint_name: str | None = None) -> QuantizerSpec:
    """The spec of a tensor of the forward (or backward) pass under the context in force."""
    context = current()
    recipe = context.recipe
    dtype = recipe.backward_dtype if backward else recipe.forward_dtype
    return QuantizerSpec(recipe, dtype, context.amax_axes, context.calibrating, checkpoint_name)


def attach(states: Sequence[QuantizerState | None], specs: Sequence[QuantizerSpec]) -> list[Quantizer]:
    """This step's Quantizers, of the up to three tensors of a GEMM under one recipe.

    The gradient with respect to each state will be the next state.

    Raises:
      ValueError: the recipe needs states and one is missing, or its history has another length.
    """
    recipe = specs[0].recipe
    if not recipe.stateful:
        return [Quantizer(None, None, spec) for spec in specs]
    _check_states(states, recipe)
    return _attach_once(tuple(specs), tuple(states))


def _check_states(states: Sequence[QuantizerState | None], recipe: Recipe) -> None:
    for state in states:
        if state is None:
            raise ValueError(
                f"attach: {type(recipe).__name__} needs a QuantizerState, got None; GemmState.create() and "
                "AttentionState.create() make them"
            )
        stacked = jnp.shape(state.packed)[:-1]
        if state.history_len != recipe.amax_history_len or stacked:
            raise ValueError(
                f"attach: expected a state of scale f32[] and amax_history f32[{recipe.amax_history_len}] (the "
                f"recipe's amax_history_len), got {stacked} and {(*stacked, state.history_len)}; "
                "initialise the state under the recipe that it is used with"
            )


def under(recipe: Recipe | None) -> contextlib.AbstractContextManager:
    """The context in force, with this recipe where one is given."""
    return contextlib.nullcontext() if recipe is None else autocast(True, recipe, amax_axes=current().amax_axes)


def gemm_quantizers(
    state: GemmState | None = None, recipe: Recipe | None = None, *, checkpoint_name: str | None = None
) -> GemmQuantizers | None:
    """This step's quantizers of one GEMM, what ops such as `dense` take; the gradient of `state` is the next state.

    Args:
      state: of GemmState.create(recipe), or the "gradient" that the step before returned for it; a recipe that keeps
        no history ignores it, and its gradient is then zero, which the next step takes for a new state.
      recipe: None means that of the autocast in force.
      checkpoint_name: a name that checkpoint policies see on what is quantized.

    Returns:
      The quantizers, or None where neither names a recipe: ops then compute in their operands' precision.

    Raises:
      ValueError: the recipe needs a state and there is none, or its history has another length.
    """
    with under(recipe):
        if current().recipe is None:
            return None
        state = GemmState(None, None, None) if state is None else state
        forward = quantizer_spec(checkpoint_name=checkpoint_name)
        backward = quantizer_spec(backward=True, checkpoint_name=checkpoint_name)
        return GemmQuantizers(*attach(state, (forward, forward, backward)))


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
    """
    with under(recipe):
        recipe = current().recipe
        if recipe is None or not recipe.fp8_dpa:
            return None
        state = AttentionState(None, None, None) if state is None or not recipe.stateful else state
        if recipe.stateful:
            _check_states(state, recipe)
        return AttentionQuantizers(state, quantizer_spec())


def _keep_forward(_, y, states):
    return y, states


def _keep_backward(_, states, cotangent):
    return cotangent, states


_keep = differentiable(_keep_forward, _keep_backward)


def keep(y: Any, states: Any) -> Any:
    """y, its first array tied to states that this step does not use: their gradient is their own value, not zero."""
    if not jax.tree.leaves(states):
        return y
    (first, *others), tree = jax.tree.flatten(y)
    return jax.tree.unflatten(tree, [_keep(None, first, states), *others])
