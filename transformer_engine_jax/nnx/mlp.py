"""LayerNormMLP: norm, dense, activation, dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from transformer_engine_jax.initializers import default_kernel_init, flat_kernel_init
from transformer_engine_jax.modules.checks import canonical_tuple, check_dims, check_positive, check_rate
from transformer_engine_jax.modules.mlp import MlpParameters, run_mlp
from transformer_engine_jax.nnx.base import Fp8Module, array, dropping, helper, make_dropout, module
from transformer_engine_jax.ops.activation import fused_activation
from transformer_engine_jax.ops.dropout import Residual, drop
from transformer_engine_jax.quantized import GemmState


@module
class LayerNormMLP(Fp8Module):
    """activation(norm(x) @ wi_kernel + wi_bias) @ wo_kernel + wo_bias; returns (y, the norm's output or None).

    With return_bias wo_bias is not added, and they are (y, wo_bias, the norm's output or None).

    Params `scale`, `ln_bias`, `wi_kernel` [in_features, n_act, intermediate_dim], `wi_bias`, `wo_kernel`
    [intermediate_dim, in_features], `wo_bias`. activations: names or functions, one for each input of the product:
    ("gelu",), ("silu", "linear"), ... activation_params: limit, alpha and glu_linear_offset of ("clamped_silu",
    "clamped_linear"), by default GPT-OSS's. quantization_checkpoint_name: the name of what is quantized for checkpoint
    policies. With intermediate dropout, LoRA, return_layernorm_output (without a norm it is x) or activations without a
    kernel (see te.activation) the stages run one by one, else fused. Other fields are the Linen module's.
    """

    FP8_STATES: ClassVar = {"gemm_1_state": GemmState, "gemm_2_state": GemmState}

    in_features: int
    _: KW_ONLY
    intermediate_dim: int = 2048
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: InitVar[Callable | None] = None
    scale_axes: tuple[str | None, ...] = ("embed",)
    ln_bias_init: InitVar[Callable] = nn.initializers.zeros
    ln_bias_axes: tuple[str | None, ...] = ("embed",)
    kernel_init: InitVar[Callable | None] = None
    kernel_axes_1: tuple[str | None, ...] = ("embed", "act", "mlp")
    kernel_axes_2: tuple[str | None, ...] = ("mlp", "embed")
    use_bias: bool = False
    bias_init: InitVar[Callable] = nn.initializers.zeros
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
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, scale_init, ln_bias_init, kernel_init, bias_init, rngs):
        self._check()
        self.activations = canonical_tuple(self.activations)
        fused_activation(self.activations, self.activation_params)  # raises where one is unknown, or none given
        self.scale = self.ln_bias = nnx.data(None)
        if self.enable_layernorm:
            self.make_norm_params(self.in_features, scale_init, ln_bias_init, self.ln_bias_axes, self.dtype, rngs)
        self._make_products(kernel_init or default_kernel_init, bias_init, rngs)
        dims, name = self.intermediate_hidden_dropout_dims, self.intermediate_dropout_rng_name
        self.dropout = make_dropout(self.intermediate_dropout_rate, dims, name, rngs)

    def stacked_axes(self) -> tuple[int, ...]:
        return self.wo_kernel.shape[:-2]

    def _check(self) -> None:
        check_rate(self, "intermediate_dropout_rate")
        if canonical_tuple(self.axis) != (-1,):
            raise ValueError(f"LayerNormMLP.axis: expected -1, got {self.axis}")
        check_positive(self, "in_features", "intermediate_dim")

    def _make_products(self, init, bias_init, rngs) -> None:
        hidden, count = self.in_features, len(self.activations)
        features_1, features_2 = (count, self.intermediate_dim), (hidden,)
        init_1 = flat_kernel_init(init, 1, scales=(1.0,) * count)
        products = (
            (1, "wi", init_1, self.kernel_axes_1, self.bias_axes_1, hidden, features_1),
            (2, "wo", init, self.kernel_axes_2, self.bias_axes_2, self.intermediate_dim, features_2),
        )
        for number, name, kernel_init, kernel_axes, bias_axes, inputs, features in products:
            self.make_param(f"{name}_kernel", kernel_init, kernel_axes, (inputs, *features), self.dtype, rngs)
            setattr(self, f"{name}_bias", nnx.data(None))
            if self.use_bias:
                self.make_param(f"{name}_bias", bias_init, bias_axes, features, self.dtype, rngs)
            if self.enable_low_rank_adaptation:
                self.make_low_rank((inputs,), features, self.dtype, rngs, f"{name}_")
            self.make_fp8_state(f"gemm_{number}")

    def __call__(
        self, inputs: jax.Array, deterministic: bool | None = None, residual: Residual = False
    ) -> tuple[jax.Array | None, ...]:
        """inputs[.., in_features] -> ([.., in_features] in their dtype, [.., in_features] or None).

        deterministic: switches dropout off; None is what model.train() and model.eval() said. residual: add the
        inputs to the result, inside the second product; or a function that does.
        """
        x = jnp.asarray(inputs)
        check_dims(self, "intermediate_hidden_dropout_dims", x.ndim)
        kernels = tuple(self.kernel_of_product(f"{name}_kernel") for name in ("wi", "wo"))
        biases = (array(self.wi_bias), array(self.wo_bias))
        parameters = MlpParameters(array(self.scale), array(self.ln_bias), kernels, biases)
        adapt = lambda i, x: self.low_rank(x, 1, ("wi_", "wo_")[i])
        return run_mlp(
            self, x, parameters, residual, self._drop if dropping(self.dropout, deterministic) else None,
            adapt if self.enable_low_rank_adaptation else None,
        )  # fmt: skip

    @helper
    def _drop(self, a: jax.Array) -> jax.Array:
        return drop(a, self.dropout.rngs(), self.dropout.rate, self.dropout.broadcast_dims)
