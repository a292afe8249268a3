"""Weights and FP8 state from the Linen modules to the NNX ones, and back: names and shapes are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from transformer_engine_jax.flax.base import STATE_COLLECTION
from transformer_engine_jax.nnx.state import Fp8State
from transformer_engine_jax.quantized import QuantizerStates

_COLLECTIONS = {"params": nnx.Param, STATE_COLLECTION: Fp8State}


def _variables(model: nnx.Module, kind: type) -> dict[tuple[str, ...], nnx.Variable]:
    """The model's own variables of a type, by path."""
    found = [(path, node) for path, node in nnx.iter_graph(model) if isinstance(node, kind)]
    return {tuple(str(part) for part in path): variable for path, variable in found}


def _value(variable: nnx.Variable, value: Any) -> Any:
    """What the variable holds of a value in Linen's collections, whatever form that has of a state."""
    states = variable.states if isinstance(variable, Fp8State) else None
    given = None if states is None else states.of(value)
    return variable.holding(given) if isinstance(given, QuantizerStates) else value


def _layout(value: Any) -> list[str]:
    return [f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in jax.tree.leaves(value)]


def from_linen(model: nnx.Module, variables: Mapping[str, Any]) -> None:
    """Gives the model, in place, the weights and FP8 state of its Linen twin.

    Args:
      model: its attributes have the names of the Linen modules.
      variables: of the Linen model, boxed or not. Without an FP8 state in it the model keeps its own.

    Raises:
      ValueError: a name, a shape or a dtype differs.
      TypeError: other arguments than a model and then variables.
    """
    if isinstance(variables, nnx.Module) or not isinstance(variables, Mapping):
        raise TypeError(
            "from_linen: expected an NNX module and then the variables of its Linen twin, got "
            f"{type(model).__name__} and {type(variables).__name__}"
        )
    for name, kind in _COLLECTIONS.items():
        if name != "params" and not variables.get(name):
            continue
        own = _variables(model, kind)
        of_linen = dict(nn.unbox(variables.get(name, {})))
        given = traverse_util.flatten_dict(of_linen, is_leaf=lambda path, _: path in own)
        if unknown := given.keys() ^ own.keys():
            paths = sorted("/".join(path) for path in unknown)
            raise ValueError(f"from_linen: {name}: expected the same names in both, but only one of them has {paths}")
        for path, variable in own.items():
            value = _value(variable, given[path])
            got, expected = _layout(value), _layout(variable.get_value())
            if got != expected:
                raise ValueError(f"from_linen: {name}/{'/'.join(path)}: expected {expected}, got {got}")
            variable.set_value(jax.tree.map(jnp.asarray, value))


def to_linen(model: nnx.Module) -> dict[str, Any]:
    """The variables of the model's Linen twin: {"params": ..., "_overwrite_with_gradient": ...}, without boxes.

    Args:
      model: its attributes have the names of the Linen modules.
    """
    flat = {name: _variables(model, kind) for name, kind in _COLLECTIONS.items()}
    value = lambda v: v.states if isinstance(v, Fp8State) and v.states is not None else v.get_value()
    nested = {name: traverse_util.unflatten_dict({p: value(v) for p, v in f.items()}) for name, f in flat.items()}
    return {name: collection for name, collection in nested.items() if collection}
