"""dot_product_attention: one reference in plain JAX that defines it, and cuDNN's flash attention where it can."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Attention(NamedTuple):
    """What attention needs to know at trace time.

    scale: multiplies q k^T. causal: a query sees keys up to its own position. window: (left, right) how many keys
    before and after its own position it sees, -1 for all. bias_before_scale: the bias is scaled too.
    """

    scale: float
    causal: bool = False
    window: tuple[int, int] | None = None
    bias_before_scale: bool = False
    dropout: float = 0.0


def _visible(static: Attention, q_len: int, k_len: int) -> jax.Array | None:
    """bool[q, k] from causality and window; None where all is visible."""
    left, right = static.window or (-1, -1)
    if static.causal:
        right = 0 if right < 0 else min(right, 0)
    if left < 0 and right < 0:
        return None
    offset = jnp.arange(k_len)[None, :] - jnp.arange(q_len)[:, None]
    visible = jnp.ones((q_len, k_len), bool)
    if left >= 0:
        visible &= offset >= -left
    return visible & (offset <= right) if right >= 0 else visible


def attention_reference(static: Attention, query, key, value, *, mask=None, bias=None, dropout_key=None) -> jax.Array:
    """Attention in plain JAX: logits and softmax in f32; a query that sees no key gets zeros."""
    batch, q_len, heads, dim = query.shape
    k_len, groups = key.shape[1], key.shape[2]
    grouped = query.reshape(batch, q_len, groups, heads // groups, dim)
    logits = jnp.einsum("bqgrd,bkgd->bgrqk", grouped, key, preferred_element_type=jnp.float32)
    if bias is not None:
        bias = jnp.broadcast_to(bias, (*jnp.shape(bias)[:-2], q_len, k_len)).astype(jnp.float32)
        bias = jnp.broadcast_to(bias, (bias.shape[0], heads, q_len, k_len)).reshape(-1, groups, heads // groups, q_len, k_len)  # fmt: skip
    if static.bias_before_scale and bias is not None:
        logits = (logits + bias) * static.scale
    else:
        logits = logits * static.scale + (0.0 if bias is None else bias)
    visible = _visible(static, q_len, k_len)
    if mask is not None:
        seen = jnp.logical_not(jnp.broadcast_to(mask, (mask.shape[0], heads if mask.shape[1] > 1 else 1, q_len, k_len)))
        seen = seen.reshape(seen.shape[0], *((groups, heads // groups) if seen.shape[1] > 1 else (1, 1)), q_len, k_len)
        visible = seen if visible is None else visible & seen
    if visible is not None:
        logits = jnp.where(visible, logits, jnp.finfo(jnp.float32).min)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - top)
    if visible is not None:
        weights = jnp.where(visible, weights, 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    if static.dropout > 0 and dropout_key is not None:
        kept = jax.random.bernoulli(dropout_key, 1.0 - static.dropout, weights.shape)
        weights = jnp.where(kept, weights / (1.0 - static.dropout), 0.0)
    out = jnp.einsum("bgrqk,bkgd->bqgrd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return out.reshape(batch, q_len, heads, value.shape[-1]).astype(query.dtype)


def attention_backend(static: Attention, query, key, value, *, mask, bias, dropout_key) -> tuple[str, str]:
    """("cudnn" or "reference", why): a function of platform, shapes, dtypes and options."""
    dim = query.shape[-1]
    if jax.default_backend() != "gpu":
        return "reference", "cuDNN needs an NVIDIA GPU"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return "reference", f"cuDNN needs bf16 or f16, not {query.dtype}"
    if dim % 8 or dim > 128 or value.shape[-1] != dim:
        return "reference", f"cuDNN needs one head size, a multiple of 8 up to 128, not {dim} and {value.shape[-1]}"
    if static.dropout > 0 and dropout_key is not None:
        return "reference", "JAX's cuDNN call has no dropout key"
    if bias is not None and static.bias_before_scale:
        return "reference", "cuDNN adds the bias after the scale"
    if static.window is not None and not (static.causal and static.window[0] >= 0 and static.window[1] in (0, -1)):
        return "reference", "cuDNN's window looks back only, under a causal mask"
    return "cudnn", "fits"


def dot_product_attention(
    query, key, value, *, options: Attention, mask=None, bias=None, dropout_key=None
) -> jax.Array:
    """softmax(query key^T * scale + bias) value, by head.

    Args:
      query: [B, Q, H, D] f32, f16 or bf16.
      key, value: [B, K, G, D] with G groups dividing H (GQA, MQA).
      options: scale, causality, window, dropout rate.
      mask: bool, broadcastable to [B, H, Q, K]; True is masked out.
      bias: broadcastable to [B, H, Q, K], added to the scaled logits.
      dropout_key: of jax.random; None is no dropout.

    Returns:
      [B, Q, H, D] in query's dtype; zeros for a query that sees no key.

    Raises:
      ValueError: the shapes do not fit.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"dot_product_attention: {name}: expected [B, S, heads, D], got {list(x.shape)}")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"dot_product_attention: query{list(query.shape)}, key{list(key.shape)} and value{list(value.shape)} "
            "must agree in batch, key length, groups, and the head size of query and key"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"dot_product_attention: {query.shape[2]} heads do not divide into {key.shape[2]} groups")
    full = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None and (x.ndim != 4 or any(n not in (1, m) for n, m in zip(x.shape, full))):
            raise ValueError(f"dot_product_attention: {name}: expected a shape that broadcasts to {full}, got {x.shape}")
    if mask is not None and mask.dtype != jnp.bool_:
        mask = mask != 0
    backend, _ = attention_backend(options, query, key, value, mask=mask, bias=bias, dropout_key=dropout_key)
    if backend == "reference":
        return attention_reference(options, query, key, value, mask=mask, bias=bias, dropout_key=dropout_key)
    return jax.nn.dot_product_attention(
        query, key, value,
        bias=None if bias is None else bias.astype(query.dtype),
        mask=None if mask is None else jnp.logical_not(mask),
        scale=options.scale, is_causal=options.causal,
        local_window_size=None if options.window is None else (options.window[0], 0),
        implementation="cudnn",
    )  # fmt: skip
