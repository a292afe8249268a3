"""FP8 state as an NNX Variable of its own type, and how it goes through a training step.

Its "gradient" is its next value: a step differentiates with respect to TRAINED, and update_state takes it from there.
An optimizer made with wrt=nnx.Param never sees it, and a gradient with respect to nnx.Param alone leaves it as it is.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from transformer_engine_jax.autocast import current
from transformer_engine_jax.flax.base import MAIN_GRADS_COLLECTION, STATE_COLLECTION
from transformer_engine_jax.quantized import AttentionState, GemmState, QuantizerStates
from transformer_engine_jax.recipe import DelayedScaling, Recipe


class _Bridged:
    """What Flax's bridge makes of an Fp8State for Linen: the states, as our Linen modules have them."""

    @staticmethod
    def from_nnx_metadata(metadata: dict[str, Any]) -> Any:
        return _states(metadata["value"], metadata["kind"])


def _states(value: Any, kind: type[QuantizerStates]) -> QuantizerStates:
    return value if isinstance(value, QuantizerStates) else kind(value)


@nnx.register_variable_name(STATE_COLLECTION, overwrite=True)
class Fp8State(nnx.Variable):
    """Holds the packed array of a GemmState or an AttentionState: one array, as checkpoints want it of a Variable.

    One type for both, as Flax's bridge knows Linen's collections by the types of Variables. Of a Linen module in that
    bridge it holds what the collection has: our states themselves, and whatever else is replaced by its gradient.
    """

    @classmethod
    def create(cls, kind: type[QuantizerStates], recipe: Recipe, stacked: tuple[int, ...] = ()) -> Fp8State:
        """As kind.create."""
        return cls(kind.create(recipe, stacked).packed, kind=kind, linen_meta_type=_Bridged)

    @property
    def states(self) -> QuantizerStates | None:
        """What it holds; its tensors' are attributes here too: gemm_state.x.scale. None where it is not ours.

        The state of attention's values is attention_state.states.value, for Variable.value is another thing.
        """
        value, kind = self.get_value(), self.get_metadata().get("kind")
        return None if kind is None and not isinstance(value, QuantizerStates) else _states(value, kind)

    def holding(self, states: QuantizerStates) -> Any:
        """The value that holds other states in the form of this one."""
        return states if isinstance(self.get_value(), QuantizerStates) else states.packed

    def __getattr__(self, name: str) -> Any:
        if name in ("states", "holding"):  # Flax's HijaxVariable comes here for all that is ours
            return object.__getattribute__(self, name)
        ours = name in _TENSORS and self.states is not None
        return getattr(self.states, name) if ours else super().__getattr__(name)


_TENSORS = {*GemmState.TENSORS, *AttentionState.TENSORS}


@nnx.register_variable_name(MAIN_GRADS_COLLECTION, overwrite=True)
class MainGrad(nnx.Variable):
    """Holds the sum of a kernel's gradients, f32, see `main_grads`."""


_OVERWRITTEN = nnx.Any(Fp8State, MainGrad)
TRAINED = nnx.Any(nnx.Param, _OVERWRITTEN)


def recipe_of_state(recipe: Recipe | None = None) -> DelayedScaling:
    """The recipe that states are made for: the one given or else in force, if it needs a state, else the default."""
    recipe = recipe or current().recipe
    return recipe if recipe is not None and recipe.stateful else DelayedScaling()


def update_state(model: nnx.Module, grads: Any) -> Any:
    """Gives the model its next FP8 state, and buffers of `main_grads`; returns the gradients of its parameters.

    The state of a module that the step did not call, whose gradient is zero, stays as it is.

    Args:
      model: updated in place.
      grads: of nnx.grad or nnx.value_and_grad with argnums=nnx.DiffState(0, te_nnx.TRAINED).

    Returns:
      grads of parameters alone; what nnx.Optimizer.update and gradient norms take.

    Raises:
      ValueError: the model has FP8 state and grads has not, or that of another model, or one with other leading axes,
        as of vmapped gradients.
    """
    new, own = (dict(nnx.to_flat_state(nnx.state(x, _OVERWRITTEN))) for x in (grads, model))
    if not new and own:
        raise ValueError(
            "update_state: grads: expected the FP8 state among the gradients, got none; "
            "differentiate with argnums=nnx.DiffState(0, te_nnx.TRAINED)"
        )
    if unknown := [".".join(map(str, path)) for path in new if path not in own]:
        of_several = f", a tuple of {len(grads)}" if isinstance(grads, tuple) else ""
        raise ValueError(
            f"update_state: grads: expected those of the model, got {unknown} that it has not{of_several}; of what "
            "nnx.value_and_grad returns, and of gradients by several argnums, take the model's"
        )
    values = {}  # as nnx.Optimizer gives them to nnx.update, which puts them into references too
    for path, variable in new.items():
        states = variable.states if isinstance(variable, Fp8State) else None
        kept = None if states is None else variable.holding(states.or_where_unused(own[path].states))
        values[path] = variable.get_value() if states is None else kept
    nnx.update(model, nnx.from_flat_state(values))
    return nnx.state(grads, nnx.Not(_OVERWRITTEN))


def init_fp8_state(model: nnx.Module, recipe: Recipe | None = None) -> None:
    """Makes all FP8 state of the model, in place, fit a recipe of another amax_history_len, format or margin.

    The newest amaxes stay, and scales follow from them; where there are none yet they stay too. States that are not
    there, as after nnx.pop(model, te_nnx.Fp8State), start anew, and attention's where the recipe has fp8_dpa.

    Args:
      model: any module; stacked layers keep their leading axes.
      recipe: None means the recipe in force, or DelayedScaling().

    Raises:
      TypeError: something else than a recipe.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"init_fp8_state: recipe: expected an instance of a recipe such as DelayedScaling(), got {recipe!r}"
        )
    recipe = recipe_of_state(recipe)
    found = list(nnx.iter_graph(model))
    states = {path: v for path, v in found if isinstance(v, Fp8State) and v.states is not None}
    for variable in states.values():
        fitting = variable.states.with_history(recipe.amax_history_len).rescaled(recipe)
        variable.set_value(variable.holding(fitting))
    modules = [(path, node) for path, node in found if isinstance(node, nnx.Module)]
    for kind in (GemmState, AttentionState) if recipe.fp8_dpa else (GemmState,):
        for path, node in modules:
            for name in [name for name, its in getattr(node, "FP8_STATES", {}).items() if its is kind]:
                if getattr(node, name, None) is None:
                    states[*path, name] = Fp8State.create(kind, recipe, _stacked(path, node, states))
                    setattr(node, name, states[*path, name])


def _stacked(path: tuple, node: Any, states: dict[tuple, Fp8State]) -> tuple[int, ...]:
    """The axes of stacked layers: those of a module's kernel, or else of the state nearest to it."""
    axes = node.stacked_axes()
    if axes is not None or not states:
        return axes or ()
    common = lambda other: next((i for i, (a, b) in enumerate(zip(path, other)) if a != b), len(path))
    return states[max(states, key=common)].states.layout[0]
