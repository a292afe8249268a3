"""A stack of layers, scanned and one after the other: forward, backward and an update of the parameters in place."""

from __future__ import annotations

import time
from collections.abc import Iterator

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.layer import temp_gib
from benchmarks.peers import CONTENDERS
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import interleaved, without_failures
from transformer_engine_jax.flax import STATE_COLLECTION

DEFAULT = ["flax", "te-bf16", "te-delayed", "te-current"]
LAYERS = 4
LEARNING_RATE = 1e-9  # a step that keeps the parameters where they are


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
    scanned: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.scanned:
            for i in range(self.layers):
                x, _ = Body(self.contender, self.shape, name=f"layer_{i}")(x)
            return x
        scan = nn.scan(
            Body,
            variable_axes={"params": 0, STATE_COLLECTION: 0},
            split_rngs={"params": True},
            length=self.layers,
            metadata_params={nn.PARTITION_NAME: None},
        )
        return scan(self.contender, self.shape, name="layers")(x, None)[0]


class Step:
    """A compiled training step that gives its parameters and FP8 state back in their own buffers."""

    def __init__(self, contender: str, shape: Shape, layers: int, scanned: bool):
        stack, (_, context) = Stack(contender, shape, layers, scanned), CONTENDERS[contender](shape)
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


def run(configs: list[str], against: list[str], layers: int = LAYERS, **timing) -> Iterator[dict]:
    """A row for each config, contender and kind of stack: ms, ratio to the first contender, compile time, memory."""
    for config in configs:
        for scanned in (True, False):
            makers = {
                name: lambda name=name, scanned=scanned: Step(name, SHAPES[config], layers, scanned) for name in against
            }
            steps, failed = without_failures(makers, peer=lambda name: not name.startswith("te-"))
            timings = interleaved(steps, **timing)
            first = next((timings[name].median for name in against if name in timings), None)
            for name in against:
                row = {"config": config, "contender": name, "layers": layers, "scanned": scanned}
                if name in failed:
                    yield row | {"skipped": failed[name]}
                    continue
                ms, spread = timings[name]
                row |= {"ms": ms, "spread": spread, "speedup": first / ms}
                yield row | {"compile_s": steps[name].compile_s, "temp_gib": steps[name].temp_gib}


def line(row: dict) -> str:
    what = f"{row['config']:>6} {row['layers']} {'scanned ' if row['scanned'] else 'unrolled'} {row['contender']:<14}"
    if "skipped" in row:
        return f"{what} skipped: {row['skipped']}"
    return (
        f"{what} {row['ms']:8.3f} ms  x{row['speedup']:.2f}  +-{row['spread']:.1%}  "
        f"trace and compile {row['compile_s']:.1f} s  temp {row['temp_gib']:.2f} GiB"
    )
