"""One Transformer layer, forward and backward with all gradients, ours against the peers in one process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.command import SPEEDUP, Columns, add_contenders, add_timing, chosen, timing
from benchmarks.floor import COPY, Machine
from benchmarks.peers import CONTENDERS, IN_BF16
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import interleaved, without_failures

DEFAULT = ["flax", "flax-fp8", "te", "nvidia"]


def dropout_key() -> jax.Array:
    """A key, as a program gets it from its caller: nothing is drawn when it is compiled."""
    key = jax.lax.optimization_barrier(jax.random.key_data(jax.random.key(0)))
    return jax.random.wrap_key_data(key)


def gradients(layer: nn.Module):
    """A function (params, state, x, dy) -> (y, gradients of params, next state, gradient of x) of a layer."""

    def step(params, state, x, dy):
        rngs = {"dropout": dropout_key()}
        y, vjp = jax.vjp(lambda p, s, x: layer.apply({"params": p, **s}, x, rngs=rngs), params, state, x)
        dparams, state, dx = vjp(dy)
        return y, dparams, state, dx

    return step


def temp_gib(compiled) -> float:
    """Temporary memory of a compiled step, NaN where the backend does not say."""
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes / 2**30 if memory else float("nan")


class Step:
    """A compiled step: all gradients of a layer under a fixed random cotangent; keeps FP8 state from call to call."""

    def __init__(self, name: str, shape: Shape):
        layer, context = CONTENDERS[name](shape)
        x = jax.random.normal(jax.random.key(0), (shape.batch, shape.seq, shape.hidden), jnp.bfloat16)
        self.x, self.dy = x, jax.random.normal(jax.random.key(1), x.shape, jnp.bfloat16)
        with context():
            keys = {"params": jax.random.key(2), "dropout": jax.random.key(3)}
            variables = nn.unbox(jax.jit(layer.init)(keys, x))
            self.state, self.params = flax.core.pop(variables, "params")
            began = time.perf_counter()
            lowered = jax.jit(gradients(layer)).lower(self.params, self.state, x, self.dy)
            self.trace_s = time.perf_counter() - began
            began = time.perf_counter()
            self.compiled = lowered.compile()
            self.compile_s = time.perf_counter() - began
        self.temp_gib = temp_gib(self.compiled)

    def __call__(self):
        out = self.compiled(self.params, self.state, self.x, self.dy)
        self.state = out[2]
        return out


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_contenders(command)
    add_timing(command)
    add = command.add_argument
    add("--no-floor", action="store_true", help="skip measuring what the layer could take at least")
    add("--copy", type=int, nargs=2, default=list(COPY), help="size of the copy that the floor counts with")


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each config and contender: ms, ratio to the first contender and to the floors, compile time, memory."""
    against = chosen(args.against or DEFAULT, CONTENDERS)
    machine = None if args.no_floor else Machine(tuple(args.copy), args.turn)
    for config in args.config:
        shape = SHAPES[config]
        makers = {name: lambda name=name: Step(name, shape) for name in against}
        steps, failed = without_failures(makers, peer=lambda name: not name.startswith("te-"))
        timings = interleaved(steps, **timing(args))
        compiled = {name: (step.trace_s, step.compile_s, step.temp_gib) for name, step in steps.items()}
        steps.clear()  # their memory goes to what the floor measures
        precisions = {name not in IN_BF16 for name in timings}
        floors = {fp8: machine.floors(shape, fp8) if machine else {} for fp8 in precisions}
        baseline = timings.get(against[0])
        for name in against:
            row = {"config": config, "contender": name}
            if name in failed:
                yield row | {"skipped": failed[name]}
                continue
            ms, spread = timings[name]
            trace_s, compile_s, temp_gib = compiled[name]
            row |= {"ms": ms, "spread": spread, "tflop_per_s": shape.flop / ms / 1e9}
            row |= {"speedup": baseline.median / ms} if baseline else {}
            row |= {"trace_s": trace_s, "compile_s": compile_s, "temp_gib": temp_gib}
            for kind, least in floors[name not in IN_BF16].items():
                row |= {f"{kind}_ms": least.ms, f"of_{kind}": ms / least.ms, kind: least._asdict()}
            yield row


def line(row: dict) -> str:
    what = f"{row['config']:>6} {row['contender']:<14}"
    if "skipped" in row:
        return f"{what} skipped: {row['skipped']}"
    floor = f"  {row['of_floor']:.2f} x floor {row['floor_ms']:.3f} ms" if "floor" in row else ""
    if "sustained_floor" in row:
        floor += f", {row['of_sustained_floor']:.2f} x sustained {row['sustained_floor_ms']:.3f} ms"
    speedup = f"  x{row['speedup']:.2f}" if "speedup" in row else ""
    return (
        f"{what} {row['ms']:8.3f} ms{speedup}  +-{row['spread']:.1%}  {row['tflop_per_s']:6.1f} TFLOP/s"
        f"{floor}  trace {row['trace_s']:.1f} s  compile {row['compile_s']:.1f} s  temp {row['temp_gib']:.2f} GiB"
    )


TITLE = "One Transformer layer, forward and backward with all gradients"
COLUMNS: Columns = {
    "config": lambda r: r["config"],
    "layer": lambda r: r["contender"],
    "ms": lambda r: f"{r['ms']:.3g}",
    "spread": lambda r: f"{r['spread']:.0%}",
    **SPEEDUP,
    "of the floor": lambda r: f"{r['of_floor']:.2f}" if "of_floor" in r else "",
    "of the sustained floor": lambda r: f"{r['of_sustained_floor']:.2f}" if "of_sustained_floor" in r else "",
    "compile s": lambda r: f"{r['compile_s']:.1f}",
    "temp GiB": lambda r: f"{r['temp_gib']:.2f}",
}
