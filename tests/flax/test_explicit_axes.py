"""Modules are made and trained on meshes of explicit axes, as jax.make_mesh makes them, as on the compiler's."""

from functools import partial

import emulated
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
import steps
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.flax import STATE_COLLECTION, TransformerLayer, TransformerLayerType
from transformer_engine_jax.ops.dropout import drop

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
(X,) = (jnp.asarray(a) for a in emulated.normal(3, (8, 16, 64)))
RESOURCES = {
    "dp and tp": te.MeshResource(dp_resource="data", tp_resource="model"),
    "fsdp and tp": te.MeshResource(fsdp_resource="data", tp_resource="model"),
    "sequence": te.MeshResource(dp_resource="data", tpsp_resource="model"),
}

Layer = partial(TransformerLayer, hidden_size=64, mlp_hidden_size=128, num_attention_heads=4)
still = dict(hidden_dropout=0.0, attention_dropout=0.0)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.remat(TransformerLayer)(64, 128, 4, **still, enable_rotary_pos_emb=True)(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, STATE_COLLECTION: 0}
        layers = nn.scan(
            Block, axes, split_rngs={"params": True}, length=2, metadata_params={nn.PARTITION_NAME: "layers"}
        )
        return layers()(x, None)[0]


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        """The encoder's output is whole where x is not: who made it need not have said."""
        return Layer(**still, layer_type=TransformerLayerType.DECODER)(x, X[:, :8])


CASES = {
    "dropout": ("dp and tp", partial(Layer, intermediate_dropout=0.1)),
    "dropout of whole axes": ("dp and tp", partial(Layer, hidden_dropout_dims=(1,), drop_path=0.1)),
    "llama": (
        "fsdp and tp",
        partial(Layer, **still, num_gqa_groups=2, mlp_activations=("silu", "linear"), layernorm_type="rmsnorm"),
    ),
    "sequence": ("sequence", partial(Layer, attention_dropout=0.0, use_bias=True, enable_sequence_parallel=True)),
    "learnable": ("dp and tp", partial(Layer, **still, softmax_type="learnable")),
    "lora": ("fsdp and tp", partial(Layer, **still, low_rank_adaptation_scope="all")),
    "lora, sequence": (
        "sequence",
        partial(Layer, **still, enable_sequence_parallel=True, low_rank_adaptation_scope="all"),
    ),
    "scan": ("fsdp and tp", Scanned),
    "decoder": ("fsdp and tp", Decoder),
}


MIXED = dict.fromkeys(("dropout", "sequence", "scan"), ((EXPLICIT, AUTO),))


def trained(module: nn.Module, kinds, resource: te.MeshResource):
    """(losses, parameters) of three steps, made and sharded as README does it."""
    mesh = testing.mesh_of((4, 2), ("data", "model"))
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    with testing.on_mesh(mesh), te.fp8_autocast(True, recipe.DelayedScaling(), mesh_resource=resource):
        rules = te_flax.extend_logical_axis_rules((("layers", None),))
        with nn.logical_axis_rules(rules):
            x = jax.device_put(X, NamedSharding(mesh, P("data")))
            init = lambda x: module.init({"params": jax.random.key(1), "dropout": jax.random.key(2)}, x)
            logical = nn.get_partition_spec(jax.eval_shape(init, x))
            variables = jax.jit(init, out_shardings=nn.logical_to_mesh_sharding(logical, mesh, rules))(x)
            state, params = flax.core.pop(variables, "params")
            optimizer = optax.adamw(1e-3)

            @jax.jit
            def step(params, state, moments):
                def loss(params, state):
                    y = module.apply({"params": params, **state}, x, rngs={"dropout": jax.random.key(3)})
                    return jnp.mean((y - jnp.sin(x)) ** 2)

                value, (grads, state) = jax.value_and_grad(loss, argnums=(0, 1))(params, state)
                updates, moments = optimizer.update(grads, moments, params)
                return value, optax.apply_updates(params, updates), state, moments

            losses, moments = [], optimizer.init(params)
            for _ in range(3):
                loss, params, state, moments = step(params, state, moments)
                losses.append(jax.device_get(loss))
        return losses, params


def shardings(params):
    return [x.sharding.spec for x in jax.tree.leaves(params) if x.ndim > 1]


@pytest.mark.parametrize("case", CASES)
def test_trained_on_explicit_axes_is_trained_on_the_compilers(case):
    resource, make = CASES[case]
    expected, _ = trained(make(), (AUTO, AUTO), RESOURCES[resource])
    assert expected[-1] < 0.95 * expected[0]
    for kinds in ((EXPLICIT, EXPLICIT), *MIXED.get(case, ())):
        got, params = trained(make(), kinds, RESOURCES[resource])
        testing.assert_close(got, expected, 1e-3)  # sums in another order flip a code here and there
        assert any("model" in str(spec) for spec in shardings(params))


@pytest.mark.parametrize("dims", [(1,), (-1, 0)])
def test_dropout_of_whole_axes_is_flaxs_whatever_the_sharding(dims):
    key = jax.random.key(5)
    flaxs = nn.Dropout(0.3, broadcast_dims=[d % 3 for d in dims])
    expected = flaxs.apply({}, X, deterministic=False, rng=key)
    run = jax.jit(lambda x: jax.vjp(lambda x: drop(x, key, 0.3, dims), x)[1](jnp.ones_like(x)))
    testing.assert_same_bytes(drop(X, key, 0.3, dims), expected)
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=True)
    with testing.on_mesh(mesh):
        (x,) = testing.shard(mesh, [X], [P("data", None, "model")])
        got = jax.jit(lambda x: drop(x, key, 0.3, dims))(x)
        assert got.sharding.is_equivalent_to(x.sharding, 3)
        (grad,) = run(x)
    testing.assert_same_bytes(jax.device_get(got), jax.device_get(expected))
    assert jnp.array_equal(jax.device_get(grad) != 0, jax.device_get(expected) != 0)


@pytest.mark.parametrize("count, inside", [(4, True), (4, False), (8, False)])
@pytest.mark.parametrize("rec", [None, recipe.DelayedScaling(), recipe.Float8CurrentScaling()])
@pytest.mark.parametrize("explicit", [True, False])
def test_experts_that_a_mesh_shards(explicit, rec, count, inside):
    """Devices compute with their own experts, as they are without a mesh; within each, tensors are parallel.

    On the compiler's axes vmap names the experts' one.
    """
    one = te_flax.LayerNormMLP(intermediate_dim=32)
    mapped = dict(
        variable_axes={"params": 0, STATE_COLLECTION: 0},
        split_rngs={"params": True},
        metadata_params={nn.PARTITION_NAME: "experts"},
        spmd_axis_name=None if explicit else "experts",
    )
    experts = nn.vmap(te_flax.LayerNormMLP, **mapped)(intermediate_dim=32)
    x = X.reshape(count, -1, 16, 64)
    with te.fp8_autocast(rec is not None, rec):
        variables = nn.unbox(experts.init(jax.random.key(0), x))

    def of_each(variables, x):
        return jnp.sum(jnp.sin(one.apply(variables, x)[0]))

    def gradients(variables, x):
        if inside:
            one_by_one = jax.vmap(jax.grad(of_each, argnums=(0, 1)), spmd_axis_name=mapped["spmd_axis_name"])
            return one_by_one(variables, x)
        return jax.grad(lambda *args: jnp.sum(jnp.sin(experts.apply(*args)[0])), argnums=(0, 1))(variables, x)

    mesh = testing.mesh_of((4, 2), ("experts", "model"), explicit=explicit)
    with jax.default_device(mesh.devices.flat[0]), te.fp8_autocast(rec is not None, rec):
        expected = jax.device_get(jax.jit(gradients)(variables, x))
    resource = te.MeshResource(tp_resource="model")
    with testing.on_mesh(mesh), te.fp8_autocast(rec is not None, rec, mesh_resource=resource):
        placed = jax.device_put((variables, x), NamedSharding(mesh, P("experts")))
        for name, spec in (("wi_kernel", P("experts", None, None, "model")), ("wo_kernel", P("experts", "model"))):
            placed[0]["params"][name] = jax.device_put(variables["params"][name], NamedSharding(mesh, spec))
        compiled = jax.jit(gradients).lower(*placed).compile()
        got = compiled(*placed)
    testing.assert_close(jax.device_get(got), expected, 0.02)
    # JAX before 0.11 has what is parallel within experts whole where it enters a shard_map over these.
    assert jax.__version_info__ < (0, 11) or "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("shape", [(0, 16, 64), (8, 0, 64)])
def test_empty_batches_and_sequences(shape):
    layer, mesh = Layer(**still), testing.mesh_of((4, 2), ("data", "model"), explicit=True)
    with testing.on_mesh(mesh), te.fp8_autocast(True, mesh_resource=RESOURCES["dp and tp"]):
        variables = nn.unbox(jax.jit(layer.init)(jax.random.key(0), X))
        x = jax.device_put(jnp.zeros(shape), NamedSharding(mesh, P("data")))
        y, vjp = jax.vjp(jax.jit(layer.apply), variables, x)
        grads, dx = vjp(y)
    assert y.shape == dx.shape == shape
    assert not any(jax.device_get(g).any() for g in jax.tree.leaves(grads["params"]))


@pytest.mark.parametrize("fp8", [False, True])
def test_sequences_over_an_axis_of_one_device_and_another(fp8):
    fields = dict(enable_relative_embedding=False, enable_sequence_parallel=True)
    layer, mesh = Layer(**still, **fields), testing.mesh_of((1, 2), ("model", "data"), explicit=True)
    resource = te.MeshResource(tpsp_resource="model", cp_resource="data")
    run = jax.jit(jax.value_and_grad(lambda v, x: jnp.mean(jnp.sin(layer.apply(v, x))), argnums=(0, 1)))
    with jax.default_device(mesh.devices.flat[0]), te.fp8_autocast(fp8):
        boxed = layer.init(jax.random.key(0), X)
        expected = jax.device_get(run(nn.unbox(boxed), X))
    with testing.on_mesh(mesh), te.fp8_autocast(fp8, mesh_resource=resource):
        variables = nn.unbox(nn.meta.replace_boxed(boxed, steps.place(mesh, boxed, resource)))
        got = run(variables, jax.device_put(X, NamedSharding(mesh, P(None, "data"))))
    testing.assert_close(jax.device_get(got), expected, 1e-3)


@pytest.mark.parametrize("shape", [(1, 1), (4, 1)], ids=str)
@pytest.mark.parametrize("fields", [{}, dict(num_gqa_groups=2, layer_type=TransformerLayerType.DECODER)], ids=str)
def test_axes_of_one_device(shape, fields):
    """A mesh as a program has it that is to run anywhere."""
    layer, mesh = Layer(**still, **fields), testing.mesh_of(shape, ("data", "model"), explicit=True)
    others = 1 if "layer_type" in fields else 0
    run = lambda v, x: jnp.mean(jnp.sin(layer.apply(v, x, *others * [x])))
    run = jax.jit(jax.value_and_grad(run, argnums=(0, 1)))
    with jax.default_device(mesh.devices.flat[0]), te.fp8_autocast(True):
        boxed = layer.init(jax.random.key(0), X, *others * [X])
        expected = jax.device_get(run(nn.unbox(boxed), X))
    resource = RESOURCES["dp and tp"]
    with testing.on_mesh(mesh), te.fp8_autocast(True, mesh_resource=resource):
        variables = nn.unbox(nn.meta.replace_boxed(boxed, steps.place(mesh, boxed, resource)))
        got = run(variables, jax.device_put(X, NamedSharding(mesh, P("data"))))
    testing.assert_close(jax.device_get(got), expected, 1e-3)


@pytest.mark.parametrize("rules", [(("embed", "data"),), (("mlp", "data"), ("embed", None))])
@pytest.mark.parametrize("explicit", [False, True])
def test_shapes_are_unboxed_on_a_mesh(explicit, rules):
    with testing.on_mesh(testing.mesh_of((2,), ("data",), explicit=explicit)), nn.logical_axis_rules(rules):
        boxed = jax.eval_shape(te_flax.LayerNormMLP(intermediate_dim=48).init, jax.random.key(0), X)
        assert nn.unbox(boxed)["params"]["wi_kernel"].shape == (X.shape[-1], 1, 48)
