"""What a user gets who names mesh axes that are not there, enters a mesh the old way, or sets rules of his own."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax

X = jnp.ones((4, 8, 32))
MODULE = te_flax.LayerNormMLP(intermediate_dim=64, layernorm_input_axes=("batch", "seqlen", None))


def mesh():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def test_mesh_axes_that_do_not_exist_are_named():
    variables = MODULE.init(jax.random.key(0), X)
    with jax.set_mesh(mesh()), te.autocast(False, mesh_resource=te.MeshResource(dp_resource="dat")):
        with pytest.raises(
            ValueError, match=r"axes of the mesh in force, \['data', 'model'\], .* got \['dat'\] by .*dat"
        ):
            jax.jit(MODULE.apply)(variables, X)


def test_a_mesh_that_jax_does_not_tell_of_is_warned_of():
    variables = MODULE.init(jax.random.key(0), X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        entered = mesh().__enter__()
    try:
        with te.autocast(False, mesh_resource=te.MeshResource(dp_resource="data")):
            with pytest.warns(RuntimeWarning, match=r"with jax.set_mesh\(mesh\)"):
                jax.jit(MODULE.apply)(variables, X)
    finally:
        entered.__exit__(None, None, None)


def test_rules_of_flax_leave_the_mesh_resource_what_they_do_not_name():
    module = te_flax.LayerNormMLP(intermediate_dim=64)
    with jax.set_mesh(mesh()), te.autocast(False, mesh_resource=te.MeshResource("data", "model")):
        rules = te_flax.extend_logical_axis_rules(())
        shapes = jax.eval_shape(module.init, jax.random.key(0), X)
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(shapes), mesh(), rules)
        variables = jax.jit(module.init, out_shardings=shardings)(jax.random.key(0), X)
        with nn.logical_axis_rules((("mine", None),)):
            compiled = jax.jit(lambda v, x: module.apply(v, x)[0]).lower(variables, X).compile()
    assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("module", [
    te_flax.LayerNormMLP(intermediate_dim=64, layernorm_input_axes=None, dot_1_input_axes=None, dot_2_input_axes=None),
    te_flax.LayerNormDenseGeneral(features=16, layernorm_input_axes=None, dot_input_axes=None),
    te_flax.DenseGeneral(features=16, input_axes=None, kernel_axes=None),
], ids=lambda module: type(module).__name__)  # fmt: skip
def test_logical_axes_may_be_none(module):
    with te.autocast(True):
        module.init(jax.random.key(0), X)
