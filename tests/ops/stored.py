"""The error metrics of ops that may quantize their result, defined once."""

import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.ops.quantize import cast, flush

E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
EPS = 2.0**-23


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def relative_l2(got, expected) -> float:
    """|got - expected| / |expected|: 1 for a gradient of zeros, 2 for one of the wrong sign."""
    got, expected = wide(got), wide(expected)
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30))


def unit_roundoff(dtype) -> float:
    return float(jnp.finfo(dtype).eps) / 2


def assert_rounded(got, exact, magnitude, ulps: float = 4.0):
    """`got` is `exact` (f64) computed in f32, to some ulps of `magnitude`, then rounded once to its dtype."""
    error = np.abs(wide(got) - exact)
    once = 0.0 if got.dtype == jnp.float32 else unit_roundoff(got.dtype) * 1.01
    tiniest = float(jnp.finfo(got.dtype).smallest_subnormal)
    bound = ulps * EPS * magnitude + once * np.abs(exact) + tiniest
    assert np.all(error <= bound), f"{np.max(error / bound):.3g} times the bound of {ulps} ulps"


def assert_fp8(got, exact, scale):
    """Codes of cast(exact * scale). Few may be one apart: where the f32 value falls on the other side of a boundary.

    A value 4 ulps (2^-21) off crosses one of FP8's boundaries, 2^-3 apart, in one of 2^18 cases; 1e-3 is generous.
    """
    expected = cast(flush(jnp.asarray(exact, jnp.float32)) * np.float32(scale), got.dtype)
    apart = np.abs(_ordered(got) - _ordered(expected))
    assert apart.max(initial=0) <= 1
    assert np.sum(apart != 0) <= np.ceil(1e-3 * apart.size)


def _ordered(fp8) -> np.ndarray:
    codes = np.asarray(fp8).view(np.uint8).astype(np.int32)
    return np.where(codes & 0x80, -(codes & 0x7F), codes)


def assert_amax(amax, exact, ulps: float = 4.0):
    expected = np.abs(exact).max(initial=0.0)
    assert abs(float(amax) - expected) <= ulps * EPS * expected


def assert_transposed(y_t, y, k_axes: int):
    split = y.ndim - k_axes
    expected = np.transpose(np.asarray(y).view(np.uint8), (*range(split, y.ndim), *range(split)))
    np.testing.assert_array_equal(np.asarray(y_t).view(np.uint8), expected)
