"""A stack of layers, scanned, rematerialised or one after the other: forward, backward and an update in place."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.command import SPEEDUP, Columns, add_contenders, add_timing, chosen, timing
from benchmarks.layer import temp_gib
from benchmarks.peers import CONTENDERS
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import interleaved, without_failures
from transformer_engine_jax import policies
from transformer_engine_jax.flax import STATE_COLLECTION

DEFAULT = ["flax", "te-bf16", "te-delayed", "te-current"]
LAYERS = 4
LEARNING_RATE = 1e-9  # a step that keeps the parameters where they are


class Kind(NamedTuple):
    scanned: bool = True
    remat: bool = False  # whether the backward pass computes layers again, but what the policy saves
    policy: Callable | None = None


KINDS = {
    "scanned": Kind(),
    "scanned-remat": Kind(remat=True),
    "scanned-remat-gemms": Kind(remat=True, policy=policies.gemms_saveable),
    "unrolled": Kind(scanned=False),
}


class Body(nn.Module):
    """A contender's layer, as a scan's body."""

    contender: str
    shape: Shape

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        layer, _ = CONTENDERS[self.contender](self.shape)
        return layer.clone(name="layer", parent=self)(x), None


class Stack(nn.Module):
    contender: str
    shape: Shape
    layers: int
    kind: Kind

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scanned, remat, policy = self.kind
        body = nn.remat(Body, policy=policy, prevent_cse=not scanned) if remat else Body
        if not scanned:
            for i in range(self.layers):
                x, _ = body(self.contender, self.shape, name=f"layer_{i}")(x)
            return x
        scan = nn.scan(
            body,
            variable_axes={"params": 0, STATE_COLLECTION: 0},
            split_rngs={"params": True},
            length=self.layers,
            metadata_params={nn.PARTITION_NAME: None},
        )
        return scan(self.contender, self.shape, name="layers")(x, None)[0]


class Step:
    """A compiled training step that gives its parameters and FP8 state back in their own buffers."""

    def __init__(self, contender: str, shape: Shape, layers: int, kind: Kind):
        stack, (_, context) = Stack(contender, shape, layers, kind), CONTENDERS[contender](shape)
        x = jax.random.normal(jax.random.key(0), (shape.batch, shape.seq, shape.hidden), jnp.bfloat16)
        self.x, self.dy = x, jax.random.normal(jax.random.key(1), x.shape, jnp.bfloat16)

        def step(params, state, x, dy):
            y, vjp = jax.vjp(lambda p, s, x: stack.apply({"params": p, **s}, x), params, state, x)
            dparams, state, dx = vjp(dy)
            return jax.tree.map(lambda p, dp: p - LEARNING_RATE * dp, params, dparams), state, jnp.sum(y), dx

        with context():
            variables = nn.unbox(jax.jit(stack.init)(jax.random.key(2), x))
            self.state, self.params = flax.core.pop(variables, "params")
            began = time.perf_counter()
            lowered = jax.jit(step, donate_argnums=(0, 1)).lower(self.params, self.state, x, self.dy)
            self.compiled = lowered.compile()
            self.compile_s = time.perf_counter() - began
        self.temp_gib = temp_gib(self.compiled)

    def __call__(self):
        self.params, self.state, *rest = self.compiled(self.params, self.state, self.x, self.dy)
        return rest


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_contenders(command)
    add_timing(command)
    command.add_argument("--layers", type=int, default=LAYERS)
    command.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each config, kind of stack and contender: ms, ratio to the first contender, compile time, memory."""
    against, layers = chosen(args.against or DEFAULT, CONTENDERS), args.layers
    for config in args.config:
        for kind in args.kinds:
            makers = {
                name: lambda name=name, kind=kind: Step(name, SHAPES[config], layers, KINDS[kind]) for name in against
            }
            steps, failed = without_failures(makers, peer=lambda name: not name.startswith("te-"))
            timings = interleaved(steps, **timing(args))
            baseline = timings.get(against[0])
            for name in against:
                row = {"config": config, "contender": name, "layers": layers, "kind": kind}
                if name in failed:
                    yield row | {"skipped": failed[name]}
                    continue
                ms, spread = timings[name]
                row |= {"ms": ms, "spread": spread} | ({"speedup": baseline.median / ms} if baseline else {})
                yield row | {"compile_s": steps[name].compile_s, "temp_gib": steps[name].temp_gib}


def line(row: dict) -> str:
    what = f"{row['config']:>6} {row['layers']} {row['kind']:<19} {row['contender']:<14}"
    if "skipped" in row:
        return f"{what} skipped: {row['skipped']}"
    speedup = f"  x{row['speedup']:.2f}" if "speedup" in row else ""
    return (
        f"{what} {row['ms']:8.3f} ms{speedup}  +-{row['spread']:.1%}  "
        f"trace and compile {row['compile_s']:.1f} s  temp {row['temp_gib']:.2f} GiB"
    )


TITLE = "A stack of layers: forward, backward and an update in place"
COLUMNS: Columns = {
    "config": lambda r: f"{r['layers']} of {r['config']}, {r['kind']}",
    "layer": lambda r: r["contender"],
    "ms": lambda r: f"{r['ms']:.3g}",
    "spread": lambda r: f"{r['spread']:.0%}",
    **SPEEDUP,
    "compile s": lambda r: f"{r['compile_s']:.1f}",
    "temp GiB": lambda r: f"{r['temp_gib']:.2f}",
}
