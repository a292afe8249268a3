"""Sizes that a mesh does not divide: the compiler fills up the last shard, and no sum or maximum may see with what."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import steps
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import FusedLayer
from steps import CURRENT, DELAYED

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import testing

SEQUENCE = dict(enable_sequence_parallel=True)
# One of f32 sums in another order: what of it crosses a rounding to FP8 is a step of that.
BOUND = {None: 1e-5, DELAYED: 2e-2, CURRENT: 2e-2}


def gradients(layer, variables, x, rec, resource=None):
    def loss(variables, x):  # whose gradient is 1 where the output is 0, as in what is filled up
        return jnp.sum(jnp.sin(layer.apply(variables, x, deterministic=True)))

    with te.autocast(rec is not None, rec, mesh_resource=resource or te.MeshResource()):
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(variables, x)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("rec", [None, DELAYED, CURRENT], ids=["off", "delayed", "current"])
@pytest.mark.parametrize(
    "shape, fields, resource",
    [
        ((3, 16, 64), {}, te.MeshResource(dp_resource="data", tp_resource="model")),
        ((2, 17, 64), SEQUENCE, te.MeshResource("data", tpsp_resource="model")),
    ],
    ids=["batch", "sequence"],
)
def test_gradients_and_states_are_those_of_one_device(shape, fields, resource, rec, explicit):
    x, layer = jax.random.normal(jax.random.key(0), shape), FusedLayer(**fields)
    variables = steps.randomized(steps.init(layer, x, rec=DELAYED))
    with steps.autocast(DELAYED):
        variables = steps.settle(layer.apply, variables, x, steps=2)
    mesh = testing.mesh_of((2, 4), ("data", "model"), explicit=explicit)
    with jax.default_device(mesh.devices.flat[0]):
        expected = gradients(layer, *jax.device_get((variables, x)), rec)
    with testing.on_mesh(mesh):
        on_mesh = jax.device_put((variables, x), NamedSharding(mesh, P()))
        got = gradients(layer, *on_mesh, rec, resource)
    testing.assert_close(got, expected, BOUND[rec])


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("heads, size", [(4, 6), (2, 12), (3, 8)])
def test_heads_whose_shards_are_no_multiple_of_8_or_uneven(heads, size, explicit):
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))
    layer = te_flax.MultiHeadAttention(size, heads, attention_dropout=0.0, attn_mask_type="causal")
    boxed = steps.init(layer, x, rec=DELAYED, unbox=False)
    step = jax.jit(jax.grad(lambda v, x: jnp.sum(jnp.sin(layer.apply(v, x, deterministic=True)[0]))))
    with te.autocast(True, DELAYED):
        expected = step(boxed, x)
    mesh = testing.mesh_of((2,), ("model",), explicit=explicit)
    with testing.on_mesh(mesh), te.autocast(True, DELAYED, mesh_resource=te.MeshResource(tp_resource="model")):
        rules = te_flax.extend_logical_axis_rules(())
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
        sharded = jax.device_put(boxed, shardings), jax.device_put(x, NamedSharding(mesh, P()))
        got = step(*sharded)
    testing.assert_close(jax.device_get(nn.unbox(got)), jax.device_get(nn.unbox(expected)), BOUND[DELAYED])


@pytest.mark.parametrize("rec", [None, DELAYED], ids=["off", "delayed"])
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
    "heads, groups, devices, fields",
    [
        (8, 2, 4, dict(enable_rotary_pos_emb=True)),
        (6, 6, 4, dict(qk_norm_type="rmsnorm")),
        (8, 4, 8, dict(enable_rotary_pos_emb=True, transpose_batch_sequence=True)),
        (4, 1, 8, {}),
    ],
)
def test_heads_that_tensor_parallelism_divides_in_part(heads, groups, devices, fields, explicit, rec):
    """Of features split over more devices, reshaped to heads, the compiler would split both by parts of a mesh axis."""
    x = jax.random.normal(jax.random.key(0), (4, 8, 32))
    layer = te_flax.MultiHeadAttention(8, heads, groups, input_layernorm=False, **fields)
    boxed = steps.init(layer, x, rec=DELAYED, unbox=False)
    step = jax.jit(jax.grad(lambda v, x: jnp.sum(jnp.sin(layer.apply(v, x, deterministic=True)[0])), argnums=(0, 1)))
    with te.autocast(rec is not None, rec):
        expected = step(nn.unbox(boxed), x)
    resource, mesh = te.MeshResource(tp_resource="model"), testing.mesh_of((devices,), ("model",), explicit=explicit)
    with testing.on_mesh(mesh), te.autocast(rec is not None, rec, mesh_resource=resource):
        got = step(steps.place(mesh, boxed, resource), jax.device_put(x, NamedSharding(mesh, P())))
    testing.assert_close(jax.device_get(got), jax.device_get(expected), BOUND[rec])


@pytest.mark.parametrize(
    "shape, how, fields, resource",
    [
        ((8, 16, 64), "at once", dict(num_gqa_groups=1), te.MeshResource(dp_resource="data", tp_resource="model")),
        ((6, 17, 64), "at once", SEQUENCE, te.MeshResource("data", tpsp_resource="model")),
        ((6, 16, 64), "jit", {}, te.MeshResource(dp_resource="data", tp_resource="model")),
    ],
)
def test_results_of_arrays_that_are_not_on_the_mesh(shape, how, fields, resource):
    layer, mesh = FusedLayer(**fields), testing.mesh_of((4, 2), ("data", "model"))

    def step(variables, x):
        y, vjp = jax.vjp(lambda v, x: layer.apply(v, x, deterministic=True), variables, x)
        return y, vjp(jnp.cos(y))

    with jax.default_device(mesh.devices.flat[0]), steps.autocast(DELAYED):
        x = jax.random.normal(jax.random.key(0), shape)
        variables = steps.randomized(steps.init(layer, x, rec=DELAYED))
        expected = jax.device_get(jax.jit(step)(variables, x))
    with testing.on_mesh(mesh), steps.autocast(DELAYED, mesh_resource=resource):
        if how == "jit":
            got = jax.jit(step)(jax.device_put(variables, NamedSharding(mesh, P())), x)
        else:
            got = step(variables, x)
    testing.assert_close(jax.device_get(got), expected, BOUND[DELAYED])
