"""DotProductAttention against a plain form of it."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import numpy_attention
import pytest
import steps
from emulated import F32
from plain import plain_attention

from transformer_engine_jax import testing
from transformer_engine_jax.flax import DotProductAttention, SequenceDescriptor
from transformer_engine_jax.ops.attention import Attention

B, S, H, D = 2, 16, 4, 16
Q, K, V, BIAS = (jnp.asarray(a) for a in emulated.normal(0, (B, S, H, D), (B, S, H, D), (B, S, H, D), (1, H, S, S)))
LENGTHS = np.array([S, 10])
PADDED = SequenceDescriptor.from_seqlens(LENGTHS)
# Two sequences and padding in the first row, one in the second.
PACKED = SequenceDescriptor.from_seqlens_and_offsets(np.array([[6, 7], [9, -1]]), np.array([[0, 6, -1], [2, -1, -1]]))
PACKED_ROWS = [[(0, 6, 0, 6), (6, 7, 6, 7)], [(2, 9, 2, 9)]]
PADDING = jnp.asarray(np.arange(S)[None, None, None, :] >= np.array([S, 10])[:, None, None, None])  # True: masked out


DPA = partial(DotProductAttention, head_dim=D, num_attention_heads=H)


@pytest.mark.parametrize(
    "fields, call, expected",
    [
        ({}, {}, dict(scale=0.25, causal=True)),
        ({"attn_mask_type": "no_mask", "scale_factor": 0.5}, {}, dict(scale=0.5)),
        ({"attn_mask_type": "padding"}, {"mask": PADDING}, dict(scale=0.25, mask=PADDING)),
        ({"attn_mask_type": "padding_causal"}, {"mask": PADDING}, dict(scale=0.25, mask=PADDING, causal=True)),
        ({"attn_mask_type": "causal_padding"}, {"mask": PADDING}, dict(scale=0.25, mask=PADDING, causal=True)),
        ({"window_size": (3, 0)}, {}, dict(scale=0.25, causal=True, window=(3, 0))),
        ({}, {"bias": BIAS}, dict(scale=0.25, causal=True, bias=BIAS)),
        ({"attn_bias_type": "post_scale_bias"}, {"bias": BIAS}, dict(scale=0.25, causal=True, bias=BIAS)),
        ({"attn_bias_type": "pre_scale_bias"}, {"bias": BIAS}, dict(scale=0.25, causal=True, bias=BIAS * 0.25)),
        ({"num_gqa_groups": 2}, {}, dict(scale=0.25, causal=True)),
    ],
    ids=["causal", "no mask", "padding", "padding causal", "causal padding", "window", "bias", "post scale bias",
         "pre scale bias", "GQA"],
)  # fmt: skip
def test_attention_is_the_formula(fields, call, expected):
    groups = fields.get("num_gqa_groups", H)
    args = (Q, K[:, :, :groups], V[:, :, :groups])
    module = lambda q, k, v: DPA(**fields).apply({}, q, k, v, **call)
    testing.assert_close(steps.step(module, *args), steps.step(partial(plain_attention, **expected), *args), F32)


def test_layouts_and_transposed_inputs_are_the_same_attention():
    expected = DPA().apply({}, Q, K, V)
    packed = DPA(qkv_layout="bs3hd").apply({}, jnp.stack([Q, K, V], axis=2))
    kv_packed = DPA(qkv_layout="bshd_bs2hd").apply({}, Q, jnp.stack([K, V], axis=2))
    turned = DPA(transpose_batch_sequence=True).apply({}, *(jnp.swapaxes(x, 0, 1) for x in (Q, K, V)))
    one = jnp.stack([jnp.swapaxes(x, 0, 1) for x in (Q, K, V)], axis=2)
    one_turned = DPA(qkv_layout="bs3hd", transpose_batch_sequence=True).apply({}, one)
    for got in (packed, kv_packed, jnp.swapaxes(turned, 0, 1), jnp.swapaxes(one_turned, 0, 1)):
        testing.assert_close(got, expected, F32)


def test_attention_dropout_is_seeded_and_off_when_deterministic():
    module = DPA(attention_dropout=0.5, dropout_rng_name="mine")
    run = jax.jit(lambda key: module.apply({}, Q, K, V, rngs={"mine": key}))
    one, again, other = run(jax.random.key(0)), run(jax.random.key(0)), run(jax.random.key(1))
    testing.assert_same_bytes(one, again)
    assert testing.relative_error(one, other) > 0.3
    testing.assert_same_bytes(module.apply({}, Q, K, V, deterministic=True), DPA().apply({}, Q, K, V))


MASK_TYPES = ["no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding_causal_bottom_right"]


@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_mask_types_of_queries_and_keys_of_different_lengths(mask_type):
    q_lengths, k_lengths = np.array([12, 5]), np.array([S, 9])
    options = Attention(0.25, causal="causal" in mask_type, bottom_right="bottom_right" in mask_type)
    padded = "padding" in mask_type
    rows = [[(0, q, 0, k)] for q, k in zip(q_lengths, k_lengths)] if padded else None
    sequences = SequenceDescriptor.from_seqlens((q_lengths, k_lengths)) if padded else None
    module = lambda q, k, v: DPA(attn_mask_type=mask_type).apply({}, q, k, v, sequences)
    out, grads = steps.step(module, Q[:, :12], K, V)
    seen = numpy_attention.seen_keys(options, B, 12, S, rows)
    cotangent = steps.weights(0, out.shape)
    expected = numpy_attention.attention(options, seen, *map(np.asarray, (Q[:, :12], K, V)), cotangent)
    testing.assert_close((out, list(grads)), expected, F32)


def test_layouts_of_packed_sequences_are_the_same_attention():
    seen = numpy_attention.seen_keys(Attention(0.25, causal=True), B, S, S, PACKED_ROWS)
    expected, _ = numpy_attention.attention(Attention(0.25), seen, *map(np.asarray, (Q, K, V)), np.zeros(Q.shape))
    dpa = partial(DPA, attn_mask_type="padding_causal", max_segments_per_seq=2)
    inputs = {
        "thd_thd_thd": (Q, K, V),
        "thd_t2hd": (Q, jnp.stack([K, V], axis=2), None),
        "t3hd": (jnp.stack([Q, K, V], axis=2), None, None),
        "bshd_bshd_bshd": (Q, K, V),
    }
    for layout, arrays in inputs.items():
        testing.assert_close(dpa(qkv_layout=layout).apply({}, *arrays, PACKED), expected, F32, layout)
    turned = [jnp.swapaxes(x, 0, 1) for x in inputs["t3hd"] if x is not None]
    out = dpa(qkv_layout="t3hd", transpose_batch_sequence=True).apply({}, *turned, sequence_descriptor=PACKED)
    testing.assert_close(jnp.swapaxes(out, 0, 1), expected, F32)


def test_max_segments_per_seq_is_a_promise_of_segment_ids():
    """Without a GPU that is all it is: a row that breaks it is NaN."""
    ids = jnp.asarray(np.arange(S) // -(-S // 3) + 1 + np.zeros((B, 1), int)).at[0].set(1)
    dpa = lambda most, q: DPA(attn_mask_type="padding_causal", max_segments_per_seq=most).apply(
        {}, q, K, V, SequenceDescriptor.from_segment_ids_and_pos(ids)
    )
    testing.assert_same_bytes(dpa(3, Q), dpa(1, Q))
    assert np.isnan(dpa(2, Q)[1:]).all() and np.isfinite(dpa(2, Q)[0]).all()


def test_a_descriptor_and_the_mask_that_says_the_same():
    """They differ in the padding only, where the descriptor's queries see nothing."""
    by_mask = DPA(attn_mask_type="padding_causal").apply({}, Q, K, V, mask=PADDING)
    by_lengths = DPA(attn_mask_type="padding_causal").apply({}, Q, K, V, PADDED)
    inside = np.arange(S) < LENGTHS[:, None]
    testing.assert_close(by_lengths[inside], by_mask[inside], F32)
    assert not np.asarray(by_lengths[~inside]).any()


@pytest.mark.parametrize("softmax_type", ["off_by_one", "learnable"])
def test_softmax_types(softmax_type):
    module = DPA(softmax_type=softmax_type, attn_mask_type="no_mask", num_gqa_groups=2)
    arrays = [np.asarray(x) for x in (Q, K[:, :, :2], V[:, :, :2, :5])]
    variables = steps.init(module, *arrays, unbox=False)
    if softmax_type == "learnable":
        assert steps.layout(variables) == {"softmax_offset": ((H,), "float32", ("heads",))}
        assert not np.asarray(variables["params"]["softmax_offset"].unbox()).any()
        offset = np.array([1.0, -1.0, 0.0, 3.0], np.float32)
        variables = {"params": {"softmax_offset": offset}}
    else:
        assert not variables
        offset = None
    options = Attention(0.25, softmax_type=softmax_type)
    out, (grads, *others) = steps.step(lambda v, *args: module.apply(v, *args), variables, *arrays)
    seen = numpy_attention.seen_keys(options, B, S, S)
    expected = numpy_attention.attention(options, seen, *arrays, steps.weights(0, out.shape), offset=offset)
    testing.assert_close((out, [*others, *jax.tree.leaves(grads)]), expected, F32)


def test_score_mod():
    slopes = jnp.array([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    alibi = lambda scores, q, k: scores - slopes * (q - k)
    distance = np.arange(S)[:, None] - np.arange(S)
    expected = DPA().apply({}, Q, K, V, bias=-(slopes * distance)[None])
    testing.assert_close(DPA(score_mod=alibi).apply({}, Q, K, V), expected, F32)


@pytest.mark.parametrize(
    "fields, call, message",
    [
        ({"attn_mask_type": "padding"}, {}, "attn_mask_type='padding' needs mask="),
        ({"attn_bias_type": "alibi"}, {}, "attn_bias_type: expected one of"),
        ({"attn_bias_type": "no_bias"}, {"bias": BIAS}, "attn_bias_type='no_bias' but a bias was given"),
        ({"attn_bias_type": "pre_scale_bias"}, {}, "attn_bias_type='pre_scale_bias' needs bias=, or is to be None"),
        ({"context_parallel_axis": "cp"}, {}, "context_parallel_axis: expected an axis of the mesh in force"),
        ({"context_parallel_strategy": "TREE"}, {}, "context_parallel_strategy: expected one of .*got 'TREE'"),
        ({"context_parallel_strategy": "RING"}, {}, "context_parallel_axis: expected the mesh axis that shards"),
        ({"context_parallel_causal_load_balanced": True}, {}, "context_parallel_axis: expected the mesh axis"),
        ({"attn_mask_type": "causal_top"}, {}, "attn_mask_type: expected one of .*got 'causal_top'"),
        ({"qkv_layout": "sbhd_sbhd_sbhd"}, {}, "qkv_layout: expected one of .*got 'sbhd_sbhd_sbhd'"),
        ({"qkv_layout": "thd_thd_thd"}, {}, "qkv_layout='thd_thd_thd', of packed sequences, needs a padding mask"),
        ({"qkv_layout": "bs3hd"}, {}, "qkv_layout='bs3hd' needs query and nothing else, got 3 arrays"),
        ({"softmax_type": "sparse"}, {}, "softmax_type: expected one of .*got 'sparse'"),
        ({"window_size": "ab"}, {}, r"window: expected \(left, right\).*got 'ab'"),
        ({"window_size": "ab"}, {"cache_index": 0}, r"window: expected \(left, right\).*got 'ab'"),
        ({"score_mod": 3}, {"cache_index": 0}, r"score_mod: expected a function of \(scores, .*got 3"),
        ({"score_mod": 3}, {}, r"score_mod: expected a function of \(scores, .*got 3"),
        ({"context_parallel_axis": "cp"}, {"cache_index": 0}, "context_parallel_axis: expected '' with a KV cache"),
        ({"num_gqa_groups": 0}, {}, "num_gqa_groups: expected a positive integer, got 0"),
        ({"max_segments_per_seq": 0}, {}, "max_segments_per_seq: expected a positive integer, got 0"),
        ({}, {"mask": np.ones((9, 9), bool)}, r"mask: expected a shape that broadcasts to .*got \(9, 9\)"),
        ({"window_size": (1, 2, 3)}, {}, r"window: expected \(left, right\).*got \(1, 2, 3\)"),
        (
            {},
            {"sequence_descriptor": Q[0]},
            r"sequence_descriptor: expected a SequenceDescriptor, such as .*, got float32\[",
        ),
        ({}, {"sequence_descriptor": PADDING, "mask": PADDING}, "sequence_descriptor: expected a SequenceDescriptor"),
        ({}, {"sequence_descriptor": PADDED, "mask": PADDING}, "got both mask and sequence_descriptor"),
        ({"num_gqa_groups": 3}, {}, "4 heads do not divide into 3 groups"),
        ({"num_attention_heads": 8}, {}, r"query: expected \[B, S, 8, 16\], got \[2, 16, 4, 16\]"),
        ({"head_dim": 32}, {}, r"query: expected \[B, S, 4, 32\], got \[2, 16, 4, 16\]"),
        ({"num_gqa_groups": 2}, {}, r"key: expected \[B, S, 2, 16\], got \[2, 16, 4, 16\]"),
    ],
)
def test_attention_misuse_is_named(fields, call, message):
    with pytest.raises(ValueError, match=message):
        DotProductAttention(**{"head_dim": D, "num_attention_heads": H, **fields}).apply({}, Q, K, V, **call)


def test_what_need_not_be_given():
    """A bias where there is to be none, and padding in a KV cache, whose tokens may all be there."""
    expected = DPA().apply({}, Q, K, V)
    testing.assert_same_bytes(DPA(attn_bias_type="no_bias").apply({}, Q, K, V), expected)
    with pytest.warns(UserWarning, match="without mask=: all tokens of the KV cache so far are seen"):
        got = DPA(attn_mask_type="padding_causal").apply({}, Q, K, V, cache_index=0)
    testing.assert_close(got, expected, F32)


def test_a_mask_may_come_in_the_place_of_a_descriptor():
    attend = DotProductAttention(D, H, attn_mask_type="padding")
    testing.assert_same_bytes(attend.apply({}, Q, K, V, PADDING), attend.apply({}, Q, K, V, mask=PADDING))


@pytest.mark.parametrize(
    "layout, arrays, message",
    [
        ("bs3hd", (jnp.stack([Q, K], axis=2),), r"query: expected \[B, S, 3, heads, D\] .* got \[2, 16, 2, 4, 16\]"),
        ("bs3hd", (Q,), r"query: expected \[B, S, 3, heads, D\] for qkv_layout='bs3hd', got \[2, 16, 4, 16\]"),
        (
            "bshd_bs2hd",
            (Q, K),
            r"key: expected \[B, S, 2, heads, D\] for .*'bshd_bs2hd', got \[2, 16, 4, 16\]",
        ),
        ("bshd_bs2hd", (Q, K, V), "qkv_layout='bshd_bs2hd' needs query, key and nothing else, got 3 arrays"),
        (
            "bshd_bshd_bshd",
            (Q, K),
            "qkv_layout='bshd_bshd_bshd' needs query, key, value and .*, got 2 arrays",
        ),
        (
            "bshd_bshd_bshd",
            (Q, K[..., :8], V),
            r"DotProductAttention: key: expected \[B, S, 4, 16\], got \[2, 16, 4, 8\]",
        ),
        ("bshd_bshd_bshd", (Q[0], K, V), r"query: expected \[B, S, 4, 16\], got \[16, 4, 16\]"),
    ],
)
def test_arrays_that_do_not_fit_the_layout(layout, arrays, message):
    with pytest.raises(ValueError, match=message):
        DPA(qkv_layout=layout).apply({}, *arrays)


@pytest.mark.parametrize("name, given", [("mask", PADDING), ("sequence_descriptor", PADDED)])
def test_padding_that_would_be_ignored_is_warned_about(name, given):
    with pytest.warns(UserWarning, match=f"{name}= is ignored with attn_mask_type='causal'") as warned:
        out = DPA().apply({}, Q, K, V, **{name: given})
    assert warned[0].filename == __file__, "where the user's code is"
    testing.assert_same_bytes(out, DPA().apply({}, Q, K, V))
