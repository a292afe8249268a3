"""Generating with layers of a shape in 16 bits: a prompt into a KV cache, and a token of each row half-way through one.

Flax's caches are functional, with one index for all layers, and its queries, keys and values come of one product.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command import OFF, SPEEDUP, Columns, add_contenders, add_timing, chosen, timing
from benchmarks.compare import within
from benchmarks.layer import temp_gib
from benchmarks.peers import CONTENDERS as LAYERS
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import interleaved
from transformer_engine_jax.decisions import platform
from transformer_engine_jax.ops.rope import rope, rope_frequencies
from transformer_engine_jax.testing import relative_error

BF16 = jnp.bfloat16
CONTENDERS = ("flax", "te-bf16", "te-delayed", "te-current")
# Rows, tokens of each in a call, the cache's length.
CALLS = {"prompt": (4, 1024, 2048), "token of 8 rows": (8, 1, 4096), "token of a row": (1, 1, 4096)}
# Of what layers add to the input, in 16 bits and in FP8: two or three times what it is at tiny shapes.
MOST_OFF = {"te-bf16": 0.03, "te-delayed": 0.2, "te-current": 0.2}


class FlaxLayer(nn.Module):
    """A layer as one writes it in Flax to generate with: (x, its keys and values so far, how many) -> (y, these)."""

    shape: Shape

    @nn.compact
    def __call__(self, x: jax.Array, cache: tuple[jax.Array, jax.Array], index: jax.Array):
        s, tokens = self.shape, x.shape[1]

        def norm(name, x):
            kind = nn.RMSNorm if s.rmsnorm else nn.LayerNorm
            return kind(epsilon=1e-6, dtype=BF16, param_dtype=BF16, name=name)(x)

        def product(name, x, features):
            return nn.Dense(features, use_bias=s.biases, dtype=BF16, param_dtype=BF16, name=name)(x)

        heads = product("qkv", norm("norm_1", x), s.kernels["qkv"][1]).reshape(*x.shape[:2], -1, s.head)
        q, k, v = jnp.split(heads, [s.heads, s.heads + s.groups], axis=2)
        if s.rope:
            turned = functools.partial(
                rope, frequencies=rope_frequencies(s.head), positions=index + jnp.arange(tokens), group="alternate"
            )
            q, k = turned(q), turned(k)
        cache = tuple(jax.lax.dynamic_update_slice(old, new, (0, index, 0, 0)) for old, new in zip(cache, (k, v)))
        attend = functools.partial(
            jax.nn.dot_product_attention, implementation="cudnn" if platform() == "gpu" else None
        )
        if tokens == 1:
            y = attend(q, *cache, key_value_seq_lengths=jnp.full(x.shape[0], index + 1, jnp.int32))
        else:  # a prompt, of which the cache holds nothing yet
            y = attend(q, k, v, is_causal=True)
        x = x + product("out", y.reshape(*x.shape[:2], -1), s.hidden)
        y = norm("norm_2", x)
        if s.gated:
            gate, up = jnp.split(product("up", y, 2 * s.mlp), 2, axis=-1)
            y = jax.nn.silu(gate) * up
        else:
            y = jax.nn.gelu(product("up", y, s.mlp))
        return x + product("down", y, s.hidden), cache


def of_flax(params: Mapping[str, Any]) -> dict[str, Any]:
    """Our layer's parameters as FlaxLayer has them."""
    attention, mlp = params["attention"], params["mlp"]
    norms = {new: {k.removeprefix("ln_"): of[k] for k in ("scale", "ln_bias") if k in of}
             for new, of in (("norm_1", attention.get("qkv") or attention["query"]), ("norm_2", mlp))}  # fmt: skip

    def dense(of, prefix=""):
        kernel = of[f"{prefix}kernel"]
        found = {"kernel": kernel.reshape(kernel.shape[0], -1)}
        return found | ({"bias": of[f"{prefix}bias"].reshape(-1)} if f"{prefix}bias" in of else {})

    qkv = [dense(attention[name]) for name in ("qkv", "query", "kv") if name in attention]
    qkv = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=-1), *qkv)
    return {**norms, "qkv": qkv, "out": dense(attention["out"]), "up": dense(mlp, "wi_"), "down": dense(mlp, "wo_")}


class Step:
    """A compiled call of layers over caches in their own buffers; each call is of the same place in them."""

    def __init__(self, name: str, shape: Shape, layers: int, call: tuple[int, int, int]):
        (rows, tokens, length), shape = call, shape._replace(param_dtype="bfloat16")
        layer, context = LAYERS["te-bf16" if name == "flax" else name](shape)
        self.x = jax.random.normal(jax.random.key(0), (rows, tokens, shape.hidden), BF16)
        at = length // 2 if tokens == 1 else 0
        self.index = jnp.int32(at)
        with context():
            make = jax.jit(functools.partial(layer.init, decode=True, deterministic=True))
            whole = jnp.zeros((rows, length, shape.hidden), BF16)
            self.given = [nn.unbox(make(jax.random.key(i), whole)) for i in range(layers)]
        self.cache = [given.pop("cache") for given in self.given]
        if name == "flax":
            plain, self.given = FlaxLayer(shape), [of_flax(given["params"]) for given in self.given]
            kept = [cache["attention"] for cache in self.cache]
            self.cache = [(cache["cached_key"], cache["cached_value"]) for cache in kept]
            run = lambda given, cache, x, index: plain.apply({"params": given}, x, cache, index)
        else:
            self.cache = jax.tree.map(lambda a: jnp.full_like(a, at) if a.ndim == 0 else a, self.cache)

            def run(given, cache, x, _):
                call = functools.partial(layer.apply, decode=True, deterministic=True, mutable=["cache"])
                y, new = call({**given, "cache": cache}, x)
                return y, jax.tree.map(lambda new, old: old if old.ndim == 0 else new, new["cache"], cache)

        def step(given, caches, x, index):
            for i, of_layer in enumerate(given):
                x, caches[i] = run(of_layer, caches[i], x, index)
            return x, caches

        with context():
            began = time.perf_counter()
            self.compiled = jax.jit(step, donate_argnums=1).lower(self.given, self.cache, self.x, self.index).compile()
            self.compile_s = time.perf_counter() - began
        self.temp_gib = temp_gib(self.compiled)

    def __call__(self) -> jax.Array:
        y, self.cache = self.compiled(self.given, self.cache, self.x, self.index)
        return y


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_contenders(command, only="llama")
    add_timing(command)
    command.add_argument("--layers", type=int, default=4)
    command.add_argument("--size", type=int, nargs=3, metavar=("ROWS", "TOKENS", "CACHE"), help="of one call, instead")


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each call and contender: ms, ratio to the first contender, how far off Flax's it is, memory."""
    against, shape = chosen(args.against or CONTENDERS, CONTENDERS), SHAPES[args.config]
    for what, call in ({"as asked": tuple(args.size)} if args.size else CALLS).items():
        steps = {name: Step(name, shape, args.layers, call) for name in against}
        added = {name: np.asarray(step() - step.x, np.float32) for name, step in steps.items()}
        timings = interleaved(steps, **timing(args))
        for name in against:
            ms, spread = timings[name]
            size = dict(zip(("batch", "tokens", "cache"), call))
            row: dict[str, Any] = {
                "config": args.config,
                "layers": args.layers,
                "call": what,
                **size,
                "contender": name,
            }
            row |= {"ms": ms, "spread": spread, "speedup": timings[against[0]].median / ms}
            if name != "flax" and "flax" in added:
                off = relative_error(added[name], added["flax"])
                row["off"] = within(MOST_OFF[name], off, f"{name}, {what}")
            yield row | {"compile_s": steps[name].compile_s, "temp_gib": steps[name].temp_gib}


def line(row: dict) -> str:
    size = f"{row['batch']} x {row['tokens']} of {row['cache']}"
    off = f"  off {row['off']:.0e}" if "off" in row else ""
    return (
        f"{row['config']:>6} {row['call']:<16} {size:<17} {row['contender']:<11} {row['ms']:8.3f} ms  "
        f"x{row['speedup']:.2f}  +-{row['spread']:.1%}  compile {row['compile_s']:.1f} s  "
        f"temp {row['temp_gib']:.3f} GiB{off}"
    )


TITLE = "Generating: a prompt into a KV cache, and a token half-way through one"
COLUMNS: Columns = {
    "config": lambda r: f"{r['layers']} layers of {r['config']}",
    "call": lambda r: f"{r['batch']} x {r['tokens']} into {r['cache']}",
    "layer": lambda r: r["contender"],
    "ms": lambda r: f"{r['ms']:.3g}",
    "spread": lambda r: f"{r['spread']:.0%}",
    **SPEEDUP,
    **{title: lambda r, text=text: text(r) if "off" in r else "" for title, text in OFF.items()},
    "temp GiB": lambda r: f"{r['temp_gib']:.2f}",
}
