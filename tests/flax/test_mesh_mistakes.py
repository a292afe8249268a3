"""What a user gets who names mesh axes that are not there, enters a mesh the old way, or sets rules of his own."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import steps
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import testing
from transformer_engine_jax.flax.base import LogicalAxes
from transformer_engine_jax.sharding import constrain, logical_axis_rules, tensor_parallel

X = jnp.ones((4, 8, 32))
MODULE = te_flax.LayerNormMLP(intermediate_dim=64, layernorm_input_axes=("batch", "seqlen", None))
VARIABLES = nn.unbox(MODULE.init(jax.random.key(0), X))
MESH = testing.mesh_of((2, 2), ("data", "model"))


def run(resource: te.MeshResource):
    variables = testing.shard(MESH, VARIABLES, jax.tree.map(lambda _: P(), VARIABLES))
    with te.autocast(False, mesh_resource=resource):
        return jax.jit(MODULE.apply)(variables, testing.shard(MESH, X, P()))


def test_mesh_axes_that_do_not_exist_are_named():
    with testing.on_mesh(MESH):
        with pytest.raises(ValueError, match=r"axes of the mesh in force, \['data', 'model'\], got 'dat' in "):
            run(te.MeshResource(dp_resource="dat"))


@pytest.mark.parametrize("resource", [te.MeshResource(tp_resource="modle"), te.MeshResource(fsdp_resource="dat")])
def test_mesh_axes_that_do_not_exist_are_named_where_no_activation_has_axes(resource):
    module = te_flax.DenseGeneral(features=16, kernel_axes=("embed", "mlp"))
    with testing.on_mesh(MESH), te.autocast(True, mesh_resource=resource):
        with pytest.raises(ValueError, match=r"axes of the mesh in force, \['data', 'model'\], got '(modle|dat)'"):
            variables = jax.jit(module.init)(jax.random.key(0), X)
            jax.jit(jax.grad(lambda v: jnp.sum(module.apply(v, X))))(variables)


@pytest.mark.parametrize("field", ["dp_resource", "tp_resource", "tpsp_resource", "fsdp_resource", "cp_resource"])
def test_mesh_axes_that_do_not_exist_are_named_where_nothing_has_axes(field):
    module = te_flax.DenseGeneral(features=16)
    with testing.on_mesh(MESH), te.autocast(True, mesh_resource=te.MeshResource(**{field: "dat"})):
        with pytest.raises(ValueError, match="axes of the mesh in force, .* got 'dat' in MeshResource"):
            jax.eval_shape(module.init, jax.random.key(0), X)


@pytest.mark.parametrize("resource", [te.MeshResource(dp_resource="data"), te.MeshResource(cp_resource="data")])
def test_a_users_own_shard_map_may_be_over_another_mesh(resource):
    stages = testing.mesh_of((4,), ("stage",))
    run = jax.shard_map(MODULE.apply, mesh=stages, in_specs=(P(), P("stage")), out_specs=P("stage"), check_vma=False)
    with te.autocast(False, mesh_resource=resource):
        got = jax.jit(run)(*testing.shard(stages, (VARIABLES, X), (jax.tree.map(lambda _: P(), VARIABLES), P("stage"))))
    assert got[0].shape == X.shape


@pytest.mark.parametrize("theirs, mesh_axes", [
    (("nvte_w_fsdp", "nvte_w_joined", "nvte_w_tp"), P("data", None, "model")),
    (("nvte_batch", "nvte_seqlen", "nvte_hidden"), P("data", None, None)),
    (("nvte_batch", "nvte_seqlen_tp", "nvte_w_no_shard"), P("data", "model", None)),
    (("nvte_head", "nvte_joined", "nvte_w_joined"), P("model", None, None)),
    (("nvte_batch", "nvte_seqlen", "nvte_hidden_tp"), P("data", None, "model")),
])  # fmt: skip
def test_logical_axes_by_nvidias_names(theirs, mesh_axes):
    with testing.on_mesh(MESH), te.autocast(mesh_resource=te.MeshResource(fsdp_resource="data", tp_resource="model")):
        assert nn.logical_to_mesh_axes(theirs, te_flax.extend_logical_axis_rules(())) == mesh_axes


def test_a_batch_by_nvidias_name_stays_where_it_is():
    with testing.on_mesh(MESH), te.autocast(mesh_resource=te.MeshResource(tp_resource="model")):
        x = testing.shard(MESH, X, P("data"))
        for batch, features in (("batch", "mlp"), ("nvte_batch", "nvte_hidden_tp")):
            y = jax.jit(lambda x, axes: constrain(x, axes), static_argnums=1)(x, (batch, None, features))
            assert y.sharding.spec == P("data", None, "model")


def test_mesh_axes_of_rules_that_do_not_exist_are_named():
    with testing.on_mesh(MESH), nn.logical_axis_rules([("batch", "dat")]):
        with pytest.raises(ValueError, match=r"\['data', 'model'\], .* got \['dat'\] by flax"):
            constrain(jnp.ones((4, 4)), ("batch", None))


def test_logical_axes_that_are_twice_there_are_named():
    with testing.on_mesh(MESH), pytest.raises(ValueError, match=r"each logical axis once, got \('mlp', 'mlp'\)"):
        constrain(jnp.ones((4, 4)), ("mlp", "mlp"))


def test_one_axis_for_dp_and_fsdp_is_one():
    rules = dict(logical_axis_rules(te.MeshResource(dp_resource="data", fsdp_resource="data")))
    assert rules["batch"] == ("data",) and rules["embed"] == "data"


def test_a_box_is_opened_as_it_is_where_that_is_asked_for():
    mesh = testing.mesh_of((2, 2), ("data", "model"), explicit=True)
    with testing.on_mesh(mesh), te.autocast(mesh_resource=te.MeshResource(tp_resource="model")):
        box = LogicalAxes(testing.shard(mesh, jnp.ones((4, 4)), P()), ("embed", "mlp"))
        assert box.unbox().sharding.spec == P(None, "model")
        assert box.unbox(apply_constraint=False) is box.value


def test_a_mesh_that_jax_does_not_tell_of_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        MESH.__enter__()
    try:
        with pytest.warns(RuntimeWarning, match=r"with jax.set_mesh\(mesh\)"):
            run(te.MeshResource(dp_resource="data"))
    finally:
        MESH.__exit__(None, None, None)


def test_rules_of_flax_leave_the_mesh_resource_what_they_do_not_name():
    module, resource = te_flax.LayerNormMLP(intermediate_dim=64), te.MeshResource("data", "model")
    boxed = module.init(jax.random.key(0), X)
    with testing.on_mesh(MESH), te.autocast(False, mesh_resource=resource):
        placed = nn.meta.replace_boxed(boxed, steps.place(MESH, boxed, resource))
        with nn.logical_axis_rules((("mine", None),)):
            step = jax.jit(lambda v, x: module.apply(v, x)[0])
            compiled = step.lower(placed, testing.shard(MESH, X, P("data"))).compile()
    assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("module", [
    te_flax.LayerNormMLP(intermediate_dim=64, layernorm_input_axes=None, dot_1_input_axes=None, dot_2_input_axes=None),
    te_flax.LayerNormDenseGeneral(features=16, layernorm_input_axes=None, dot_input_axes=None),
    te_flax.DenseGeneral(features=16, input_axes=None, kernel_axes=None),
], ids=lambda module: type(module).__name__)  # fmt: skip
def test_logical_axes_may_be_none(module):
    with te.autocast(True):
        module.init(jax.random.key(0), X)


@pytest.mark.parametrize("sizes, axis", [((2, 1, 2), "sequence"), ((2, 2, 1), "tensor")])
def test_of_tp_and_tpsp_the_axis_with_several_devices_splits_kernels(sizes, axis):
    mesh, resource = (
        testing.mesh_of(sizes, ("data", "tensor", "sequence")),
        te.MeshResource("data", "tensor", "sequence"),
    )
    x = jnp.asarray(jax.random.normal(jax.random.key(1), X.shape))
    fields = dict(layernorm_input_axes=("batch", "seqlen_tp", None), dot_2_input_axes=("batch", "seqlen", "mlp"))
    module = te_flax.LayerNormMLP(intermediate_dim=64, **fields)
    with testing.on_mesh(mesh), te.autocast(False, mesh_resource=resource):
        rules = dict(te_flax.extend_logical_axis_rules(()))
        assert rules["mlp"] == rules["heads"] == axis and rules["seqlen_tp"] == (axis,) and tensor_parallel()
        placed = steps.place(mesh, module.init(jax.random.key(0), X), resource)
        assert placed["params"]["wo_kernel"].sharding.spec[0] == axis
        y = jax.jit(module.apply)(placed, testing.shard(mesh, x, P("data")))[0]
    with jax.default_device(mesh.devices.flat[0]):
        expected = module.apply(VARIABLES, x)[0]
    # Two sums in another order, each of up to 64 terms.
    testing.assert_close(jax.device_get(y), expected, 2 * 64**0.5 * testing.epsilon(jnp.float32))


def test_one_axis_splits_kernels():
    mesh = testing.mesh_of((2, 2), ("tensor", "sequence"))
    with testing.on_mesh(mesh), te.autocast(mesh_resource=te.MeshResource(None, "tensor", "sequence")):
        with pytest.raises(ValueError, match="tp_resource='tensor' or tpsp_resource='sequence' to have one device"):
            te_flax.extend_logical_axis_rules(())
