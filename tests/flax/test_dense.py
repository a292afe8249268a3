"""DenseGeneral and LayerNormDenseGeneral: against Flax's layers, emulated FP8, parameters, shards and misuse."""

from functools import partial

import emulated
import flax
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
from transformer_engine_jax import testing
from transformer_engine_jax.flax import STATE_COLLECTION, DenseGeneral, LayerNormDenseGeneral

(X,) = (jnp.asarray(a) for a in emulated.normal(0, (4, 8, 64)))
X4 = X.reshape(4, 8, 4, 16)


# --- Parameters ------------------------------------------------------------------------------------------------------

AXES = dict(kernel_axes=("embed", "qkv", "heads"), bias_axes=("qkv", "heads"))
LORA = dict(enable_low_rank_adaptation=True, low_rank_adaptation_dim=4)
NORM = {"scale": ((64,), "float32", ("embed",)), "ln_bias": ((64,), "float32", ("embed",))}
KERNEL = {"kernel": ((64, 3, 16), "float32", ("embed", "qkv", "heads"))}
BIAS = {"bias": ((3, 16), "float32", ("qkv", "heads"))}


@pytest.mark.parametrize(
    "module, expected",
    [
        (DenseGeneral(features=(3, 16), **AXES), {**KERNEL, **BIAS}),
        (DenseGeneral(features=(3, 16), use_bias=False, **AXES), KERNEL),
        (DenseGeneral(features=5), {"kernel": ((64, 5), "float32", None), "bias": ((5,), "float32", None)}),
        (DenseGeneral(features=5, dtype=jnp.bfloat16),
         {"kernel": ((64, 5), "bfloat16", None), "bias": ((5,), "bfloat16", None)}),
        (DenseGeneral(features=5, dtype=jnp.bfloat16, param_dtype=jnp.float32, use_bias=False),
         {"kernel": ((64, 5), "float32", None)}),
        (DenseGeneral(features=5, use_bias=False, **LORA), {
            "kernel": ((64, 5), "float32", None),
            "lora_a_kernel": ((64, 4), "float32", (None, "lora")),
            "lora_b_kernel": ((4, 5), "float32", ("lora", None)),
        }),
        (LayerNormDenseGeneral(features=(3, 16), **AXES), {**NORM, **KERNEL}),
        (LayerNormDenseGeneral(features=(3, 16), use_bias=True, layernorm_type="rmsnorm", **AXES),
         {"scale": NORM["scale"], **KERNEL, **BIAS}),
        (LayerNormDenseGeneral(features=(3, 16), enable_layernorm=False, **AXES), KERNEL),
        (LayerNormDenseGeneral(features=(3, 16), scale_axes=("a",), ln_bias_axes=("b",), dtype=jnp.float16), {
            "scale": ((64,), "float16", ("a",)), "ln_bias": ((64,), "float16", ("b",)),
            "kernel": ((64, 3, 16), "float16", None),
        }),
        (LayerNormDenseGeneral(features=(3, 16), **AXES, **LORA), {
            **NORM, **KERNEL,
            "lora_a_kernel": ((64, 3, 4), "float32", (None, None, "lora")),
            "lora_b_kernel": ((3, 4, 16), "float32", (None, "lora", None)),
        }),
    ],
)  # fmt: skip
def test_parameters(module, expected):
    shapes = jax.eval_shape(partial(module.init, jax.random.key(0)), X)
    assert steps.layout(shapes) == expected


@pytest.mark.parametrize("module", [DenseGeneral, LayerNormDenseGeneral])
def test_state_is_one_for_each_operand(module):
    with steps.autocast(DELAYED):
        shapes = jax.eval_shape(partial(module(features=(3, 16)).init, jax.random.key(0)), X)
    assert set(shapes[STATE_COLLECTION]) == {"gemm_state"}
    state = shapes[STATE_COLLECTION]["gemm_state"]
    assert list(state.states()) == ["x", "kernel", "grad"] and state.packed.dtype == jnp.float32
    assert all((one.scale.shape, one.amax_history.shape) == ((), (4,)) for one in state.states().values())


@pytest.mark.parametrize("axis, fan_in", [(-1, 16), ((-2, -1), 64)])
def test_initial_variance_is_one_over_what_is_contracted(axis, fan_in):
    kernel = steps.init(DenseGeneral(features=(3, 64), axis=axis), X4)["params"]["kernel"]
    # A variance estimated from n numbers is off by sqrt(2 / n), here up to 4 %; three times that.
    assert abs(float(kernel.var()) * fan_in - 1) < 0.12


# --- Values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axis, features", [(-1, 5), (-1, (3, 5)), ((-2, -1), 5), ((2, 3), (3, 5)), (1, 5), ((0, -1), 5)]
)
def test_dense_is_flax(axis, features):
    module = DenseGeneral(features=features, axis=axis)
    theirs = nn.DenseGeneral(features=features, axis=axis)
    variables = steps.randomized(steps.init(module, X4))
    assert steps.layout(variables) == steps.layout(steps.init(theirs, X4))
    testing.assert_close(steps.step(module.apply, variables, X4), steps.step(theirs.apply, variables, X4), F32)


def plain_layernorm_dense(variables, x, *, zero_centered=False, epsilon=1e-6, roundings=None):
    p = variables["params"]
    if "scale" in p:
        x = emulated.norm(x, p["scale"], p.get("ln_bias"), epsilon=epsilon, zero_centered_gamma=zero_centered)
    return emulated.dense(x, p["kernel"], p.get("bias"), roundings=roundings), x


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_bias": True, "layernorm_type": "rmsnorm", "zero_centered_gamma": True},
        {"zero_centered_gamma": True, "epsilon": 1e-2},
        {"enable_layernorm": False},
    ],
    ids=["layernorm", "zero-centred rmsnorm", "zero-centred layernorm", "no norm"],
)
def test_layernorm_dense_is_its_stages(fields, returned):
    module = LayerNormDenseGeneral(features=(3, 16), return_layernorm_output=returned, **fields)
    options = dict(zero_centered=fields.get("zero_centered_gamma", False), epsilon=fields.get("epsilon", 1e-6))
    x = 2 * X + 1
    variables = steps.randomized(steps.init(module, x, rec=DELAYED))
    for rec in (None, DELAYED):
        roundings = None
        if rec:
            with steps.autocast(rec):
                variables = steps.settle(module.apply, variables, x)
            roundings = steps.gemm_roundings(variables)

        def plain(variables, x, roundings=roundings):
            y, normed = plain_layernorm_dense(variables, x, roundings=roundings, **options)
            return y, normed if returned else None

        with steps.autocast(rec):
            (y, normed), (grads, dx) = steps.step(module.apply, variables, x)
        (y_, normed_), (grads_, dx_) = steps.step(plain, variables, x)
        assert (normed is not None) == returned
        bound = FLIP if rec else F32
        testing.assert_close((y, normed, dx, grads["params"]), (y_, normed_, dx_, grads_["params"]), bound, str(rec))


@pytest.mark.parametrize("rec", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_dense_in_fp8_is_the_emulated_one(rec):
    module = DenseGeneral(features=(3, 16), axis=(-2, -1))
    variables = steps.randomized(steps.init(module, X4, rec=rec))
    with steps.autocast(rec):
        if rec.stateful:
            variables = steps.settle(module.apply, variables, X4)
        y, (grads, dx) = steps.step(module.apply, variables, X4)
    roundings = steps.gemm_roundings(variables) if rec.stateful else emulated.roundings(rec)
    plain = lambda v, x: emulated.dense(x, v["params"]["kernel"], v["params"]["bias"], k_axes=2, roundings=roundings)
    y_, (grads_, dx_) = steps.step(plain, variables, X4)
    testing.assert_close((y, dx, grads["params"]), (y_, dx_, grads_["params"]), F32)


def test_bf16_inputs_and_dtypes():
    x = X.astype(jnp.bfloat16)
    for fields, param in (({"dtype": jnp.bfloat16}, jnp.bfloat16), ({}, jnp.float32)):
        module = DenseGeneral(features=5, **fields)
        variables = steps.init(module, x, rec=CURRENT)
        for rec in (None, CURRENT):
            with steps.autocast(rec):
                y, (grads, dx) = steps.step(module.apply, variables, x)
            assert (y.dtype, dx.dtype, grads["params"]["kernel"].dtype) == (jnp.bfloat16, jnp.bfloat16, param)
    module = DenseGeneral(features=5, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    assert module.apply(steps.init(module, X), X).dtype == jnp.bfloat16


def test_return_bias_leaves_it_out():
    module, whole = DenseGeneral(features=5, return_bias=True), DenseGeneral(features=5)
    variables = steps.randomized(steps.init(module, X))
    y, bias = module.apply(variables, X)
    testing.assert_same_bytes(bias, variables["params"]["bias"])
    testing.assert_close(y + bias, whole.apply(variables, X), F32)
    unbiased = DenseGeneral(features=5, return_bias=True, use_bias=False)
    assert unbiased.apply({"params": {"kernel": variables["params"]["kernel"]}}, X)[1] is None


@pytest.mark.parametrize("fields", [{}, {"depth_scaling": 4.0, "return_layernorm_output": True}], ids=["fused", "all"])
def test_layernorm_dense_returns_its_bias_apart(fields):
    fields = dict(features=(3, 16), use_bias=True, **fields)
    module, whole = LayerNormDenseGeneral(return_bias=True, **fields), LayerNormDenseGeneral(**fields)
    variables = steps.randomized(steps.init(module, X, rec=DELAYED))

    def added(variables, x):
        y, bias, normed = module.apply(variables, x)
        return y + bias, normed

    with steps.autocast(DELAYED):
        testing.assert_close(steps.step(added, variables, X), steps.step(whole.apply, variables, X), F32)
    unbiased = LayerNormDenseGeneral(features=5, return_bias=True)
    assert unbiased.apply(steps.init(unbiased, X), X)[1:] == (None, None)


@pytest.mark.parametrize("axis", [0, -1, (-1, 0)])
def test_what_goes_in_comes_back_where_there_is_no_norm(axis):
    module = LayerNormDenseGeneral(4, axis=axis, enable_layernorm=False, return_layernorm_output=True)
    np.testing.assert_array_equal(module.init_with_output(jax.random.key(0), X)[0][1], X)


def test_depth_scaling_divides():
    variables = steps.init(LayerNormDenseGeneral(features=5), X)
    y = LayerNormDenseGeneral(features=5).apply(variables, X)[0]
    testing.assert_close(LayerNormDenseGeneral(features=5, depth_scaling=4.0).apply(variables, X)[0], y / 4, F32)


def test_the_axis_of_a_norm_may_be_counted_from_the_front():
    last, second = (LayerNormDenseGeneral(features=5, axis=axis) for axis in (-1, X.ndim - 1))
    variables = steps.init(last, X)
    testing.assert_same_bytes(second.apply(variables, X)[0], last.apply(variables, X)[0])


@pytest.mark.parametrize("split", [("query", "key", "value"), {"query_": 2, "rest": 1}], ids=["equal", "sizes"])
@pytest.mark.parametrize("cls", [DenseGeneral, LayerNormDenseGeneral])
def test_parameters_split_are_slices_of_one_product(cls, split):
    fields = dict(features=(3, 16), use_bias=True, **AXES)
    module, whole = cls(parameters_split=split, **fields), cls(**fields)
    boxed = steps.init(module, X, rec=DELAYED, unbox=False)
    first = 1 if isinstance(split, tuple) else 2
    assert steps.layout(boxed)["query_kernel"] == ((64, first, 16), "float32", AXES["kernel_axes"])
    assert steps.layout(boxed)["query_bias"] == ((first, 16), "float32", AXES["bias_axes"])
    variables = steps.randomized(nn.unbox(boxed))
    names = [name.rstrip("_") for name in split]

    def join(params):
        parts = {
            k: jnp.concatenate([params[f"{n}_{k}"] for n in names], axis) for k, axis in (("kernel", 1), ("bias", 0))
        }
        return {**{k: v for k, v in params.items() if k in ("scale", "ln_bias")}, **parts}

    joined = {**variables, "params": join(variables["params"])}
    assert steps.layout(joined) == steps.layout(steps.init(whole, X))
    with steps.autocast(DELAYED):
        out, (grads, dx) = steps.step(module.apply, variables, X)
        out_, (grads_, dx_) = steps.step(whole.apply, joined, X)
        got = (out, dx, join(grads["params"]), grads[STATE_COLLECTION])
        testing.assert_close(got, (out_, dx_, grads_["params"], grads_[STATE_COLLECTION]), F32)
        jaxpr = jax.make_jaxpr(partial(steps.step, module.apply))(variables, X)
    assert str(jaxpr).count("<kernel gemm:") == 3
    spread = [float(variables["params"][f"{n}_kernel"].std()) for n in names]
    assert max(spread) < 1.2 * min(spread), "drawn as slices of the whole, from the same number of inputs"


# --- Shards ----------------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """A column-parallel and a row-parallel product, as tensor parallelism pairs them."""

    @nn.compact
    def __call__(self, x):
        column = DenseGeneral(features=32, kernel_axes=("embed", "mlp"), bias_axes=("mlp",), name="column")
        row = DenseGeneral(features=64, kernel_axes=("mlp", "embed"), bias_axes=("embed",), name="row")
        return row(nn.relu(column(x)))


RESOURCES = {
    "dp and tp": te.MeshResource(dp_resource="data", tp_resource="model"),
    "fsdp and tp": te.MeshResource(fsdp_resource="data", tp_resource="model"),
}


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("resource", RESOURCES.values(), ids=list(RESOURCES))
def test_sharded_is_unsharded(resource, explicit):
    boxed = steps.init(Pair(), X, rec=DELAYED, unbox=False)
    variables = steps.randomized(nn.unbox(boxed))
    boxed = {**boxed, "params": nn.meta.replace_boxed(boxed["params"], variables["params"])}
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    for rec in (None, DELAYED):
        with steps.autocast(rec):
            expected = jax.device_get(steps.step(Pair().apply, variables, X))
        with testing.on_mesh(mesh), steps.autocast(rec, mesh_resource=resource):
            placed = steps.place(mesh, boxed, resource)
            kernel = placed["params"]["column"]["kernel"]
            assert kernel.addressable_shards[0].data.shape == (64 // (4 if resource.fsdp_resource else 1), 16)
            x = testing.shard(mesh, X, P("data"))
            got = jax.device_get(steps.step(Pair().apply, placed, x))
        testing.assert_close(got, expected, FLIP if rec else F32)
        if rec:
            got, expected = (g[1][0][STATE_COLLECTION] for g in (got, expected))
            inputs = lambda s: (s["column"]["gemm_state"].x, s["column"]["gemm_state"].kernel, s["row"]["gemm_state"].kernel, s["row"]["gemm_state"].grad)  # noqa: E501  # fmt: skip
            testing.assert_same_bytes(inputs(got), inputs(expected))


# --- Misuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module, message",
    [
        (DenseGeneral(), "features: expected positive sizes, got 0"),
        (DenseGeneral(features=(3, -1)), r"features: expected positive sizes, got \(3, -1\)"),
        (DenseGeneral(features=5, axis=3), r"axis: expected distinct axes of x\[4, 8, 64\], got 3"),
        (DenseGeneral(features=5, axis=(-1, 2)), r"axis: expected distinct axes of x\[4, 8, 64\], got \(-1, 2\)"),
        (DenseGeneral(features=5, kernel_axes=("embed",)), r"kernel: expected 2 logical axes for the shape \(64, 5\)"),
        (
            DenseGeneral(features=5, input_axes=("batch",)),
            r"expected 3 logical axes for x\[4, 8, 64\], got \('batch',\)",
        ),
        (LayerNormDenseGeneral(features=5, axis=(-2, -1)), r"axis: expected -1, the axis of the norm, got \(-2, -1\)"),
        (LayerNormDenseGeneral(features=5, layernorm_type="rms"), "layernorm_type: expected one of .*got 'rms'"),
        (
            LayerNormDenseGeneral(features=5, layernorm_type="rms", enable_layernorm=False),
            "layernorm_type: expected one of .*got 'rms'",
        ),
        (LayerNormDenseGeneral(features=5, epsilon=-1), "epsilon: expected 0 or more, got -1"),
        (LayerNormDenseGeneral(features=5, depth_scaling=0), "depth_scaling: expected a divisor or None, got 0"),
        (
            DenseGeneral(features=5, parameters_split=("a", "b")),
            "parameters_split: expected distinct names whose sizes",
        ),
        (DenseGeneral(features=5, parameters_split={"a": 2, "b": 4}), "parameters_split: expected distinct names"),
        (DenseGeneral(features=5, parameters_split=(("a", 2), ("b", 3))), "parameters_split: .* as {name: size}"),
        (DenseGeneral(features=4, parameters_split=("a", "a_")), "parameters_split: expected distinct names"),
        (
            DenseGeneral(features=4, parameters_split="ab"),
            "parameters_split: expected a list of names",
        ),
        (DenseGeneral(features=4, parameters_split=()), "parameters_split: expected distinct names"),
        (LayerNormDenseGeneral(features=0), "features: expected positive sizes, got 0"),
    ],
)
def test_misuse_is_named(module, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(module.init, jax.random.key(0)), X)


def test_inputs_of_another_width_than_at_init():
    module = DenseGeneral(features=5)
    with pytest.raises((ValueError, flax.errors.ScopeParamShapeError), match=r"kernel"):
        module.apply(steps.init(module, X), X[..., :32])


def test_bf16_layernorm_dense_is_near():
    x = (2 * X + 1).astype(jnp.bfloat16)
    module = LayerNormDenseGeneral(features=(3, 16), use_bias=True)
    variables = steps.randomized(steps.init(module, x))
    (y, _), (grads, dx) = steps.step(module.apply, variables, x)
    y_, (grads_, dx_) = steps.step(lambda v, x: plain_layernorm_dense(v, x)[0], variables, x.astype(jnp.float32))
    assert (y.dtype, dx.dtype) == (jnp.bfloat16, jnp.bfloat16)
    testing.assert_close((y, dx, grads), (y_, dx_, grads_), 4 * BF16)
