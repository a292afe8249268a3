"""recipe.fp8_dpa in the modules: which states there are, how they go through training, and what the loss does."""

from functools import partial

import emulated
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import steps

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.flax import STATE_COLLECTION, DotProductAttention, MultiHeadAttention, TransformerLayer
from transformer_engine_jax.ops.attention import backends, flash

B, S, K, H, G, D = 4, 32, 64, 4, 2, 16
DELAYED = recipe.DelayedScaling(fp8_dpa=True, amax_history_len=4)
CURRENT = recipe.Float8CurrentScaling(fp8_dpa=True)
Q, KEY, VALUE, X = (
    jnp.asarray(x, jnp.bfloat16)
    for x in emulated.normal(9, (B, S, H, D), (B, S, G, D), (B, S, G, D), (B, S, K))
)  # fmt: skip
ATTENTION = DotProductAttention(D, H, G)
FIELDS = dict(
    hidden_size=K, mlp_hidden_size=2 * K, num_attention_heads=H, num_gqa_groups=G, hidden_dropout=0.0,
    attention_dropout=0.0, scale_attn_logits=True, enable_relative_embedding=False, layernorm_type="rmsnorm",
)  # fmt: skip
LAYER = TransformerLayer(**FIELDS)
NAMES = {"attention_state"}


@pytest.fixture(autouse=True)
def handlers():
    if jax.default_backend() == "gpu" and flash.missing():
        pytest.skip(flash.missing())


def amax(x) -> np.float32:
    return np.abs(np.asarray(x, np.float32)).max()


def choices(module, variables, *args) -> set[str]:
    """What `explain` says of attention."""
    return {row.why for row in te.explain(module.apply, variables, *args).rows if "attention:" in row.why}


# --- Which states there are ------------------------------------------------------------------------------------------


def paths(variables) -> set[str]:
    found = flax.traverse_util.flatten_dict(variables.get(STATE_COLLECTION, {}), sep="/")
    return {path for path in found if "attention_state" in path}


def test_states_are_made_where_the_recipe_has_fp8_dpa():
    expected = {f"attention/core_attention/{name}" for name in NAMES}
    assert paths(steps.init(LAYER, X, rec=DELAYED)) == expected
    assert set(steps.init(ATTENTION, Q, KEY, VALUE, rec=DELAYED)[STATE_COLLECTION]) == NAMES
    for rec in (steps.DELAYED, CURRENT, None):
        assert not paths(steps.init(LAYER, X, rec=rec))
        assert not steps.init(ATTENTION, Q, KEY, VALUE, rec=rec)


def test_variables_without_them_get_them_from_init_state():
    old = steps.init(LAYER, X, rec=steps.DELAYED)
    with steps.autocast(steps.DELAYED):
        old = steps.settle(LAYER.apply, old, X, steps=2)
        LAYER.apply(old, X)
    with steps.autocast(DELAYED):
        with pytest.raises(ValueError, match="core_attention: FP8 state 'attention_state'.*te_flax.init_state"):
            LAYER.apply(old, X)
        new = te_flax.init_state(LAYER, old, X)
    added = flax.traverse_util.flatten_dict(new[STATE_COLLECTION])
    kept = {k: v for k, v in added.items() if "core_attention" not in k}
    testing.assert_same_bytes(kept, flax.traverse_util.flatten_dict(old[STATE_COLLECTION]))
    assert {path[-1] for path in added if "core_attention" in path} == NAMES


@pytest.mark.parametrize("rec", [DELAYED, CURRENT], ids=["delayed", "current"])
@pytest.mark.parametrize("module", [LAYER, MultiHeadAttention(D, H, G)], ids=["layer", "attention"])
def test_every_module_computes_attention_in_fp8(module, rec):
    variables = steps.init(module, X, rec=rec)
    with steps.autocast(rec):
        (why,) = choices(module, variables, X)
    assert "attention: fp8 (" in why
    plain = type(rec)() if rec is CURRENT else steps.DELAYED
    with steps.autocast(plain):
        assert all("attention: fp8 (" not in why for why in choices(module, variables, X))


# --- Through a step --------------------------------------------------------------------------------------------------


def state_after(module, *args):
    variables = steps.init(module, *args, rec=DELAYED)
    with steps.autocast(DELAYED):
        return steps.step(module.apply, variables, *args)[1][0][STATE_COLLECTION]


def test_a_step_updates_them_exactly():
    state = state_after(ATTENTION, Q, KEY, VALUE)
    for name, x in (("query", Q), ("key", KEY), ("value", VALUE)):
        one = getattr(state["attention_state"], name)
        assert one.scale == np.float32(448) / amax(x) and one.amax_history.max() == amax(x)


@pytest.mark.parametrize("rec", [None, steps.DELAYED, CURRENT], ids=["off", "delayed", "current"])
def test_states_that_a_step_does_not_use_stay(rec):
    variables = {STATE_COLLECTION: state_after(ATTENTION, Q, KEY, VALUE)}
    with steps.autocast(rec):
        _, (grads, *_) = steps.step(ATTENTION.apply, variables, Q, KEY, VALUE)
    testing.assert_same_bytes(grads, variables)


@pytest.mark.filterwarnings("ignore:dot_product_attention. computed")
def test_states_stay_where_the_options_allow_no_fp8():
    variables = {STATE_COLLECTION: state_after(ATTENTION, Q, KEY, VALUE)}
    dropping = DotProductAttention(D, H, G, attention_dropout=0.1)
    apply = partial(dropping.apply, rngs={"dropout": jax.random.key(0)})
    with steps.autocast(DELAYED):
        _, (grads, *_) = steps.step(apply, variables, Q, KEY, VALUE)
        (why,) = {row.why for row in te.explain(apply, variables, Q, KEY, VALUE).rows if "attention:" in row.why}
    testing.assert_same_bytes(grads, variables)
    assert "fp8_dpa: FP8 attention has no dropout" in why


def test_attention_that_is_not_in_fp8_is_told_of_on_any_device():
    backends._warn.cache_clear()
    # Where FP8 is emulated it needs no cuDNN, and that is no reason.
    reason = ".*no dropout" if backends.platform() == "gpu" else "fp8_dpa: FP8 attention has no dropout"
    dropping = DotProductAttention(D, H, G, attention_dropout=0.1)
    variables = {STATE_COLLECTION: state_after(ATTENTION, Q, KEY, VALUE)}
    with (
        steps.autocast(DELAYED),
        pytest.warns(UserWarning, match=f"in high precision, not in FP8: {reason}") as told,
    ):
        dropping.apply(variables, Q, KEY, VALUE, rngs={"dropout": jax.random.key(0)})
    assert told[0].filename == __file__, "where the user's code is"


@pytest.mark.filterwarnings("ignore:dot_product_attention. computed")
def test_decoding_is_in_high_precision_and_keeps_states():
    mha = MultiHeadAttention(D, H, G)
    variables = steps.init(mha, X, decode=True, rec=DELAYED)
    others, state = flax.core.pop(variables, STATE_COLLECTION)

    def decode(state):
        return mha.apply({**others, STATE_COLLECTION: state}, X[:, :2], decode=True, mutable=["cache"])[0][0]

    with steps.autocast(DELAYED):
        _, (new,) = steps.step(decode, state)
        whys = {row.why for row in te.explain(decode, state).rows if "attention:" in row.why}
    testing.assert_same_bytes(new["core_attention"], state["core_attention"])
    assert whys and all("fp8_dpa: FP8 attention is told no cache" in why for why in whys)


class Twice(nn.Module):
    """One attention for two queries."""

    def setup(self):
        self.shared = DotProductAttention(D, H, G)

    def __call__(self, q, k, v):
        return self.shared(q, k, v), self.shared(4 * q, k, v)


def test_used_twice_in_a_step():
    state = state_after(Twice(), Q, KEY, VALUE)["shared"]
    for name, largest in (("query", 4 * amax(Q)), ("key", amax(KEY)), ("value", amax(VALUE))):
        one = getattr(state["attention_state"], name)
        assert largest <= one.amax_history.max() <= 1.25 * largest and (one.amax_history > 0).sum() == 1
        assert one.uses == 1


class Block(nn.Module):
    checkpointed: bool = False

    @nn.compact
    def __call__(self, x, _):
        return TransformerLayer(**FIELDS, checkpoint_core_attention=self.checkpointed, name="layer")(x), None


class Stack(nn.Module):
    """Two layers, scanned or not, rematerialised or not."""

    scanned: bool = False
    remat: bool = False
    checkpointed: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=not self.scanned) if self.remat else Block
        if not self.scanned:
            for i in range(2):
                x, _ = block(self.checkpointed, name=f"layer_{i}")(x, None)
            return x
        axes = {"params": 0, STATE_COLLECTION: 0}
        metadata = {nn.PARTITION_NAME: "layers"}
        scan = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=2, metadata_params=metadata)
        return scan(self.checkpointed, name="layers")(x, None)[0]


def stacked(variables):
    """Those of the unrolled model as of the scanned one."""
    both = lambda c: jax.tree.map(lambda *xs: jnp.stack(xs), c["layer_0"], c["layer_1"])
    return {name: {"layers": both(collection)} for name, collection in variables.items()}


@pytest.mark.parametrize("fields", [dict(scanned=True), dict(remat=True), dict(scanned=True, remat=True),
                                    dict(checkpointed=True)], ids=str)  # fmt: skip
def test_scan_and_remat_change_nothing(fields):
    variables = steps.init(Stack(), X, rec=DELAYED)
    with steps.autocast(DELAYED):
        variables = steps.settle(Stack().apply, variables, X, steps=2)
        out, (grads, dx) = steps.step(Stack().apply, variables, X)
        layout = stacked if fields.get("scanned") else lambda tree: tree
        got, (got_grads, got_dx) = steps.step(Stack(**fields).apply, layout(variables), X)
    # A value that is computed by another program may round to the neighbouring code of FP8, and bf16.
    bound = max(emulated.FLIP, emulated.BF16) * 4
    testing.assert_close((got, got_dx), (out, dx), bound)
    expected = layout(grads)
    flat = lambda tree: {k: v for k, v in flax.traverse_util.flatten_dict(tree).items() if "core_attention" in k}
    assert len(flat(got_grads)) == (1 if fields.get("scanned") else 2)
    testing.assert_close(flat(got_grads), flat(expected), bound)


def test_sharded_is_unsharded(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)  # of the mesh, which has CPUs where there are few GPUs
    mesh = testing.mesh_of((2, 4), ("data", "model"))
    resource = te.MeshResource(dp_resource="data", tp_resource="model")
    boxed = steps.init(LAYER, X, rec=DELAYED, unbox=False)
    with steps.autocast(DELAYED), jax.default_device(mesh.devices.flat[0]):
        out, (grads, _) = steps.step(LAYER.apply, nn.unbox(boxed), X)
    with testing.on_mesh(mesh), steps.autocast(DELAYED, mesh_resource=resource):
        placed = steps.place(mesh, boxed, resource)
        x = testing.shard(mesh, X, jax.sharding.PartitionSpec("data"))
        got, (got_grads, _) = steps.step(LAYER.apply, placed, x)
    bound = max(emulated.FLIP, emulated.BF16) * 4
    testing.assert_close(got, out, bound)
    core = lambda tree: tree[STATE_COLLECTION]["attention"]["core_attention"]
    testing.assert_close(core(jax.device_get(got_grads)), core(jax.device_get(grads)), bound)


# --- Training --------------------------------------------------------------------------------------------------------


def losses(rec, steps_: int = 60) -> np.ndarray:
    target = jnp.sin(2 * jnp.cumsum(X.astype(jnp.float32), axis=1))  # needs attention to what came before
    variables = steps.init(LAYER, X, rec=rec)
    state, params = flax.core.pop(variables, "params")
    optimizer = optax.adam(3e-3)

    def step(carry, _):
        params, state, moments = carry

        def loss_fn(params, state):
            return jnp.mean((LAYER.apply({"params": params, **state}, X).astype(jnp.float32) - target) ** 2)

        loss, (grads, state) = jax.value_and_grad(loss_fn, argnums=(0, 1))(params, state)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), state, moments), loss

    with steps.autocast(rec):
        train = jax.jit(lambda carry: jax.lax.scan(step, carry, length=steps_)[1])
        return np.asarray(train((params, state, optimizer.init(params))))


@pytest.mark.parametrize(
    "rec, without", [(DELAYED, steps.DELAYED), (CURRENT, steps.CURRENT)], ids=["delayed", "current"]
)
def test_the_loss_falls_as_it_does_without(rec, without):
    got, expected = losses(rec), losses(without)
    assert got[-1] < 0.5 * got[0], got[::10]
    error = testing.relative_error(got, expected)
    assert 1e-5 < error < emulated.fp8_bound(jnp.float8_e4m3fn, jnp.float8_e4m3fn), error
