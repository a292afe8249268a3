"""Layers on virtual CPU devices: a step of one, and what the devices exchange in it."""

import math
import re
from collections import Counter
from functools import partial

import jax
import numpy as np
import steps
from flax import nnx
from jax.sharding import AxisType, Mesh

import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax.flax import TransformerLayer

FusedLayer = partial(
    TransformerLayer, hidden_size=64, mlp_hidden_size=96, num_attention_heads=4, hidden_dropout=0.0,
    attention_dropout=0.0, enable_relative_embedding=False,
)  # fmt: skip
LLAMA = dict(num_gqa_groups=2, mlp_activations=("silu", "linear"), layernorm_type="rmsnorm", enable_rotary_pos_emb=True)


def cpu_mesh(shape, names, explicit: bool = False) -> Mesh:
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = np.array(jax.devices("cpu")[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def collectives(step, *args) -> Counter:
    """(what is exchanged, how) of the compiled step, of what is not a scalar, as often as it is."""
    text = jax.jit(step).lower(*args).compile().as_text()
    found = re.findall(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(", text)
    return Counter((array, how) for arrays, how in found for array in re.findall(r"\w+\[\d[\d,]*\]", arrays))


def layer_step(flavour: str, fields: dict, rec, x):
    """(a step of a FusedLayer, its variables)."""
    if flavour == "linen":
        layer = FusedLayer(**fields)
        boxed = steps.init(layer, x, rec=rec or steps.DELAYED, unbox=False)

        def step(variables, x, dy):
            y, vjp = jax.vjp(layer.apply, variables, x)
            return y, vjp(dy)

        return step, boxed
    with steps.autocast(rec or steps.DELAYED):
        fields = {**FusedLayer.keywords, **fields}
        graph, state = nnx.split(te_nnx.TransformerLayer(**fields, rngs=nnx.Rngs(0)))

    def step(state, x, dy):
        y, vjp = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
        return y, vjp(dy)

    return step, state
