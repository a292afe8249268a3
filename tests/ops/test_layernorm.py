"""LayerNorm and RMSNorm against their formulas in f64, handlers and references alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from stored import (
    E4M3,
    E5M2,
    EPS,
    assert_fp8,
    assert_rounded,
    assert_same,
    assert_transposed,
    wide,
)

from transformer_engine_jax import testing
from transformer_engine_jax.ops.layernorm import (
    layernorm,
    layernorm_bwd,
    layernorm_fwd,
    rmsnorm,
    rmsnorm_bwd,
    rmsnorm_fwd,
)
from transformer_engine_jax.testing import check_kernel, check_op, epsilon, relative_error

EPSILON = 1e-5
BASE = (2, 3, 33)
SHAPES = [(1, 1), (5, 7), (3, 1000), (130, 100), (300, 1000), (17,)]
F32, F16, BF16 = DTYPES = jnp.float32, jnp.float16, jnp.bfloat16
# Every dtype, every shape, and every reference once.
CASES = [("handler", BASE, dtype) for dtype in DTYPES] + [("handler", shape, F32) for shape in SHAPES]
CASES += [("handler", (3, 1000), BF16), ("reference", BASE, F32), ("reference", (3, 1000), BF16)]
each_case = pytest.mark.parametrize("implementation, shape, dtype", CASES, indirect=["implementation"])


@pytest.fixture(params=[True, False], ids=["layernorm", "rmsnorm"])
def centred(request):
    return request.param


def inputs(shape, dtype=jnp.float32, gamma_dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(0.5, 2.0, shape)
    gamma, beta, dy = rng.normal(1.0, 0.5, shape[-1:]), rng.normal(0.0, 0.5, shape[-1:]), rng.normal(size=shape)
    return (
        jnp.asarray(x, dtype),
        jnp.asarray(gamma, gamma_dtype),
        jnp.asarray(beta, gamma_dtype),
        jnp.asarray(dy, dtype),
    )


def exact_norm(x, gamma, beta, centred, zero_centered=False):
    """y, mean, rstd and the sum of the terms' magnitudes that make y, in f64."""
    x = wide(x)
    mean = x.mean(-1, keepdims=True) if centred else np.zeros((*x.shape[:-1], 1))
    rstd = 1.0 / np.sqrt(np.square(x - mean).mean(-1, keepdims=True) + EPSILON)
    g = wide(gamma) + float(zero_centered)
    beta = wide(beta) if centred else np.zeros_like(g)
    magnitude = (np.abs(x) + np.abs(mean)) * rstd * np.abs(g) + np.abs(beta)
    return (x - mean) * rstd * g + beta, mean[..., 0], rstd[..., 0], magnitude


def forward(centred, x, gamma, beta, scale=None, *known, **options):
    parameters, options = [gamma, beta] if centred else [gamma], {"epsilon": EPSILON, **options}
    return (layernorm_fwd if centred else rmsnorm_fwd)(x, *parameters, scale, *known, **options)


def plain(centred, x, gamma, beta=None, zero_centered=False):
    """The formula as anyone would write it, for jax.grad."""
    gamma = gamma + 1 if zero_centered else gamma
    if centred:
        x = x - x.mean(-1, keepdims=True)
    y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPSILON) * gamma
    return y + beta if centred else y


def op(centred, x, gamma, beta=None, zero_centered=False):
    options = {"epsilon": EPSILON, "zero_centered_gamma": zero_centered}
    return layernorm(x, gamma, beta, **options) if centred else rmsnorm(x, gamma, **options)


@pytest.mark.parametrize("zero_centered", [False, True])
@each_case
def test_value(implementation, centred, shape, dtype, zero_centered):
    x, gamma, beta, _ = inputs(shape, dtype)
    out = forward(centred, x, gamma, beta, zero_centered_gamma=zero_centered, amax=True)
    y, mean, rstd, magnitude = exact_norm(x, gamma, beta, centred, zero_centered)
    assert out.y.dtype == dtype and out.y_t is None
    # Sums of up to 1000 terms in 32 lanes, and their effect on a difference: 16 ulps of the terms' magnitude.
    assert_rounded(out.y, y, magnitude, ulps=16)
    assert_rounded(out.rstd, rstd, rstd, ulps=16)
    if centred:
        assert_rounded(out.mean, mean, np.abs(wide(x)).mean(-1), ulps=16)
    assert float(out.amax) == np.abs(wide(out.y)).max()


@each_case
def test_fp8_result(implementation, centred, shape, dtype):
    x, gamma, beta, _ = inputs(shape, dtype)
    scale, fp8 = 37.0, E5M2 if dtype == BF16 else E4M3
    out = forward(centred, x, gamma, beta, jnp.float32(scale), dtype=fp8, y_t=True, amax=True)
    y, _, _, magnitude = exact_norm(x, gamma, beta, centred)
    assert out.y.dtype == out.y_t.dtype == fp8
    assert_fp8(out.y, y, scale)
    assert_rounded(out.amax, np.abs(y).max(), magnitude.max(), ulps=16)
    assert_transposed(out.y_t, out.y, 1)


@pytest.mark.parametrize("gamma_dtype", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "shape", [BASE, (70, 40), (9, 1000), (600, 2056), (40, 4096), (7, 9000), (5, 16384), (3, 16392)]
)
def test_measured_first_and_stored_with_what_that_found(implementation, centred, shape, dtype, gamma_dtype):
    x, gamma, beta, _ = inputs(shape, dtype, gamma_dtype, seed=shape[-1])
    x = x.at[-1, shape[-1] // 2].mul(9)  # the largest is not always in the first row
    measured = forward(centred, x, gamma, beta, y=False, amax=True)
    assert measured.y is None and measured.y_t is None
    y, mean, rstd, magnitude = exact_norm(x, gamma, beta, centred)
    assert_rounded(measured.rstd, rstd, rstd, ulps=16)
    if centred:
        assert_rounded(measured.mean, mean, np.abs(wide(x)).mean(-1), ulps=16)
    known = (measured.mean, measured.rstd) if centred else (measured.rstd,)
    scale = 448 / measured.amax
    out = forward(centred, x, gamma, beta, scale, *known, dtype=E4M3, y_t=True, amax=True, scale_inv=True)
    assert out.rstd is None and (not centred or out.mean is None)
    # Both compute the same values: the largest is the largest. XLA may round the reference otherwise in each program.
    testing.assert_close(out.amax, measured.amax, 0 if implementation == "handler" else 2.0**-23)
    assert_rounded(out.amax, np.abs(y).max(), magnitude.max(), ulps=16)
    assert_fp8(out.y, y, float(scale))
    assert_transposed(out.y_t, out.y, 1)
    assert np.abs(wide(out.y)).max() == 448


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [BASE, (70, 40), (9, 1000), (130, 4097), (48, 4096), (80, 9000), (3, 16392)])
def test_a_transposed_copy_alone_is_the_one_beside_y(implementation, centred, shape, dtype):
    """Also where it is made later, of the statistics that were found first."""
    x, gamma, beta, _ = inputs(shape, dtype, seed=shape[-1])
    scale, options = jnp.float32(37.0), dict(dtype=E4M3, y_t=True, scale_inv=True)
    both = forward(centred, x, gamma, beta, scale, **options)
    alone = forward(centred, x, gamma, beta, scale, y=False, **options)
    known = (both.mean, both.rstd) if centred else (both.rstd,)
    later = forward(centred, x, gamma, beta, scale, *known, y=False, **options)
    assert alone.y is None and later.y is None and later.rstd is None
    if implementation == "handler":
        testing.assert_same_bytes((alone, later.y_t), (both._replace(y=None), both.y_t))
    else:  # XLA rounds otherwise in each program
        for y_t in (alone.y_t, later.y_t):
            assert_fp8(jnp.moveaxis(y_t, 0, -1), exact_norm(x, gamma, beta, centred)[0], 37.0)


def test_measured_alone_finds_nan_wherever_it_comes_from(implementation, centred):
    x, gamma, beta, _ = inputs((40, 256), BF16)
    given = [x, gamma, beta] if centred else [x, gamma]
    for i, at in enumerate([(39, 255), (255,), (0,)][: len(given)]):
        spoiled = [a.at[at].set(jnp.nan) if i == j else a for j, a in enumerate(given)]
        assert np.isnan(forward(centred, *spoiled, *[beta][centred:], y=False, amax=True).amax)


@pytest.mark.parametrize(
    "shape, dtype, gamma_dtype, zero_centered",
    [(BASE, F32, F32, False), (BASE, F16, F32, True), (BASE, BF16, BF16, False), ((130, 1000), F32, BF16, True)],
)
def test_op(centred, shape, dtype, gamma_dtype, zero_centered):
    x, gamma, beta, _ = inputs(shape, dtype, gamma_dtype)
    # Each result is rounded once to its dtype; 64 roundings of f32 for the order of two chained sums.
    bound = max(2 * max(epsilon(dtype), epsilon(gamma_dtype)), 64 * epsilon(F32))
    check_op(
        lambda *args: op(centred, *args, zero_centered=zero_centered),
        lambda *args: plain(centred, *args, zero_centered=zero_centered),
        (x, gamma, beta) if centred else (x, gamma),
        value_bound=bound,
        gradient_bound=bound,
        key=jax.random.key(0),
    )


@pytest.mark.parametrize("fp8", [None, E4M3])
def test_kernels_agree_with_their_references(centred, fp8):
    x, gamma, beta, dy = inputs((8, 5, 100))
    rows = [P("data")]
    parameters = [gamma, beta] if centred else [gamma]
    replicated = [P()] * len(parameters)
    scale = None if fp8 is None else jnp.float32(37)
    check_kernel(
        layernorm_fwd if centred else rmsnorm_fwd,
        [x, *parameters, scale],
        {"epsilon": EPSILON, "dtype": fp8, "y_t": fp8 is not None, "amax": True},
        assert_same,
        specs=[*rows, *replicated, P()],
    )
    statistics = [s for s in exact_norm(x, gamma, beta, centred)[1:3] if s.any()]
    statistics = [jnp.asarray(s, F32) for s in statistics]
    for residual in (None, dy * 3 + x):
        check_kernel(
            layernorm_bwd if centred else rmsnorm_bwd,
            [dy, x, gamma, *statistics, residual],
            {},
            assert_same,
            specs=[P("data", None, "model"), P("data"), P(), *[P("data")] * (len(statistics) + 1)],
        )


def test_gradient_of_rows_far_from_zero(implementation):
    # The one-pass variance E[x^2] - E[x]^2 loses all digits here.
    x, gamma, beta, dy = inputs((4, 256))
    far = x + 4096.0
    y, _, _, _ = exact_norm(far, gamma, beta, True)
    assert relative_error(layernorm(far, gamma, beta, epsilon=EPSILON), y) < 1e-3
    x64 = wide(far)
    centred = x64 - x64.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(np.square(centred).mean(-1, keepdims=True) + EPSILON)
    xhat, wdy = centred * rstd, wide(dy) * wide(gamma)
    dx = rstd * (wdy - wdy.mean(-1, keepdims=True) - xhat * (wdy * xhat).mean(-1, keepdims=True))
    got = jax.vjp(lambda x: layernorm(x, gamma, beta, epsilon=EPSILON), far)[1](dy)[0]
    assert relative_error(got, dx) < 1e-3


@pytest.mark.parametrize("y", [True, False], ids=["normalised", "measured alone"])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("columns", [256, 768, 2048, 5120, 16384])
def test_statistics_of_rows_near_and_far_from_zero(implementation, centred, columns, dtype, y):
    # A GPU takes them from sums of the values and of their squares, but for rows whose squares are mostly their mean's.
    x, gamma, beta, _ = inputs((36, columns), seed=columns)
    x = (x + jnp.where(jnp.arange(36) % 4 == 3, 500.0, jnp.arange(36) % 4)[:, None]).astype(dtype)
    out = forward(centred, x, gamma, beta, y=y, amax=not y)
    _, mean, rstd, _ = exact_norm(x, gamma, beta, centred)
    assert_rounded(out.rstd, rstd, rstd, ulps=32)  # of up to 1024 terms one after another
    if centred:
        assert_rounded(out.mean, mean, np.abs(wide(x)).mean(-1), ulps=32)


def test_rows_by_the_thousand_are_as_a_few_at_a_time(centred):
    # On a GPU clusters of blocks take strips of these rows as they get to them, some three or four each.
    _, gamma, beta, _ = inputs((1, 16384))
    x = jax.random.normal(jax.random.key(0), (1584, 16384), BF16)

    def normalized(x):
        return forward(centred, x, gamma, beta, jnp.float32(37), dtype=E4M3, y_t=True, amax=True)

    of_few = [normalized(few) for few in jnp.split(x, 4)]
    for _ in range(2):  # and they leave nothing behind
        of_all = normalized(x)
        testing.assert_same_bytes(of_all.y, jnp.concatenate([few.y for few in of_few]))
        testing.assert_same_bytes(of_all.y_t, jnp.concatenate([few.y_t for few in of_few], 1))
        testing.assert_same_bytes(of_all.rstd, jnp.concatenate([few.rstd for few in of_few]))
        testing.assert_same_bytes(of_all.amax, jnp.max(jnp.stack([few.amax for few in of_few])))


# On a GPU a row takes 1 to 16 warps; there are more rows of 4096 than run at once; parameters of 5440 columns
# fit into the shared memory that a kernel has unasked, but not beside its static ones.
WIDTHS = [(70, 40), (9, 1000), (40, 1536), (150, 2056), (1200, 4096), (6, 5440), (7, 8192), (5, 16384), (3, 16392)]


@pytest.mark.parametrize("dtype, stored", [(F32, E4M3), (BF16, E4M3), (BF16, BF16), (F16, F32)])
@pytest.mark.parametrize("shape", WIDTHS)
def test_rows_of_every_width_without_a_transposed_copy(centred, shape, dtype, stored):
    x, gamma, beta, _ = inputs(shape, dtype, seed=shape[-1])
    out = forward(centred, x, gamma, beta, jnp.float32(37) if stored == E4M3 else None, dtype=stored, amax=True)
    y, mean, rstd, magnitude = exact_norm(x, gamma, beta, centred)
    assert out.y.dtype == stored and out.y_t is None
    if stored == E4M3:
        assert_fp8(out.y, y, 37.0)
        assert_rounded(out.amax, np.abs(y).max(), magnitude.max(), ulps=16)
    else:
        assert_rounded(out.y, y, magnitude, ulps=16)
        assert float(out.amax) == np.abs(wide(out.y)).max()
    assert_rounded(out.rstd, rstd, rstd, ulps=16)
    if centred:
        assert_rounded(out.mean, mean, np.abs(wide(x)).mean(-1), ulps=16)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", WIDTHS)
def test_gradients_at_every_width(centred, shape, dtype, residual):
    x, gamma, beta, dy = inputs(shape, dtype, seed=shape[-1])
    past = jnp.flip(x, 0) if residual else None
    _, mean, rstd, _ = exact_norm(x, gamma, beta, centred)
    statistics = [jnp.asarray(s, F32) for s in ([mean, rstd] if centred else [rstd])]
    got = (layernorm_bwd if centred else rmsnorm_bwd)(dy, x, gamma, *statistics, past)
    xhat, wdy = (wide(x) - mean[:, None]) * rstd[:, None], wide(dy) * wide(gamma)
    dx = wdy - xhat * (wdy * xhat).mean(-1, keepdims=True)
    dx = rstd[:, None] * (dx - wdy.mean(-1, keepdims=True) if centred else dx)
    assert relative_error(got.dx, dx + wide(past) if residual else dx) < max(epsilon(dtype), 64 * epsilon(F32))
    assert relative_error(got.dgamma, (wide(dy) * xhat).sum(0)) < 64 * epsilon(F32)
    if centred:
        assert relative_error(got.dbeta, wide(dy).sum(0)) < 64 * epsilon(F32)


def test_parameter_sums_over_many_blocks_of_rows(centred):
    x, gamma, beta, dy = inputs((3000, 40))
    out = forward(centred, x, gamma, beta)
    x64, dy64 = wide(x), wide(dy)
    if centred:
        d = layernorm_bwd(dy, x, gamma, out.mean, out.rstd, None)
        np.testing.assert_allclose(d.dbeta, dy64.sum(0), atol=EPS * 40 * np.abs(dy64).sum(0).max())
        x64 = x64 - wide(out.mean)[:, None]
    else:
        d = rmsnorm_bwd(dy, x, gamma, out.rstd, None)
    terms = dy64 * x64 * wide(out.rstd)[:, None]
    np.testing.assert_allclose(d.dgamma, terms.sum(0), atol=EPS * 40 * np.abs(terms).sum(0).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(5, 40), (3, 7)])
def test_residual_is_added_before_the_rounding(implementation, centred, shape, dtype):
    x, gamma, beta, dy = inputs(shape)
    x, dy = x.astype(dtype), dy.astype(dtype)
    residual = jnp.flip(dy, 0) * 100
    out = forward(centred, x.astype(F32), gamma, beta)
    statistics = [out.mean, out.rstd] if centred else [out.rstd]
    backward = layernorm_bwd if centred else rmsnorm_bwd
    alone = backward(dy.astype(F32), x.astype(F32), gamma, *statistics, None)
    got = backward(dy, x, gamma, *statistics, residual)
    expected = (alone.dx + residual.astype(F32)).astype(dtype)
    # In bf16 next to no value rounds to a neighbour.
    assert relative_error(got.dx, expected) < (1e-6 if dtype == F32 else 2.0**-8 / 16)
    assert relative_error(got.dgamma, alone.dgamma) < 1e-5


@pytest.mark.parametrize("shape", [(0, 8), (4, 0, 8)])
def test_zero_rows(implementation, centred, shape):
    x, gamma, beta, dy = inputs(shape)
    out = forward(centred, x, gamma, beta, jnp.float32(1), dtype=E4M3, y_t=True, amax=True)
    assert out.y.shape == shape and out.y_t.shape == (8, *shape[:-1]) and float(out.amax) == 0
    dx, *parameters = jax.vjp(lambda *a: op(centred, *a), x, gamma, beta)[1](dy)
    assert dx.shape == shape and not any(d.any() for d in parameters)


def test_zero_columns(implementation, centred):
    x, gamma, beta, _ = inputs((16, 0))
    out = forward(centred, x, gamma, beta, jnp.float32(1), dtype=E4M3, y_t=True, amax=True)
    assert out.y.shape == (16, 0) and out.y_t.shape == (0, 16) and float(out.amax) == 0
    assert np.all(np.isnan(out.rstd)) and out.rstd.shape == (16,)


def test_no_values_at_all_are_no_absent_result(implementation, centred):
    x, gamma, beta, _ = inputs((0,))
    out = forward(centred, x, gamma, beta, jnp.float32(1), dtype=E4M3, y_t=True, amax=True)
    assert out.y.shape == out.y_t.shape == (0,) and out.y.dtype == E4M3 and float(out.amax) == 0


def test_nan_stays_in_its_row_and_shows_in_amax(implementation, centred):
    x, gamma, beta, _ = inputs((6, 100))
    out = forward(centred, x.at[2, 5].set(jnp.nan), gamma, beta, jnp.float32(1), dtype=E4M3, y_t=True, amax=True)
    codes = np.asarray(out.y).view(np.uint8)
    assert np.all(codes[2] == 0x7F) and not np.any(codes[[0, 1, 3, 4, 5]] & 0x7F == 0x7F)
    assert np.isnan(out.amax)


def test_constant_rows(implementation):
    x, gamma, beta, dy = inputs((3, 50))
    y, pull = jax.vjp(lambda x: layernorm(x, gamma, beta, epsilon=EPSILON), jnp.full_like(x, 2.0))
    np.testing.assert_array_equal(y, np.broadcast_to(beta, y.shape))
    assert np.all(np.isfinite(pull(dy)[0]))


@pytest.mark.parametrize("result", [jnp.float32, jnp.bfloat16])
def test_result_dtype_may_differ_from_the_input(implementation, centred, result):
    x, gamma, beta, _ = inputs((9, 70), jnp.float16, jnp.bfloat16)
    out = forward(centred, x, gamma, beta, dtype=result)
    y, _, _, magnitude = exact_norm(x, gamma, beta, centred)
    assert out.y.dtype == result
    assert_rounded(out.y, y, magnitude, ulps=16)
