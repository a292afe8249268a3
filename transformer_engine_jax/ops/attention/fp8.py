"""Attention whose forward pass is in FP8: query, key, value and weights in E4M3; its backward in their own dtype.

Hopper writes the output in E4M3 too, and it is kept so for the backward pass. It is a mean of values, so it has their
scale; and weights lie in [0, 1], so theirs is a constant: neither needs an amax of earlier steps. The backward pass is
that of the rounded query, key and value, with the output and the statistics of the FP8 forward. Of the original ones
weights would be off by the exponential of what rounding does to a logit: at logits of 40, a hundredfold.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.ops.attention.flash import Flash, attention_fp8_fwd
from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.ops.quantize import dequantize, observe, quantize_for
from transformer_engine_jax.order import computed_once
from transformer_engine_jax.quantizers import Quantizer

# Below E4M3's largest, 448, and a power of two: multiplying by it is exact.
WEIGHT_SCALE = 256.0


def fp8_attention(
    options: Attention,
    query,
    key,
    value,
    quantizers: Sequence[Quantizer],
    *,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
) -> jax.Array:
    """[B, Q, H, D] of query [B, Q, H, D], key and value [B, K, G, D], with a head size that is a multiple of 16.

    quantizers: those of query, key and value, in E4M3. Lengths: i32[B] tokens of each sequence, or None.
    """
    static = Flash.of(options, query, key)
    return _attention(static, query, key, value, tuple(quantizers), query_seq_lengths, key_value_seq_lengths)


def _forward(static: Flash, query, key, value, quantizers: tuple[Quantizer, ...], q_len, k_len):
    tensors = query, *static.repeated(key, value)  # before the cast, whose kernel is not to be sharded by parts either
    casts = [quantize_for(quantizer, x) for quantizer, x in zip(quantizers, tensors)]
    rounded = computed_once([cast.q for cast in casts], of="quantized")
    (q, k, v), scales = [x.data for x in rounded], [x.scale_inv for x in rounded]
    v_descale = scales[2]
    o, stats = attention_fp8_fwd(
        static.by_group(q, key), k, v, *scales,
        WEIGHT_SCALE, 1 / WEIGHT_SCALE, 1.0 / v_descale, q_len, k_len, **static.attributes,
    )  # fmt: skip
    o, amaxes = computed_once(o.reshape(query.shape), of="quantized"), [cast.amax for cast in casts]
    saved = stats, rounded, o, quantizers, amaxes, q_len, k_len
    return dequantize(o, v_descale, dtype=query.dtype), saved


def _backward(static: Flash, residuals, do):
    stats, casts, o, quantizers, amaxes, q_len, k_len = residuals
    rounded = [dequantize(x.data, x.scale_inv, dtype=do.dtype) for x in casts]
    o = dequantize(o, casts[2].scale_inv, dtype=do.dtype)
    dq, dk, dv = static._replace(repeats=1).gradients(stats, *rounded, o, do, None, q_len, k_len)
    batch, length, heads, _ = dk.shape
    given = jax.ShapeDtypeStruct((batch, length, heads // static.repeats), dk.dtype)
    return dq, *static.summed(given, dk, dv), tuple(observe(quantizers, amaxes)), None, None


_attention = differentiable(_forward, _backward)
