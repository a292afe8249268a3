"""DenseGeneral, and LayerNormDenseGeneral, whose norm writes FP8 directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_engine_jax.flax.base import canonical_tuple
from transformer_engine_jax.flax.dense import (
    Kernel,
    ParametersSplit,
    axes_contracted_last,
    contracted_last,
    joined,
    joined_kernels,
    split_sizes,
)
from transformer_engine_jax.initializers import default_kernel_init, flat_kernel_init
from transformer_engine_jax.nnx.base import Fp8Module, array, module
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.layernorm import Norm, norm
from transformer_engine_jax.ops.layernorm_dense import layernorm_dense
from transformer_engine_jax.precision import Product, in_fp8
from transformer_engine_jax.quantizers import keep
from transformer_engine_jax.sharding import constrain


def _sizes(op: str, field: str, value) -> tuple[int, ...]:
    sizes = canonical_tuple(value)
    if not sizes or not all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
        raise ValueError(f"{op}.{field}: expected positive sizes, got {value!r}")
    return sizes


@module
class _Dense(Fp8Module):
    """Fields and parameters of a dense product."""

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
        self.freeze_fields()
        name = type(self).__name__
        inputs, features = _sizes(name, "in_features", self.in_features), _sizes(name, "features", self.features)
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

    def _parts(self) -> dict[str, int]:
        return split_sizes(type(self).__name__, self.parameters_split, canonical_tuple(self.features)[0])

    def _kernel_and_bias(self) -> tuple[Kernel, jax.Array | None]:
        kernels = [self.kernel_of_product(f"{prefix}kernel") for prefix in self._parts()]
        biases = [getattr(self, f"{prefix}bias") for prefix in self._parts()]
        k_axes = len(canonical_tuple(self.in_features))
        return joined_kernels(kernels, k_axes), joined([array(b) for b in biases if b is not None], 0)

    def _computed_in(self, x: jax.Array) -> jax.Array:
        # `dtype` names the parameters' dtype, and x brings its own, unless param_dtype frees `dtype` for x.
        return x if self.param_dtype is None else x.astype(self.dtype)


@module
class DenseGeneral(_Dense):
    """x contracted with `kernel`, plus `bias`; its GEMMs run in FP8 under fp8_autocast.

    in_features, features: sizes of the contracted and of the output axes. axis: the contracted axes of x. kernel_init:
    None means variance_scaling(1.0, "fan_in", "truncated_normal"). dtype: of the parameters; or, where param_dtype is
    given, of the computation. input_axes, output_axes: logical axes of x and of y. return_bias: return (y, bias) with
    the bias not added. low_rank_adaptation_*: LoRA. parameters_split: names, or names and sizes, of slices of the first
    output axis that are parameters of their own, `<name>_kernel` and `<name>_bias`; they are one product.
    quantization_checkpoint_name: the name of what is quantized for checkpoint policies.
    """

    _: KW_ONLY
    input_axes: tuple[str | None, ...] = ()
    output_axes: tuple[str | None, ...] = ()
    return_bias: bool = False

    def __call__(self, x: jax.Array, residual: jax.Array | None = None):
        """x[.., in_features..] (+ residual) -> [.., features..] in x's dtype, or (that, bias) with return_bias.

        residual: [.., features..] in x's dtype, added inside the product.
        """
        x = self._computed_in(jnp.asarray(x))
        input_axes = axes_contracted_last(self.input_axes, self.axis)
        x, k_axes = contracted_last(x, self.axis)
        kernel, bias = self._kernel_and_bias()
        fp8, scope = in_fp8([Product.of(x, k_axes, canonical_tuple(self.features))])
        quantizers, unused = self.gemm_quantizers("gemm", fp8, self.quantization_checkpoint_name)
        added = None if self.return_bias else bias
        with scope:
            y = dense(
                x, kernel, added, k_axes=k_axes, quantizers=quantizers, residual=residual,
                by_kernels=residual is not None, input_axes=input_axes, output_axes=self.output_axes,
                kernel_axes=self.kernel_axes,
            )  # fmt: skip
        if self.enable_low_rank_adaptation:
            y = y + self.low_rank(x, k_axes)
        y = keep(y, unused)
        return (y, bias) if self.return_bias else y


@module
class LayerNormDenseGeneral(_Dense):
    """A norm and a DenseGeneral; returns (y, the norm's output or None), or (y, bias, that) with return_bias.

    Fields of LayerNorm and DenseGeneral; enable_layernorm=False leaves the norm out. return_layernorm_output costs
    one pass: the norm's output is then kept in high precision too. depth_scaling: y is divided by it.
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

    def __call__(self, x: jax.Array) -> tuple[jax.Array | None, ...]:
        """x[.., K] -> ([.., features..] in x's dtype, [.., K] or None)."""
        x = self._computed_in(jnp.asarray(x))
        options, gamma, beta = Norm(self.epsilon, self.zero_centered_gamma), array(self.scale), array(self.ln_bias)
        separate = self.return_layernorm_output or self.enable_low_rank_adaptation
        fused = self.enable_layernorm and not separate
        if not fused:
            x = constrain(x, self.layernorm_input_axes)
        if self.enable_layernorm and separate:
            x = norm(options, x, gamma, beta)
        normed = x if self.return_layernorm_output else None
        x, k_axes = contracted_last(x, self.axis)
        kernel, bias = self._kernel_and_bias()
        fp8, scope = in_fp8([Product.of(x, k_axes, canonical_tuple(self.features))])
        quantizers, unused = self.gemm_quantizers("gemm", fp8, self.quantization_checkpoint_name)
        added = None if self.return_bias else bias
        with scope:
            if fused:
                y = layernorm_dense(
                    x, gamma, beta, kernel, added, norm_options=options, quantizers=quantizers,
                    norm_input_axes=self.layernorm_input_axes, dot_input_axes=self.dot_input_axes,
                    kernel_axes=self.kernel_axes,
                )  # fmt: skip
            else:
                input_axes = axes_contracted_last(self.dot_input_axes, self.axis)
                y = dense(
                    x, kernel, added, k_axes=k_axes, quantizers=quantizers, input_axes=input_axes,
                    kernel_axes=self.kernel_axes,
                )  # fmt: skip
        if self.enable_low_rank_adaptation:
            y = y + self.low_rank(x, k_axes)
        y = keep(y, unused)
        if self.depth_scaling is not None:
            y, bias = y / self.depth_scaling, None if bias is None else bias / self.depth_scaling
        return (y, bias, normed) if self.return_bias else (y, normed)
