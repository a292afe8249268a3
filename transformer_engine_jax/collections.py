"""update_collections: merges what a step returned into the variables it started from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def update_collections(new: Mapping[str, Any], original: Mapping[str, Any]) -> Mapping[str, Any]:
    """`original` with the collections of `new` in place of its own, merged name by name.

    Args:
      new: collections or parts of them, such as the gradient of `_overwrite_with_gradient`.
      original: all collections; what `new` does not name stays as it is.

    Returns:
      A mapping of the type of `original`.

    Raises:
      TypeError: one of them is not a mapping.
    """
    for name, value in (("new", new), ("original", original)):
        if not isinstance(value, Mapping):
            raise TypeError(
                f"update_collections: {name}: expected a mapping of collections, got {type(value).__name__}"
            )
    merged = dict(original)
    for name, value in new.items():
        old = original.get(name)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[name] = update_collections(value, old) if both else value
    return merged if type(original) is dict else type(original)(merged)
