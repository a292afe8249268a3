"""How far results are off, computed where they lie: a device's results of many gigabytes do not go to the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.jit
def _squares(got, expected):
    wide = lambda tree: [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]
    total = lambda leaves: sum(jnp.sum(jnp.square(x)) for x in leaves)
    return total(g - e for g, e in zip(wide(got), wide(expected), strict=True)), total(wide(expected))


def off(got: Any, expected: Any) -> float:
    """|got - expected| / |expected| in L2 over all leaves; that of 0 and 0 is 0."""
    expected = jax.tree.map(lambda g, e: jax.device_put(e, g.sharding), got, expected)
    difference, norm = (float(x) for x in _squares(got, expected))
    return float(np.sqrt(difference / norm)) if norm else float("inf") if difference else 0.0


def leaf_most_off(got: Any, expected: Any) -> float:
    """`off` of the leaf that is furthest off."""
    return max(off(g, e) for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))


def within(most: float, got: float, what: str) -> float:
    """got, or an error that ends the benchmark: what is fast and wrong is no result."""
    if not got <= most:
        raise AssertionError(f"{what}: {got:.1e} off from its reference, expected at most {most:.1e}")
    return got
