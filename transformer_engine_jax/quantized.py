"""Quantized tensors, the state that follows them through training, and the rule that updates it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.ops.state import (
    GIVEN,
    Scaling,
    in_use,
    mended,
    packed,
    read,
    scale_of_each,
    states_in,
    unpacked,
    update_state,
)
from transformer_engine_jax.recipe import DelayedScaling, Recipe, delayed_scale
from transformer_engine_jax.tracing import once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """original ~ data * scale_inv, with the contracted axes last."""

    data: jax.Array  # fp8[.., K]
    scale_inv: jax.Array  # f32[]


class QuantizerState(NamedTuple):
    """What is remembered of one quantized tensor between steps; leading axes are those of stacked layers."""

    scale: jax.Array  # f32[] multiply by this before the cast
    amax_history: jax.Array  # f32[H] newest first, behind the slot that the coming step fills
    uses: jax.Array | float = 1.0  # f32[] number of updated states that were added together; normally 1


def _stands_for_a_state(x: Any) -> bool:
    return isinstance(x, Mapping) and {"scale", "amax_history"} <= set(x) <= set(QuantizerState._fields)


@dataclasses.dataclass(frozen=True)
class QuantizerStates:
    """What is remembered of tensors that are quantized for one op: a QuantizerState of each, packed into one array."""

    packed: jax.Array | None  # f32[T, 2 + H] of each tensor scale, uses, amax_history; None where the recipe has none

    TENSORS: ClassVar[tuple[str, ...]] = ()  # of a subclass: their names, and attributes that are their QuantizerStates

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_dataclass(cls, data_fields=["packed"], meta_fields=[])

    def __getattr__(self, name: str) -> QuantizerState | None:
        if name not in self.TENSORS:
            raise AttributeError(f"{type(self).__name__} has no {name!r}; it has packed and {', '.join(self.TENSORS)}")
        return self.states().get(name)

    def states(self) -> dict[str, QuantizerState]:
        """The state of each tensor, by its name; none for a recipe without a history."""

        def split(packed):
            rows = [unpacked(packed[..., i, :]) for i in range(len(self.TENSORS))]
            return [QuantizerState(scale, history, uses) for scale, uses, history in rows]

        if self.packed is None:
            return {}
        if jnp.ndim(self.packed) < 2 or jnp.shape(self.packed)[-2] != len(self.TENSORS):
            raise ValueError(
                f"{type(self).__name__}: expected f32[.., {len(self.TENSORS)}, 2 + history] with stacked layers along "
                f"leading axes, as variable_axes={{..: 0}} has them, got {list(jnp.shape(self.packed))}"
            )
        abstract = isinstance(self.packed, jax.ShapeDtypeStruct)  # of jax.eval_shape
        return dict(zip(self.TENSORS, jax.eval_shape(split, self.packed) if abstract else split(self.packed)))

    @property
    def layout(self) -> tuple[tuple[int, ...], int, int]:
        """(the axes of stacked layers, the number of tensors, the length of their histories)."""
        *stacked, tensors, length = jnp.shape(self.packed)
        return tuple(stacked), tensors, length - 2

    @classmethod
    def pack(cls, **states: QuantizerState):
        """The states of all TENSORS, by their names."""
        if set(states) != set(cls.TENSORS):
            raise ValueError(f"{cls.__name__}.pack: expected states of {list(cls.TENSORS)}, got {list(states)}")
        rows = []
        for name in cls.TENSORS:
            scale, history, uses = (jnp.asarray(x, jnp.float32) for x in states[name])
            rows.append(packed(scale, jnp.broadcast_to(uses, scale.shape), history))
        return cls(jnp.stack(rows, axis=-2))

    def replace(self, **states: QuantizerState):
        """These with other states of some tensors."""
        return self.pack(**{**self.states(), **states})

    def with_history(self, length: int):
        """These with their newest amaxes, as many as `length`, after those that there are 0; and their scales."""
        if isinstance(self.packed, jax.ShapeDtypeStruct):
            return type(self)(jax.ShapeDtypeStruct((*self.packed.shape[:-1], 2 + length), self.packed.dtype))
        scale, uses, history = unpacked(jnp.asarray(self.packed))
        from_newest = jnp.roll(history, -1, axis=-1)[..., :length]  # the newest is the second, the oldest the first
        missing = [(0, 0)] * (history.ndim - 1) + [(0, length - from_newest.shape[-1])]
        return type(self)(packed(scale, uses, jnp.roll(jnp.pad(from_newest, missing), 1, axis=-1)))

    def rescaled(self, recipe: DelayedScaling):
        """These with the scales that their amaxes give under the recipe, such as one of another format or margin.

        A scale stays where there is no amax yet, and where the recipe has a function of the scale before.
        """
        given = self.packed
        if isinstance(given, jax.ShapeDtypeStruct) or recipe.scaling_factor_compute_algo is not None:
            return self
        if isinstance(given, jax.core.Tracer) or not getattr(given, "is_fully_addressable", True):
            return type(self)(_rescaled(recipe, self).packed)
        new = np.asarray(_rescaled(recipe, type(self)(np.asarray(given))).packed)
        if np.array_equal(new, np.asarray(given)):
            return self
        return type(self)(jax.device_put(new, given.sharding) if isinstance(given, jax.Array) else new)

    def kept(self):
        """These as a step leaves them that does not use them; several copies of that may be added together.

        A sum of n states must not grow n times with every step. Its scales follow from its amaxes when it is next read,
        by a recipe that is not known now: it is marked by as few uses as a state has that was scaled down.
        """
        scale, uses, _ = unpacked(self.packed)
        safe, one, amaxes = unpacked(mended(self.packed, 1.0, 1.0, False))
        of_one = packed(jnp.where(states_in(uses) > 1, safe, scale_of_each(scale, uses)), one, amaxes)
        return type(self)(jnp.where(states_in(uses)[..., None] == 1, self.packed, of_one * np.float32(2**-12)))

    def or_where_unused(self, old: Any):
        """These after a step, but `old` where no output of it depended on them: to JAX the gradient then is zero."""
        if type(old) is not type(self) or self.packed is None or old.packed is None:
            return self
        leading, expected = jnp.shape(self.packed)[:-2], jnp.shape(old.packed)[:-2]
        if leading != expected:
            raise ValueError(
                f"FP8 state: expected one with the leading axes {list(expected)} of the model's, got {list(leading)}; "
                "a vmap of gradients has a state of each example: differentiate the sum over examples by the one state "
                "that all have, see GUIDE.md, Gradients of each example"
            )
        if jnp.shape(old.packed) != jnp.shape(self.packed):  # of another history length
            return self
        leading = jnp.shape(self.packed)[-2] == len(self.TENSORS)  # else layers that are stacked may lie anywhere
        used = in_use(self.packed[..., 1:2]) if leading else jnp.any(self.packed != 0)
        return type(self)(jnp.where(used, self.packed, old.packed))

    @classmethod
    def of(cls, states: Any) -> Any:
        """What a mapping stands for, as restored without a target; anything else as it is."""
        if not isinstance(states, Mapping):
            return states
        if set(states) == {"packed"}:
            packed = states["packed"]
            if packed is None:
                return cls(None)
            if jnp.ndim(packed) > 1 and jnp.shape(packed)[-2] == len(cls.TENSORS):
                return cls(packed if isinstance(packed, jax.Array) else jnp.asarray(packed))
        if set(states) == set(cls.TENSORS) and all(map(_stands_for_a_state, states.values())):
            pack = lambda: cls.pack(**{name: QuantizerState(**states[name]) for name in cls.TENSORS})
            return once(cls, jax.tree.leaves(states), pack)  # one array, by which is known what is used several times
        return states

    def like(self, states: Any) -> Any:
        """These in the form of `states`, which may be such a mapping."""
        if not isinstance(states, Mapping):
            return self
        if set(states) == {"packed"}:
            return {"packed": self.packed}
        return {name: state._asdict() for name, state in self.states().items()}

    @classmethod
    def create(cls, recipe: Recipe | None = None, stacked: tuple[int, ...] = ()):
        """The states before the first step, or as many as there are places on the axes `stacked`.

        recipe: None means DelayedScaling().
        """
        recipe = recipe or DelayedScaling()
        if not recipe.stateful:
            return cls(None)
        ones = jnp.ones(stacked, jnp.float32)
        fresh = QuantizerState(ones, jnp.zeros((*stacked, recipe.amax_history_len), jnp.float32), ones)
        return cls.pack(**dict.fromkeys(cls.TENSORS, fresh))


def _of_one(state: QuantizerState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(scale, history, uses of 1) of a state that may be a sum of some, or scaled; the scale is that of their mean."""
    scale, uses, history = unpacked(mended(packed(state.scale, state.uses, state.amax_history), 448.0, 1.0, False))
    return jnp.where(state.uses == 1, scale, scale_of_each(state.scale, state.uses)), history, uses


@functools.partial(jax.jit, static_argnums=0)
def _rescaled(recipe: DelayedScaling, states: QuantizerStates) -> QuantizerStates:
    def rescaled(name: str, state: QuantizerState) -> QuantizerState:
        dtype = recipe.backward_dtype if name == "grad" else recipe.forward_dtype
        one = lambda scale, history: delayed_scale(recipe, jnp.roll(history, -1), scale, dtype)
        of_one = QuantizerState(*_of_one(state))
        scale = jnp.vectorize(one, signature="(),(h)->()")(of_one.scale, of_one.amax_history)
        as_it_is = (jnp.abs(scale - state.scale) <= 1e-6 * scale) & (state.uses == 1)
        return of_one._replace(scale=jnp.where(as_it_is, state.scale, scale))

    return states.pack(**{name: rescaled(name, state) for name, state in states.states().items()})


class GemmState(QuantizerStates):
    """What is remembered of one GEMM's operands: of its input, its kernel, and the gradient of its output."""

    TENSORS = ("x", "kernel", "grad")


class AttentionState(QuantizerStates):
    """What is remembered of attention's operands under a recipe with fp8_dpa."""

    TENSORS = ("query", "key", "value")


def _arithmetic(recipe: DelayedScaling, dtypes: Sequence[np.dtype]) -> dict[str, Any]:
    """The recipe as attributes of the kernels of states for tensors of these formats."""
    return {f"fp8_max_{i}": float(jnp.finfo(dtype).max) for i, dtype in enumerate(dtypes)} | {
        "two_to_margin": float(2.0**recipe.margin),
        "most_recent": recipe.amax_compute_algo == "most_recent",
    }


def _has_own_algorithm(recipe: DelayedScaling) -> bool:
    return callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None


def update(
    states: QuantizerStates, reports: Sequence[jax.Array], recipe: DelayedScaling, dtypes: Sequence[np.dtype]
) -> QuantizerStates:
    """The states of up to three tensors after a step that observed the amaxes of `reports`, f32[bins] of each.

    The states are those that the step started from: as they were given, or mended where the recipe has functions.
    """
    if not _has_own_algorithm(recipe):
        return type(states)(update_state(states.packed, *reports, **_arithmetic(recipe, dtypes)))
    updated = {}
    for (name, state), report, dtype in zip(states.states().items(), reports, dtypes):
        history = state.amax_history.at[0].set(read(report))
        scale = delayed_scale(recipe, history, state.scale, dtype)
        updated[name] = QuantizerState(scale, jnp.roll(history, 1))
    return states.pack(**updated)


def scaling_of(recipe: Recipe, tensor: int) -> Scaling:
    """How kernels that cast take the scale of a tensor, of this place among those whose states are one array."""
    if not recipe.stateful:
        return Scaling("amax", amax_epsilon=float(recipe.amax_epsilon), power_of_2=recipe.use_power_2_scales)
    if _has_own_algorithm(recipe):
        return GIVEN
    most_recent = recipe.amax_compute_algo == "most_recent"
    return Scaling("states", two_to_margin=float(2.0**recipe.margin), most_recent=most_recent, tensor=tensor)


def start(
    states: QuantizerStates, recipe: DelayedScaling, dtypes: Sequence[np.dtype]
) -> tuple[QuantizerStates, list[jax.Array]]:
    """(The states to start a step from, what kernels that cast take as the scale of each tensor).

    Kernels and `update` mend sums of states themselves, as ops/state.py says; not so for a recipe's own functions.
    """
    if not _has_own_algorithm(recipe):
        return states, len(dtypes) * [states.packed]
    mended_ones = type(states)(mended(states.packed, 448.0, 1.0, False)).states()  # whose scales are replaced
    for (name, old), dtype in zip(states.states().items(), dtypes):
        last = scale_of_each(old.scale, old.uses)
        state = mended_ones[name]
        scale = delayed_scale(recipe, jnp.roll(state.amax_history, -1), last, dtype)
        scale = jnp.where(states_in(old.uses) <= 1, last, scale)  # of one state, scaled or not
        mended_ones[name] = state._replace(scale=scale)
    return states.pack(**mended_ones), [state.scale for state in mended_ones.values()]
