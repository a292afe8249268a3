"""DotGeneral and Einsum inside NNX's own layers equal their Linen counterparts."""

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import steps
import twins
from flax import nnx
from steps import DELAYED

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import recipe, testing

(X,) = (jnp.asarray(a) for a in emulated.normal(0, (8, 32)))
RNGS = nnx.Rngs(0)
CLS = te_flax.make_dot_general_cls(DELAYED)

LAYERS = {
    "linear": (
        lambda: nnx.Linear(32, 16, dot_general=te_nnx.DotGeneral(DELAYED), rngs=RNGS),
        nn.Dense(16, dot_general_cls=CLS),
        "dot_general",
    ),
    "linear general": (
        lambda: nnx.LinearGeneral(32, (3, 16), dot_general=te_nnx.DotGeneral(DELAYED), rngs=RNGS),
        nn.DenseGeneral((3, 16), dot_general_cls=CLS),
        "dot_general",
    ),
    "einsum": (
        lambda: nnx.Einsum("bk,kn->bn", (32, 16), (16,), einsum_op=te_nnx.Einsum(DELAYED), rngs=RNGS),
        nn.Dense(16, dot_general_cls=CLS),
        "einsum_op",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_inside_nnx_layers(name):
    make, linen, attribute = LAYERS[name]
    model = make()
    variables = {**steps.init(linen, X), "params": te_nnx.to_linen(model)["params"]}
    for _ in range(2):
        y, (grads, dx) = steps.step(linen.apply, variables, X)
        y_, (grads_, dx_) = twins.step(twins.call, model, X)
        got, state = twins.as_linen(grads_), grads[te_flax.STATE_COLLECTION]
        testing.assert_same_bytes(y_, y)
        testing.assert_close((got["params"], dx_), (grads["params"], dx), emulated.F32)
        testing.assert_same_bytes(got[te_flax.STATE_COLLECTION][attribute], state["Fp8_dot_general_0"])
        te_nnx.update_state(model, grads_)
        variables = {**variables, te_flax.STATE_COLLECTION: state}


def test_without_a_recipe_and_outside_of_autocast_it_is_flax():
    model = nnx.Linear(32, 16, dot_general=te_nnx.DotGeneral(), rngs=RNGS)
    plain = nnx.Linear(32, 16, rngs=RNGS)
    nnx.update(plain, nnx.state(model, nnx.Param))
    testing.assert_close(model(X), plain(X), emulated.F32)
    before = nnx.state(model, te_nnx.Fp8State)
    _, (grads, _) = twins.step(twins.call, model, X)
    testing.assert_same_bytes(twins.states_of(grads), twins.states_of(before))
    with steps.autocast(steps.CURRENT):
        assert 0.005 < testing.relative_error(model(X), plain(X)) < 0.1


def test_names_for_checkpoint_policies():
    model = nnx.Linear(32, 16, dot_general=te_nnx.DotGeneral(DELAYED, "mine"), rngs=RNGS)
    graph, state = nnx.split(model)
    loss = lambda state: nnx.merge(graph, state)(X).sum()
    assert "name=mine" in str(jax.make_jaxpr(jax.grad(loss))(state))


@pytest.mark.parametrize("name", ["linear", "einsum"])
def test_the_recipe_says_which_products_run_in_fp8(name):
    rec = recipe.DelayedScaling(fp8_gemms=lambda m, k, n: n > 16)
    make = {
        "linear": lambda n: nnx.Linear(32, n, dot_general=te_nnx.DotGeneral(rec), rngs=RNGS),
        "einsum": lambda n: nnx.Einsum("bk,kn->bn", (32, n), (n,), einsum_op=te_nnx.Einsum(rec), rngs=RNGS),
    }[name]
    for n in (16, 32):
        graph, state = nnx.split(make(n))
        names = {row.name for row in te.explain(lambda s, graph=graph: nnx.merge(graph, s)(X), state).rows}
        assert ("gemm" in names) is (n > 16) and ("dot_general" in names) is (n == 16)


def test_update_state_keeps_states_of_what_was_not_called():
    class Two(nnx.Module):
        def __init__(self):
            make = lambda: nnx.Linear(32, 16, dot_general=te_nnx.DotGeneral(DELAYED), rngs=RNGS)
            self.called, self.idle = make(), make()

        def __call__(self, x):
            return self.called(x)

    model = Two()
    state = model.idle.dot_general.gemm_state.states.replace(x=te.QuantizerState(5.0, jnp.ones(4)))
    for linear in (model.called, model.idle):
        linear.dot_general.gemm_state.set_value(state.packed)
    _, (grads, _) = twins.step(twins.call, model, X)
    te_nnx.update_state(model, grads)
    testing.assert_same_bytes(model.idle.dot_general.gemm_state.states, state)
    assert model.called.dot_general.gemm_state.x.scale != 5
