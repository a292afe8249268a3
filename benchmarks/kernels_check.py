"""Checks and times the memory-bound kernels of this machine: `python benchmarks/kernels_check.py [--json FILE]`.

Checks: every handler against numpy, at sizes that meet each of its paths: casts byte for byte, sums and curves by
their relative L2 error. Times: the bytes that must cross memory (each operand and result once) over the time of a
call, also as a part of what a plain copy reaches. On a CPU it only checks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from transformer_engine_jax import kernel  # noqa: F401 (registers the handlers)

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
TINY = np.finfo(np.float32).tiny
EPSILON = 1e-5

# One value, odd ends of a tile, unaligned rows, each group size of the norms, the cluster and both its widths, rows
# too long for registers, and none.
SIZES = [
    (1, 1),
    (3, 7),
    (1, 4097),
    (17, 1000),
    (129, 136),
    (1000, 517),
    (304, 1024),
    (100, 2056),
    (144, 4096),
    (40, 5120),
    (33, 16384),
    (9, 16392),
    (0, 64),
]
TIMED = [(16384, 4096), (16384, 16384)]


class Call(NamedTuple):
    """One FFI call: `results` are (shape, dtype), or false for an absent one; workspace in bytes, None: takes none."""

    target: str
    results: list
    attributes: dict
    workspace: int | None = None

    def __call__(self, *operands):
        shapes = [jax.ShapeDtypeStruct(*(r or ((0,), F32))) for r in self.results]
        if self.workspace is not None and jax.default_backend() == "gpu":
            shapes.append(jax.ShapeDtypeStruct((self.workspace,), np.uint8))
        operands = [jnp.zeros((0,), F32) if x is None else x for x in operands]
        return jax.ffi.ffi_call(self.target, shapes)(*operands, **self.attributes)[: len(self.results)]


class Case(NamedTuple):
    """A kernel at a size: its call, the shapes and dtypes of its operands, and the meaning of its results in numpy."""

    name: str
    call: Call
    operands: list  # (shape, dtype), or false for an absent one
    reference: Callable  # numpy operands -> an array a result; an FP8 result as it is before the cast
    scale: int | None = None  # which operand is the scale
    exact: bool = False  # bytes and amax equal the reference's
    unread: int = 0  # bytes of operands that need not be read

    def bytes(self) -> int:
        buffers = [a for a in [*self.operands, *self.call.results] if a]
        return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in buffers) - self.unread


# --- Cases -------------------------------------------------------------------------------------------------------


def tile_partials(rows: int, cols: int) -> int:
    return 4 * cols * -(-rows // 128)


def largest(x: np.ndarray):
    return np.abs(x).max(initial=0.0)


def quantize(rows, cols, dtype=BF16, out=E4M3, q=True, q_t=True, colsum=False) -> Case:
    def reference(x, scale):
        y = x.astype(np.float32)
        return y, y.T, largest(np.where(np.abs(y) < TINY, 0, y)), y.sum(0, dtype=np.float64)

    results = [q and ((rows, cols), out), q_t and ((cols, rows), out), ((), F32), colsum and ((cols,), F32)]
    call = Call("te_quantize", results, {"k_axes": np.int64(1)}, tile_partials(rows, cols) if colsum else 0)
    what = "+".join(n for n, on in (("q", q), ("q_t", q_t), ("colsum", colsum)) if on)
    operands = [((rows, cols), dtype), ((), F32)]
    return Case(f"quantize {dtype} {out} {what}", call, operands, reference, scale=1, exact=True)


def amax(rows, cols, dtype=BF16) -> Case:
    def reference(x):
        x = x.astype(np.float32)
        return [largest(np.where(np.abs(x) < TINY, 0, x))]

    return Case(f"amax {dtype}", Call("te_amax", [((), F32)], {}), [((rows, cols), dtype)], reference, exact=True)


def dequantize(rows, cols, dtype=E4M3, out=BF16) -> Case:
    def reference(q, scale_inv):
        return [(q.astype(np.float32) * scale_inv).astype(out).astype(np.float32)]

    call = Call("te_dequantize", [((rows, cols), out)], {})
    return Case(f"dequantize {dtype} {out}", call, [((rows, cols), dtype), ((), F32)], reference, exact=True)


def norm_fwd(rows, cols, kind="layernorm", dtype=BF16, out=E4M3, y_t=False, gamma=F32, amax=True, zero=True) -> Case:
    fp8, centered = out in FP8_MAX, kind == "layernorm"

    def reference(x, gamma, *rest):
        x = x.astype(np.float64)
        mean = x.mean(1, keepdims=True) if centered else np.zeros((rows, 1))
        rstd = 1 / np.sqrt(np.square(x - mean).mean(1, keepdims=True) + EPSILON)
        y = (x - mean) * rstd * (gamma.astype(np.float64) + zero)
        y = y + rest[0].astype(np.float64) if centered else y
        statistics = (mean[:, 0], rstd[:, 0]) if centered else (rstd[:, 0],)
        return (y, y.T, *statistics, largest(y if fp8 else y.astype(out)))

    statistics = [((rows,), F32)] * (2 if centered else 1)
    results = [((rows, cols), out), y_t and ((cols, rows), out), *statistics, amax and ((), F32)]
    operands = [((rows, cols), dtype), ((cols,), gamma), *([((cols,), gamma)] if centered else []), fp8 and ((), F32)]
    call = Call(f"te_{kind}_fwd", results, {"epsilon": np.float32(EPSILON), "zero_centered_gamma": zero})
    name = f"{kind}_fwd {dtype} {out}{' +y_t' if y_t else ''}"
    return Case(name, call, operands, reference, scale=len(operands) - 1 if fp8 else None)


def norm_bwd(rows, cols, kind="layernorm", dtype=BF16, dy_dtype=None, gamma=F32, residual=False) -> Case:
    centered = kind == "layernorm"

    def reference(dy, x, gamma, *others):
        *statistics, past = others
        dy, x = dy.astype(np.float64), x.astype(np.float64)
        mean = statistics[0].astype(np.float64)[:, None] if centered else 0.0
        rstd = statistics[-1].astype(np.float64)[:, None]
        xhat, wdy = (x - mean) * rstd, dy * (gamma.astype(np.float64) + 1)
        dx = wdy - xhat * (wdy * xhat).mean(1, keepdims=True)
        dx = rstd * (dx - wdy.mean(1, keepdims=True) if centered else dx)
        dx += past.astype(np.float64) if residual else 0.0
        return (dx, (dy * xhat).sum(0)) + ((dy.sum(0),) if centered else ())

    parameters = 2 if centered else 1
    operands = [((rows, cols), dy_dtype or dtype), ((rows, cols), dtype), ((cols,), gamma)]
    call = Call(
        f"te_{kind}_bwd",
        [((rows, cols), dtype)] + [((cols,), F32)] * parameters,
        {"zero_centered_gamma": True},
        8 * cols * min(rows, 256),
    )
    name = f"{kind}_bwd {dtype}{f' dy {dy_dtype}' if dy_dtype else ''}{' +residual' if residual else ''}"
    operands += [*[((rows,), F32)] * parameters, residual and ((rows, cols), dtype)]
    return Case(name, call, operands, reference)


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def curve(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value and slope, in f64."""
    x = x.astype(np.float64)
    if name == "relu":
        return np.maximum(x, 0), (x > 0).astype(np.float64)
    if name == "squared_relu":
        return np.square(np.maximum(x, 0)), 2 * np.maximum(x, 0)
    if name == "sigmoid":
        return sigmoid(x), sigmoid(x) * (1 - sigmoid(x))
    a = np.sqrt(8 / np.pi)
    v, dv = {
        "silu": (x, 1.0),
        "quick_gelu": (1.702 * x, 1.702),
        "gelu": (a * (x + 0.044715 * x**3), a * (1 + 3 * 0.044715 * x**2)),
    }[name]
    return x * sigmoid(v), sigmoid(v) + x * sigmoid(v) * (1 - sigmoid(v)) * dv


def curve_attributes(name: str) -> dict:
    """Attributes of an activation; the numbers are those of clamped ones, which no other reads."""
    return {"activation": name, "limit": np.float32(7), "alpha": np.float32(1.702), "glu_linear_offset": np.float32(1)}


def activation_fwd(rows, cols, name="gelu", dtype=BF16, out=E4M3, y_t=True) -> Case:
    a, fp8 = 2 if name.endswith("_linear") else 1, out in FP8_MAX

    def reference(z, *_):
        y = curve(name.removesuffix("_linear"), z[:, 0])[0]
        y = y * z[:, 1].astype(np.float64) if a == 2 else y
        return y, y.T, largest(y if fp8 else y.astype(out))

    results = [((rows, cols), out), fp8 and y_t and ((cols, rows), out), ((), F32)]
    call = Call("te_activation_fwd", results, curve_attributes(name))
    title = f"{name}_fwd {dtype} {out}{' +y_t' if fp8 and y_t else ''}"
    return Case(title, call, [((rows, a, cols), dtype), fp8 and ((), F32)], reference, scale=1 if fp8 else None)


def activation_bwd(rows, cols, name="gelu", dtype=BF16, out=E5M2, dz_t=True, dbias=True, dy_dtype=None) -> Case:
    a, fp8 = 2 if name.endswith("_linear") else 1, out in FP8_MAX

    def reference(dy, z, *_):
        dy = dy.astype(np.float64)
        value, slope = curve(name.removesuffix("_linear"), z[:, 0])
        gate = z[:, 1].astype(np.float64) if a == 2 else 1.0
        dz = np.stack([dy * gate * slope, dy * value][:a], 1)
        return dz, dz.transpose(1, 2, 0), largest(dz if fp8 else dz.astype(out)), dz.sum(0)

    results = [((rows, a, cols), out), fp8 and dz_t and ((a, cols, rows), out), ((), F32), dbias and ((a, cols), F32)]
    call = Call("te_activation_bwd", results, curve_attributes(name), tile_partials(rows, a * cols) if dbias else 0)
    what = f"{' +dz_t' if fp8 and dz_t else ''}{' +dbias' if dbias else ''}"
    operands = [((rows, cols), dy_dtype or dtype), ((rows, a, cols), dtype), fp8 and ((), F32)]
    return Case(f"{name}_bwd {dtype} {out}{what}", call, operands, reference, scale=2 if fp8 else None)


def softmax_fwd(heads, queries, keys, dtype=BF16, causal=False, mask=False, offset=False) -> Case:
    def reference(x, hidden, extra):
        v = 0.25 * x.astype(np.float64)
        seen = np.ones((queries, keys), bool) if hidden is None else ~hidden
        seen &= np.tri(queries, keys, dtype=bool) if causal else True
        bound = np.full((heads, 1, 1), -1e30) if extra is None else extra.astype(np.float64)[:, None, None]
        top = np.maximum(np.max(v, -1, keepdims=True, initial=-np.inf, where=seen), bound)
        terms, rest = np.exp(np.where(seen, v - top, -np.inf)), np.exp(bound - top) * (extra is not None)
        total = terms.sum(-1, keepdims=True) + rest
        total = np.where(total == 0, 1.0, total)
        return terms / total, (rest / total)[..., 0]

    operands = [((heads, queries, keys), dtype), mask and ((queries, keys), np.dtype(bool)), offset and ((heads,), F32)]
    call = Call("te_softmax_fwd", [operands[0], offset and ((heads, queries), F32)],
                {"scale_factor": np.float32(0.25), "causal": causal})  # fmt: skip
    what = "".join(f" {n}" for n, on in (("causal", causal), ("mask", mask), ("offset", offset)) if on)
    unread = unseen(heads, queries, keys) * dtype.itemsize if causal else 0
    return Case(f"softmax_fwd {dtype}{what}", call, operands, reference, unread=unread)


def softmax_bwd(heads, queries, keys, dtype=BF16, causal=False, dot=False) -> Case:
    def reference(dy, y):
        dy, y = dy.astype(np.float64), y.astype(np.float64) * (np.tri(queries, keys) if causal else 1.0)
        along = (dy * y).sum(-1)
        return 0.25 * y * (dy - along[..., None]), along

    scores = ((heads, queries, keys), dtype)
    call = Call("te_softmax_bwd", [scores, dot and ((heads, queries), F32)],
                {"scale_factor": np.float32(0.25), "causal": causal})  # fmt: skip
    name = f"softmax_bwd {dtype}{' causal' if causal else ''}{' dot' if dot else ''}"
    unread = 2 * unseen(heads, queries, keys) * dtype.itemsize if causal else 0
    return Case(name, call, [scores, scores], reference, unread=unread)


def unseen(heads: int, queries: int, keys: int) -> int:
    """Scores that causality hides."""
    return heads * int(np.clip(keys - 1 - np.arange(queries), 0, None).sum())


def rope(tokens, heads, features, pairs, group, dtype=BF16, inverse=False) -> Case:
    def reference(x, frequencies, positions):
        angles = positions.astype(np.float64)[:, None] * frequencies
        turn = np.exp(1j * (-angles if inverse else angles))[:, None]
        alternate = slice(pairs), slice(pairs, 2 * pairs)
        near, far = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if group == "consecutive" else alternate
        y = x.astype(np.float64)
        z = (y[..., near] + 1j * y[..., far]) * turn
        y[..., near], y[..., far] = z.real, z.imag
        return [y]

    operands = [((tokens, heads, features), dtype), ((pairs,), F32), ((tokens,), np.dtype(np.int32))]
    call = Call("te_rope_rotate", [operands[0]], {"group": group, "inverse": inverse})
    return Case(f"rope {group} {dtype} {heads}x{features}", call, operands, reference)


def quantize_stack(rows, cols, parts=3, dtype=BF16, out=E5M2, colsum=False) -> Case:
    def reference(*operands):
        y = np.concatenate([x.astype(np.float32) for x in operands[:parts]], axis=1)
        return y, y.T, largest(np.where(np.abs(y) < TINY, 0, y)), y.sum(0, dtype=np.float64)

    wide = parts * cols
    results = [((rows, wide), out), ((wide, rows), out), ((), F32), colsum and ((wide,), F32)]
    call = Call("te_quantize_stack", results, {}, tile_partials(rows, wide) if colsum else 0)
    operands = [((rows, cols), dtype)] * parts + [False] * (3 - parts) + [((), F32)]
    name = f"quantize_stack {dtype} {out} {parts} parts{'+colsum' if colsum else ''}"
    return Case(name, call, operands, reference, scale=3, exact=not colsum)


def checked_cases():
    for rows, cols in ((129, 136), (1000, 520), (144, 4096), (0, 64)):
        yield quantize_stack(rows, cols)
        yield quantize_stack(rows, cols, parts=2, colsum=True)
    for rows, cols in SIZES:
        yield quantize(rows, cols)
        yield quantize(rows, cols, colsum=True)
        yield amax(rows, cols)
        yield dequantize(rows, cols)
        for kind in ("layernorm", "rmsnorm"):
            yield norm_fwd(rows, cols, kind)
            yield norm_fwd(rows, cols, kind, y_t=True)
            yield norm_bwd(rows, cols, kind)
            yield norm_bwd(rows, cols, kind, residual=True)
        yield norm_fwd(rows, cols, dtype=F32, y_t=True)
        yield activation_fwd(rows, cols)
        yield activation_fwd(rows, cols, "silu_linear")
        yield activation_bwd(rows, cols)
        yield activation_bwd(rows, cols, "silu_linear")
        yield softmax_fwd(2, rows, cols, mask=True, offset=True)
        yield softmax_bwd(2, rows, cols, causal=True)
    for dtype in (F32, F16, BF16):
        for keys in (200, 250, 1024, 4096, 8200, 20000):
            yield softmax_fwd(2, 150, keys, dtype)
            yield softmax_fwd(2, 150, keys, dtype, causal=True, mask=True, offset=True)
            yield softmax_bwd(2, 150, keys, dtype, dot=True)
        for group in ("consecutive", "alternate"):
            for shape in ((1000, 32, 128, 64), (3, 5, 128, 64), (77, 9, 96, 16), (50, 3, 7, 3)):
                yield rope(*shape, group, dtype, inverse=shape[0] < 100)
    rows, cols = 200, 264
    for dtype in (F32, F16, BF16):
        for out in (E4M3, E5M2):
            yield quantize(rows, cols, dtype, out)
            yield quantize(rows, cols, dtype, out, q_t=False)
            yield quantize(rows, cols, dtype, out, q=False)
            yield dequantize(rows, cols, out, dtype)
            yield norm_fwd(rows, cols, dtype=dtype, out=out, y_t=True)
        yield quantize(rows, cols, dtype, q=False, q_t=False, colsum=True)
        yield amax(rows, cols, dtype)
        for out in (F32, F16, BF16):
            yield norm_fwd(rows, cols, dtype=dtype, out=out, gamma=dtype, zero=False)
            yield activation_fwd(rows, cols, dtype=dtype, out=out)
            yield activation_bwd(rows, cols, dtype=dtype, out=out)
            yield activation_bwd(rows, cols, "silu_linear", dtype=dtype, dy_dtype=out)
            yield norm_bwd(rows, cols, dtype=dtype, dy_dtype=out, gamma=out)
        yield norm_bwd(500, 2048, dtype=dtype, gamma=dtype)
        yield norm_bwd(300, 8192, dtype=dtype)
    for name in ("gelu", "silu", "relu", "quick_gelu", "squared_relu", "sigmoid"):
        for suffix in ("", "_linear"):
            yield activation_fwd(rows, 1000, name + suffix, F32, F32)
            yield activation_bwd(rows, 1000, name + suffix, F32, F32)


def timed_cases():
    for rows, cols in TIMED:
        yield quantize(rows, cols, q_t=False)
        yield quantize(rows, cols)
        yield quantize(rows, cols, colsum=True)
        yield quantize_stack(rows, cols // 4)
        yield amax(rows, cols)
        yield dequantize(rows, cols)
        for kind in ("layernorm", "rmsnorm"):
            yield norm_fwd(rows, cols, kind, out=BF16, amax=False)
            yield norm_fwd(rows, cols, kind)
            yield norm_fwd(rows, cols, kind, y_t=True)
            yield norm_bwd(rows, cols, kind)
            yield norm_bwd(rows, cols, kind, residual=True)
        yield activation_fwd(rows, cols, out=BF16)
        for name in ("gelu", "silu_linear"):
            yield activation_fwd(rows, cols, name)
            yield activation_bwd(rows, cols, name)
        yield activation_bwd(rows, cols, "silu_linear", dbias=False)
    for keys in (512, 2048, 8192, 16384):
        for causal in (False, True):
            yield softmax_fwd(2**28 // keys**2, keys, keys, causal=causal)
            yield softmax_bwd(2**28 // keys**2, keys, keys, causal=causal)
    yield softmax_fwd(64, 2048, 2048, mask=True)
    for group in ("consecutive", "alternate"):
        for heads in (32, 8, 1):
            yield rope(2**19 // heads, heads, 128, 64, group)


# --- Checking ----------------------------------------------------------------------------------------------------


def random_operands(case: Case, rng: np.random.Generator) -> list:
    wild = case.exact and not (case.call.target == "te_quantize" and case.call.results[3])

    def draw(i, operand):
        if not operand:
            return None
        shape, dtype = operand
        if not shape:
            return np.float32(23.7 if case.exact else 2.0)
        if dtype.kind in "bi":
            return rng.random(shape) < 0.3 if dtype.kind == "b" else rng.integers(0, 100_000, shape, dtype)
        x = rng.standard_normal(shape, np.float32)
        if "bwd" in case.call.target and len(shape) == 1 and i > 2:
            x = 0.5 + np.abs(x)  # rstd, and mean as well
        if wild and x.size > 100:  # everything that a cast may meet
            x *= np.float32(10.0) ** rng.integers(-12, 12, shape).astype(np.float32) * (rng.random(shape) > 0.01)
            x.flat[rng.integers(0, x.size, 20)] = [1e-39, -1e-39] * 10
            x.flat[rng.integers(0, x.size, 3)] = -np.inf
            if x.size % 2 == 0:
                x.flat[rng.integers(0, x.size, 3)] = np.nan
        with np.errstate(all="ignore"):
            return x.astype(dtype)

    return [draw(i, operand) for i, operand in enumerate(case.operands)]


def cast(x: np.ndarray, scale, dtype) -> np.ndarray:
    """f32 -> the codes of an FP8 format, as all of this project casts."""
    x = np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x).astype(np.float32)
    with np.errstate(all="ignore"):
        product = x * np.float32(scale)
        codes = np.clip(product, -FP8_MAX[dtype], FP8_MAX[dtype]).astype(dtype).view(np.uint8)
    return np.where(np.isnan(product), np.uint8(0x7F), codes)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    norm, error = float(np.linalg.norm(expected)), float(np.linalg.norm(got - expected))
    return error / norm if norm > 0 else error


def compare(case: Case, i: int, got: np.ndarray, expected: np.ndarray, scale) -> str:
    """What is wrong with result i, or an empty text."""
    expected = np.asarray(expected)
    if got.dtype in FP8_MAX:
        codes = cast(expected, scale, got.dtype)
        wrong = int((got.view(np.uint8) != codes).sum())
        if case.exact:
            return f"{wrong} of {codes.size} bytes differ" if wrong else ""
        # Sums in another order move a value over a rounding boundary now and then, never further.
        error = relative_error(got.astype(np.float32), codes.view(got.dtype).astype(np.float32))
        bad = wrong > 5e-3 * codes.size + 2 or (error > 1e-2 and wrong > 2)
        return f"{wrong} of {codes.size} bytes differ, relative L2 error {error:.1e}" if bad else ""
    is_sum = case.call.target == "te_quantize" and i == 3
    got = got.astype(np.float64)
    if case.exact and not is_sum:
        wrong = int((~((got == expected) | (np.isnan(got) & np.isnan(expected)))).sum())
        return f"{wrong} of {got.size} values differ, {got.flat[0]} for {expected.flat[0]} first" if wrong else ""
    # Rounding to the result's dtype; f32 sums and fast exponentials.
    bound = {F32: 2e-5, F16: 6e-4, BF16: 4e-3}[case.call.results[i][1]]
    error = relative_error(got, expected.astype(np.float64))
    return "" if error <= bound else f"relative L2 error {error:.1e} beyond {bound:.0e}"


def check(case: Case, rng: np.random.Generator) -> str:
    """What is wrong with the case's results, or an empty text."""
    operands = random_operands(case, rng)
    got = jax.jit(lambda *operands: case.call(*operands))(*[None if x is None else jnp.asarray(x) for x in operands])
    got = [np.asarray(g) if r else None for g, r in zip(got, case.call.results)]
    with np.errstate(all="ignore"):
        expected = case.reference(*operands)
    scale = operands[case.scale] if case.scale is not None else None
    problems = [
        f"result {i}: {problem}"
        for i, (g, e) in enumerate(zip(got, expected))
        if g is not None and (problem := compare(case, i, g, e, scale))
    ]
    if len(got) > 1 and got[0] is not None and got[1] is not None and got[1].dtype in FP8_MAX:
        y, y_t = got[0].view(np.uint8), got[1].view(np.uint8)
        if not np.array_equal(y_t, np.moveaxis(y, 0, -1)):
            problems.append("the transposed copy differs from the result")
    return "; ".join(problems)


# --- Timing ------------------------------------------------------------------------------------------------------


def timed(call: Callable, operands: list, size: int, budget: float = 0.05) -> float:
    """Seconds a call: one program calls it on several sets of operands, which exceed the L2 cache by far; many of
    these programs are queued at once; the fastest of 4 rounds counts."""
    sets = int(np.clip(6e9 // size, 2, 8))
    copies = [operands] + [[None if x is None else jnp.copy(x) for x in operands] for _ in range(sets - 1)]
    run = jax.jit(lambda copies: [call(*c) for c in copies])
    jax.block_until_ready(run(copies))
    repeats = max(2, int(budget / (sets * size / 3e12)))
    rounds = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(repeats):
            out = run(copies)
        jax.block_until_ready(out)
        rounds.append((time.perf_counter() - start) / (repeats * sets))
    return min(rounds)


def time_case(case: Case) -> float:
    def draw(i, operand):
        if not operand:
            return None
        shape, dtype = operand
        if not shape:
            return jnp.float32(16.0)
        if dtype.kind == "b":
            return jnp.zeros(shape, bool)
        if dtype.kind == "i":
            return jax.random.randint(jax.random.key(i), shape, 0, 10_000)
        normal = jax.random.normal(jax.random.key(i), shape, BF16 if dtype in FP8_MAX else dtype)
        return (jnp.abs(normal) + 0.5 if len(shape) == 1 and i > 2 else normal).astype(dtype)

    return timed(case.call, [draw(i, operand) for i, operand in enumerate(case.operands)], case.bytes())


def report_times(only: str) -> list[dict]:
    """Prints a line a kernel and returns the same figures."""
    x = jax.random.normal(jax.random.key(1), (16384, 16384), BF16)
    moved = 2 * x.nbytes
    copy = moved / timed(lambda x: x + 1, [x], moved) / 1e12  # at XLA's best; its own copy takes half as long again
    print(f"\n{'kernel':<52}{'size':>14}{'us':>9}{'TB/s':>7}{'of copy':>9}")
    print(f"{'copy (x + 1)':<52}{'16384x16384':>14}{moved / copy / 1e6:>9.1f}{copy:>7.2f}{1:>9.2f}", flush=True)
    figures = []
    for case in timed_cases():
        if only in case.name:
            us = 1e6 * time_case(case)
            rate = case.bytes() / us / 1e6
            rows, cols = case.operands[0][0][0], case.operands[0][0][-1]
            print(f"{case.name:<52}{f'{rows}x{cols}':>14}{us:>9.1f}{rate:>7.2f}{rate / copy:>9.2f}", flush=True)
            names = ("kernel", "rows", "cols", "us", "tb_per_s", "of_copy")
            figures.append(dict(zip(names, (case.name, rows, cols, us, rate, rate / copy))))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--no-check", action="store_true", help="only time")
    parser.add_argument("--no-time", action="store_true", help="only check")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kernels whose name holds TEXT")
    options = parser.parse_args()
    device = jax.devices()[0].device_kind
    failures = []
    if not options.no_check:
        rng = np.random.default_rng(0)
        cases = [c for c in checked_cases() if options.only in c.name]
        for case in cases:
            if problem := check(case, rng):
                failures.append(f"{case.name} {case.operands[0][0]}: {problem}")
                print("FAILED", failures[-1], flush=True)
        print(f"{len(cases)} checks on {device}, {len(failures)} failed", flush=True)
    timing = jax.default_backend() == "gpu" and not options.no_time
    figures = report_times(options.only) if timing else []
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": device, "failures": failures, "kernels": figures}, file, indent=1)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
