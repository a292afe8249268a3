"""DenseGeneral, and LayerNormDenseGeneral, whose norm writes FP8 directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from transformer_engine_jax.initializers import default_kernel_init, flat_kernel_init
from transformer_engine_jax.modules.checks import canonical_tuple, sizes_of
from transformer_engine_jax.modules.dense import (
    Kernel,
    ParametersSplit,
    ProjectionParts,
    computed_in,
    joined,
    joined_kernels,
    run_dense,
    run_layernorm_dense,
    split_sizes,
)
from transformer_engine_jax.nnx.base import Fp8Module, array, helper, module
from transformer_engine_jax.quantized import GemmState


@module
class _Dense(Fp8Module):
    """Fields and parameters of a dense product."""

    FP8_STATES: ClassVar = {"gemm_state": GemmState}

    in_features: int | Sequence[int]
    features: int | Sequence[int]
    _: KW_ONLY
    kernel_init: InitVar[Callable | None] = None
    kernel_axes: tuple[str | None, ...] = ()
    use_bias: bool = True
    bias_init: InitVar[Callable] = nn.initializers.zeros
    bias_axes: tuple[str | None, ...] = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    param_dtype: Any = None
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None
    parameters_split: ParametersSplit | None = None
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, kernel_init, bias_init, rngs):
        name = type(self).__name__
        inputs, features = sizes_of(self, "in_features"), sizes_of(self, "features")
        if len(canonical_tuple(self.axis)) != len(inputs):
            raise ValueError(f"{name}.in_features: expected one for each axis of {self.axis}, got {self.in_features}")
        init = kernel_init or flat_kernel_init(default_kernel_init, len(inputs))
        dtype = self.param_dtype or self.dtype
        for prefix, size in self._parts().items():
            part = (size, *features[1:])
            self.make_param(f"{prefix}kernel", init, self.kernel_axes, inputs + part, dtype, rngs)
            setattr(self, f"{prefix}bias", nnx.data(None))
            if self.use_bias:
                self.make_param(f"{prefix}bias", bias_init, self.bias_axes, part, dtype, rngs)
        if self.enable_low_rank_adaptation:
            self.make_low_rank(inputs, features, dtype, rngs)
        self.make_fp8_state("gemm")

    def stacked_axes(self) -> tuple[int, ...]:
        own = len(canonical_tuple(self.in_features)) + len(canonical_tuple(self.features))
        return getattr(self, f"{next(iter(self._parts()))}kernel").shape[:-own]

    def _parts(self) -> dict[str, int]:
        return split_sizes(type(self).__name__, self.parameters_split, canonical_tuple(self.features)[0])

    def _kernel_and_bias(self) -> tuple[Kernel, jax.Array | None]:
        kernels = [self.kernel_of_product(f"{prefix}kernel") for prefix in self._parts()]
        biases = [getattr(self, f"{prefix}bias") for prefix in self._parts()]
        k_axes = len(canonical_tuple(self.in_features))
        return joined_kernels(kernels, k_axes), joined([array(b) for b in biases if b is not None], 0)

    @property
    def _adapt(self) -> Callable | None:
        return self.low_rank if self.enable_low_rank_adaptation else None

    @helper
    def parts(self, fp8: bool) -> ProjectionParts:
        """What is needed to compute it together with others; fp8: whether autocast applies."""
        norm = array(getattr(self, "scale", None)), array(getattr(self, "ln_bias", None))
        kernel, bias = self._kernel_and_bias()
        quantizers = self.gemm_quantizers("gemm", fp8, self.quantization_checkpoint_name)
        return ProjectionParts(*norm, kernel, self.kernel_axes, bias, *quantizers)


@module
class DenseGeneral(_Dense):
    """x contracted with `kernel`, plus `bias`; its GEMMs run in FP8 under fp8_autocast.

    in_features, features: sizes of the contracted and of the output axes. axis: the contracted axes of x. kernel_init:
    None means variance_scaling(1.0, "fan_in", "truncated_normal") in f32. dtype: of the parameters; or, where
    param_dtype is given, of the computation. input_axes, output_axes: logical axes of x and of y. return_bias: return
    (y, bias) with the bias not added. low_rank_adaptation_*: LoRA, times alpha / dim (1 where alpha is None).
    parameters_split: names, or names and sizes, of slices of the first output axis that are parameters of their own,
    `<name>_kernel` and `<name>_bias`; they are one product.
    quantization_checkpoint_name: the name of what is quantized for checkpoint policies.
    """

    _: KW_ONLY
    input_axes: tuple[str | None, ...] = ()
    output_axes: tuple[str | None, ...] = ()
    return_bias: bool = False

    def __call__(self, inputs: jax.Array, residual: jax.Array | None = None):
        """inputs[.., in_features..] (+ residual) -> [.., features..], or (that, bias) with return_bias.

        All in the inputs' dtype, or in `dtype` where param_dtype is given. residual: [.., features..], added in the
        product.
        """
        return run_dense(self, computed_in(self, inputs), *self._kernel_and_bias(), self._adapt, residual)


@module
class LayerNormDenseGeneral(_Dense):
    """A norm and a DenseGeneral; returns (y, the norm's output or None), or (y, bias, that) with return_bias.

    Fields of LayerNorm and DenseGeneral; enable_layernorm=False leaves the norm out. return_layernorm_output costs
    one pass: the norm's output, without a norm x, is then kept in high precision too. depth_scaling: y is divided by
    it. axis: -1 alone where there is a norm.
    """

    _: KW_ONLY
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: InitVar[Callable | None] = None
    scale_axes: tuple[str | None, ...] = ("embed",)
    ln_bias_init: InitVar[Callable] = nn.initializers.zeros
    ln_bias_axes: tuple[str | None, ...] = ("embed",)
    use_bias: bool = False
    return_bias: bool = False
    return_layernorm_output: bool = False
    layernorm_input_axes: tuple[str | None, ...] = ()
    dot_input_axes: tuple[str | None, ...] = ()
    depth_scaling: float | None = None

    def __post_init__(self, kernel_init, bias_init, rngs, scale_init, ln_bias_init):
        super().__post_init__(kernel_init, bias_init, rngs)
        self.scale = self.ln_bias = nnx.data(None)
        if self.enable_layernorm:
            if canonical_tuple(self.axis) != (-1,):
                raise ValueError(f"LayerNormDenseGeneral.axis: expected -1, the axis of the norm, got {self.axis}")
            (features,) = canonical_tuple(self.in_features)
            dtype = self.param_dtype or self.dtype
            self.make_norm_params(features, scale_init, ln_bias_init, self.ln_bias_axes, dtype, rngs)

    def __call__(self, inputs: jax.Array) -> tuple[jax.Array | None, ...]:
        """inputs[.., K] -> ([.., features..], [.., K] or None), in their dtype, or in `dtype` with param_dtype."""
        norm = array(self.scale), array(self.ln_bias)
        return run_layernorm_dense(self, computed_in(self, inputs), *norm, *self._kernel_and_bias(), self._adapt)
