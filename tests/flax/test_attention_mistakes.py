"""Mistakes in MultiHeadAttention are told by name: in its fields, and in what it is called with."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_engine_jax.flax import MultiHeadAttention, SequenceDescriptor

B, S, H, D = 2, 16, 4, 16
HIDDEN = H * D
(BIAS,) = (jnp.asarray(a) for a in emulated.normal(0, (1, H, S, S)))
X, Y = (jnp.asarray(a) for a in emulated.normal(1, (B, S, HIDDEN), (B, S, HIDDEN)))
PADDING = jnp.asarray(np.arange(S)[None, None, None, :] >= np.array([S, 10])[:, None, None, None])  # True: masked out
MHA = partial(MultiHeadAttention, head_dim=D, num_attention_heads=H)


@pytest.mark.parametrize(
    "fields, call, message",
    [
        ({"low_rank_adaptation_scope": "some"}, {}, "low_rank_adaptation_scope: expected one of .*got 'some'"),
        ({"num_gqa_groups": 3}, {}, "4 heads do not divide into 3 groups"),
        ({"num_attention_heads": 0}, {}, "num_attention_heads: expected a positive integer, got 0"),
        ({"num_gqa_groups": 0}, {}, "num_gqa_groups: expected a positive integer, got 0"),
        ({"score_mod": 3}, {}, r"score_mod: expected a function of \(scores, .* got 3"),
        ({"window_size": "ab"}, {}, r"window: expected \(left, right\), .* got 'ab'"),
        ({"layernorm_epsilon": -1}, {}, "epsilon: expected 0 or more, got -1"),
        ({"qk_norm_type": "rmsnorm", "qk_norm_epsilon": -1}, {}, "epsilon: expected 0 or more, got -1"),
        ({"input_layernorm": False, "layernorm_type": "batchnorm"}, {}, "layernorm_type: .* got 'batchnorm'"),
        ({"window_size": 3}, {}, r"window: expected \(left, right\), .* got 3"),
        ({"attention_dropout": 1.0}, {}, r"attention_dropout: expected a rate in \[0, 1\), got 1.0"),
        (
            {"enable_rotary_pos_emb": True, "rotary_pos_emb_windows": (-1, 9)},
            {},
            "windows: expected two positive numbers, got .-1, 9.",
        ),
        (
            {"enable_rotary_pos_emb": True, "rotary_pos_emb_windows": (1, 2, 3)},
            {},
            "windows: expected two positive numbers, got .1, 2, 3.",
        ),
        (
            {"low_rank_adaptation_scope": "all", "low_rank_adaptation_dim": 0},
            {},
            "low_rank_adaptation_dim: expected a positive integer, got 0",
        ),
        ({"attn_mask_type": "padding"}, {}, "attn_mask_type='padding' needs .*mask="),
        (
            {"rotary_pos_emb_group_method": "pairs"},
            {},
            "MultiHeadAttention.rotary_pos_emb_group_method: expected one of",
        ),
        ({"qk_norm_epsilon": -1.0}, {}, "MultiHeadAttention.qk_norm_epsilon: expected 0 or more, got -1.0"),
        ({"num_gqa_groups": 0}, {}, "MultiHeadAttention.num_gqa_groups: expected a positive integer, got 0"),
        (dict(enable_rotary_pos_emb=True, head_dim=15), {}, "head_dim: expected an even size for RoPE.*got 15"),
        ({}, {"rotary_pos_emb": jnp.zeros(9)}, "rope: expected .* D >= 2 x 9, got"),
        ({}, {"rotary_pos_emb": jnp.zeros((S - 1, 8))}, "angles: expected 16 positions or more, got 15"),
        ({}, {"rotary_pos_emb": jnp.zeros((1, S, 8))}, "rotary_pos_emb: expected frequencies .F. or angles"),
        ({}, {"rotary_pos_emb": (jnp.zeros(8),) * 3}, "rotary_pos_emb: expected .* or a pair"),
        ({"qk_norm_type": "batchnorm"}, {}, "qk_norm_type: expected one of .*got 'batchnorm'"),
        (
            {"attn_mask_type": "padding"},
            {"mask": PADDING, "sequence_descriptor": SequenceDescriptor.from_seqlens(jnp.ones(B, int))},
            "got both mask and sequence_descriptor",
        ),
        ({"attn_mask_type": "padding"}, {"mask": PADDING[..., :5]}, "mask: expected a shape that broadcasts to"),
        ({"attn_mask_type": "padding"}, {"mask": PADDING[0]}, "mask: expected a shape that broadcasts to"),
        ({"attn_mask_type": "padding"}, {"sequence_descriptor": SequenceDescriptor()}, "seqlens: expected a pair of"),
        ({}, {"mask": np.ones((9, 9), bool)}, r"mask: expected a shape that broadcasts to .*got \(9, 9\)"),
        ({}, {"bias": BIAS[:, :3]}, "bias: expected a shape that broadcasts to"),
        (
            {"attn_mask_type": "padding", "enable_rotary_pos_emb": True},
            {"sequence_descriptor": SequenceDescriptor.from_seqlens(jnp.ones(B + 1, int))},
            "seqlens of the queries: expected .2., got .3.",
        ),
        ({"attn_mask_type": "padding"}, {"sequence_descriptor": jnp.ones(B, int)}, "expected a SequenceDescriptor"),
    ],
)
def test_misuse_is_named(fields, call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(MHA(**fields).init, **call), jax.random.key(0), X)


@pytest.mark.parametrize("inputs, message", [((X[0],), "inputs_q: expected .B, S, features., got .16, 64."),
                                             ((X, Y[0]), "inputs_kv: expected .B, S, features., got .16, 64."),
                                             ((X, Y[:1]), "must agree in batch")])  # fmt: skip
def test_wrong_inputs_are_named(inputs, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(MHA().init, jax.random.key(0), *inputs)
