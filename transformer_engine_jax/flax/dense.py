"""DenseGeneral, and LayerNormDenseGeneral, whose norm writes FP8 directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_engine_jax.flax.base import Fp8Module
from transformer_engine_jax.initializers import default_kernel_init, flat_kernel_init
from transformer_engine_jax.modules.checks import canonical_tuple, last_size, sizes_of
from transformer_engine_jax.modules.dense import (
    Kernel,
    ParametersSplit,
    ProjectionParts,
    computed_in,
    contracted_axes,
    joined,
    joined_kernels,
    run_dense,
    run_layernorm_dense,
    split_sizes,
)


class _Dense(Fp8Module):
    """Fields and parameters of a dense product."""

    features: int | Sequence[int] = 0
    kernel_init: Callable | None = None
    kernel_axes: tuple[str | None, ...] = ()
    use_bias: bool = True
    bias_init: Callable = nn.initializers.zeros
    bias_axes: tuple[str | None, ...] = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    param_dtype: Any = None
    transpose_batch_sequence: bool = False  # for NVIDIA's signature: tokens may lie in any order
    quantization_checkpoint_name: str | None = None
    parameters_split: ParametersSplit | None = None

    @nn.nowrap
    def _make_kernel(self, inputs: Sequence[int]) -> tuple[Kernel, jax.Array | None]:
        """(kernel [inputs.., features..], bias or None)."""
        features = sizes_of(self, "features")
        dtype, inputs = self.param_dtype or self.dtype, tuple(inputs)
        init = self.kernel_init or flat_kernel_init(default_kernel_init, len(inputs))
        kernels, biases = [], []
        for prefix, size in split_sizes(type(self).__name__, self.parameters_split, features[0]).items():
            part = (size, *features[1:])
            kernels.append(self.make_kernel(f"{prefix}kernel", init, self.kernel_axes, inputs + part, dtype))
            biases.append(self.make_bias(f"{prefix}bias", self.bias_axes, part, dtype))
        return joined_kernels(kernels, len(inputs)), joined([b for b in biases if b is not None], 0)

    @nn.nowrap
    def _contracted(self, x: jax.Array) -> list[int]:
        return [x.shape[axis] for axis in contracted_axes(x, self.axis)]

    @property
    def _adapt(self) -> Callable | None:
        if not self.enable_low_rank_adaptation:
            return self.check_no_low_rank()
        features = canonical_tuple(self.features)
        return lambda x, k_axes: self.low_rank(x, k_axes, features, self.param_dtype or self.dtype)


class DenseGeneral(_Dense):
    """x contracted with `kernel`, plus `bias`; its GEMMs run in FP8 under fp8_autocast.

    features: sizes of the output axes. axis: the contracted axes of x. kernel_init: None means variance_scaling(1.0,
    "fan_in", "truncated_normal") in f32. dtype: of the parameters; or, where param_dtype is given, of the computation.
    input_axes, output_axes: logical axes of x and of y; kernel_axes, bias_axes: of the parameters, one for each of
    their axes. return_bias: return (y, bias) with the bias not added.
    low_rank_adaptation_*: LoRA beside the kernel, times alpha / dim (1 where alpha is None). parameters_split: names,
    or names and sizes, of slices of the first output axis that are parameters of their own, `<name>_kernel` and
    `<name>_bias`; they are one product.
    quantization_checkpoint_name: the name of what is quantized for checkpoint policies.
    """

    input_axes: tuple[str | None, ...] = ()
    output_axes: tuple[str | None, ...] = ()
    return_bias: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array, residual: jax.Array | None = None):
        """inputs[.., contracted..] (+ residual) -> [.., features..], or (that, bias) with return_bias.

        All in the inputs' dtype, or in `dtype` where param_dtype is given. residual: [.., features..], added in the
        product.
        """
        x = computed_in(self, inputs)
        return run_dense(self, x, *self._make_kernel(self._contracted(x)), self._adapt, residual)


class _LayerNormDense(_Dense):
    """Fields and parameters of a norm and a dense product."""

    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Callable | None = None
    scale_axes: tuple[str | None, ...] = ("embed",)
    ln_bias_init: Callable = nn.initializers.zeros
    ln_bias_axes: tuple[str | None, ...] = ("embed",)
    use_bias: bool = False
    return_bias: bool = False
    return_layernorm_output: bool = False
    layernorm_input_axes: tuple[str | None, ...] = ()
    dot_input_axes: tuple[str | None, ...] = ()
    depth_scaling: float | None = None


class LayerNormDenseGeneral(_LayerNormDense):
    """A norm and a DenseGeneral; returns (y, the norm's output or None), or (y, bias, that) with return_bias.

    Fields of LayerNorm and DenseGeneral; enable_layernorm=False leaves the norm out. return_layernorm_output costs
    one pass: the norm's output, without a norm x, is then kept in high precision too. depth_scaling: y is divided by
    it.
    """

    @nn.compact
    def __call__(self, inputs: jax.Array) -> tuple[jax.Array | None, ...]:
        """inputs[.., K] -> ([.., features..], [.., K] or None), in their dtype, or in `dtype` with param_dtype."""
        x = computed_in(self, inputs)
        if self.enable_layernorm and canonical_tuple(self.axis) not in ((-1,), (x.ndim - 1,)):
            raise ValueError(f"LayerNormDenseGeneral.axis: expected -1, the axis of the norm, got {self.axis}")
        gamma, beta = self.make_norm(last_size(self, x), self.param_dtype or self.dtype)
        kernel, bias = self._make_kernel(self._contracted(x))
        return run_layernorm_dense(self, x, gamma, beta, kernel, bias, self._adapt)


class LayerNormDenseParts(_LayerNormDense):
    """A LayerNormDenseGeneral of x[.., inputs] that another module computes, together with others: its `parts()`."""

    inputs: int = 0
    fp8: bool = False  # whether autocast applies

    def setup(self):
        self.check_no_low_rank()
        # In the order of LayerNormDenseGeneral, on which initial values depend.
        norm = self.make_norm(self.inputs, self.param_dtype or self.dtype)
        kernel, bias = self._make_kernel((self.inputs,))
        quantizers = self.gemm_quantizers("gemm", self.fp8, self.quantization_checkpoint_name)
        parts = ProjectionParts(*norm, kernel, self.kernel_axes, bias, *quantizers)
        self.parts = lambda: parts  # of attributes Flax takes the states apart, to look for modules in them
