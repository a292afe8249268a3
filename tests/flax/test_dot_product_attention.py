"""DotProductAttention against a plain form of it."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from emulated import F32
from plain import plain_attention

from transformer_engine_jax import testing
from transformer_engine_jax.flax import (
    DotProductAttention,
)

B, S, H, D = 2, 16, 4, 16
HIDDEN = H * D
Q, K, V, BIAS = (jnp.asarray(a) for a in emulated.normal(0, (B, S, H, D), (B, S, H, D), (B, S, H, D), (1, H, S, S)))
X, Y = (jnp.asarray(a) for a in emulated.normal(1, (B, S, HIDDEN), (B, S, HIDDEN)))
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
    module = lambda q, k, v: DPA(**fields).apply({}, q, k, v, **call)  # noqa: E731
    testing.assert_close(steps.step(module, *args), steps.step(partial(plain_attention, **expected), *args), F32)


def test_layouts_and_transposed_inputs_are_the_same_attention():
    expected = DPA().apply({}, Q, K, V)
    packed = DPA(qkv_layout="bs3hd").apply({}, jnp.stack([Q, K, V], axis=2))
    kv_packed = DPA(qkv_layout="bshd_bs2hd").apply({}, Q, jnp.stack([K, V], axis=2))
    turned = DPA(transpose_batch_sequence=True).apply({}, *(jnp.swapaxes(x, 0, 1) for x in (Q, K, V)))
    for got in (packed, kv_packed, jnp.swapaxes(turned, 0, 1)):
        testing.assert_close(got, expected, F32)


def test_attention_dropout_is_seeded_and_off_when_deterministic():
    module = DPA(attention_dropout=0.5, dropout_rng_name="mine")
    run = jax.jit(lambda key: module.apply({}, Q, K, V, rngs={"mine": key}))
    one, again, other = run(jax.random.key(0)), run(jax.random.key(0)), run(jax.random.key(1))
    testing.assert_same_bytes(one, again)
    assert testing.relative_error(one, other) > 0.3
    testing.assert_same_bytes(module.apply({}, Q, K, V, deterministic=True), DPA().apply({}, Q, K, V))


@pytest.mark.parametrize(
    "fields, call, message",
    [
        ({"attn_mask_type": "causal_bottom_right"}, {}, "attn_mask_type: expected one of"),
        ({"attn_mask_type": "padding"}, {}, "attn_mask_type='padding' needs mask="),
        ({"attn_bias_type": "alibi"}, {}, "attn_bias_type: expected one of"),
        ({"attn_bias_type": "no_bias"}, {"bias": BIAS}, "attn_bias_type='no_bias' but a bias was given"),
        ({"qkv_layout": "thd_thd_thd"}, {}, "qkv_layout: expected one of .*packed sequences are not available yet"),
        ({"softmax_type": "learnable"}, {}, "softmax_type: expected one of .*not available yet"),
        ({"context_parallel_axis": "cp"}, {}, "context_parallel_axis: expected one of .*not available yet"),
        ({"context_parallel_strategy": "RING"}, {}, "context_parallel_strategy: expected one of .*not available yet"),
        (
            {"context_parallel_causal_load_balanced": True},
            {},
            "context_parallel_causal_load_balanced: expected one of .*not available yet",
        ),
        ({"score_mod": lambda s: s}, {}, "score_mod .*not available yet"),
        ({"max_segments_per_seq": 2}, {}, "max_segments_per_seq .*not available yet"),
        ({}, {"sequence_descriptor": Q}, "sequence_descriptor.*not available yet"),
        ({"num_gqa_groups": 3}, {}, "4 heads do not divide into 3 groups"),
        ({"num_attention_heads": 8}, {}, r"query: expected \[B, S, 8, 16\], got \[2, 16, 4, 16\]"),
        ({"head_dim": 32}, {}, r"query: expected \[B, S, 4, 32\], got \[2, 16, 4, 16\]"),
        ({"num_gqa_groups": 2}, {}, r"key: expected \[B, S, 2, 16\], got \[2, 16, 4, 16\]"),
    ],
)
def test_attention_misuse_is_named(fields, call, message):
    with pytest.raises(ValueError, match=message):
        DotProductAttention(**{"head_dim": D, "num_attention_heads": H, **fields}).apply({}, Q, K, V, **call)


def test_a_mask_that_would_be_ignored_is_warned_about():
    with pytest.warns(UserWarning, match="mask= is ignored with attn_mask_type='causal'"):
        DPA().apply({}, Q, K, V, mask=PADDING)
