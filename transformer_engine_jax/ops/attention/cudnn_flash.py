"""cuDNN's flash attention through handlers of our own, with dropout or without.

JAX's cuDNN call knows no seed but a static one; and in CUDA graphs it leaves two memsets a step, each of which a graph
waits 5 to 20 us for.

With dropout, cuDNN draws the mask from the seed, in the backward pass again. The same key gives the same mask wherever
shapes and shardings are the same too, but other ones than `attention_reference` draws. On Hopper, cuDNN 9.19 gives
queries 0, 2, 4 and 6 of each eight the same mask, and 1, 3, 5 and 7 another; heads and examples have their own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.ops.attention.flash import Flash, attention_fwd, offset_gradient, sunk
from transformer_engine_jax.ops.attention.options import Attention


def flash_attention(
    options: Attention,
    query,
    key,
    value,
    dropout_key=None,
    softmax_offset=None,
    *,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
) -> jax.Array:
    """[B, Q, H, D] of query [B, Q, H, D], key and value [B, K, G, D], with a head size that is a multiple of 8.

    dropout_key: of jax.random; None is no dropout. softmax_offset: [H] one more logit of each head, or None; only
    without lengths, but for those of the arrays. Lengths: i32[B] tokens of each sequence, or None.
    """
    static, seed = with_seed(Flash.of(options, query, key), options, dropout_key)
    return _attention(static, query, key, value, softmax_offset, seed, query_seq_lengths, key_value_seq_lengths)


def with_seed(static: Flash, options: Attention, dropout_key) -> tuple[Flash, jax.Array | None]:
    """static with the rate of dropout, and the seed u32[4] of the kernels; as it is, and None, without a key."""
    if dropout_key is None:
        return static, None
    bits = jax.random.bits(dropout_key, (2,), jnp.uint32)
    return static._replace(dropout=float(options.dropout)), jnp.concatenate([bits, jnp.zeros_like(bits)])


def _by_row(stats) -> jax.Array:
    """f32[B, Q, H] of the kernels' f32[B, G, R, Q]."""
    return jnp.moveaxis(stats.reshape(stats.shape[0], -1, stats.shape[3]), 2, 1)


def _forward(static: Flash, query, key, value, offset, seed, q_len, k_len):
    q, kv = static.by_group(query, key), static.repeated(key, value)
    o, stats = attention_fwd(q, *kv, seed, q_len, k_len, dropout=static.dropout, **static.attributes)
    o = o.reshape(query.shape)
    if offset is not None:
        o, total = sunk(o, _by_row(stats), offset)
        stats = jnp.moveaxis(total, 1, 2).reshape(stats.shape)
    return o, (stats, query, key, value, o, offset, seed, q_len, k_len)


def _backward(static: Flash, residuals, do):
    stats, query, key, value, o, offset, *others = residuals
    grads = static.gradients(stats, query, key, value, o, do, *others)
    return *grads, None if offset is None else offset_gradient(offset, _by_row(stats), o, do), None, None, None


_attention = differentiable(_forward, _backward)
