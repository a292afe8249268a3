"""Gradients of kernels summed over microbatches in buffers, by NNX modules, as JAX would sum them."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
import twins
from emulated import F32
from flax import nnx
from steps import CURRENT, DELAYED

import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import testing

(XS,) = (jnp.asarray(a) for a in emulated.normal(0, (3, 2, 8, 32)))

LORA = dict(enable_low_rank_adaptation=True, low_rank_adaptation_dim=4)
LAYER = partial(
    te_nnx.TransformerLayer, hidden_size=32, mlp_hidden_size=64, num_attention_heads=2, hidden_dropout=0.0,
    attention_dropout=0.0,
)  # fmt: skip


class Stack(nnx.Module):
    """Two layers on a leading axis, rematerialised, and a product that is not ours."""

    def __init__(self, rngs):
        make = lambda rngs: te_nnx.LayerNormMLP(32, intermediate_dim=64, rngs=rngs)
        self.layers = nnx.split_rngs(splits=2)(nnx.vmap(make))(rngs)
        self.not_ours = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        layer = nnx.remat(lambda layer, x: x + layer(x)[0])
        return self.not_ours(nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x))


class Shared(nnx.Module):
    def __init__(self, rngs):
        self.layer = te_nnx.DenseGeneral(32, 32, rngs=rngs)

    def __call__(self, x):
        return self.layer(jnp.sin(self.layer(x)))


class Tied(nnx.Module):
    """Two products of one kernel, which has a third name and use."""

    def __init__(self, rngs):
        self.first, self.second = (te_nnx.DenseGeneral(32, 32, rngs=rngs) for _ in range(2))
        self.second.kernel = self.first.kernel
        self.a_kernel = self.first.kernel

    def __call__(self, x):
        return self.second(jnp.sin(self.first(x))) + self.a_kernel[2]


class Penalised(nnx.Module):
    """As a loss with a penalty of a kernel's norm."""

    def __init__(self, rngs):
        self.layer = te_nnx.DenseGeneral(32, 32, rngs=rngs)

    def __call__(self, x):
        return self.layer(x) + jnp.sum(self.layer.kernel[...] ** 2)


# name -> (what makes it, how many kernels have buffers)
MODELS = {
    "dense, LoRA": (partial(te_nnx.DenseGeneral, 32, (2, 24), **LORA), 1),
    "dense, split": (partial(te_nnx.DenseGeneral, 32, 48, parameters_split=("a", "b")), 2),
    "layernorm_dense": (partial(te_nnx.LayerNormDenseGeneral, 32, 24), 1),
    "mlp, LoRA": (partial(te_nnx.LayerNormMLP, 32, intermediate_dim=64, use_bias=True, **LORA), 2),
    "layer": (LAYER, 4),
    "layer, grouped": (partial(LAYER, num_gqa_groups=1, use_bias=True), 5),
    "stacked": (Stack, 2),
    "used twice": (Shared, 1),
    "tied": (Tied, 1),
    "penalised": (Penalised, 1),
}


@partial(nnx.jit, static_argnames="accumulates")
def train(model, xs, accumulates: bool):
    """The sums of gradients over the microbatches; the model keeps the state after them."""
    if accumulates:
        te_nnx.main_grads(model)

    def microbatch(carry, x):
        model, sums = carry
        loss = lambda model: jnp.mean((jax.tree.leaves(model(x))[0] - 0.3) ** 2)
        grads = te_nnx.update_state(model, nnx.grad(loss, argnums=twins.WITH_STATE)(model))
        return model, jax.tree.map(jnp.add, sums, grads)

    zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    model, sums = nnx.scan(microbatch, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)((model, zeros), xs)
    return te_nnx.take_main_grads(model, sums), model


@pytest.mark.parametrize("rec", [DELAYED, CURRENT, None], ids=["delayed", "current", "off"])
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_separate_gradients(name, rec):
    make, _ = MODELS[name]
    with steps.autocast(rec):
        got, of_got = train(twins.make(make), XS, accumulates=True)
        expected, of_expected = train(twins.make(make), XS, accumulates=False)
    assert jax.tree.structure(nnx.state(of_got)) == jax.tree.structure(nnx.state(of_expected))
    testing.assert_close(nnx.to_pure_dict(got), nnx.to_pure_dict(expected), F32)
    testing.assert_close(twins.states(of_got), twins.states(of_expected), 2.0**-20)
    kernels = [v for path, v in nnx.to_flat_state(expected) if "kernel" in path[-1] and "lora_a" not in path[-1]]
    assert kernels and all(np.asarray(v.get_value()).any() for v in kernels)


@pytest.mark.parametrize("name", MODELS)
def test_kernels_get_buffers_and_lose_them(name):
    make, count = MODELS[name]
    model = twins.make(make)
    before = nnx.state(model)
    te_nnx.main_grads(model)
    buffers = nnx.to_flat_state(nnx.state(model, te_nnx.MainGrad))
    params = dict(nnx.to_flat_state(before))
    assert len(buffers) == count
    for path, buffer in buffers:
        value = buffer.get_value()
        kernel = params.get((*path[:-1], path[-1].removesuffix("_main_grad")), params.get(("a_kernel",)))
        assert value.shape == kernel.get_value().shape and value.dtype == jnp.float32 and not value.any()
    te_nnx.take_main_grads(model, nnx.state(model, nnx.Param))
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(before)


def test_buffers_are_f32_and_have_their_kernels_axes():
    fields = dict(dtype=jnp.bfloat16, kernel_axes=("embed", "mlp"))
    model = twins.make(te_nnx.DenseGeneral, 32, 24, **fields)
    te_nnx.main_grads(model)
    assert model.kernel_main_grad.dtype == jnp.float32
    assert model.kernel_main_grad.get_metadata("out_sharding") == ("embed", "mlp")


def test_gradients_without_the_buffers_say_what_to_do():
    model = twins.make(MODELS["layernorm_dense"][0])
    te_nnx.main_grads(model)
    grads = nnx.grad(lambda model: jnp.sum(model(XS[0])[0]))(model)
    with pytest.raises(ValueError, match="te_nnx.TRAINED"):
        te_nnx.update_state(model, grads)


def test_gradients_without_a_kernel_that_has_a_buffer_are_named():
    model = twins.make(MODELS["layernorm_dense"][0])
    te_nnx.main_grads(model)
    with pytest.raises(ValueError, match="take_main_grads: grads: expected those of all kernels .* none of .'kernel'"):
        te_nnx.take_main_grads(model, nnx.state(model, nnx.PathContains("scale")))
    assert jax.tree.leaves(nnx.state(model, te_nnx.MainGrad)), "nothing is lost"
