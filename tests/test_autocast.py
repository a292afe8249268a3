"""The context: nesting, errors, and its place in the jit cache key."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import recipe
from transformer_engine_jax.autocast import current
from transformer_engine_jax.flax import STATE_COLLECTION

X = jax.random.normal(jax.random.key(0), (16, 32))


def test_off_by_default_and_recipe_none_is_delayed_scaling():
    assert current().recipe is None
    with te.fp8_autocast():
        assert current().recipe is None
    with te.fp8_autocast(enabled=True):
        assert current().recipe == recipe.DelayedScaling()
    assert current().recipe is None


def test_nesting():
    outer, inner = te.MeshResource(dp_resource="data"), te.MeshResource(tp_resource="model")
    with te.autocast(True, recipe.Float8CurrentScaling(), outer):
        with te.autocast(False):
            assert current().recipe is None and current().mesh_resource == outer
        with te.autocast(True, mesh_resource=inner):
            assert current().mesh_resource == inner
        with te.global_shard_guard(inner):
            assert current().mesh_resource == inner and current().recipe == recipe.Float8CurrentScaling()
        assert current().mesh_resource == outer


def test_a_context_is_opened_again_and_within_itself():
    fp8, off = te.fp8_autocast(True), te.autocast(False)
    for _ in range(2):
        with fp8:
            with off, fp8, fp8:
                assert current().recipe == recipe.DelayedScaling()
            assert current().recipe is not None
        assert current().recipe is None
    assert fp8(lambda: current().recipe)() == recipe.DelayedScaling()
    with te.global_shard_guard(te.MeshResource(dp_resource="data")), fp8:
        assert current().mesh_resource.dp_resource == "data"


def test_the_context_closes_after_an_error():
    with pytest.raises(RuntimeError), te.autocast(True):
        raise RuntimeError
    assert current().recipe is None


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(fp8_recipe="delayed"), "recipe: expected an instance"),
        (dict(fp8_recipe=recipe.DelayedScaling), "recipe: expected an instance"),
        (dict(mesh_resource="data"), "mesh_resource: expected a MeshResource"),
        (dict(amax_axes=(1,)), "amax_axes: expected mesh axis names"),
        (dict(amax_axes=3), "amax_axes: expected mesh axis names"),
        (dict(round_wgrad=jnp.bfloat16), "round_wgrad: expected a bool or None, got"),
        (dict(enabled=recipe.DelayedScaling()), "enabled: expected a bool, got Delayed.*second argument"),
        (dict(enabled="no"), "enabled: expected a bool"),
        (dict(calibrating=recipe.DelayedScaling()), "calibrating: expected a bool"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(TypeError, match=message):
        te.fp8_autocast(**{"enabled": True, **arguments})


def test_a_guard_takes_a_resource_only():
    with pytest.raises(TypeError, match="global_shard_guard: expected a MeshResource, got 'data'"):
        with te.global_shard_guard("data"):
            pass


def test_booleans_of_numpys_switch_it_too():
    with te.autocast(np.bool_(True)):
        assert current().recipe is not None and not current().calibrating
    with te.autocast(calibrating=np.bool_(True)):
        assert current().calibrating


def test_mesh_resource_takes_names_only():
    with pytest.raises(ValueError, match="MeshResource.dp_resource: expected a mesh axis name"):
        te.MeshResource(dp_resource=0)
    for twice in (dict(dp_resource="a", tp_resource="a"), dict(fsdp_resource="a", cp_resource="a")):
        with pytest.raises(ValueError, match="MeshResource: expected different mesh axes .* got 'a' for two of them"):
            te.MeshResource(**twice)
    with pytest.raises(ValueError, match="got 'm' for two of them"):
        te.MeshResource(cp_resource="m", tpsp_resource="m")
    te.MeshResource(dp_resource="a", fsdp_resource="a", tp_resource="m", tpsp_resource="m", ep_resource="a")


def model_and_variables(r):
    model = te_flax.DenseGeneral(features=48)
    with te.autocast(True, r):
        return model, model.init(jax.random.key(1), X)


def test_a_function_jitted_outside_retraces_inside_and_the_other_way_round():
    model, variables = model_and_variables(recipe.DelayedScaling())
    traced = []

    @jax.jit
    def run(v, x):
        traced.append(current().recipe)
        return model.apply(v, x)

    plain = run(variables, X)
    with te.autocast(True):
        fp8 = run(variables, X)
        with te.autocast(True, recipe.Float8CurrentScaling()):
            scaled = run(variables, X)
    again = run(variables, X)
    assert traced == [None, recipe.DelayedScaling(), recipe.Float8CurrentScaling()]
    np.testing.assert_array_equal(plain, again)
    errors = [float(jnp.linalg.norm(y - plain) / jnp.linalg.norm(plain)) for y in (fp8, scaled)]
    assert all(0.005 < e < 0.06 for e in errors)  # quantized, by E4M3's epsilon of 2**-4


def test_backward_traced_outside_the_context_still_runs_in_fp8():
    model, variables = model_and_variables(recipe.DelayedScaling())

    def loss(v):
        with te.autocast(True):
            y = model.apply(v, X)
        return jnp.sum(y**2)

    inside = jax.jit(jax.grad(loss))(variables)
    with te.autocast(True):
        everything = jax.jit(jax.grad(loss))(variables)
    jax.tree.map(np.testing.assert_array_equal, inside, everything)
    assert inside[STATE_COLLECTION]["gemm_state"].grad.scale != 1


def test_calibrating_computes_in_high_precision_and_records():
    model, variables = model_and_variables(recipe.DelayedScaling())

    def step(v, x):
        def loss(v):
            return jnp.sum(jnp.sin(model.apply(v, x)))

        return jax.value_and_grad(loss)(v)

    plain, plain_gradients = jax.jit(step)(variables, X)
    with te.fp8_autocast(enabled=True, calibrating=True):
        assert not current().calibrating, "what runs in FP8 records anyway"
    with te.fp8_autocast(enabled=False, calibrating=True):
        value, gradients = jax.jit(step)(variables, X)
    with te.fp8_autocast(enabled=True):
        fp8, fp8_gradients = jax.jit(step)(variables, X)
    assert value == plain != fp8
    np.testing.assert_array_equal(gradients["params"]["kernel"], plain_gradients["params"]["kernel"])
    recorded, expected = gradients[STATE_COLLECTION], fp8_gradients[STATE_COLLECTION]
    recorded, expected = recorded["gemm_state"], expected["gemm_state"]
    assert (recorded.x.scale, recorded.kernel.scale) == (expected.x.scale, expected.kernel.scale)
    assert 0.9 < recorded.grad.scale / expected.grad.scale < 1.1
    assert recorded.x.scale == np.float32(448) / np.abs(X).max()


def test_state_survives_a_step_that_does_not_use_it():
    model, variables = model_and_variables(recipe.DelayedScaling())
    state = variables[STATE_COLLECTION]["gemm_state"]
    variables[STATE_COLLECTION]["gemm_state"] = state.replace(x=te.QuantizerState(5.0, jnp.ones(16)))
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(model.apply(v, X))))
    for context in (te.autocast(False), te.autocast(True, recipe.Float8CurrentScaling())):
        with context:
            state = gradient(variables)[STATE_COLLECTION]
        jax.tree.map(np.testing.assert_array_equal, state, variables[STATE_COLLECTION])


def test_recipes_that_update_a_state_alike_update_it_once():
    model, variables = model_and_variables(recipe.DelayedScaling())
    alike, other = recipe.DelayedScaling(fp8_gemms="all"), recipe.DelayedScaling(margin=1)

    def loss(variables, second):
        with te.autocast(True):
            y = model.apply(variables, X)
        with te.autocast(True, second):
            return jnp.sum(y + model.apply(variables, X))

    of_its_own = lambda amax, scale, fp8_max, recipe: fp8_max / amax / 2**recipe.amax_history_len
    function = recipe.DelayedScaling(scaling_factor_compute_algo=of_its_own)
    for second, uses in ((alike, 1), (other, 2), (function, 2)):
        state = jax.grad(loss)(variables, second)[STATE_COLLECTION]["gemm_state"].x
        assert state.uses == uses and state.amax_history[1] <= uses * 1.25 * np.abs(X).max()


def test_update_collections():
    original = {"params": {"a": 1}, "state": {"x": {"s": 1}, "y": 2}}
    merged = te.update_collections({"state": {"x": {"s": 5}}}, original)
    assert merged == {"params": {"a": 1}, "state": {"x": {"s": 5}, "y": 2}} and original["state"]["x"]["s"] == 1
    with pytest.raises(TypeError, match="new: expected a mapping"):
        te.update_collections(None, original)
    with pytest.raises(TypeError, match="original: expected a mapping"):
        te.update_collections({}, None)
    frozen = te.update_collections({"state": {"y": 3}}, flax.core.freeze(original))
    assert isinstance(frozen, flax.core.FrozenDict) and frozen["state"] == {"x": {"s": 1}, "y": 3}


def test_update_collections_leaves_parameters_alone_that_have_a_state_s_names():
    weights = {name: {"kernel": jnp.ones((2, 3))} for name in ("query", "key", "value")}
    packed = jnp.asarray([[1.0, -1.0, 3.0], [4.0, 0.0, 6.0]])
    params = {"attention": weights, "embedding": {"packed": packed}, "gemm": dict(x=packed, kernel=packed, grad=packed)}
    original = {"params": jax.tree.map(lambda x: 2 * x, params)}
    merged = te.update_collections({"params": params}, original)
    jax.tree.map(np.testing.assert_array_equal, merged, {"params": params})


def test_update_collections_keeps_an_attention_state_that_went_unused():
    states = [te.QuantizerState(jnp.float32(s), jnp.full(4, jnp.float32(448 / s))) for s in (2.0, 3.0, 5.0)]
    old = te.AttentionState.pack(**dict(zip(te.AttentionState.TENSORS, states)))
    unused = {"s": {"attention_state": jax.tree.map(jnp.zeros_like, old)}}
    merged = te.update_collections(unused, {"s": {"attention_state": old}})
    np.testing.assert_array_equal(merged["s"]["attention_state"].packed, old.packed)


def test_update_collections_takes_states_of_another_history():
    new, old = (te.GemmState.create(recipe.DelayedScaling(amax_history_len=n)) for n in (4, 16))
    merged = te.update_collections({"s": {"gemm_state": new}}, {"s": {"gemm_state": old}})
    np.testing.assert_array_equal(merged["s"]["gemm_state"].packed, new.packed)


def test_what_a_nested_context_leaves_open_stays_as_it_is():
    resource = te.MeshResource(dp_resource="data")
    with te.autocast(True, mesh_resource=resource, amax_axes=("data",), round_wgrad=True):
        with te.autocast(True, recipe.Float8CurrentScaling()):
            assert current().amax_axes == ("data",) and current().mesh_resource == resource and current().round_wgrad
        with te.autocast(True, amax_axes=(), round_wgrad=False):
            assert current().amax_axes == () and not current().round_wgrad


def test_a_recipe_of_its_own_leaves_calibration_on():
    dense = lambda: te.dense(X, jnp.ones((32, 48)), quantizers=te.gemm_quantizers(None, recipe.Float8CurrentScaling()))
    kernels = lambda: {row.name for row in te.explain(dense).rows}
    assert "gemm" in kernels()
    with te.autocast(False, calibrating=True):
        assert "gemm" not in kernels() and "dot_general" in kernels()


def test_update_collections_keeps_states_of_what_was_not_called():
    model, variables = model_and_variables(recipe.DelayedScaling())
    state = variables[STATE_COLLECTION]["gemm_state"].replace(x=te.QuantizerState(5.0, jnp.ones(16)))
    both = {STATE_COLLECTION: {"called": {"gemm_state": state}, "idle": {"gemm_state": state}}}

    @jax.jit
    def step(both):
        def loss(both):
            called = both[STATE_COLLECTION]["called"]
            return jnp.sum(model.apply({"params": variables["params"], STATE_COLLECTION: called}, X))

        return te.update_collections(jax.grad(loss)(both), both)

    with te.autocast(True):
        new = step(both)[STATE_COLLECTION]
    jax.tree.map(np.testing.assert_array_equal, new["idle"]["gemm_state"], state)
    assert new["called"]["gemm_state"].x.scale != 5
