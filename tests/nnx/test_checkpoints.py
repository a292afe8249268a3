"""An NNX model's way to disk and to Linen and back, its FP8 state included."""

from functools import partial

import emulated
import flax
import jax.numpy as jnp
import orbax.checkpoint
import pytest
import steps
import twins
from flax import nnx
from steps import DELAYED

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import testing

(X,) = (jnp.asarray(a) for a in emulated.normal(7, (4, 8, 32)))
Layer = partial(te_nnx.LayerNormMLP, 32, intermediate_dim=48)


def stepped() -> te_nnx.LayerNormMLP:
    """A model whose states have seen a step."""
    model = twins.make(Layer)
    with steps.autocast(DELAYED):
        _, (grads, _) = twins.step(lambda model, x: model(x)[0], model, X)
    te_nnx.update_state(model, grads)
    return model


def saved(path, tree) -> orbax.checkpoint.StandardCheckpointer:
    checkpointer = orbax.checkpoint.StandardCheckpointer()
    checkpointer.save(path, tree)
    checkpointer.wait_until_finished()
    return checkpointer


def test_checkpoints_round_trip(tmp_path):
    model = stepped()
    graph, state = nnx.split(model)
    checkpointer = saved(tmp_path / "model", state)
    with steps.autocast(DELAYED):
        fresh = nnx.eval_shape(lambda: Layer(rngs=nnx.Rngs(0, dropout=1)))
    restored = nnx.merge(graph, checkpointer.restore(tmp_path / "model", nnx.state(fresh)))
    testing.assert_same_bytes(te_nnx.to_linen(restored), te_nnx.to_linen(model))
    with steps.autocast(DELAYED):
        testing.assert_same_bytes(nnx.jit(twins.call)(restored, X), nnx.jit(twins.call)(model, X))


def test_pure_dicts_need_no_target(tmp_path):
    """As Flax's guide to checkpoints has it: what is restored names arrays by their places alone."""
    model = stepped()
    restored = saved(tmp_path / "model", nnx.to_pure_dict(nnx.state(model))).restore(tmp_path / "model")
    with steps.autocast(DELAYED):
        graph, state = nnx.split(nnx.eval_shape(lambda: Layer(rngs=nnx.Rngs(0, dropout=1))))
    nnx.replace_by_pure_dict(state, restored)
    testing.assert_same_bytes(te_nnx.to_linen(nnx.merge(graph, state)), te_nnx.to_linen(model))


@pytest.mark.parametrize("form", ["orbax", "msgpack"])
def test_from_linen_takes_variables_that_were_restored_without_a_target(form, tmp_path):
    variables = te_nnx.to_linen(stepped())
    if form == "orbax":
        restored = saved(tmp_path / "variables", variables).restore(tmp_path / "variables")
    else:
        restored = flax.serialization.msgpack_restore(flax.serialization.to_bytes(variables))
    assert isinstance(restored[te_flax.STATE_COLLECTION]["gemm_1_state"], dict)
    model = twins.make(Layer)
    te_nnx.from_linen(model, restored)
    testing.assert_same_bytes(te_nnx.to_linen(model), variables)


def test_the_state_is_read_by_the_names_of_its_tensors():
    state = stepped().gemm_1_state
    assert isinstance(state, te_nnx.Fp8State) and state.x.scale != 1 and state.kernel.amax_history[1] > 0
    assert not hasattr(state, "query")


def test_conversion_says_what_differs():
    model = twins.make(Layer)
    good = te_nnx.to_linen(model)
    te_nnx.from_linen(model, {"params": good["params"]})  # the state may be missing: the model keeps its own
    for change, message in (
        (lambda p: p.pop("wi_kernel"), r"only one of them has \['wi_kernel'\]"),
        (lambda p: p.clear(), r"only one of them has \['ln_bias', 'scale', 'wi_kernel', 'wo_kernel'\]"),
        (lambda p: p.update(more=X), r"only one of them has \['more'\]"),
        (lambda p: p.update(wo_kernel=X), r"params/wo_kernel: expected \['float32\[48, 32\]'\]"),
        (lambda p: p.update(scale=p["scale"].astype(jnp.bfloat16)), r"params/scale: .* got \['bfloat16\[32\]'\]"),
    ):
        params = dict(good["params"])
        change(params)
        with pytest.raises(ValueError, match=message):
            te_nnx.from_linen(model, {"params": params})
    short = te.GemmState.create(te.recipe.DelayedScaling(amax_history_len=3))
    state = {**good[te_flax.STATE_COLLECTION], "gemm_2_state": short}
    with pytest.raises(ValueError, match=r"gemm_2_state: expected \['float32\[3, 6\]'\], got \['float32\[3, 5\]'\]"):
        te_nnx.from_linen(model, {**good, te_flax.STATE_COLLECTION: state})
