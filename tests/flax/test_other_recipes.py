"""State that was made under another recipe: scales of init_state follow from its amaxes, format and margin."""

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import steps

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.flax import STATE_COLLECTION
from transformer_engine_jax.recipe import DelayedScaling, Format

(X,) = (jnp.asarray(a) for a in emulated.normal(0, (2, 16, 64)))
MLP = te_flax.LayerNormMLP(intermediate_dim=96)
RECIPES = {
    "hybrid": DelayedScaling(),
    "e4m3": DelayedScaling(fp8_format=Format.E4M3),
    "e5m2": DelayedScaling(fp8_format=Format.E5M2),
    "margin": DelayedScaling(margin=2),
    "newest": DelayedScaling(amax_compute_algo="most_recent", amax_history_len=4),
}


class Mixed(nn.Module):
    """Layers of several recipes, one of them the model's own."""

    @nn.compact
    def __call__(self, x):
        with steps.autocast(RECIPES["e4m3"]):
            x = MLP.clone(name="own", parent=self)(x)[0]
        return MLP.clone(name="around", parent=self)(x)


class Scanned(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            lambda mlp, x, _: (mlp(x)[0], None),
            variable_axes={"params": 0, STATE_COLLECTION: 0},
            split_rngs={"params": True},
            length=self.layers,
            metadata_params={nn.PARTITION_NAME: None},
        )
        return body(MLP.clone(name="layers", parent=self), x, None)[0]


def trained(model, rec):
    with steps.autocast(rec):
        return steps.settle(model.apply, steps.init(model, X, rec=rec), X, steps=2)


def under(rec, model, variables):
    """init_state's variables for a recipe."""
    with steps.autocast(rec):
        return te_flax.init_state(model, variables, X)


@pytest.mark.parametrize("model", [MLP, Mixed(), Scanned(2), Scanned(3)], ids=["mlp", "mixed", "two", "three"])
@pytest.mark.parametrize("old, new", [("e5m2", "hybrid"), ("hybrid", "e4m3"), ("hybrid", "margin"), ("e5m2", "newest")])
def test_scales_are_those_that_the_amaxes_give(old, new, model):
    variables, rec = trained(model, RECIPES[old]), RECIPES[new]
    changed = under(rec, model, variables)
    is_state = lambda x: isinstance(x, te.GemmState)
    for path, state in jax.tree_util.tree_leaves_with_path(changed[STATE_COLLECTION], is_leaf=is_state):
        own = RECIPES["e4m3"] if path[0].key == "own" else rec
        for name, one in state.states().items():
            dtype = own.backward_dtype if name == "grad" else own.forward_dtype
            amaxes = one.amax_history[..., 1] if new == "newest" and own is rec else one.amax_history.max(-1)
            expected = float(jnp.finfo(dtype).max) / amaxes / 2.0**own.margin
            testing.assert_close(one.scale, expected, 1e-6)
    testing.assert_same_bytes(under(rec, model, changed)[STATE_COLLECTION], changed[STATE_COLLECTION])


@pytest.mark.parametrize("rec", RECIPES.values(), ids=RECIPES)
def test_state_of_the_recipe_itself_stays(rec):
    variables = trained(MLP, rec)
    testing.assert_same_bytes(under(rec, MLP, variables)[STATE_COLLECTION], variables[STATE_COLLECTION])


def test_evaluates_under_another_format_as_near_as_under_its_own():
    variables = trained(MLP, RECIPES["e5m2"])
    exact = MLP.apply({"params": variables["params"]}, X)[0]
    with steps.autocast(RECIPES["hybrid"]):
        y = MLP.apply(te_flax.init_state(MLP, variables, X), X)[0]
    assert testing.relative_error(y, exact) < 0.08


def test_a_function_of_the_scale_before_keeps_it():
    slow = recipe.DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, largest, _: 0.5 * scale)
    variables = trained(MLP, RECIPES["e5m2"])
    testing.assert_same_bytes(under(slow, MLP, variables)[STATE_COLLECTION], variables[STATE_COLLECTION])
