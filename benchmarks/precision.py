"""Where FP8 pays: a dense op of each size with all its gradients, in FP8 and in bf16, casts and states included.

What a layer decides by (transformer_engine_jax/precision.py) was fitted to this table.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import transformer_engine_jax as te
from benchmarks.command import SPEEDUP, Columns, add_timing, timing
from benchmarks.timing import Repeated, interleaved, operand_sets
from transformer_engine_jax import recipe
from transformer_engine_jax.quantized import GemmState
from transformer_engine_jax.quantizers import gemm_quantizers

TOKENS = (256, 1024, 4096, 8192, 16384)
KERNELS = ("float32", "bfloat16")
FEATURES = (
    (256, 256),
    (512, 512),
    (768, 768),
    (768, 3072),
    (1024, 1024),
    (1024, 4096),
    (2048, 2048),
    (4096, 4096),
    (4096, 14336),
)


def gradients(fp8: recipe.Recipe | None) -> Callable:
    """(x, kernel, dy, state) -> an entry of all that a training step asks of a dense op: y and gradients of all but dy.

    An entry, because each array that a program returns costs the host 10 us, more than small products take.
    """

    def step(x, kernel, dy, state):
        def dense(x, kernel, state):
            if fp8 is None:
                return te.dense(x, kernel, by_kernels=True)  # as fused layers do: cuBLASLt's, never slower than XLA's
            return te.dense(x, kernel, quantizers=gemm_quantizers(state, fp8))

        y, vjp = jax.vjp(dense, x, kernel, state)
        results = jax.lax.optimization_barrier(jax.tree.leaves((y, vjp(dy))))
        return jnp.stack([result.ravel()[0].astype(jnp.float32) for result in results if result.size])

    return step


CONTENDERS = {"fp8": gradients(recipe.DelayedScaling()), "bf16": gradients(None)}


def measure(tokens: int, k: int, n: int, kernel: str, **turns) -> dict[str, float]:
    """Milliseconds of each contender, with a kernel of this dtype."""
    x, weight, dy = (
        jax.random.normal(jax.random.key(i), shape, dtype)
        for i, (shape, dtype) in enumerate([((tokens, k), jnp.bfloat16), ((k, n), kernel), ((tokens, n), jnp.bfloat16)])
    )
    operands, tree = jax.tree.flatten((x, weight, dy, GemmState.create()))
    size = 2 * sum(a.nbytes for a in operands)
    sets = operand_sets(operands, size, most=24)
    programs = {
        name: Repeated(lambda *leaves, step=step: step(*jax.tree.unflatten(tree, leaves)), sets)
        for name, step in CONTENDERS.items()
    }
    return {name: times.median for name, times in interleaved(programs, **turns).items()}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    command.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="their dtypes")
    add_timing(command)


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each number of tokens, dtype and size of a kernel, both ways round where it is not square."""
    sizes = dict.fromkeys(pair for a, b in FEATURES for pair in ((a, b), (b, a)))
    for m, kernel in itertools.product(args.tokens, args.kernels):
        for k, n in sizes:
            ms = measure(m, k, n, kernel, **timing(args))
            yield {
                "m": m,
                "n": n,
                "k": k,
                "kernel": kernel,
                "fp8_ms": ms["fp8"],
                "bf16_ms": ms["bf16"],
                "speedup": ms["bf16"] / ms["fp8"],
            }


def line(row: dict) -> str:
    return (
        f"{row['m']:>6} x {row['n']:>6} x {row['k']:>6} {row['kernel']:<8}  fp8 {row['fp8_ms']:8.4f} ms  "
        f"bf16 {row['bf16_ms']:8.4f} ms  x{row['speedup']:.2f}"
    )


TITLE = "A dense op with all its gradients, casts and states included"
COLUMNS: Columns = {
    "m x n x k": lambda r: f"{r['m']} x {r['n']} x {r['k']}",
    "kernel": lambda r: r["kernel"],
    "FP8 ms": lambda r: f"{r['fp8_ms']:.3g}",
    "bf16 ms": lambda r: f"{r['bf16_ms']:.3g}",
    **SPEEDUP,
}
