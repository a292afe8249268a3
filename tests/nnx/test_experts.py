"""NNX modules stacked by nnx.vmap keep a state each; nnx.remat takes the policies of te.policies."""

import re

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import steps
import twins
from flax import nnx
from steps import DELAYED

import transformer_engine_jax as te
import transformer_engine_jax.nnx as te_nnx

X, X2 = (jnp.asarray(a) for a in emulated.normal(0, (8, 16), (8, 16)))


def test_stacked_modules_have_a_state_each():
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return te_nnx.DenseGeneral(16, 16, use_bias=False, rngs=rngs)

    with steps.autocast(DELAYED):
        model = make(nnx.Rngs(0))
        x = jnp.stack([X, 3 * X2])
        _, (grads, _) = twins.step(nnx.vmap(twins.call, in_axes=(0, 0), out_axes=0), model, x)
    amax = lambda a: np.abs(np.asarray(a)).max(axis=(1, 2))
    states = twins.states_of(grads)
    np.testing.assert_array_equal(states["gemm_state.x"].amax_history[:, 1], amax(x))
    np.testing.assert_array_equal(states["gemm_state.kernel"].amax_history[:, 1], amax(model.kernel.get_value()))
    np.testing.assert_array_equal(states["gemm_state.grad"].amax_history[:, 1], amax(steps.weights(0, x.shape)))


def test_remat_with_a_policy():
    def quantizations(policy):
        with steps.autocast(DELAYED):
            model = te_nnx.DenseGeneral(16, 16, use_bias=False, rngs=nnx.Rngs(0))
            graph, state = nnx.split(model)
            run = nnx.remat(twins.call, policy=policy)
            jaxpr = jax.make_jaxpr(jax.grad(lambda s: jnp.sum(run(nnx.merge(graph, s), X) ** 2)))(state)
            return len(re.findall("<kernel quantize:", str(jaxpr)))

    assert quantizations(te.policies.quantized_saveable) == 3
    assert quantizations(None) == 5
