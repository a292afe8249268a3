"""One Transformer layer, forward and backward with all gradients, ours against the peers in one process."""

from __future__ import annotations

import functools
import time

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from benchmarks.peers import FlaxLayer
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import interleaved
from transformer_engine_jax import recipe


def our_layer(shape: Shape) -> te_flax.TransformerLayer:
    return te_flax.TransformerLayer(
        hidden_size=shape.hidden,
        mlp_hidden_size=shape.mlp,
        num_attention_heads=shape.heads,
        num_gqa_groups=shape.groups,
        layernorm_type="rmsnorm" if shape.rmsnorm else "layernorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mlp_activations=("silu", "linear") if shape.gated else ("gelu",),
        use_bias=shape.biases,
        self_attn_mask_type="causal",
        enable_relative_embedding=False,
        enable_rotary_pos_emb=shape.rope,
        rotary_pos_emb_group_method="alternate",
        scale_attn_logits=True,
    )


CONTENDERS = {
    "flax": lambda s: (FlaxLayer(s), None),
    "flax-fp8": lambda s: (FlaxLayer(s, functools.partial(nn.Fp8DotGeneralOp)), None),
    "ours-bf16": lambda s: (our_layer(s), None),
    "ours-delayed": lambda s: (our_layer(s), recipe.DelayedScaling()),
    "ours-current": lambda s: (our_layer(s), recipe.Float8CurrentScaling()),
}


class Step:
    """A compiled step: all gradients of a layer under a fixed random cotangent; keeps FP8 state from call to call."""

    def __init__(self, name: str, shape: Shape):
        layer, fp8 = CONTENDERS[name](shape)
        x = jax.random.normal(jax.random.key(0), (shape.batch, shape.seq, shape.hidden), jnp.bfloat16)
        self.x, self.dy = x, jax.random.normal(jax.random.key(1), x.shape, jnp.bfloat16)
        with te.autocast(fp8 is not None, fp8):
            variables = nn.unbox(jax.jit(layer.init)(jax.random.key(2), x))
            self.state, self.params = flax.core.pop(variables, "params")

            def step(params, state, x, dy):
                y, vjp = jax.vjp(lambda p, s, x: layer.apply({"params": p, **s}, x), params, state, x)
                dparams, state, dx = vjp(dy)
                return y, dparams, state, dx

            began = time.perf_counter()
            lowered = jax.jit(step).lower(self.params, self.state, x, self.dy)
            self.trace_s = time.perf_counter() - began
            began = time.perf_counter()
            self.compiled = lowered.compile()
            self.compile_s = time.perf_counter() - began
        memory = self.compiled.memory_analysis()
        self.temp_gib = memory.temp_size_in_bytes / 2**30 if memory else float("nan")

    def __call__(self):
        out = self.compiled(self.params, self.state, self.x, self.dy)
        self.state = out[2]
        return out


def run(config: str, against: list[str], rounds: int) -> list[dict]:
    """One row for each contender: ms, ratio to the first, compile seconds, temp GiB, relative error of dx."""
    shape = SHAPES[config]
    steps = {name: Step(name, shape) for name in against}
    timings = interleaved(steps, rounds=rounds)
    first = timings[against[0]].median
    rows = []
    for name, step in steps.items():
        ms, spread = timings[name]
        rows.append(
            dict(
                config=config,
                contender=name,
                ms=ms,
                spread=spread,
                speedup=first / ms,
                trace_s=step.trace_s,
                compile_s=step.compile_s,
                temp_gib=step.temp_gib,
            )
        )
    return rows
