"""Sequences that are sharded between products: what is gathered and scattered for these, and that nothing else changes.

On virtual CPU devices; XLA makes one reduce-scatter of a sum and a slice on GPUs alone, so here they are sums.
"""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import pytest
import steps
from jax.sharding import PartitionSpec as P
from meshes import LLAMA, FusedLayer, collectives, cpu_mesh, layer_step

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.flax import LayerNormMLP
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.layernorm_dense import layernorm_dense
from transformer_engine_jax.ops.layernorm_mlp import layernorm_mlp
from transformer_engine_jax.ops.layernorm_projections import layernorm_projections
from transformer_engine_jax.sharding import SequenceShards, constrain

BATCH, LENGTH, HIDDEN, WIDE = 4, 16, 64, 96
X, DY, W1, W2, W3, GAMMA = (
    jnp.asarray(a)
    for a in emulated.normal(
        5,
        (BATCH, LENGTH, HIDDEN),
        (BATCH, LENGTH, HIDDEN),
        (HIDDEN, 2, WIDE),
        (WIDE, HIDDEN),
        (HIDDEN, WIDE),
        (HIDDEN,),
    )
)
RESOURCES = {
    "tensor": te.MeshResource(dp_resource="data", tpsp_resource="model"),
    "context": te.MeshResource(cp_resource="data", tpsp_resource="model"),
}
BETWEEN, WHOLE = ("batch", "seqlen_tp", "embed_activations"), ("batch", "seqlen", "embed_activations")
Layer = partial(FusedLayer, enable_sequence_parallel=True)


# --- Shards in front -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("resource", RESOURCES)
def test_shards_are_put_in_front_as_devices_have_them(resource, transposed):
    axes = [(a[1], a[0], a[2]) if transposed else a for a in (BETWEEN, WHOLE)]
    x = jnp.swapaxes(X, 0, 1) if transposed else X
    mesh = cpu_mesh((2, 2), ("data", "model"))
    with testing.on_mesh(mesh), te.autocast(mesh_resource=RESOURCES[resource]):
        shards = SequenceShards.of(x, axes[0][:-1], axes[1][:-1])
        assert shards.gathered
        if (resource, transposed) == ("tensor", True):  # they are there
            assert shards.split(x) is shards.join(x) is x and shards.axes(axes[0], between=True) == axes[0]
            return
        placed = jax.jit(lambda x: constrain(x, axes[0]))(x)
        split = jax.jit(shards.split)(placed)
        n, length = 2, LENGTH // 2
        assert split.shape == (n, length, BATCH, HIDDEN) if transposed else (n, BATCH, length, HIDDEN)
        testing.assert_same_bytes(jax.jit(shards.join)(split), x)
        between = shards.axes(axes[0], between=True)
        local = lambda x: constrain(shards.split(constrain(x, axes[0])), between)
        assert not collectives(local, placed), "each device has its shard already"
        assert not collectives(lambda x: constrain(shards.join(constrain(x, between)), axes[0]), jax.jit(local)(placed))
        assert collectives(lambda x: constrain(local(x), shards.axes(axes[1])), placed).total() == 1


def test_what_does_not_divide_stays_where_it_is():
    mesh = cpu_mesh((2, 2), ("data", "model"))
    with testing.on_mesh(mesh), te.autocast(mesh_resource=RESOURCES["tensor"]):
        assert SequenceShards.of(X, BETWEEN[:-1], WHOLE[:-1]).count == 2
        assert SequenceShards.of(X[:, :15], BETWEEN[:-1], WHOLE[:-1]) == SequenceShards()
        assert SequenceShards.of(X, WHOLE[:-1], WHOLE[:-1]) == SequenceShards()
        assert SequenceShards.of(X, (), ()) == SequenceShards()
    assert SequenceShards.of(X, BETWEEN[:-1], WHOLE[:-1]) == SequenceShards(), "there is no mesh"


# --- Ops -------------------------------------------------------------------------------------------------------------


def run_mlp(quantizers, x, gamma, up, down, on_mesh, inside=("batch", "seqlen", "mlp"), **options):
    axes = dict(norm_input_axes=BETWEEN, dot_1_input_axes=WHOLE, dot_2_input_axes=inside)
    return layernorm_mlp(
        x, gamma, None, (up, down), activations=("silu", "linear"), quantizers=quantizers and tuple(quantizers[:2]),
        **(axes if on_mesh else {}), **options,
    )  # fmt: skip


def run_attention(quantizers, x, gamma, up, down, on_mesh):
    """As attention projects: two products of a norm, and one of what comes of these."""
    one, two, three = quantizers or 3 * [None]
    axes = dict(norm_input_axes=BETWEEN, dot_input_axes=WHOLE) if on_mesh else {}
    (q, k, v), past = layernorm_projections(
        x, gamma, None, [W3, up], [None, None], quantizers=quantizers and [one, two], return_input=True, **axes
    )
    axes = dict(input_axes=("batch", "seqlen", "mlp"), output_axes=BETWEEN) if on_mesh else {}
    return dense(q * jnp.sin(k) + v, down, quantizers=three, **axes) + past


def run_one(quantizers, x, gamma, up, down, on_mesh):
    one, two, _ = quantizers or 3 * [None]
    axes = dict(norm_input_axes=BETWEEN, dot_input_axes=WHOLE) if on_mesh else {}
    y = layernorm_dense(x, gamma, None, up[:, 0], quantizers=one, **axes)
    axes = dict(input_axes=("batch", "seqlen", "mlp"), output_axes=BETWEEN) if on_mesh else {}
    return dense(y, down, quantizers=two, residual=x, **axes)


OPS = {
    "mlp": run_mlp,
    "mlp with residual": partial(run_mlp, residual=True),
    "mlp, its inside not told": partial(run_mlp, inside=()),
    "attention": run_attention,
    "one product": run_one,
}


@pytest.mark.parametrize("rec", [None, "delayed", "current"])
@pytest.mark.parametrize("resource", RESOURCES)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_ops_of_sharded_sequences_compute_what_they_do_of_whole_ones(op, resource, explicit, rec):
    states = [emulated.states() for _ in range(3)]

    def gradients(x, dy, states, kernels, on_mesh):
        def run(x, states, *kernels):
            quantizers = [emulated.quantizers(s, emulated.RECIPES[rec]) for s in states] if rec else None
            return OPS[op](quantizers, x, *kernels, on_mesh)

        y, vjp = jax.vjp(run, x, states, *kernels)
        return y, vjp(dy)

    kernels = GAMMA, W1 / 8, W2 / 8
    expected = jax.device_get(jax.jit(gradients, static_argnums=4)(X, DY, states, kernels, False))
    mesh = cpu_mesh((2, 2), ("data", "model"), explicit=explicit)
    tokens = P("data", "model") if resource == "tensor" else P(None, ("data", "model"))
    specs = P(None), P(None, None, "model"), P("model")
    with testing.on_mesh(mesh), te.autocast(mesh_resource=RESOURCES[resource]):
        x, dy = (testing.shard(mesh, a, tokens) for a in (X, DY))
        placed = tuple(testing.shard(mesh, k, spec) for k, spec in zip(kernels, specs))
        got = jax.jit(gradients, static_argnums=4)(x, dy, states, placed, True)
        assert got[0].sharding.is_equivalent_to(x.sharding, 3)
    testing.assert_close(jax.device_get(got), expected, 0.02 if rec else 5 * emulated.F32)


# --- Layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [False, True])
def test_an_mlp_stage_by_stage_gives_shards_as_it_takes_them(explicit):
    axes = dict(layernorm_input_axes=BETWEEN, dot_1_input_axes=WHOLE, dot_2_input_axes=("batch", "seqlen", "mlp"))
    mlp = LayerNormMLP(intermediate_dim=WIDE, return_layernorm_output=True, **axes)
    boxed = steps.init(mlp, X, unbox=False)
    mesh = cpu_mesh((2, 2), ("data", "model"), explicit=explicit)
    with testing.on_mesh(mesh), te.autocast(mesh_resource=RESOURCES["tensor"]):
        x = testing.shard(mesh, X, P("data", "model"))
        y, _ = jax.jit(mlp.apply)(steps.place(mesh, boxed, RESOURCES["tensor"]), x)
        assert y.sharding.is_equivalent_to(x.sharding, 3)


@pytest.mark.parametrize("rec", [None, steps.DELAYED, steps.CURRENT], ids=["f32", "delayed", "current"])
@pytest.mark.parametrize("fields", [{}, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_a_layer_gathers_each_input_and_gradient_once_in_fp8_as_bytes(flavour, fields, rec):
    step, variables = layer_step(flavour, {**fields, "enable_sequence_parallel": True}, rec, X)
    resource = te.MeshResource(tpsp_resource="model")
    mesh = cpu_mesh((2,), ("model",))
    with testing.on_mesh(mesh), steps.autocast(rec, mesh_resource=resource):
        if flavour == "linen":
            variables = steps.place(mesh, variables, resource)
        x, dy = (testing.shard(mesh, a, P(None, "model")) for a in (X, DY))
        found = collectives(step, variables, x, dy)
    tokens = f"2,{BATCH},{LENGTH // 2}"  # of both shards, one after the other
    gathers = {array: n for (array, how), n in found.items() if how == "all-gather"}
    if rec is None:
        assert gathers == {f"f32[{tokens},{HIDDEN}]": 4}
    else:  # inputs once more for the products that yield the kernels' gradients: their tokens alone are kept
        assert gathers == {f"u8[{tokens},{HIDDEN}]": 6}
    # On GPUs, XLA adds up what two products yield of llama's gradient before it sums that over devices.
    sums = {array: n for (array, how), n in found.items() if how == "all-reduce"}
    assert sums.pop(f"f32[{tokens},{HIDDEN}]") == 4 + (fields is LLAMA)
    assert set(sums) <= {f"f32[{HIDDEN}]", "f32[24]", "s32[24]"}, "gammas and amaxes"
    assert {how for _, how in found} == {"all-gather", "all-reduce"}


def test_between_products_a_sequence_is_there_by_halves():
    layer, resource = Layer(), te.MeshResource(tp_resource="model")
    mesh = cpu_mesh((2,), ("model",))
    boxed = steps.init(layer, X, unbox=False)
    with testing.on_mesh(mesh), te.autocast(mesh_resource=resource):
        placed, x = steps.place(mesh, boxed, resource), testing.shard(mesh, X, P(None, "model"))
        assert jax.jit(layer.apply)(placed, x).sharding.spec == P(None, "model")


@pytest.mark.parametrize(
    "resource, expected",
    [
        (te.MeshResource(dp_resource="model"), ["forward", "backward"]),
        (te.MeshResource(tp_resource="model"), ["forward"]),
        (te.MeshResource(tpsp_resource="model"), []),
    ],
)
def test_products_add_no_sums_over_devices(resource, expected):
    """As those of llama's q and of its k and v do: the one's would be exchanged before the other adds to it."""
    layer = Layer(**LLAMA, enable_sequence_parallel=resource.tpsp_resource is not None)
    with testing.on_mesh(cpu_mesh((2,), ("model",))), steps.autocast(steps.CURRENT, mesh_resource=resource):
        variables = jax.eval_shape(layer.init, jax.random.key(0), X)
        step = lambda variables, x, dy: jax.vjp(layer.apply, variables, x)[1](dy)
        products = [row for row in te.explain(step, variables, X, DY).rows if row.name == "gemm"]
    adding = [row for row in products if any(operand.name == "c" for operand in row.operands)]
    assert sorted(row.phase for row in adding for _ in range(row.count)) == sorted(expected)
