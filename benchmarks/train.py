"""A decoder of a config's layers trained on real bytes: speed, loss curves side by side, and the final losses compared.

Every contender sees the same bytes from the same initial parameters with the same optimizer; only the layer's
precision differs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.command import Columns, add_contenders, chosen
from benchmarks.peers import CONTENDERS
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import Timing
from examples.gpt.data import VOCABULARY, Data, DataError, load
from examples.gpt.training import adamw, cross_entropy

DEFAULT = ["te-bf16", "te-delayed", "te-current"]
RUN_AHEAD = 2  # steps that the host may be ahead of the device, as in any training loop
LAST = 20  # the final loss is the mean over this many steps; a single batch is too noisy


class Options(NamedTuple):
    layers: int = 8
    steps: int = 300
    batch: int | None = None  # None: the config's
    seq: int | None = None
    lr: float | None = None  # None: 0.2 / hidden, 5e-5 for llama; at three times that two runs part by 6 %
    seeds: int = 1
    first_seed: int = 0
    data: str | None = None  # None: the source code of Python's standard library

    @classmethod
    def of(cls, args: argparse.Namespace) -> Options:
        return cls(**{name: getattr(args, name) for name in cls._fields})


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_contenders(command, only="llama")
    add, defaults = command.add_argument, Options()
    for name in ("layers", "steps", "batch", "seq", "seeds", "first_seed"):
        add(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    add("--lr", type=float, default=defaults.lr, help="peak learning rate (default: 0.2 / hidden size)")
    add("--data", metavar="PATH", help="file or folder (default: Python's standard library)")


class Decoder(nn.Module):
    """Next-byte logits f32[B, S, 256] of tokens i32[B, S]."""

    shape: Shape
    layers: int
    contender: str

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.param("embedding", nn.initializers.normal(0.02), (VOCABULARY, self.shape.hidden))
        # A product: the gradient of a lookup is a sum by atomics that meet in 256 rows.
        x = jax.nn.one_hot(tokens, VOCABULARY, dtype=jnp.bfloat16) @ table.astype(jnp.bfloat16)
        for i in range(self.layers):
            layer, _ = CONTENDERS[self.contender](self.shape)
            x = layer.clone(name=f"layer_{i}", parent=self)(x)
        x = nn.RMSNorm(dtype=jnp.float32)(x)
        return nn.Dense(VOCABULARY, use_bias=False)(x)  # 256 outputs cost next to nothing: f32


class Run(NamedTuple):
    losses: list[float]
    times: list[float]  # ms a step, less the first steps
    compile_s: float


def step(model: nn.Module, optimizer: optax.GradientTransformation, **options):
    """Jitted: (variables, moments, windows u8[B, S + 1]) -> (variables, moments, loss), in place of the first two.

    options: of jax.jit.
    """

    def loss(variables, windows):
        tokens = windows.astype(jnp.int32)
        return cross_entropy(model.apply(variables, tokens[:, :-1]), tokens[:, 1:])

    def run(variables, moments, windows):
        value, grads = jax.value_and_grad(loss)(variables, windows)
        updates, moments = optimizer.update(grads["params"], moments, variables["params"])
        return {**grads, "params": optax.apply_updates(variables["params"], updates)}, moments, value

    return jax.jit(run, donate_argnums=(0, 1), **options)


@functools.cache
def initial(model: nn.Module):
    """Jitted: (key, tokens) -> variables; to compile it takes longer than many a training does, once for all seeds."""
    return jax.jit(lambda key, tokens: nn.unbox(model.init(key, tokens)))


def train(name: str, shape: Shape, options: Options, seed: int, data: Data) -> Run:
    model = Decoder(shape, options.layers, name)
    optimizer = adamw(options.lr or 0.2 / shape.hidden, options.steps // 10, options.steps)
    windows = lambda step: jnp.asarray(data.train_batch(seed, step, shape.batch, shape.seq))

    with CONTENDERS[name](shape).context():
        variables = flax.core.unfreeze(initial(model)(jax.random.key(seed), windows(0)[:, :-1].astype(jnp.int32)))
        moments = jax.jit(optimizer.init)(variables["params"])
        began = time.perf_counter()
        compiled = step(model, optimizer).lower(variables, moments, windows(0)).compile()
        compile_s = time.perf_counter() - began
    losses, times, pending = [], [], deque()
    began = time.perf_counter()
    for i in range(options.steps):
        variables, moments, value = compiled(variables, moments, windows(i))
        pending.append(value)
        while len(pending) > (RUN_AHEAD if i + 1 < options.steps else 0):
            losses.append(float(pending.popleft()))
            times.append((time.perf_counter() - began) * 1e3)
            began = time.perf_counter()
    return Run(losses, times[min(10, len(times) // 2) :], compile_s)


def flop(shape: Shape, layers: int) -> int:
    """Of one step: layers and the head, forward and backward."""
    return layers * shape.flop + 6 * shape.tokens * shape.hidden * VOCABULARY


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each seed and contender; `difference` is that of the final loss from the first contender's."""
    against, options, shape = chosen(args.against or DEFAULT, CONTENDERS), Options.of(args), SHAPES[args.config]
    shape = shape._replace(batch=options.batch or shape.batch, seq=options.seq or shape.seq)
    try:
        data = load(options.data, shape.seq)
    except DataError as error:
        raise SystemExit(f"benchmarks: train: {error}") from None
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        baseline = None
        for name in against:
            row = {"config": args.config, "layers": options.layers, "batch": shape.batch, "seq": shape.seq}
            row |= {"steps": options.steps, "seed": seed, "contender": name}
            try:
                losses, times, compile_s = train(name, shape, options, seed, data)
            except ImportError as error:
                yield row | {"skipped": str(error)}
                continue
            final = statistics.fmean(losses[-LAST:])
            baseline = final if name == against[0] else baseline
            ms, spread = Timing.of(times)
            yield row | {
                "ms": ms,
                "spread": spread,
                "tokens_per_s": shape.tokens / ms * 1e3,
                "tflop_per_s": flop(shape, options.layers) / ms / 1e9,
                "compile_s": compile_s,
                "final_loss": final,
                **({"difference": final / baseline - 1} if baseline else {}),
                "unigram_entropy": data.unigram_entropy,
                "losses": [float(x) for x in np.float32(losses)],
            }


def line(row: dict) -> str:
    what = f"{row['config']:>6} seed {row['seed']} {row['contender']:<12}"
    if "skipped" in row:
        return f"{what} skipped: {row['skipped']}"
    difference = f" ({row['difference']:+.2%})" if "difference" in row else ""
    return (
        f"{what} {row['ms']:8.1f} ms a step  +-{row['spread']:.1%}  {row['tokens_per_s']:9.0f} tokens/s  "
        f"{row['tflop_per_s']:6.1f} TFLOP/s  loss {row['losses'][0]:.3f} -> {row['final_loss']:.4f}"
        f"{difference}  compile {row['compile_s']:.0f} s"
    )


TITLE = "Training on real bytes"
COLUMNS: Columns = {
    "config": lambda r: f"{r['layers']} layers of {r['config']}, {r['steps']} steps, seed {r['seed']}",
    "precision": lambda r: r["contender"],
    "tokens/s": lambda r: f"{r['tokens_per_s']:.0f}",
    "TFLOP/s": lambda r: f"{r['tflop_per_s']:.0f}",
    "final loss": lambda r: f"{r['final_loss']:.4f}",
    "difference": lambda r: f"{r['difference']:+.2%}" if "difference" in r else "",
}
