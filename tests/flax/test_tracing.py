"""A model of many layers, one after the other, is traced and lowered in seconds: what remains is XLA's to compile."""

import time
import warnings

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.flax import TransformerLayer
from transformer_engine_jax.tracing import kept_on

SECONDS = 20  # of the processor's time: other tests run beside this one


class Model(nn.Module):
    """Of llama's layers, which are the costliest to trace."""

    @nn.compact
    def __call__(self, x):
        for _ in range(32):
            x = TransformerLayer(
                hidden_size=4096,
                mlp_hidden_size=14336,
                num_attention_heads=32,
                num_gqa_groups=8,
                mlp_activations=("silu", "linear"),
                layernorm_type="rmsnorm",
                enable_rotary_pos_emb=True,
                enable_relative_embedding=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                dtype=jnp.bfloat16,
            )(x)
        return x


def test_32_layers_are_traced_and_lowered_in_seconds():
    model, x = Model(), jax.ShapeDtypeStruct((4, 4096, 4096), jnp.bfloat16)

    def loss(params, state, x):
        return jnp.sum(model.apply({"params": params, **state}, x).astype(jnp.float32))

    with te.fp8_autocast(True, recipe.DelayedScaling()):
        state, params = flax.core.pop(jax.eval_shape(model.init, jax.random.key(0), x), "params")
        began = time.process_time()
        lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(params, state, x)
        took = time.process_time() - began
    assert took < SECONDS
    _, (grads, states) = lowered.out_info
    assert len(grads) == len(jax.tree.leaves(states)) // 5 == 32  # of each layer, and of its five products


def test_a_shard_map_that_runs_at_once_is_no_unknown_jax():
    mesh = testing.mesh_of((2,), ("data",))
    module, x = te_flax.DenseGeneral(8), jnp.ones((4, 8))
    with te.autocast(True):
        variables = module.init(jax.random.key(0), x)
        run = jax.shard_map(module.apply, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            run(variables, x)


def test_a_trace_of_an_unknown_jax_is_told_of():
    with pytest.warns(RuntimeWarning, match="nothing can be kept on a trace of JAX .* may count several times"):
        assert kept_on(object(), "anything") == {}
