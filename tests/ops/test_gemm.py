"""The matrix product against NumPy in f64: every pair of dtypes, every epilogue, odd sizes, every instruction set.

Run as a script it checks the values of PRODUCTS, which is how the instruction sets are tried one by one.
"""

import os
import pathlib
import subprocess
import sys
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from transformer_engine_jax.kernel import use_references
from transformer_engine_jax.ops.gemm import gemm
from transformer_engine_jax.testing import assert_close, check_kernel, mesh_of, on_mesh, shard

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
F32, F16, BF16 = jnp.float32, jnp.float16, jnp.bfloat16

# Unit roundoff (half the distance to the next value, relative) and half the smallest value above zero.
ROUNDOFF = {
    F32: (2**-24, 2**-127),
    F16: (2**-11, 2**-25),
    BF16: (2**-8, 2**-127),
    E4M3: (2**-4, 2**-10),
    E5M2: (2**-3, 2**-17),
}


def is_fp8(dtype) -> bool:
    return dtype in (E4M3, E5M2)


class Case(NamedTuple):
    m: int
    n: int
    k: int
    a: type = E4M3
    b: type = E4M3
    d: type = BF16
    bias: type | None = None
    c: type | None = None
    amax: bool = False
    scales: bool = True  # of FP8 operands
    split: bool = True  # split_accumulator
    c_scale: float = 1.0

    def __str__(self):
        dtypes = [jnp.dtype(t).name if t else "-" for t in (self.a, self.b, self.d, self.bias, self.c)]
        flags = ["-amax" * self.amax, "-unscaled" * (not self.scales), "-fast" * (not self.split)]
        flags += [f"-{self.c_scale:.2g}c"] if self.c_scale != 1 else []
        return f"{self.m}x{self.n}x{self.k}-" + "-".join(dtypes) + "".join(flags)


PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2), (BF16, BF16), (F16, F16), (F32, F32)]
PRODUCTS = [
    *[Case(48, 32, 64, a, b, d) for a, b in PAIRS for d in (BF16, F16, F32)],
    *[Case(48, 32, 64, a, b, d, BF16, amax=True) for a, b in PAIRS for d in (E4M3, E5M2)],
    # Edges of every tile (4x8 to 32x32), of a block of k (256, 512) and of a task's block (128x192).
    *[Case(m, n, k, E5M2, E4M3, F32) for m, n, k in [(1, 1, 1), (3, 17, 100), (17, 3, 1), (33, 49, 257), (1, 50, 513)]],
    *[Case(129, 193, 1030, a, a, F32) for a in (E4M3, BF16, F16, F32)],
    Case(300, 260, 40),
    # Long sums of few elements, which leave threads without work.
    *[Case(m, m, 4096, a, a, F32) for m in (5, 40) for a in (E4M3, F32)],
]
EPILOGUES = [
    # On a GPU, cuBLASLt does FP8 where N is a multiple of 16, and bf16 stands in elsewhere; K is filled up to one.
    *[
        Case(20, n, k, d=d, bias=bias, c=c, amax=amax)
        for n, k in [(30, 40), (48, 64)]
        for d in (BF16, F32)
        for bias in (None, F32, BF16)
        for c in (None, d)
        for amax in (False, True)
    ],
    *[Case(m, 48, k, E5M2, E4M3, d, BF16, d) for d in (BF16, F32) for m in (1, 33) for k in (1, 15, 17, 30, 44, 8184)],
    *[Case(20, 48, 1001, d=d, bias=BF16, c=BF16, amax=is_fp8(d), split=False) for d in (BF16, E4M3)],
    *[Case(20, 30, 40, a, a, a, bias, a, amax=True) for a in (F32, F16, BF16) for bias in (F32, F16)],
    *[Case(20, 32, 48, E5M2, E4M3, d, bias=F32, c=c, amax=True) for d in (E4M3, E5M2) for c in (None, BF16, F16, F32)],
    *[Case(20, 48, 40, a, b, d, BF16, d, c_scale=s) for a, b in PAIRS for d in (BF16, F32) for s in (0.5, 1 / 3)],
    *[Case(20, 48, 40, d=E4M3, bias=BF16, c=c, amax=True, c_scale=0.5) for c in (BF16, F32)],
    Case(16, 16, 16, scales=False),
    Case(64, 48, 2048, split=False),
    # Nothing to sum, and nothing at all.
    Case(5, 6, 0, bias=F32, c=BF16),
    Case(5, 6, 0, BF16, BF16, F32, amax=True),
    Case(0, 6, 7, amax=True),
    Case(6, 0, 7, d=E4M3, amax=True),
]
CASES = PRODUCTS + EPILOGUES


ON_GPU = jax.default_backend() == "gpu"


def sum_error(case: Case) -> float:
    """Bound on the error of a result before its cast, relative to the sum of the magnitudes of its terms."""
    if not ON_GPU:
        return (case.k + 4) * 2**-24  # every f32 addition rounds once, and so do the scales, bias and c
    if is_fp8(case.a):
        return (case.k / 32 + 1) * 2**-13  # Hopper keeps 13 bits below the largest of 32 products
    return (case.k + 4) * 2**-22  # tensor cores truncate


@pytest.fixture
def on_cpu():
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def operands(case: Case, seed: int = 0) -> list:
    """Random operands in the order of gemm's parameters."""
    rng = np.random.default_rng(seed)

    def normal(dtype, *shape):
        return None if dtype is None else rng.standard_normal(shape).astype(np.float32).astype(dtype)

    scale = [F32(s) if case.scales and is_fp8(t) else None for s, t in ((0.37, case.a), (1.9, case.b))]
    d_scale = F32(3.3) if is_fp8(case.d) else None
    a, b = normal(case.a, case.m, case.k), normal(case.b, case.n, case.k)
    return [a, b, *scale, normal(case.bias, case.n), normal(case.c, case.m, case.n), d_scale]


def check_values(case: Case) -> None:
    a, b, a_scale_inv, b_scale_inv, bias, c, d_scale = args = operands(case)
    out = gemm(*args, dtype=case.d, amax=case.amax, split_accumulator=case.split, c_scale=case.c_scale)
    factor = float(1 if a_scale_inv is None else a_scale_inv) * float(1 if b_scale_inv is None else b_scale_inv)
    terms = [f64(x) * times for x, times in ((bias, 1), (c, case.c_scale)) if x is not None]
    expected = sum([f64(a) @ f64(b).T * factor, *terms])
    magnitudes = sum([np.abs(f64(a)) @ np.abs(f64(b)).T * factor, *[np.abs(t) for t in terms]])
    summed = sum_error(case) * magnitudes
    unit, least = ROUNDOFF[case.d]
    step = 1.0 if d_scale is None else float(d_scale)
    stored = f64(out.d) / step
    assert out.d.dtype == case.d
    assert out.d.shape == (case.m, case.n)
    bound = (1 + unit) * summed + unit * np.abs(expected) + least / step
    assert np.all(np.abs(stored - expected) <= bound)
    if not case.amax:
        assert out.amax is None
    elif is_fp8(case.d):
        most = np.max(np.abs(expected), initial=0.0)
        np.testing.assert_allclose(float(out.amax), most, rtol=2**-24, atol=np.max(summed, initial=0.0))
    else:
        assert float(out.amax) == np.max(np.abs(f64(out.d)), initial=0.0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case):
    check_values(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(case):
    with use_references(True):
        check_values(case)


@pytest.mark.parametrize("isa, flag", [("portable", ""), ("avx2", "avx2"), ("avx512", "avx512bw"), ("amx", "amx_bf16")])
def test_every_instruction_set(isa, flag):
    env = {**os.environ, "TE_CPU_ISA": isa, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    if "TE_CPU_ISA: expected one of" in done.stderr:  # the error of a processor that lacks it, and of no other
        of_linux = pathlib.Path("/proc/cpuinfo")
        assert flag and not (of_linux.exists() and flag in of_linux.read_text().split())
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(PRODUCTS)), "cases"]


def test_unknown_instruction_set_is_an_error():
    env = {**os.environ, "TE_CPU_ISA": "sse9", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "TE_CPU_ISA: expected one of portable" in done.stderr
    assert "got sse9" in done.stderr


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_all_fp8_codes(dtype):
    """Every code times one is what NumPy says it is, NaN and infinities included."""
    codes = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    product = gemm(codes[:, None], jnp.ones((1, 1), dtype), None, None, None, None, None, dtype=F32).d
    np.testing.assert_array_equal(np.asarray(product)[:, 0], np.asarray(codes).astype(np.float32))


@pytest.mark.parametrize("dtype", [E4M3, E5M2, BF16, F16, F32], ids=lambda t: jnp.dtype(t).name)
@pytest.mark.parametrize("result", [F32, BF16, F16, E4M3, E5M2], ids=lambda t: jnp.dtype(t).name)
@pytest.mark.parametrize("n", [60, 64])
def test_nan_and_infinity_stay_in_their_row(dtype, result, n):
    a, b = jnp.ones((70, 96), F32).at[3, 7].set(jnp.nan), jnp.ones((n, 96), E4M3 if is_fp8(dtype) else dtype)
    expected = np.full((70, n), 96.0)
    expected[3] = np.nan
    if dtype != E4M3:  # which has no infinity
        a = a.at[5, 1].set(jnp.inf)
        expected[5] = {E4M3: 448, E5M2: 57344}.get(result, np.inf)
    d_scale = F32(1) if is_fp8(result) else None
    out = gemm(a.astype(dtype), b, None, None, None, None, d_scale, dtype=result, amax=True)
    np.testing.assert_array_equal(f64(out.d), expected)
    assert np.isnan(float(out.amax))


def test_infinite_amax():
    a = jnp.ones((4, 4), F32).at[1, 1].set(jnp.inf)
    out = gemm(a, a[:1], None, None, None, None, F32(1), dtype=E5M2, amax=True)
    assert float(out.amax) == np.inf
    assert float(out.d[1, 0]) == 57344


def test_several_axes_and_jit():
    rng = np.random.default_rng(1)
    a = jnp.asarray(rng.standard_normal((2, 5, 3, 8)), BF16)
    b = jnp.asarray(rng.standard_normal((4, 2, 3, 8)), BF16)
    bias = jnp.asarray(rng.standard_normal((4, 2)), F32)

    @jax.jit
    def product(a, b, bias):
        return gemm(a, b, None, None, bias, None, None, dtype=F32, k_axes=2).d

    expected = np.einsum("xymk,nzmk->xynz", f64(a), f64(b)) + f64(bias)
    np.testing.assert_allclose(product(a, b, bias), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sharded", ["m", "n", "k", "mn", "mk"])
@pytest.mark.parametrize("result", [F32, BF16, E4M3], ids=["f32", "bf16", "e4m3"])
def test_jit_vmap_and_shards(sharded, result):
    """Where k is sharded, bias and c count once; an FP8 result or an amax needs all of k on each device."""
    a, b, *scales, bias, c, d_scale = operands(Case(16, 32, 64, E5M2, E4M3, result, BF16, F32))
    a, c = a.reshape(4, 4, 64), c.reshape(4, 4, 32)
    m, n, k = ({"m": "data", "n": "model", "k": "model"}[axis] if axis in sharded else None for axis in "mnk")
    specs = [P(m, None, k), P(n, k), P(), P(), P(n), P(m, None, n), P()]
    # One rounding of the result, and the sums' order (a GPU's FP8 sums are the coarsest).
    bound = ROUNDOFF[result][0] * (3 if "k" in sharded else 1) + 2**-12

    def compare(got, expected):
        assert_close(jax.tree.map(lambda x: x.astype(F32), got), jax.tree.map(lambda x: x.astype(F32), expected), bound)

    for amax in (False, True):
        attributes = dict(dtype=result, amax=amax)
        check_kernel(gemm, [a, b, *scales, bias, c, d_scale], attributes, compare, specs=specs)


@pytest.mark.parametrize("explicit", [False, True])
def test_devices_that_share_a_sum_take_their_parts_of_c_where_it_is(explicit):
    """No pass over c zeroes it on some of them, and d may take its buffer."""
    mesh = mesh_of((4,), ("model",), explicit=explicit)
    a, b, *scales, bias, c, d_scale = operands(Case(16, 32, 64, BF16, BF16, F32, c=F32))

    @partial(jax.jit, donate_argnums=2)
    def run(a, b, c):
        return gemm(a, b, *scales, bias, c, d_scale, dtype=F32, in_place=True).d

    with on_mesh(mesh):
        args = [shard(mesh, x, spec) for x, spec in zip((a, b, c), (P(None, "model"), P(None, "model"), P()))]
        text = run.lower(*args).compile().as_text()
        assert " select(" not in text and "output_to_operand_aliasing" in text
        np.testing.assert_allclose(run(*args), f64(a) @ f64(b).T + f64(c), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in EPILOGUES if case.c], ids=str)
@pytest.mark.parametrize("live", [False, True], ids=["c is done with", "c lives on"])
def test_in_place(case, live):
    a, b, *scales, bias, c, d_scale = operands(case)

    @partial(jax.jit, donate_argnums=0, static_argnums=1)
    def run(c, in_place):
        d = gemm(a, b, *scales, bias, c, d_scale, dtype=case.d, amax=case.amax, in_place=in_place)
        return d, 2 * c if live else None

    got, expected = run(jnp.asarray(c), True), run(jnp.asarray(c), False)
    bound = 2**-12 + 2 * ROUNDOFF[case.d][0]  # each is rounded, of sums that may be added up in another order
    assert_close(jax.tree.map(f64, got), jax.tree.map(f64, expected), bound)
    aliased = "output_to_operand_aliasing" in run.lower(jnp.asarray(c), True).compile().as_text()
    assert aliased == (case.c == case.d)


@pytest.mark.parametrize("batched", ["a", "b", "both"])
@pytest.mark.parametrize("amax", [False, True])
def test_vmap(batched, amax):
    rng = np.random.default_rng(2)
    a = jnp.asarray(rng.standard_normal((4, 6, 8) if batched != "b" else (6, 8)), F32).astype(E4M3)
    b = jnp.asarray(rng.standard_normal((4, 5, 8) if batched != "a" else (5, 8)), F32).astype(E5M2)
    in_axes = (0 if batched != "b" else None, 0 if batched != "a" else None)

    def product(a, b):
        return gemm(a, b, F32(0.5), F32(2), None, None, None, dtype=F32, amax=amax)

    out = jax.vmap(product, in_axes)(a, b)
    left = "tmk" if batched != "b" else "mk"
    right = "tnk" if batched != "a" else "nk"
    expected = np.einsum(f"{left},{right}->tmn", f64(a), f64(b))
    np.testing.assert_allclose(out.d, expected, rtol=1e-5, atol=1e-5)
    if amax:
        np.testing.assert_array_equal(out.amax, np.abs(np.asarray(out.d)).max(axis=(1, 2)))


def test_sums_do_not_depend_on_the_other_sizes(on_cpu):
    """A row's sum has the same bits alone and among others: shards and microbatches agree with the whole."""
    a, b, *rest = operands(Case(200, 210, 700, F32, F32, F32))
    whole = np.asarray(gemm(a, b, *rest, dtype=F32).d)
    part = np.asarray(gemm(a[150:151], b[70:80], *rest, dtype=F32).d)
    np.testing.assert_array_equal(part, whole[150:151, 70:80])


# ---- Mistakes ------------------------------------------------------------------------------------------------------


def ffi_gemm(*args, d=(BF16, (4, 6)), amax=None, **attributes):
    """The handler itself, past the checks of the Python side."""
    shapes = [jax.ShapeDtypeStruct(d[1], d[0]), jax.ShapeDtypeStruct((0,) if amax is None else amax, F32)]
    args = [jnp.zeros((0,), F32) if x is None else x for x in args]
    attributes = {
        "k_axes": np.int64(1),
        "split_accumulator": True,
        "k_first": "",
        "c_scale": np.float32(1),
        **attributes,
    }
    return jax.block_until_ready(jax.ffi.ffi_call("te_gemm", shapes)(*args, **attributes))


def zeros(*shape, dtype=E4M3):
    return np.zeros(shape, dtype)


A, B, ONE = zeros(4, 8), zeros(6, 8), np.float32(1)
MISTAKES = {
    "a: expected an FP8 dtype": dict(args=[zeros(4, 8, dtype=jnp.int32), B, None, None, None, None, None]),
    "b: expected an FP8 dtype, as a": dict(args=[A, zeros(6, 8, dtype=F32), ONE, ONE, None, None, None]),
    "b: expected bf16": dict(args=[zeros(4, 8, dtype=BF16), zeros(6, 8, dtype=F16), None, None, None, None, None]),
    "b: expected the last 1 axes": dict(args=[A, zeros(6, 9), ONE, ONE, None, None, None]),
    "a: expected at least 3 axes": dict(args=[A, B, ONE, ONE, None, None, None], k_axes=np.int64(3)),
    "a: expected at least -1 axes": dict(args=[A, B, ONE, ONE, None, None, None], k_axes=np.int64(-1)),
    r"a_scale_inv: expected f32\[\]": dict(args=[A, B, zeros(2, dtype=F32), ONE, None, None, None]),
    "b_scale_inv: expected absent": dict(
        args=[zeros(4, 8, dtype=F32), zeros(6, 8, dtype=F32), None, ONE, None, None, None]
    ),
    "bias: expected 1 x 6": dict(args=[A, B, ONE, ONE, zeros(4, dtype=F32), None, None]),
    "bias: expected f32, f16 or bf16": dict(args=[A, B, ONE, ONE, zeros(6), None, None]),
    "c: expected 4 x 6": dict(args=[A, B, ONE, ONE, None, zeros(4, 5, dtype=F32), None]),
    "d: expected 4 x 6": dict(args=[A, B, ONE, ONE, None, None, None], d=(BF16, (6, 5))),
    "d: expected FP8 with a d_scale": dict(args=[A, B, ONE, ONE, None, None, ONE]),
    "d: expected f32, f16 or bf16 without": dict(args=[A, B, ONE, ONE, None, None, None], d=(E4M3, (4, 6))),
    r"amax: expected f32\[\]": dict(args=[A, B, ONE, ONE, None, None, None], amax=(2,)),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_exceptions(on_cpu, message):
    mistake = dict(MISTAKES[message])
    with pytest.raises(Exception, match=f"te_gemm: {message}"):
        ffi_gemm(*mistake.pop("args"), **mistake)


@pytest.mark.parametrize(
    "message, a, b",
    [
        ("gemm: b: expected its last 1 axes", zeros(4, 8), zeros(6, 9)),
        ("gemm: b: expected an FP8 dtype", zeros(4, 8), zeros(6, 8, dtype=F32)),
        ("gemm: b: expected bfloat16", zeros(4, 8, dtype=BF16), zeros(6, 8, dtype=F16)),
    ],
)
def test_mistakes_name_the_argument(message, a, b):
    with pytest.raises(ValueError, match=message):
        gemm(a, b, None, None, None, None, None, dtype=F32)


if __name__ == "__main__":
    for case in PRODUCTS:
        check_values(case)
    print(len(PRODUCTS), "cases")
