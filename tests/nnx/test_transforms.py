"""FP8 state in a training step, and under NNX's transforms: jit, grad, split, scan, remat; meshes."""

from functools import partial

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import steps
import twins
from flax import nnx
from jax.sharding import PartitionSpec as P
from steps import CURRENT, DELAYED
from twins import WITH_STATE, states

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.sharding import logical_axis_rules

B, S, K, LAYERS = 4, 8, 32, 3
X, TARGET = (jnp.asarray(a) for a in emulated.normal(7, (B, S, K), (B, S, K)))
F32 = testing.epsilon(jnp.float32)
Layer = partial(te_nnx.LayerNormMLP, K, intermediate_dim=48)


def loss_fn(model, x=X):
    return jnp.mean((model(x)[0] - TARGET) ** 2)


@nnx.jit
def train_step(model, optimizer):
    loss, grads = nnx.value_and_grad(loss_fn, argnums=WITH_STATE)(model)
    grads = te_nnx.update_state(model, grads)
    optimizer.update(model, grads)
    return loss, grads


# --- A training step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [(8, 4), (4, 8)], ids=str)
def test_calls_that_are_not_in_fp8_leave_the_update_to_those_that_are(calls):
    """By their rows."""
    model = te_nnx.DenseGeneral(K, 16, rngs=nnx.Rngs(0))
    with steps.autocast(recipe.DelayedScaling(amax_history_len=4, fp8_gemms=lambda m, k, n: m >= 8)):
        te_nnx.init_fp8_state(model)

        @partial(nnx.jit, static_argnums=1)
        def after(model, calls):
            loss = lambda model: sum(model(X[0, :rows]).sum() for rows in calls)
            te_nnx.update_state(model, nnx.grad(loss, argnums=WITH_STATE)(model))
            return states(model)

        testing.assert_same_bytes(after(nnx.clone(model), calls), after(nnx.clone(model), (8,)))


def test_a_step_updates_the_state_and_the_optimizer_never_sees_it():
    model = twins.make(Layer)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    before = states(model)
    with steps.autocast(DELAYED):
        losses = [float(train_step(model, optimizer)[0]) for _ in range(60)]
        _, grads = train_step(model, optimizer)
    assert losses[-1] < 0.3 * losses[0], losses[::10]
    assert all(s.scale != 1 and (s.amax_history > 0).all() for s in states(model).values())
    assert all((s.scale == 1) and not s.amax_history.any() for s in before.values())
    assert not nnx.state(grads, te_nnx.Fp8State) and nnx.state(grads, nnx.Param)
    kernel = model.wi_kernel.get_value().shape
    moments = [a.shape for a in jax.tree.leaves(nnx.state(optimizer, nnx.OptState))]
    assert moments.count(kernel) == 2 and (DELAYED.amax_history_len,) not in moments


@pytest.mark.parametrize("rec", [DELAYED, CURRENT, None], ids=["delayed", "current", "off"])
def test_a_gradient_of_the_parameters_leaves_the_state(rec):
    model = twins.make(Layer)
    before = states(model)
    with steps.autocast(rec):
        grads = nnx.jit(nnx.grad(loss_fn))(model)
    testing.assert_same_bytes(states(model), before)
    assert not nnx.state(grads, te_nnx.Fp8State)
    with pytest.raises(ValueError, match="expected the FP8 state among the gradients"):
        te_nnx.update_state(model, grads)


@pytest.mark.parametrize("rec", [CURRENT, None], ids=["current", "off"])
def test_a_state_that_is_not_used_stays(rec):
    model = twins.make(Layer)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    with steps.autocast(DELAYED):
        train_step(model, optimizer)
    before = states(model)
    with steps.autocast(rec):
        train_step(model, optimizer)
    testing.assert_same_bytes(states(model), before)


def test_jit_retraces_when_the_context_changes():
    model = twins.make(Layer)
    run = nnx.jit(lambda m: m(X)[0])
    outside = run(model)
    with steps.autocast(DELAYED):
        inside = run(model)
    with steps.autocast(CURRENT):
        current = run(model)
    testing.assert_same_bytes(run(model), outside)
    assert all(0.005 < testing.relative_error(a, outside) < 0.1 for a in (inside, current))
    assert testing.relative_error(inside, current) > 0.005


def test_a_history_of_another_length_says_what_to_do():
    other = recipe.DelayedScaling(amax_history_len=7)
    model = Layer(rngs=nnx.Rngs(0))  # outside of any autocast: as for DelayedScaling()
    assert all(s.amax_history.shape == (16,) for s in states(model).values())
    with steps.autocast(other), pytest.raises(ValueError, match=r"te_nnx.init_fp8_state\(model, recipe\)"):
        model(X)
    te_nnx.init_fp8_state(model, other)
    with steps.autocast(other):
        grads = nnx.jit(nnx.grad(loss_fn, argnums=WITH_STATE))(model)
    te_nnx.update_state(model, grads)
    assert all((s.amax_history > 0).sum() == 1 and s.amax_history.shape == (7,) for s in states(model).values())


def test_state_of_another_recipe_keeps_its_amaxes():
    """Of another length, format and margin: the newest amaxes, and the scales that they give."""
    model, other = Layer(rngs=nnx.Rngs(0)), recipe.DelayedScaling(1, recipe.Format.E4M3, amax_history_len=3)
    for _ in range(4):
        with steps.autocast(recipe.DelayedScaling()):
            te_nnx.update_state(model, nnx.jit(nnx.grad(loss_fn, argnums=WITH_STATE))(model))
    before = states(model)
    te_nnx.init_fp8_state(model, other)
    for path, state in states(model).items():
        np.testing.assert_array_equal(state.amax_history[1:], before[path].amax_history[1:3])  # the newest two
        np.testing.assert_allclose(state.scale, 448 / 2 / state.amax_history.max(), rtol=1e-6)
    exact = model(X)[0]
    with steps.autocast(other):
        assert testing.relative_error(model(X)[0], exact) < 0.1


@pytest.mark.parametrize("make", [Layer, lambda rngs: make_layers()], ids=["one", "stacked"])
def test_states_that_were_popped_are_made_anew(make):
    model, rec = twins.make(make), recipe.DelayedScaling(amax_history_len=4, fp8_dpa=True)
    te_nnx.init_fp8_state(model, rec)
    call = (lambda: model(X)[0]) if make is Layer else (lambda: scanned(model, X))
    exact, before = call(), nnx.state(model)
    nnx.pop(model, te_nnx.Fp8State)
    np.testing.assert_array_equal(call(), exact)
    with steps.autocast(rec), pytest.raises(ValueError, match=r"got none; .* call te_nnx.init_fp8_state"):
        call()
    te_nnx.init_fp8_state(model, rec)
    testing.assert_same_bytes(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(before))


def test_split_and_merge_in_a_plain_jax_step():
    model = twins.make(Layer)
    graph, params, fp8, rest = nnx.split(model, nnx.Param, te_nnx.Fp8State, ...)

    @jax.jit
    def step(params, fp8):
        def loss(params, fp8):
            return loss_fn(nnx.merge(graph, params, fp8, rest))

        return jax.value_and_grad(loss, argnums=(0, 1))(params, fp8)

    with steps.autocast(DELAYED):
        loss, (grads, new) = step(params, fp8)
        loss_, grads_ = nnx.jit(nnx.value_and_grad(loss_fn, argnums=WITH_STATE))(model)
    nnx.update(model, new)
    testing.assert_close((loss, grads, new), (loss_, *nnx.split_state(grads_, nnx.Param, te_nnx.Fp8State)), 4 * F32)
    assert all((s.amax_history > 0).sum() == 1 for s in states(model).values())


@pytest.mark.parametrize("kind", [dict(ref=True), dict(hijax=True)], ids=["ref", "hijax"])
def test_variables_may_be_of_flaxs_other_kinds(kind):
    """References are changed in place, in a plain jit too; of variables in JAX's types a call reads the state."""
    model = twins.make(Layer)
    with nnx.var_defaults(**kind):
        other = twins.make(Layer)
    with steps.autocast(DELAYED):
        expected = model(X)[0]
        testing.assert_close(other(X)[0], expected, 4 * F32)
        testing.assert_close(jax.jit(lambda model: model(X)[0])(other), expected, 4 * F32)
        grads = nnx.grad(loss_fn, argnums=WITH_STATE)(model)
    if "ref" in kind:
        jax.jit(lambda model, grads: te_nnx.update_state(model, grads))(other, grads)
        te_nnx.update_state(model, grads)
    testing.assert_same_bytes(other.gemm_1_state.states, model.gemm_1_state.states)


# --- A module used more than once, stacked layers --------------------------------------------------------------------


def test_a_module_used_twice_updates_its_state_once():
    model = twins.make(te_nnx.DenseGeneral, K, K)
    linen = te_flax.DenseGeneral(features=K)
    twice = lambda f, x: f(f(x) * 0.5)
    variables = twins.twins(linen, model, X)
    with steps.autocast(DELAYED):
        out, (grads,) = steps.step(lambda v: twice(partial(linen.apply, v), X), variables)
        out_, (grads_,) = twins.step(lambda m: twice(m, X), model)
    testing.assert_close((out_, twins.as_linen(grads_)), (out, grads), 4 * F32)
    assert all(s.uses == 1 for s in twins.states_of(grads_).values())


def test_one_module_scanned_over_inputs_updates_its_state_once():
    model = twins.make(te_nnx.DenseGeneral, K, K)

    def closed_over(model, x):
        return nnx.scan(lambda x: model(x), in_axes=0, out_axes=0)(x)

    def passed(model, x):
        return nnx.scan(lambda model, x: model(x), in_axes=(nnx.StateAxes({...: None}), 0), out_axes=0)(model, x)

    largest = jnp.abs(X).max()
    with steps.autocast(DELAYED):
        whole, _ = twins.step(twins.call, model, X)
        for run, uses, excess in ((closed_over, 1, 1.25), (passed, B, B)):
            out, (grads, _) = twins.step(run, model, X)
            testing.assert_close(out, whole, 4 * F32)
            # Reports add up to 25 % more. A state that NNX hands to each pass adds up itself: at most the sum, once.
            state = twins.states_of(grads)["gemm_state.x"]
            assert state.uses == uses and (state.amax_history > 0).sum() == 1
            assert largest <= state.amax_history.max() <= excess * largest
        te_nnx.update_state(model, grads)
        _, (grads, _) = twins.step(closed_over, model, X)
    assert all(s.uses == 1 for s in twins.states_of(grads).values())


def make_layers() -> te_nnx.TransformerLayer:
    """Layers stacked on a leading axis."""
    fields = dict(hidden_size=K, mlp_hidden_size=48, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0)

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(rngs):
        return te_nnx.TransformerLayer(**fields, rngs=rngs)

    with steps.autocast(DELAYED):
        return make(nnx.Rngs(0))


def scanned(layers, x):
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def run(layer, x):
        return layer(x)

    return run(layers, x)


def rematerialised(layers, x):
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def run(layer, x):
        return layer(x)

    return run(layers, x)


def unrolled(layers, x):
    graph, state = nnx.split(layers)
    for i in range(LAYERS):
        x = nnx.merge(graph, jax.tree.map(lambda a: a[i], state))(x)
    return x


@pytest.mark.parametrize("rec", [None, DELAYED, CURRENT], ids=["off", "delayed", "current"])
def test_scanned_layers_equal_unrolled_ones(rec):
    layers = make_layers()
    assert layers.mlp.wi_kernel.get_metadata("out_sharding") == ("layers", "embed", "act", "mlp")
    with steps.autocast(rec):
        for _ in range(2):
            out, (grads, dx) = twins.step(unrolled, layers, X)
            for f in (scanned, rematerialised):
                out_, (grads_, dx_) = twins.step(f, layers, X)
                got, expected = (out_, dx_, twins.as_linen(grads_)), (out, dx, twins.as_linen(grads))
                # An FP8 byte may round the other way where f32 sums in another order: of 10^4, some.
                assert testing.relative_error(got, expected) <= (8 * F32 if rec is None else 5e-3), f.__name__
                for name, state in twins.states_of(grads_).items():
                    testing.assert_close(state, twins.states_of(grads)[name], 0.02, f"{f.__name__} {name}")
            te_nnx.update_state(layers, grads)
    steps_seen = 2 if rec is DELAYED else 0
    for name, state in states(layers).items():
        assert state.scale.shape == (LAYERS,), name
        assert (np.asarray(state.amax_history > 0).sum(axis=1) == steps_seen).all(), name


def test_stacked_states_start_anew():
    layers = make_layers()
    te_nnx.init_fp8_state(layers)
    assert all(s.amax_history.shape == (LAYERS, 16) and (s.scale == 1).all() for s in states(layers).values())


# --- Meshes, checkpoints, conversion ---------------------------------------------------------------------------------


def test_on_a_mesh_parameters_are_sharded_and_amaxes_are_of_the_whole():
    resource = te.MeshResource(dp_resource="data", tp_resource="model")
    mesh = testing.mesh_of((4, 2), ("data", "model"))
    model = twins.make(Layer)
    with steps.autocast(DELAYED):
        _, (expected, dx) = twins.step(twins.call, model, X)
    with testing.on_mesh(mesh), steps.autocast(DELAYED, mesh_resource=resource):
        sharded = nnx.jit(lambda: Layer(rngs=nnx.Rngs(0, dropout=1)))()
        assert sharded.wi_kernel.get_value().sharding.spec == P(None, None, "model")
        moments = nnx.state(nnx.Optimizer(sharded, optax.adam(1e-2), wrt=nnx.Param), nnx.PathContains("wi_kernel"))
        assert [a.sharding.spec for a in jax.tree.leaves(moments)] == [P(None, None, "model")] * 2
        x = testing.shard(mesh, X, P("data"))
        _, (grads, dx_) = twins.step(twins.call, sharded, x)
    testing.assert_close(jax.device_get(dx_), dx, 0.02)
    testing.assert_close(jax.device_get(twins.as_linen(grads)), twins.as_linen(expected), 0.02)
    with nnx.logical_axis_rules(logical_axis_rules(resource)):
        spec = nnx.get_partition_spec(nnx.state(model, nnx.Param))
    assert spec["wo_kernel"].get_value() == P("model", None)


@pytest.mark.parametrize("explicit", [False, True])
def test_sequence_parallel_is_unsharded_and_sharded_as_asked(explicit):
    fields = dict(hidden_size=32, mlp_hidden_size=48, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0)
    make = lambda **more: te_nnx.TransformerLayer(**fields, **more, rngs=nnx.Rngs(0, dropout=1))
    (x,) = emulated.normal(3, (4, 8, 32))
    expected = twins.step(twins.call, make(), jnp.asarray(x))
    resource = te.MeshResource(dp_resource="data", tp_resource="model")
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    with testing.on_mesh(mesh), te.autocast(mesh_resource=resource):
        sharded = nnx.jit(lambda: make(enable_sequence_parallel=True))()
        assert sharded.attention.qkv.kernel.get_value().sharding.spec == P(None, None, "model")
        out, (grads, dx) = twins.step(twins.call, sharded, testing.shard(mesh, x, P("data")))
        assert out.sharding.spec[:2] == ("data", "model")
    out_, (grads_, dx_) = expected
    got = jax.device_get((out, dx, twins.as_linen(grads)["params"]))
    testing.assert_close(got, (out_, dx_, twins.as_linen(grads_)["params"]), 5 * emulated.F32)


def test_abstract_models_on_a_mesh():
    """As NNX has it for models that are made sharded: their shardings, and those of their states, are asked for."""
    create = lambda: Layer(rngs=nnx.Rngs(0))
    mesh = testing.mesh_of((4, 2), ("data", "model"))
    resource = te.MeshResource(fsdp_resource="data", tp_resource="model")
    with jax.default_device(mesh.devices.flat[0]), te.fp8_autocast(True):
        expected = nnx.split(create())[1]
    with testing.on_mesh(mesh), te.fp8_autocast(True, mesh_resource=resource):
        with nn.logical_axis_rules(te_flax.extend_logical_axis_rules(())):
            graph, abstract = nnx.split(nnx.eval_shape(create))
            shardings = nnx.get_named_sharding(abstract, mesh)
            state = jax.jit(lambda: nnx.split(create())[1], out_shardings=shardings)()
        model = nnx.merge(graph, state)
        assert model.wi_kernel.get_value().sharding.spec == P("data", None, "model")
        y = nnx.jit(lambda model, x: model(x)[0])(model, testing.shard(mesh, X, P("data")))
        assert y.shape == X.shape
    testing.assert_close(jax.device_get(nnx.to_pure_dict(state)), jax.device_get(nnx.to_pure_dict(expected)), F32)
