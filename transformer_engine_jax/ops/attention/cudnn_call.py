"""JAX's call of cuDNN's attention by its two passes, for what its public function does not do.

That keeps the logarithms of the softmax's sums to itself. Under vmap it takes no bias that examples have of their own
and rows or heads share, and sums the gradient of one that they share over all.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from transformer_engine_jax.differentiable import differentiable


class Told(NamedTuple):
    """What cuDNN is told at trace time."""

    scale: float
    causal: bool = False
    left: int = -1  # keys seen before a query's own place, -1 for all; only where causal
    to_bias: bool = False  # whether the bias has a gradient


class Operands(NamedTuple):
    query: jax.Array  # [B, Q, H, D]
    key: jax.Array  # [B, K, G, D]
    value: jax.Array  # likewise
    q_lengths: jax.Array | None = None  # i32[B], both or none
    k_lengths: jax.Array | None = None


def forward(told: Told, operands: Operands, bias=None) -> tuple[jax.Array, jax.Array]:
    """(output [B, Q, H, D], logarithms of the softmax's sums f32[B, H, Q]); bias: [B or 1, H or 1, Q, K] or None."""
    cudnn, arguments, static = _call(told, operands, bias)
    return tuple(cudnn._dot_product_attention_fwd_p_wrapper.bind(*arguments, **static, is_training=True))


def backward(told: Told, operands: Operands, logs, out, dout, bias=None) -> tuple[jax.Array, ...]:
    """(dquery, dkey, dvalue) where out and logs are those of these keys or of more; and dbias, of the bias's shape."""
    cudnn, arguments, static = _call(told, operands, bias)
    return tuple(cudnn._dot_product_attention_bwd_p_wrapper.bind(*arguments, logs, out, dout, **static))


def _call(told: Told, operands: Operands, bias):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    query, key, value, q_lengths, k_lengths = operands
    absent = jnp.zeros((0,), query.dtype)
    kinds = {
        (False, False): cudnn.MaskType.NO_MASK,
        (True, False): cudnn.MaskType.CAUSAL,
        (False, True): cudnn.MaskType.PADDING,
        (True, True): cudnn.MaskType.PADDING_CAUSAL,
    }
    static = dict(
        scale=told.scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(bias is not None, told.to_bias),
        mask_type=kinds[told.causal, q_lengths is not None],
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None if told.left < 0 else told.left + 1,
    )
    if "score_mod" in inspect.signature(cudnn._dot_product_attention_fwd).parameters:
        static["score_mod"] = None
    optional = (absent if x is None else x for x in (bias, q_lengths, k_lengths))
    return cudnn, (query, key, value, *optional, *[absent] * 4), static


# --- With a bias -----------------------------------------------------------------------------------------------------


def _over_examples(run, to_bias: bool = False):
    """run([arrays of B rows], bias [B or 1, ..]) -> [arrays of B rows, or of the bias's], under vmap as one call.

    Examples become rows. A bias of one row that all share stays so, unless it has a gradient, `to_bias`; one that is
    theirs is repeated for their rows, and its gradient summed over these.
    """
    folded = custom_vmap(run)

    @folded.def_vmap
    def _(size, batched, arrays, bias):
        of_arrays, of_bias = batched
        each = lambda x, own: x if own else jnp.broadcast_to(x[None], (size, *x.shape))
        arrays = jax.tree.map(each, arrays, of_arrays)
        shared = not (of_bias or to_bias) and bias.shape[0] == 1
        bias = each(bias, of_bias or shared)
        rows, of_one = arrays[0].shape[1], not shared and bias.shape[1] == 1
        merged = lambda x: x.reshape(size * rows, *x.shape[2:])
        if not shared:
            bias = merged(jnp.broadcast_to(bias, (size, rows, *bias.shape[2:])))
        out = folded(jax.tree.map(merged, arrays), bias)
        out = [x.reshape(size, rows, *x.shape[1:]) for x in out]
        if len(out) == 4 and of_one and rows > 1:
            out[3] = jnp.sum(out[3], axis=1, keepdims=True, dtype=jnp.float32).astype(out[3].dtype)
        return out, [True] * len(out)

    return folded


def _biased_forward(told: Told, query, key, value, bias, *lengths):
    operands = [query, key, value, *lengths]
    run = _over_examples(lambda arrays, bias: list(forward(told, Operands(*arrays), bias)))
    out, logs = run(operands, bias)
    return out, (operands, bias, logs, out)


def _biased_backward(told: Told, residuals, dout):
    operands, bias, logs, out = residuals
    one = lambda arrays, bias: list(backward(told, Operands(*arrays[3:]), *arrays[:3], bias=bias))
    run = _over_examples(one, told.to_bias)
    *gradients, dbias = [*run([logs, out, dout, *operands], bias), None][:4]
    return *gradients, dbias, None, None


_biased = differentiable(_biased_forward, _biased_backward)


def hides(dtype) -> float:
    """The logit of a key that a query does not see is as low; cuDNN subtracts two such."""
    return 2.0**15 if dtype == jnp.float16 else 2.0**41


def biased_attention(told: Told, operands: Operands, bias=None, mask=None) -> jax.Array:
    """[B, Q, H, D] with a bias, a mask bool, True sees, or both, each [B or 1, H or 1, Q, K]."""
    dtype = operands.query.dtype
    combined = bias if mask is None else jnp.where(mask, 0 if bias is None else bias, -hides(dtype)).astype(dtype)
    return _biased(told._replace(to_bias=bias is not None), *operands[:3], combined, *operands[3:])
