"""Dropout of activations, also of those whose sharding is their type, which Flax's modules refuse."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def drop(x, key, rate: float, broadcast_dims: Sequence[int] = ()) -> jax.Array:
    """x with zeros at a rate of `rate` and the rest divided by 1 - rate.

    Args:
      x: any shape, floating.
      key: of jax.random; it draws the same whatever the sharding.
      rate: in [0, 1).
      broadcast_dims: axes along which all is dropped or nothing.
    """
    alike = [axis % x.ndim for axis in broadcast_dims]
    shape = [1 if axis in alike else size for axis, size in enumerate(x.shape)]
    own = jax.typeof(x).sharding
    spec = PartitionSpec(*[None if axis in alike else entry for axis, entry in enumerate(own.spec)])
    explicit = bool(own.mesh.explicit_axes)
    kept = jax.random.bernoulli(key, 1.0 - rate, shape, out_sharding=own.update(spec=spec) if explicit else None)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros((), x.dtype))
