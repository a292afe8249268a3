"""fused_attn: `dot_product_attention` by the names of NVIDIA's extension, for queries, keys and values in one array."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.ops.attention import Attention, SequenceDescriptor, dot_product_attention
from transformer_engine_jax.ops.attention.layouts import BIAS_TYPES, LAYOUTS, MASK_TYPES, is_packed, respelled, unpack
from transformer_engine_jax.ops.attention.options import SOFTMAX_TYPES, as_window
from transformer_engine_jax.quantizers import AttentionQuantizers


def fused_attn(
    qkv: Sequence[jax.Array],
    *,
    qkv_layout: str = "bshd_bshd_bshd",
    attn_mask_type: str = "causal",
    attn_bias_type: str = "no_bias",
    bias=None,
    sequence_descriptor: SequenceDescriptor | jax.Array | None = None,
    scaling_factor: float | None = None,
    softmax_type: str = "vanilla",
    softmax_offset=None,
    dropout_probability: float = 0.0,
    seed=None,
    window_size: tuple[int, int] | None = None,
    quantizers: AttentionQuantizers | None = None,
) -> jax.Array:
    """softmax(query key^T * scaling_factor + bias) value, by head.

    Args:
      qkv: the arrays of the layout, f32, f16 or bf16: [B, S, heads, D] for each "bshd", [B, S, 2, groups, D] of key and
        value for "bs2hd", [B, S, 3, heads, D] for "bs3hd"; the same with t for bs, rows [B, S, ..] that hold several
        sequences.
      qkv_layout: "bshd_bshd_bshd", "bshd_bs2hd", "bs3hd", "thd_thd_thd", "thd_t2hd" or "t3hd".
      attn_mask_type: "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right" or
        "padding_causal_bottom_right"; those with "padding" need a sequence_descriptor, and no other takes one.
      attn_bias_type: "no_bias", "pre_scale_bias" or "post_scale_bias". bias: four axes that broadcast to [B, H, Q, K],
        added before or after the scale.
      sequence_descriptor: which tokens belong to which sequence; or a mask that broadcasts to [B, H, Q, K], True is
        masked out.
      scaling_factor: None means 1 / sqrt(D).
      softmax_type: "vanilla", "off_by_one" or "learnable", which takes softmax_offset f32[H] or [1, H, 1, 1].
      dropout_probability: of a weight; seed: one key of jax.random, None drops nothing.
      window_size: (left, right) keys seen beside its own position, -1 for all.
      quantizers: of attention_quantizers, for a forward pass in FP8; see dot_product_attention.

    Returns:
      [B, S, H, D of value] in query's dtype; zeros for a query that sees no key.

    Raises:
      ValueError: an unknown name, arrays that are not those of the layout, several keys, or shapes that do not fit.
      TypeError: sequence_descriptor is neither a descriptor nor a mask.
    """
    attn_mask_type = _one_of("attn_mask_type", attn_mask_type, MASK_TYPES)
    attn_bias_type = _one_of("attn_bias_type", attn_bias_type, BIAS_TYPES)
    qkv_layout = _one_of("qkv_layout", qkv_layout, tuple(LAYOUTS))
    softmax_type = _one_of("softmax_type", softmax_type, SOFTMAX_TYPES)
    _check_key(seed)
    padded, packed = "padding" in attn_mask_type, is_packed(qkv_layout)
    query, key, value = unpack("fused_attn", qkv, qkv_layout)
    if (sequence_descriptor is not None) != padded or (packed and not padded):
        raise ValueError(
            "fused_attn: expected a sequence_descriptor with a padding mask, which packed layouts need, and only then; "
            f"got attn_mask_type={attn_mask_type!r}, qkv_layout={qkv_layout!r} and "
            f"{'no' if sequence_descriptor is None else 'a'} sequence_descriptor"
        )
    is_mask = not packed and getattr(sequence_descriptor, "ndim", 0) == 4
    if not (is_mask or sequence_descriptor is None or isinstance(sequence_descriptor, SequenceDescriptor)):
        got = type(sequence_descriptor).__name__ + str(list(getattr(sequence_descriptor, "shape", ())) or "")
        raise TypeError(
            "fused_attn: sequence_descriptor: expected a SequenceDescriptor, such as SequenceDescriptor.from_seqlens("
            f"lengths), or, for layouts that are not packed, a mask [B, H, Q, K]; got {got}"
        )
    if (bias is not None) != (attn_bias_type != "no_bias"):
        raise ValueError(
            f"fused_attn: bias: expected {'none' if bias is not None else 'one'} with attn_bias_type={attn_bias_type!r}"
        )
    options = Attention(
        scale=1.0 / float(np.sqrt(query.shape[-1])) if scaling_factor is None else float(scaling_factor),
        causal="causal" in attn_mask_type,
        window=as_window(window_size),
        bias_before_scale=attn_bias_type == "pre_scale_bias",
        dropout=float(dropout_probability),
        bottom_right="bottom_right" in attn_mask_type,
        softmax_type=softmax_type,
    )
    in_one = qkv_layout == "bs3hd"  # which cuDNN may read as it lies
    return dot_product_attention(
        *([qkv[0]] if in_one else [query, key, value]),
        options=options,
        sequence_descriptor=None if is_mask else sequence_descriptor,
        mask=sequence_descriptor if is_mask else None,
        bias=bias,
        softmax_offset=softmax_offset,
        dropout_key=seed,
        quantizers=quantizers,
    )  # fmt: skip


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    found = respelled(value, allowed)
    if found not in allowed:
        raise ValueError(f"fused_attn: {name}: expected one of {list(allowed)}, got {value!r}")
    return found


def _check_key(seed) -> None:
    if seed is None:
        return
    typed = jax.dtypes.issubdtype(jnp.result_type(seed), jax.dtypes.prng_key)
    one = jax.eval_shape(lambda: jax.random.key(0) if typed else jax.random.PRNGKey(0))
    if jnp.shape(seed) != one.shape:
        raise ValueError(
            "fused_attn: seed: expected one key of jax.random, which is not split by device, got "
            f"{jnp.result_type(seed)}{list(jnp.shape(seed))}"
        )
