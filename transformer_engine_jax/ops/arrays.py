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
    named = [*needed.items(), *(("an optional argument", given) for given in optional)]
    return [None if given is None else _array(op, name, given) for name, given in named]


def _array(op: str, name: str, given: Any) -> jax.Array:
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: {name}: expected an array, got {type(given).__name__}") from error


def as_mask(op: str, mask: jax.Array) -> jax.Array:
    """A mask as bool; ValueError where its dtype is that of masks which say the reverse."""
    if mask.dtype not in (jnp.bool_, jnp.int8, jnp.uint8):
        raise ValueError(
            f"{op}: mask: expected bool, int8 or uint8, True where a key is not seen, got {mask.dtype}; Flax's masks "
            "and Hugging Face's attention_mask say the reverse: give mask == 0 for them"
        )
    return mask if mask.dtype == jnp.bool_ else mask != 0
