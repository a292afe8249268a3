"""init_state, states created where they are missing, and inference, which reads states and never updates them."""

from functools import partial

import emulated
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
import steps
from flax.training.dynamic_scale import DynamicScale
from steps import CURRENT, DELAYED

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import testing
from transformer_engine_jax.flax import STATE_COLLECTION, DenseGeneral, LayerNormMLP

(X,) = (jnp.asarray(a) for a in emulated.normal(0, (8, 16)))
MLP = LayerNormMLP(intermediate_dim=32, intermediate_dropout_rate=0.5)


class Layers(nn.Module):
    """Two stacked layers."""

    @nn.compact
    def __call__(self, x):
        layer = lambda mlp, x, _: (x + mlp(x, deterministic=True)[0], None)
        axes = {"params": 0, STATE_COLLECTION: 0}
        scan = nn.scan(
            layer,
            variable_axes=axes,
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scan(LayerNormMLP(intermediate_dim=32, name="mlp"), x, None)[0]


def layout(tree):
    return jax.tree.map(lambda a: (jnp.shape(a), jnp.result_type(a)), tree)


@pytest.mark.parametrize("model", [DenseGeneral(features=16), Layers()], ids=["dense", "stacked layers"])
def test_variables_made_outside_work_inside(model):
    outside, inside = steps.init(model, X), steps.init(model, X, rec=DELAYED)
    with steps.autocast(DELAYED):
        made = te_flax.init_state(model, outside, X)
        testing.assert_same_bytes(made[STATE_COLLECTION], inside[STATE_COLLECTION])
        assert layout(made) == layout(inside) and made["params"] is outside["params"]
        # Of shapes alone, as a program that sets up its shardings has them.
        shapes = te_flax.init_state(model, jax.eval_shape(lambda: outside), jax.ShapeDtypeStruct(X.shape, X.dtype))
        assert layout(shapes[STATE_COLLECTION]) == layout(inside[STATE_COLLECTION])
        testing.assert_close(
            steps.step(model.apply, made, X),
            steps.step(model.apply, {**inside, "params": outside["params"]}, X),
            emulated.F32,
        )


def test_states_restored_as_mappings_are_states():
    """What orbax and msgpack give back without a target."""
    variables = steps.init(MLP, X, rec=DELAYED, deterministic=True)
    with steps.autocast(DELAYED):
        apply = partial(MLP.apply, deterministic=True)
        settled = steps.settle(apply, variables, X)
        raw = flax.serialization.msgpack_restore(flax.serialization.to_bytes(settled))
        assert isinstance(raw[STATE_COLLECTION]["gemm_1_state"]["x"], dict)
        testing.assert_same_bytes(apply(raw, X), apply(settled, X))
        made = te_flax.init_state(MLP, raw, X, deterministic=True)
        testing.assert_same_bytes(made[STATE_COLLECTION], dict(settled[STATE_COLLECTION]))


@pytest.fixture(scope="module", params=["orbax", "msgpack"])
def restored(request, tmp_path_factory):
    """Called with variables: as they come back from disk without a target, states in mappings."""

    def restored(variables):
        if request.param == "msgpack":
            return flax.serialization.msgpack_restore(flax.serialization.to_bytes(variables))
        path = tmp_path_factory.mktemp("orbax") / "saved"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, variables)
            checkpointer.wait_until_finished()
            return checkpointer.restore(path)

    return restored


def states_of(variables) -> dict:
    """The state of each layer, whatever its form."""
    return {layer: te.GemmState.of(of_layer["gemm_state"]) for layer, of_layer in variables[STATE_COLLECTION].items()}


class Two(nn.Module):
    """Two layers, of which a call may leave out the second."""

    @nn.compact
    def __call__(self, x, both: bool = True):
        a, b = DenseGeneral(features=16, name="a"), DenseGeneral(features=16, name="b")
        return b(a(x)) if both else a(x)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_states_restored_as_mappings_go_on_as_states_do(restored, jit):
    """Used several times in a step, or not at all and taken in by update_collections, or with FP8 off."""
    model = Two()
    with steps.autocast(DELAYED):
        variables = steps.settle(model.apply, steps.init(model, X, rec=DELAYED), X)
        raw = restored(variables)
        assert isinstance(raw[STATE_COLLECTION]["a"]["gemm_state"], dict)
        four = jit(jax.grad(lambda v: sum(model.apply(v, n * X).sum() for n in range(1, 5))))
        testing.assert_same_bytes(states_of(four(raw)), states_of(four(variables)))

        def first(variables):
            gradient = jax.grad(lambda v: model.apply(v, X, both=False).sum())(variables)
            return te.update_collections({STATE_COLLECTION: gradient[STATE_COLLECTION]}, variables)

        new = jit(first)(raw)
        assert jax.tree.structure(new) == jax.tree.structure(raw)
        testing.assert_same_bytes(states_of(new), states_of(jit(first)(variables)))
    apply = jax.jit(lambda v, x: model.apply(v, x).sum())  # which cannot see one another
    off = jit(jax.grad(lambda v: apply(v, X) + apply(v, 2 * X)))
    for _ in range(3):
        raw, variables = ({**v, STATE_COLLECTION: off(v)[STATE_COLLECTION]} for v in (raw, variables))
    testing.assert_same_bytes(states_of(raw), states_of(variables))


# A call of 8 rows is in FP8, one of 4 is not.
BY_ROWS = te.recipe.DelayedScaling(amax_history_len=4, fp8_gemms=lambda m, k, n: m >= 8)


@pytest.mark.parametrize("calls", [(8, 4), (4, 8), (8, 4, 8), (4, 8, 4, 8)], ids=str)
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_calls_that_are_not_in_fp8_leave_the_update_to_those_that_are(calls, jit):
    model = DenseGeneral(features=16)
    with steps.autocast(BY_ROWS):
        variables = steps.settle(model.apply, steps.init(model, X, rec=BY_ROWS), X)

        def after(variables, calls):
            loss = lambda v, scale: sum(model.apply(v, scale * X[:rows]).sum() for rows in calls)
            for scale in (1.0, 9.0, 1.0):
                state = jit(jax.grad(loss))(variables, scale)[STATE_COLLECTION]
                variables = {**variables, STATE_COLLECTION: state}
            return state["gemm_state"]

        in_fp8 = after(variables, [rows for rows in calls if rows == 8])
        testing.assert_same_bytes(after(variables, calls), in_fp8)
        assert in_fp8.x.uses == 1 and in_fp8.x.amax_history.max() >= 9 * jnp.abs(X).max()


def test_what_is_called_in_fp8_to_no_end_is_not_lost():
    """Beside a call that is not in FP8: a step without an amax, of which the scale stays."""
    model = DenseGeneral(features=16)
    with steps.autocast(BY_ROWS):
        variables = steps.settle(model.apply, steps.init(model, X, rec=BY_ROWS), X)
        loss = lambda v: (model.apply(v, X[:4]).sum(), model.apply(v, X))[0]
        for order in (loss, lambda v: (model.apply(v, X), model.apply(v, X[:4]).sum())[1]):
            state = jax.grad(order)(variables)[STATE_COLLECTION]["gemm_state"]
            before = variables[STATE_COLLECTION]["gemm_state"]
            testing.assert_same_bytes(state.x.scale, before.x.scale)
            assert state.x.amax_history.max() == before.x.amax_history.max()


@pytest.mark.parametrize("dropped", [(True, False), (False, True)], ids=str)
def test_attention_with_and_without_dropout_updates_its_state_once(dropped):
    """FP8 has no dropout."""
    rec = te.recipe.DelayedScaling(amax_history_len=4, fp8_dpa=True)
    model = te_flax.MultiHeadAttention(head_dim=16, num_attention_heads=2, attention_dropout=0.5)
    x = X[None].astype(jnp.bfloat16)  # as cuDNN wants it
    with steps.autocast(rec):
        variables = steps.init(model, x, rec=rec, deterministic=True)

        def after(calls):
            def loss(v):
                keys = {"dropout": jax.random.key(0)}
                return sum(model.apply(v, x, deterministic=not drops, rngs=keys)[0].sum() for drops in calls)

            return jax.grad(loss)(variables)[STATE_COLLECTION]["core_attention"]["attention_state"]

        updated = after((False,))
        testing.assert_same_bytes(after(dropped), updated)
        assert updated.query.scale != 1


class OfItsOwn(nn.Module):
    """A layer under a recipe of the model's, and one under that of its surroundings."""

    @nn.compact
    def __call__(self, x):
        with te.autocast(True, te.recipe.DelayedScaling(amax_history_len=3)):
            x = DenseGeneral(features=16, name="own")(x)
        return DenseGeneral(features=16, name="given")(x)


@pytest.mark.parametrize("rec", [DELAYED, CURRENT, None], ids=["delayed", "current", "off"])
def test_a_recipe_that_a_model_sets_itself_is_heeded(rec):
    model = OfItsOwn()
    variables, expected = steps.init(model, X), steps.init(model, X, rec=rec)
    with te.autocast(rec is not None, rec):
        made = te_flax.init_state(model, {"params": variables["params"]}, X)
        testing.assert_same_bytes(made[STATE_COLLECTION], expected[STATE_COLLECTION])
        jax.eval_shape(model.apply, made, X)


def test_states_survive_flaxs_serialization():
    """By their names; also where there are none, and of stacked layers."""
    for state in (te.GemmState.create(DELAYED), te.GemmState.create(CURRENT), te.AttentionState.create(DELAYED, (3,))):
        restored = flax.serialization.from_bytes({"a": state}, flax.serialization.to_bytes({"a": state}))["a"]
        assert type(restored) is type(state) and layout(restored) == layout(state)
        testing.assert_same_bytes(restored, state)


def test_states_that_fit_are_kept_and_others_start_anew():
    variables = steps.init(MLP, X, rec=DELAYED, deterministic=True)
    with steps.autocast(DELAYED):
        settled = steps.settle(partial(MLP.apply, deterministic=True), variables, X)
        state = dict(settled[STATE_COLLECTION])
        lost = state.pop("gemm_2_state")
        given = {**settled, STATE_COLLECTION: state, "other": {"a": X}}
        made = te_flax.init_state(MLP, given, X, deterministic=False, rngs={"dropout": jax.random.key(0)})
    assert made["other"] is given["other"] and float(lost.x.scale) != 1
    testing.assert_same_bytes({k: v for k, v in made[STATE_COLLECTION].items() if k != "gemm_2_state"}, state)
    testing.assert_same_bytes(made[STATE_COLLECTION]["gemm_2_state"], te.GemmState.create(DELAYED))
    for length in (7, 2, 1):
        with steps.autocast(te.recipe.DelayedScaling(amax_history_len=length)):
            made = te_flax.init_state(MLP, settled, X, deterministic=True)
            MLP.apply(made, X, deterministic=True)
        got, was = (v[STATE_COLLECTION]["gemm_1_state"].kernel for v in (made, settled))
        assert (got.scale, got.uses) == (was.scale, was.uses)
        newest = [*was.amax_history[1:], was.amax_history[0], *[0] * 3][:length]
        assert [*got.amax_history] == [newest[-1], *newest[:-1]]
    with steps.autocast(CURRENT):
        assert set(te_flax.init_state(MLP, {"params": settled["params"]}, X, deterministic=True)) == {"params"}
        made = te_flax.init_state(MLP, settled, X, deterministic=True)
        testing.assert_same_bytes(made, dict(settled))  # a recipe that needs none loses none
    with pytest.raises(ValueError, match="init_state: expected a call inside fp8_autocast"):
        te_flax.init_state(MLP, settled, X, deterministic=True)


class BatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(DenseGeneral(16)(x))


DECODER = te_flax.TransformerLayer(hidden_size=16, mlp_hidden_size=32, num_attention_heads=2)
DECODING = dict(decode=True, deterministic=True, mutable=["cache"])


@pytest.mark.parametrize("has_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("model, kwargs", [(BatchNorm(), {}), (DECODER, DECODING)], ids=["statistics", "cache"])
def test_calls_that_write_collections_of_their_own(model, kwargs, has_cache):
    x = X[None] if kwargs else X
    called = {**kwargs, "mutable": True} if kwargs else {}
    variables = model.init(jax.random.key(0), x, **{k: v for k, v in called.items() if k != "mutable"})
    given = variables if has_cache else {"params": variables["params"]}
    with steps.autocast(DELAYED):
        made = te_flax.init_state(model, given, x[:, :1] if kwargs else x, **kwargs)
        assert set(made) == {*given, STATE_COLLECTION}
        cached = {**variables, **made} if kwargs else made  # only init makes a cache
        model.apply(cached, x[:, :1] if kwargs else x, **{"mutable": ["batch_stats"], **kwargs})
    assert te_flax.main_grads(model, given, x, **kwargs)


class Sows(nn.Module):
    """What is sown may be anything, and need not fit the transform that it is in."""

    how: str

    @nn.compact
    def __call__(self, x):
        y = DenseGeneral(16, name="dense")(x)
        if self.how == "a name":
            self.sow("intermediates", "name", "layer0")
        elif self.how == "in a branch":
            sown = lambda module, y: (module.sow("intermediates", "y", y), y)[1]
            y = nn.cond(y.sum() > 0, sown, lambda module, y: y, self, y)
        else:
            body = lambda module, y, _: (module.sow("intermediates", "y", y), (y, None))[1]
            y, _ = nn.scan(body, variable_carry="intermediates", length=2)(self, y, None)
        return y


@pytest.mark.parametrize("how", ["a name", "in a branch", "in a scan"])
def test_what_modules_sow_is_no_matter(how):
    variables = steps.init(Sows("a name"), X)
    with steps.autocast(DELAYED):
        made = te_flax.init_state(Sows(how), {"params": variables["params"]}, X)
    assert set(made) == {"params", STATE_COLLECTION}
    assert set(te_flax.main_grads(Sows(how), {"params": variables["params"]}, X)) == {"dense"}


def test_a_recipe_without_a_state_needs_no_collection():
    variables = steps.init(MLP, X, deterministic=True)
    with steps.autocast(CURRENT):
        made = te_flax.init_state(MLP, variables, X, deterministic=True)
    assert set(made) == {"params"}


def test_the_state_of_attention_outlives_a_recipe_without_it():
    model, x = te_flax.DotProductAttention(8, 2), jnp.ones((2, 16, 2, 8))
    with steps.autocast(te.recipe.DelayedScaling(fp8_dpa=True)):
        variables = model.init(jax.random.key(0), x, x, x)
    assert "attention_state" in variables[STATE_COLLECTION]
    with steps.autocast(DELAYED):
        testing.assert_same_bytes(te_flax.init_state(model, variables, x, x, x), variables)


def test_a_mutable_collection_gets_the_state_that_is_missing():
    model = DenseGeneral(features=16)
    variables = steps.init(model, X)
    with steps.autocast(DELAYED):
        y, new = model.apply(variables, X, mutable=[STATE_COLLECTION])
        testing.assert_same_bytes(new, {STATE_COLLECTION: steps.init(model, X, rec=DELAYED)[STATE_COLLECTION]})
        testing.assert_same_bytes(model.apply({**variables, **new}, X), y)


@pytest.mark.parametrize("lift", ["scan", "vmap"])
def test_a_transform_that_hides_the_state_is_named(lift):
    options = dict(
        variable_axes={"params": 0}, split_rngs={"params": True}, metadata_params={nn.PARTITION_NAME: "layers"}
    )

    class Hidden(nn.Module):
        @nn.compact
        def __call__(self, x):
            if lift == "vmap":
                return nn.vmap(DenseGeneral, **options)(16, name="dense")(x)
            scan = nn.scan(lambda dense, x, _: (dense(x), None), length=2, **options)
            return scan(DenseGeneral(16, name="dense"), x, None)[0]

    with steps.autocast(DELAYED), pytest.raises(ValueError, match="nn.scan or nn.vmap, does not let it be made"):
        Hidden().init(jax.random.key(0), X)


def test_inference_reads_scales_and_never_updates_them():
    variables = steps.init(MLP, X, rec=DELAYED, deterministic=True)
    infer = jax.jit(partial(MLP.apply, deterministic=True, mutable=[STATE_COLLECTION]))
    with steps.autocast(DELAYED):
        variables = steps.settle(partial(MLP.apply, deterministic=True), variables, X)
        before = jax.device_get(variables)
        (first, _), after = infer(variables, X)
        infer(variables, 100 * X)  # a large batch between leaves no trace
        (again, _), _ = infer(variables, X)
        frozen, _ = jax.jit(partial(MLP.apply, deterministic=True))(variables, X)
    testing.assert_same_bytes((again, frozen), (first, first))
    testing.assert_same_bytes(after[STATE_COLLECTION], before[STATE_COLLECTION])
    testing.assert_same_bytes(jax.device_get(variables), before)
    # The scales are read: with others FP8 rounds elsewhere.
    state = {**variables[STATE_COLLECTION]}
    of_first = state["gemm_1_state"]
    state["gemm_1_state"] = of_first.replace(x=of_first.x._replace(scale=3.7))
    with steps.autocast(DELAYED):
        (other, _), _ = infer({**variables, STATE_COLLECTION: state}, X)
    assert 1e-3 < testing.relative_error(other, first) < 0.2


def test_a_state_of_another_dtype_says_what_to_leave():
    module, x = te_flax.DenseGeneral(features=16), jnp.ones((4, 32), jnp.bfloat16)
    with te.autocast(True):
        variables = jax.tree.map(lambda a: a.astype(jnp.bfloat16), module.init(jax.random.key(0), x))
        with pytest.raises(ValueError, match=r"FP8 state: expected f32, got bfloat16; cast parameters alone"):
            module.apply(variables, x)


OWN = te.recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=lambda history: history.max())


@pytest.mark.parametrize("rec", [DELAYED, OWN], ids=["delayed", "own rule"])
def test_a_loss_scale_over_all_variables_leaves_the_state_as_it_is(rec):
    """Flax's divides the state with the gradients among which it comes."""
    model, factor = LayerNormMLP(intermediate_dim=32), 2.0**10
    apart = among = steps.init(model, X, rec=rec)
    loss = lambda v, x: jnp.sum(model.apply(v, x)[0] ** 2)
    scaler = DynamicScale(scale=factor)
    with steps.autocast(rec):
        for i in range(4):
            grads = jax.grad(lambda v, x: factor * loss(v, x))(apart, (i + 1) * X)
            scaler, finite, _, divided = scaler.value_and_grad(loss)(among, (i + 1) * X)
            assert finite
            testing.assert_close(divided["params"], jax.tree.map(lambda g: g / factor, grads["params"]), emulated.F32)
            apart, among = ({**v, STATE_COLLECTION: g[STATE_COLLECTION]} for v, g in ((apart, grads), (among, divided)))


def test_gradients_of_what_is_maximized_update_states_too():
    model = DenseGeneral(features=16)
    variables = steps.init(model, X, rec=DELAYED)
    with steps.autocast(DELAYED):
        loss = lambda v: jnp.sum(model.apply(v, X) ** 2)
        grads = jax.grad(loss)(variables)
        ascent = te.update_collections(jax.tree.map(jnp.negative, grads), variables)
        descent = te.update_collections(grads, variables)
        testing.assert_close(
            jax.grad(loss)(ascent), jax.grad(loss)({**descent, "params": ascent["params"]}), emulated.F32
        )
    assert (ascent[STATE_COLLECTION]["gemm_state"].packed[:, 1] == -1).all()
