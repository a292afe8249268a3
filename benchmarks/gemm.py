"""Every matrix product of a layer: ours in FP8 (fast and split accumulation) and bf16, and XLA's, algorithms timed.

An XLA contender is a plain dot_general of the same operands, for which XLA times cuBLASLt's algorithms by itself. How
far a result is off is said of the operands as they are, quantized: by rounding it to bf16, and by accumulation.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp

from benchmarks.command import OFF, RATE, Columns, add_contenders, add_timing, chosen, timing
from benchmarks.compare import off, within
from benchmarks.shapes import SHAPES, Product, products
from benchmarks.timing import Repeated, interleaved, operand_sets, without_failures
from transformer_engine_jax.ops.gemm import gemm
from transformer_engine_jax.ops.quantize import E4M3, E5M2, quantize

MOST_OFF = 1e-2  # of FP8 with fast accumulation, over 16384 terms of random signs: 3e-3
SCALE = 64.0  # of normal data into FP8: within the range of both formats


def _ours(split: bool) -> Callable:
    def call(dtype, a, b, *scales):
        a_scale, b_scale = scales or (None, None)
        return gemm(a, b, a_scale, b_scale, None, None, None, dtype=dtype, split_accumulator=split).d

    return call


def _xla(dtype, a, b, *scales):
    # The form that XLA's own FP8 rewriting recognises: operands dequantized, multiplied in bf16.
    if scales:
        a, b = (x.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16) for x, scale in zip((a, b), scales))
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


CONTENDERS = {
    "fp8-fast": _ours(split=False),
    "fp8-split": _ours(split=True),
    "fp8-xla": _xla,
    "bf16": _ours(split=True),
    "bf16-xla": _xla,
}


def precision(contender: str) -> str:
    return contender.split("-")[0]


def _operands(product: Product, fp8: bool) -> list[jax.Array]:
    """a and b of random normal data; in FP8 also their scales, and gradients in E5M2."""
    made = []
    for i, (name, rows) in enumerate((("a", product.m), ("b", product.n))):
        x = jax.random.normal(jax.random.key(i), (rows, product.k), jnp.bfloat16)
        if fp8:
            dtype = E5M2 if product.of_gradient == name else E4M3
            x = quantize(x, jnp.float32(SCALE), dtype=dtype).q
        made.append(x)
    return made + [jnp.float32(1 / SCALE)] * 2 if fp8 else made


def exact(a, b, *scales) -> jax.Array:
    """The product with f32 sums; bf16 holds FP8 operands exactly. Not to be jitted: XLA would see through the casts,
    and add in FP8's way."""
    a, b = (x.astype(jnp.bfloat16) for x in (a, b))
    product = jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return product * (scales[0] * scales[1]) if scales else product


def errors(product: Product, against: Iterable[str]) -> dict[str, float]:
    """How far each contender is off from `exact`."""
    found, dtype = {}, jnp.dtype(product.dtype)
    for kind in {precision(name) for name in against}:
        operands = _operands(product, kind == "fp8")
        expected = exact(*operands)
        for name in against:
            if precision(name) == kind:
                got = jax.jit(functools.partial(CONTENDERS[name], dtype))(*operands)
                found[name] = within(MOST_OFF, off(got, expected), f"{name}, {product}")
    return found


def programs(product: Product, against: list[str]) -> tuple[dict[str, Repeated], dict[str, str]]:
    """(what is to be timed, why others can't be)."""
    dtype = jnp.dtype(product.dtype)
    sets = {}
    for kind in {precision(name) for name in against}:
        operands = _operands(product, kind == "fp8")
        size = sum(x.nbytes for x in operands) + product.m * product.n * dtype.itemsize
        sets[kind] = operand_sets(operands, size, most=8)
    makers = {
        name: lambda name=name: Repeated(lambda *xs: CONTENDERS[name](dtype, *xs), sets[precision(name)])
        for name in against
    }
    return without_failures(makers, peer=lambda name: name.endswith("-xla"))


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_contenders(command)
    add_timing(command)


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each product of each config and each contender."""
    against = chosen(args.against or CONTENDERS, CONTENDERS)
    for config in args.config:
        for product in products(SHAPES[config]):
            ready, failed = programs(product, against)
            times = interleaved(ready, **timing(args))
            ready.clear()  # its memory goes to what is compared
            far = errors(product, times)
            best = {}
            for name, (ms, _) in times.items():
                best[precision(name)] = min(ms, best.get(precision(name), ms))
            case = {"config": config, "product": product.name, "m": product.m, "n": product.n, "k": product.k}
            for name, (ms, spread) in times.items():
                yield case | {
                    "contender": name,
                    "ms": ms,
                    "spread": spread,
                    "tflop_per_s": product.flop / ms / 1e9,
                    "of_best": best[precision(name)] / ms,
                    "off": far[name],
                }
            for name, why in failed.items():
                yield case | {"contender": name, "skipped": why}


def line(row: dict) -> str:
    what = (
        f"{row['config']:>6} {row['product']:<10} {row['m']:>6} x {row['n']:>6} x {row['k']:>6}  {row['contender']:<10}"
    )
    if "skipped" in row:
        return f"{what} skipped: {row['skipped']}"
    return (
        f"{what} {row['ms']:9.4f} ms  +-{row['spread']:.1%}  {row['tflop_per_s']:7.1f} TFLOP/s  "
        f"{row['of_best']:.2f} of the best in {precision(row['contender'])}  off {row['off']:.1e}"
    )


TITLE = "Matrix products"
COLUMNS: Columns = {
    "config": lambda r: r["config"],
    "product": lambda r: r["product"],
    "m x n x k": lambda r: f"{r['m']} x {r['n']} x {r['k']}",
    "by": lambda r: r["contender"],
    **RATE,
    **OFF,
}
