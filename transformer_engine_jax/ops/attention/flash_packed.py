"""Flash attention by cuDNN of rows that hold several sequences each: no work and no memory goes to what nobody sees.

JAX's own call takes statistics of every sequence as long as the row, and repeated heads of keys; and what is between
sequences it leaves as it was, which costs passes over all operands and results to hide.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_engine_jax.decisions import compute_capabilities, deterministic
from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.attention.flash import (
    AttentionBwd,
    AttentionFwd,
    Flash,
    backward_reference,
    examples_at_once,
    forward_reference,
    forward_scratch,
    missing,
    offset_gradient,
    sunk,
)
from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.ops.attention.sequences import Runs, places_of

PACKED_SIZES = 16  # head sizes are multiples of it


def packs() -> bool:
    """Whether the handlers can be used: not on Ada and on desktops' Blackwell, for which cuDNN has no packed rows, nor
    for gradients of the same bits in every run, for which it stores the scores of every sequence as long as the row."""
    able = all(9 <= capability < 12 for capability in compute_capabilities())
    return able and not missing() and not deterministic()


# --- Kernels ---------------------------------------------------------------------------------------------------------


def _offsets(q_start) -> int:
    """Bytes of where sequences begin, in elements: of queries, keys and statistics."""
    return 3 * (-(-8 * (q_start.shape[0] * q_start.shape[1] + 1) // 256) * 256)


def _forward_scratch(q, k, v, q_start, *_, **attributes) -> int:
    return forward_scratch(q) + _offsets(q_start)


def _backward_scratch(stats, q, k, v, o, do, q_start, *_, **attributes) -> int:
    """dq in f32, two numbers a row of it, and dk and dv of every head where several share one."""
    batch, q_len, groups, repeats, size = q.shape
    batch = examples_at_once(batch, *(n * groups * repeats * size for n in (q_len, k.shape[1])))
    rows, shared = batch * q_len * groups * repeats, batch * k.shape[1] * groups * repeats if repeats > 1 else 0
    return forward_scratch(q) + _offsets(q_start) + 4 * (rows * (size + 2) + 2 * shared * size)


def _places(q, k, q_start, q_len, k_start, k_len):
    return places_of(q_start, q_len, q.shape[1])[0], places_of(k_start, k_len, k.shape[1])[0]


@kernel("b s ..., b n, b n -> b s ...", whole="sn", platforms=("cuda",), aliases={"x": "result"})
def attention_blank(x, start, length, *, in_place: bool = True) -> jax.Array:
    """x[B, S, ..] with zeros where no sequence is, of start and length i32[B, N]: whatever lay there, NaN too."""
    within = places_of(start, length, x.shape[1])[0].segment > 0
    return jnp.where(within[..., *[None] * (x.ndim - 2)], x, jnp.zeros((), x.dtype))


@kernel(
    "b q g r d, b k g d, b k g d, b n, b n, b n, b n, b -> b q g r d, b q g r",
    whole="qkdn",
    platforms=("cuda",),
    workspace=_forward_scratch,
    prepared=True,
)
def attention_packed_fwd(
    q, k, v, q_start, q_len, k_start, k_len, kept, *, scale: float, causal: bool = False, left: int = -1
) -> AttentionFwd:
    """attention_fwd without dropout, of rows that hold several sequences: the n-th of queries sees the n-th of keys.

    Args:
      q: [B, Q, G, R, D] bf16 or f16, D a multiple of 16.
      k, v: [B, K, G, D].
      q_start, k_start: i32[B, N] the token each sequence begins at, below 0 where there is none.
      q_len, k_len: i32[B, N] its tokens, 0 where there is none. What lies between sequences must be finite.
      kept: bool[B], False for rows without sequences whose o is to be NaN; None: no such.

    Returns:
      o [B, Q, G, R, D] and stats f32[B, Q, G, R]; zeros where no sequence is.
    """
    places = _places(q, k, q_start, q_len, k_start, k_len)
    out = forward_reference(q, k, v, *places, scale=scale, causal=causal, left=left)
    o = out.o if kept is None else jnp.where(kept[:, None, None, None, None], out.o, jnp.nan)
    return AttentionFwd(o, attention_blank.reference(jnp.moveaxis(out.stats, 3, 1), q_start, q_len))


@kernel(
    "b q g r, b q g r d, b k g d, b k g d, b q g r d, b q g r d, b n, b n, b n, b n -> b q g r d, b k g d, b k g d",
    whole="qkdn",
    reduce={"dk": "sum", "dv": "sum"},
    platforms=("cuda",),
    workspace=_backward_scratch,
    prepared=True,
)
def attention_packed_bwd(
    stats, q, k, v, o, do, q_start, q_len, k_start, k_len, *, scale: float, causal: bool = False, left: int = -1
) -> AttentionBwd:
    """attention_bwd likewise: the gradients of q, k and v from `do`."""
    places = _places(q, k, q_start, q_len, k_start, k_len)
    stats = jnp.moveaxis(stats, 1, 3)
    return backward_reference(stats, q, k, v, o, do, *places, scale=scale, causal=causal, left=left)


# --- The op ----------------------------------------------------------------------------------------------------------


def packed_attention(options: Attention, query, key, value, at: Runs, softmax_offset=None) -> jax.Array:
    """[B, Q, H, D] of query [B, Q, H, D], key and value [B, K, G, D], with a head size that is a multiple of 16.

    Where no sequence is the result is 0, or NaN in rows that `at` does not keep, whatever the operands are.
    softmax_offset: [H] one more logit of each head, or None.
    """
    return _attention(Flash.of(options, query, key), query, key, value, softmax_offset, *at)


def _forward(static: Flash, query, key, value, offset, q_start, q_len, k_start, k_len, kept):
    sequences = q_start, q_len, k_start, k_len
    query = attention_blank(query, q_start, q_len)
    key, value = (attention_blank(x, k_start, k_len) for x in (key, value))
    q, kv = static.by_group(query, key), static.repeated(key, value)
    o, stats = attention_packed_fwd(q, *kv, *sequences, kept, **static.attributes)
    o = o.reshape(query.shape)
    if offset is not None:
        o, total = sunk(o, stats.reshape(query.shape[:3]), offset)
        stats = total.reshape(stats.shape)
    return o, (stats, query, key, value, offset, o, *sequences)


def _backward(static: Flash, residuals, do):
    stats, query, key, value, offset, o, *sequences = residuals
    do = attention_blank(do, *sequences[:2])
    dq, dk, dv = attention_packed_bwd(
        stats, static.by_group(query, key), *static.repeated(key, value), static.by_group(o, key),
        static.by_group(do, key), *sequences, **static.attributes,
    )  # fmt: skip
    doffset = None if offset is None else offset_gradient(offset, stats.reshape(query.shape[:3]), o, do)
    return dq.reshape(query.shape), *static.summed(key, dk, dv), doffset, None, None, None, None, None


_attention = differentiable(_forward, _backward)
