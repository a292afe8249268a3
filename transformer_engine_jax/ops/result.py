"""What every op that may quantize its result does as it stores it; cpp/core/result.h and rows.cc in JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.ops.quantize import is_fp8, max_abs, scaled_cast, transpose
from transformer_engine_jax.ops.state import GIVEN, Scaling
from transformer_engine_jax.ops.state import report as report_of


class Stored(NamedTuple):
    y: jax.Array | None  # [m.., k..] in dtype
    y_t: jax.Array | None  # fp8[k.., m..] its transposed copy
    amax: jax.Array | None  # f32[] max |value| before scaling, or max |y| where there is a y that is not FP8
    report: jax.Array | None  # f32[bins] its report
    scale_inv: jax.Array | None  # f32[]


def store(
    op: str,
    values,
    scale,
    *,
    dtype,
    k_axes: int,
    y: bool = True,
    transposed: bool,
    amax: bool,
    report: bool = False,
    scale_inv: bool = False,
    scaling: Scaling = GIVEN,
) -> Stored:
    """Stores f32 values[m.., k..] as `dtype`: FP8 where there is a scale, as `scaling` has it.

    y may be left out, beside a transposed copy or to measure alone.
    """
    if amax and report:
        raise ValueError(f"{op}: report: expected none beside amax")
    if scale_inv and scale is None:
        raise ValueError(f"{op}: scale: expected one, whose reciprocal scale_inv is, got None")
    if is_fp8(dtype) != (scale is not None):
        raise ValueError(f"{op}: dtype: expected FP8 with a scale and f32, f16 or bf16 without, got {np.dtype(dtype)}")
    if transposed and scale is None:
        raise ValueError(f"{op}: scale: expected f32[] for a transposed copy, which only FP8 has, got None")
    if not y and not transposed:
        if scale is not None:
            raise ValueError(f"{op}: scale: expected None where only amax is asked for, got {scale}")
        return Stored(None, None, *_measured(values, amax, report), None)
    if scale is None:
        # Rounded in so many words: on GPUs XLA may drop a conversion to bf16 and back.
        info = jnp.finfo(dtype)
        measured = jax.lax.reduce_precision(values, exponent_bits=info.nexp, mantissa_bits=info.nmant)
        stored = measured.astype(dtype)
    else:
        scales = scaling.scales(scale, dtype)
        stored, measured = scaled_cast(values, scales.scale, dtype), values
    measured = _measured(measured, amax, report)
    y_t = transpose(stored, k_axes) if transposed else None
    return Stored(stored if y else None, y_t, *measured, scales.scale_inv if scale_inv else None)


def _measured(values, amax: bool, report: bool) -> tuple[jax.Array | None, jax.Array | None]:
    return max_abs(values) if amax else None, report_of(max_abs(values)) if report else None
