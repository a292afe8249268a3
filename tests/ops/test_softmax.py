"""Softmax against its formula in f64 and jax.nn.softmax, handlers and references alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from stored import ABSENT, assert_rounded, call_handler, wide

from transformer_engine_jax.ops.softmax import softmax, softmax_bwd, softmax_fwd
from transformer_engine_jax.testing import assert_close, check_kernel, check_op, epsilon, mesh_of, on_mesh, shard

F32, F16, BF16 = DTYPES = jnp.float32, jnp.float16, jnp.bfloat16
SCALE = 0.37
BASE = (2, 3, 5, 33)
# Rows of one lane's share, of whole vectors, of unaligned length, for each number of threads, too long for them.
SHAPES = [(1, 1, 1), (3, 4, 8), (1, 2, 3, 257), (2, 1, 3, 1000), (2, 2, 1025), (1, 3, 2056), (1, 3, 4104), (1, 2, 8200)]
SHAPES += [(1, 2, 16400)]
CASES = [("handler", BASE, dtype) for dtype in DTYPES] + [("handler", shape, F32) for shape in SHAPES]
CASES += [("handler", shape, BF16) for shape in SHAPES] + [("reference", BASE, F32), ("reference", BASE, BF16)]
each_case = pytest.mark.parametrize("implementation, shape, dtype", CASES, indirect=["implementation"])
KINDS = {"plain": "", "masked": "mask", "causal": "causal", "offset": "offset", "all": "mask causal offset"}
each_kind = pytest.mark.parametrize("kind", list(KINDS.values()), ids=list(KINDS))


def inputs(shape, dtype=F32, seed=0):
    """x, dy, a mask with one row of nothing visible, an offset for each head and example."""
    rng = np.random.default_rng(seed)
    mask = rng.random((*shape[:-3], *shape[-2:])) < 0.3
    mask[..., 0, :] = True
    return (
        jnp.asarray(rng.normal(0, 5, shape), dtype),
        jnp.asarray(rng.normal(size=shape), dtype),
        jnp.asarray(mask),
        jnp.asarray(rng.normal(size=shape[:-2]), F32),
    )


def of_kind(kind, mask, offset):
    return mask if "mask" in kind else None, offset if "offset" in kind else None


def exact(x, mask, offset, causal, scale=SCALE):
    """y and the offset's weight, in f64."""
    v = wide(x) * float(np.float32(scale))
    hidden = np.zeros(v.shape, bool) if mask is None else np.broadcast_to(np.asarray(mask)[..., None, :, :], v.shape)
    if causal:
        hidden = hidden | (np.arange(v.shape[-1]) > np.arange(v.shape[-2])[:, None])
    terms = np.where(hidden, 0.0, np.exp(v))
    extra = np.zeros(v.shape[:-2]) if offset is None else np.exp(wide(offset))
    total = terms.sum(-1, keepdims=True) + extra[..., None, None]
    total = np.where(total == 0, 1.0, total)
    return terms / total, extra[..., None] / total[..., 0]


@each_kind
@each_case
def test_value_and_gradient(implementation, shape, dtype, kind):
    x, dy, mask, offset = inputs(shape, dtype)
    mask, offset = of_kind(kind, mask, offset)
    options = {"scale_factor": SCALE, "causal": "causal" in kind}
    out = softmax_fwd(x, mask, offset, **options, rest=True)
    y, rest = exact(x, mask, offset, options["causal"])
    assert out.y.dtype == dtype and out.y.shape == shape
    # The exponential magnifies the rounding of its argument, |v| <= 10 here; a sum of 16400 terms in 32 lanes or more.
    assert_rounded(out.y, y, y, ulps=64)
    assert_rounded(out.rest, rest, rest, ulps=64)

    y = wide(out.y)
    d = softmax_bwd(dy, out.y, **options, dot=True)
    terms = y * wide(dy)
    dot = terms.sum(-1)
    scale = float(np.float32(SCALE))
    dx = scale * y * (wide(dy) - dot[..., None])
    magnitude = np.abs(terms).sum(-1)
    assert d.dx.dtype == dtype and d.dx.shape == shape
    assert_rounded(d.dot, dot, magnitude, ulps=16)
    assert_rounded(d.dx, dx, scale * y * (np.abs(wide(dy)) + magnitude[..., None]), ulps=16)


def plain(x, offset=None, *, mask=None, causal=False):
    """By jax.nn.softmax, the offset as one more key."""
    v = x.astype(F32) * SCALE
    if mask is not None:
        v = jnp.where(mask, -1e30, v)
    if causal:
        v = jnp.where(jnp.tril(jnp.ones(v.shape[-2:], bool)), v, -1e30)
    if offset is None:
        return jax.nn.softmax(v)
    column = jnp.broadcast_to(offset.reshape(-1, 1, 1), (*v.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([v, column], -1))[..., :-1]


@pytest.mark.parametrize(
    "mask_shape, dtype",
    [(None, F32), (None, F16), (None, BF16), ((2, 1, 5, 33), F32), ((1, 3, 5, 33), BF16), ((5, 33), F32), ((33,), F32)],
)
def test_op(mask_shape, dtype):
    x, _, _, _ = inputs(BASE, dtype)
    rng = np.random.default_rng(1)
    offset = jnp.asarray(rng.normal(size=3), F32)
    mask = None
    if mask_shape:
        mask = rng.random(mask_shape) < 0.3
        mask[..., 0] = False  # a key that all see: jax.nn.softmax of a hidden row is not 0
    options = {"mask": mask, "causal": mask_shape in (None, (2, 1, 5, 33))}
    # y is rounded once, and once more in the gradient's terms y (dy - sum y dy), whose sum shrinks them little.
    bound = max(4 * epsilon(dtype), 64 * epsilon(F32))
    check_op(
        lambda x, offset: softmax(x, softmax_offset=offset, scale_factor=SCALE, **options),
        lambda x, offset: plain(x, offset, **options),
        (x, offset),
        value_bound=bound,
        gradient_bound=bound,
        key=jax.random.key(0),
    )


@pytest.mark.parametrize("shape", [(5, 33), (3, 5, 33), (2, 2, 3, 5, 33)])
def test_any_number_of_leading_axes(shape):
    x, _, _, _ = inputs((1, *shape) if len(shape) < 3 else shape)
    x = x.reshape(shape)
    np.testing.assert_allclose(softmax(x, scale_factor=SCALE, causal=True), plain(x, causal=True), rtol=1e-5)
    np.testing.assert_allclose(softmax(x, mask=jnp.zeros((5, 33), jnp.uint8)), jax.nn.softmax(x), rtol=1e-5)


def test_off_by_one():
    x, _, _, _ = inputs(BASE)
    y = softmax(x, softmax_offset=jnp.zeros((1, 3, 1, 1)))
    e = np.exp(wide(x))
    np.testing.assert_allclose(y, e / (1 + e.sum(-1, keepdims=True)), rtol=1e-5)


@pytest.mark.parametrize("kind", ["mask", "mask causal offset"])
def test_kernels_agree_with_their_references(kind):
    x, dy, mask, offset = inputs((8, 4, 6, 40))
    mask, offset = of_kind(kind, mask, offset)
    options = {"scale_factor": SCALE, "causal": "causal" in kind}

    def same(got, expected):
        for g, e in zip(got, expected):
            np.testing.assert_allclose(g, e, rtol=64 * epsilon(F32), atol=1e-7)

    specs = [P("data", "model"), None if mask is None else P("data"), None if offset is None else P("data", "model")]
    check_kernel(softmax_fwd, [x, mask, offset], {**options, "rest": True}, same, specs=specs)
    y = softmax_fwd(x, mask, offset, **options).y
    check_kernel(softmax_bwd, [dy, y], {**options, "dot": True}, same, specs=[P("data", None, "model"), P("data")])


@pytest.mark.parametrize("spec", [P("data", "model"), P("data", None, "model"), P("data", None, None, "model")])
def test_sharded_op(spec):
    x, dy, _, _ = inputs((4, 2, 6, 40))
    mask = jnp.asarray(np.random.default_rng(0).random((1, 2, 6, 40)) < 0.3)

    @jax.jit
    def run(x, dy, offset, mask):
        y, pull = jax.vjp(lambda x, offset: softmax(x, mask=mask, softmax_offset=offset), x, offset)
        return y, pull(dy)

    args = x, dy, jnp.arange(2.0), mask
    mesh = mesh_of((4, 2), ("data", "model"))
    with on_mesh(mesh):
        got = run(*shard(mesh, args, (spec, spec, P(), P())))
    assert_close(jax.device_get(got), jax.device_get(run(*args)), 64 * epsilon(F32))


def test_rows_of_nothing(implementation):
    x, dy, _, _ = inputs(BASE)
    hidden = jnp.zeros(BASE, bool).at[:, :, 2].set(True)
    y, pull = jax.vjp(lambda x: softmax(x, mask=hidden), x.at[0, 0, 0].set(-jnp.inf))
    dx = pull(dy)[0]
    assert not y[:, :, 2].any() and not dx[:, :, 2].any()
    assert not y[0, 0, 0].any() and not dx[0, 0, 0].any()
    assert np.isfinite(dx).all() and y[:, :, 1].any()


def test_extreme_scores(implementation):
    big = jnp.asarray([[3e38, 3e38, 0.0], [-3e38, -200.0, -100.0], [-jnp.inf, 0.0, 0.0], [1e-40, 0.0, -jnp.inf]])
    expected = [[0.5, 0.5, 0], [0, 0, 1], [0, 0.5, 0.5], [0.5, 0.5, 0]]
    tiny = float(jnp.finfo(jnp.float32).tiny)  # e^-100 is below it: 0 or a denormal, as the processor does
    np.testing.assert_allclose(softmax(big), expected, rtol=1e-6, atol=tiny)
    np.testing.assert_array_equal(softmax(-big, scale_factor=-1.0), softmax(big))


def test_nan_stays_in_its_row(implementation):
    x, _, _, _ = inputs(BASE)
    y = np.asarray(softmax(x.at[0, 1, 3, 7].set(jnp.nan)))
    assert np.isnan(y[0, 1, 3]).all() and np.isnan(y).sum() == 33
    hidden = jnp.zeros(BASE, bool).at[0, 1, 3, 7].set(True)
    assert np.isfinite(softmax(x.at[0, 1, 3, 7].set(jnp.nan), mask=hidden)).all()


def test_what_causality_hides_is_never_looked_at(implementation):
    x, dy, _, _ = inputs((2, 1, 8, 40))
    hidden = ~np.tri(8, 40, dtype=bool)
    poisoned = [jnp.where(hidden, jnp.nan, t) for t in (x, dy)]
    for a, b in ((x, dy), poisoned):
        y, pull = jax.vjp(lambda x: softmax(x, causal=True), a)
        results = (y, pull(b)[0])
    expected = jax.vjp(lambda x: softmax(x, causal=True), x)
    np.testing.assert_array_equal(results[0], expected[0])
    np.testing.assert_array_equal(results[1], expected[1](dy)[0])


@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 3, 0, 8), (2, 3, 5, 0)])
def test_nothing(implementation, shape):
    empty = jnp.zeros(shape)
    y, pull = jax.vjp(lambda x, o: softmax(x, softmax_offset=o), empty, jnp.zeros(3))
    dx, doffset = pull(empty)
    assert y.shape == dx.shape == shape and not doffset.any()


@pytest.mark.parametrize(
    "message, call",
    {
        "logits: expected f32, f16 or bf16, got int32": lambda x: softmax(x.astype(int)),
        r"logits: expected \[.., H, Q, K\] or \[Q, K\], got \[33\]": lambda x: softmax(x[0, 0, 0]),
        r"mask: expected a shape that broadcasts to \[2, 3, 5, 33\], got \[3, 1, 5, 33\]": lambda x: softmax(
            x, mask=jnp.zeros((3, 1, 5, 33), bool)
        ),
        r"mask: expected a shape .* got \[1, 2, 3, 5, 33\]": lambda x: softmax(x, mask=x[None] > 0),
        "mask: expected bool, int8 or uint8, .* got float32": lambda x: softmax(x, mask=x),
        "mask: .* got int32; .* give mask == 0": lambda x: softmax(x, mask=jnp.ones((5, 33), int)),
        r"softmax_offset: expected floats \[3\] or \[1, 3, 1, 1\].*got float32\[2\]": lambda x: softmax(
            x, softmax_offset=jnp.zeros(2)
        ),
        "softmax_offset: .*got int32": lambda x: softmax(x, softmax_offset=jnp.zeros(3, int)),
    }.items(),
)
def test_mistakes(message, call):
    with pytest.raises(ValueError, match=f"softmax: {message}"):
        call(inputs(BASE)[0])


SCORES = (2, 3, 8), F32
FWD = {"x": SCORES, "mask": ((3, 8), jnp.bool_), "offset": ((2,), F32)}, {"y": SCORES, "rest": ABSENT}
BWD = {"dy": SCORES, "y": SCORES}, {"dx": SCORES, "dot": ABSENT}


@pytest.mark.parametrize(
    "name, argument, wrong",
    [
        ("softmax_fwd", "x", ((3, 8), F32)),
        ("softmax_fwd", "x", ((2, 3, 8), jnp.int32)),
        ("softmax_fwd", "mask", ((2, 3, 8), jnp.bool_)),
        ("softmax_fwd", "mask", ((3, 8), F32)),
        ("softmax_fwd", "offset", ((3,), F32)),
        ("softmax_fwd", "offset", ((2,), BF16)),
        ("softmax_fwd", "y", ((2, 3, 7), F32)),
        ("softmax_fwd", "y", ((2, 3, 8), BF16)),
        ("softmax_fwd", "rest", ((2,), F32)),
        ("softmax_bwd", "dy", ((2, 3, 8), BF16)),
        ("softmax_bwd", "dy", ((2, 3, 9), F32)),
        ("softmax_bwd", "y", ((8,), F32)),
        ("softmax_bwd", "dx", ((2, 3, 9), F32)),
        ("softmax_bwd", "dot", ((2, 3), BF16)),
    ],
)
def test_malformed_calls_raise(name, argument, wrong):
    operands, results = (dict(side) for side in (FWD if name == "softmax_fwd" else BWD))
    (operands if argument in operands else results)[argument] = wrong
    with pytest.raises(Exception, match=f"te_{name}: "):
        call_handler(name, operands, results, {"scale_factor": np.float32(1), "causal": False})
