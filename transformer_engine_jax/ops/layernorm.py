"""LayerNorm and RMSNorm over the last axis: kernels with an optional FP8 result, and differentiable ops.

Every kernel computes in f32. g is gamma, or 1 + gamma where gamma is stored zero-centred.
"""

from __future__ import annotations

import math
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.arrays import arrays
from transformer_engine_jax.ops.quantize import FLOATS, MEASURED, OPTIONAL_BESIDE_Y
from transformer_engine_jax.ops.result import store
from transformer_engine_jax.ops.state import GIVEN

# --- Kernels -----------------------------------------------------------------------------------------------------


class LayerNormFwd(NamedTuple):
    y: jax.Array | None  # [.., K] in dtype
    y_t: jax.Array | None  # fp8[K, ..] its transposed copy
    mean: jax.Array | None  # f32[..]
    rstd: jax.Array | None  # f32[..] 1 / sqrt(variance + epsilon)
    amax: jax.Array | None  # f32[] max |y| before scaling
    report: jax.Array | None  # f32[bins] the report of amax, in its place
    scale_inv: jax.Array | None  # f32[] 1 / the scale


class RmsNormFwd(NamedTuple):
    y: jax.Array | None  # [.., K] in dtype
    y_t: jax.Array | None  # fp8[K, ..] its transposed copy
    rstd: jax.Array | None  # f32[..] 1 / sqrt(mean square + epsilon)
    amax: jax.Array | None  # f32[] max |y| before scaling
    report: jax.Array | None  # f32[bins] the report of amax, in its place
    scale_inv: jax.Array | None  # f32[] 1 / the scale


class LayerNormBwd(NamedTuple):
    dx: jax.Array  # [.., K] in x's dtype
    dgamma: jax.Array  # f32[K]
    dbeta: jax.Array  # f32[K]


class RmsNormBwd(NamedTuple):
    dx: jax.Array  # [.., K] in x's dtype
    dgamma: jax.Array  # f32[K]


def _g(gamma, zero_centered: bool):
    return gamma.astype(jnp.float32) + (1.0 if zero_centered else 0.0)


def _add(x, residual):
    return x if residual is None else x + residual.astype(jnp.float32)


def _sum_rows(x):
    return jnp.sum(x, axis=tuple(range(x.ndim - 1)))


@kernel(
    "... k, k, k, h*, ..., ... -> ... k, k ..., ..., ..., -, r, -",
    whole="kh",
    reduce=MEASURED,
    optional=OPTIONAL_BESIDE_Y,
)
def layernorm_fwd(
    x, gamma, beta, scale, known_mean=None, known_rstd=None, *, epsilon, zero_centered_gamma=False, dtype=None, y=True,
    y_t=False, amax=False, report=False, scale_inv=False, scaling=GIVEN,
) -> LayerNormFwd:  # fmt: skip
    """y = (x - mean) * rstd * g + beta; with a scale y is FP8 (`dtype`), without it x's dtype or `dtype`.

    scale: f32[], or what `scaling` says. A report takes the place of amax. Without y, amax is that of the values
    themselves, in f32. known_mean, known_rstd f32[..]: what such a call gave, which a second one then need not compute;
    mean and rstd are None.
    """
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True) if known_mean is None else known_mean[..., None]
    centred = wide - mean
    if known_rstd is None:
        rstd = 1.0 / jnp.sqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + epsilon)
    else:
        rstd = known_rstd[..., None]
    values = centred * rstd * _g(gamma, zero_centered_gamma) + beta.astype(jnp.float32)
    out = store(
        "layernorm_fwd", values, scale, dtype=dtype or x.dtype, k_axes=1, y=y, transposed=y_t, amax=amax,
        report=report, scale_inv=scale_inv, scaling=scaling,
    )  # fmt: skip
    computed = (mean[..., 0], rstd[..., 0]) if known_rstd is None else (None, None)
    return LayerNormFwd(out.y, out.y_t, *computed, out.amax, out.report, out.scale_inv)


@kernel("... k, k, h*, ... -> ... k, k ..., ..., -, r, -", whole="kh", reduce=MEASURED, optional=OPTIONAL_BESIDE_Y)
def rmsnorm_fwd(
    x, gamma, scale, known_rstd=None, *, epsilon, zero_centered_gamma=False, dtype=None, y=True, y_t=False, amax=False,
    report=False, scale_inv=False, scaling=GIVEN,
) -> RmsNormFwd:  # fmt: skip
    """y = x * rstd * g; as `layernorm_fwd`."""
    wide = x.astype(jnp.float32)
    if known_rstd is None:
        rstd = 1.0 / jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    else:
        rstd = known_rstd[..., None]
    values = wide * rstd * _g(gamma, zero_centered_gamma)
    out = store(
        "rmsnorm_fwd", values, scale, dtype=dtype or x.dtype, k_axes=1, y=y, transposed=y_t, amax=amax, report=report,
        scale_inv=scale_inv, scaling=scaling,
    )  # fmt: skip
    rstd = rstd[..., 0] if known_rstd is None else None
    return RmsNormFwd(out.y, out.y_t, rstd, out.amax, out.report, out.scale_inv)


def _scratch(dy, x, *_, **__) -> int:
    """Scratch bytes of the CUDA handlers: rows of partial sums of dgamma and dbeta, one for each block."""
    rows = math.prod(x.shape[:-1])
    return 8 * x.shape[-1] * (min(rows, 256) if isinstance(rows, int) else 256)


@kernel(
    "... k, ... k, k, ..., ..., ... k -> ... k, k, k",
    whole="k",
    reduce={"dgamma": "sum", "dbeta": "sum"},
    workspace=_scratch,
)
def layernorm_bwd(dy, x, gamma, mean, rstd, residual, *, zero_centered_gamma=False) -> LayerNormBwd:
    """Gradients of layernorm_fwd's y from the cotangent dy and what the forward saved.

    residual[.., K], in x's dtype, is the gradient that reaches x past the norm: it is added to dx before the rounding.
    """
    rstd = rstd[..., None]
    xhat = (x.astype(jnp.float32) - mean[..., None]) * rstd
    dy = dy.astype(jnp.float32)
    wdy = dy * _g(gamma, zero_centered_gamma)
    along_one = jnp.mean(wdy, axis=-1, keepdims=True)
    along_xhat = jnp.mean(wdy * xhat, axis=-1, keepdims=True)
    dx = _add((wdy - along_one - xhat * along_xhat) * rstd, residual)
    return LayerNormBwd(dx.astype(x.dtype), _sum_rows(dy * xhat), _sum_rows(dy))


@kernel("... k, ... k, k, ..., ... k -> ... k, k", whole="k", reduce={"dgamma": "sum"}, workspace=_scratch)
def rmsnorm_bwd(dy, x, gamma, rstd, residual, *, zero_centered_gamma=False) -> RmsNormBwd:
    """Gradients of rmsnorm_fwd's y; arguments as `layernorm_bwd`'s."""
    rstd = rstd[..., None]
    xhat = x.astype(jnp.float32) * rstd
    dy = dy.astype(jnp.float32)
    wdy = dy * _g(gamma, zero_centered_gamma)
    dx = _add((wdy - xhat * jnp.mean(wdy * xhat, axis=-1, keepdims=True)) * rstd, residual)
    return RmsNormBwd(dx.astype(x.dtype), _sum_rows(dy * xhat))


# --- Differentiable ops ------------------------------------------------------------------------------------------


class Norm(NamedTuple):
    """What a norm needs to know at trace time."""

    epsilon: float = 1e-6
    zero_centered_gamma: bool = False


def check_epsilon(name: str, epsilon) -> float:
    if not (isinstance(epsilon, numbers.Real | jax.Array) and epsilon >= 0):
        raise ValueError(f"{name}: expected 0 or more, got {epsilon!r}")
    return float(epsilon)


def norm(static: Norm, x, gamma, beta) -> jax.Array:
    """LayerNorm, or RMSNorm where beta is None, of x[.., K] in x's precision; arguments else as `layernorm`'s."""
    return norm_and_input(static, x, gamma, beta, return_input=False)[0]


def norm_and_input(static: Norm | None, x, gamma, beta, return_input: bool) -> tuple[jax.Array, jax.Array | None]:
    """(`norm` of x, or x where there are no options; x where return_input asks for it).

    What is added to the x that is returned, a residual connection, has its gradient added to the norm's in one pass.
    """
    if static is None:
        return x, x if return_input else None
    static, *arrays = checked_norm("rmsnorm" if beta is None else "layernorm", static, x, gamma, beta)
    return _norm(_Static(static, return_input), *arrays)


def layernorm(x, gamma, beta, *, epsilon: float = 1e-6, zero_centered_gamma: bool = False) -> jax.Array:
    """Layer normalisation over the last axis (Ba et al., 2016), in f32 arithmetic.

    Args:
      x: [.., K] f32, f16 or bf16.
      gamma: [K] scale, any of these dtypes; stored as its difference from 1 where `zero_centered_gamma`.
      beta: [K] offset, any of these dtypes.
      epsilon: added to the variance.

    Returns:
      [.., K] in x's dtype. Raises ValueError where shapes or dtypes do not fit.
    """
    if beta is None:
        raise ValueError("layernorm: beta: expected [K], got None; rmsnorm has none")
    return norm(Norm(epsilon, zero_centered_gamma), x, gamma, beta)


def rmsnorm(x, gamma, *, epsilon: float = 1e-6, zero_centered_gamma: bool = False) -> jax.Array:
    """Root mean square normalisation over the last axis (Zhang and Sennrich, 2019); arguments as `layernorm`'s."""
    return norm(Norm(epsilon, zero_centered_gamma), x, gamma, None)


def check_options(op: str, options: Norm) -> None:
    """TypeError where a norm's options are of another type."""
    if not isinstance(options, Norm):
        raise TypeError(
            f"{op}: norm_options: expected a te.Norm (an RMSNorm's too, which has no beta), got {options!r}"
        )


def checked_norm(op: str, static: Norm, x, gamma, beta) -> tuple[Norm, jax.Array, jax.Array, jax.Array | None]:
    """All of a norm (an RMSNorm where beta is None) as the kernels take it; ValueError where it does not fit."""
    x, gamma, beta = arrays(op, {"x": x, "gamma": gamma}, beta)
    parameters = {"gamma": gamma} if beta is None else {"gamma": gamma, "beta": beta}
    for name, array in {"x": x, **parameters}.items():
        if array.dtype not in FLOATS:
            raise ValueError(f"{op}: {name}: expected f32, f16 or bf16, got {array.dtype}; convert it first")
    if x.ndim == 0:
        raise ValueError(f"{op}: x: expected at least one axis, got a scalar")
    for name, array in parameters.items():
        if array.shape != x.shape[-1:]:
            raise ValueError(f"{op}: {name}: expected [{x.shape[-1]}], x's last axis, got {list(array.shape)}")
    return Norm(check_epsilon(f"{op}: epsilon", static.epsilon), bool(static.zero_centered_gamma)), x, gamma, beta


class NormSaved(NamedTuple):
    """What the backward of a norm needs of its forward; beta and mean are None for RMSNorm."""

    x: jax.Array  # [.., K]
    gamma: jax.Array  # [K]
    beta: jax.Array | None  # [K]
    mean: jax.Array | None  # f32[..]
    rstd: jax.Array  # f32[..]


def norm_kernel(
    static: Norm, x, gamma, beta, scale, mean=None, rstd=None, *, tokens=None, **wanted
) -> LayerNormFwd | RmsNormFwd:
    """layernorm_fwd, or rmsnorm_fwd where beta is None; tokens: as of Kernel.for_tokens."""
    if beta is None:
        return rmsnorm_fwd.for_tokens(tokens)(x, gamma, scale, rstd, **static._asdict(), **wanted)
    return layernorm_fwd.for_tokens(tokens)(x, gamma, beta, scale, mean, rstd, **static._asdict(), **wanted)


def statistics(out: LayerNormFwd | RmsNormFwd) -> tuple[jax.Array | None, jax.Array | None]:
    """(mean, or None for RMSNorm; rstd)."""
    return getattr(out, "mean", None), out.rstd


def norm_backward(static: Norm | None, saved: NormSaved | None, dy, residual=None):
    """Gradients of x, gamma and beta (None for RMSNorm) in their dtypes; residual: what reaches x past the norm.

    Where there is no norm, static and saved are None, and dy is that of x.
    """
    if saved is None:
        return dy if residual is None else dy + residual, None, None
    x, gamma, beta, mean, rstd = saved
    if beta is None:
        out = rmsnorm_bwd(dy, x, gamma, rstd, residual, zero_centered_gamma=static.zero_centered_gamma)
        return out.dx, out.dgamma.astype(gamma.dtype), None
    out = layernorm_bwd(dy, x, gamma, mean, rstd, residual, zero_centered_gamma=static.zero_centered_gamma)
    return out.dx, out.dgamma.astype(gamma.dtype), out.dbeta.astype(beta.dtype)


class _Static(NamedTuple):
    norm: Norm
    return_input: bool


def _forward(static: _Static, x, gamma, beta):
    out = norm_kernel(static.norm, x, gamma, beta, None, tokens=math.prod(x.shape[:-1]))
    return (out.y, x if static.return_input else None), NormSaved(x, gamma, beta, *statistics(out))


def _backward(static: _Static, saved: NormSaved, cotangents):
    return norm_backward(static.norm, saved, *cotangents)


_norm = differentiable(_forward, _backward)
