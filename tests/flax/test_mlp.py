"""LayerNormMLP: against its stages, emulated FP8, parameters, dropout, shards (also manual ones) and misuse."""

from functools import partial

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from emulated import BF16, F32, FLIP
from jax.sharding import PartitionSpec as P
from steps import CURRENT, DELAYED

import transformer_engine_jax as te
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.flax import STATE_COLLECTION, LayerNormMLP

X, X16 = (jnp.asarray(a) for a in emulated.normal(0, (4, 8, 64), (8, 2, 64)))
X = 2 * X + 1


def plain(
    variables, x, *, activations=("gelu",), params=None, zero_centered=False, roundings=(None, None), returned=False
):
    p = variables["params"]
    if "scale" in p:
        x = emulated.norm(x, p["scale"], p.get("ln_bias"), zero_centered_gamma=zero_centered)
    kernels, biases = (p["wi_kernel"], p["wo_kernel"]), (p.get("wi_bias"), p.get("wo_bias"))
    y = emulated.mlp(x, kernels, biases, activations=activations, params=params, roundings=roundings)
    return y, x if returned else None


def roundings(variables, rec):
    if not rec.stateful:
        return (emulated.roundings(rec),) * 2
    state = variables[STATE_COLLECTION]
    scales = [[float(one.scale) for one in state[f"gemm_{i}_state"].states().values()] for i in (1, 2)]
    return tuple(emulated.roundings(rec, s) for s in scales)


# --- Parameters ------------------------------------------------------------------------------------------------------

NORM = {"scale": ((64,), "float32", ("embed",)), "ln_bias": ((64,), "float32", ("embed",))}
KERNELS = {
    "wi_kernel": ((64, 1, 96), "float32", ("embed", "act", "mlp")),
    "wo_kernel": ((96, 64), "float32", ("mlp", "embed")),
}
GATED = {**KERNELS, "wi_kernel": ((64, 2, 96), "float32", ("embed", "act", "mlp"))}


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, {**NORM, **KERNELS}),
        ({"layernorm_type": "rmsnorm"}, {"scale": NORM["scale"], **KERNELS}),
        ({"enable_layernorm": False}, KERNELS),
        ({"use_bias": True, "activations": ("silu", "linear")}, {
            **NORM, **GATED,
            "wi_bias": ((2, 96), "float32", ("act", "mlp")),
            "wo_bias": ((64,), "float32", ("embed",)),
        }),
        ({"dtype": jnp.bfloat16, "enable_layernorm": False,
          "kernel_axes_1": ("a", "b", "c"), "kernel_axes_2": ("d", "e")}, {
            "wi_kernel": ((64, 1, 96), "bfloat16", ("a", "b", "c")), "wo_kernel": ((96, 64), "bfloat16", ("d", "e")),
        }),
        ({"enable_layernorm": False, "enable_low_rank_adaptation": True, "low_rank_adaptation_dim": 4}, {
            **KERNELS,
            "wi_lora_a_kernel": ((64, 1, 4), "float32", (None, None, "lora")),
            "wi_lora_b_kernel": ((1, 4, 96), "float32", (None, "lora", None)),
            "wo_lora_a_kernel": ((96, 4), "float32", (None, "lora")),
            "wo_lora_b_kernel": ((4, 64), "float32", ("lora", None)),
        }),
    ],
)  # fmt: skip
def test_parameters(fields, expected):
    shapes = jax.eval_shape(partial(LayerNormMLP(intermediate_dim=96, **fields).init, jax.random.key(0)), X)
    assert steps.layout(shapes) == expected


def test_two_products_have_a_state_each():
    with steps.autocast(DELAYED):
        shapes = jax.eval_shape(partial(LayerNormMLP(intermediate_dim=96).init, jax.random.key(0)), X)
    assert set(shapes[STATE_COLLECTION]) == {"gemm_1_state", "gemm_2_state"}


def test_initial_variance_of_each_product_is_one_over_its_width():
    params = steps.init(LayerNormMLP(intermediate_dim=128, activations=("silu", "linear")), X)["params"]
    for i in range(2):
        # sqrt(2 / 8192) is 1.6 %.
        assert abs(float(params["wi_kernel"][:, i].var()) * 64 - 1) < 0.06
    assert abs(float(params["wo_kernel"].var()) * 128 - 1) < 0.06
    halves = params["wi_kernel"][:, 0], params["wi_kernel"][:, 1]
    assert abs(float(np.corrcoef(*[np.asarray(h).ravel() for h in halves])[0, 1])) < 0.05, "drawn independently"


# --- Values ----------------------------------------------------------------------------------------------------------

CASES = {
    "layernorm gelu with bias": dict(use_bias=True),
    "zero-centred rmsnorm swiglu": dict(
        layernorm_type="rmsnorm", zero_centered_gamma=True, activations=("silu", "linear")
    ),
    "no norm squared relu": dict(enable_layernorm=False, activations=("squared_relu",)),
    "returned": dict(return_layernorm_output=True, activations=("gelu", "linear"), use_bias=True),
    "clamped swiglu": dict(
        activations=("clamped_silu", "clamped_linear"), activation_params={"limit": 1.5}, use_bias=True
    ),
    "of any function": dict(activations=(jnp.tanh, "relu")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_is_its_stages(case):
    fields = CASES[case]
    module = LayerNormMLP(intermediate_dim=96, **fields)
    x = X if fields.get("enable_layernorm", True) else (X - 1) / 2
    variables = steps.randomized(steps.init(module, x, rec=DELAYED))
    expect = partial(
        plain,
        activations=fields.get("activations", ("gelu",)),
        params=fields.get("activation_params"),
        zero_centered=fields.get("zero_centered_gamma", False),
        returned=fields.get("return_layernorm_output", False),
    )
    recipes = (None, DELAYED, CURRENT) if case == "layernorm gelu with bias" else (None, DELAYED)
    for rec in recipes:
        with steps.autocast(rec):
            if rec and rec.stateful:
                variables = steps.settle(module.apply, variables, x)
            out, (grads, dx) = steps.step(module.apply, variables, x)
        rounded = expect if rec is None else partial(expect, roundings=roundings(variables, rec))
        out_, (grads_, dx_) = steps.step(rounded, variables, x)
        bound = F32 if rec is None else FLIP
        testing.assert_close((out, dx, grads["params"]), (out_, dx_, grads_["params"]), bound, str(rec))


@pytest.mark.parametrize("rec", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_fp8_is_near_and_bf16_too(rec):
    module = LayerNormMLP(intermediate_dim=96, use_bias=True)
    variables = steps.randomized(steps.init(module, X, rec=DELAYED))
    expected, (grads_, _) = steps.step(module.apply, variables, X)
    x = X.astype(jnp.bfloat16)
    for how, bound in ((None, 4 * BF16), (rec, 0.15)):
        # The longest chain, dgamma: two products of E4M3 factors, two of an E5M2 gradient and an E4M3 kernel:
        # sqrt(4 + 2 + 2 * 4) * 0.0361 = 0.135; see emulated.fp8_bound.
        with steps.autocast(how):
            if how is not None and how.stateful:
                variables = steps.settle(module.apply, variables, x, steps=4)
            (y, _), (grads, _) = steps.step(module.apply, variables, x)
        assert y.dtype == jnp.bfloat16 and grads["params"]["wi_kernel"].dtype == jnp.float32
        testing.assert_close((y, grads["params"]), (expected[0], grads_["params"]), bound, str(how))


def test_fused_stages_make_no_separate_casts():
    module = LayerNormMLP(intermediate_dim=96, use_bias=True)
    variables = steps.init(module, X, rec=DELAYED)
    with steps.autocast(DELAYED):
        jaxpr = str(jax.make_jaxpr(partial(steps.step, module.apply))(variables, X))
    assert jaxpr.count("<kernel quantize:") == 3, "two kernels and the incoming gradient"
    assert jaxpr.count("<kernel gemm:") == 6


# --- Dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_is_deterministic_when_asked_and_seeded_otherwise():
    module = LayerNormMLP(intermediate_dim=96, intermediate_dropout_rate=0.5, intermediate_dropout_rng_name="mine")
    variables = steps.init(module, X, deterministic=True)
    run = jax.jit(lambda key: module.apply(variables, X, rngs={"mine": key})[0])
    without = LayerNormMLP(intermediate_dim=96).apply(variables, X)[0]
    testing.assert_close(module.apply(variables, X, deterministic=True)[0], without, F32)
    one, again, other = run(jax.random.key(1)), run(jax.random.key(1)), run(jax.random.key(2))
    testing.assert_same_bytes(one, again)
    assert testing.relative_error(one, other) > 0.3 and testing.relative_error(one, without) > 0.3


def test_dropout_drops_activations_and_shares_the_pattern_over_given_axes():
    fields = dict(intermediate_dim=96, enable_layernorm=False, intermediate_dropout_rate=0.5)
    variables = {"params": {"wi_kernel": jnp.ones((64, 1, 96)) / 64, "wo_kernel": jnp.eye(96, 64)}}
    x = jnp.ones((4, 8, 64))
    kept = jax.nn.gelu(1.0, approximate=True) / 0.5
    for dims in ((), (1,)):
        module = LayerNormMLP(**fields, intermediate_hidden_dropout_dims=dims)
        out = np.asarray(module.apply(variables, x, rngs={"dropout": jax.random.key(0)})[0])
        dropped = out == 0
        np.testing.assert_allclose(out[~dropped], kept, rtol=1e-5)
        assert 0.4 < dropped.mean() < 0.6
        assert (dropped == dropped[:, :1]).all() == (dims == (1,))


# --- Options ---------------------------------------------------------------------------------------------------------


def test_low_rank_adaptation_adds_a_b_to_both_products():
    module = LayerNormMLP(
        intermediate_dim=96, enable_low_rank_adaptation=True, low_rank_adaptation_dim=4, low_rank_adaptation_alpha=2.0
    )
    variables = steps.randomized(steps.init(module, X))

    def expected(variables, x):
        p = variables["params"]
        x = emulated.norm(x, p["scale"], p["ln_bias"])
        product = partial(jnp.einsum, precision="highest")
        z = product("bsk,kan->bsan", x, p["wi_kernel"])
        z += 0.5 * product("bsk,kar,arn->bsan", x, p["wi_lora_a_kernel"], p["wi_lora_b_kernel"])
        a = jax.nn.gelu(z[..., 0, :], approximate=True)
        y = a @ p["wo_kernel"] + 0.5 * product("bsn,nr,rh->bsh", a, p["wo_lora_a_kernel"], p["wo_lora_b_kernel"])
        return y, None

    testing.assert_close(steps.step(module.apply, variables, X), steps.step(expected, variables, X), F32)


@pytest.mark.parametrize("returned", [False, True], ids=["fused", "by stages"])
def test_returns_its_bias_apart(returned):
    fields = dict(intermediate_dim=96, use_bias=True, return_layernorm_output=returned)
    module, whole = LayerNormMLP(return_bias=True, **fields), LayerNormMLP(**fields)
    variables = steps.randomized(steps.init(module, X, rec=DELAYED))

    def added(variables, x):
        y, bias, normed = module.apply(variables, x)
        assert bias is not None and (normed is not None) == returned
        return y + bias, normed

    with steps.autocast(DELAYED):
        testing.assert_close(steps.step(added, variables, X), steps.step(whole.apply, variables, X), F32)


def test_checkpoint_names_are_saved_by_a_policy():
    names = jax.checkpoint_policies.save_only_these_names("one", "two")
    module = LayerNormMLP(intermediate_dim=96, ffn1_ckpt_name="one", ffn2_ckpt_name="two")
    variables = steps.init(module, X, rec=DELAYED)
    for rec in (None, DELAYED):
        with steps.autocast(rec):
            f = jax.checkpoint(lambda v, x: module.apply(v, x)[0], policy=names)
            testing.assert_close(
                steps.step(f, variables, X), steps.step(lambda v, x: module.apply(v, x)[0], variables, X), F32
            )
            assert "name=one" in str(jax.make_jaxpr(module.apply)(variables, X)) or rec


# --- Shards ----------------------------------------------------------------------------------------------------------

RESOURCES = {
    "dp and tp": te.MeshResource(dp_resource="data", tp_resource="model"),
    "fsdp and tp": te.MeshResource(fsdp_resource="data", tp_resource="model"),
}


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("resource", RESOURCES.values(), ids=list(RESOURCES))
def test_sharded_is_unsharded(resource, explicit):
    module = LayerNormMLP(intermediate_dim=96, use_bias=True, activations=("silu", "linear"))
    boxed = steps.init(module, X, rec=DELAYED, unbox=False)
    variables = steps.randomized(nn.unbox(boxed))
    boxed = {**boxed, "params": nn.meta.replace_boxed(boxed["params"], variables["params"])}
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    with steps.autocast(DELAYED):
        expected = jax.device_get(steps.step(module.apply, variables, X))
    with testing.on_mesh(mesh), steps.autocast(DELAYED, mesh_resource=resource):
        placed = steps.place(mesh, boxed, resource)
        got = jax.device_get(steps.step(module.apply, placed, testing.shard(mesh, X, P("data"))))
    testing.assert_close(got, expected, FLIP)
    assert_same_exact_states(*(g[1][0][STATE_COLLECTION] for g in (got, expected)))


def assert_same_exact_states(got, expected):
    """Those of what is quantized before anything is rounded in another order."""
    exact = lambda s: (s["gemm_1_state"].x, s["gemm_1_state"].kernel, s["gemm_2_state"].kernel, s["gemm_2_state"].grad)
    testing.assert_same_bytes(exact(got), exact(expected))


def test_input_axes_shard_the_stages_and_change_nothing():
    axes = dict(
        layernorm_input_axes=("batch", None, None),
        dot_1_input_axes=("batch", None, None),
        dot_2_input_axes=("batch", None, "mlp"),
    )
    variables = steps.randomized(steps.init(LayerNormMLP(intermediate_dim=96), X))
    expected = jax.device_get(LayerNormMLP(intermediate_dim=96).apply(variables, X)[0])
    mesh = testing.mesh_of((4, 2), ("data", "model"))
    with testing.on_mesh(mesh), steps.autocast(None, mesh_resource=RESOURCES["dp and tp"]):
        run = jax.jit(lambda v, x: LayerNormMLP(intermediate_dim=96, **axes).apply(v, x)[0])
        assert str(run.trace(variables, X).jaxpr).count("sharding_constraint") == 3
        testing.assert_close(jax.device_get(run(variables, X)), expected, F32)


@pytest.mark.parametrize("stages", [False, True], ids=["fused", "stage by stage"])
def test_checkpoint_names(stages):
    module = LayerNormMLP(intermediate_dim=96, return_layernorm_output=stages)
    jaxpr = str(jax.make_jaxpr(lambda: module.init_with_output(jax.random.key(0), X)[0][0])())
    assert 0 < jaxpr.find("name=ffn1") < jaxpr.find("name=ffn2")


@pytest.mark.parametrize("inside", [True, False], ids=["gradient inside", "outside"])
@pytest.mark.parametrize("rec", [None, CURRENT, recipe.DelayedScaling(fp8_gemms=lambda m, k, n: False)])
def test_states_that_go_unused_in_a_manual_shard_map(rec, inside):
    layer = LayerNormMLP(intermediate_dim=32)
    variables = steps.init(layer, X, rec=DELAYED)
    loss = lambda v, x: jnp.mean(layer.apply(v, x)[0] ** 2)
    with steps.autocast(rec):
        expected = jax.jit(jax.grad(loss))(variables, X)
    mean = lambda v, x: jax.lax.pmean(loss(v, x), "data")
    mesh = testing.mesh_of((2,), ("data",))
    with testing.on_mesh(mesh), steps.autocast(rec, amax_axes="data"):
        run = jax.shard_map(jax.grad(mean) if inside else mean, in_specs=(P(), P("data")), out_specs=P())
        got = jax.jit(run if inside else jax.grad(run))(*jax.device_get((variables, X)))
    bound = FLIP if rec is CURRENT else F32  # sums in another order flip a code here and there
    testing.assert_close(jax.device_get(got["params"]), jax.device_get(expected["params"]), bound)
    testing.assert_same_bytes(*jax.device_get([got[STATE_COLLECTION], variables[STATE_COLLECTION]]))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("devices", [(8, 1), (4, 2)], ids=["alone", "with tensor parallelism"])
def test_in_a_manual_shard_map(devices, check_vma):
    module = LayerNormMLP(intermediate_dim=96, use_bias=True)
    x = jnp.concatenate([X16, 4 * X16])  # so that the amaxes of shards differ
    variables = steps.randomized(steps.init(module, x, rec=DELAYED))
    mesh = testing.mesh_of(devices, ("data", "model"))

    def local(variables, x, weights):
        def scored(variables, x):
            out, _ = module.apply(variables, x)
            return jnp.sum(out * weights), out

        (_, out), (grads, dx) = jax.value_and_grad(scored, argnums=(0, 1), has_aux=True)(variables, x)
        if not check_vma:  # JAX does not know then that params are replicated, and leaves the sum to us
            grads = {**grads, "params": jax.lax.psum(grads["params"], "data")}
        return out, grads, dx

    (weights,) = emulated.normal(9, x.shape)
    specs = (P(), P("data"), P("data"))
    options = dict(in_specs=specs, out_specs=(P("data"), P(), P("data")), check_vma=check_vma)
    options |= {"axis_names": {"data"}} if devices[1] > 1 else {}
    resource = te.MeshResource(tp_resource="model")
    with testing.on_mesh(mesh), steps.autocast(DELAYED, mesh_resource=resource, amax_axes="data"):
        step = jax.jit(jax.shard_map(local, **options)).lower(variables, x, weights).compile()
        got = jax.device_get(step(variables, x, weights))
    check_vma = True  # what follows is not manual: there is nothing to sum
    with steps.autocast(DELAYED):
        expected = jax.device_get(jax.jit(local)(variables, x, weights))
    testing.assert_close(got, expected, FLIP)
    assert_same_exact_states(*(g[1][STATE_COLLECTION] for g in (got, expected)))


@pytest.mark.parametrize("calibrating", [False, True])
def test_gradients_of_each_shard_that_the_user_sums(calibrating):
    """Of variables that vary over the mesh axis, as where a step sums gradients itself: the amaxes are still of all."""
    module = LayerNormMLP(intermediate_dim=96, use_bias=True)
    x = jnp.concatenate([X16, 4 * X16])
    variables = steps.randomized(steps.init(module, x, rec=DELAYED))
    mesh = testing.mesh_of((2,), ("data",))
    loss = lambda variables, x: jnp.sum(module.apply(variables, x)[0] ** 2)

    def local(variables, x):
        grads = jax.grad(loss)(jax.lax.pcast(variables, "data", to="varying"), x)
        return jax.lax.psum(grads["params"], "data"), jax.tree.map(lambda s: s[None], grads[STATE_COLLECTION])

    context = dict(recipe=DELAYED, enabled=not calibrating, calibrating=calibrating)
    with testing.on_mesh(mesh), te.autocast(**context, amax_axes="data"):
        specs = dict(in_specs=(P(), P("data")), out_specs=(P(), P("data")))
        params, states = jax.device_get(jax.jit(jax.shard_map(local, **specs))(variables, x))
    with te.autocast(**context), jax.default_device(mesh.devices.flat[0]):
        expected = jax.device_get(jax.jit(jax.grad(loss))(variables, x))
    testing.assert_close(params, expected["params"], FLIP)
    for shard in range(2):
        of_shard = jax.tree.map(lambda s, shard=shard: s[shard], states)
        assert_same_exact_states(of_shard, expected[STATE_COLLECTION])


# --- Misuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"activations": ("tanh",)}, "activations: expected some of .*got 'tanh'"),
        ({"activations": ()}, "activations: expected at least one, got none"),
        ({"activation_params": {"limit": 7.0}}, r"params: expected none for \('gelu',\)"),
        ({"axis": 0}, "axis: expected -1, got 0"),
        ({"activations": (3,)}, "activations: expected some of .*got 3"),
        ({"activations": 3}, "activations: expected some of .*got 3"),
        ({"layernorm_type": "none"}, "layernorm_type: expected one of .*got 'none'"),
        ({"layernorm_type": "none", "enable_layernorm": False}, "layernorm_type: expected one of .*got 'none'"),
        ({"epsilon": -1}, "epsilon: expected 0 or more, got -1"),
        ({"kernel_axes_1": ("embed", "mlp")}, "wi_kernel: expected 3 logical axes"),
        ({"dot_1_input_axes": ("batch",)}, r"expected 3 logical axes for x\[4, 8, 64\]"),
        ({"intermediate_dropout_rate": 1.0}, r"intermediate_dropout_rate: expected a rate in \[0, 1\), got 1.0"),
        ({"intermediate_hidden_dropout_dims": (5,)}, r"dropout_dims: expected axes of 3, got \(5,\)"),
        ({"intermediate_dim": 0}, "intermediate_dim: expected a positive integer, got 0"),
        ({"intermediate_dim": 8.0}, "intermediate_dim: expected a positive integer, got 8.0"),
    ],
)
@pytest.mark.parametrize("rec", [None, DELAYED], ids=["f32", "fp8"])
def test_misuse_is_named(fields, message, rec):
    module = LayerNormMLP(**{"intermediate_dim": 96, **fields})
    with steps.autocast(rec), pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(module.init, jax.random.key(0)), X)
