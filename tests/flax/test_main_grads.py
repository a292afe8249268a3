"""main_grads: gradients of kernels summed over microbatches in buffers, by every module, as JAX would sum them."""

from functools import partial

import emulated
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import steps
from emulated import F32
from flax import traverse_util
from steps import CURRENT, DELAYED

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import testing
from transformer_engine_jax.flax import MAIN_GRADS_COLLECTION, STATE_COLLECTION

(XS,) = (jnp.asarray(a) for a in emulated.normal(0, (3, 2, 8, 32)))

Layer = partial(
    te_flax.TransformerLayer,
    hidden_size=32,
    mlp_hidden_size=64,
    num_attention_heads=2,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LORA = dict(enable_low_rank_adaptation=True, low_rank_adaptation_dim=4)

# name -> (module, the kernels with buffers)
MODELS = {
    "dense": (te_flax.DenseGeneral(features=(2, 24)), {"kernel"}),
    "dense of two axes": (te_flax.DenseGeneral(features=24, axis=(-2, -1)), {"kernel"}),
    "dense, split": (te_flax.DenseGeneral(features=48, parameters_split=("a", "b")), {"a_kernel", "b_kernel"}),
    "dense, LoRA": (te_flax.DenseGeneral(features=24, **LORA), {"kernel"}),
    "dense, bf16": (te_flax.DenseGeneral(features=24, dtype=jnp.bfloat16, use_bias=False), {"kernel"}),
    "layernorm_dense": (te_flax.LayerNormDenseGeneral(features=24), {"kernel"}),
    "mlp, gated": (
        te_flax.LayerNormMLP(intermediate_dim=64, activations=("silu", "linear"), use_bias=True),
        {"wi_kernel", "wo_kernel"},
    ),
    "mlp, LoRA": (te_flax.LayerNormMLP(intermediate_dim=64, **LORA), {"wi_kernel", "wo_kernel"}),
    "layer": (
        Layer(),
        {"attention/qkv/kernel", "attention/out/kernel", "mlp/wi_kernel", "mlp/wo_kernel"},
    ),
    "layer, grouped, LoRA": (
        Layer(num_gqa_groups=1, low_rank_adaptation_scope="all", low_rank_adaptation_dim=4),
        {"attention/query/kernel", "attention/kv/kernel", "attention/out/kernel", "mlp/wi_kernel", "mlp/wo_kernel"},
    ),
    "layer, not fused": (
        Layer(fuse_qkv_params=False, use_bias=True),
        {f"attention/{name}/kernel" for name in ("query", "key", "value", "out")} | {"mlp/wi_kernel", "mlp/wo_kernel"},
    ),
}


def paths(tree) -> set[str]:
    return set(traverse_util.flatten_dict(flax.core.unfreeze(tree), sep="/"))


def first(out):
    return jax.tree.leaves(out)[0]


@partial(jax.jit, static_argnames=("model", "accumulates", "penalty"))
def train(variables, xs, *, model, accumulates: bool, penalty: float = 0.0):
    """(the sums of gradients over the microbatches, the state after them)."""
    params, state = variables["params"], {STATE_COLLECTION: variables.get(STATE_COLLECTION, {})}

    def microbatch(carry, x):
        sums, main_grads, state = carry

        def loss(params, main_grads, state):
            given = {"params": params, MAIN_GRADS_COLLECTION: main_grads} if accumulates else {"params": params}
            squares = jax.tree.map(lambda p: penalty * jnp.sum(p**2), nn.unbox(params)) if penalty else 0.0
            return jnp.mean((model.apply({**given, **state}, x)[0] - 0.3) ** 2) + sum(jax.tree.leaves(squares))

        grads, main_grads, state = jax.grad(loss, argnums=(0, 1, 2))(params, main_grads, state)
        return (jax.tree.map(jnp.add, sums, grads), main_grads, state), None

    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    main_grads = te_flax.main_grads(model, variables, xs[0]) if accumulates else {}
    (sums, main_grads, state), _ = jax.lax.scan(microbatch, (zeros, main_grads, state), xs)
    return te_flax.take_main_grads(main_grads, sums), state


@pytest.mark.parametrize("rec", [DELAYED, CURRENT, None], ids=["delayed", "current", "off"])
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_separate_gradients(name, rec):
    model, _ = MODELS[name]
    variables = steps.randomized(steps.init(model, XS[0], rec=rec))
    with steps.autocast(rec):
        got, state = train(variables, XS, model=model, accumulates=True)
        wide = variables  # kernels whose own gradient would be rounded
        if name == "dense, bf16" and rec is not None:
            wide = jax.tree.map(lambda a: a.astype(jnp.float32), variables)
        expected, expected_state = train(wide, XS, model=model, accumulates=False)
    # On a GPU a bf16 bias is added in an FP8 product's epilogue, which adds up fast, an f32 one after a bf16 product.
    bound = emulated.FLIP if wide is not variables else F32
    testing.assert_close(got, expected, bound)
    testing.assert_close(state, expected_state, 2.0**-20 if wide is variables else bound)
    assert min(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected)) > 0


def test_what_a_loss_makes_of_a_kernel_besides_has_its_gradient():
    model = te_flax.LayerNormMLP(intermediate_dim=64)
    variables = steps.randomized(steps.init(model, XS[0], rec=DELAYED))
    with steps.autocast(DELAYED):
        got, expected = (train(variables, XS, model=model, accumulates=how, penalty=0.01)[0] for how in (True, False))
    testing.assert_close(got, expected, F32)


def test_taking_buffers_of_kernels_that_the_gradients_lack():
    buffers = {"mlp": {"wi_kernel": jnp.ones((2, 3)), "wo_kernel": jnp.ones((3, 2))}}
    taken = te_flax.take_main_grads(buffers, flax.core.freeze(jax.tree.map(jnp.ones_like, buffers) | {"bias": 3}))
    assert isinstance(taken, flax.core.FrozenDict) and taken["bias"] == 3 and jnp.all(taken["mlp"]["wo_kernel"] == 2)
    with pytest.raises(ValueError, match=r"take_main_grads: grads: .* got \['wi_kernel'\] without 'wo_kernel'"):
        te_flax.take_main_grads(buffers, {"mlp": {"wi_kernel": jnp.ones((2, 3))}})


@pytest.mark.parametrize("name", MODELS)
def test_which_kernels_have_buffers(name):
    model, expected = MODELS[name]
    variables = steps.init(model, XS[0])
    buffers = te_flax.main_grads(model, variables, XS[0])
    flat, params = (traverse_util.flatten_dict(tree, sep="/") for tree in (buffers, variables["params"]))
    assert set(flat) == expected
    for path, buffer in flat.items():
        assert buffer.shape == params[path].shape and buffer.dtype == jnp.float32 and not buffer.any()


class Mixed(nn.Module):
    """A product that is not ours, one that is, and one in layers."""

    scanned: bool = True

    @nn.compact
    def __call__(self, x):
        x = te_flax.DenseGeneral(features=32, name="ours")(nn.Dense(32, name="not_ours")(x))
        axes = {"params": 0, STATE_COLLECTION: 0} | ({MAIN_GRADS_COLLECTION: 0} if self.scanned else {})
        metadata = {nn.PARTITION_NAME: "layers"}
        layers = nn.scan(
            nn.remat(Block), variable_axes=axes, split_rngs={"params": True}, length=2, metadata_params=metadata
        )
        return layers(name="layers")(x, None)[0], None


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + te_flax.LayerNormMLP(intermediate_dim=64, name="mlp")(x)[0], None


@pytest.mark.parametrize("rec", [DELAYED, None], ids=["delayed", "off"])
@pytest.mark.parametrize("scanned", [True, False], ids=["named", "not named"])
def test_scan_over_layers_with_remat_and_modules_that_are_not_ours(scanned, rec):
    model = Mixed(scanned)
    variables = steps.randomized(steps.init(model, XS[0], rec=rec))
    with steps.autocast(rec):
        buffers = te_flax.main_grads(model, variables, XS[0])
        assert paths(buffers) == {"ours/kernel", *(["layers/mlp/wi_kernel", "layers/mlp/wo_kernel"] * scanned)}
        got, expected = (train(variables, XS, model=model, accumulates=how) for how in (True, False))
    testing.assert_close(got[0], expected[0], F32)
    testing.assert_close(got[1], expected[1], 2.0**-20)


class Shared(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = te_flax.DenseGeneral(features=32)
        return layer(jnp.sin(layer(x))), None


@pytest.mark.parametrize("rec", [CURRENT, None], ids=["current", "off"])
def test_a_module_used_twice(rec):
    variables = steps.init(Shared(), XS[0], rec=rec)
    with steps.autocast(rec):
        got, expected = (train(variables, XS, model=Shared(), accumulates=how)[0] for how in (True, False))
    testing.assert_close(got, expected, F32)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_a_boxed_module_used_twice_on_a_mesh(explicit):
    """Its boxes constrain what is in them anew for each call, by which a buffer must not become another."""
    module, resource = te_flax.LayerNormMLP(intermediate_dim=64), te.MeshResource(tp_resource="model")
    mesh = testing.mesh_of((2, 2), ("data", "model"), explicit=explicit)

    def loss(params, main_grads):
        call = lambda x: module.apply({"params": params, MAIN_GRADS_COLLECTION: main_grads}, x)[0]
        return jnp.mean((call(jnp.sin(call(XS[0]))) - 0.3) ** 2)

    with testing.on_mesh(mesh), te.global_shard_guard(resource):
        variables = steps.init(module, XS[0], unbox=False)
        params, zeros = variables["params"], te_flax.main_grads(module, variables, XS[0])
        with nn.logical_axis_rules(te_flax.extend_logical_axis_rules(())):
            got = jax.jit(jax.grad(loss, argnums=1))(params, jax.tree.map(lambda zero: zero + 0.5, zeros))
            products = jax.jit(jax.grad(loss))(params, {})
    expected = {name: jax.tree.map(lambda product: product + 0.5, products[name]) for name in zeros}
    testing.assert_close(jax.device_get(got), jax.device_get(expected), F32)


class Mapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, STATE_COLLECTION: 0, MAIN_GRADS_COLLECTION: 0}
        options = dict(split_rngs={"params": True}, in_axes=(0, None), metadata_params={nn.PARTITION_NAME: "each"})
        return nn.vmap(Block, variable_axes=axes, **options)(name="each")(x, None)


class SharedInScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        shared = ("params", MAIN_GRADS_COLLECTION)
        return nn.scan(Block, variable_broadcast=shared, split_rngs={"params": False}, length=2)(name="all")(x, None)


@pytest.mark.parametrize("model", [Layer(), Mixed(), Mapped(), SharedInScan()], ids=lambda m: type(m).__name__)
def test_nothing_is_made_that_was_not_asked_for(model):
    """A call that makes a buffer takes the kernel's gradient, in transforms that name the collection too."""
    variables = model.init(jax.random.key(0), XS[0])
    assert set(variables) == {"params"}
    assert te_flax.main_grads(model, variables, XS[0])
    for mutable in (True, flax.core.DenyList("params")):
        _, written = model.apply(variables, XS[0], mutable=mutable)
        assert MAIN_GRADS_COLLECTION not in written
        grads = jax.grad(lambda v: jnp.sum(jnp.sin(first(model.apply(v, XS[0], mutable=mutable)[0]))))(variables)
        assert all(jnp.any(g) for g in jax.tree.leaves(grads))


def test_buffers_are_placed_and_boxed_as_kernels_are():
    module = te_flax.LayerNormMLP(intermediate_dim=64)
    variables = steps.init(module, XS[0], unbox=False)
    buffers = te_flax.main_grads(module, variables, XS[0])
    assert nn.get_partition_spec(buffers)["wi_kernel"] == nn.get_partition_spec(variables)["params"]["wi_kernel"]
    testing.assert_close(*[module.apply({**variables, **more}, XS[0])[0] for more in ({}, {"main_grads": buffers})], 0)
    shapes = jax.eval_shape(lambda: variables)
    assert jax.tree.map(jnp.shape, te_flax.main_grads(module, shapes, XS[0])) == jax.tree.map(jnp.shape, buffers)
    mesh = testing.mesh_of((2, 2), ("data", "model"))
    with testing.on_mesh(mesh):
        placed = steps.place(mesh, variables, te.MeshResource(dp_resource="data", tp_resource="model"))
        buffers = te_flax.main_grads(module, placed, XS[0])
        for name, buffer in buffers.items():
            assert buffer.sharding == placed["params"][name].sharding


@pytest.mark.parametrize("rec", [DELAYED, None], ids=["delayed", "off"])
def test_sharded_is_unsharded(rec):
    model, resource = MODELS["layer"][0], te.MeshResource(dp_resource="data", tp_resource="model")
    boxed = steps.init(model, XS[0], rec=rec, unbox=False)
    with steps.autocast(rec):
        with jax.default_device((mesh := testing.mesh_of((2, 2), ("data", "model"))).devices.flat[0]):
            expected, _ = train(nn.unbox(boxed), XS, model=model, accumulates=False)
    with testing.on_mesh(mesh), steps.autocast(rec, mesh_resource=resource):
        placed = steps.place(mesh, boxed, resource)
        xs = testing.shard(mesh, XS, jax.sharding.PartitionSpec(None, "data"))
        got, _ = train(placed, xs, model=model, accumulates=True)
    testing.assert_close(jax.device_get(got), jax.device_get(expected), emulated.FLIP if rec else F32)


class Counting(nn.Module):
    """A product that is ours, in a module that writes a collection of its own in each call."""

    @nn.compact
    def __call__(self, x):
        count = self.variable("counts", "calls", jnp.zeros, ())
        count.value += 1
        return te_flax.DenseGeneral(features=8)(x)


def test_variables_of_other_collections_and_earlier_buffers_are_no_matter():
    variables = steps.init(Counting(), XS[0])
    buffers = te_flax.main_grads(Counting(), variables, XS[0])
    assert paths(buffers) == {"DenseGeneral_0/kernel"}
    used = {**variables, MAIN_GRADS_COLLECTION: jax.tree.map(jnp.ones_like, buffers)}
    testing.assert_same_bytes(te_flax.main_grads(Counting(), used, XS[0]), buffers)
    with steps.autocast(DELAYED):  # whose state these variables have not
        testing.assert_same_bytes(te_flax.main_grads(Counting(), variables, XS[0]), buffers)


def test_buffers_for_some_of_the_kernels_of_a_product():
    module = MODELS["dense, split"][0]
    variables = steps.init(module, XS[0])
    buffers = te_flax.main_grads(module, variables, XS[0])
    del buffers["a_kernel"]
    with pytest.raises(ValueError, match="main_grads: expected a buffer for each kernel of one product"):
        module.apply({**variables, MAIN_GRADS_COLLECTION: buffers}, XS[0])


@pytest.mark.parametrize("rec", [DELAYED, None], ids=["delayed", "off"])
def test_sums_that_nobody_needs_take_no_memory(rec):
    """Of the kernels, whose own gradients are zeros: one tree of gradients may be added up for all parameters."""
    module = te_flax.DenseGeneral(features=512, use_bias=False)
    variables = steps.init(module, XS[0], rec=rec)
    with steps.autocast(rec):
        temp = [
            train.lower(variables, XS, model=module, accumulates=how).compile().memory_analysis().temp_size_in_bytes
            for how in (True, False)
        ]
    # A GPU's XLA keeps the gradient of the output, half as large as the kernel's, where that is no product of FP8.
    assert temp[0] < temp[1] + variables["params"]["kernel"].nbytes, temp
