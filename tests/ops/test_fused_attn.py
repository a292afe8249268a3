"""fused_attn: every layout, mask and bias is that of dot_product_attention, with gradients; misuse."""

import emulated
import jax
import jax.numpy as jnp
import pytest
from emulated import F32

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.ops.fused_attn import LAYOUTS, MASK_TYPES

Q, K, V = (jnp.asarray(a) for a in emulated.normal(0, (2, 8, 4, 8), (2, 8, 4, 8), (2, 8, 4, 8)))
BIAS, OFFSET = (jnp.asarray(a) for a in emulated.normal(1, (1, 4, 8, 8), (4,)))
LENGTHS = te.SequenceDescriptor.from_seqlens(jnp.asarray([[3, 4], [8, 0]]))


def packed(layout):
    arrays, out = [Q, K, V], []
    for n in LAYOUTS[layout]:
        out.append(arrays[0] if n == 1 else jnp.stack(arrays[:n], axis=2))
        arrays = arrays[n:]
    return tuple(out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    mask, descriptor = ("padding_causal", LENGTHS) if layout.startswith("t") else ("causal", None)

    def f(*qkv):
        return te.fused_attn(qkv, qkv_layout=layout, attn_mask_type=mask, sequence_descriptor=descriptor)

    def plain(*qkv):
        q, k, v = (x for array in qkv for x in ([array] if array.ndim == 4 else jnp.unstack(array, axis=2)))
        options = te.Attention(scale=8**-0.5, causal=True)
        return te.dot_product_attention(q, k, v, options=options, sequence_descriptor=descriptor)

    key = jax.random.key(0)
    testing.assert_close(testing.gradients(f, packed(layout), key), testing.gradients(plain, packed(layout), key), F32)


@pytest.mark.parametrize("mask", MASK_TYPES)
def test_masks(mask):
    lengths = te.SequenceDescriptor.from_seqlens((jnp.asarray([5, 8]), jnp.asarray([8, 2])))
    descriptor = lengths if "padding" in mask else None
    y = te.fused_attn((Q, K, V), attn_mask_type=mask, sequence_descriptor=descriptor, window_size=(2, 1))
    options = te.Attention(scale=8**-0.5, causal="causal" in mask, bottom_right="bottom_right" in mask, window=(2, 1))
    expected = te.dot_product_attention(Q, K, V, options=options, sequence_descriptor=descriptor)
    testing.assert_same_bytes(y, expected)


@pytest.mark.parametrize("mask", [m for m in MASK_TYPES if "padding" in m])
def test_a_mask_in_the_place_of_the_descriptor(mask):
    """As NVIDIA's takes it."""
    q_lengths, k_lengths = jnp.asarray([5, 8]), jnp.asarray([8, 2])
    hidden = [jnp.arange(8) >= n[:, None] for n in (q_lengths, k_lengths)]
    padding = hidden[0][:, None, :, None] | hidden[1][:, None, None, :]
    y = te.fused_attn((Q, K, V), attn_mask_type=mask, sequence_descriptor=padding)
    lengths = te.SequenceDescriptor.from_seqlens((q_lengths, k_lengths))
    testing.assert_close(y, te.fused_attn((Q, K, V), attn_mask_type=mask, sequence_descriptor=lengths), F32)


@pytest.mark.parametrize("given", [jnp.asarray([3, 4]), (jnp.asarray([3, 4]),) * 2, jnp.zeros((2, 8, 8), bool)])
def test_what_is_no_descriptor_is_named(given):
    with pytest.raises(
        TypeError, match="fused_attn: sequence_descriptor: expected a SequenceDescriptor, .* or, .* a mask"
    ):
        te.fused_attn((Q, K, V), attn_mask_type="padding", sequence_descriptor=given)
    with pytest.raises(TypeError, match="sequence_descriptor: expected a SequenceDescriptor, .*; a mask is mask="):
        te.dot_product_attention(Q, K, V, options=te.Attention(1.0), sequence_descriptor=given)


def test_packed_rows_have_no_mask():
    mask = jnp.zeros((2, 1, 8, 8), bool)
    with pytest.raises(TypeError, match=r"for layouts that are not packed, a mask .*; got .*\[2, 1, 8, 8\]"):
        te.fused_attn((Q, K, V), attn_mask_type="padding", qkv_layout="thd_thd_thd", sequence_descriptor=mask)


def test_options():
    f = lambda **given: te.fused_attn((Q, K, V), attn_mask_type="no_mask", **given)
    scores = jnp.einsum("bqhd,bkhd->bhqk", Q, K, precision="highest")
    mixed = lambda w: jnp.einsum("bhqk,bkhd->bqhd", w, V, precision="highest")
    softmax = lambda s: jax.nn.softmax(s, axis=-1)
    before = f(attn_bias_type="pre_scale_bias", bias=BIAS, scaling_factor=0.5)
    testing.assert_close(before, mixed(softmax(0.5 * (scores + BIAS))), F32)
    after = f(attn_bias_type="post_scale_bias", bias=BIAS, scaling_factor=0.5)
    testing.assert_close(after, mixed(softmax(0.5 * scores + BIAS)), F32)
    sunk = f(softmax_type="learnable", softmax_offset=OFFSET, scaling_factor=0.5)
    total = jnp.exp(0.5 * scores).sum(-1, keepdims=True) + jnp.exp(OFFSET)[:, None, None]
    testing.assert_close(sunk, mixed(jnp.exp(0.5 * scores) / total), F32)
    for offset in (OFFSET.reshape(1, 4, 1, 1), OFFSET.tolist()):
        as_there = f(softmax_type="learnable", softmax_offset=offset, scaling_factor=0.5)
        testing.assert_same_bytes(as_there, sunk)
    drop = lambda seed: f(dropout_probability=0.5, seed=seed)
    one, again, other = drop(jax.random.key(0)), drop(jax.random.key(0)), drop(jax.random.key(1))
    testing.assert_same_bytes(one, again)
    assert testing.relative_error(one, other) > 0.3
    testing.assert_same_bytes(drop(None), f())


@pytest.mark.parametrize(
    "qkv, options, message",
    [
        ((Q, K, V), dict(qkv_layout="sbhd"), "qkv_layout: expected one of"),
        ((Q, K), {}, "needs query, key, value and nothing else, got 2 arrays"),
        ((Q,), dict(qkv_layout="bs3hd"), r"query: expected \[B, S, 3, heads, D\]"),
        ((Q, K, V), dict(attn_mask_type="sliding"), "attn_mask_type: expected one of"),
        ((Q, K, V), dict(attn_mask_type="padding"), "expected a sequence_descriptor with a padding mask"),
        ((Q, K, V), dict(sequence_descriptor=LENGTHS), "expected a sequence_descriptor with a padding mask"),
        ((Q, K, V), dict(qkv_layout="thd_thd_thd"), "which packed layouts need"),
        ((Q, K, V), dict(window_size=3), r"window: expected \(left, right\).*got 3"),
        ((Q, K, V), dict(bias=BIAS), "bias: expected none with attn_bias_type='no_bias'"),
        ((Q, K, V), dict(attn_bias_type="post_scale_bias"), "bias: expected one with"),
    ],
)
def test_misuse(qkv, options, message):
    with pytest.raises(ValueError, match=message):
        te.fused_attn(qkv, **options)


@pytest.mark.parametrize("mask", ["causal_padding", "PADDING_CAUSAL", "PADDING_CAUSAL_MASK"])
def test_names_may_be_spelled_as_nvidias_are(mask):
    options = dict(qkv_layout="THD_THD_THD", sequence_descriptor=LENGTHS, softmax_type="VANILLA_SOFTMAX")
    expected = te.fused_attn(
        (Q, K, V), qkv_layout="thd_thd_thd", attn_mask_type="padding_causal", sequence_descriptor=LENGTHS
    )
    testing.assert_same_bytes(te.fused_attn((Q, K, V), attn_mask_type=mask, **options), expected)


@pytest.mark.parametrize("key", [jax.random.PRNGKey(0), jax.random.key(0)], ids=["raw", "typed"])
@pytest.mark.parametrize("devices", [2, 8])
def test_one_key_for_all_devices(key, devices):
    seed = jax.random.split(key, devices)
    with pytest.raises(ValueError, match=f"seed: expected one key of jax.random, .* by device, got .*{devices}"):
        te.fused_attn((Q, K, V), dropout_probability=0.1, seed=seed)
    te.fused_attn((Q, K, V), dropout_probability=0.1, seed=seed[0])
