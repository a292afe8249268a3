"""quantize and dequantize, as users call them: one array to FP8 and back. Ops call the kernels of ops/quantize.py."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.ops import quantize as kernels
from transformer_engine_jax.ops.arrays import arrays
from transformer_engine_jax.ops.quantize import E4M3, E5M2, FLOATS


class Quantized(NamedTuple):
    """What `quantize` returns."""

    q: jax.Array  # fp8[m.., k..], the cast of x * scale
    q_t: jax.Array | None  # fp8[k.., m..], its transposed copy, where asked for
    amax: jax.Array  # f32[], max |x|; NaN where x holds one


def _check(op: str, name: str, got, allowed: tuple) -> None:
    with contextlib.suppress(TypeError):  # what NumPy does not know, such as "fp8"
        got = np.dtype(got)
    if got not in allowed:
        raise ValueError(f"{op}: {name}: expected one of {', '.join(map(str, map(np.dtype, allowed)))}, got {got}")


def _f32(number):
    """A number of Python's as f32; else what is given."""
    return jnp.float32(number) if isinstance(number, int | float) else number


def _check_scalar(op: str, name: str, x) -> None:
    if x.shape != () or x.dtype != jnp.float32:
        raise ValueError(f"{op}: {name}: expected f32[], got {x.dtype}{list(x.shape)}")


def quantize(x, scale, *, dtype, k_axes: int = 1, q_t: bool = False) -> Quantized:
    """x * scale, rounded to the nearest FP8 value (ties to even) and saturated; NaN stays NaN.

    It has no derivative: `dense` and `dot_general` are what trains.

    Args:
      x: [m.., k..] f32, f16 or bf16.
      scale: f32[].
      dtype: float8_e4m3fn or float8_e5m2.
      k_axes: how many axes are k...
      q_t: also return the transposed copy [k.., m..], which a kernel writes in the same pass.

    Raises:
      ValueError: for other dtypes, a scale that is not f32[], or more k_axes than x has.
    """
    x, scale = arrays("quantize", {"x": x, "scale": _f32(scale)})
    _check("quantize", "x", x.dtype, FLOATS)
    _check("quantize", "dtype", dtype, (E4M3, E5M2))
    _check_scalar("quantize", "scale", scale)
    if not 0 <= k_axes <= x.ndim:
        raise ValueError(f"quantize: k_axes: expected 0 to {x.ndim}, the axes of x{list(x.shape)}, got {k_axes}")
    out = kernels.quantize(x, scale, dtype=dtype, k_axes=k_axes, q_t=q_t)
    return Quantized(out.q, out.q_t, out.amax)


def dequantize(q, scale_inv, *, dtype) -> jax.Array:
    """q * scale_inv, computed in f32.

    Args:
      q: float8_e4m3fn or float8_e5m2, of any shape.
      scale_inv: f32[], 1 / the scale it was quantized with.
      dtype: of the result: f32, f16 or bf16.

    Raises:
      ValueError: for other dtypes, or a scale_inv that is not f32[].

    It has no derivative.
    """
    q, scale_inv = arrays("dequantize", {"q": q, "scale_inv": _f32(scale_inv)})
    _check("dequantize", "q", q.dtype, (E4M3, E5M2))
    _check("dequantize", "dtype", dtype, FLOATS)
    _check_scalar("dequantize", "scale_inv", scale_inv)
    return kernels.dequantize(q, scale_inv, dtype=dtype)
