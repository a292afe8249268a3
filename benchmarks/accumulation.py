"""What accumulation does to an FP8 product: how far it is off from the f32 sum of the same codes, by length and data.

Hopper's tensor cores add FP8 products with fewer bits than f32 has: fast accumulation stays there for the whole sum,
split accumulation moves partial sums to f32. `lost` is the part of the result's size that is gone, in the mean: what
is too small for the last bit of the sum so far is cut off, so that long sums of one sign stop growing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks import gemm
from benchmarks.command import OFF, Columns
from benchmarks.compare import off
from transformer_engine_jax.ops.gemm import gemm as product
from transformer_engine_jax.ops.quantize import E4M3, E5M2, fp8_max, max_abs, quantize

SIZE = 2048  # rows and columns of the result
LENGTHS = (1024, 4096, 16384, 65536)


def _normal(key, shape) -> jax.Array:
    return jax.random.normal(key, shape)


DATA = {
    "zero mean": (_normal, _normal),
    "gelu of normal x heavy-tailed": (
        lambda key, shape: jax.nn.gelu(_normal(key, shape)),
        lambda key, shape: _normal(key, shape) * jnp.exp(1.5 * _normal(jax.random.fold_in(key, 1), shape)),
    ),
    "mean of two standard deviations": tuple([lambda key, shape: _normal(key, shape) + 2] * 2),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="of the sums")
    command.add_argument("--size", type=int, default=SIZE, help="rows and columns of the result")


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each length, data and accumulation, of an E4M3 and an E5M2 operand as in a weight's gradient."""
    for k in args.lengths:
        for data, draw in DATA.items():
            operands, scales = [], []
            for i, dtype in enumerate((E4M3, E5M2)):
                x = draw[i](jax.random.key(i), (args.size, k)).astype(jnp.bfloat16)
                scale = fp8_max(dtype) / max_abs(x)
                operands.append(quantize(x, scale, dtype=dtype).q)
                scales.append(1 / scale)
            exact = gemm.exact(*operands, *scales)
            for name, split in (("split", True), ("fast", False)):
                got = product(*operands, *scales, None, None, None, dtype=jnp.float32, split_accumulator=split).d
                lost = jnp.mean((exact - got) * jnp.sign(exact)) / jnp.mean(jnp.abs(exact))
                row = {"k": k, "size": args.size, "data": data, "contender": name}
                yield row | {"off": off(got, exact), "lost": float(lost)}


def line(row: dict) -> str:
    return f"k {row['k']:>6}  {row['data']:<32} {row['contender']:<6} off {row['off']:.1e}  lost {row['lost']:+.1e}"


TITLE = "Accumulation of FP8 products, against f32"
COLUMNS: Columns = {
    "length": lambda r: str(r["k"]),
    "data": lambda r: r["data"],
    "accumulation": lambda r: r["contender"],
    **OFF,
    "lost": lambda r: f"{r['lost']:.1%}",
}
