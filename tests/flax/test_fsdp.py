"""Kernels that FSDP shards: gathered for each product as bytes, once, in order, and nothing else changes."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import pytest
import steps
from jax.sharding import PartitionSpec as P
from meshes import LLAMA, collectives, cpu_mesh, layer_step

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import testing
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.layernorm_dense import layernorm_dense
from transformer_engine_jax.sharding import gathered_axis

BATCH, LENGTH, HIDDEN, WIDE = 4, 16, 64, 96
FSDP = te.MeshResource(fsdp_resource="data")
BOTH = te.MeshResource(fsdp_resource="data", tp_resource="model")
X, DY, UP, DOWN, GAMMA, UP_BUFFER, DOWN_BUFFER = (
    jnp.asarray(a)
    for a in emulated.normal(
        5,
        (BATCH, LENGTH, HIDDEN),
        (BATCH, LENGTH, HIDDEN),
        (HIDDEN, WIDE),
        (WIDE, HIDDEN),
        (HIDDEN,),
        (HIDDEN, WIDE),
        (WIDE, HIDDEN),
    )
)
# Kernels of a layer as they are gathered, [k, ..] or [n, k], and how many there are.
KERNELS = {
    "gpt": {"64,3,64": 1, "64,64": 1, "64,1,96": 1, "64,96": 1},
    "llama": {"64,64": 2, "64,2,32": 1, "64,2,96": 1, "64,96": 1},
}


def test_axes_that_are_gathered():
    for explicit in (False, True):
        mesh = cpu_mesh((2, 2), ("data", "model"), explicit=explicit)
        with testing.on_mesh(mesh), te.autocast(mesh_resource=BOTH):
            assert gathered_axis(("embed", "act", "mlp"), (64, 2, 96)) == 0
            assert gathered_axis(("mlp", "embed"), (96, 64)) == 1
            assert gathered_axis(("mlp", "embed"), (96, 63)) is None, "does not divide"
            assert gathered_axis(("mlp", "heads"), (96, 64)) is None
            assert gathered_axis((), (96, 64)) is None
            with pytest.raises(
                ValueError, match=r"kernel_axes: expected 2 logical axes for \[96, 64\], got \('embed',\)"
            ):
                gathered_axis(("embed",), (96, 64))
        with testing.on_mesh(mesh), te.autocast(mesh_resource=te.MeshResource(dp_resource="data")):
            assert gathered_axis(("embed", "mlp"), (64, 96)) is None
    with te.autocast(mesh_resource=BOTH):
        assert gathered_axis(("embed", "mlp"), (64, 96)) is None, "there is no mesh"


@pytest.mark.parametrize("rec", [steps.DELAYED, steps.CURRENT], ids=["delayed", "current"])
@pytest.mark.parametrize("name, fields", [("gpt", {}), ("llama", LLAMA)])
@pytest.mark.parametrize("flavour, explicit", [("linen", False), ("linen", True), ("nnx", False)])
def test_a_layer_gathers_each_kernel_once_a_pass_as_bytes(flavour, explicit, name, fields, rec):
    step, variables = layer_step(flavour, fields, rec, X)
    mesh = cpu_mesh((2,), ("data",), explicit=explicit)
    with testing.on_mesh(mesh), steps.autocast(rec, mesh_resource=FSDP):
        if flavour == "linen":
            variables = steps.place(mesh, variables, FSDP)
        else:

            def placed(v):
                axes = v.get_metadata("out_sharding", None)
                spec = P(*("data" if a == "embed" else None for a in axes or ()))
                return v.replace(testing.shard(mesh, v.get_value(), spec)) if axes else v

            variables = jax.tree.map(placed, variables, is_leaf=lambda v: hasattr(v, "get_metadata"))
        x, dy = (testing.shard(mesh, a, P("data")) for a in (X, DY))
        found = collectives(step, variables, x, dy)
    gathers = {array: n for (array, how), n in found.items() if how == "all-gather" and "," in array}
    assert gathers == {f"u8[{shape}]": 2 * n for shape, n in KERNELS[name].items()}
    sums = {array: n for (array, how), n in found.items() if how == "all-reduce" and "," in array}
    assert sums == {f"f32[{shape}]": n for shape, n in KERNELS[name].items()}, "in the order of what is scattered"


AXES = dict(kernel_axes=("embed", "mlp"))
MODULES = {
    "layernorm_dense": te_flax.LayerNormDenseGeneral(features=HIDDEN, **AXES),
    "layernorm_dense, its norm returned": te_flax.LayerNormDenseGeneral(
        features=HIDDEN, return_layernorm_output=True, **AXES
    ),
    "mlp": te_flax.LayerNormMLP(intermediate_dim=WIDE),
    "mlp, its norm returned": te_flax.LayerNormMLP(intermediate_dim=WIDE, return_layernorm_output=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_gather_their_kernels_as_bytes(name):
    module, mesh = MODULES[name], cpu_mesh((2,), ("data",))
    variables = steps.init(module, X, rec=steps.CURRENT, unbox=False)

    def step(variables, x, dy):
        y, vjp = jax.vjp(lambda v, x: module.apply(v, x)[0], variables, x)
        return y, vjp(dy)

    with testing.on_mesh(mesh), steps.autocast(steps.CURRENT, mesh_resource=FSDP):
        x, dy = (testing.shard(mesh, a, P("data")) for a in (X, DY))
        found = collectives(step, steps.place(mesh, variables, FSDP), x, dy)
    gathers = {array: n for (array, how), n in found.items() if how == "all-gather" and "," in array}
    shapes = ("64,1,96", "64,96") if "mlp" in name else ("64,64",)
    assert gathers == {f"u8[{shape}]": 2 for shape in shapes}


def test_gradients_are_scattered_before_they_are_transposed_or_waited_for():
    """Where shardings are types: the compiler scatters a sum that nothing but the shards is taken of."""
    mesh = cpu_mesh((2,), ("data",), explicit=True)

    def step(x, dy, kernels):
        def layers(x, kernels):
            for kernel, axes in zip(kernels, [("embed", "mlp"), ("mlp", "embed")]):
                one = emulated.quantizers(emulated.states(), emulated.RECIPES["delayed"])
                x = dense(x, kernel, quantizers=one, kernel_axes=axes)
            return x

        return jax.vjp(layers, x, kernels)[1](dy)

    with testing.on_mesh(mesh), te.autocast(mesh_resource=FSDP):
        x, dy = (testing.shard(mesh, a, P("data")) for a in (X, DY))
        kernels = testing.shard(mesh, UP, P("data")), testing.shard(mesh, DOWN, P(None, "data"))
        traced = jax.make_jaxpr(step)(x, dy, kernels)
    operands = lambda name: [e.invars[-1].aval for e in traced.jaxpr.eqns if e.primitive.name == name]
    (transposed,) = [a for a in operands("transpose") if a.shape == (HIDDEN, WIDE) and a.dtype == jnp.float32]
    (waited_for,) = operands("te_after")
    assert waited_for.shape == (WIDE, HIDDEN)
    assert transposed.sharding.spec == P("data", None) and waited_for.sharding.spec == P(None, "data")


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("rec", ["delayed", "current"])
@pytest.mark.parametrize("explicit", [False, True])
def test_products_of_gathered_kernels(explicit, rec, accumulates):
    states = [emulated.states() for _ in range(2)]

    def gradients(x, dy, states, gamma, kernels, buffers, on_mesh):
        def run(x, states, gamma, kernels, buffers):
            one, two = [emulated.quantizers(s, emulated.RECIPES[rec]) for s in states]
            up, down = map(te.Accumulating, kernels, buffers) if accumulates else kernels
            axes = [("embed", "mlp"), ("mlp", "embed")] if on_mesh else [(), ()]
            y = jnp.sin(layernorm_dense(x, gamma, None, up, quantizers=one, kernel_axes=axes[0]))
            return dense(y, down, quantizers=two, kernel_axes=axes[1])

        y, vjp = jax.vjp(run, x, states, gamma, kernels, buffers)
        return y, vjp(dy)

    run = partial(jax.jit, static_argnums=6)(gradients)
    kernels, buffers = (UP / 8, DOWN / 8), (UP_BUFFER, DOWN_BUFFER)
    expected = jax.device_get(run(X, DY, states, GAMMA, kernels, buffers, False))
    mesh = cpu_mesh((2, 2), ("data", "model"), explicit=explicit)
    specs = P("data", "model"), P("model", "data")
    with testing.on_mesh(mesh), te.autocast(mesh_resource=BOTH):
        x, dy = (testing.shard(mesh, a, P("data")) for a in (X, DY))
        placed = [tuple(testing.shard(mesh, a, spec) for a, spec in zip(of, specs)) for of in (kernels, buffers)]
        got = run(x, dy, states, testing.shard(mesh, GAMMA, P()), *placed, True)
    testing.assert_close(jax.device_get(got), expected, 0.02)
