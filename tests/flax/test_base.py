"""FP8 state through training: reuse, microbatches, transformations, bad batches, and modules that go unused."""

import emulated
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import steps
from steps import CURRENT, DELAYED

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.flax import STATE_COLLECTION, DenseGeneral, LayerNormMLP, MultiHeadAttention
from transformer_engine_jax.ops.quantize import E4M3, E5M2
from transformer_engine_jax.quantized import QuantizerState

X, X2 = (jnp.asarray(a) for a in emulated.normal(0, (8, 16), (8, 16)))
X2 = 3.3 * X2
MODULE = DenseGeneral(features=16, use_bias=False)


def amax(x) -> float:
    return float(np.abs(np.asarray(x)).max())


def assert_scale(state: QuantizerState, right_amax: float, dtype, *, exact: bool):
    """The scale of this amax; or, where amaxes were added up, at most 25 % below it, and never above."""
    right = float(np.float32(jnp.finfo(dtype).max) / np.float32(right_amax))
    if exact:
        assert float(state.scale) == right
    else:
        assert 0.79 * right <= float(state.scale) <= right * (1 + 1e-6), (float(state.scale), right)


# --- Reuse -----------------------------------------------------------------------------------------------------------


def test_single_use_is_exact():
    variables = steps.init(MODULE, X, rec=DELAYED)
    with steps.autocast(DELAYED):
        _, (grads, _) = steps.step(MODULE.apply, variables, X)
    state = grads[STATE_COLLECTION]
    assert set(state) == {"gemm_state"}
    assert_scale(state["gemm_state"].x, amax(X), E4M3, exact=True)
    assert_scale(state["gemm_state"].kernel, amax(variables["params"]["kernel"]), E4M3, exact=True)
    assert_scale(state["gemm_state"].grad, amax(steps.weights(0, X.shape)), E5M2, exact=True)


class Twice(nn.Module):
    """One DenseGeneral for two inputs."""

    def setup(self):
        self.shared = DenseGeneral(features=16, use_bias=False)

    def __call__(self, x, x2):
        return self.shared(x), self.shared(x2)


def two_calls(variables, x, x2):
    return MODULE.apply(variables, x), MODULE.apply(variables, x2)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jitted", "rematerialised"])
@pytest.mark.parametrize("how", ["shared instance", "two applies"])
def test_used_twice_in_a_step(how, around):
    f, model = (Twice().apply, Twice()) if how == "shared instance" else (two_calls, MODULE)
    f = around(f)
    variables = steps.init(model, X, *([X2] if model is not MODULE else []), rec=DELAYED)
    with steps.autocast(DELAYED):
        history = []
        for factor in (1.0, 2.0, 0.5):
            _, (grads, *_) = steps.step(f, variables, factor * X, factor * X2)
            variables = {**variables, STATE_COLLECTION: grads[STATE_COLLECTION]}
            history.append(factor * max(amax(X), amax(X2)))
            state = grads[STATE_COLLECTION].get("shared", grads[STATE_COLLECTION])
            assert_scale(state["gemm_state"].x, max(history), E4M3, exact=False)
            assert_scale(state["gemm_state"].kernel, amax(jax.tree.leaves(variables["params"])[0]), E4M3, exact=False)
            assert float(state["gemm_state"].x.amax_history.max()) <= 1.25 * max(history)
            assert sum(np.asarray(state["gemm_state"].x.amax_history) > 0) == len(history), "the history rolls once"


def test_used_in_two_jitted_calls():
    # Their states meet as a sum of updated ones: a step that starts from it must see through that.
    def f(variables, x, x2):
        apply = jax.jit(MODULE.apply)
        return apply(variables, x), apply(variables, x2)

    variables = steps.init(MODULE, X, rec=DELAYED)
    history = []
    with steps.autocast(DELAYED):
        for factor in (1.0, 2.0, 0.5, 0.25):
            _, (grads, *_) = steps.step(f, variables, factor * X, factor * X2)
            variables = {**variables, STATE_COLLECTION: grads[STATE_COLLECTION]}
            history.append(factor * max(amax(X), amax(X2)))
            # The scale that a step starts from shows in the next one of a step that observes next to nothing.
            _, (probe, _) = steps.step(MODULE.apply, variables, 1e-3 * X)
            scale, right = float(probe[STATE_COLLECTION]["gemm_state"].x.scale), 448 / max(history)
            assert 0.49 * right <= scale <= right * (1 + 1e-6), "an amax is at most twice too large"


def in_a_loop(variables, batches):
    return jnp.stack([MODULE.apply(variables, x) for x in batches])


def in_a_scan(variables, batches):
    return jax.lax.scan(lambda c, x: (c, MODULE.apply(variables, x)), 0, batches)[1]


def in_a_map_with_remat(variables, batches):
    return jax.lax.map(jax.checkpoint(lambda x: MODULE.apply(variables, x)), batches)


def in_a_vmap(variables, batches):
    return jax.vmap(lambda x: MODULE.apply(variables, x))(batches)


@pytest.mark.parametrize("how", [in_a_loop, in_a_scan, in_a_map_with_remat, in_a_vmap])
def test_a_loss_summed_over_microbatches(how):
    batches = jnp.stack([X * s for s in (1.0, 0.5, 2.0, 0.1, 1.5, 1.0, 3.0, 0.7)])
    variables = steps.init(MODULE, X, rec=DELAYED)
    with steps.autocast(DELAYED):
        history = []
        for factor in (1.0, 0.5):
            _, (grads, _) = steps.step(how, variables, factor * batches)
            variables = {**variables, STATE_COLLECTION: grads[STATE_COLLECTION]}
            history.append(amax(factor * batches))
            state = grads[STATE_COLLECTION]
            assert_scale(state["gemm_state"].x, max(history), E4M3, exact=False)
            assert_scale(state["gemm_state"].kernel, amax(variables["params"]["kernel"]), E4M3, exact=False)
            assert sum(np.asarray(state["gemm_state"].x.amax_history) > 0) == len(history), "the history rolls once"


def test_a_forward_pass_in_a_vmap_is_one_call_of_each_kernel():
    variables = steps.init(MODULE, X, rec=DELAYED)
    batches = jnp.stack([X, 2 * X, -0.5 * X])
    with steps.autocast(DELAYED):
        rows = te.explain(in_a_vmap, variables, batches).rows
        assert sorted((row.name, row.count) for row in rows) == [("gemm", 1), ("quantize", 1), ("quantize", 1)]
        backward = te.explain(lambda v: steps.step(in_a_vmap, v, batches)[1], variables).rows
        testing.assert_same_bytes(in_a_vmap(variables, batches), in_a_loop(variables, batches))
    # Of the products only the kernel's gradient is one call an example.
    assert [row.count for row in backward if row.name == "gemm"] == [1, 3]


def test_vmap_of_grad():
    variables = steps.init(MODULE, X, rec=DELAYED)
    batches = jnp.stack([X, 2 * X, -0.5 * X])
    with steps.autocast(DELAYED):
        got = jax.jit(jax.vmap(lambda x: steps.step(MODULE.apply, variables, x)))(batches)
        for i in range(3):
            expected = steps.step(MODULE.apply, variables, batches[i])
            testing.assert_close(jax.tree.map(lambda a, i=i: a[i], got), expected, 1e-6)


# --- Layers ----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + LayerNormMLP(intermediate_dim=32, use_bias=True, name="mlp")(x)[0], None


class Stack(nn.Module):
    """Two layers: as a scan, with remat, or one by one with names that end in their number."""

    how: str

    @nn.compact
    def __call__(self, x):
        if self.how == "loop":
            for i in range(2):
                x, _ = Layer(name=f"layer_{i}")(x)
            return x
        layer = nn.remat(Layer) if "remat" in self.how else Layer
        if self.how == "remat":
            for i in range(2):
                x, _ = layer(name=f"layer_{i}")(x)
            return x
        scanned = nn.scan(
            layer,
            variable_axes={"params": 0, STATE_COLLECTION: 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scanned(name="layers")(x, None)[0]


def test_scan_and_remat_over_layers_are_the_loop():
    variables = steps.randomized(steps.init(Stack("loop"), X, rec=DELAYED))
    layers = [{c: v[f"layer_{i}"] for c, v in variables.items()} for i in range(2)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)
    stacked = {c: {"layers": v} for c, v in stacked.items()}
    shapes = jax.eval_shape(lambda: stacked)
    with steps.autocast(DELAYED):
        for how in ("scan", "scan with remat"):
            made = nn.unbox(jax.eval_shape(lambda: Stack(how).init(jax.random.key(0), X)))
            assert jax.tree.map(lambda a: (a.shape, a.dtype), made) == jax.tree.map(
                lambda a: (a.shape, a.dtype), shapes
            )
        loop = Stack("loop").apply
        for _ in range(2):
            y, (grads, dx) = steps.step(loop, variables, X)
            testing.assert_close(steps.step(Stack("remat").apply, variables, X), (y, (grads, dx)), 1e-6, "remat")
            for how in ("scan", "scan with remat"):
                y_, (grads_, dx_) = steps.step(Stack(how).apply, stacked, X)
                testing.assert_close((y_, dx_), (y, dx), 1e-6, how)
                for i in range(2):
                    one = {c: jax.tree.map(lambda a, i=i: a[i], v["layers"]) for c, v in grads_.items()}
                    testing.assert_close(one, {c: v[f"layer_{i}"] for c, v in grads.items()}, 1e-6, f"{how} {i}")
            variables = {**variables, STATE_COLLECTION: grads[STATE_COLLECTION]}
            stacked = {**stacked, STATE_COLLECTION: grads_[STATE_COLLECTION]}


class Experts(nn.Module):
    """Two copies of a block, each with its own parameters, state and share of the input."""

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, STATE_COLLECTION: 0}
        metadata = {nn.PARTITION_NAME: "experts"}
        experts = nn.vmap(LayerNormMLP, variable_axes=axes, split_rngs={"params": True}, metadata_params=metadata)
        return experts(intermediate_dim=32, name="experts")(x)[0]


def test_vmap_of_a_module_is_one_by_one():
    x = jnp.stack([X, 3 * X2])
    variables = steps.randomized(steps.init(Experts(), x, rec=DELAYED))
    assert variables[STATE_COLLECTION]["experts"]["gemm_1_state"].x.amax_history.shape == (2, 4)
    one = LayerNormMLP(intermediate_dim=32)
    with steps.autocast(DELAYED):
        y, (grads, dx) = steps.step(Experts().apply, variables, x)
        for i in range(2):
            mine = {c: jax.tree.map(lambda a, i=i: a[i], v["experts"]) for c, v in variables.items()}
            weights = steps.weights(0, x.shape)[i]
            y_, vjp = jax.vjp(lambda v, x: one.apply(v, x)[0], mine, x[i])
            grads_, dx_ = vjp(jnp.asarray(weights))
            got = {c: jax.tree.map(lambda a, i=i: a[i], v["experts"]) for c, v in grads.items()}
            testing.assert_close((y[i], dx[i], got), (y_, dx_, grads_), emulated.FLIP, f"expert {i}")


# --- Bad batches, and states that go unused --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_training_recovers_from_a_bad_batch(bad):
    module = LayerNormMLP(intermediate_dim=32)
    variables = steps.init(module, X, rec=DELAYED)
    poisoned = X.at[0, 0].set(bad)
    with steps.autocast(DELAYED):
        variables = steps.settle(module.apply, variables, X, steps=2)
        clean, (before, _) = steps.step(module.apply, variables, X)
        _, (grads, _) = steps.step(module.apply, variables, poisoned)
        state = grads[STATE_COLLECTION]
        assert all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(state))
        # An optimizer would skip the parameters' gradients of this step; the state goes on.
        variables = {**variables, STATE_COLLECTION: state}
        for _ in range(2):
            y, (grads, _) = steps.step(module.apply, variables, X)
            variables = {**variables, STATE_COLLECTION: grads[STATE_COLLECTION]}
    assert all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves((y, grads)))
    testing.assert_close(y[0], clean[0], 0.1)
    testing.assert_close(grads["params"], before["params"], 0.2)
    states = lambda g: (g[STATE_COLLECTION]["gemm_1_state"], g[STATE_COLLECTION]["gemm_2_state"])
    scales = lambda first, second: (first.x.scale, first.kernel.scale, second.kernel.scale)
    testing.assert_close(scales(*states(grads)), scales(*states(before)), 1e-6)


@pytest.mark.parametrize("rec", [None, CURRENT], ids=["off", "current scaling"])
@pytest.mark.parametrize(
    "module, x",
    [(MODULE, X), (LayerNormMLP(intermediate_dim=32), X), (MultiHeadAttention(8, 2), X[None])],
    ids=["dense", "mlp", "attention"],
)
def test_a_state_that_is_not_used_is_its_own_gradient(module, x, rec):
    variables = steps.init(module, x, rec=DELAYED)
    with steps.autocast(DELAYED):
        variables = steps.settle(module.apply, variables, x)
    with steps.autocast(rec):
        y, (grads, _) = steps.step(module.apply, variables, x)
        testing.assert_same_bytes(grads[STATE_COLLECTION], variables[STATE_COLLECTION])
        without, (grads, _) = steps.step(module.apply, {"params": variables["params"]}, x)
        assert set(grads) == {"params"}
        testing.assert_same_bytes(y, without)


class Half(nn.Module):
    """Its second layer's output goes nowhere."""

    @nn.compact
    def __call__(self, x):
        unused = DenseGeneral(features=16, name="unused")(x)
        del unused
        return DenseGeneral(features=16, name="used")(x)


def test_a_module_that_does_not_reach_the_loss():
    variables = steps.init(Half(), X, rec=DELAYED)
    with steps.autocast(DELAYED):
        _, (grads, _) = steps.step(Half().apply, variables, X)
        state = grads[STATE_COLLECTION]
        assert not any(np.asarray(a).any() for a in jax.tree.leaves(state["unused"]))
        # The next step uses the layer after all: a scale of 0 is read as 1.
        dense = DenseGeneral(features=16)
        fresh = {c: v["unused"] for c, v in variables.items()}
        zeroed = {**fresh, STATE_COLLECTION: state["unused"]}
        testing.assert_close(steps.step(dense.apply, zeroed, X), steps.step(dense.apply, fresh, X), 1e-6)


# --- The context -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [MODULE, LayerNormMLP(intermediate_dim=32)], ids=["dense", "mlp"])
def test_init_outside_and_apply_inside_says_what_to_do(module):
    variables = steps.init(module, X)
    assert set(variables) == {"params"}
    with steps.autocast(DELAYED), pytest.raises(ValueError, match="te_flax.init_state"):
        module.apply(variables, X)
    with steps.autocast(CURRENT):
        module.apply(variables, X)


def test_a_state_of_another_recipe_says_what_to_do():
    variables = steps.init(MODULE, X, rec=DELAYED)
    with te.autocast(True), pytest.raises(ValueError, match="initialise the state under the recipe"):
        MODULE.apply(variables, X)


def test_a_jitted_step_retraces_when_the_context_changes():
    variables = steps.init(MODULE, X, rec=DELAYED)
    outside = steps.step(MODULE.apply, variables, X)[0]
    with steps.autocast(DELAYED):
        inside = steps.step(MODULE.apply, variables, X)[0]
    with steps.autocast(CURRENT):
        current = steps.step(MODULE.apply, variables, X)[0]
    again = steps.step(MODULE.apply, variables, X)[0]
    testing.assert_same_bytes(again, outside)
    errors = [testing.relative_error(a, outside) for a in (inside, current)]
    assert all(0.005 < e < 0.1 for e in errors) and testing.relative_error(inside, current) > 0.005


def test_calibrating_records_without_rounding():
    variables = steps.init(MODULE, X, rec=DELAYED)
    with te.autocast(False, DELAYED, calibrating=True):
        y, (grads, _) = steps.step(MODULE.apply, variables, X)
    testing.assert_close(y, np.asarray(X) @ np.asarray(variables["params"]["kernel"]), emulated.F32)
    assert_scale(grads[STATE_COLLECTION]["gemm_state"].x, amax(X), E4M3, exact=True)
    assert_scale(grads[STATE_COLLECTION]["gemm_state"].kernel, amax(variables["params"]["kernel"]), E4M3, exact=True)


def test_variables_survive_serialization():
    variables = steps.init(MODULE, X, rec=DELAYED)
    with steps.autocast(DELAYED):
        variables = steps.settle(MODULE.apply, variables, X)
    fresh = steps.init(MODULE, X, rec=DELAYED)
    restored = flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(variables))
    assert jax.tree.structure(restored) == jax.tree.structure(variables)
    testing.assert_same_bytes(restored, variables)


def test_flax_train_state_overwrites_the_state_and_trains():
    from flax.training.train_state import TrainState

    module = LayerNormMLP(intermediate_dim=32)
    variables = steps.init(module, X, rec=DELAYED)
    target = jnp.roll(X, 1, axis=1)

    @jax.jit
    def train(state):
        loss, grads = jax.value_and_grad(lambda v: jnp.mean((state.apply_fn(v, X)[0] - target) ** 2))(state.params)
        return state.apply_gradients(grads=grads), loss

    with steps.autocast(DELAYED):
        state = TrainState.create(apply_fn=module.apply, params=variables, tx=optax.adam(1e-2))
        losses = []
        for _ in range(60):
            state, loss = train(state)
            losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0], losses[::10]
    assert int((state.params[STATE_COLLECTION]["gemm_1_state"].x.amax_history > 0).sum()) == DELAYED.amax_history_len


ACTIVATIONS = [("gelu",), ("clamped_linear", "clamped_silu"), (lambda x: jnp.where(x > 0, x, 0.0),)]


@pytest.mark.parametrize("activations", ACTIVATIONS, ids=["fused", "of functions", "of a user's"])
def test_a_batch_of_nothing_uses_states_all_the_same(activations):
    module = LayerNormMLP(intermediate_dim=8, activations=activations)
    variables = steps.init(module, X[:0], rec=DELAYED)
    with steps.autocast(DELAYED):
        grads = jax.jit(jax.grad(lambda v: module.apply(v, X[:0])[0].sum()))(variables)
    assert all((states.packed[:, 1] == 1).all() for states in grads[STATE_COLLECTION].values())
