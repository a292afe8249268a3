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

Path = tuple[Any, ...]


class _Variables(dict[Path, nnx.Variable]):
    """The model's own variables of a type, by the shortest path to each: what is shared has several.

    One that another module holds by another name, as an embedding is tied, keeps the name that it has first.
    """

    def __init__(self, model: nnx.Module, kind: type):
        nodes = dict(nnx.iter_graph(model))  # each once, by the path that comes first
        shared = [(path, first) for first, *others in nnx.find_duplicates(model) for path in others]
        self.inside: dict[Path, dict[str, Path]] = {}  # what a node has, by name
        for path, first in [*((path, path) for path in nodes if path), *shared]:
            self.inside.setdefault(path[:-1], {})[str(path[-1])] = first
        shortest, queue = {(): ()}, [()]
        for node in queue:
            for name, child in self.inside.get(node, {}).items():
                renamed = isinstance(nodes.get(child), nnx.Variable) and name != str(child[-1])
                if child not in shortest and not renamed:
                    shortest[child] = (*shortest[node], name)
                    queue.append(child)
        self.shortest = shortest
        super().__init__((shortest[path], node) for path, node in nodes.items() if isinstance(node, kind))

    def path_of(self, path: Path) -> Path:
        """The shortest of the paths to what this one leads to; itself where it leads nowhere."""
        node = ()
        for part in path:
            node = self.inside.get(node, {}).get(str(part))
        return tuple(map(str, path)) if node is None else self.shortest[node]


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
      model: its attributes have the names of the Linen modules. What is shared may come by any of its paths.
      variables: of the Linen model, boxed or not. Without an FP8 state in it the model keeps its own.

    Raises:
      ValueError: a name, a shape or a dtype differs; the model is then as it was.
      TypeError: other arguments than a model and then variables.
    """
    if isinstance(variables, nnx.Module) or not isinstance(variables, Mapping):
        raise TypeError(
            "from_linen: expected an NNX module and then the variables of its Linen twin, got "
            f"{type(model).__name__} and {type(variables).__name__}"
        )
    changes = []
    for name, kind in _COLLECTIONS.items():
        own = _Variables(model, kind)
        if name == "params" and name not in variables and own:
            raise ValueError(f'from_linen: variables: expected {{"params": ...}}, got collections {list(variables)}')
        if name == "params" or variables.get(name):
            changes += _changes(name, own, variables.get(name, {}))
    for variable, value in changes:  # all or none
        variable.set_value(jax.tree.map(jnp.asarray, value))


def _changes(name: str, own: _Variables, collection: Mapping[str, Any]) -> list[tuple[nnx.Variable, Any]]:
    """(variable, its next value) of all that a collection names."""
    found = traverse_util.flatten_dict(dict(collection), is_leaf=lambda path, _: own.path_of(path) in own)
    given = {}
    for path, value in found.items():
        if given.setdefault(own.path_of(path), value) is not value:
            same = ["/".join(map(str, other)) for other in found if own.path_of(other) == own.path_of(path)]
            raise ValueError(f"from_linen: {name}: expected one of {same}, which the model shares, got all of them")
    if given.keys() != own.keys():
        lists = [sorted("/".join(path) for path in a.keys() - b.keys()) for a, b in ((own, given), (given, own))]
        raise ValueError(
            f"from_linen: {name}: expected the same names in both, but the model alone has {lists[0]}, and the "
            f"variables alone have {lists[1]}"
        )
    return [(variable, _checked(f"{name}/{'/'.join(path)}", variable, given[path])) for path, variable in own.items()]


def _checked(where: str, variable: nnx.Variable, value: Any) -> Any:
    """What the variable holds of a value; ValueError where that has another shape or dtype."""
    value, held = _value(variable, nn.unbox(value)), variable.get_value()
    got, expected = _layout(value), _layout(held)
    if got != expected:
        shape, expected_shape = ([jnp.shape(x) for x in jax.tree.leaves(each)] for each in (value, held))
        hint = "; cast it" if shape == expected_shape else ""
        raise ValueError(f"from_linen: {where}: expected {expected}, got {got}{hint}")
    return value


def to_linen(model: nnx.Module) -> dict[str, Any]:
    """The variables of the model's Linen twin: {"params": ..., "_overwrite_with_gradient": ...}, without boxes.

    Args:
      model: its attributes have the names of the Linen modules. What is shared goes by the shortest of its paths.
    """
    flat = {name: _Variables(model, kind) for name, kind in _COLLECTIONS.items()}
    value = lambda v: v.states if isinstance(v, Fp8State) and v.states is not None else v.get_value()
    nested = {name: traverse_util.unflatten_dict({p: value(v) for p, v in f.items()}) for name, f in flat.items()}
    return {name: collection for name, collection in nested.items() if collection}
