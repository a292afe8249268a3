"""update_collections: merges what a step returned into the variables it started from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_engine_jax.quantized import AttentionState, GemmState, QuantizerStates


def update_collections(new: Any, original: Any) -> Any:
    """`original` with the collections of `new` in place of its own, merged name by name.

    The FP8 state of a module that the step did not call, whose gradient is zero, stays as it is.

    Args:
      new: collections or parts of them, such as the gradient of `_overwrite_with_gradient`; or one state alone.
      original: all collections; what `new` does not name stays as it is. Or that state.

    Returns:
      A mapping of the type of `original`, or a state.

    Raises:
      TypeError: they are neither mappings nor states of one kind.
      ValueError: a state has other leading axes than the original, as those of a vmap of gradients.
    """
    if isinstance(new, QuantizerStates) and isinstance(original, type(new)):
        return _merged(new, original)
    for name, value in (("new", new), ("original", original)):
        if not isinstance(value, Mapping):
            raise TypeError(
                f"update_collections: {name}: expected a mapping of collections, got {type(value).__name__}"
            )
    merged = dict(original)
    for name, value in new.items():
        merged[name] = _merged(value, original.get(name))
    return merged if type(original) is dict else type(original)(merged)


def _merged(value: Any, old: Any) -> Any:
    for kind in (GemmState, AttentionState):
        state = kind.of(value)
        if isinstance(state, kind):
            return state.or_where_unused(kind.of(old)).like(value)
    both = isinstance(value, Mapping) and isinstance(old, Mapping)
    return update_collections(value, old) if both else value
