"""Rotary position embedding (Su et al., 2021): pairs of features turned by position * frequency, in f32 arithmetic."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.arrays import arrays
from transformer_engine_jax.ops.quantize import FLOATS

GROUPS = ("consecutive", "alternate")

# --- The kernels -------------------------------------------------------------------------------------------------


@kernel("... h d, f, ... -> ... h d", whole="d f")
def rope_rotate(x, frequencies, positions, *, group, inverse=False) -> jax.Array:
    """x[.., H, D] turned by positions i32[..] * frequencies f32[F], or back where `inverse`; its own gradient."""
    cos, sin = _turns(positions, frequencies)
    return _turned(x, cos, -sin if inverse else sin, group)


@kernel("... p h d, f, ... -> ... p h d", whole="p d f", aliases={"x": "result"})
def rope_rotate_qkv(x, frequencies, positions, *, group, inverse=False, in_place=True) -> jax.Array:
    """rope_rotate of queries and keys in x[.., 3, H, D], in place; values stay."""
    turn = functools.partial(rope_rotate.reference, group=group, inverse=inverse)
    turned = [turn(x[..., part, :, :], frequencies, positions) for part in range(2)]
    return jnp.stack([*turned, x[..., 2, :, :]], axis=-3)


def _turned(x, cos, sin, group: str) -> jax.Array:
    """x[.., H, D], its first 2 F features in pairs turned by angles of these cos and sin f32[.., F]."""
    pairs = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    a, b = _pairs(x, pairs, group)
    rotated = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1 if group == "consecutive" else -2)
    rotated = rotated.reshape(*x.shape[:-1], 2 * pairs).astype(x.dtype)
    return jnp.concatenate([rotated, x[..., 2 * pairs :]], axis=-1)


def _pairs(x, pairs: int, group: str) -> tuple[jax.Array, jax.Array]:
    """The first and the second feature of each pair, f32[.., H, F]."""
    x = x[..., : 2 * pairs].astype(jnp.float32)
    if group == "consecutive":
        return x[..., 0::2], x[..., 1::2]
    return x[..., :pairs], x[..., pairs:]


def _turns(positions, frequencies) -> tuple[jax.Array, jax.Array]:
    """cos and sin f32[.., F] of the exact positions * frequencies, for positions up to 2**24.

    An f32 product would be off by up to 2**-24 of itself, 4e-3 radians at position 100000. Cut into halves of 12 bits,
    positions and frequencies have exact products; their four turns are made one after the other.
    """
    p_low = positions[..., None] % 4096
    p = [(positions[..., None] - p_low).astype(jnp.float32), p_low.astype(jnp.float32)]
    upper = jax.lax.bitcast_convert_type(frequencies, jnp.uint32) & np.uint32(0xFFFFF000)
    f_high = jax.lax.bitcast_convert_type(upper, jnp.float32)
    angles = jnp.stack([p_part * f_part for p_part in p for f_part in (f_high, frequencies - f_high)])
    (c, *others_c), (s, *others_s) = jnp.cos(angles), jnp.sin(angles)
    for dc, ds in zip(others_c, others_s):
        c, s = c * dc - s * ds, s * dc + c * ds
    return c, s


# --- The differentiable op ---------------------------------------------------------------------------------------


class Rotation(NamedTuple):
    """What a rotation needs to know at trace time: which features are pairs, and whether it turns back."""

    group: str
    inverse: bool = False


def rope_frequencies(head_dim: int, windows: tuple[float, float] = (1, 10000)) -> jax.Array:
    """1 / (min * (max / min) ** (2 i / head_dim)) for i < head_dim / 2, as f32[head_dim / 2], each rounded once."""
    pair = np.asarray(windows)
    if pair.shape != (2,) or pair.dtype.kind not in "iuf" or not (pair > 0).all():
        raise ValueError(f"rope_frequencies: windows: expected two positive numbers, got {windows!r}")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"rope_frequencies: head_dim: expected an even number, 2 or more, got {head_dim!r}")
    low, high = windows
    return jnp.asarray(1.0 / (low * (high / low) ** (np.arange(0, head_dim, 2) / head_dim)), jnp.float32)


def rope(x: jax.Array, frequencies: jax.Array, *, positions: jax.Array | None = None, group: str = "consecutive"):
    """Rotates pairs of features of x[B, S, H, D] by position * frequency.

    cos and sin are within 3e-7 of those of the exact product, at any position up to 2**24.

    Args:
      x: f32, f16 or bf16; the result has its shape and dtype.
      frequencies: f32[F] radians per position; features from 2 F on stay as they are.
      positions: integers [S] or [B, S]; None counts from 0.
      group: "consecutive" rotates the pairs (2i, 2i + 1), "alternate" the pairs (i, i + F).

    Raises:
      ValueError: shapes or dtypes do not fit, or an unknown group.
    """
    x, frequencies = arrays("rope", dict(x=x, frequencies=frequencies))
    frequencies = _checked_frequencies(frequencies)
    return _rope(Rotation(group), x, frequencies, _checked_positions(x, frequencies.shape[0], positions, group))


def rope_qkv(qkv: jax.Array, frequencies: jax.Array, *, group: str = "consecutive") -> jax.Array:
    """`rope` of the queries and keys in qkv[B, S, 3, H, D], whose values stay; positions count from 0."""
    frequencies = _checked_frequencies(frequencies)
    return _rope(Rotation(group), qkv, frequencies, _checked_positions(qkv[:, :, 0], frequencies.shape[0], None, group))


def rope_table(x: jax.Array, angles: jax.Array, *, positions: jax.Array | None = None, group: str = "consecutive"):
    """Rotates pairs of features of x[B, S, H, D] by angles that a table gives for each position.

    Args:
      x: f32, f16 or bf16; the result has its shape and dtype.
      angles: f32[T, F] radians for positions 0 to T - 1; features from 2 F on stay as they are.
      positions: integers [S] or [B, S] from 0 to T - 1 (others get NaN); None counts from 0, and T must be S or more.
      group: as of `rope`.

    Raises:
      ValueError: shapes or dtypes do not fit, or an unknown group.
    """
    x, angles = arrays("rope_table", dict(x=x, angles=angles))
    if angles.ndim != 2 or not jnp.issubdtype(angles.dtype, jnp.floating):
        raise ValueError(f"rope_table: angles: expected f32[T, F], got {angles.dtype}{list(angles.shape)}")
    if positions is None and x.ndim == 4 and angles.shape[0] < x.shape[1]:
        raise ValueError(f"rope_table: angles: expected {x.shape[1]} positions or more, got {angles.shape[0]}")
    positions = _checked_positions(x, angles.shape[1], positions, group)
    rows = jnp.where(positions < 0, angles.shape[0], positions)  # JAX counts negative ones from the end
    angles = jnp.take(angles.astype(jnp.float32), rows, axis=0, mode="fill", fill_value=jnp.nan)
    return _turned(x, jnp.cos(angles), jnp.sin(angles), group)


def _checked_frequencies(frequencies) -> jax.Array:
    frequencies = jnp.asarray(frequencies)
    if frequencies.ndim != 1 or not jnp.issubdtype(frequencies.dtype, jnp.floating):
        raise ValueError(f"rope: frequencies: expected f32[F], got {frequencies.dtype}{list(frequencies.shape)}")
    return frequencies.astype(jnp.float32)


def _checked_positions(x, pairs: int, positions, group: str) -> jax.Array:
    """i32[B, S] the positions, once x and group are known to fit."""
    if x.dtype not in FLOATS:
        raise ValueError(f"rope: x: expected f32, f16 or bf16, got {x.dtype}")
    if x.ndim != 4 or x.shape[-1] < 2 * pairs:
        raise ValueError(f"rope: expected x[B, S, H, D] with D >= 2 x {pairs}, got {list(x.shape)}")
    if group not in GROUPS:
        raise ValueError(f"rope: group: expected 'consecutive' or 'alternate', got {group!r}")
    positions = jnp.arange(x.shape[1]) if positions is None else jnp.asarray(positions)
    if positions.shape not in (x.shape[1:2], x.shape[:2]) or not jnp.issubdtype(positions.dtype, jnp.integer):
        expected = f"integers [{x.shape[1]}] or {list(x.shape[:2])}"
        raise ValueError(f"rope: positions: expected {expected}, got {positions.dtype}{list(positions.shape)}")
    return jnp.broadcast_to(positions.astype(jnp.int32), x.shape[:2])


def _rope_forward(rotation: Rotation, x, frequencies, positions):
    """x [B, S, H, D], or [B, S, 3, H, D], of which queries and keys are turned."""
    if x.ndim == 5:
        y = rope_rotate_qkv(x, frequencies, positions, **rotation._asdict())
    else:
        y = rope_rotate.for_tokens(math.prod(x.shape[:2]))(x, frequencies, positions, **rotation._asdict())
    return y, (y, frequencies, positions)


def _rope_backward(rotation: Rotation, saved, dy):
    y, frequencies, positions = saved
    dx, _ = _rope_forward(rotation._replace(inverse=not rotation.inverse), dy, frequencies, positions)
    # The derivative by the angle is y, turned by a right angle. Where nobody asks for it, the compiler drops it.
    pairs, axes = frequencies.shape[0], tuple(range(2, y.ndim - 1))
    y, dy = (x[:, :, :2] if x.ndim == 5 else x for x in (y, dy))
    (a, b), (da, db) = _pairs(y, pairs, rotation.group), _pairs(dy, pairs, rotation.group)
    by_angle = jnp.sum(a * db - b * da, axis=axes) * (-1.0 if rotation.inverse else 1.0)
    dfrequencies = jnp.sum(positions[..., None].astype(jnp.float32) * by_angle, axis=tuple(range(positions.ndim)))
    return dx, dfrequencies, None


_rope = differentiable(_rope_forward, _rope_backward)
