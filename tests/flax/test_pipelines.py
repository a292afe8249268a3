"""Modules in a user's shard_map that use them again and again: microbatches in a scan, stages of a pipeline."""

from functools import partial

import emulated
import flax
import jax
import jax.numpy as jnp
import pytest
import steps
from jax.sharding import PartitionSpec as P
from steps import DELAYED

from transformer_engine_jax import testing
from transformer_engine_jax.flax import DenseGeneral, LayerNormMLP

COUNT, STAGES, K = 5, 4, 32
X, WEIGHTS = (jnp.asarray(a) for a in emulated.normal(4, (COUNT, 8, K), (COUNT, 8, K)))


def trained(run, variables, amax_axes=None, count: int = 3):
    """(outputs, gradients of parameters, next states) of each of some steps, parameters staying as they are."""
    state, params = flax.core.pop(variables, "params")

    @jax.jit
    def step(params, state, x):
        def loss(params, state):
            y = run({"params": params, **state}, x)
            return jnp.sum(y * WEIGHTS), y

        (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, state)
        return y, *grads

    found = []
    with steps.autocast(DELAYED, amax_axes=amax_axes):
        for _ in range(count):
            y, grads, state = step(params, state, X)
            found.append((y, grads, state))
    return jax.device_get(found)


def over_devices(run, mesh, in_specs, out_specs, check_vma=True):
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


@pytest.mark.parametrize("loop, captured", [("scan", False), ("python", False), ("python", True)])
def test_microbatches_in_a_shard_map_update_a_state_once(loop, captured):
    """Whether the shard_map is given the state or captures it."""
    module, mesh = DenseGeneral(features=K), testing.mesh_of((2,), ("data",))
    variables = steps.init(module, X[0], rec=DELAYED)

    def run(variables, x):
        if loop == "scan":
            return jax.lax.scan(lambda _, x: (None, module.apply(variables, x)), None, x)[1]
        return jnp.stack([module.apply(variables, each) for each in x])

    def sharded(variables, x):
        of_rows = P(None, "data")
        if captured:
            return over_devices(partial(run, variables), mesh, of_rows, of_rows)(x)
        return over_devices(run, mesh, (P(), of_rows), of_rows)(variables, x)

    got = trained(sharded, variables, amax_axes="data")
    with jax.default_device(mesh.devices.flat[0]):
        expected = trained(run, variables)
    for (y, grads, state), (y_, grads_, state_) in zip(got, expected):
        testing.assert_close((y, grads), (y_, grads_), emulated.F32)
        testing.assert_same_bytes(state, state_)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_pipeline_is_its_stages_one_after_the_other(check_vma):
    """Each device has a stage; what it computes before the first microbatch is there, and behind the last, is zeros."""
    module, mesh = LayerNormMLP(intermediate_dim=48), testing.mesh_of((STAGES,), ("stage",))
    keys = jax.random.split(jax.random.key(0), STAGES)
    with steps.autocast(DELAYED):
        variables = flax.linen.unbox(jax.vmap(lambda key: module.init(key, X[0]))(keys))

    def stages(variables, x):
        for i in range(STAGES):
            of_stage = jax.tree.map(lambda a, i=i: a[i], variables)
            x = jnp.stack([module.apply(of_stage, each)[0] for each in x])
        return x

    def stage(variables, x):
        variables = jax.tree.map(lambda a: a[0], variables)
        me = jax.lax.axis_index("stage")

        def tick(carry, t):
            received, results = carry
            number = t - me
            there = (number >= 0) & (number < COUNT)
            y = module.apply(variables, jnp.where(me == 0, x[jnp.clip(t, 0, COUNT - 1)], received))[0]
            y = jnp.where(there, y, 0.0)
            results = jnp.where(there & (me == STAGES - 1), results.at[jnp.clip(number, 0, COUNT - 1)].set(y), results)
            return (jax.lax.ppermute(y, "stage", [(i, (i + 1) % STAGES) for i in range(STAGES)]), results), None

        empty = 0.0 * (x + me.astype(jnp.float32))  # varies over the stages
        (_, results), _ = jax.lax.scan(tick, (empty[0], empty), jnp.arange(COUNT + STAGES - 1))
        return jax.lax.psum(jnp.where(me == STAGES - 1, results, 0.0), "stage")

    piped = over_devices(stage, mesh, (P("stage"), P()), P(), check_vma)
    with jax.default_device(mesh.devices.flat[0]):
        expected = trained(stages, variables)
    testing.assert_close(trained(piped, variables), expected, emulated.F32)
