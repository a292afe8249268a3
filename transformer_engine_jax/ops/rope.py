"""Rotary position embedding (Su et al., 2021), computed in f32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rope_frequencies(head_dim: int, windows: tuple[float, float] = (1, 10000)) -> jax.Array:
    """1 / (min * (max / min) ** (2 i / head_dim)) for i < head_dim / 2, as f32[head_dim / 2]."""
    low, high = windows
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return 1.0 / (low * (high / low) ** exponent)


def rope(x: jax.Array, frequencies: jax.Array, *, positions: jax.Array | None = None, group: str = "consecutive"):
    """Rotates pairs of features of x[B, S, H, D] by position * frequency.

    Args:
      x: f32, f16 or bf16; the result has its shape and dtype.
      frequencies: f32[D / 2] radians per position.
      positions: i32[S] or [B, S]; None counts from 0.
      group: "consecutive" rotates the pairs (2i, 2i + 1), "alternate" the pairs (i, i + D / 2).

    Raises:
      ValueError: D is odd or does not fit the frequencies, or an unknown group.
    """
    if x.ndim != 4 or x.shape[-1] != 2 * frequencies.shape[-1]:
        raise ValueError(f"rope: expected x[B, S, H, D] with D = 2 x {frequencies.shape[-1]}, got {list(x.shape)}")
    positions = jnp.arange(x.shape[1]) if positions is None else positions
    angles = positions[..., None].astype(jnp.float32) * frequencies
    angles = angles[..., None, :] if angles.ndim == 3 else angles[None, :, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    wide = x.astype(jnp.float32)
    if group == "consecutive":
        pairs = wide.reshape(*x.shape[:-1], -1, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        rotated = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
    elif group == "alternate":
        a, b = jnp.split(wide, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    else:
        raise ValueError(f"rope: group: expected 'consecutive' or 'alternate', got {group!r}")
    return rotated.reshape(x.shape).astype(x.dtype)
