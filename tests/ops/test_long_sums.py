"""FP8 products that sum over many terms, as a kernel's gradient does over tokens: nothing of the sum is lost.

Run as a script it checks the cases: so cuBLASLt's algorithms and our own kernel for Hopper are tried on a GPU.
"""

import os
import subprocess
import sys
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.ops.gemm import gemm
from transformer_engine_jax.ops.low_rank import low_rank
from transformer_engine_jax.testing import relative_error

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
A_SCALE_INV, B_SCALE_INV = 0.37, 1.9
# Of terms of one sign. Hopper's tensor cores keep 13 bits of a sum below its largest part. In 512 terms, 16 of their
# instructions, that loses 0.2 to 0.4 % of it; in 16384 a quarter.
LOST = 2**-7


class Case(NamedTuple):
    m: int
    n: int
    k: int
    a: type
    b: type


CASES = [
    Case(300, 240, 1040, E4M3, E5M2),  # no multiple of a tile's 256 x 208 or 192, nor of the 512 terms of a round
    Case(16, 16, 16384, E4M3, E4M3),  # less than a tile
    Case(256, 192, 2048, E5M2, E4M3),
    Case(4400, 1056, 1536, E4M3, E5M2),  # more tiles than run at once
]


def operands(case: Case, mean: float):
    rng = np.random.default_rng(0)
    shapes = ((case.m, case.k), case.a), ((case.n, case.k), case.b)
    return [jnp.asarray(rng.standard_normal(shape) + mean, dtype) for shape, dtype in shapes]


def long_sum(a, b, c=None, dtype=jnp.float32):
    scales = jnp.float32(A_SCALE_INV), jnp.float32(B_SCALE_INV)
    return gemm(a, b, *scales, None, c, None, dtype=dtype, in_place=c is not None).d


def exact(a, b) -> np.ndarray:
    return np.asarray(a, np.float64) @ np.asarray(b, np.float64).T * (A_SCALE_INV * B_SCALE_INV)


def check(case: Case) -> str:
    """By which algorithm a GPU computed it; "" on a CPU."""
    a, b = operands(case, 0.0)
    product = jax.jit(long_sum)
    d, expected = product(a, b), exact(a, b)
    assert relative_error(d, expected) < 1e-3
    np.testing.assert_array_equal(product(a, b), d)  # the same bits again

    rounded = jax.jit(partial(long_sum, dtype=jnp.bfloat16))(a, b)
    # By what may be another algorithm: of parts of a sum, which are as large as sums are, each loses some as well.
    assert np.all(np.abs(np.asarray(rounded, np.float32) - d) <= 2**-8 * np.abs(d) + LOST * np.std(d))

    before = jnp.asarray(np.random.default_rng(1).standard_normal(d.shape), jnp.float32)
    added = jax.jit(long_sum, donate_argnums=2)(a, b, before + 0)
    assert relative_error(added, expected + np.asarray(before)) < 1e-3

    positive = operands(case, 4.0)
    d, expected = product(*positive), exact(*positive)
    lost = 1 - np.asarray(d) / expected
    assert np.abs(lost).max() < LOST, (case, lost.min(), lost.mean(), lost.max())

    with_nan = a.at[case.m // 2, case.k - 1].set(jnp.nan)
    assert np.array_equal(np.flatnonzero(np.isnan(np.asarray(product(with_nan, b))).any(1)), [case.m // 2])
    return "".join(p.algorithm for p in te.explain(long_sum, a, b, compile=True).compiled.products)


@pytest.mark.parametrize("tuning", ["0", "1", "ours"])
def test_nothing_of_a_long_sum_is_lost(tuning, tmp_path):
    env = {**os.environ, "TE_GEMM_TUNING": tuning, "TE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if tuning == "ours" and getattr(jax.devices()[0], "compute_capability", "") == "9.0":
        assert done.stdout.split("\n")[:-1] == len(CASES) * ["our kernel: TE_GEMM_TUNING=ours"]


def test_fast_accumulation_is_what_would_lose_it():
    """On a Hopper GPU: the test above sees the loss where there is one."""
    a, b = operands(CASES[1], 4.0)
    fast = partial(gemm, dtype=jnp.float32, split_accumulator=False)
    lost = 1 - np.sum(fast(a, b, None, None, None, None, None).d) / (np.sum(exact(a, b)) / (A_SCALE_INV * B_SCALE_INV))
    assert lost > LOST if getattr(jax.devices()[0], "compute_capability", "") == "9.0" else abs(lost) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_bias_s_gradient_of_many_tokens_is_added_up_in_f32(dtype):
    dy = jnp.asarray(np.random.default_rng(1).standard_normal((8192, 32)), dtype)
    x, kernel = jnp.ones((8192, 16), dtype), jnp.ones((16, 32))
    gradient = jax.jit(lambda bias, dy: jax.vjp(lambda bias: te.dense(x, kernel, bias), bias)[1](dy)[0])
    got = gradient(jnp.zeros(32), dy)
    assert relative_error(got, np.asarray(dy, np.float64).sum(0)) < float(jnp.finfo(dtype).eps)  # rounded once


# op(x, kernel), and the shapes of both
OF_KERNELS = {
    "dense": (te.dense, (4, 1024, 32), (32, 48)),
    "dense, of several axes": (partial(te.dense, k_axes=2), (4, 1024, 8, 4), (8, 4, 3, 16)),
    "low_rank, a": (lambda x, a: low_rank(x, a, jnp.eye(8)), (4, 1024, 32), (32, 8)),
    "low_rank, b": (lambda x, b: low_rank(x, jnp.eye(8), b), (4, 1024, 8), (8, 48)),
}


@pytest.mark.parametrize("vmapped", [False, True], ids=["", "vmap"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", OF_KERNELS)
def test_a_kernel_s_gradient_of_tokens_in_two_axes_is_added_up_in_f32(case, dtype, vmapped):
    """On one device: XLA on CPUs would sum it in bf16, and take 30 times as long."""
    op, x_shape, kernel_shape = OF_KERNELS[case]
    rng, kernel = np.random.default_rng(1), jnp.ones(kernel_shape)
    x, dy = (
        jnp.asarray(rng.standard_normal(s), dtype) for s in (x_shape, x_shape[:2] + kernel_shape[len(x_shape) - 2 :])
    )
    of = lambda kernel: jax.vmap(lambda x: op(x, kernel))(x) if vmapped else op(x, kernel)
    with testing.on_mesh(testing.mesh_of((1,), ("data",))):
        gradient = jax.jit(lambda kernel, dy: jax.vjp(of, kernel)[1](dy)[0])(kernel, dy)
    expected = np.tensordot(np.asarray(x, np.float64), np.asarray(dy, np.float64), [(0, 1), (0, 1)])
    assert relative_error(gradient, expected) < float(jnp.finfo(dtype).eps)  # rounded once


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_so_are_those_of_stacked_low_rank_matrices(dtype):
    """Those of queries, keys and values in one product."""
    rng = np.random.default_rng(1)
    x, dy = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((4, 1024, 8), (4, 1024, 3, 8)))
    ones = jnp.stack(3 * [jnp.eye(8)])
    gradients = jax.jit(lambda dy: jax.vjp(partial(low_rank, x), jnp.moveaxis(ones, 0, 1), ones)[1](dy))
    with testing.on_mesh(testing.mesh_of((1,), ("data",))):
        da, db = gradients(dy)
    expected = np.tensordot(np.asarray(x, np.float64), np.asarray(dy, np.float64), [(0, 1), (0, 1)])
    for got in (da, jnp.moveaxis(db, 0, 1)):
        assert relative_error(got, expected) < float(jnp.finfo(dtype).eps)


if __name__ == "__main__":
    for case in CASES:
        print(check(case))
