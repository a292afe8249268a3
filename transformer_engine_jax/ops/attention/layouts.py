"""The names of NVIDIA's extension for masks, biases, and for queries, keys and values that share an array."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
)
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias")
# How many of query, key and value each array of a layout holds, on an axis before the heads where more than one.
LAYOUTS = {
    "bshd_bshd_bshd": (1, 1, 1),
    "bshd_bs2hd": (1, 2),
    "bs3hd": (3,),
    "thd_thd_thd": (1, 1, 1),
    "thd_t2hd": (1, 2),
    "t3hd": (3,),
}


def respelled(name: Any, allowed: Sequence) -> Any:
    """The one of `allowed` that a name is in other letters, without or with other underscores, or in another order.

    NVIDIA's modules take "BSHD_BSHD_BSHD", "RMSNorm" and "causal_padding", and have PADDING_CAUSAL_MASK and
    VANILLA_SOFTMAX among their enumerations. A name of none is given back as it is.
    """
    if name in allowed:
        return name
    if not isinstance(name, str):
        return "none" if name is None and "none" in allowed else name
    words = lambda text: text.lower().strip().replace("-", "_").split("_")
    given = words(name)
    kinds = [given, given[:-1]] if given[-1] in ("mask", "softmax") else [given]
    for spelling, key in itertools.product(kinds, ("".join, sorted)):
        found = [one for one in allowed if one and key(words(one)) == key(spelling)]
        if found:
            return found[0]
    return name


def is_packed(qkv_layout: str) -> bool:
    """Whether rows of the layout hold several sequences."""
    return qkv_layout.startswith("t")


def unpack(owner: str, qkv: Sequence[jax.Array | None], qkv_layout: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value, each [B, S, heads, D], of the arrays of a layout; ValueError where they are not its."""
    counts, names = LAYOUTS[qkv_layout], ("query", "key", "value")
    given = [x is not None for x in (*qkv, None, None, None)[:3]]
    if given != [i < len(counts) for i in range(3)]:
        raise ValueError(
            f"{owner}: qkv_layout={qkv_layout!r} needs {', '.join(names[: len(counts)])} and nothing else, "
            f"got {sum(given)} arrays"
        )
    parts = []
    for name, x, count in zip(names, qkv, counts):
        x = jnp.asarray(x)
        if count > 1 and (x.ndim != 5 or x.shape[2] != count):
            raise ValueError(
                f"{owner}: {name}: expected [B, S, {count}, heads, D] for qkv_layout={qkv_layout!r}, "
                f"got {list(x.shape)}"
            )
        parts += [x] if count == 1 else [x[:, :, i] for i in range(count)]
    query, key, value = parts
    return query, key, value
