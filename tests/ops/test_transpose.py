"""FP8 codes turned: each byte where it belongs, at edges of tiles and off any alignment, under jit, vmap, shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from transformer_engine_jax.ops.transpose import transpose, transposed
from transformer_engine_jax.quantized import QuantizedTensor
from transformer_engine_jax.testing import assert_same_bytes, check_kernel

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def codes(dtype, *shape) -> jax.Array:
    """Of all 256, NaN among them."""
    values = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return jax.lax.bitcast_convert_type(jnp.asarray(values), dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("rows", [1, 16, 100, 128, 131, 400])
@pytest.mark.parametrize("cols", [1, 8, 16, 24, 120, 128, 144, 257])
def test_bytes(rows, cols, dtype):
    x = codes(dtype, rows, cols)
    y = transpose(x)
    assert y.dtype == dtype and y.shape == (cols, rows)
    assert_same_bytes(y, np.asarray(x).T)


def test_nothing():
    assert transpose(codes(E4M3, 0, 5)).shape == (5, 0) and transpose(codes(E4M3, 5, 0)).shape == (0, 5)


def test_several_axes_keep_their_order_and_the_scale_stays():
    x = QuantizedTensor(codes(E4M3, 2, 3, 5, 7), jnp.float32(0.3))
    y = transposed(x, 3)
    assert_same_bytes(y.data, np.asarray(x.data).transpose(1, 2, 3, 0))
    assert y.scale_inv is x.scale_inv


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, None, "model"), P("data", None, "model")])
def test_jit_vmap_and_shards(spec):
    check_kernel(transpose, [codes(E5M2, 4, 6, 16)], {}, assert_same_bytes, specs=[spec])
