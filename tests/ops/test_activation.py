"""Activations against their textbook formulas in f64, handlers and references alike."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numpy_activation import CLAMPED, EXACT, PLAIN, exact_backward, exact_forward, plain
from stored import (
    E4M3,
    E5M2,
    EPS,
    assert_amax,
    assert_fp8,
    assert_rounded,
    assert_same,
    assert_transposed,
    wide,
)

from transformer_engine_jax import testing
from transformer_engine_jax.ops.activation import (
    CURVES,
    Clamp,
    activation,
    activation_bwd,
    activation_fwd,
    fused_activation,
)
from transformer_engine_jax.testing import check_kernel, check_op, epsilon

NAMES = [name + suffix for name in EXACT for suffix in ("", "_linear")] + [CLAMPED]
SHAPES = [(1, 1), (5, 7), (3, 1000), (130, 100), (300, 500), (17,)]  # [.., N]
F32, F16, BF16 = DTYPES = jnp.float32, jnp.float16, jnp.bfloat16
BASE = (2, 3, 33)
# Every activation in every dtype, every shape for one plain and one gated activation, every reference once.
CASES = [("handler", name, BASE, dtype) for name in NAMES for dtype in DTYPES]
CASES += [
    ("handler", name, shape, dtype) for name in ("gelu", "silu_linear") for shape in SHAPES for dtype in (F32, BF16)
]
CASES += [("reference", name, BASE, F32) for name in NAMES]
each_case = pytest.mark.parametrize("implementation, name, shape, dtype", CASES, indirect=["implementation"])


# A slope s (1 - s) near s = 1 magnifies the last bit of s, and CUDA's logistic has two of those to lose.
DBIAS = (16 if testing.platforms() == ["cpu"] else 64) * EPS


def test_every_curve_is_tried():
    assert EXACT.keys() == PLAIN.keys() == CURVES.keys() <= emulated.PLAIN.keys()


def bias_of(name, n, dtype=jnp.float32):
    """[A, N], as large as z, so that one that is left out, or of the other input, shows."""
    a = 2 if name.endswith("_linear") else 1
    return jnp.asarray(np.random.default_rng(1).normal(0.0, 2.5, (a, n)), dtype)


def inputs(name, shape, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    z = rng.normal(0.0, 2.5, (*shape[:-1], 2 if name.endswith("_linear") else 1, shape[-1]))
    return jnp.asarray(z, dtype), jnp.asarray(rng.normal(size=shape), dtype)


@each_case
def test_value(implementation, name, shape, dtype):
    z, _ = inputs(name, shape, dtype)
    out = activation_fwd(z, None, activation=name, amax=True)
    assert out.y.shape == shape and out.y.dtype == dtype and out.y_t is None
    assert_rounded(out.y, *exact_forward(name, z))
    assert float(out.amax) == np.abs(wide(out.y)).max()


@each_case
def test_fp8_results(implementation, name, shape, dtype):
    z, dy = inputs(name, shape, dtype)
    scale, fp8 = 19.0, E5M2 if dtype == BF16 else E4M3
    out = activation_fwd(z, jnp.float32(scale), activation=name, dtype=fp8, y_t=True, amax=True)
    y, _ = exact_forward(name, z)
    assert out.y.shape == shape and out.y.dtype == out.y_t.dtype == fp8
    assert_fp8(out.y, y, scale)
    assert_amax(out.amax, y)
    assert_transposed(out.y_t, out.y, 1)
    alone = activation_fwd(z, jnp.float32(scale), activation=name, dtype=fp8, y=False, y_t=True)
    assert alone.y is None
    testing.assert_same_bytes(alone.y_t, out.y_t)
    measured = activation_fwd(z, None, activation=name, y=False, amax=True)
    assert measured.y is None and measured.y_t is None
    assert_amax(measured.amax, y)

    d = activation_bwd(dy, z, jnp.float32(scale), activation=name, dtype=fp8, dz_t=True, amax=True, dbias=True)
    dz = exact_backward(name, dy, z)
    assert d.dz.shape == z.shape and d.dz.dtype == d.dz_t.dtype == fp8
    assert_fp8(d.dz, dz, scale)
    assert_amax(d.amax, dz, ulps=16)
    assert_transposed(d.dz_t, d.dz, 2)
    alone = activation_bwd(dy, z, jnp.float32(scale), activation=name, dtype=fp8, dz=False, dz_t=True)
    assert alone.dz is None
    testing.assert_same_bytes(alone.dz_t, d.dz_t)
    rows = tuple(range(z.ndim - 2))
    assert d.dbias.shape == z.shape[-2:] and d.dbias.dtype == jnp.float32
    assert np.all(np.abs(wide(d.dbias) - dz.sum(rows)) <= DBIAS * np.abs(dz).sum(rows) + 1e-9)
    measured = activation_bwd(dy, z, None, activation=name, dz=False, amax=True, dbias=True)
    assert measured.dz is None and measured.dz_t is None
    assert_amax(measured.amax, dz, ulps=16)
    testing.assert_same_bytes(measured.dbias, d.dbias)
    assert float(activation_bwd(dy, z, None, activation=name, dz=False, amax=True).amax) == float(measured.amax)


# The bias may have any dtype; sums that z's dtype can't hold are curved as they are.
BIASED = [(i, n, s, d, F32) for i, n, s, d in CASES] + [
    ("handler", "silu_linear", (5, 40), z, b) for z in DTYPES for b in (F16, BF16)
]


@pytest.mark.parametrize("implementation, name, shape, dtype, bias_dtype", BIASED, indirect=["implementation"])
def test_fp8_results_with_a_bias(implementation, name, shape, dtype, bias_dtype):
    z, dy = inputs(name, shape, dtype)
    bias, scale = bias_of(name, shape[-1], bias_dtype), jnp.float32(19.0)
    total = jnp.asarray(z, F32) + jnp.asarray(bias, F32)  # in f32, as the kernels add
    fp8 = dict(activation=name, dtype=E5M2 if dtype == BF16 else E4M3, amax=True)
    got = activation_fwd(z, scale, bias, y_t=True, **fp8)
    testing.assert_same_bytes(got, activation_fwd(total, scale, y_t=True, **fp8))
    measured = activation_fwd(z, None, bias, activation=name, y=False, amax=True)
    testing.assert_same_bytes(measured.amax, got.amax)

    got = activation_bwd(dy, z, scale, bias, dz_t=True, dbias=True, **fp8)
    testing.assert_same_bytes(got, activation_bwd(dy, total, scale, dz_t=True, dbias=True, **fp8))
    measured = activation_bwd(dy, z, None, bias, activation=name, dz=False, amax=True)
    testing.assert_same_bytes(measured.amax, got.amax)


# What one element of z may be, at its row, column and, of two inputs, which.
ODD_ONES = {
    "one large": (650, 0, 1100, 50.0),
    "one NaN": (650, 0, 1100, np.nan),
    "a negative NaN in the last row": (-1, 0, -1, -np.nan),
    "one infinite": (650, 0, 1100, np.inf),
    "one infinite below zero": (3, 0, 129, -np.inf),
    "a NaN in the gate": (650, -1, 1101, np.nan),
    "one large below zero in the gate": (650, -1, 1101, -300.0),
}


@pytest.mark.parametrize(
    "data",
    ["normal", "below zero", "zeros", "denormal", "a NaN in the gradient", "a NaN in the bias", *ODD_ONES],
)
@pytest.mark.parametrize("name", ["gelu", "silu_linear"])
def test_the_maximum_alone_is_that_of_the_pass_that_stores(name, data):
    # On a GPU a bound of several values decides whether they are computed; these have many tiles, and values that
    # mislead. There a block takes several tiles, and learns in between what others found.
    shape = (4200, 8200) if jax.default_backend() == "gpu" else (700, 1160)
    z, dy = inputs(name, shape, BF16)
    if data == "below zero":
        z = -20.0 * jnp.abs(z)
    elif data == "zeros":
        z, dy = jnp.zeros_like(z), jnp.zeros_like(dy)
    elif data == "denormal":
        z, dy = z * 2.0**-66, dy * 2.0**-66  # so are products with a gate, and what has none below
        z = z if name == "silu_linear" else z * 2.0**-66
    elif data == "a NaN in the gradient":
        dy = dy.at[-1, 17].set(-jnp.nan)
    elif data in ODD_ONES:
        row, which, col, value = ODD_ONES[data]
        z = z.at[row, which, col].set(value)
        dy = dy.at[row, col].set(40.0)
    scale, quantized = jnp.float32(1.0), dict(activation=name, dtype=E5M2, amax=True)
    biased = bias_of(name, shape[1])
    if data == "a NaN in the bias":
        biased = jnp.asarray(biased).at[-1, 300].set(jnp.nan)
    for bias in (None, biased):
        stored = activation_fwd(z, scale, bias, **quantized).amax
        testing.assert_same_bytes(activation_fwd(z, None, bias, activation=name, y=False, amax=True).amax, stored)
        stored = activation_bwd(dy, z, scale, bias, **quantized).amax
        measured = activation_bwd(dy, z, None, bias, activation=name, dz=False, amax=True)
        testing.assert_same_bytes(measured.amax, stored)


@pytest.mark.parametrize("name, dtype", [(n, F32) for n in NAMES] + [("gelu", F16), ("silu_linear", BF16)])
def test_op(name, dtype):
    z, _ = inputs(name, (3, 7, 33), dtype)
    activations = (name.removesuffix("_linear"), "linear")[: z.shape[-2]]
    activations = ("clamped_silu", "clamped_linear") if name == CLAMPED else activations
    assert fused_activation(activations).activation == name
    # Rounded once to its dtype; for f32, 64 roundings of jax.nn's formula (where 1 + tanh cancels) and ours.
    bound = max(2 * epsilon(dtype), 64 * epsilon(F32))
    check_op(
        lambda z: activation(z, activations),
        lambda z: plain(name, z),
        (z,),
        value_bound=bound,
        gradient_bound=bound,
        key=jax.random.key(0),
    )


@pytest.mark.parametrize("implementation, name, shape, dtype, bias_dtype", BIASED, indirect=["implementation"])
def test_bias(implementation, name, shape, dtype, bias_dtype):
    z, dy = inputs(name, shape, dtype)
    bias = bias_of(name, shape[-1], bias_dtype)
    total = wide(jnp.asarray(z, F32) + jnp.asarray(bias, F32))  # in f32, as the kernels add
    out = activation_fwd(z, None, bias, activation=name, amax=True)
    assert out.y.shape == shape and out.y.dtype == dtype
    assert_rounded(out.y, *exact_forward(name, total))
    assert float(out.amax) == np.abs(wide(out.y)).max()

    for in_place in (False, True):
        d = activation_bwd(dy, z, None, bias, activation=name, amax=True, dbias=True, in_place=in_place)
        dz = exact_backward(name, dy, total)
        assert d.dz.shape == z.shape and d.dz.dtype == dtype and d.dbias.dtype == jnp.float32
        rows = tuple(range(z.ndim - 2))
        # Errors are relative to the slope's or the curve's terms, at most 1 + |z|, which may cancel; exact ones err by
        # 1e-9, as their step makes them.
        rounding = epsilon(dtype) * 1.01 * np.abs(dz) if dtype != F32 else 0.0
        tiny = float(jnp.finfo(dtype).smallest_subnormal)
        magnitude = np.abs(dz) + np.abs(wide(dy))[..., None, :] * (1 + np.abs(total)).max(-2, keepdims=True)
        assert np.all(np.abs(wide(d.dz) - dz) <= DBIAS * magnitude + rounding + tiny + 1e-9)
        assert np.all(np.abs(wide(d.dbias) - dz.sum(rows)) <= DBIAS * magnitude.sum(rows) + 1e-8)
        assert float(d.amax) == np.abs(wide(d.dz)).max()


@pytest.mark.parametrize(
    "activations, dtype, bias_dtype",
    [
        (("gelu",), F32, F32),
        (("silu", "linear"), F32, BF16),
        (("silu", "linear"), BF16, F32),
        (("squared_relu",), F16, F16),
        (("clamped_silu", "clamped_linear"), BF16, BF16),
        (("silu", "gelu"), F32, F32),  # no kernel has these
        ((jnp.tanh, "linear"), BF16, F32),
    ],
)
def test_op_with_bias(activations, dtype, bias_dtype):
    name = "_linear" if len(activations) == 2 else ""
    z, bias = inputs(name, (3, 7, 33), dtype)[0], bias_of(name, 33, bias_dtype)
    functions = PLAIN | {"linear": lambda x: x, "clamped_silu": None}

    def expected(z, bias):
        z = z + bias
        if activations[0] == "clamped_silu":
            return plain(CLAMPED, z)
        parts = [(functions[a] if isinstance(a, str) else a)(z[..., i, :]) for i, a in enumerate(activations)]
        return parts[0] if len(parts) == 1 else parts[0] * parts[1]

    # As in test_op. Without a kernel the sum is rounded too, and each factor, and their gradients on the way back.
    roundings = 2 if fused_activation(activations) else 8
    dtypes = epsilon(dtype), epsilon(bias_dtype)
    check_op(
        lambda z, bias: activation(z, activations, bias=bias),
        expected,
        (z, bias),
        value_bound=max(roundings * dtypes[0], 64 * epsilon(F32)),
        gradient_bound=max(roundings * max(dtypes), 64 * epsilon(F32)),
        key=jax.random.key(0),
    )


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("activations", [("silu", "linear"), ("silu", "gelu")], ids=["kernel", "no kernel"])
def test_bias_sharded_is_unsharded(activations, explicit):
    (z, dy), bias = inputs("silu_linear", (8, 5, 32)), bias_of("silu_linear", 32)

    @jax.jit
    def run(z, bias, dy):
        y, vjp = jax.vjp(lambda z, bias: activation(z, activations, bias=bias), z, bias)
        return y, vjp(dy)

    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    with jax.default_device(mesh.devices.flat[0]):
        expected = jax.device_get(run(z, bias, dy))
    for of_bias in (P(), P(None, "model")):
        with testing.on_mesh(mesh):
            specs = P("data", None, None, "model"), of_bias, P("data", None, "model")
            got = jax.device_get(run(*testing.shard(mesh, (z, bias, dy), specs)))
        testing.assert_close(got, expected, 16 * EPS, str(of_bias))


@pytest.mark.parametrize("fp8", [None, E5M2])
@pytest.mark.parametrize("name", ["gelu", "silu_linear", CLAMPED])
def test_kernels_agree_with_their_references(name, fp8):
    z, dy = inputs(name, (8, 5, 32))
    scale = None if fp8 is None else jnp.float32(37)
    attributes = {"activation": name, "dtype": fp8, "amax": True}
    z_spec, dy_spec = P("data", None, None, "model"), P("data", None, "model")
    check_kernel(activation_fwd, [z, scale], {**attributes, "y_t": fp8 is not None}, assert_same, specs=[z_spec, P()])
    attributes |= {"dz_t": fp8 is not None, "dbias": True}
    check_kernel(activation_bwd, [dy, z, scale], attributes, assert_same, specs=[dy_spec, z_spec, P()])
    bias, of_bias = bias_of(name, 32), P(None, "model")
    forward = {"activation": name, "dtype": fp8, "amax": True, "y_t": fp8 is not None}
    check_kernel(activation_fwd, [z, scale, bias], forward, assert_same, specs=[z_spec, P(), of_bias])
    for spec in (of_bias, P()):
        specs = [dy_spec, z_spec, P(), spec]
        check_kernel(activation_bwd, [dy, z, scale, bias], attributes, assert_same, specs=specs)


def test_relative_precision_of_the_tails(implementation):
    x = jnp.linspace(-9.5, -3.0, 1000, dtype=jnp.float32)[None]
    for name in ("gelu", "silu", "quick_gelu", "sigmoid"):
        y = activation_fwd(x, None, activation=name).y
        exact = EXACT[name](wide(x[0]))
        assert np.max(np.abs(wide(y) / exact - 1)) < 100 * EPS


@pytest.mark.parametrize("name", list(EXACT))
def test_limits(implementation, name):
    big = 3e38
    z = jnp.asarray([[-np.inf, -big, -200.0, -0.0, 0.0, 200.0, big, np.inf, np.nan]], jnp.float32)
    y = np.asarray(activation_fwd(z, None, activation=name).y)
    at_zero, top = (0.5, 1.0) if name == "sigmoid" else (0.0, np.inf)
    np.testing.assert_array_equal(y[:5], [0, 0, 0, at_zero, at_zero])
    high = np.asarray(z[0, 5:8])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y[5:8], {"sigmoid": np.ones(3), "squared_relu": high * high}.get(name, high))
    assert y[7] == top and np.isnan(y[8])
    slope = np.asarray(activation_bwd(jnp.ones(9), z, None, activation=name).dz)[0]
    np.testing.assert_array_equal(slope[:3], 0)
    with np.errstate(over="ignore"):
        rising = {"sigmoid": np.zeros(3), "squared_relu": 2 * high}
    np.testing.assert_array_equal(slope[5:8], rising.get(name, np.ones(3)))


def test_limits_of_clamped_activations(implementation):
    top = 3e38
    x = jnp.asarray([-np.inf, -top, -8.0, 7.0, np.nextafter(np.float32(7), np.float32(8)), top, np.inf, np.nan])
    y = lambda z: np.asarray(activation_fwd(jnp.stack(z, axis=-2).astype(F32), None, activation=CLAMPED).y)
    dz = lambda z: np.asarray(
        activation_bwd(jnp.ones(8), jnp.stack(z, axis=-2).astype(F32), None, activation=CLAMPED).dz
    )
    one, flat = jnp.ones(8), 7 / (1 + np.exp(-1.702 * 7))
    np.testing.assert_array_equal(y((x, one))[:2], 0)
    np.testing.assert_allclose(y((x, one))[3:7], 2 * flat, rtol=1e-6)
    np.testing.assert_array_equal(dz((x, one))[0, 4:7], 0)
    assert dz((x, one))[0, 3] > 1 and np.isnan(y((x, one))[7])
    np.testing.assert_allclose(y((one, x)) / y((one, one)) * 2, [-6, -6, -6, 8, 8, 8, 8, np.nan], rtol=1e-6)
    np.testing.assert_array_equal(dz((one, x))[1, [0, 1, 2, 4, 5, 6]], 0)
    assert dz((one, x))[1, 3] > 0


@pytest.mark.parametrize("params", [dict(limit=1.5), dict(alpha=0.5, glu_linear_offset=0.0), Clamp(2.0, 1.0, -0.5)])
def test_parameters_of_clamped_activations(params):
    (z, _), clamp = inputs(CLAMPED, (8, 16)), params if isinstance(params, Clamp) else Clamp(**params)
    names = ("clamped_silu", "clamped_linear")

    def expected(z, names):
        c = jnp.minimum(z[:, 0], clamp.limit)
        silu = c * jax.nn.sigmoid(clamp.alpha * c)
        return silu * (jnp.clip(z[:, 1], -clamp.limit, clamp.limit) + clamp.glu_linear_offset if len(names) > 1 else 1)

    key = jax.random.key(0)
    for chosen in (names, names[:1]):  # fused, and in plain JAX
        assert (fused_activation(chosen, params) is None) == (chosen is not names)
        part = z[:, : len(chosen)]
        got = testing.gradients(lambda z, n=chosen: activation(z, n, params), (part,), key)
        testing.assert_close(got, testing.gradients(lambda z, n=chosen: expected(z, n), (part,), key), 16 * EPS)


def test_nan_shows_in_amax_and_in_its_code(implementation):
    z, dy = inputs("silu_linear", (6, 100))
    z = z.at[2, 1, 5].set(jnp.nan)
    out = activation_fwd(z, jnp.float32(1), activation="silu_linear", dtype=E4M3, amax=True)
    codes = np.asarray(out.y).view(np.uint8)
    assert np.isnan(out.amax) and codes[2, 5] == 0x7F and np.sum(codes & 0x7F == 0x7F) == 1
    d = activation_bwd(dy, z, None, activation="silu_linear", amax=True, dbias=True)
    assert np.isnan(d.amax) and np.isnan(d.dbias[0, 5]) and np.sum(np.isnan(d.dbias)) == 1


@pytest.mark.parametrize("name, shape", [("gelu", (0, 8)), ("silu_linear", (4, 0, 8))])
def test_zero_rows(implementation, name, shape):
    z, dy = inputs(name, shape)
    out = activation_fwd(z, jnp.float32(1), activation=name, dtype=E4M3, y_t=True, amax=True)
    assert out.y.shape == shape and out.y_t.shape == (8, *shape[:-1]) and float(out.amax) == 0
    for bias in (None, bias_of(name, shape[-1])):
        assert activation_fwd(z, None, bias, activation=name).y.shape == shape
        d = activation_bwd(dy, z, None, bias, activation=name, amax=True, dbias=True)
        assert d.dz.shape == z.shape and float(d.amax) == 0 and not d.dbias.any()


def test_activations_without_a_kernel():
    z, _ = inputs("gelu_linear", (5, 7))
    for activations, expected in (
        (("linear", "silu"), z[:, 0] * jax.nn.silu(z[:, 1])),
        ((jnp.tanh, "linear"), jnp.tanh(z[:, 0]) * z[:, 1]),
    ):
        assert fused_activation(activations) is None
        np.testing.assert_allclose(activation(z, activations), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(activation(z[:, :1], jnp.sin), jnp.sin(z[:, 0]))
