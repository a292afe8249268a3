"""cuDNN's flash attention with dropout, through handlers of our own: JAX's cuDNN call knows no seed but a static one.

cuDNN draws the mask from the seed, in the backward pass again. The same key gives the same mask wherever shapes and
shardings are the same too, but other ones than `attention_reference` draws. On Hopper, cuDNN 9.19 gives queries 0, 2, 4
and 6 of each eight the same mask, and 1, 3, 5 and 7 another; heads and examples have masks of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_engine_jax.handlers import HANDLERS
from transformer_engine_jax.kernel import differentiable, kernel
from transformer_engine_jax.ops.attention.options import Attention

MOST_HEAD_SIZE = 128


def missing() -> str:
    """Why the handlers are not here; "" where they are."""
    if "CUDA" not in HANDLERS:
        return "the extension was built without its CUDA module"
    if "te_attention_fwd" not in HANDLERS["CUDA"]:
        return (
            "the extension was built without cuDNN's headers: `pip install --no-deps nvidia-cudnn-cu13 "
            "nvidia-cudnn-frontend nvidia-cuda-nvrtc` into the Python that builds, and build again"
        )
    return ""


class AttentionFwd(NamedTuple):
    o: jax.Array  # [B, Q, G, R, D] in q's dtype
    stats: jax.Array  # f32[B, G, R, Q] the logarithm of each softmax's sum


class AttentionBwd(NamedTuple):
    dq: jax.Array  # [B, Q, G, R, D]
    dk: jax.Array  # [B, K, G, D]
    dv: jax.Array  # [B, K, G, D]


# --- Kernels ---------------------------------------------------------------------------------------------------------

_CUDNN_SCRATCH = 32 << 20


def _forward_scratch(q, *_, **attributes) -> int:
    return _CUDNN_SCRATCH


def _backward_scratch(stats, q, k, *_, **attributes) -> int:
    """dq in f32, two numbers a row of it, and dk and dv of every head where several share one. Sequences in tiles."""
    batch, q_len, groups, repeats, size = q.shape
    q_len, k_len = (-(-n // 128) * 128 for n in (q_len, k.shape[1]))
    heads = batch * groups * repeats
    shared = 2 * k_len * size if repeats > 1 else 0
    return _CUDNN_SCRATCH + 4 * heads * (q_len * (size + 2) + shared)


@kernel(
    "b q g r d, b k g d, b k g d, s, b, b -> b q g r d, b g r q",
    whole="qkds",
    by_shard={"seed": "stats"},
    platforms=("cuda",),
    workspace=_forward_scratch,
)
def attention_fwd(
    q, k, v, seed, q_len, k_len, *, scale: float, dropout: float, causal: bool = False, left: int = -1
) -> AttentionFwd:
    """softmax(q k^T * scale) v with weights dropped at a rate of `dropout`, the others divided by 1 - dropout.

    Args:
      q: [B, Q, G, R, D] bf16 or f16: R query heads share each of G heads of keys and values.
      k, v: [B, K, G, D]; D a multiple of 8.
      seed: u32[4] of Philox: a seed and an offset, each of 64 bits, low word first.
      q_len, k_len: i32[B] tokens of each sequence, or None; on CUDA nothing is written past them.
      left: how many keys before its own place a query sees, -1 for all; only where causal.
    """
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", q, k, preferred_element_type=jnp.float32) * scale
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    seen = (j <= i) & ((j >= i - left) | (left < 0)) if causal else jnp.ones((), bool)
    for place, length in ((i, q_len), (j, k_len)):
        seen = seen if length is None else seen & (place < length[:, None, None, None, None])
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    stats = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(seen, jnp.exp(scores - stats[..., None]), 0.0)
    key = jax.random.wrap_key_data(seed[:2], impl="threefry2x32")
    kept = jax.random.bernoulli(key, 1.0 - dropout, weights.shape)
    weights = jnp.where(kept, weights / (1.0 - dropout), 0.0).astype(v.dtype)
    o = jnp.einsum("bgrqk,bkgd->bqgrd", weights, v, preferred_element_type=jnp.float32)
    return AttentionFwd(o.astype(q.dtype), stats)


@kernel(
    "b g r q, b q g r d, b k g d, b k g d, b q g r d, b q g r d, s, b, b -> b q g r d, b k g d, b k g d",
    whole="qkds",
    reduce={"dk": "sum", "dv": "sum"},
    by_shard={"seed": "stats"},
    platforms=("cuda",),
    workspace=_backward_scratch,
)
def attention_bwd(
    stats, q, k, v, o, do, seed, q_len, k_len, *, scale: float, dropout: float, causal: bool = False, left: int = -1
) -> AttentionBwd:
    """Gradients of attention_fwd's o, from its operands, its results and `do`, under the mask of the same seed."""
    attributes = dict(scale=scale, dropout=dropout, causal=causal, left=left)
    _, vjp = jax.vjp(lambda *qkv: attention_fwd.reference(*qkv, seed, q_len, k_len, **attributes).o, q, k, v)
    return AttentionBwd(*vjp(do))


# --- The op ----------------------------------------------------------------------------------------------------------


class Options(NamedTuple):
    """What the op needs to know at trace time; all but `repeats` are the kernels' attributes."""

    scale: float
    dropout: float
    causal: bool
    left: int
    repeats: int  # how often each head of keys and values is given to cuDNN

    @property
    def attributes(self) -> dict:
        return dict(scale=self.scale, dropout=self.dropout, causal=self.causal, left=self.left)


def attention_with_dropout(
    options: Attention, query, key, value, dropout_key, *, query_seq_lengths=None, key_value_seq_lengths=None
) -> jax.Array:
    """[B, Q, H, D] of query [B, Q, H, D], key and value [B, K, G, D], with a head size that is a multiple of 8."""
    batch, q_len, heads, size = query.shape
    groups = key.shape[2]
    # Over several devices heads may be sharded, also over more of them than there are groups. Split into groups, such
    # an axis would be sharded by parts of a mesh axis, which JAX's custom partitioning has no words for.
    repeats = 1 if jax.device_count() == 1 else heads // groups
    static = Options(float(options.scale), float(options.dropout), bool(options.causal), int(options.reach[0]), repeats)
    bits = jax.random.bits(dropout_key, (2,), jnp.uint32)
    seed = jnp.concatenate([bits, jnp.zeros_like(bits)])
    query = query.reshape(batch, q_len, groups * repeats, heads // groups // repeats, size)
    out = _attention(static, query, key, value, seed, query_seq_lengths, key_value_seq_lengths)
    return out.reshape(batch, q_len, heads, size)


def _forward(static: Options, q, k, v, seed, q_len, k_len):
    o, stats = attention_fwd(q, *_repeated(static, k, v), seed, q_len, k_len, **static.attributes)
    return o, (stats, q, k, v, o, seed, q_len, k_len)


def _backward(static: Options, residuals, do):
    stats, q, k, v, o, seed, q_len, k_len = residuals
    kv = _repeated(static, k, v)
    dq, *dkv = attention_bwd(stats, q, *kv, o, do, seed, q_len, k_len, **static.attributes)
    if static.repeats > 1:
        dkv = [x.reshape(*k.shape[:3], static.repeats, -1).sum(3, dtype=jnp.float32).astype(k.dtype) for x in dkv]
    return dq, *dkv, None, None, None


def _repeated(static: Options, *kv) -> list[jax.Array]:
    return [jnp.repeat(x, static.repeats, axis=2) if static.repeats > 1 else x for x in kv]


_attention = differentiable(_forward, _backward)
