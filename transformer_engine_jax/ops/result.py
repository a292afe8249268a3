"""What every op that may quantize its result does as it stores it; cpp/core/result.h and rows.cc in JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.ops.quantize import is_fp8, max_abs, scaled_cast, transpose


class Stored(NamedTuple):
    y: jax.Array | None  # [m.., k..] in dtype
    y_t: jax.Array | None  # fp8[k.., m..] its transposed copy
    amax: jax.Array | None  # f32[] max |value| before scaling, or max |y| where there is a y that is not FP8


def store(op: str, values, scale, *, dtype, k_axes: int, y: bool = True, transposed: bool, amax: bool) -> Stored:
    """Stores f32 values[m.., k..] as `dtype`: scaled FP8 where a scale f32[] is given. Without y, measures only."""
    if is_fp8(dtype) != (scale is not None):
        raise ValueError(f"{op}: dtype: expected FP8 with a scale and f32, f16 or bf16 without, got {np.dtype(dtype)}")
    if transposed and scale is None:
        raise ValueError(f"{op}: scale: expected f32[] for a transposed copy, which only FP8 has, got None")
    if not y:
        if scale is not None:
            raise ValueError(f"{op}: scale: expected None where only amax is asked for, got {scale}")
        return Stored(None, None, max_abs(values) if amax else None)
    if scale is None:
        # Rounded in so many words: on GPUs XLA may drop a conversion to bf16 and back.
        info = jnp.finfo(dtype)
        measured = jax.lax.reduce_precision(values, exponent_bits=info.nexp, mantissa_bits=info.nmant)
        y = measured.astype(dtype)
    else:
        y, measured = scaled_cast(values, scale, dtype), values
    return Stored(y, transpose(y, k_axes) if transposed else None, max_abs(measured) if amax else None)
