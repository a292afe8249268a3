"""Every memory-bound kernel, forward and backward: the bytes it must move over its time, and over a copy's.

The bytes are those of its operands and results, each once. The copy is the driver's, of the largest size in any table;
it takes turns with each kernel. Before, results are compared with those of the reference in plain JAX: a fast kernel
that is wrong is no result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from benchmarks.command import OFF, Columns, add_timing, timing
from benchmarks.compare import leaf_most_off, within
from benchmarks.timing import Copies, Repeated, interleaved, operand_sets
from transformer_engine_jax.kernel import use_references
from transformer_engine_jax.ops.activation import activation_bwd, activation_fwd
from transformer_engine_jax.ops.dropout import drop
from transformer_engine_jax.ops.layernorm import layernorm_bwd, layernorm_fwd, rmsnorm_bwd, rmsnorm_fwd
from transformer_engine_jax.ops.quantize import E4M3, E5M2, amax, dequantize, quantize, quantize_stack
from transformer_engine_jax.ops.rope import rope, rope_frequencies
from transformer_engine_jax.ops.softmax import softmax_bwd, softmax_fwd
from transformer_engine_jax.ops.transpose import transpose

BF16, F32 = jnp.bfloat16, jnp.float32
HIDDEN = (768, 1000, 1024, 2048, 4096, 4097, 5120, 8192, 12288, 16384)
HEAD = 128
# A result may be this far off: XLA adds in another order than the kernel, so that a rounding to 2 or 3 bits of mantissa
# falls elsewhere for one value in ten thousand. A row or column that is wrong is further off.
MOST_OFF = 2e-3
NORMS = {"layernorm": (layernorm_fwd, layernorm_bwd), "rmsnorm": (rmsnorm_fwd, rmsnorm_bwd)}

Case = tuple[str, Callable, list[tuple[tuple[int, ...], jnp.dtype]]]  # name, call, shapes and dtypes of the operands


def cases(rows: int, hidden: int) -> Iterator[Case]:
    """The kernels of a layer on [rows, hidden], each as the modules call it."""
    x, scalar, fp8 = ((rows, hidden), BF16), ((), F32), ((rows, hidden), E4M3)
    yield "amax", amax, [x]
    yield "quantize", lambda x, s: quantize(x, s, dtype=E4M3), [x, scalar]
    yield "quantize both ways", lambda x, s: quantize(x, s, dtype=E5M2, q_t=True), [x, scalar]
    yield "quantize both ways + dbias", lambda x, s: quantize(x, s, dtype=E5M2, q_t=True, colsum=True), [x, scalar]
    if hidden % 8 == 0:
        stacked = lambda *xs: quantize_stack(*xs, dtype=E5M2, q_t=True, colsum=True)
        yield "quantize q, k, v both ways + dbias", stacked, [x, x, x, scalar]
    yield "dequantize", lambda q, s: dequantize(q, s, dtype=BF16), [fp8, scalar]
    yield "transpose of FP8", transpose, [fp8]
    yield (
        "cast of a weight both ways",
        lambda w, s: quantize(w, s, dtype=E4M3, q_t=True),
        [((rows, hidden), F32), scalar],
    )
    for name, (forward, backward) in NORMS.items():
        parameters = [((hidden,), F32)] * (2 if name == "layernorm" else 1)
        statistics = [((rows,), F32)] * len(parameters)
        yield (
            f"{name} forward",
            lambda *args, forward=forward: forward(*args, None, epsilon=1e-6),
            [x, *parameters],
        )
        yield (
            f"{name} forward -> FP8 both ways",
            lambda *args, forward=forward: forward(*args, epsilon=1e-6, dtype=E4M3, y_t=True, amax=True),
            [x, *parameters, scalar],
        )
        yield (
            f"{name} forward, its amax alone",
            lambda *args, forward=forward: forward(*args, None, epsilon=1e-6, y=False, amax=True),
            [x, *parameters],
        )
        yield (
            f"{name} forward -> FP8 both ways, its statistics known",
            lambda *args, forward=forward: forward(*args, epsilon=1e-6, dtype=E4M3, y_t=True),
            [x, *parameters, scalar, *statistics],
        )
        yield (
            f"{name} forward -> FP8",
            lambda *args, forward=forward: forward(*args, epsilon=1e-6, dtype=E4M3, amax=True),
            [x, *parameters, scalar],
        )
        yield (
            f"{name} -> FP8 for the backward pass, transposed alone",
            lambda *args, forward=forward: forward(*args, epsilon=1e-6, dtype=E4M3, y=False, y_t=True),
            [x, *parameters, scalar, *statistics],
        )
        saved = [x, x, parameters[0], *statistics]
        yield f"{name} backward", lambda *args, backward=backward: backward(*args, None), saved
        yield f"{name} backward + residual", backward, [*saved, x]
    for name, inputs in (("gelu", 1), ("silu_linear", 2)):
        z = ((rows, inputs, hidden), BF16)
        yield f"{name} forward", lambda z, name=name: activation_fwd(z, None, activation=name), [z]
        yield (
            f"{name} forward -> FP8 both ways",
            lambda z, s, name=name: activation_fwd(z, s, activation=name, dtype=E4M3, y_t=True, amax=True),
            [z, scalar],
        )
        yield f"{name} backward", lambda dy, z, name=name: activation_bwd(dy, z, None, activation=name), [x, z]
        yield (
            f"{name} forward, its amax alone",
            lambda z, name=name: activation_fwd(z, None, activation=name, y=False, amax=True),
            [z],
        )
        yield (
            f"{name} backward, its amax alone",
            lambda dy, z, name=name: activation_bwd(dy, z, None, activation=name, dz=False, amax=True),
            [x, z],
        )
        bias = ((inputs, hidden), F32)
        yield f"{name} forward + bias", lambda z, b, name=name: activation_fwd(z, None, b, activation=name), [z, bias]
        yield (
            f"{name} backward + dbias",
            lambda dy, z, b, name=name: activation_bwd(dy, z, None, b, activation=name, dbias=True),
            [x, z, bias],
        )
        for dbias in (False, True):
            yield (
                f"{name} backward -> FP8 both ways{' + dbias' if dbias else ''}",
                lambda dy, z, s, name=name, dbias=dbias: activation_bwd(
                    dy, z, s, activation=name, dtype=E5M2, dz_t=True, amax=True, dbias=dbias
                ),
                [x, z, scalar],
            )
    if hidden % HEAD == 0:
        frequencies = rope_frequencies(HEAD)
        tokens = ((1, rows, hidden // HEAD, HEAD), BF16)
        yield "rope", lambda x: rope(x, frequencies, group="alternate"), [tokens]
    key = jax.random.key(0)
    yield "dropout", lambda x: drop(x, key, 0.1), [x]
    yield "dropout + residual", lambda x, residual: drop(x, key, 0.1, residual=residual), [x, x]
    scores = ((max(rows // hidden, 1), hidden, hidden), BF16)
    yield "softmax forward", lambda x: softmax_fwd(x, None, None), [scores]
    yield "softmax backward", softmax_bwd, [scores, scores]


def _draw(i: int, shape: tuple[int, ...], dtype) -> jax.Array:
    if shape == ():
        return jnp.float32(16.0)
    # Drawn as f32: of JAX's normal numbers in bf16 one in 128 is the largest, as in no tensor of a model, and a kernel
    # that looks for the largest would find one everywhere.
    x = jax.random.normal(jax.random.key(i), shape)
    return (jnp.abs(x) + 0.5 if len(shape) == 1 else x).astype(dtype)  # one axis: gamma, or rstd


def _bytes(call: Callable, operands: list[jax.Array]) -> int:
    results = jax.tree.leaves(jax.eval_shape(call, *operands))
    return sum(x.size * x.dtype.itemsize for x in [*operands, *results])


def random_operands(case: list) -> list[jax.Array]:
    """Operands of these shapes and dtypes."""
    return [_draw(i, shape, dtype) for i, (shape, dtype) in enumerate(case)]


def errors(call: Callable, operands: list[jax.Array]) -> float:
    """How far the kernel is off from its reference in plain JAX, by the result that is furthest off."""
    with use_references(True):
        expected = jax.jit(lambda *operands: call(*operands))(*operands)
    return leaf_most_off(jax.jit(lambda *operands: call(*operands))(*operands), expected)


def program(call: Callable, operands: list[jax.Array]) -> tuple[Repeated, int]:
    """(the call, repeated on copies of these operands, the bytes of one)."""
    size = _bytes(call, operands)
    return Repeated(call, operand_sets(operands, size)), size


def copying(rows: int, hidden: int) -> tuple[Copies, int]:
    """(a copy to be timed, the bytes that it reads and writes)."""
    operands = random_operands([((rows, hidden), BF16)])
    size = _bytes(jnp.copy, operands)
    return Copies([x for (x,) in operand_sets(operands, size, most=4)]), size


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--hidden", type=int, nargs="+", default=list(HIDDEN))
    add("--rows", type=int, default=16384)
    add("--only", default="", metavar="TEXT", help="kernels whose name holds TEXT")
    add("--no-time", action="store_true", help="only compare with the references, for compute-sanitizer")
    add_timing(command)


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each hidden size and kernel whose name holds `--only`; each takes turns with the copy."""
    copied, copy_size = (None, 0) if args.no_time else copying(args.rows, max(*args.hidden, *HIDDEN))
    for size in args.hidden:
        for name, call, shapes in cases(args.rows, size):
            if args.only not in name:
                continue
            operands = random_operands(shapes)
            row = {"kernel": name, "rows": args.rows, "hidden": size}
            row["off"] = within(MOST_OFF, errors(call, operands), f"{name} at {args.rows} x {size}")
            if not args.no_time:
                repeated, moved = program(call, operands)
                times = interleaved({"kernel": repeated, "copy": copied}, **timing(args))
                (ms, spread), (copy_ms, _) = times["kernel"], times["copy"]
                row |= {
                    "ms": ms,
                    "spread": spread,
                    "bytes": moved,
                    "tb_per_s": moved / ms / 1e9,
                    "copy_tb_per_s": copy_size / copy_ms / 1e9,
                    "of_copy": moved / ms / (copy_size / copy_ms),
                }
            yield row


def line(row: dict) -> str:
    what = f"{row['kernel']:<44} {row['rows']:>6} x {row['hidden']:<6} off {row['off']:.0e}"
    if "ms" not in row:
        return what
    time = f"{row['ms'] * 1e3:9.1f} us  +-{row['spread']:.1%}"
    return f"{what} {time:<20} {row['tb_per_s']:6.3f} TB/s  {row['of_copy']:.2f} of a copy's"


TITLE = "Memory-bound kernels"
COLUMNS: Columns = {
    "kernel": lambda r: r["kernel"],
    "size": lambda r: f"{r['rows']} x {r['hidden']}",
    "TB/s": lambda r: f"{r['tb_per_s']:.2f}",
    "of a copy": lambda r: f"{r['of_copy']:.2f}",
    **OFF,
}
