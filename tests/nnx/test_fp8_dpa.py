"""recipe.fp8_dpa in NNX: equal to Linen's; states where the model is made under it, or init_fp8_state adds them."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
import twins
from flax import nnx

import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import flax as te_flax
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.ops.attention import flash

B, S, K, H, G, D = 2, 32, 64, 4, 2, 16
DELAYED = recipe.DelayedScaling(fp8_dpa=True, amax_history_len=4)
CURRENT = recipe.Float8CurrentScaling(fp8_dpa=True)
Q, KEY, VALUE, X = (
    jnp.asarray(x, jnp.bfloat16) for x in emulated.normal(9, (B, S, H, D), (B, S, G, D), (B, S, G, D), (B, S, K))
)
FIELDS = dict(
    hidden_size=K, mlp_hidden_size=2 * K, num_attention_heads=H, num_gqa_groups=G, hidden_dropout=0.0,
    attention_dropout=0.0, scale_attn_logits=True, enable_relative_embedding=False,
)  # fmt: skip
LAYERS = 3


@pytest.fixture(autouse=True)
def handlers():
    if jax.default_backend() == "gpu" and flash.missing():
        pytest.skip(flash.missing())


def made(cls, *sizes, rec=DELAYED, **fields):
    with steps.autocast(rec):
        return cls(*sizes, **fields, rngs=nnx.Rngs(0, dropout=1))


def attention_states(model) -> set[str]:
    return {path for path in twins.states(model) if "attention_state" in path}


@pytest.mark.parametrize("rec", [DELAYED, CURRENT, None], ids=["delayed", "current", "off"])
@pytest.mark.parametrize("name", ["attention", "layer"])
def test_is_the_linen_twin(name, rec):
    if name == "attention":
        linen, args = te_flax.DotProductAttention(D, H, G), (Q, KEY, VALUE)
        model = made(te_nnx.DotProductAttention, D, H, num_gqa_groups=G)
    else:
        linen, args = te_flax.TransformerLayer(**FIELDS), (X,)
        model = made(te_nnx.TransformerLayer, **FIELDS)
    variables = steps.init(linen, *args, rec=DELAYED)
    with steps.autocast(DELAYED):
        variables = steps.settle(linen.apply, variables, *args, steps=2)
    te_nnx.from_linen(model, variables)
    testing.assert_same_bytes(te_nnx.to_linen(model), dict(variables))
    with steps.autocast(rec):
        out, (grads, *dx) = steps.step(linen.apply, variables, *args)
        out_, (grads_, *dx_) = twins.step(twins.call, model, *args)
    got, expected = (out_, dx_, twins.as_linen(grads_)), (out, dx, dict(grads))
    if jax.default_backend() == "gpu":  # where cuDNN adds up gradients in any order
        testing.assert_close(got, expected, emulated.FLIP)
    else:
        testing.assert_same_bytes(got, expected)


def test_states_are_made_where_the_recipe_has_fp8_dpa_or_added():
    for rec in (steps.DELAYED, None):
        model = made(te_nnx.TransformerLayer, rec=rec, **FIELDS)
        assert not attention_states(model)
        with steps.autocast(DELAYED):
            if rec is not None:
                with pytest.raises(ValueError, match=r"FP8 state attention_state.*got none.*init_fp8_state"):
                    model(X)
            te_nnx.init_fp8_state(model)
            model(X)
        assert attention_states(model) == attention_states(made(te_nnx.TransformerLayer, **FIELDS)) != set()


def stacked(rec):
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return te_nnx.TransformerLayer(**FIELDS, rngs=rngs)

    with steps.autocast(rec):
        return make(nnx.Rngs(0))


def unrolled(layers, x):
    graph, state = nnx.split(layers)
    for i in range(LAYERS):
        x = nnx.merge(graph, jax.tree.map(lambda a: a[i], state))(x)
    return x


def rematerialised(layers, x):
    return nnx.scan(nnx.remat(lambda layer, x: layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, x)


def test_stacked_layers_are_those_unrolled():
    layers = stacked(steps.DELAYED)
    te_nnx.init_fp8_state(layers, DELAYED)
    assert {s.scale.shape for s in twins.states(layers).values()} == {(LAYERS,)}
    with steps.autocast(DELAYED):
        for _ in range(2):
            out, (_, dx) = twins.step(unrolled, layers, X)
            out_, (grads_, dx_) = twins.step(rematerialised, layers, X)
            # A value that is computed by another program may round to the neighbouring code of FP8, and bf16.
            testing.assert_close((out_, dx_), (out, dx), 4 * max(emulated.FLIP, emulated.BF16))
            te_nnx.update_state(layers, grads_)
    found = twins.states(layers)
    for name in attention_states(layers):
        assert (np.asarray(found[name].amax_history > 0).sum(axis=1) == 2).all()
        assert (np.asarray(found[name].scale) != 1).all()


def test_states_that_are_added_are_stacked_as_those_beside_them():
    class Model(nnx.Module):
        def __init__(self):
            self.first = te_nnx.DenseGeneral(32, 32, rngs=nnx.Rngs(0))
            self.layers = stacked(steps.DELAYED)
            self.one = te_nnx.TransformerLayer(**FIELDS, rngs=nnx.Rngs(0))

    model = Model()
    te_nnx.init_fp8_state(model, DELAYED)
    shapes = {name: s.scale.shape for name, s in twins.states(model).items()}
    assert shapes.keys() >= {"layers/" + name.removeprefix("one/") for name in shapes if name.startswith("one/")}
    assert all(shape == ((LAYERS,) if name.startswith("layers/") else ()) for name, shape in shapes.items())


def test_training_updates_them_and_the_loss_falls():
    model = made(te_nnx.TransformerLayer, **FIELDS)
    target = jnp.sin(2 * jnp.cumsum(X.astype(jnp.float32), axis=1))

    @nnx.jit
    def train_step(model):
        loss_fn = lambda model: jnp.mean((model(X).astype(jnp.float32) - target) ** 2)
        loss, grads = nnx.value_and_grad(loss_fn, argnums=twins.WITH_STATE)(model)
        grads = te_nnx.update_state(model, grads)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return loss

    with steps.autocast(DELAYED):
        losses = [float(train_step(model)) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0], losses
    assert all((twins.states(model)[name].amax_history > 0).all() for name in attention_states(model))
