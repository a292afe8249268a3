"""Flash attention by cuDNN of queries, keys and values that lie in one array, as one product gives them.

They are read where they are, and so are their gradients written: nothing is copied apart, nor together again.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.attention.cudnn_flash import with_seed
from transformer_engine_jax.ops.attention.flash import (
    AttentionFwd,
    Flash,
    attention_bwd,
    attention_fwd,
    backward_scratch,
    examples_at_once,
    forward_scratch,
)
from transformer_engine_jax.ops.attention.options import Attention

# --- Kernels ---------------------------------------------------------------------------------------------------------


def parts(qkv) -> list[jax.Array]:
    """Queries, keys and values, [B, S, H, D] each, of qkv [B, S, 3, H, D]."""
    return [qkv[:, :, i] for i in range(3)]


def _backward_scratch(stats, qkv, *_, **attributes) -> int:
    _, tokens, _, heads, size = qkv.shape
    batch = examples_at_once(qkv.shape[0], math.prod(qkv.shape[1:]))
    q = jax.ShapeDtypeStruct((batch, tokens, heads, 1, size), qkv.dtype)
    return backward_scratch(stats, q, jax.ShapeDtypeStruct((batch, tokens, heads, size), qkv.dtype))


@kernel(
    "b s p h d, n -> b s h d, b h s",
    whole="spdn",
    by_shard={"seed": "stats"},
    platforms=("cuda",),
    workspace=forward_scratch,
    prepared=True,
)
def attention_qkv_fwd(qkv, seed, *, scale: float, dropout: float, causal: bool = False, left: int = -1) -> AttentionFwd:
    """attention_fwd of qkv [B, S, 3, H, D] bf16 or f16, D a multiple of 8: o [B, S, H, D], stats f32[B, H, S]."""
    query, key, value = parts(qkv)
    options = dict(scale=scale, dropout=dropout, causal=causal, left=left)
    o, stats = attention_fwd.reference(query[:, :, :, None], key, value, seed, None, None, **options)
    return AttentionFwd(o[:, :, :, 0], stats[:, :, 0])


@kernel(
    "b h s, b s p h d, b s h d, b s h d, n -> b s p h d",
    whole="spdn",
    by_shard={"seed": "stats"},
    platforms=("cuda",),
    workspace=_backward_scratch,
    prepared=True,
)
def attention_qkv_bwd(
    stats, qkv, o, do, seed, *, scale: float, dropout: float, causal: bool = False, left: int = -1
) -> jax.Array:
    """attention_bwd: the gradient of qkv [B, S, 3, H, D], from that of o."""
    query, key, value = parts(qkv)
    options = dict(scale=scale, dropout=dropout, causal=causal, left=left)
    query, o, do = (x[:, :, :, None] for x in (query, o, do))
    dq, dk, dv = attention_bwd.reference(stats[:, :, None], query, key, value, o, do, seed, None, None, **options)
    return jnp.stack([dq[:, :, :, 0], dk, dv], axis=2)


# --- The op ----------------------------------------------------------------------------------------------------------


def qkv_attention(options: Attention, qkv, dropout_key=None) -> jax.Array:
    """[B, S, H, D] of qkv [B, S, 3, H, D]; all else as of flash_attention."""
    static, seed = with_seed(Flash.of(options, *parts(qkv)[:2]), options, dropout_key)
    return _attention(static, qkv, seed)


def _forward(static: Flash, qkv, seed):
    o, stats = attention_qkv_fwd(qkv, seed, dropout=static.dropout, **static.attributes)
    return o, (stats, qkv, o, seed)


def _backward(static: Flash, residuals, do):
    *saved, seed = residuals
    return attention_qkv_bwd(*saved, do, seed, dropout=static.dropout, **static.attributes), None


_attention = differentiable(_forward, _backward)
