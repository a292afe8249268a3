"""dot_product_attention: against its formula in f64 numpy, for values; and by AD of a plain form, for gradients."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import BF16, F32
from jax.sharding import PartitionSpec as P

from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import Attention, attention_backend, dot_product_attention

B, Q, K, H, D = 2, 12, 16, 4, 8
QUERY, KEY4, VALUE4, BIAS, DY = emulated.normal(7, (B, Q, H, D), (B, K, H, D), (B, K, H, D), (B, H, Q, K), (B, Q, H, D))
_rng = np.random.default_rng(8)
MASK = _rng.random((B, H, Q, K)) < 0.3  # True is masked out
MASK[..., 0] = False


def visible(options: Attention, mask, q=Q, k=K):
    """bool[B, H, q, k] by one comparison an element."""
    seen = np.ones((B, H, q, k), bool) if mask is None else ~np.broadcast_to(mask, (B, H, q, k))
    left, right = options.window or (-1, -1)
    for i in range(q):
        for j in range(k):
            hidden = (options.causal and j > i) or (left >= 0 and j < i - left) or (right >= 0 and j > i + right)
            seen[..., i, j] &= not hidden
    return seen


def formula(query, key, value, bias, seen, options):
    """Softmax attention, of arrays of either numpy or jax.numpy; a query that sees no key gets zeros."""
    xp = jnp if isinstance(query, jax.Array) else np
    repeats = query.shape[2] // key.shape[2]
    key, value = (xp.repeat(x, repeats, axis=2) for x in (key, value))  # group g serves heads g * repeats ...
    logits = xp.einsum("bqhd,bkhd->bhqk", query, key)
    bias = 0.0 if bias is None else bias
    logits = (logits + bias) * options.scale if options.bias_before_scale else logits * options.scale + bias
    weights = xp.where(seen, xp.exp(xp.where(seen, logits, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True)
    return xp.einsum("bhqk,bkhd->bqhd", weights / xp.where(total > 0, total, 1.0), value)


# options, groups, mask, bias
CASES = {
    "all visible": (Attention(0.3), 4, None, None),
    "causal": (Attention(0.3, causal=True), 4, None, None),
    "GQA": (Attention(0.3, causal=True), 2, None, None),
    "MQA": (Attention(0.3), 1, MASK, None),
    "mask": (Attention(0.3), 4, MASK, None),
    "mask of keys": (Attention(0.3, causal=True), 2, MASK[:, :1, :1], None),
    "one mask": (Attention(0.3), 2, MASK[:1, :1], None),
    "bias": (Attention(0.3), 2, None, BIAS),
    "bias of heads": (Attention(0.3), 4, None, BIAS[:1, :, :1]),
    "bias of batch": (Attention(0.3), 2, None, BIAS[:, :1]),
    "bias before scale": (Attention(0.3, bias_before_scale=True), 2, MASK, BIAS[:1]),
    "window back": (Attention(0.3, causal=True, window=(3, 0)), 4, None, None),
    "window both ways": (Attention(0.3, window=(3, 2)), 4, None, None),
    "window ahead": (Attention(0.3, window=(-1, 2)), 4, None, None),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    options, groups, mask, bias = CASES[case]
    args = [QUERY, KEY4[:, :, :groups], VALUE4[:, :, :groups]] + ([] if bias is None else [bias])
    seen = visible(options, mask)

    def op(query, key, value, bias=None):
        return dot_product_attention(query, key, value, options=options, mask=mask, bias=bias)

    def plain(query, key, value, bias=None):
        return formula(query, key, value, bias, seen, options)

    exact = plain(*[x.astype(np.float64) for x in args])
    for f in (op, plain):
        run = jax.jit(lambda *args, f=f: (lambda y, vjp: (y, vjp(jnp.asarray(DY))))(*jax.vjp(f, *args)))
        out, grads = run(*[jnp.asarray(x) for x in args])
        testing.assert_close(out, exact, F32, "value")
        expected = grads if f is op else expected  # noqa: F821
    testing.assert_close(expected, grads, F32, "gradient ")


def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients():
    mask = np.zeros((B, 1, Q, K), bool)
    mask[0, :, 3] = True
    run = partial(dot_product_attention, options=Attention(0.3), mask=jnp.asarray(mask))
    out, vjp = jax.vjp(jax.jit(run), *[jnp.asarray(x) for x in (QUERY, KEY4, VALUE4)])
    assert not np.asarray(out[0, 3]).any() and np.asarray(out[0, 2]).all()
    dq, *others = vjp(jnp.asarray(DY))
    assert not np.asarray(dq[0, 3]).any()
    assert all(bool(jnp.isfinite(g).all()) for g in others)


def test_bf16_computes_softmax_in_f32():
    args = [jnp.asarray(x, jnp.bfloat16) for x in (QUERY, KEY4[:, :, :2], VALUE4[:, :, :2])]
    options = Attention(0.3, causal=True)
    out = jax.jit(partial(dot_product_attention, options=options))(*args)
    assert out.dtype == jnp.bfloat16
    exact = formula(*[np.asarray(x, np.float64) for x in args], None, visible(options, None), options)
    testing.assert_close(out, exact, 2 * BF16)  # the weights and the output are rounded
    # Logits that bf16 could not tell apart, and that overflow without the maximum subtracted.
    large = dot_product_attention(*args, options=Attention(2000.0))
    assert bool(jnp.isfinite(large).all())


def test_dropout_drops_the_rate_and_keeps_the_mean():
    options = Attention(0.3, dropout=0.25)
    ones = jnp.ones((B, K, H, D))
    key = jax.random.key(0)
    run = jax.jit(partial(dot_product_attention, options=options))
    out = run(jnp.zeros((B, Q, H, D)), ones, ones, dropout_key=key)  # uniform weights: each output is a mean of K
    # B * Q * H means of K = 16 values that are 0 or 4 / 3: the standard error of their mean is
    # sqrt(1/3 / (96 * 16)) = 0.015.
    assert abs(float(out.mean()) - 1) < 0.06 and float(jnp.std(out[..., 0])) > 0.05
    again = run(jnp.zeros((B, Q, H, D)), ones, ones, dropout_key=key)
    testing.assert_same_bytes(out, again)
    testing.assert_close(run(jnp.zeros((B, Q, H, D)), ones, ones, dropout_key=None), jnp.ones((B, Q, H, D)), F32)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_sharded_is_unsharded(explicit):
    mesh = testing.mesh_of((2, 2), ("data", "model"), explicit=explicit)
    arrays = [QUERY, KEY4[:, :, :2], VALUE4[:, :, :2], DY]

    @jax.jit
    def step(query, key, value, dy):
        run = partial(dot_product_attention, options=Attention(0.3, causal=True))
        out, vjp = jax.vjp(run, query, key, value)
        return out, vjp(dy)

    expected = jax.device_get(step(*arrays))
    with testing.on_mesh(mesh):
        got = jax.device_get(step(*testing.shard(mesh, arrays, [P("data", None, "model")] * 4)))
    testing.assert_close(got, expected, F32)


def test_backend_names_a_reason():
    q = jnp.ones((B, Q, H, D))
    backend, why = attention_backend(Attention(1.0), q, q, q, mask=None, bias=None, dropout_key=None)
    assert backend == "reference" and ("GPU" in why or "bf16" in why)


@pytest.mark.parametrize(
    "query, key, value, options, message",
    [
        ((B, Q, D), (B, K, H, D), (B, K, H, D), {}, r"query: expected \[B, S, heads, D\], got \[2, 12, 8\]"),
        ((B, Q, H, D), (B, K, 3, D), (B, K, 3, D), {}, "4 heads do not divide into 3 groups"),
        ((B, Q, H, D), (B, K, H, D), (B, K - 1, H, D), {}, r"value\[2, 15, 4, 8\].*must agree"),
        ((B, Q, H, D), (B, K, H, 4), (B, K, H, 4), {}, r"key\[2, 16, 4, 4\].*must agree"),
        ((B, Q, H, D), (B, K, H, D), (B, K, H, D), {"mask": (B, Q, K)}, r"mask: expected a shape that broadcasts"),
        ((B, Q, H, D), (B, K, H, D), (B, K, H, D), {"bias": (1, 3, Q, K)}, r"bias: .*\(2, 4, 12, 16\), got \(1, 3"),
    ],
)  # fmt: skip
def test_misuse_is_named(query, key, value, options, message):
    options = {name: jnp.zeros(shape, bool if name == "mask" else jnp.float32) for name, shape in options.items()}
    with pytest.raises(ValueError, match=message):
        dot_product_attention(jnp.ones(query), jnp.ones(key), jnp.ones(value), options=Attention(1.0), **options)
