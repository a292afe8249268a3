"""LayerNorm and RMSNorm modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from transformer_engine_jax.nnx.base import Fp8Module, array, module
from transformer_engine_jax.ops.layernorm import Norm, norm


@module
class LayerNorm(Fp8Module):
    """Normalises over the last axis, of num_features, and scales; params `scale` and, for "layernorm", `ln_bias`.

    epsilon: added to the variance. layernorm_type: "layernorm" or "rmsnorm". zero_centered_gamma: `scale` is the
    difference from 1. scale_init: None means ones, or zeros where zero-centred. dtype: of the parameters.
    """

    num_features: int
    _: KW_ONLY
    epsilon: float = 1e-6
    layernorm_type: str = "layernorm"
    zero_centered_gamma: bool = False
    scale_init: InitVar[Callable | None] = None
    scale_axes: tuple[str | None, ...] = ("embed",)
    bias_init: InitVar[Callable] = nn.initializers.zeros
    bias_axes: tuple[str | None, ...] = ("embed",)
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = False
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, scale_init, bias_init, rngs):
        self.make_norm_params(self.num_features, scale_init, bias_init, self.bias_axes, self.dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x[.., num_features] (f32, f16, bf16) -> [.., num_features] in its dtype."""
        return norm(Norm(self.epsilon, self.zero_centered_gamma), x, array(self.scale), array(self.ln_bias))


@module
class RMSNorm(LayerNorm):
    """LayerNorm with layernorm_type="rmsnorm"."""

    _: KW_ONLY
    layernorm_type: str = "rmsnorm"
