"""Dropout of activations, with the residual addition that follows it, in one pass; the backward pass draws again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.order import all_at_once
from transformer_engine_jax.sharding import sharded_as

# What a module is told of a residual connection around it: whether its last product adds its input to the result; or,
# where more is to happen, a function (result, input) -> result. Either way its norm adds the input's two gradients up.
Residual = bool | Callable[[jax.Array, jax.Array], jax.Array]

_BITS = 16  # of a number that is drawn for a value

# --- The kernel --------------------------------------------------------------------------------------------------


@kernel("... n, ... n, s, ..., n -> ... n", whole="s")
def dropout(x, residual, seed, row, column, *, threshold, scale) -> jax.Array:
    """x[.., N] * scale + residual; for x zero where the bits that the seed u32[2] gives its place are below threshold.

    row: i32[..], column: i32[N], counting up: the numbers of what may be a part of an array.
    """
    values = x.astype(jnp.float32) * jnp.float32(scale)
    values = jnp.where(drawn(seed, row, column) < threshold, 0.0, values)
    return (values if residual is None else values + residual.astype(jnp.float32)).astype(x.dtype)


def drawn(seed, row, column) -> jax.Array:
    """u32[.., N] of 16 bits each, by Philox-4x32-10 of the counter (column // 8, row, 0, 0)."""
    row, column = row.astype(jnp.uint32)[..., None], column.astype(jnp.uint32)
    words = philox(seed, (column // 8, row, jnp.uint32(0), jnp.uint32(0)))
    place = jnp.broadcast_to(column % 8, words[0].shape)
    word = jnp.select([place // 2 == i for i in range(4)], words)
    return word >> (_BITS * (place % 2)) & jnp.uint32(2**_BITS - 1)


def philox(key, counter) -> list[jax.Array]:
    """Philox-4x32-10 (Salmon et al., 2011): four u32 of each counter, itself four of any shapes that broadcast."""
    c0, c1, c2, c3 = counter
    for i in range(10):
        (high_0, low_0), (high_2, low_2) = _product(0xD2511F53, c0), _product(0xCD9E8D57, c2)
        key_0, key_1 = (key[j] + jnp.uint32(i * w % 2**32) for j, w in enumerate((0x9E3779B9, 0xBB67AE85)))
        c0, c1, c2, c3 = high_2 ^ c1 ^ key_0, low_2, high_0 ^ c3 ^ key_1, low_0
    shape = jnp.broadcast_shapes(*[c.shape for c in (c0, c1, c2, c3)])
    return [jnp.broadcast_to(c, shape) for c in (c0, c1, c2, c3)]


def _product(a: int, b) -> tuple[jax.Array, jax.Array]:
    """(high, low) 32 bits of a product; JAX has no 64 of them by default."""
    (a_high, a_low), (b_high, b_low) = divmod(a, 2**16), (b >> 16, b & jnp.uint32(0xFFFF))
    a_high, a_low = jnp.uint32(a_high), jnp.uint32(a_low)
    middle = a_high * b_low + (a_low * b_low >> 16)
    other = a_low * b_high + (middle & jnp.uint32(0xFFFF))
    return a_high * b_high + (middle >> 16) + (other >> 16), b * jnp.uint32(a)


# --- The differentiable op ---------------------------------------------------------------------------------------


class _Static(NamedTuple):
    threshold: int
    scale: float
    adds: bool  # a residual


def _run(static: _Static, x, residual, seed) -> jax.Array:
    row = jnp.arange(math.prod(x.shape[:-1]), dtype=jnp.int32).reshape(x.shape[:-1])
    column = jnp.arange(x.shape[-1], dtype=jnp.int32)
    return dropout(x, residual, seed, row, column, threshold=static.threshold, scale=static.scale)


def _forward(static: _Static, x, residual, seed):
    return all_at_once(_run(static, x, residual, seed), seed)  # lest the backward pass begin while x is kept


def _backward(static: _Static, seed, dy):
    return _run(static, dy, None, seed), dy if static.adds else None, None


_dropout = differentiable(_forward, _backward)


def drop(x, key, rate: float, broadcast_dims: Sequence[int] = (), residual=None) -> jax.Array:
    """x with zeros at a rate of `rate` and the rest divided by 1 - rate; + residual.

    Args:
      x: f32, f16 or bf16, with an axis or more.
      key: of jax.random; it draws the same whatever the sharding.
      rate: in [0, 1), rounded to 16 bits where values are dropped one by one.
      broadcast_dims: axes along which all is dropped or nothing.
      residual: as x, or None.
    """
    if not broadcast_dims:
        threshold = min(round(rate * 2**_BITS), 2**_BITS - 1)
        static = _Static(threshold, 2**_BITS / (2**_BITS - threshold), residual is not None)
        return _dropout(static, x, residual, jax.random.bits(key, (2,), jnp.uint32))
    alike = [axis % x.ndim for axis in broadcast_dims]
    shape = [1 if axis in alike else size for axis, size in enumerate(x.shape)]
    own = jax.typeof(x).sharding
    spec = PartitionSpec(*[None if axis in alike else entry for axis, entry in enumerate(own.spec)])
    explicit = bool(own.mesh.explicit_axes)
    sharding = own.update(spec=spec) if explicit else None
    kept = jax.random.bernoulli(key, jnp.float32(1 - rate), shape, out_sharding=sharding)
    y = jnp.where(kept, x / (1.0 - rate), jnp.zeros((), x.dtype))
    return y if residual is None else y + residual


def drop_and_add(x, residual, dropouts: Sequence[tuple[jax.Array, float, Sequence[int]]]) -> jax.Array:
    """residual + x after each of `dropouts` (key, rate, broadcast_dims), of which the last adds in its own pass."""
    if not dropouts:
        return sharded_as(x, residual) + residual
    *first, last = dropouts
    for dropout in first:
        x = drop(x, *dropout)
    return drop(x, *last, residual=residual)
