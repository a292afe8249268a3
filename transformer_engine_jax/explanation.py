"""What `explain` returns: rows of kernels, products and collectives, and a table of them that a person can read."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Buffer(NamedTuple):
    """An array that goes into or comes out of a row's call."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Row:
    """One place of the program that calls a kernel, multiplies matrices, or exchanges data between devices."""

    name: str  # of the kernel or primitive
    count: int  # calls a step: trip counts of scans multiplied
    sizes: dict[str, int]  # by the axes of the kernel's rule, groups of axes as one; m, n, k and batch of a product
    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    options: dict[str, Any]  # static attributes: switches, and values other than the default
    runs: str  # what computes it on this platform: "C++", "CUDA", "XLA", "cuDNN", or else what and why
    why: str  # what else is to know: choices that an op made, and conditions
    phase: str  # "forward", "backward" or "recomputed" (in the backward pass of a rematerialised block)
    where: str  # modules and scopes around it
    source: str  # the caller's file and line

    @property
    def bytes(self) -> int:
        """Of operands and results, each once, a call; on one device inside a shard_map."""
        return sum(buffer.bytes for buffer in self.operands + self.results)

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices of these sizes; attention's kernels do more than that."""
        return self.name in ("gemm", "dot_general")

    @property
    def flop(self) -> int:
        """Floating-point operations of a product, a call; 0 of all else."""
        return 2 * prod(self.sizes.values()) if self.is_product else 0

    @property
    def in_fp8(self) -> bool:
        """Whether it is a product of FP8."""
        operands = self.operands[:2] if self.is_product else ()
        fp8 = lambda dtype: jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 8
        return bool(operands) and all(fp8(b.dtype) for b in operands) and not self.why.startswith("in bf16")

    @property
    def dtypes(self) -> str:
        """`a=e4m3 b=e5m2 -> d=bf16`, scalars left out."""
        sides = (" ".join(f"{b.name}={_short(b.dtype)}" for b in s if b.shape) for s in (self.operands, self.results))
        return " -> ".join(sides)


class Collective(NamedTuple):
    """A kind of collective in the compiled program; one inside a loop counts once."""

    name: str
    count: int
    bytes: int  # of all results


class Product(NamedTuple):
    """A kind of te_gemm in the compiled program; one inside a loop counts once."""

    name: str  # "m=4096 n=4096 k=16384 f8_e4m3fn x f8_e5m2 -> f32, split accumulation"
    count: int
    algorithm: str  # one of cuBLASLt's, or our kernel, and how long it took when it was chosen


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiled program of one device needs, and on a GPU how its products run."""

    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    collectives: tuple[Collective, ...]
    products: tuple[Product, ...]

    def __str__(self) -> str:
        sizes = f"compiled: {_size(self.temp_bytes)} temp, {_size(self.argument_bytes)} arguments, "
        lines = [sizes + f"{_size(self.output_bytes)} results"]
        lines += [f"  {c.count} x {c.name}, {_size(c.bytes)} of results" for c in self.collectives]
        lines += [] if self.collectives else ["  no collectives"]
        lines += [f"  {p.count} x {p.name} by {p.algorithm}" for p in self.products]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found; `str` gives a table, in which places that differ in `where` alone share a line."""

    platform: str
    rows: tuple[Row, ...]
    compiled: Compiled | None

    def __str__(self) -> str:
        places: dict[tuple[str, ...], list[Row]] = collections.defaultdict(list)
        for row in self.rows:
            sizes = " ".join(f"{k}={v}" for k, v in row.sizes.items())
            runs, _, why_there = row.runs.partition(": ")
            how = "; ".join(filter(None, (why_there, _options(row.options), row.why)))
            places[row.phase, row.name, sizes, row.dtypes, _size(row.bytes), runs, how].append(row)
        lines = [("calls", "phase", "kernel", "sizes", "dtypes", "bytes/call", "runs as", "where", "how")]
        for (*key, how), rows in places.items():
            more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            where = rows[0].where or rows[0].source
            lines.append((str(sum(row.count for row in rows)), *key, where + more, how))
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines]
        table = table if self.rows else ["no kernels, products or collectives"]
        totals = [_totals(self.rows)] if self.rows else []
        return "\n".join([f"on {self.platform}:", *table, *totals, *([str(self.compiled)] if self.compiled else [])])


def _totals(rows: Sequence[Row]) -> str:
    """`count` calls of each row: a step, if all branches of a cond ran and while loops turned once."""
    products = [row for row in rows if row.is_product]
    said = []
    for what, chosen in (
        ("in FP8", [r for r in products if r.in_fp8]),
        ("in other precisions", [r for r in products if not r.in_fp8]),
    ):
        flop = sum(row.count * row.flop for row in chosen)
        said.append(f"{sum(row.count for row in chosen)} products {what} of {_scaled(flop, 1000, ' kMGTP')}FLOP")
    others = [row for row in rows if not row.is_product]
    moved = _size(sum(row.count * row.bytes for row in others))
    loops = " (each branch, and one turn of while loops)" if any(_CONDITIONAL.search(row.why) for row in rows) else ""
    return f"in all: {', '.join(said)}, {sum(row.count for row in others)} other calls that move {moved}{loops}"


_CONDITIONAL = re.compile("in each turn of a while loop|in branch [0-9]+ of a cond")


def _options(options: dict[str, Any]) -> str:
    """Switches by their names where they are on, and values."""
    said = lambda k, v: k if v is True else f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
    return " ".join(said(k, v) for k, v in options.items() if v is not False)


def _short(dtype: np.dtype) -> str:
    """bf16 of bfloat16, e4m3 of float8_e4m3fn, i32 of int32."""
    name = re.sub(r"^float8_(e\dm\d).*", r"\1", np.dtype(dtype).name)
    return re.sub(r"^(bf|f|u|i)(?:loat|int|nt)(\d+)$", r"\1\2", name)


def _scaled(number: float, base: int, prefixes: str) -> str:
    """1.61 G of 1610612736: with the largest of the prefixes that leaves 1 or more."""
    power = 0
    while number >= base and power < len(prefixes) - 1:
        number, power = number / base, power + 1
    return f"{number:.0f} " if power == 0 else f"{number:.1f} {prefixes[power]}"


def _size(bytes_: int) -> str:
    scaled = _scaled(bytes_, 1024, " KMGTP")
    return scaled + ("B" if scaled[-1] == " " else "iB")
