"""Queries whose scores are all far below zero: cuDNN's backward pass must not see keys past the end, of score zero."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import fp8_bound, normal
from hopper import choose_as_on_hopper

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import Attention, cudnn, cudnn_call, cudnn_parts, dot_product_attention
from transformer_engine_jax.recipe import DelayedScaling

B, Q, H, G = 2, 64, 4, 2


def operands(k_len: int, size: int, low: float, dtype):
    """query, key, value and a gradient; scores of every other query are about `low`, those of the others -low."""
    query, key, value, dout, common = normal(0, (B, Q, H, size), *2 * [(B, k_len, G, size)], (B, Q, H, size), (size,))
    common *= np.sqrt(-low) / np.linalg.norm(common)
    sign = np.where(np.arange(Q) % 2, 1, -1)[:, None, None]
    arrays = 0.3 * query + sign * common, 0.3 * key + common, value, dout
    return [jnp.asarray(x, dtype) for x in arrays]


def in_fp8():
    one = te.QuantizerState(jnp.float32(8), jnp.zeros(16))
    state = te.AttentionState.pack(**dict.fromkeys(te.AttentionState.TENSORS, one))
    return te.attention_quantizers(state, DelayedScaling(fp8_dpa=True))


SINKS = dict(softmax_offset=np.full(H, -1e4, np.float32))
HIDDEN = np.arange(192)[None, None, None] >= 150
CASES = {  # size of heads, fields of options, arguments
    "ours": (64, {}, dict),
    "dropout": (64, dict(dropout=1e-7), lambda: dict(dropout_key=jax.random.key(0))),
    "sinks": (64, dict(softmax_type="learnable"), lambda: SINKS),
    "mask": (64, {}, lambda: dict(mask=HIDDEN)),
    "fp8": (64, {}, lambda: dict(quantizers=in_fp8())),
    "jax": (256, {}, dict),
    "parts": (256, dict(softmax_type="learnable"), lambda: SINKS),
}


@pytest.mark.parametrize("dtype, low", [(jnp.bfloat16, -130.0), (jnp.float16, -30.0)], ids=["bf16", "f16"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_finite_and_right(case, dtype, low):
    """On a GPU: of 192 keys cuDNN takes 256, and weights of 64 zeros would be infinite."""
    size, fields, call = CASES[case]
    *qkv, dout = operands(192, size, low, dtype)
    given, options = call(), Attention(1.0, **fields)

    def gradients(options, dtype, given):
        attend = functools.partial(dot_product_attention, options=options, **given)
        out, vjp = jax.vjp(attend, *(x.astype(dtype) for x in qkv))
        return out, *vjp(dout.astype(out.dtype))

    got = jax.jit(gradients, static_argnums=(0, 1))(options, dtype, given)
    if case == "fp8":  # which rounds such scores by several
        with testing.reference_kernels():
            expected = gradients(options, dtype, given)
    else:
        plain = {name: x for name, x in given.items() if name in ("mask", "softmax_offset")}
        expected = gradients(options._replace(dropout=0.0), jnp.float32, plain)
    if case == "fp8":  # what the result is off enters the queries' gradient times all of a key, not what keys differ in
        bound = fp8_bound(*4 * [jnp.float8_e4m3fn]) * np.sqrt(-low) / (0.3 * np.sqrt(size))
    else:
        bound = 5 * float(jnp.finfo(dtype).eps)
    testing.assert_close(got, expected, bound)


@pytest.mark.parametrize("k_len, causal, told", [(64, False, True), (192, False, True), (128, False, False),
                                                 (100, False, False), (64, True, False)])  # fmt: skip
@pytest.mark.parametrize("case", CASES)
def test_where_keys_end_is_told(case, k_len, causal, told, monkeypatch):
    size, fields, call = CASES[case]
    choose_as_on_hopper(monkeypatch)
    monkeypatch.setattr(cudnn, "on_hopper", lambda: True)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    seen = []

    def call_of_cudnn(*arrays, **given):
        seen.append([given.get(f"{name}_seq_lengths") for name in ("query", "key_value")])
        return arrays[-3 if len(arrays) == 3 else 1]

    monkeypatch.setattr(cudnn, "flash_attention", call_of_cudnn)
    monkeypatch.setattr(cudnn, "fp8_attention", call_of_cudnn)
    by_primitives = lambda told, operands, *_: seen.append([operands.q_lengths, operands.k_lengths]) or operands.query
    monkeypatch.setattr(cudnn, "biased_attention", by_primitives)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda query, *_, **given: call_of_cudnn(None, query, **given))
    if case == "parts":
        operands_ = [jnp.zeros((B, n, H, size), jnp.bfloat16) for n in (Q, k_len, k_len)]
        of_parts = cudnn_parts._operands(cudnn_parts.Mask(causal), *operands_)
        _, arguments, static = cudnn_call._call(cudnn_call.Told(1.0, causal), of_parts, None)
        seen.append([None if x.size == 0 else x for x in arguments[4:6]])
        assert ("PADDING" in static["mask_type"].name) == told
    else:
        given = call()
        if "mask" in given:
            given, told = dict(mask=given["mask"][..., -k_len:]), k_len % 128 == 64  # which causality is a part of
        options = Attention(1.0, causal=causal, **fields)
        dot_product_attention(*operands(k_len, size, -1.0, jnp.bfloat16)[:3], options=options, **given)
    ((q_len, k_lengths),) = seen
    assert (q_len is not None) == (k_lengths is not None) == told
    if told:
        np.testing.assert_array_equal(q_len, np.full(B, Q))
        np.testing.assert_array_equal(k_lengths, np.full(B, k_len))


def test_it_is_told_under_vmap():
    query, key, value, _ = (x[None] for x in operands(64, 64, -1.0, jnp.bfloat16))
    forward = functools.partial(cudnn_parts.cudnn_forward, 1.0, cudnn_parts.Mask())
    out, logs = jax.eval_shape(jax.vmap(forward), *(jnp.repeat(x, 3, axis=0) for x in (query, key, value)))
    assert out.shape == (3, B, Q, H, 64) and logs.shape == (3, B, H, Q)


@pytest.mark.parametrize("tokens, causal", [(192, False), (192, True), (256, False)])
def test_such_queries_keys_and_values_leave_their_array(tokens, causal, monkeypatch):
    choose_as_on_hopper(monkeypatch)
    monkeypatch.setattr(cudnn, "on_hopper", lambda: True)
    query = jax.ShapeDtypeStruct((B, tokens, H, 64), jnp.bfloat16)
    assert cudnn.reads_qkv(Attention(1.0, causal=causal), query) == (causal or tokens == 256)
