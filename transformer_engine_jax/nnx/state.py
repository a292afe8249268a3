"""FP8 state as an NNX Variable of its own type, and how it goes through a training step.

Its "gradient" is its next value: a step differentiates with respect to TRAINED, and update_state takes it from there.
An optimizer made with wrt=nnx.Param never sees it, and a gradient with respect to nnx.Param alone leaves it as it is.
"""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from transformer_engine_jax.autocast import current
from transformer_engine_jax.quantized import AttentionState, GemmState, QuantizerStates
from transformer_engine_jax.recipe import DelayedScaling, Recipe


class Fp8State(nnx.Variable):
    """Holds the packed array of a GemmState or an AttentionState: one array, as checkpoints want it of a Variable."""

    KIND: ClassVar[type[QuantizerStates]] = QuantizerStates

    @classmethod
    def create(cls, recipe: Recipe, stacked: tuple[int, ...] = ()) -> Fp8State:
        """As KIND.create."""
        return cls(cls.KIND.create(recipe, stacked).packed)

    @property
    def states(self) -> QuantizerStates:
        """What the array is; its tensors' are attributes here too: gemm_state.x.scale."""
        return self.KIND(self.get_value())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.states, name) if name in type(self).KIND.TENSORS else super().__getattr__(name)


class Fp8GemmState(Fp8State):
    """That of one GEMM."""

    KIND = GemmState


class Fp8AttentionState(Fp8State):
    """That of attention."""

    KIND = AttentionState


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
      ValueError: the model has FP8 state and grads has not.
    """
    new = nnx.state(grads, _OVERWRITTEN)
    if not new and nnx.state(model, _OVERWRITTEN):
        raise ValueError(
            "update_state: grads: expected the FP8 state among the gradients, got none; "
            "differentiate with argnums=nnx.DiffState(0, te_nnx.TRAINED)"
        )
    flat, own = dict(nnx.to_flat_state(new)), dict(nnx.to_flat_state(nnx.state(model, Fp8State)))
    for path in flat.keys() & own.keys():
        flat[path] = flat[path].replace(flat[path].states.or_where_unused(own[path].states).packed)
    nnx.update(model, nnx.from_flat_state(flat))
    return nnx.state(grads, nnx.Not(_OVERWRITTEN))


def init_fp8_state(model: nnx.Module, recipe: Recipe | None = None) -> None:
    """Starts all FP8 state of the model anew, in place, for a recipe: needed where its amax_history_len is another.

    Attention gets its state where the recipe has fp8_dpa and it is not there yet.

    Args:
      model: any module; stacked layers keep their leading axes.
      recipe: None means the recipe in force, or DelayedScaling().
    """
    recipe = recipe_of_state(recipe)
    found = list(nnx.iter_graph(model))
    states = {path: variable for path, variable in found if isinstance(variable, Fp8State)}
    for variable in states.values():
        variable.set_value(variable.KIND.create(recipe, variable.states.layout[0]).packed)
    for path, node in found if recipe.fp8_dpa else []:
        if isinstance(node, nnx.Module) and getattr(node, "attention_state", node) is None:
            node.attention_state = Fp8AttentionState.create(recipe, _stacked(path, states))


def _stacked(path: tuple, states: dict[tuple, Fp8State]) -> tuple[int, ...]:
    """The axes of stacked layers: those of the state nearest to a module."""
    common = lambda other: next((i for i, (a, b) in enumerate(zip(path, other)) if a != b), len(path))
    return states[max(states, key=common)].states.layout[0] if states else ()
