"""LayerNorm and RMSNorm modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_engine_jax.flax.base import Fp8Module
from transformer_engine_jax.modules.checks import last_size
from transformer_engine_jax.ops.layernorm import Norm, norm


class LayerNorm(Fp8Module):
    """Normalises over the last axis and scales; params `scale` and, for "layernorm", `ln_bias`.

    epsilon: added to the variance. layernorm_type: "layernorm" or "rmsnorm". zero_centered_gamma: `scale` is the
    difference from 1. scale_init: None means ones, or zeros where zero-centred. dtype: of the parameters.
    transpose_batch_sequence: for NVIDIA's signature; tokens may lie in any order.
    """

    epsilon: float = 1e-6
    layernorm_type: str = "layernorm"
    zero_centered_gamma: bool = False
    scale_init: Callable | None = None
    scale_axes: tuple[str | None, ...] = ("embed",)
    bias_init: Callable = nn.initializers.zeros
    bias_axes: tuple[str | None, ...] = ("embed",)
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x[.., K] (f32, f16, bf16) -> [.., K] in its dtype."""
        gamma, beta = self.make_norm_params(last_size(self, x), self.bias_init, self.bias_axes, self.dtype)
        return norm(Norm(self.epsilon, self.zero_centered_gamma), x, gamma, beta)


class RMSNorm(LayerNorm):
    """LayerNorm with layernorm_type="rmsnorm"."""

    layernorm_type: str = "rmsnorm"
