"""The module of attention's scaled and masked softmax."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY

import jax

from transformer_engine_jax import flax as linen
from transformer_engine_jax.flax.softmax import SoftmaxFusionType
from transformer_engine_jax.nnx.base import Fp8Module, module


@module
class Softmax(Fp8Module):
    """Softmax of scale_factor * (inputs + bias) over the last axis; fields and arguments as of the Linen module."""

    _: KW_ONLY
    scale_factor: float = 1.0
    softmax_fusion_type: SoftmaxFusionType = SoftmaxFusionType.SCALED
    softmax_type: str = "vanilla"

    def __call__(self, inputs: jax.Array, mask=None, bias=None, softmax_offset=None) -> jax.Array:
        """inputs [.., H, Q, K] (f32, f16, bf16) -> weights of its shape and dtype.

        mask: bool, int8 or uint8 that broadcasts to inputs, True is masked out. bias: likewise, added before the scale.
        softmax_offset: [H] or [1, H, 1, 1], for softmax_type "learnable" only.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return linen.Softmax(**fields, parent=None).apply({}, inputs, mask, bias, softmax_offset)
