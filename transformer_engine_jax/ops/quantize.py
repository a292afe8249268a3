"""Kernels of quantization: cast with scale and amax, with the transposed copy and column sums in one pass."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from transformer_engine_jax.alignment import align
from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.state import GIVEN
from transformer_engine_jax.ops.state import report as report_of
from transformer_engine_jax.partition import pmax
from transformer_engine_jax.quantized import QuantizedTensor
from transformer_engine_jax.quantizers import Quantizer, QuantizerSpec
from transformer_engine_jax.stored import restored, stored

E4M3 = np.dtype(jnp.float8_e4m3fn)
E5M2 = np.dtype(jnp.float8_e5m2)
FLOATS = tuple(np.dtype(d) for d in (jnp.float32, jnp.float16, jnp.bfloat16))  # what kernels read and write besides


def is_fp8(dtype) -> bool:
    return np.dtype(dtype) in (E4M3, E5M2)


def fp8_max(dtype) -> float:
    """The largest finite value of an FP8 format: 448 for E4M3, 57344 for E5M2."""
    return float(jnp.finfo(dtype).max)


def flush(x: jax.Array) -> jax.Array:
    """x as f32 with values below the smallest normal as signed zero: what the cast sees on every platform."""
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    tiny = (bits & jnp.uint32(0x7FFFFFFF)) < jnp.uint32(0x00800000)
    return jax.lax.bitcast_convert_type(jnp.where(tiny, bits & jnp.uint32(0x80000000), bits), jnp.float32)


def cast(x: jax.Array, dtype) -> jax.Array:
    """f32 -> FP8: one rounding to nearest even, saturating (infinities too), NaN -> 0x7f.

    Defined on bits because XLA's own conversion to E5M2 rounds twice (through f16) and overflows to infinity.
    """
    if np.dtype(dtype) not in (E4M3, E5M2):
        raise ValueError(f"cast: dtype: expected float8_e4m3fn or float8_e5m2, got {np.dtype(dtype)}")
    mantissa, bias = {E4M3: (3, 7), E5M2: (2, 15)}[np.dtype(dtype)]
    u32 = jnp.uint32
    bits = jax.lax.bitcast_convert_type(x, u32)
    magnitude = bits & u32(0x7FFFFFFF)
    a = jnp.minimum(magnitude, u32(np.float32(fp8_max(dtype)).view(np.uint32)))
    shift = 23 - mantissa
    odd = (a >> shift) & u32(1)
    normal = ((a + u32((1 << (shift - 1)) - 1) + odd) >> shift) - u32((127 - bias) << mantissa)
    # Below the smallest normal, codes count steps of 2^(1 - bias - mantissa); adding a number whose ulp is
    # that step rounds to one.
    magic = u32((127 - bias + 1 - mantissa + 23) << 23)
    as_float = jax.lax.bitcast_convert_type
    stepped = as_float(as_float(a, jnp.float32) + as_float(magic, jnp.float32), u32) - magic
    code = jnp.where(a < u32((127 - bias + 1) << 23), stepped, normal) | ((bits >> 24) & u32(0x80))
    code = jnp.where(magnitude > u32(0x7F800000), u32(0x7F), code).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(code, dtype)


def scaled_cast(x: jax.Array, scale: jax.Array, dtype) -> jax.Array:
    """FP8 of x * scale f32[]."""
    return cast(flush(x) * flush(scale), dtype)


def max_abs(x: jax.Array) -> jax.Array:
    """max |x| as f32[], NaN where x holds one, 0 for an empty x."""
    bits = jax.lax.bitcast_convert_type(flush(x), jnp.uint32) & jnp.uint32(0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(jnp.max(bits, initial=jnp.uint32(0)), jnp.float32)


def transpose(x: jax.Array, k_axes: int) -> jax.Array:
    """Moves the last k_axes axes to the front."""
    split = x.ndim - k_axes
    return jnp.transpose(x, (*range(split, x.ndim), *range(split)))


class Quantized(NamedTuple):
    q: jax.Array | None  # fp8[m.., k..] cast of x * scale
    q_t: jax.Array | None  # fp8[k.., m..] its transposed copy
    amax: jax.Array | None  # f32[] max |x| before scaling
    colsum: jax.Array | None  # f32[k..] sum of x over the leading axes (a bias gradient)
    report: jax.Array | None  # f32[bins] the report of amax, in its place
    scale_inv: jax.Array | None  # f32[] 1 / the scale


def partial_sums(x, k_axes: int) -> int:
    """Scratch bytes of a CUDA handler that sums the columns of x: a row of partial sums for every 128 rows."""
    rows, columns = math.prod(x.shape[: x.ndim - k_axes]), math.prod(x.shape[x.ndim - k_axes :])
    return 4 * columns * -(-rows // 128)


def _scratch(x, scale, *, colsum, k_axes, **_) -> int:
    return partial_sums(x, k_axes) if colsum else 0


# What becomes of the shards' results of a kernel that casts. Reports do not say which shard saw a NaN, amaxes do.
MEASURED = {"amax": "max", "report": ("amax", report_of), "scale_inv": "same"}
# The optional results of kernels that cast what they are given, and of those that cast a y of their own.
OPTIONAL = ("q", "q_t", "amax", "colsum", "report")
OPTIONAL_BESIDE_Y = ("y_t", "amax", "report")


@kernel(
    "m* k*, h* -> m* k*, k* m*, -, k*, r, -",
    whole="h",
    reduce={**MEASURED, "colsum": "sum"},
    workspace=_scratch,
    optional=OPTIONAL,
)
def quantize(
    x, scale, *, dtype, k_axes=1, q=True, q_t=False, amax=True, colsum=False, report=False, scale_inv=False,
    scaling=GIVEN,
) -> Quantized:  # fmt: skip
    """Casts x[m.., k..] (f32, f16, bf16) to FP8; the last `k_axes` axes are the columns.

    scale: f32[], or what `scaling` says. A report takes the place of amax.
    """
    if amax and report:
        raise ValueError("quantize: report: expected none beside amax")
    scales = scaling.scales(scale, dtype)
    cast_x = scaled_cast(x, scales.scale, dtype) if q or q_t else None
    return Quantized(
        cast_x if q else None,
        transpose(cast_x, k_axes) if q_t else None,
        max_abs(x) if amax else None,
        jnp.sum(x.astype(jnp.float32), axis=tuple(range(x.ndim - k_axes))) if colsum else None,
        report_of(max_abs(x)) if report else None,
        scales.scale_inv if scale_inv else None,
    )


def _stack_scratch(x0, x1, x2, scale, *, colsum, **_) -> int:
    return (2 if x2 is None else 3) * partial_sums(x0, 1) if colsum else 0


@kernel(
    "m* n, m* n, m* n, h* -> m* p n, p n m*, -, p n, r, -",
    whole="h",
    reduce={**MEASURED, "colsum": "sum"},
    workspace=_stack_scratch,
    optional=OPTIONAL,
    units={"n": 8},
)
def quantize_stack(
    x0, x1, x2, scale, *, dtype, q=True, q_t=False, amax=True, colsum=False, report=False, scale_inv=False,
    scaling=GIVEN,
) -> Quantized:  # fmt: skip
    """`quantize` of the stack [m.., P, n] of x0[m.., n], x1 and x2 (None: P is 2), which never is in memory.

    n is a multiple of 8.
    """
    x = jnp.stack([x for x in (x0, x1, x2) if x is not None], axis=-2)
    return quantize.reference(
        x, scale, dtype=dtype, k_axes=2, q=q, q_t=q_t, amax=amax, colsum=colsum, report=report, scale_inv=scale_inv,
        scaling=scaling,
    )  # fmt: skip


class Measured(NamedTuple):
    amax: jax.Array | None  # f32[]
    report: jax.Array | None  # f32[bins]


@kernel("..., ..., ... -> -, r", reduce={"amax": "max", "report": ("amax", report_of)})
def measure(x0, x1=None, x2=None, *, amax=True, report=False) -> Measured:
    """max |x| of up to three arrays of one shape and dtype (f32, f16, bf16), or its report; NaN where one holds one."""
    if amax and report:
        raise ValueError("measure: report: expected none beside amax")
    most = functools.reduce(jnp.maximum, [max_abs(x) for x in (x0, x1, x2) if x is not None])
    return Measured(most if amax else None, report_of(most) if report else None)


def amax(*parts: jax.Array) -> jax.Array:
    """max |x| of up to three arrays of one shape and dtype as f32[]."""
    return measure(*parts).amax


@kernel("..., - -> ...")
def dequantize(q, scale_inv, *, dtype) -> Any:
    """q (FP8) * scale_inv f32[], as `dtype` (f32, f16, bf16)."""
    return (q.astype(jnp.float32) * scale_inv).astype(dtype)


# --- What ops do with a Quantizer ------------------------------------------------------------------------------------


class Cast(NamedTuple):
    """One tensor quantized for the GEMMs that read it."""

    q: QuantizedTensor | None  # [m.., k..]
    q_t: QuantizedTensor | None  # [k.., m..]
    amax: jax.Array | None  # where the recipe has a history: its report f32[bins]; itself, f32[], in a manual shard_map
    colsum: jax.Array | None = None  # f32[k..]


def reduce_amax(amax: jax.Array, spec: QuantizerSpec, like: jax.Array | None = None) -> jax.Array:
    """amax over the mesh axes of a manual shard_map that the user named, and those `like` does not vary over."""
    varying = lambda x: jax.typeof(x).manual_axis_type.varying
    axes = frozenset() if like is None else varying(amax) - varying(like)
    try:
        for axis in spec.amax_axes:
            checked = axis in varying(jax.lax.axis_index(axis))  # NameError where there is none
            if axis in varying(amax) or not checked:  # elsewhere it is the same along this axis
                axes |= {axis}
    except NameError as error:
        raise ValueError(
            f"autocast: amax_axes={spec.amax_axes} must name mesh axes of the shard_map around the call; {error}"
        ) from error
    return pmax(amax, tuple(sorted(axes))) if axes else amax


class Casting(NamedTuple):
    """How a kernel that casts is called for a Quantizer: its operand `scale`, and attributes."""

    scale: jax.Array  # as `scaling` has it
    options: dict[str, Any]

    @classmethod
    def of(cls, quantizer: Quantizer, amax: Callable[[], jax.Array]) -> Casting:
        """`amax` is called where the recipe needs the tensor's."""
        spec = quantizer.spec
        scale = quantizer.scale if spec.recipe.stateful else reduce_amax(amax(), spec)
        to_reduce = spec.amax_axes or jax.sharding.get_abstract_mesh().manual_axes
        wanted = spec.recipe.stateful and ("amax" if to_reduce else "report")
        measured = {name: name == wanted for name in ("amax", "report")}
        return cls(scale, {"dtype": spec.dtype, "scaling": quantizer.scaling, "scale_inv": True, **measured})

    @staticmethod
    def result(q, q_t, out, colsum=None) -> Cast:
        """A kernel's results, of which q and q_t are the cast, as QuantizedTensors.

        They are bytes on the way, which XLA drops, so that a checkpoint policy has bytes to save.
        """
        casts = restored(stored((q, q_t)))
        tensors = [None if data is None else QuantizedTensor(data, out.scale_inv) for data in casts]
        return Cast(*tensors, out.amax if out.report is None else out.report, colsum)


def quantize_for(quantizer: Quantizer, x, *, k_axes=1, q=True, q_t=False, colsum=False) -> Cast:
    """Quantizes x[m.., k..] as its Quantizer says."""
    casting = Casting.of(quantizer, lambda: amax(x))
    out = quantize(x, casting.scale, k_axes=k_axes, q=q, q_t=q_t, colsum=colsum, **casting.options)
    return casting.result(out.q, out.q_t, out, out.colsum)


def named(quantizer: Quantizer, saved: Any) -> Any:
    """What a backward needs of a quantized tensor, under the name that the Quantizer has for checkpoint policies."""
    name = quantizer.spec.checkpoint_name
    return saved if name is None else restored(checkpoint_name(stored(saved), name))


def quantize_stack_for(quantizer: Quantizer, parts: Sequence[jax.Array], *, colsum=False) -> Cast:
    """Quantizes the stack [m.., P, n] of 2 or 3 parts [m.., n] both ways, as its Quantizer says."""
    if parts[0].shape[-1] % 8:
        return quantize_for(quantizer, jnp.stack(parts, axis=-2), k_axes=2, q_t=True, colsum=colsum)
    casting = Casting.of(quantizer, lambda: amax(*parts))
    x0, x1, x2 = (*parts, None)[:3]
    out = quantize_stack(x0, x1, x2, casting.scale, q_t=True, colsum=colsum, **casting.options)
    return casting.result(out.q, out.q_t, out, out.colsum)


def observe(quantizers: Sequence[Quantizer], amaxes: Sequence[jax.Array | None]) -> list[Quantizer]:
    """The cotangents of Quantizers: reports of what was observed, as Cast.amax has it."""

    def cotangent(quantizer: Quantizer, amax: jax.Array | None) -> Quantizer:
        if quantizer.scale is None:
            return quantizer
        if amax.ndim == 0:
            amax = report_of(reduce_amax(amax, quantizer.spec, like=quantizer.scale))
            amax, _ = align(amax, quantizer.scale)  # the maximum over mesh axes varies over them as its state does
        return dataclasses.replace(quantizer, scale=jnp.zeros_like(quantizer.scale), observed=amax)

    return [cotangent(quantizer, amax) for quantizer, amax in zip(quantizers, amaxes)]


def _watch_forward(_, x, quantizer):
    return x, (quantizer, amax(x))


def _watch_backward(_, residuals, cotangent):
    quantizer, amax_of_x = residuals
    return cotangent, *observe([quantizer], [amax_of_x])


def _watch_gradient_forward(_, y, quantizer):
    return y, quantizer


def _watch_gradient_backward(_, quantizer, cotangent):
    return cotangent, *observe([quantizer], [amax(cotangent)])


_watch = differentiable(_watch_forward, _watch_backward)
_watch_gradient = differentiable(_watch_gradient_forward, _watch_gradient_backward)


def watch(x: jax.Array, quantizer: Quantizer) -> jax.Array:
    """x, with its amax reported to the Quantizer: calibration."""
    return x if quantizer.scale is None else _watch(None, x, quantizer)


def watch_gradient(y: jax.Array, quantizer: Quantizer) -> jax.Array:
    """y, with the amax of its cotangent reported to the Quantizer: calibration."""
    return y if quantizer.scale is None else _watch_gradient(None, y, quantizer)
