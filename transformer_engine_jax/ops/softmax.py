"""Softmax over the keys of attention's scores, scaled and masked, with an optional extra logit in the denominator."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.arrays import arrays, as_mask
from transformer_engine_jax.ops.quantize import FLOATS

# --- Kernels -----------------------------------------------------------------------------------------------------


class SoftmaxFwd(NamedTuple):
    y: jax.Array  # [.., H, Q, K] in x's dtype
    rest: jax.Array | None  # f32[.., H, Q] the offset's weight, 1 - sum(y)


class SoftmaxBwd(NamedTuple):
    dx: jax.Array  # [.., H, Q, K] in y's dtype
    dot: jax.Array | None  # f32[.., H, Q] sum(y * dy)


def _whole(attributes) -> str:
    return "q k" if attributes["causal"] else "k"  # a causal kernel counts queries from the first one it sees


@kernel("... h q k, ... q k, ... h -> ... h q k, ... h q", whole=_whole)
def softmax_fwd(x, mask, offset, *, scale_factor=1.0, causal=False, rest=False) -> SoftmaxFwd:
    """exp(scale x) / (sum(exp(scale x)) + exp(offset)) over the keys that mask bool[.., Q, K] and causality leave."""
    values = x.astype(jnp.float32) * jnp.float32(scale_factor)
    if mask is not None:
        values = jnp.where(mask[..., None, :, :], -jnp.inf, values)
    if causal:
        values = jnp.where(jnp.tri(*x.shape[-2:], dtype=bool), values, -jnp.inf)
    top = jnp.max(values, axis=-1, keepdims=True, initial=-jnp.inf)
    offset = jnp.float32(-jnp.inf) if offset is None else offset[..., None, None]
    top = jnp.maximum(top, offset)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    terms, extra = jnp.exp(values - top), jnp.exp(offset - top)
    total = jnp.sum(terms, axis=-1, keepdims=True) + extra
    inverse = jnp.where(total == 0, 0.0, 1.0 / jnp.where(total == 0, 1.0, total))  # whose derivative is none, not NaN
    return SoftmaxFwd((terms * inverse).astype(x.dtype), (extra * inverse)[..., 0] if rest else None)


@kernel("... h q k, ... h q k -> ... h q k, ... h q", whole=_whole)
def softmax_bwd(dy, y, *, scale_factor=1.0, causal=False, dot=False) -> SoftmaxBwd:
    """Gradient of softmax_fwd's x from the cotangent dy and y; what causality hides is not looked at."""
    wide, dy = y.astype(jnp.float32), dy.astype(jnp.float32)
    if causal:
        visible = jnp.tri(*y.shape[-2:], dtype=bool)
        wide, dy = jnp.where(visible, wide, 0.0), jnp.where(visible, dy, 0.0)
    along = jnp.sum(wide * dy, axis=-1)
    dx = jnp.float32(scale_factor) * wide * (dy - along[..., None])
    return SoftmaxBwd(dx.astype(y.dtype), along if dot else None)


# --- The differentiable op ---------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """What softmax needs to know of attention's scores at trace time."""

    scale_factor: float = 1.0
    causal: bool = False


def softmax(logits, *, mask=None, softmax_offset=None, scale_factor: float = 1.0, causal: bool = False) -> jax.Array:
    """Softmax of scale_factor * logits over the last axis, in f32 arithmetic.

    Args:
      logits: [.., H, Q, K] f32, f16 or bf16; or [Q, K].
      mask: bool, int8 or uint8 that broadcasts to the logits' shape; what is True (not 0) is masked out.
      softmax_offset: [H] or [1, H, 1, 1], one more logit for each head, which only adds to the denominator (an
        attention sink): zeros for "softmax off by one".
      scale_factor: multiplies the logits.
      causal: a query sees keys up to its own index only.

    Returns:
      As logits. A query that sees no key gets zeros, and zero gradients.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    (logits,) = arrays("softmax", {"logits": logits})
    if logits.dtype not in FLOATS:
        raise ValueError(f"softmax: logits: expected f32, f16 or bf16, got {logits.dtype}")
    if logits.ndim < 2:
        raise ValueError(f"softmax: logits: expected [.., H, Q, K] or [Q, K], got {list(logits.shape)}")
    scores = Scores(float(scale_factor), bool(causal))
    x = logits if logits.ndim > 2 else logits[None]
    heads = x.shape[:-2]
    mask = None if mask is None else _checked_mask(mask, x.shape)
    offset = None if softmax_offset is None else jnp.broadcast_to(_checked_offset(softmax_offset, x.shape), heads)
    if mask is None or mask.shape[-3] == 1:
        mask = None if mask is None else jnp.broadcast_to(mask[..., 0, :, :], (*heads[:-1], *x.shape[-2:]))
        return _softmax(scores, x, mask, offset).reshape(logits.shape)
    # A mask for each head: every head becomes an example of one head.
    offset = None if offset is None else offset[..., None]
    y = _softmax(scores, x[..., None, :, :], jnp.broadcast_to(mask, x.shape), offset)
    return y[..., 0, :, :].reshape(logits.shape)


def _checked_mask(mask, shape: tuple[int, ...]) -> jax.Array:
    """The mask as bool, of the logits' rank; ValueError where it does not broadcast to them."""
    mask = jnp.asarray(mask)
    padded = (1,) * (len(shape) - mask.ndim) + mask.shape
    if len(padded) != len(shape) or any(m not in (1, n) for m, n in zip(padded, shape)):
        raise ValueError(f"softmax: mask: expected a shape that broadcasts to {list(shape)}, got {list(mask.shape)}")
    return as_mask("softmax", mask).reshape(padded)


def _checked_offset(offset, shape: tuple[int, ...]) -> jax.Array:
    offset, heads = jnp.asarray(offset), shape[-3]
    if offset.shape not in ((heads,), (1, heads, 1, 1)) or not jnp.issubdtype(offset.dtype, jnp.floating):
        expected = f"floats [{heads}] or [1, {heads}, 1, 1], one for each head"
        raise ValueError(f"softmax: softmax_offset: expected {expected}, got {offset.dtype}{list(offset.shape)}")
    return offset.astype(jnp.float32).reshape(heads)


def _softmax_forward(scores: Scores, x, mask, offset):
    out = softmax_fwd(x, mask, offset, **scores._asdict(), rest=offset is not None)
    return out.y, (out.y, out.rest)


def _softmax_backward(scores: Scores, saved, dy):
    y, rest = saved
    out = softmax_bwd(dy, y, **scores._asdict(), dot=rest is not None)
    return out.dx, None, None if rest is None else -jnp.sum(rest * out.dot, axis=-1)


_softmax = differentiable(_softmax_forward, _softmax_backward)
