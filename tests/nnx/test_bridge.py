"""Flax's bridge between NNX and Linen: a module on the other side trains its FP8 state as one that is native there."""

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
import steps
from flax import nnx
from flax.nnx import bridge
from flax.training.train_state import TrainState
from steps import DELAYED

import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import recipe, testing

(X,) = (jnp.asarray(a) for a in emulated.normal(11, (4, 8, 32)))
DPA = recipe.DelayedScaling(amax_history_len=4, fp8_dpa=True)
LINEN = {
    "dense": (te_flax.DenseGeneral(32), DELAYED),
    "attention in FP8": (te_flax.MultiHeadAttention(16, 2, attention_dropout=0.0), DPA),
}
NNX = {
    "dense": (te_nnx.DenseGeneral, (32, 32)),
    "attention in FP8": (te_nnx.MultiHeadAttention, (32, 16, 2), dict(attention_dropout=0.0)),
}


def loss(out):
    return jnp.mean((jax.tree.leaves(out)[0] - jnp.sin(3 * X)) ** 2)


def trained(module, variables):
    """By Flax's TrainState, which replaces our collection by its gradient, and trains any that it does not know."""
    gradients = jax.jit(jax.grad(lambda variables: loss(module.apply(variables, X))))
    state = TrainState.create(apply_fn=module.apply, params=variables, tx=optax.sgd(0.1))
    for _ in range(3):
        state = state.apply_gradients(grads=gradients(state.params))
    return state.params


@pytest.mark.parametrize("case", LINEN)
def test_an_nnx_module_in_linen(case):
    module, rec = LINEN[case]
    variables = steps.init(module, X, rec=rec)
    of_class, args, *kwargs = NNX[case]
    bridged = bridge.to_linen(of_class, *args, **dict(*kwargs))
    with steps.autocast(rec):
        assert jax.tree.structure(nn.unbox(bridged.init(jax.random.key(0), X))) == jax.tree.structure(variables)
        expected, got = trained(module, variables), trained(bridged, variables)
    testing.assert_same_bytes(got, expected)


@pytest.mark.parametrize("case", LINEN)
def test_a_linen_module_in_nnx(case):
    module, rec = LINEN[case]
    with steps.autocast(rec):
        model = bridge.lazy_init(bridge.ToNNX(module, rngs=nnx.Rngs(0)), X)
        variables = te_nnx.to_linen(model)
        gradients = nnx.jit(nnx.grad(lambda m: loss(m(X)), argnums=nnx.DiffState(0, te_nnx.TRAINED)))
        for _ in range(3):
            params = te_nnx.update_state(model, gradients(model))
            nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), params))
        expected = trained(module, variables)
    testing.assert_close(te_nnx.to_linen(model), expected, 1e-5)


def test_what_flaxs_own_fp8_overwrites_is_its_gradient():
    module = nn.Dense(32, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    model = bridge.lazy_init(bridge.ToNNX(module, rngs=nnx.Rngs(0)), X)
    te_nnx.init_fp8_state(model, DELAYED)
    before = te_nnx.to_linen(model)
    expected = jax.grad(lambda variables: loss(module.apply(variables, X)))(before)
    grads = nnx.grad(lambda m: loss(m(X)), argnums=nnx.DiffState(0, te_nnx.TRAINED))(model)
    assert not nnx.state(te_nnx.update_state(model, grads), te_nnx.Fp8State)
    got = te_nnx.to_linen(model)[te_flax.STATE_COLLECTION]
    testing.assert_close(got, expected[te_flax.STATE_COLLECTION], 1e-5)
