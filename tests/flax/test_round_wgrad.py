"""round_wgrad: kernels' gradients rounded to the dtype of what a module takes, of every module, and nothing else."""

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from flax import traverse_util
from jax.sharding import PartitionSpec as P
from meshes import cpu_mesh

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import testing
from transformer_engine_jax.flax import MAIN_GRADS_COLLECTION

RECIPES = {"delayed": steps.DELAYED, "current": steps.CURRENT}
X, X_16 = (jnp.asarray(a, d) for a, d in zip(emulated.normal(0, *[(2, 16, 64)] * 2), (jnp.float32, jnp.bfloat16)))
LAYER = dict(hidden_size=64, mlp_hidden_size=96, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0)
MODULES = {
    "dense": te_flax.DenseGeneral(features=48, use_bias=True),
    "mlp of a callable": te_flax.LayerNormMLP(intermediate_dim=96, activations=(jnp.tanh,)),
    "layer": te_flax.TransformerLayer(**LAYER, use_bias=True),
    "layer, grouped": te_flax.TransformerLayer(**LAYER, num_gqa_groups=1, mlp_activations=("silu", "linear")),
}


def rounded(gradient) -> jax.Array:
    return jnp.asarray(gradient).astype(jnp.bfloat16).astype(gradient.dtype)


def gradients(module, variables, x, rec, rounds: bool) -> dict:
    with steps.autocast(rec, round_wgrad=rounds):
        _, (grads,) = steps.step(lambda v: module.apply(v, x), variables)
    return traverse_util.flatten_dict(grads, sep="/")


@pytest.mark.parametrize("rec", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_kernels_gradients_are_those_in_f32_rounded_once(name, rec):
    module = MODULES[name]
    variables = steps.init(module, X_16, rec=rec)
    wide, narrow = (gradients(module, variables, X_16, rec, rounds) for rounds in (False, True))
    kernels = [path for path in wide if "kernel" in path]
    assert kernels
    for path in kernels:
        assert narrow[path].dtype == wide[path].dtype == jnp.float32
        assert np.any(wide[path] != rounded(wide[path])), path
    expected = {path: rounded(gradient) if path in kernels else gradient for path, gradient in wide.items()}
    jax.tree.map(np.testing.assert_array_equal, narrow, expected)


def test_inputs_of_f32_round_nothing():
    module = te_flax.DenseGeneral(features=48)
    variables = steps.init(module, X, rec=steps.CURRENT)
    jax.tree.map(
        np.testing.assert_array_equal, *(gradients(module, variables, X, steps.CURRENT, r) for r in (False, True))
    )


def test_sums_in_buffers_stay_in_f32():
    module, rec = te_flax.LayerNormMLP(intermediate_dim=96), steps.CURRENT
    variables = steps.init(module, X_16, rec=rec)
    variables |= {MAIN_GRADS_COLLECTION: te_flax.main_grads(module, variables, X_16)}
    sums = [gradients(module, variables, X_16, rec, rounds) for rounds in (False, True)]
    summed = [path for path in sums[0] if path.startswith(MAIN_GRADS_COLLECTION)]
    assert len(summed) == 2
    for path in summed:
        np.testing.assert_array_equal(*[each[path] for each in sums], err_msg=path)
        assert np.any(sums[0][path] != rounded(sums[0][path]))


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("resource", ["dp_resource", "fsdp_resource"])
def test_each_device_rounds_what_is_summed(resource, explicit):
    """As the collective on a GPU moves it; a CPU's own converts to f32 and back."""
    rec, mesh = steps.DELAYED, cpu_mesh((2,), ("data",), explicit=explicit)
    resource = te.MeshResource(**{resource: "data"})
    module = te_flax.DenseGeneral(48, kernel_axes=("embed", "mlp"))
    x, dy = (jnp.asarray(a, jnp.bfloat16) for a in emulated.normal(1, (2, 16, 64), (2, 16, 48)))
    variables = steps.init(module, x, rec=rec, unbox=False)

    def gradient(variables, x, dy):
        return jax.vjp(lambda v: module.apply(v, x), variables)[1](dy)[0]["params"]["kernel"]

    with jax.default_device(mesh.devices.flat[0]), steps.autocast(rec, round_wgrad=True):
        parts = [jax.jit(gradient)(nn.unbox(variables), x[i : i + 1], dy[i : i + 1]) for i in (0, 1)]
    with testing.on_mesh(mesh), steps.autocast(rec, mesh_resource=resource, round_wgrad=True):
        of_shards = [testing.shard(mesh, each, P("data")) for each in (x, dy)]
        summed = jax.jit(gradient)(steps.place(mesh, variables, resource), *of_shards)
    assert summed.dtype == jnp.float32
    np.testing.assert_array_equal(summed, rounded(sum(parts)))
