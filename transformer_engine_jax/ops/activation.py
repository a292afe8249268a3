"""Activations and their gated forms: kernels with an optional FP8 result, and the differentiable op.

z[.., A, N] holds A inputs side by side, as one GEMM against a kernel [H, A, N] makes them. A = 1: y = curve(z[0]);
A = 2, the names that end in "_linear" (geglu, swiglu, ...): y = curve(z[0]) * z[1], where both factors may be clamped.
Kernels compute in f32.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.after import after
from transformer_engine_jax.ops.arrays import arrays
from transformer_engine_jax.ops.quantize import FLOATS, MEASURED, OPTIONAL_BESIDE_Y, partial_sums
from transformer_engine_jax.ops.result import store
from transformer_engine_jax.ops.state import GIVEN
from transformer_engine_jax.order import all_at_once

# --- Curves, formula for formula those of cpp/ops/activation.h -----------------------------------------------------


class Point(NamedTuple):
    value: jax.Array
    slope: jax.Array


def _logistic(x):
    s = 1.0 / (1.0 + jnp.exp(-x))
    return jnp.where(s < jnp.finfo(jnp.float32).tiny, 0.0, s)  # exactly 0 at the end of the tail, as in C++


def _gated_by_logistic(x, c, v, dv) -> Point:
    s = _logistic(v)
    return Point(jnp.maximum(x, jnp.finfo(jnp.float32).min) * s, s + c * (s * (1.0 - s)) * dv)


def _gelu(x) -> Point:
    # x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3) is x * logistic(2u), without the cancellation.
    linear, cubic = np.float32(1.59576912), np.float32(0.0713548163)
    c = jnp.clip(x, -10.06, 9.9)  # flat beyond; keeps products with a vanished slope finite
    return _gated_by_logistic(x, c, c * (linear + cubic * (c * c)), linear + 3.0 * cubic * (c * c))


def _silu(x) -> Point:
    c = jnp.clip(x, -88.7, 87.0)
    return _gated_by_logistic(x, c, c, 1.0)


def _quick_gelu(x) -> Point:
    c = jnp.clip(x, -52.12, 51.0)
    return _gated_by_logistic(x, c, 1.702 * c, 1.702)


def _sigmoid(x) -> Point:
    s = _logistic(jnp.clip(x, -88.7, 87.0))
    return Point(s, s * (1.0 - s))


def _relu(x) -> Point:
    return Point(jnp.where(x <= 0, 0.0, x), jnp.where(x > 0, 1.0, 0.0))


def _squared_relu(x) -> Point:
    positive = _relu(x).value
    return Point(positive * positive, 2.0 * positive)


CURVES = {
    "gelu": _gelu,
    "silu": _silu,
    "relu": _relu,
    "quick_gelu": _quick_gelu,
    "squared_relu": _squared_relu,
    "sigmoid": _sigmoid,
}


class Clamp(NamedTuple):
    """Parameters of "clamped_silu" and "clamped_linear", by default GPT-OSS's; no other activation has any."""

    limit: float = 7.0  # inputs above it count as it, and those of clamped_linear below -limit as that
    alpha: float = 1.702  # of the logistic in clamped_silu: c logistic(alpha c)
    glu_linear_offset: float = 1.0  # added to clamped_linear


def _clamped_silu(x, clamp: Clamp) -> Point:
    c = jnp.where(x > clamp.limit, clamp.limit, jnp.maximum(x, -88.7 / clamp.alpha))
    curve = _gated_by_logistic(c, c, jnp.minimum(clamp.alpha * c, 87.0), clamp.alpha)
    return Point(curve.value, jnp.where(x > clamp.limit, 0.0, curve.slope))


def _clamped_linear(x, clamp: Clamp) -> Point:
    c = jnp.where(x > clamp.limit, clamp.limit, jnp.where(x < -clamp.limit, -clamp.limit, x))
    return Point(c + clamp.glu_linear_offset, jnp.where(c == x, 1.0, 0.0))


CLAMPED_CURVES = {"clamped_silu": _clamped_silu, "clamped_linear": _clamped_linear}
CLAMPED = "_".join(CLAMPED_CURVES)  # the pair, which has a kernel

# Names elsewhere, NVIDIA's of pairs and Hugging Face's, which an error translates.
EXACT_GELU = "functools.partial(jax.nn.gelu, approximate=False)"
ELSEWHERE = {
    "gelu_new": ("gelu",),
    "gelu_pytorch_tanh": ("gelu",),
    "gelu_python": EXACT_GELU,
    "gelu_exact": EXACT_GELU,
    "glu": ("sigmoid", "linear"),
    "reglu": ("relu", "linear"),
    "geglu": ("gelu", "linear"),
    "swiglu": ("silu", "linear"),
    "qgeglu": ("quick_gelu", "linear"),
    "sreglu": ("squared_relu", "linear"),
}

# --- Kernels -----------------------------------------------------------------------------------------------------


class ActivationFwd(NamedTuple):
    y: jax.Array | None  # [.., N] in dtype
    y_t: jax.Array | None  # fp8[N, ..] its transposed copy
    amax: jax.Array | None  # f32[] max |y| before scaling
    report: jax.Array | None  # f32[bins] the report of amax, in its place
    scale_inv: jax.Array | None  # f32[] 1 / the scale


class ActivationBwd(NamedTuple):
    dz: jax.Array | None  # [.., A, N] in dtype
    dz_t: jax.Array | None  # fp8[A, N, ..] its transposed copy
    amax: jax.Array | None  # f32[] max |dz| before scaling
    dbias: jax.Array | None  # f32[A, N] sum of dz over the leading axes, before the cast
    report: jax.Array | None  # f32[bins] the report of amax, in its place
    scale_inv: jax.Array | None  # f32[] 1 / the scale


def _split(op: str, z, bias, activation: str, clamp: Clamp) -> tuple[Point, Point | None]:
    """The curve at z[0], bias included, and what it is multiplied by where the activation is gated."""
    name = activation.removesuffix("_linear")
    inputs = 1 if name == activation else 2
    if name not in CURVES and activation != CLAMPED:
        raise ValueError(
            f"{op}: activation: expected one of {list(CURVES)}, or that and '_linear', or {CLAMPED!r}, "
            f"got {activation!r}"
        )
    if z.ndim < 2 or z.shape[-2] != inputs:
        raise ValueError(f"{op}: z: expected [.., {inputs}, N] for {activation!r}, got {list(z.shape)}")
    wide = z.astype(jnp.float32)
    if bias is not None:
        if bias.shape != z.shape[-2:]:
            raise ValueError(f"{op}: bias: expected {list(z.shape[-2:])}, got {list(bias.shape)}")
        wide = wide + bias.astype(jnp.float32)
    if activation == CLAMPED:
        return _clamped_silu(wide[..., 0, :], clamp), _clamped_linear(wide[..., 1, :], clamp)
    return CURVES[name](wide[..., 0, :]), Point(wide[..., 1, :], jnp.float32(1.0)) if inputs == 2 else None


@kernel(
    "... a n, h*, a n -> ... n, n ..., -, r, -",
    whole="ah",
    reduce=MEASURED,
    optional=OPTIONAL_BESIDE_Y,
)
def activation_fwd(
    z, scale, bias=None, *, activation, limit=7.0, alpha=1.702, glu_linear_offset=1.0, dtype=None, y=True, y_t=False,
    amax=False, report=False, scale_inv=False, scaling=GIVEN,
) -> ActivationFwd:  # fmt: skip
    """y from z[.., A, N]; with a scale y is FP8 (`dtype`), without it z's dtype or `dtype`.

    scale: f32[], or what `scaling` says. A report takes the place of amax. Without y, amax is that of the values
    themselves, in f32. A bias[A, N] (f32, f16 or bf16) is added to z in f32.
    """
    curve, gate = _split("activation_fwd", z, bias, activation, Clamp(limit, alpha, glu_linear_offset))
    values = curve.value if gate is None else curve.value * gate.value
    out = store(
        "activation_fwd", values, scale, dtype=dtype or z.dtype, k_axes=1, y=y, transposed=y_t, amax=amax,
        report=report, scale_inv=scale_inv, scaling=scaling,
    )  # fmt: skip
    return ActivationFwd(*out)


def _scratch(dy, z, *_, dbias, **__) -> int:
    return partial_sums(z, 2) if dbias else 0


@kernel(
    "... n, ... a n, h*, a n -> ... a n, a n ..., -, a n, r, -",
    whole="ah",
    reduce={**MEASURED, "dbias": "sum"},
    aliases={"z": "dz"},
    workspace=_scratch,
)
def activation_bwd(
    dy, z, scale, bias=None, *, activation, limit=7.0, alpha=1.702, glu_linear_offset=1.0, dtype=None, dz=True,
    dz_t=False, amax=False, dbias=False, report=False, scale_inv=False, scaling=GIVEN, in_place=False,
) -> ActivationBwd:  # fmt: skip
    """dz from dy[.., N] and z; with a scale dz is FP8 (`dtype`), without it z's dtype or `dtype`.

    scale: f32[], or what `scaling` says. A report takes the place of amax. Without dz, amax is that of the values
    themselves, in f32. in_place: a dz of z's dtype takes z's buffer. A bias is what `activation_fwd` added to z.
    """
    curve, gate = _split("activation_bwd", z, bias, activation, Clamp(limit, alpha, glu_linear_offset))
    dy = dy.astype(jnp.float32)
    if gate is None:
        values = (dy * curve.slope)[..., None, :]
    else:
        values = jnp.stack([dy * gate.value * curve.slope, dy * curve.value * gate.slope], axis=-2)
    out = store(
        "activation_bwd", values, scale, dtype=dtype or z.dtype, k_axes=2, y=dz, transposed=dz_t, amax=amax,
        report=report, scale_inv=scale_inv, scaling=scaling,
    )  # fmt: skip
    sums = jnp.sum(values, axis=tuple(range(z.ndim - 2))) if dbias else None
    return ActivationBwd(out.y, out.y_t, out.amax, sums, out.report, out.scale_inv)


# --- The differentiable op ---------------------------------------------------------------------------------------


class Fused(NamedTuple):
    """An activation that the kernels compute, as their attributes."""

    activation: str
    limit: float
    alpha: float
    glu_linear_offset: float


Activations = str | Callable | tuple[str | Callable, ...]


def activation(z, activations: Activations, params: Mapping[str, float] | Clamp | None = None, bias=None) -> jax.Array:
    """The product of A activations, each of its own input.

    Args:
      z: [.., A, N] f32, f16 or bf16.
      activations: A names ("gelu", "silu", "relu", "quick_gelu", "squared_relu", "sigmoid", "linear", "clamped_silu",
        "clamped_linear") or functions of an array. ("clamped_silu", "clamped_linear"), and any of the first six alone
        or before "linear", run a fused kernel; all others are plain JAX. "gelu" is the tanh form;
        functools.partial(jax.nn.gelu, approximate=False) is the exact one, in plain JAX.
      params: of the clamped activations: limit, alpha, glu_linear_offset; see Clamp.
      bias: [A, N] of any float dtype, or None: added to z, in the fused kernel without a rounding of the sum; its
        gradient comes out of the kernel that computes z's. Elsewhere the sum is rounded to z's dtype.

    Returns:
      [.., N] in z's dtype. Raises ValueError where z does not fit the activations, or params or bias do not.
    """
    fused, activations = fused_activation(activations, params), as_tuple(activations)
    z, bias = arrays("activation", {"z": z}, bias)
    if z.dtype not in FLOATS:
        raise ValueError(f"activation: z: expected f32, f16 or bf16, got {z.dtype}")
    if z.ndim < 2 or z.shape[-2] != len(activations):
        raise ValueError(f"activation: z: expected [.., {len(activations)}, N] for {activations}, got {list(z.shape)}")
    if bias is not None:
        if bias.shape != z.shape[-2:] or not jnp.issubdtype(bias.dtype, jnp.floating) or bias.dtype.itemsize == 1:
            raise ValueError(
                f"activation: bias: expected f32, f16 or bf16{list(z.shape[-2:])}, got {bias.dtype}{list(bias.shape)}"
            )
        bias = as_added(bias)
    if fused is not None:
        return _activation(fused, z, bias)
    if bias is not None:
        z = _biased(z, bias)
    if 0 in z.shape:  # what functions make of nothing need not depend on it, as jnp.where, and then it has no gradient
        return z[..., 0, :]
    functions = [a if callable(a) else functools.partial(_named, a, _clamp(activations, params)) for a in activations]
    return functools.reduce(operator.mul, [f(z[..., i, :]) for i, f in enumerate(functions)])


def fused_activation(activations: Activations, params: Mapping[str, float] | Clamp | None = None) -> Fused | None:
    """What the kernels take for these activations, None where no kernel computes them.

    Raises:
      ValueError: an unknown name, or params that are unknown, out of range, or of no activation among these.
    """
    activations = as_tuple(activations)
    known = [*CURVES, "linear", *CLAMPED_CURVES]
    for name in activations:
        if not callable(name) and name not in known:
            ours = f"; write {ELSEWHERE[name]} for it" if isinstance(name, str) and name in ELSEWHERE else ""
            raise ValueError(f"activation: activations: expected some of {known}, got {name!r}{ours}")
    clamp = _clamp(activations, params)
    plain = activations[0] in CURVES and activations[1:] in ((), ("linear",))
    if plain or activations == tuple(CLAMPED_CURVES):
        return Fused("_".join(activations), *clamp)
    return None


def _clamp(activations: tuple[str | Callable, ...], params: Mapping[str, float] | Clamp | None) -> Clamp:
    given = params._asdict() if isinstance(params, Clamp) else dict(params or {})
    if given and not any(name in CLAMPED_CURVES for name in activations):
        raise ValueError(
            f"activation: params: expected none for {activations}, only {list(CLAMPED_CURVES)} take any, got {given}"
        )
    if unknown := [name for name in given if name not in Clamp._fields]:
        raise ValueError(f"activation: params: expected some of {list(Clamp._fields)}, got {unknown[0]!r}")
    clamp = Clamp(**{name: float(value) for name, value in given.items()})
    for name, value in clamp._asdict().items():
        if not math.isfinite(value) or (value <= 0 and name != "glu_linear_offset"):
            raise ValueError(f"activation: params: {name}: expected a finite number, limit and alpha > 0, got {value}")
    return clamp


def as_added(bias) -> jax.Array | None:
    """A bias as the kernels take it: f64, where JAX has that, as f32."""
    return bias if bias is None or bias.dtype.itemsize <= 4 else bias.astype(jnp.float32)


def as_tuple(activations: Activations) -> tuple[str | Callable, ...]:
    activations = tuple(activations) if isinstance(activations, tuple | list) else (activations,)
    if not activations:
        raise ValueError("activation: activations: expected at least one, got none")
    return activations


def _named(name: str, clamp: Clamp, x):
    if name == "linear":
        return x
    wide = x.astype(jnp.float32)
    point = CLAMPED_CURVES[name](wide, clamp) if name in CLAMPED_CURVES else CURVES[name](wide)
    return point.value.astype(x.dtype)


def _biased(z, bias):
    """z + bias in plain JAX, rounded once."""
    sharding = jax.typeof(z).sharding
    if sharding.mesh.explicit_axes:
        bias = jax.sharding.reshard(bias, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[-2:])))
    bias = jnp.expand_dims(bias.astype(jnp.float32), range(z.ndim - bias.ndim))
    return (z.astype(jnp.float32) + bias).astype(z.dtype)


def _activation_forward(fused: Fused, z, bias):
    # z's last use is the backward pass, which writes its gradient there.
    y, z = all_at_once(activation_fwd.for_tokens(math.prod(z.shape[:-2]))(z, None, bias, **fused._asdict()).y, z)
    return y, (after(z, y), bias)


def _activation_backward(fused: Fused, residuals, dy):
    z, bias = residuals
    out = activation_bwd(dy, z, None, bias, **fused._asdict(), dbias=bias is not None, in_place=True)
    return out.dz, None if bias is None else out.dbias.astype(bias.dtype)


_activation = differentiable(_activation_forward, _activation_backward)
