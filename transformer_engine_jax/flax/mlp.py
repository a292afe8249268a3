"""LayerNormMLP: norm, dense, activation, dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_engine_jax.flax.base import Fp8Module
from transformer_engine_jax.initializers import default_kernel_init, flat_kernel_init
from transformer_engine_jax.modules.checks import canonical_tuple, check_dims, check_positive, check_rate, last_size
from transformer_engine_jax.modules.mlp import MlpParameters, run_mlp
from transformer_engine_jax.ops.activation import fused_activation
from transformer_engine_jax.ops.dropout import Residual, drop


class LayerNormMLP(Fp8Module):
    """activation(norm(x) @ wi_kernel + wi_bias) @ wo_kernel + wo_bias; returns (y, the norm's output or None).

    With return_bias wo_bias is not added, and they are (y, wo_bias, the norm's output or None).

    Params `scale`, `ln_bias`, `wi_kernel` [h, n_act, intermediate_dim], `wi_bias`, `wo_kernel` [intermediate_dim, h],
    `wo_bias`. activations: names or functions, one for each input of the product: ("gelu",), ("silu", "linear"), ...
    "gelu" is the tanh form; functools.partial(jax.nn.gelu, approximate=False) is the exact one, in plain JAX.
    activation_params: limit, alpha and glu_linear_offset of ("clamped_silu", "clamped_linear"), by default GPT-OSS's.
    quantization_checkpoint_name: the name of what is quantized for checkpoint policies. With intermediate dropout,
    LoRA, return_layernorm_output (without a norm it is x) or activations without a kernel (see te.activation) the
    stages run one by one, else fused. intermediate_hidden_dropout_dims: axes of [.., intermediate_dim] along which what
    is dropped is the same. transpose_batch_sequence: for NVIDIA's signature; tokens may lie in any order.
    """

    intermediate_dim: int = 2048
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Callable | None = None
    scale_axes: tuple[str | None, ...] = ("embed",)
    ln_bias_init: Callable = nn.initializers.zeros
    ln_bias_axes: tuple[str | None, ...] = ("embed",)
    kernel_init: Callable | None = None
    kernel_axes_1: tuple[str | None, ...] = ("embed", "act", "mlp")
    kernel_axes_2: tuple[str | None, ...] = ("mlp", "embed")
    use_bias: bool = False
    bias_init: Callable = nn.initializers.zeros
    bias_axes_1: tuple[str | None, ...] = ("act", "mlp")
    bias_axes_2: tuple[str | None, ...] = ("embed",)
    return_bias: bool = False
    return_layernorm_output: bool = False
    activations: Sequence[str | Callable] = ("gelu",)
    activation_params: dict | None = None
    intermediate_dropout_rng_name: str = "dropout"
    intermediate_dropout_rate: float = 0.0
    intermediate_hidden_dropout_dims: Sequence[int] = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | Sequence[int] = -1
    layernorm_input_axes: tuple[str | None, ...] = ()
    dot_1_input_axes: tuple[str | None, ...] = ()
    dot_2_input_axes: tuple[str | None, ...] = ()
    ffn1_ckpt_name: str = "ffn1"
    ffn2_ckpt_name: str = "ffn2"
    quantization_checkpoint_name: str | None = None
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = False

    @nn.compact
    def __call__(
        self, inputs: jax.Array, deterministic: bool = False, residual: Residual = False
    ) -> tuple[jax.Array | None, ...]:
        """inputs[.., h] -> ([.., h] in their dtype, [.., h] or None).

        deterministic: switches dropout off. residual: add the inputs to the result, inside the second product; or a
        function that does, see Residual.
        """
        x = jnp.asarray(inputs)
        if self.axis not in (-1, x.ndim - 1, (-1,)):
            raise ValueError(f"LayerNormMLP.axis: expected -1, got {self.axis}")
        check_positive(self, "intermediate_dim")
        check_rate(self, "intermediate_dropout_rate")
        check_dims(self, "intermediate_hidden_dropout_dims", x.ndim)
        activations = canonical_tuple(self.activations)
        fused_activation(activations, self.activation_params)  # raises where one is unknown, or none given
        parameters = self._make_parameters(last_size(self, x), len(activations))
        drop_some = self._drop if self.intermediate_dropout_rate > 0 and not deterministic else None

        def adapt(i: int, x: jax.Array) -> jax.Array:
            return self.low_rank(x, 1, parameters.kernels[i].shape[1:], self.dtype, ("wi_", "wo_")[i])

        if not self.enable_low_rank_adaptation:
            adapt = self.check_no_low_rank("wi_", "wo_")
        return run_mlp(self, x, parameters, residual, drop_some, adapt)

    def _make_parameters(self, hidden: int, count: int) -> MlpParameters:
        norm = self.make_norm(hidden, self.dtype)
        init = self.kernel_init or default_kernel_init
        shape_1, shape_2 = (hidden, count, self.intermediate_dim), (self.intermediate_dim, hidden)
        init_1 = flat_kernel_init(init, 1, scales=(1.0,) * count)
        wi = self.make_kernel("wi_kernel", init_1, self.kernel_axes_1, shape_1, self.dtype)
        wo = self.make_kernel("wo_kernel", init, self.kernel_axes_2, shape_2, self.dtype)
        wi_bias = self.make_bias("wi_bias", self.bias_axes_1, shape_1[1:], self.dtype)
        wo_bias = self.make_bias("wo_bias", self.bias_axes_2, shape_2[1:], self.dtype)
        return MlpParameters(*norm, (wi, wo), (wi_bias, wo_bias))

    def _drop(self, a: jax.Array) -> jax.Array:
        key = self.make_rng(self.intermediate_dropout_rng_name)
        return drop(a, key, self.intermediate_dropout_rate, self.intermediate_hidden_dropout_dims)
