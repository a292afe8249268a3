"""The module of attention's scaled and masked softmax."""

from __future__ import annotations

import enum

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_engine_jax.ops.attention.options import SOFTMAX_TYPES
from transformer_engine_jax.ops.softmax import softmax


class SoftmaxFusionType(enum.Enum):
    """What is fused into the softmax beside the scale: nothing, a mask, or causality (and a mask, where given)."""

    SCALED = "scaled"
    SCALED_MASKED = "scaled_masked"
    SCALED_UPPER_TRIANG_MASKED = "scaled_upper_triang_masked"

    @classmethod
    def _missing_(cls, value):
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None


class Softmax(nn.Module):
    """Softmax of scale_factor * (inputs + bias) over the last axis; a query that sees no key gets zeros.

    softmax_fusion_type: SCALED takes no mask, SCALED_MASKED needs one, SCALED_UPPER_TRIANG_MASKED lets a query see keys
    up to its own index, and takes one; their names as strings will do. softmax_type: "vanilla"; "off_by_one" adds 1 to
    the denominator; "learnable" adds exp(softmax_offset) for each head.
    """

    scale_factor: float = 1.0
    softmax_fusion_type: SoftmaxFusionType = SoftmaxFusionType.SCALED
    softmax_type: str = "vanilla"

    @nn.compact
    def __call__(self, inputs: jax.Array, mask=None, bias=None, softmax_offset=None) -> jax.Array:
        """inputs [.., H, Q, K] (f32, f16, bf16) -> weights of its shape and dtype.

        Args:
          inputs: scores.
          mask: bool, int8 or uint8 that broadcasts to the scores; what is True (not 0) is masked out.
          bias: broadcasts to the scores, added to them in their dtype before they are scaled.
          softmax_offset: [H] or [1, H, 1, 1], for "learnable" only.

        Raises:
          ValueError: the mask or the offset does not belong to the type, or does not fit the scores.
        """
        inputs, kind = jnp.asarray(inputs), self._checked_type(mask, softmax_offset)
        if bias is not None:
            shape = (1,) * (inputs.ndim - jnp.ndim(bias)) + jnp.shape(bias)
            fits = len(shape) == inputs.ndim and all(m in (1, n) for m, n in zip(shape, inputs.shape))
            _expect(fits, "bias", f"a shape that broadcasts to {list(inputs.shape)}", list(jnp.shape(bias)))
            inputs = inputs + jnp.asarray(bias, inputs.dtype)
        if self.softmax_type == "off_by_one":
            softmax_offset = jnp.zeros(inputs.shape[-3] if inputs.ndim > 2 else 1, jnp.float32)
        causal = kind is SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED
        return softmax(inputs, mask=mask, softmax_offset=softmax_offset, scale_factor=self.scale_factor, causal=causal)

    def _checked_type(self, mask, softmax_offset) -> SoftmaxFusionType:
        kind, softmax_type = self.softmax_fusion_type, self.softmax_type
        try:
            kind = SoftmaxFusionType(kind)
        except ValueError:
            _expect(False, "softmax_fusion_type", f"one of {list(SoftmaxFusionType.__members__)}", repr(kind))
        if mask is None:
            _expect(kind is not SoftmaxFusionType.SCALED_MASKED, "mask", "one with SCALED_MASKED", "none; use SCALED")
        else:
            _expect(kind is not SoftmaxFusionType.SCALED, "mask", "none with SCALED", "one; use SCALED_MASKED")
        _expect(softmax_type in SOFTMAX_TYPES, "softmax_type", f"one of {SOFTMAX_TYPES}", repr(softmax_type))
        if softmax_type == "learnable":
            _expect(softmax_offset is not None, "softmax_offset", "one with 'learnable'", "none")
        else:
            _expect(softmax_offset is None, "softmax_offset", f"none with {softmax_type!r}", "one; use 'learnable'")
        return kind


def _expect(ok: bool, argument: str, expected: str, got) -> None:
    if not ok:
        raise ValueError(f"Softmax: {argument}: expected {expected}, got {got}")
