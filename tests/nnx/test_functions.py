"""Functions among the fields of modules, score_mod and activations, that are modules with parameters themselves."""

import jax
import jax.numpy as jnp
import numpy as np
from emulated import normal
from flax import nnx

import transformer_engine_jax.nnx as te_nnx


class Cap(nnx.Module):
    def __init__(self, cap):
        self.cap = nnx.Param(jnp.float32(cap))

    def __call__(self, x, *positions):
        return self.cap[...] * jnp.tanh(x / self.cap[...])


def test_functions_may_be_modules_with_parameters():
    """Which a layer has once, as Flax's tree mode wants, and plain transforms of JAX."""
    (x,) = (jnp.asarray(a) for a in normal(4, (2, 8, 32)))
    fields = dict(hidden_size=32, mlp_hidden_size=48, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0)
    fields |= dict(enable_relative_embedding=False)

    def make(score_mod, activation):
        activations = nnx.data((activation,)) if isinstance(activation, nnx.Module) else (activation,)
        return te_nnx.TransformerLayer(**fields, score_mod=score_mod, mlp_activations=activations, rngs=nnx.Rngs(0))

    loss = lambda model: jnp.mean(jnp.sin(model(x)))
    expected = jax.grad(lambda cap: loss(make(*(lambda s, *_, c=c: c * jnp.tanh(s / c) for c in cap))))((2.0, 0.5))
    model = make(Cap(2.0), Cap(0.5))
    for mode in (dict(), dict(graph=False)):
        found = nnx.to_flat_state(nnx.state(nnx.grad(loss, **mode)(model), nnx.PathContains("cap")))
        np.testing.assert_allclose([v.get_value() for _, v in found], expected, rtol=1e-4)
    assert nnx.graphdef(make(Cap(2.0), Cap(0.5))) == nnx.graphdef(make(Cap(3.0), Cap(0.7)))  # no program of its own
