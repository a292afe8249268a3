"""dot_product_attention: values and gradients of every option against f64 numpy; dropout, transforms, misuse."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import numpy_attention
import pytest
from emulated import BF16, F32
from jax.sharding import PartitionSpec as P

from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import Attention, SequenceDescriptor, dot_product_attention

B, Q, K, H, D, DV = 2, 12, 16, 4, 8, 6
QUERY, KEY4, VALUE4, BIAS, DY = emulated.normal(
    7, (B, Q, H, D), (B, K, H, D), (B, K, H, DV), (B, H, Q, K), (B, Q, H, DV)
)
OFFSET = np.array([0.5, -1.0, 0.0, 2.0], np.float32)
_rng = np.random.default_rng(8)
MASK = _rng.random((B, H, Q, K)) < 0.3  # True is masked out
MASK[..., 0] = False
BLIND = MASK.copy()
BLIND[0, :, 3] = True  # a query that sees nothing


# options, groups, mask, bias, softmax offset
CASES = {
    "all visible": (Attention(0.3), 4, None, None, None),
    "causal": (Attention(0.3, causal=True), 4, None, None, None),
    "causal, bottom right": (Attention(0.3, causal=True, bottom_right=True), 4, None, None, None),
    "GQA": (Attention(0.3, causal=True), 2, None, None, None),
    "MQA": (Attention(0.3), 1, MASK, None, None),
    "mask": (Attention(0.3), 4, BLIND, None, None),
    "mask of keys": (Attention(0.3, causal=True), 2, MASK[:, :1, :1], None, None),
    "one mask": (Attention(0.3), 2, MASK[:1, :1], None, None),
    "bias": (Attention(0.3), 2, BLIND, BIAS, None),
    "bias of heads": (Attention(0.3), 4, None, BIAS[:1], None),
    "bias of heads and keys": (Attention(0.3), 4, None, BIAS[:1, :, :1], None),
    "bias of batch": (Attention(0.3), 2, None, BIAS[:, :1], None),
    "one bias": (Attention(0.3, causal=True), 2, None, BIAS[:1, :1], None),
    "bias before scale": (Attention(0.3, bias_before_scale=True), 2, MASK, BIAS[:1], None),
    "window back": (Attention(0.3, causal=True, window=(3, 0)), 4, None, None, None),
    "window both ways": (Attention(0.3, window=(3, 2)), 4, None, None, None),
    "window ahead": (Attention(0.3, window=(-1, 2)), 4, None, None, None),
    "window cut by causality": (Attention(0.3, causal=True, window=(3, 2)), 4, None, None, None),
    "window, bottom right": (Attention(0.3, window=(3, 1), bottom_right=True), 4, None, None, None),
    "off by one": (Attention(0.3, softmax_type="off_by_one"), 4, BLIND, None, None),
    "learnable": (Attention(0.3, causal=True, softmax_type="learnable"), 2, BLIND, BIAS[:1], OFFSET),
}


def run_step(options, mask, names, args, dy):
    """(out, gradients) of the op, jitted."""

    def op(*args):
        return dot_product_attention(*args[:3], options=options, mask=mask, **dict(zip(names, args[3:])))

    @jax.jit
    def step(args, dy):
        out, vjp = jax.vjp(op, *args)
        return out, list(vjp(dy))

    return step(args, dy)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    options, groups, mask, bias, offset = CASES[case]
    extra = {name: x for name, x in (("bias", bias), ("softmax_offset", offset)) if x is not None}
    args = [QUERY, KEY4[:, :, :groups], VALUE4[:, :, :groups]]
    got = run_step(options, mask, list(extra), [*args, *extra.values()], DY)
    seen = numpy_attention.seen_keys(options, B, Q, K, mask=mask)
    testing.assert_close(got, numpy_attention.attention(options, seen, *args, DY, bias, offset), F32)


def test_score_mod_sees_positions_and_is_differentiated():
    """Gemma's soft cap and an ALiBi slope that is learned: closed over, so AD must reach it."""
    slope = jnp.float32(0.1)

    def op(query, key, value, slope):
        mod = lambda scores, q, k: 2 * jnp.tanh(scores / 2) - slope * jnp.abs(q - k)
        options = Attention(0.3, causal=True, bottom_right=True, score_mod=mod)
        return dot_product_attention(query, key, value, options=options, bias=jnp.asarray(BIAS))

    def plain(query, key, value, slope):
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * 0.3 + BIAS
        distance = np.arange(K)[None, :] - np.arange(Q)[:, None] - (K - Q)
        logits = 2 * jnp.tanh(logits / 2) - slope * np.abs(distance)
        weights = jax.nn.softmax(jnp.where(distance <= 0, logits, -jnp.inf), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    args = [jnp.asarray(x) for x in (QUERY, KEY4, VALUE4)] + [slope]
    steps = [jax.jit(partial(testing.gradients, f, key=jax.random.key(1))) for f in (op, plain)]
    testing.assert_close(*[step(args) for step in steps], F32)
    with pytest.raises(ValueError, match=r"score_mod: expected scores\[2, 4, 12, 16\] back, got \(2, 4, 12, 1\)"):
        options = Attention(1.0, score_mod=lambda s, q, k: s[..., :1])
        jax.eval_shape(partial(dot_product_attention, options=options), *args[:3])


def test_all_transforms_of_an_op():
    args = [jnp.asarray(x) for x in (QUERY, KEY4[:, :, :2], VALUE4[:, :, :2], BIAS[:1])]
    options = Attention(0.3, causal=True, softmax_type="off_by_one")

    def op(query, key, value, bias):
        return dot_product_attention(query, key, value, options=options, bias=bias)

    def plain(query, key, value, bias):
        key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * 0.3 + bias
        powers = jnp.exp(logits) * np.tri(Q, K)
        return jnp.einsum("bhqk,bkhd->bqhd", powers / (1 + powers.sum(-1, keepdims=True)), value)

    testing.check_op(op, plain, args, value_bound=F32, gradient_bound=F32, key=jax.random.key(0))


def test_a_query_that_sees_nothing_gets_zeros_and_zero_gradients():
    for options, offset in ((Attention(0.3), None), (Attention(0.3, softmax_type="learnable"), OFFSET)):
        names = [] if offset is None else ["softmax_offset"]
        args = [QUERY, KEY4, VALUE4] + ([] if offset is None else [offset])
        out, grads = run_step(options, BLIND, names, args, DY)
        assert not np.asarray(out[0, 3]).any() and np.asarray(out[0, 2]).all()
        assert not np.asarray(grads[0][0, 3]).any()
        assert all(bool(jnp.isfinite(g).all()) for g in grads)


def test_bf16_computes_softmax_in_f32():
    args = [jnp.asarray(x, jnp.bfloat16) for x in (QUERY, KEY4[:, :, :2], VALUE4[:, :, :2])]
    options = Attention(0.3, causal=True)
    out = jax.jit(partial(dot_product_attention, options=options))(*args)
    assert out.dtype == jnp.bfloat16
    seen = numpy_attention.seen_keys(options, B, Q, K)
    exact, _ = numpy_attention.attention(options, seen, *map(np.asarray, args), DY)
    testing.assert_close(out, exact, 2 * BF16)  # the weights and the output are rounded
    # Logits that bf16 could not tell apart, and that overflow without the maximum subtracted.
    large = dot_product_attention(*args, options=Attention(2000.0))
    assert bool(jnp.isfinite(large).all())


def test_dropout_drops_the_rate_and_keeps_the_mean():
    options = Attention(0.3, dropout=0.25)
    zeros, ones = jnp.zeros((B, Q, H, D)), jnp.ones((B, K, H, D))
    run = jax.jit(partial(dot_product_attention, options=options))
    # Uniform weights and the identity as values: the output shows each weight, 0 or 4 / 3 of 1 / K.
    identity = jnp.broadcast_to(jnp.eye(K)[None, :, None], (B, K, H, K))
    weights = np.asarray(run(zeros, ones, identity, dropout_key=jax.random.key(0))) * K
    np.testing.assert_allclose(np.unique(weights.round(5)), [0, 4 / 3], atol=2e-5)
    # 1536 of them: the mean's standard error is sqrt(1 / 3 / 1536) = 0.015; four times that.
    assert abs(weights.mean() - 1) < 0.06
    # No two queries, heads or rows of the batch share what is dropped.
    drawn = {row.tobytes() for row in (weights > 0).reshape(-1, K)}
    assert len(drawn) > 0.95 * B * Q * H

    again = run(zeros, ones, identity, dropout_key=jax.random.key(0))
    other = run(zeros, ones, identity, dropout_key=jax.random.key(1))
    np.testing.assert_array_equal(np.asarray(again) * K, weights)
    assert (np.asarray(other) * K != weights).mean() > 0.3  # 2 * 0.25 * 0.75 of them differ
    testing.assert_close(run(zeros, ones, ones, dropout_key=None), jnp.ones((B, Q, H, D)), F32)


def test_dropout_is_the_same_in_the_backward_pass():
    options = Attention(0.3, dropout=0.4, causal=True)
    op = partial(dot_product_attention, options=options, dropout_key=jax.random.key(3))
    value = jnp.asarray(VALUE4)
    out, vjp = jax.vjp(lambda v: op(QUERY, KEY4, v), value)
    # The output is linear in the values: <out(v), dy> = <v, dv>.
    np.testing.assert_allclose(jnp.vdot(out, DY), jnp.vdot(value, vjp(jnp.asarray(DY))[0]), rtol=1e-5)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "sequences",
    [
        None,
        SequenceDescriptor.from_seqlens(np.array([12, 3])),
        SequenceDescriptor.from_segment_ids_and_pos(tuple(np.ones((B, S), int) * [[1], [2]] for S in (Q, K))),
    ],
    ids=["causal", "lengths", "ids"],
)
def test_sharded_is_unsharded(explicit, sequences):
    mesh = testing.mesh_of((2, 2), ("data", "model"), explicit=explicit)
    described, tree = jax.tree.flatten(sequences)
    arrays = [QUERY, KEY4[:, :, :2], VALUE4[:, :, :2], DY, *described]
    specs = [P("data", None, "model")] * 4 + [P("data")] * len(described)

    @jax.jit
    def step(query, key, value, dy, *described):
        options = Attention(0.3, causal=True, bottom_right=bool(described))
        sequences = jax.tree.unflatten(tree, described)
        run = partial(dot_product_attention, options=options, sequence_descriptor=sequences)
        out, vjp = jax.vjp(run, query, key, value)
        return out, vjp(dy)

    expected = jax.device_get(step(*arrays))
    with testing.on_mesh(mesh):
        got = jax.device_get(step(*testing.shard(mesh, arrays, specs)))
    testing.assert_close(got, expected, F32)


DESCRIPTOR = SequenceDescriptor.from_seqlens(jnp.array([3, 4]))


@pytest.mark.parametrize(
    "shapes, options, call, message",
    [
        ({"query": (B, Q, D)}, {}, {}, r"query: expected \[B, S, heads, D\], got \[2, 12, 8\]"),
        ({"key": (B, K, 3, D), "value": (B, K, 3, D)}, {}, {}, "4 heads do not divide into 3 groups"),
        ({"value": (B, K - 1, H, D)}, {}, {}, r"value\[2, 15, 4, 8\].*must agree"),
        ({"key": (B, K, H, 4)}, {}, {}, r"key\[2, 16, 4, 4\].*must agree"),
        ({}, {}, {"mask": np.zeros((B, Q, K), bool)}, r"mask: expected a shape that broadcasts"),
        ({}, {}, {"mask": np.ones((B, 1, 1, K), int)}, "mask: expected bool, int8 or uint8, .* give mask == 0"),
        ({}, {}, {"bias": np.zeros((1, 3, Q, K))}, r"bias: expected.*\(2, 4, 12, 16\), got \(1, 3"),
        ({}, {}, {"bias": np.zeros((1, 1, Q, K), bool)}, "bias: expected f32, f16 or bf16, got bool"),
        ({}, {}, {"mask": MASK, "sequence_descriptor": DESCRIPTOR}, "got both mask and sequence_descriptor"),
        ({}, {"softmax_type": "learnable"}, {}, "softmax_offset: expected .*got none with softmax_type='learnable'"),
        ({}, {}, {"softmax_offset": OFFSET}, "softmax_offset: expected .*got one with softmax_type='vanilla'"),
        ({}, {"softmax_type": "learnable"}, {"softmax_offset": OFFSET[:2]}, r"softmax_offset: expected \[4\].* \[2\]"),
        ({}, {"softmax_type": "sparse"}, {}, "softmax_type: expected one of .*got 'sparse'"),
        ({}, {"dropout": 1.0}, {}, r"dropout: expected a rate in \[0, 1\), got 1.0"),
        ({}, {"causal": "no"}, {}, "causal: expected a bool, got 'no'"),
        ({}, {"scale": None}, {}, "scale: expected a finite number, got None"),
        ({}, {"scale": float("nan")}, {}, "scale: expected a finite number, got nan"),
        ({}, {"window": (-2, 0)}, {}, r"window: expected \(left, right\).*got \(-2, 0\)"),
        ({}, {"window": ("a", "b")}, {}, r"window: expected \(left, right\).*got \('a', 'b'\)"),
        ({}, {"window": (np.nan, 0)}, {}, r"window: expected \(left, right\).*got \(nan, 0\)"),
        ({}, {"score_mod": 3}, {}, r"score_mod: expected a function of \(scores, .*got 3"),
        ({}, {"window": (3,)}, {}, r"window: expected \(left, right\).*got \(3,\)"),
    ],
)  # fmt: skip
def test_misuse_is_named(shapes, options, call, message):
    shapes = {"query": (B, Q, H, D), "key": (B, K, H, D), "value": (B, K, H, D)} | shapes
    with pytest.raises(ValueError, match=message):
        dot_product_attention(
            **{n: jnp.ones(s) for n, s in shapes.items()}, options=Attention(**{"scale": 1.0} | options), **call
        )


def test_three_arrays_or_one():
    one = jnp.zeros((B, K, 3, H, D))
    for arrays in ((QUERY,), (QUERY, KEY4), (one[:, :, :2],)):
        with pytest.raises(ValueError, match="expected query, key and value, or the three in one array"):
            dot_product_attention(*arrays, options=Attention(1.0))


def test_integers_and_fp8_are_not_attended():
    with pytest.raises(ValueError, match="query: expected f32, f16 or bf16, got float8_e4m3fn"):
        dot_product_attention(QUERY.astype(jnp.float8_e4m3fn), KEY4, VALUE4, options=Attention(1.0))
    with pytest.raises(ValueError, match="key: expected f32, f16 or bf16, got int32"):
        dot_product_attention(QUERY, KEY4.astype(np.int32), VALUE4, options=Attention(1.0))
