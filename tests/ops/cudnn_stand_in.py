"""A stand-in for JAX's call of cuDNN's attention: what it is told, and what it leaves unwritten."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.ops.attention import cudnn_call


@jax.custom_vjp
def unwritten(x, written):
    """x, of whose gradient only a part is written."""
    return x


unwritten.defvjp(
    lambda x, written: (x, written), lambda written, dx: (jnp.where(written[..., None, None], dx, jnp.nan), None)
)


def softmax_attention(query, key, value, bias, seen, written, read, scale):
    """As cuDNN: NaN where a query that it computes sees nothing, and in what it does not write."""
    query, key, value = (unwritten(x, w) for x, w in ((query, written), (key, read), (value, read)))
    seen = seen | ~written[:, None, :, None]  # what is not computed is in no gradient of others
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * scale + (0 if bias is None else bias)
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
    return jnp.where(written[..., None, None], jnp.einsum("bhqk,bkhd->bqhd", weights, value), jnp.nan)


def public_call(
    query, key, value, bias=None, mask=None, *, implementation, scale, is_causal=False, local_window_size=None,
    query_seq_lengths=None, key_value_seq_lengths=None,
):  # fmt: skip
    """jax.nn.dot_product_attention(implementation="cudnn"): masks are large negative biases, its windows look back."""
    assert implementation == "cudnn" and query.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    for x in (bias, mask):
        assert x is None or x.shape[2:] == (query.shape[1], key.shape[1])
    assert query.shape[1] % 2 == key.shape[1] % 2 == 0, "JAX's call has no gradients of odd lengths"
    if mask is not None:
        bias = jnp.where(mask, 0.0, -(2.0**41)) + (0 if bias is None else bias)
    i, j = np.arange(query.shape[1])[:, None], np.arange(key.shape[1])
    seen = np.ones((1, 1, i.size, j.size), bool) & (not is_causal or j <= i)
    if local_window_size is not None:
        assert is_causal and local_window_size[1] == 0
        seen = seen & (j >= i - local_window_size[0])
    written, read = np.ones((len(query), i.size), bool), np.ones((len(key), j.size), bool)
    if query_seq_lengths is not None:
        seen = seen & (j < key_value_seq_lengths[:, None, None, None])
        written, read = i[:, 0] < query_seq_lengths[:, None], j < key_value_seq_lengths[:, None]
    return softmax_attention(query, key, value, bias, seen, written, read, scale)


def forward(told, operands, bias=None):
    """cudnn_call.forward, by the same."""
    return _told(told, operands, bias), jnp.zeros((len(operands.query), 1, 1))


def backward(told, operands, logs, out, dout, bias=None):
    """cudnn_call.backward, likewise."""
    *qkv, q_lengths, k_lengths = operands
    call = lambda query, key, value, bias: _told(told, type(operands)(query, key, value, q_lengths, k_lengths), bias)
    gradients = jax.vjp(call, *qkv, bias)[1](dout)
    return gradients if told.to_bias else gradients[:3]


def _told(told, operands, bias):
    lengths = dict(zip(("query_seq_lengths", "key_value_seq_lengths"), operands[3:]))
    window = None if told.left < 0 else (told.left, 0)
    options = dict(scale=told.scale, is_causal=told.causal, local_window_size=window, **lengths)
    return public_call(*operands[:3], bias, implementation="cudnn", **options)


def replace_cudnn(monkeypatch) -> None:
    """By these, as JAX calls it."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", public_call)
    monkeypatch.setattr(cudnn_call, "forward", forward)
    monkeypatch.setattr(cudnn_call, "backward", backward)
