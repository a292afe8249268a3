"""A Linen module and its NNX twin with the same weights, and one training step of either."""

from __future__ import annotations

from functools import partial

import steps
from flax import nnx, traverse_util

import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax.quantized import QuantizerState

WITH_STATE = nnx.DiffState(0, te_nnx.TRAINED)


def make(cls, *sizes, **fields):
    """An NNX module under DelayedScaling of the tests' history length."""
    with steps.autocast(steps.DELAYED):
        return cls(*sizes, **fields, rngs=nnx.Rngs(0, dropout=1))


def twins(linen, model: nnx.Module, *args):
    """Variables of the Linen module, with noise on all parameters and FP8 states of a few steps, given to both."""
    variables = steps.init(linen, *args, rec=steps.DELAYED)
    variables = steps.randomized(variables) if variables else variables
    if te_flax.STATE_COLLECTION in variables:
        with steps.autocast(steps.DELAYED):
            variables = steps.settle(linen.apply, variables, *args, steps=2)
    te_nnx.from_linen(model, variables)
    return variables


@partial(nnx.jit, static_argnums=0)
def step(f, model, *args):
    """f(model, *args), and the gradients of its loss for the model, as Linen's variables, and for args."""

    def scored(model, *args):
        out = f(model, *args)
        return steps.loss(out), out

    argnums = (WITH_STATE, *range(1, 1 + len(args)))
    (_, out), grads = nnx.value_and_grad(scored, argnums=argnums, has_aux=True)(model, *args)
    return out, grads


def as_linen(grads) -> dict:
    """The gradient of a model, {"params": .., "_overwrite_with_gradient": ..} as Linen's."""
    out = {}
    for name, kind in (("params", nnx.Param), (te_flax.STATE_COLLECTION, te_nnx.Fp8State)):
        found = nnx.to_flat_state(nnx.state(grads, kind))
        if found:
            value = lambda v: v.states if kind is te_nnx.Fp8State else v.get_value()
            out[name] = traverse_util.unflatten_dict({tuple(map(str, p)): value(v) for p, v in found})
    return out


def call(model, *args):
    return model(*args)


def states(model: nnx.Module) -> dict[str, QuantizerState]:
    """The FP8 state of each tensor of a model, by its path and name: "qkv/gemm_state.x"."""
    return states_of(nnx.state(model))


def states_of(state) -> dict[str, QuantizerState]:
    """The same of the state, or the gradient, of a model."""
    found = nnx.to_flat_state(nnx.state(state, te_nnx.Fp8State))
    each = [("/".join(map(str, path)), variable.states.states()) for path, variable in found]
    return {f"{path}.{name}": one for path, states in each for name, one in states.items()}
