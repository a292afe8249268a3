"""Flash attention by cuDNN over a KV cache: of no more of it than is there, and without the statistics of a backward.

Without these cuDNN may split one query's keys over the multiprocessors. JAX's own call knows no queries that end with
their keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.attention.flash import Flash, forward_reference, forward_scratch
from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.ops.attention.sequences import Places


def _from_the_end(size: int, length) -> Places:
    position = jnp.arange(size, dtype=jnp.int32)[None] - length[:, None]
    return Places(position, (position < 0).astype(jnp.int32))


@kernel(
    "b q g r d, b k g d, b k g d, b, b -> b q g r d",
    whole="qkd",
    platforms=("cuda",),
    workspace=forward_scratch,
    prepared=True,
)
def attention_cached(q, k, v, q_len, k_len, *, scale: float, causal: bool = False, left: int = -1) -> jax.Array:
    """softmax(q k^T * scale) v of queries that are the last tokens of their keys.

    Args:
      q: [B, Q, G, R, D] bf16 or f16: R query heads share each of G heads of keys and values.
      k, v: [B, K, G, D] finite; D a multiple of 8.
      q_len, k_len: i32[B] tokens of each sequence, 1 <= q_len <= k_len; on CUDA nothing is written past them.
      left: how many keys before its own place a query sees, -1 for all; only where causal.
    """
    places = _from_the_end(q.shape[1], q_len), _from_the_end(k.shape[1], k_len)
    return forward_reference(q, k, v, *places, scale=scale, causal=causal, left=left).o


def cached_attention(options: Attention, query, key, value, q_len, k_len) -> jax.Array:
    """[B, Q, H, D] of query [B, Q, H, D], key and value [B, K, G, D], with a head size that is a multiple of 8.

    q_len, k_len: i32[B] as of the kernel; what the result has past them is anything.
    """
    return _attention(Flash.of(options, query, key), query, key, value, q_len, k_len)


def _attend(static: Flash, attend, query, key, value, q_len, k_len) -> jax.Array:
    # The one query of a row sees whatever is there.
    alone = dict(causal=False) if query.shape[1] == 1 and static.left < 0 else {}
    q, kv = static.by_group(query, key), static.repeated(key, value)
    return attend(q, *kv, q_len, k_len, **(static.attributes | alone)).reshape(query.shape)


def _forward(static: Flash, *args):
    return _attend(static, attention_cached, *args), args


def _backward(static: Flash, args, do):
    """That of the reference: who generates asks for no gradients."""
    *qkv, q_len, k_len = args
    return (
        *jax.vjp(lambda *qkv: _attend(static, attention_cached.reference, *qkv, q_len, k_len), *qkv)[1](do),
        None,
        None,
    )


_attention = differentiable(_forward, _backward)
