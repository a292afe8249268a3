"""Casts byte for byte, amax, transposed copies and column sums, against numpy and the reference."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from transformer_engine_jax import testing
from transformer_engine_jax.ops.quantize import E4M3, E5M2, amax, dequantize, fp8_max, quantize, quantize_stack

ALL_BF16 = jax.lax.bitcast_convert_type(jnp.arange(65536, dtype=jnp.uint16), jnp.bfloat16)
ALL_F16 = jax.lax.bitcast_convert_type(jnp.arange(65536, dtype=jnp.uint16), jnp.float16)
RANDOM_BITS = jax.lax.bitcast_convert_type(jax.random.bits(jax.random.key(1), (1 << 16,), jnp.uint32), jnp.float32)
SCALES = [1.0, 0.0, 3.7, 448.0, 2.0**-30, 1e-38, 2.0**100, 3e38, float("inf")]
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def numpy_cast(x, scale: float, dtype) -> np.ndarray:
    """The cast from its definition, with numpy: flush, scale in f32, saturate, round once to nearest even."""

    def flush(values):
        return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)

    with np.errstate(all="ignore"):
        scaled = flush(np.asarray(x, np.float32)) * flush(np.float32(scale))
    limit = fp8_max(dtype)
    codes = np.clip(scaled, -limit, limit).astype(ml_dtypes.float8_e4m3fn if dtype == E4M3 else ml_dtypes.float8_e5m2)
    return np.where(np.isnan(scaled), np.uint8(0x7F), codes.view(np.uint8))


@FORMATS
@pytest.mark.parametrize("scale", SCALES)
def test_every_bf16_and_f16_and_random_f32_bytes(dtype, scale):
    for platform in testing.platforms():
        with jax.default_device(jax.devices(platform)[0]):
            for x in (ALL_BF16, ALL_F16, RANDOM_BITS):
                x = jax.device_put(x, jax.devices(platform)[0])
                got = np.asarray(quantize(x, jnp.float32(scale), dtype=dtype).q).view(np.uint8)
                with testing.reference_kernels():
                    reference = np.asarray(quantize(x, jnp.float32(scale), dtype=dtype).q).view(np.uint8)
                np.testing.assert_array_equal(got, numpy_cast(x, scale, dtype), f"{platform} {x.dtype}")
                np.testing.assert_array_equal(got, reference, f"{platform} {x.dtype}")


SHAPES = {
    "one element": ((1,), 1),
    "odd": ((7, 13), 1),
    "a row": ((1, 100), 1),
    "a column": ((100, 1), 1),
    "more than a block": ((3, 171, 130), 1),
    "two column axes": ((33, 2, 65), 2),
    "all are columns": ((5, 9), 2),
    "tiles": ((2, 256, 192), 1),
}


@FORMATS
@pytest.mark.parametrize("shape, k_axes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_all_results(shape, k_axes, dtype, x_dtype):
    x = (jax.random.normal(jax.random.key(2), shape) * 3).astype(x_dtype)
    scale = jnp.float32(17.3)
    for platform in testing.platforms():
        with jax.default_device(jax.devices(platform)[0]):
            local = jax.device_put(x, jax.devices(platform)[0])
            out = quantize(local, scale, dtype=dtype, k_axes=k_axes, q_t=True, colsum=True)
        codes = numpy_cast(x, 17.3, dtype)
        split = len(shape) - k_axes
        turned = np.transpose(codes, (*range(split, len(shape)), *range(split)))
        np.testing.assert_array_equal(np.asarray(out.q).view(np.uint8), codes)
        np.testing.assert_array_equal(np.asarray(out.q_t).view(np.uint8), turned)
        assert out.amax == np.abs(np.asarray(x, np.float32)).max()
        # An f32 sum of n terms, in any order: n * epsilon of the sum of magnitudes.
        wide = np.asarray(x, np.float64)
        rows = tuple(range(split))
        bound = max(wide.size, 1) * testing.epsilon(np.float32) * np.abs(wide).sum(axis=rows)
        assert (np.abs(np.asarray(out.colsum) - wide.sum(axis=rows)) <= bound).all()


@FORMATS
@pytest.mark.parametrize("shape", [(1, 8), (5, 3, 40), (200, 136), (0, 16)])
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
def test_a_stack_is_quantized_as_if_it_were_in_memory(shape, x_dtype, dtype):
    parts = [(jax.random.normal(key, shape) * 3).astype(x_dtype) for key in jax.random.split(jax.random.key(3), 3)]
    parts[1] = parts[1] * 7
    asked = dict(dtype=dtype, q_t=True, colsum=True)
    for platform in testing.platforms():
        with jax.default_device(jax.devices(platform)[0]):
            local = jax.device_put(parts, jax.devices(platform)[0])
            for x2 in (None, local[2]):
                got = quantize_stack(*local[:2], x2, jnp.float32(5.3), **asked)
                stack = jnp.stack(local if x2 is not None else local[:2], axis=-2)
                expected = quantize(stack, jnp.float32(5.3), k_axes=2, **asked)
                testing.assert_same_bytes(got, expected)


def test_parts_of_a_stack_that_do_not_fit_are_named():
    x = jnp.zeros((4, 12))
    with pytest.raises(Exception, match="te_quantize_stack: x0: expected a last axis of a multiple of 8"):
        jax.block_until_ready(quantize_stack(x, x, None, jnp.float32(1), dtype=E4M3))


def test_results_that_were_not_asked_for_are_none():
    x = jnp.ones((4, 8))
    out = quantize(x, jnp.float32(1), dtype=E4M3)
    assert out.q_t is None and out.colsum is None
    only_t = quantize(x, jnp.float32(1), dtype=E5M2, q=False, q_t=True)
    assert only_t.q is None and only_t.q_t.dtype == E5M2


@pytest.mark.parametrize("bad, seen", [(jnp.nan, jnp.isnan), (jnp.inf, jnp.isposinf), (-jnp.inf, jnp.isposinf)])
def test_amax_shows_what_is_not_finite(bad, seen):
    x = jax.random.normal(jax.random.key(3), (50, 70)).at[20, 30].set(bad)
    assert seen(amax(x)) and seen(quantize(x, jnp.float32(1), dtype=E4M3).amax)


def test_amax_of_denormals_is_zero():
    assert amax(jnp.full((8,), 1e-40)) == 0 and amax(jnp.full((8,), 1.2e-38)) > 0


@FORMATS
def test_dequantize_is_exact(dtype):
    codes = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    narrow = ml_dtypes.float8_e4m3fn if dtype == E4M3 else ml_dtypes.float8_e5m2
    expected = np.arange(256, dtype=np.uint8).view(narrow).astype(np.float32) * np.float32(0.3)
    for platform in testing.platforms():
        with jax.default_device(jax.devices(platform)[0]):
            for out in (jnp.float32, jnp.bfloat16, jnp.float16):
                got = dequantize(jax.device_put(codes, jax.devices(platform)[0]), jnp.float32(0.3), dtype=out)
                with np.errstate(over="ignore"):
                    testing.assert_same_bytes(got, expected.astype(np.dtype(out)))


def test_kernels_hold_under_all_transformations():
    x = jax.random.normal(jax.random.key(4), (8, 4, 64)).astype(jnp.bfloat16)
    specs = [P("data", None, "model"), P()]
    check = testing.check_kernel
    check(quantize, [x, jnp.float32(5)], {"dtype": E5M2, "q_t": True}, testing.assert_same_bytes, specs=specs)
    parts = [x, 2 * x, None, jnp.float32(5)]
    stacked = {"dtype": E4M3, "q_t": True, "colsum": True}
    check(quantize_stack, parts, stacked, testing.assert_same_bytes, specs=[specs[0]] * 3 + [P()])
    check(amax, [x], {}, testing.assert_same_bytes, specs=specs[:1])
    q = quantize(x, jnp.float32(5), dtype=E4M3).q
    check(dequantize, [q, jnp.float32(0.2)], {"dtype": np.dtype(jnp.float32)}, testing.assert_same_bytes, specs=specs)
