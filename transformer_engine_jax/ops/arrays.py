"""What ops are given, as JAX's arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def arrays(op: str, needed: Mapping[str, Any], *optional: Any) -> list[jax.Array | None]:
    """The arguments as arrays, those that are optional None where there is none; TypeError where another is None."""
    for name, given in needed.items():
        if given is None:
            raise TypeError(f"{op}: {name}: expected an array, got None")
    return [None if given is None else jnp.asarray(given) for given in (*needed.values(), *optional)]
