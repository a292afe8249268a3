"""te_flax.init_state finds the states of layers along whichever axis a scan stacks them."""

import functools

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import recipe
from transformer_engine_jax.flax import STATE_COLLECTION

X = jax.random.normal(jax.random.key(0), (4, 16))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return te_flax.DenseGeneral(features=16, name="dense")(x), None


def scanned(axis: int, layers: int):
    scan = nn.scan(Layer, {"params": 0, STATE_COLLECTION: axis}, split_rngs={"params": True}, length=layers)
    return scan()


@functools.cache
def trained(axis: int, layers: int, history: int):
    """(the model, its variables after two steps)."""
    model = scanned(axis, layers)
    with te.autocast(True, recipe.DelayedScaling(amax_history_len=history)):
        variables = nn.unbox(model.init(jax.random.key(1), X))
        for scale in (1.0, 3.0):
            grads = jax.grad(lambda v, x: jnp.sum(jnp.sin(model.apply(v, x)[0])))(variables, scale * X)
            variables = {**variables, STATE_COLLECTION: grads[STATE_COLLECTION]}
    return model, variables


def leading(variables, axis: int) -> np.ndarray:
    """The packed states with their layers in front."""
    return np.moveaxis(variables[STATE_COLLECTION]["dense"]["gemm_state"].packed, axis, 0)


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize(
    "history, wanted, fp8_format",
    [*((*lengths, recipe.Format.HYBRID) for lengths in ((4, 4), (1, 1), (4, 2), (1, 3))), (4, 4, recipe.Format.E4M3)],
)
def test_along_any_axis_as_along_the_first(axis, layers, history, wanted, fp8_format):
    asked = recipe.DelayedScaling(amax_history_len=wanted, fp8_format=fp8_format)
    found = []
    for along in (0, axis):
        model, variables = trained(along, layers, history)
        with te.autocast(True, asked):
            ready = te_flax.init_state(model, variables, X)
            fresh = te_flax.init_state(model, {"params": variables["params"]}, X)
            assert jnp.isfinite(model.apply(ready, X)[0]).all()
        found.append((leading(ready, along), leading(fresh, along)))
        same = (history, fp8_format) == (wanted, recipe.Format.HYBRID)
        assert np.array_equal(leading(ready, along), leading(variables, along)) == same
    jax.tree.map(np.testing.assert_array_equal, *found)
    np.testing.assert_array_equal(found[1][1], np.broadcast_to(te.GemmState.create(asked).packed, found[1][1].shape))


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_they_are_updated_and_restored(axis, layers):
    model, variables = trained(axis, layers, 4)
    state = variables[STATE_COLLECTION]["dense"]["gemm_state"]
    plain = {**variables, STATE_COLLECTION: {"dense": {"gemm_state": {"packed": np.asarray(state.packed)}}}}
    written = flax.serialization.from_bytes(
        jax.tree.map(jnp.zeros_like, variables), flax.serialization.to_bytes(variables)
    )
    with te.autocast(True, recipe.DelayedScaling(amax_history_len=4)):
        for found in (variables, plain, written):
            ready = te_flax.init_state(model, found, X)
            np.testing.assert_array_equal(leading(ready, axis), leading(variables, axis))
        grads = jax.grad(lambda v, x: jnp.sum(0 * jnp.sin(model.apply(v, x)[0])))(variables, X)  # a newest amax of 0
    new = {STATE_COLLECTION: grads[STATE_COLLECTION]}
    np.testing.assert_array_equal(leading(te.update_collections(new, variables), axis), leading(grads, axis))
    unused = jax.tree.map(jnp.zeros_like, new)
    np.testing.assert_array_equal(leading(te.update_collections(unused, variables), axis), leading(variables, axis))


def test_inside_of_jit_the_recipe_is_known_however_often():
    """A call that nn.jit has traced is traced once more, as it tells its recipe."""

    jitted = nn.jit(te_flax.DenseGeneral)

    class Jitted(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jitted(features=16, name="dense")(x)

    model = Jitted()
    with te.autocast(True, recipe.DelayedScaling()):
        variables = nn.unbox(model.init(jax.random.key(1), X))
        state = jax.grad(lambda v: jnp.sum(model.apply(v, X)))(variables)[STATE_COLLECTION]
    with te.autocast(True, recipe.DelayedScaling(fp8_format=recipe.Format.E4M3)):
        for _ in range(2):
            ready = te_flax.init_state(model, {**variables, STATE_COLLECTION: state}, X)
            of_gradient = ready[STATE_COLLECTION]["dense"]["gemm_state"].grad
            assert of_gradient.scale == 448 / of_gradient.amax_history[1]
        made = model.init(jax.random.key(1), X)[STATE_COLLECTION]["dense"]["gemm_state"]
        assert isinstance(made, te.GemmState)


def test_states_of_flaxs_own_modules_stay():
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = te_flax.DenseGeneral(features=16, name="ours")(x)
            return nn.Dense(16, dot_general_cls=nn.Fp8DotGeneralOp, name="flaxs")(x)

    model = Mixed()
    with te.autocast(True, recipe.DelayedScaling()):
        variables = nn.unbox(model.init(jax.random.key(1), X))
        flaxs = variables[STATE_COLLECTION]["flaxs"]
        ready = te_flax.init_state(model, {**variables, STATE_COLLECTION: {"flaxs": flaxs}}, X)
        jax.tree.map(np.testing.assert_array_equal, ready[STATE_COLLECTION], variables[STATE_COLLECTION])
        with pytest.raises(ValueError, match=r"init_state: \['flaxs'\].*: expected it among the variables, float32\["):
            te_flax.init_state(model, {"params": variables["params"]}, X)


def test_remat_scan_stacks_modules_that_name_their_axes():
    """nn.remat_scan takes no name for the axis of the stack, which is not sharded then."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return te_flax.LayerNormMLP(intermediate_dim=32)(x)[0]

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat_scan(Block, lengths=(2, 2))(name="blocks")(x)

    def in_turn(variables):
        x = X
        for i in range(4):
            x = Block().apply(jax.tree.map(lambda a: a[i // 2, i % 2], variables), x)
        return jnp.sum(jnp.sin(x))

    with te.autocast(True, recipe.DelayedScaling()):
        boxed = Model().init(jax.random.key(1), X)
        variables = nn.unbox(boxed)
        grads = jax.jit(jax.grad(lambda v: jnp.sum(jnp.sin(Model().apply(v, X)))))(variables)
        wanted = jax.jit(jax.grad(in_turn))({name: collection["blocks"] for name, collection in variables.items()})
    assert boxed["params"]["blocks"]["LayerNormMLP_0"]["wo_kernel"].names == (None, None, "mlp", "embed")
    for name, collection in grads.items():
        compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
        jax.tree.map(compare, collection["blocks"], wanted[name])
