"""Where FP8 pays: a training step of a dense op of each size, in FP8 and in bf16, casts and states included.

What a layer decides by (transformer_engine_jax/precision.py) was fitted to this table, and to steps of layers
(NOTES.md). The step is one of AdamW, behind a clip by norm: what a gradient in f32 costs shows where it is read.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax

import transformer_engine_jax as te
from benchmarks.command import Columns, add_timing, timing
from benchmarks.timing import Repeated, interleaved, operand_sets
from transformer_engine_jax import recipe
from transformer_engine_jax.quantized import GemmState
from transformer_engine_jax.quantizers import gemm_quantizers

TOKENS = (256, 512, 1024, 4096, 8192)
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


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
RECIPES = {"bf16": None, "delayed": recipe.DelayedScaling(), "current": recipe.Float8CurrentScaling()}


def step(fp8: recipe.Recipe | None) -> Callable:
    """(x, kernel, dy, state, moments) -> an entry of all that a training step makes of a dense op.

    An entry, because each array that a program returns costs the host 10 us, more than small products take.
    """

    def run(x, kernel, dy, state, moments):
        def dense(x, kernel, state):
            if fp8 is None:
                return te.dense(x, kernel, by_kernels=True)  # as fused layers do: cuBLASLt's, never slower than XLA's
            return te.dense(x, kernel, quantizers=gemm_quantizers(state, fp8))

        y, vjp = jax.vjp(dense, x, kernel, state)
        dx, dkernel, state = vjp(dy)
        updates, moments = OPTIMIZER.update(dkernel, moments, kernel)
        results = (y, dx, state, optax.apply_updates(kernel, updates), moments)
        results = jax.lax.optimization_barrier(jax.tree.leaves(results))
        return jnp.stack([result.ravel()[0].astype(jnp.float32) for result in results if result.size])

    return run


def measure(tokens: int, k: int, n: int, kernel: str, **turns) -> dict[str, float]:
    """Milliseconds of each contender, with a kernel of this dtype."""
    x, weight, dy = (
        jax.random.normal(jax.random.key(i), shape, dtype)
        for i, (shape, dtype) in enumerate([((tokens, k), jnp.bfloat16), ((k, n), kernel), ((tokens, n), jnp.bfloat16)])
    )
    operands, tree = jax.tree.flatten((x, weight, dy, GemmState.create(), OPTIMIZER.init(weight)))
    sets = operand_sets(operands, 2 * sum(a.nbytes for a in operands), most=12)
    programs = {
        name: Repeated(lambda *leaves, run=step(fp8): run(*jax.tree.unflatten(tree, leaves)), sets)
        for name, fp8 in RECIPES.items()
    }
    return {name: times.median for name, times in interleaved(programs, **turns).items()}


def _sizes(text: str) -> tuple[int, int]:
    k, n = text.split("x")
    return int(k), int(n)


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--tokens", type=int, nargs="+", default=list(TOKENS))
    add("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="their dtypes")
    add("--features", type=_sizes, nargs="+", default=list(FEATURES), metavar="KxN", help="their sizes")
    add_timing(command)


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each number of tokens, dtype and size of a kernel, both ways round where it is not square."""
    sizes = dict.fromkeys(pair for a, b in args.features for pair in ((a, b), (b, a)))
    for m, kernel in itertools.product(args.tokens, args.kernels):
        for k, n in sizes:
            ms = measure(m, k, n, kernel, **timing(args))
            yield {"m": m, "n": n, "k": k, "kernel": kernel, **{f"{name}_ms": ms[name] for name in RECIPES}}


def line(row: dict) -> str:
    times = "  ".join(f"{name} {row[f'{name}_ms']:8.4f} ms" for name in RECIPES)
    return f"{row['m']:>6} x {row['n']:>6} x {row['k']:>6} {row['kernel']:<8}  {times}"


TITLE = "A training step of a dense op, casts and states included"
COLUMNS: Columns = {
    "m x n x k": lambda r: f"{r['m']} x {r['n']} x {r['k']}",
    "kernel": lambda r: r["kernel"],
    **{f"{name} ms": lambda r, name=name: f"{r[f'{name}_ms']:.3g}" for name in RECIPES},
    "delayed's speed-up": lambda r: f"{r['bf16_ms'] / r['delayed_ms']:.2f}",
    "current's": lambda r: f"{r['bf16_ms'] / r['current_ms']:.2f}",
}
