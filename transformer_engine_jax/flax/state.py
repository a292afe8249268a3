"""FP8 state for variables that were made without it, or for another recipe."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core.scope import union_filters

from transformer_engine_jax.autocast import current
from transformer_engine_jax.flax.base import (
    MAIN_GRADS_COLLECTION,
    SHAPES_ALONE,
    STATE_COLLECTION,
    Asked,
    Marked,
    restored_as,
)
from transformer_engine_jax.quantized import QuantizerStates


def init_state(model: nn.Module, variables: Mapping[str, Any], *args, **kwargs) -> dict[str, Any]:
    """The variables with the FP8 state that the recipes in force in a call need; nothing of the model is computed.

    Args:
      model: any Linen module.
      variables: of the model, with or without FP8 state. What no recipe needs stays, as does state that fits, and of
        one with another amax_history_len the newest amaxes; scales of another format or margin follow from the amaxes.
      args, kwargs: of a call of the model, as `model.apply` takes them; arrays or jax.ShapeDtypeStructs. The call may
        write the state and what its `mutable` names; where it says nothing, all but "params" and "intermediates".

    Returns:
      All collections of `variables`, and the state's where a recipe needs one.

    Raises:
      ValueError: autocast is off, here and in the model.
      TypeError: other arguments than a model and then its variables.
    """
    check_model("init_state", model, variables)
    rest = {name: collection for name, collection in variables.items() if name != STATE_COLLECTION}
    shapes, recipes = shapes_of_call(model, rest, args, kwargs)
    needed = shapes.get(STATE_COLLECTION, {})
    if current().recipe is None and not needed:
        raise ValueError("init_state: expected a call inside fp8_autocast(enabled=True, ...), which names the recipe")
    old = flax.core.unfreeze(variables.get(STATE_COLLECTION, {}))

    def fitting(path, made: Marked | jax.ShapeDtypeStruct) -> Any:
        kept = old
        for key in path:
            kept = kept.get(key.key, {}) if isinstance(kept, Mapping) else {}
        if not isinstance(made, Marked):  # of a module that is not ours, such as Flax's for FP8
            if isinstance(kept, Mapping) or np.shape(kept) != made.shape:
                raise ValueError(
                    f"init_state: {jax.tree_util.keystr(path)}: expected it among the variables, {made.dtype}"
                    f"{list(made.shape)}, as it is no state of ours; model.init makes it"
                )
            return kept
        state, kept = _moved(made.state, made.axes(), LAST), restored_as(type(made.state), kept)
        recipe = recipes[tuple(key.key for key in path)]  # that in force there, which the model may have set itself
        if isinstance(kept, type(state)) and np.ndim(kept.packed) == len(state.packed.shape):
            kept = _moved(kept, made.axes(), LAST)
            if kept.packed.shape[:-1] == state.packed.shape[:-1]:
                kept = kept if kept.packed.shape == state.packed.shape else kept.with_history(recipe.amax_history_len)
                return _moved(kept.rescaled(recipe), LAST, made.axes())
        fresh = type(state)(jnp.broadcast_to(state.create(recipe).packed, state.packed.shape))
        return _moved(fresh, LAST, made.axes())

    is_marked = lambda x: isinstance(x, Marked)
    state = _merged(old, jax.tree_util.tree_map_with_path(fitting, needed, is_leaf=is_marked))
    return {**rest, STATE_COLLECTION: state} if state else rest


LAST = (-2, -1)


def _moved(states: QuantizerStates, source: tuple[int, int], destination: tuple[int, int]) -> QuantizerStates:
    """The states with these of their axes in another place."""
    if source == destination:
        return states
    move = functools.partial(jnp.moveaxis, source=source, destination=destination)
    abstract = isinstance(states.packed, jax.ShapeDtypeStruct)
    return type(states)(jax.eval_shape(move, states.packed) if abstract else move(states.packed))


def check_model(op: str, model: Any, variables: Any) -> None:
    """Raises TypeError where the first arguments of a function are not a model and its variables."""
    if isinstance(variables, nn.Module) or not isinstance(variables, Mapping):
        raise TypeError(
            f"{op}: expected a Linen module and then its variables, got {type(model).__name__} and "
            f"{type(variables).__name__}"
        )


def _merged(old: Any, new: Any) -> Any:
    """new, and what old has besides."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


def shapes_of_call(model: nn.Module, variables: Mapping[str, Any], args, kwargs) -> tuple[dict[str, Any], dict]:
    """(our collections as a call would make them, of jax.ShapeDtypeStructs and Marked, the recipe of each state)."""
    ours = (STATE_COLLECTION, MAIN_GRADS_COLLECTION)
    # What modules sow is not written, as init does not: it may be anything, and not fit the transforms that it is in.
    mutable = kwargs.get("mutable", flax.core.DenyList(("params", "intermediates")))
    kwargs = {**kwargs, "mutable": union_filters(mutable, list(ours))}
    given, tree = jax.tree.flatten((args, kwargs))
    arrays = [i for i, x in enumerate(given) if hasattr(x, "shape") and hasattr(x, "dtype")]

    def run(variables, values):
        leaves = list(given)
        for i, value in zip(arrays, values):
            leaves[i] = value
        args, kwargs = jax.tree.unflatten(tree, leaves)
        made = model.apply(variables, *args, **kwargs)[1]
        return {name: made[name] for name in ours if name in made}

    asked = Asked()
    with SHAPES_ALONE(asked):
        return jax.eval_shape(run, variables, [given[i] for i in arrays]), asked.recipes
