"""What the tests of ops that may quantize their result have in common: exact metrics, and malformed calls."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.ops.quantize import scaled_cast
from transformer_engine_jax.ops.state import Scaling
from transformer_engine_jax.testing import epsilon

E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
EPS = 2.0**-23


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def assert_rounded(got, exact, magnitude, ulps: float = 4.0):
    """`got` is `exact` (f64) computed in f32, to some ulps of `magnitude`, then rounded once to its dtype."""
    error = np.abs(wide(got) - exact)
    once = 0.0 if got.dtype == jnp.float32 else epsilon(got.dtype) * 1.01
    # Near f32's smallest normal, 2^-126, tails end in 0; f16's smallest step is larger.
    least = max(2.0**-120, float(jnp.finfo(got.dtype).smallest_subnormal))
    bound = ulps * EPS * magnitude + once * np.abs(exact) + least
    assert np.all(error <= bound), f"{np.max(error / bound):.3g} times the bound of {ulps} ulps"


def assert_fp8(got, exact, scale):
    """Codes of cast(exact * scale). Few may be one apart: where the f32 value falls on the other side of a boundary.

    A value 4 ulps (2^-21) off crosses one of FP8's boundaries, 2^-3 apart, in one of 2^18 cases; 1e-3 is generous.
    """
    expected = _cast(np.asarray(exact, np.float32), np.float32(scale), got.dtype)
    apart = np.abs(_ordered(got) - _ordered(expected))
    assert apart.max(initial=0) <= 1
    assert np.sum(apart != 0) <= np.ceil(1e-3 * apart.size)


_cast = jax.jit(scaled_cast, static_argnums=2)


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


def assert_same(got, expected):
    """Two computations of one result: FP8 codes at most one apart, everything else to 16 ulps of the largest."""
    for name, g in got._asdict().items():
        e = getattr(expected, name)
        assert (g is None) == (e is None)
        if g is None:
            continue
        assert g.shape == e.shape and g.dtype == e.dtype, name
        if g.dtype.itemsize == 1:
            apart = np.abs(_ordered(g) - _ordered(e))
            assert apart.max(initial=0) <= 1 and np.sum(apart != 0) <= np.ceil(1e-3 * apart.size), name
        else:
            assert np.max(np.abs(wide(g) - wide(e)), initial=0.0) <= 16 * EPS * np.max(np.abs(wide(e)), initial=0.0), (
                name
            )


def call_handler(name: str, operands: dict, results: dict, attributes: dict):
    """Calls te_<name> on the CPU as no reference would let us: buffers by name as (shape, dtype)."""
    call = jax.ffi.ffi_call(f"te_{name}", [jax.ShapeDtypeStruct(*r) for r in results.values()])
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = [jnp.zeros(*o) for o in operands.values()]
        return jax.block_until_ready(jax.jit(lambda *a: call(*a, **attributes))(*arrays))


ABSENT = ((0,), jnp.float32)  # of an optional operand or result

# Attributes of handlers that cast, where they are given a scale.
FROM_SCALE = {
    name: np.float32(value) if isinstance(value, float) else value for name, value in Scaling()._asdict().items()
}
