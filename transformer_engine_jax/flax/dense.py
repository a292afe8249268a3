"""DenseGeneral, and LayerNormDenseGeneral, whose norm writes FP8 directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from transformer_engine_jax.flax.base import Fp8Module, canonical_tuple, default_kernel_init, flat_kernel_init
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.layernorm import Norm
from transformer_engine_jax.ops.layernorm_dense import layernorm_dense, norm
from transformer_engine_jax.quantized import keep
from transformer_engine_jax.sharding import constrain


def contracted_last(x: jax.Array, axis) -> tuple[jax.Array, int]:
    """x with the axes to contract moved to its end, and their number."""
    axes = tuple(a % x.ndim if -x.ndim <= a < x.ndim else x.ndim for a in canonical_tuple(axis))
    if x.ndim in axes or len(set(axes)) != len(axes):
        raise ValueError(f"DenseGeneral.axis: expected distinct axes of x{list(x.shape)}, got {axis}")
    last = tuple(range(x.ndim - len(axes), x.ndim))
    return (x if axes == last else jnp.moveaxis(x, axes, last)), len(axes)


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
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None

    def _make_kernel(self, x: jax.Array, k_axes: int) -> tuple[jax.Array, jax.Array | None, tuple[int, ...]]:
        """(kernel, bias or None, features) for x, whose last k_axes axes are contracted."""
        features = canonical_tuple(self.features)
        if not features or not all(isinstance(f, int | np.integer) and f > 0 for f in features):
            raise ValueError(f"{type(self).__name__}.features: expected positive sizes, got {self.features!r}")
        dtype = self.param_dtype or self.dtype
        shape = x.shape[x.ndim - k_axes :] + features
        init = self.kernel_init or flat_kernel_init(default_kernel_init, k_axes)
        kernel = self.make_param("kernel", init, self.kernel_axes, shape, dtype)
        bias = self.make_param("bias", self.bias_init, self.bias_axes, features, dtype) if self.use_bias else None
        return kernel, bias, features

    def _finish(self, y: jax.Array, x: jax.Array, k_axes: int, features, unused) -> jax.Array:
        if self.enable_low_rank_adaptation:
            y = y + self.low_rank(
                x,
                k_axes,
                features,
                self.low_rank_adaptation_dim,
                self.low_rank_adaptation_alpha,
                self.param_dtype or self.dtype,
            )
        return keep(y, unused)

    def _computed_in(self, x: jax.Array) -> jax.Array:
        # `dtype` names the parameters' dtype, and x brings its own, unless param_dtype frees `dtype` for x.
        return x if self.param_dtype is None else x.astype(self.dtype)


class DenseGeneral(_Dense):
    """x contracted with `kernel`, plus `bias`; its GEMMs run in FP8 under fp8_autocast.

    features: sizes of the output axes. axis: the contracted axes of x. kernel_init: None means variance_scaling(1.0,
    "fan_in", "truncated_normal"). dtype: of the parameters; or, where param_dtype is given, of the computation.
    return_bias: return (y, bias) with the bias not added. low_rank_adaptation_*: LoRA beside the kernel.
    """

    input_axes: tuple[str | None, ...] = ()
    return_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array):
        """x[.., contracted..] -> [.., features..] in x's dtype, or (that, bias) with return_bias."""
        x = constrain(self._computed_in(jnp.asarray(x)), self.input_axes)
        x, k_axes = contracted_last(x, self.axis)
        kernel, bias, features = self._make_kernel(x, k_axes)
        quantizers, unused = self.gemm_quantizers("gemm")
        y = dense(x, kernel, None if self.return_bias else bias, k_axes=k_axes, quantizers=quantizers)
        if self.quantization_checkpoint_name:
            y = checkpoint_name(y, self.quantization_checkpoint_name)
        y = self._finish(y, x, k_axes, features, unused)
        return (y, bias) if self.return_bias else y


class LayerNormDenseGeneral(_Dense):
    """A norm and a DenseGeneral; returns (y, the norm's output or None).

    Fields of LayerNorm and DenseGeneral; enable_layernorm=False leaves the norm out. return_layernorm_output costs
    one pass: the norm's output is then kept in high precision too. depth_scaling: y is divided by it.
    """

    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Callable | None = None
    scale_axes: tuple[str | None, ...] = ("embed",)
    ln_bias_init: Callable = nn.initializers.zeros
    ln_bias_axes: tuple[str | None, ...] = ("embed",)
    use_bias: bool = False
    return_layernorm_output: bool = False
    layernorm_input_axes: tuple[str | None, ...] = ()
    dot_input_axes: tuple[str | None, ...] = ()
    depth_scaling: float | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """x[.., K] -> ([.., features..] in x's dtype, [.., K] or None)."""
        x = constrain(self._computed_in(jnp.asarray(x)), self.layernorm_input_axes)
        if self.enable_layernorm and canonical_tuple(self.axis) not in ((-1,), (x.ndim - 1,)):
            raise ValueError(f"LayerNormDenseGeneral.axis: expected -1, the axis of the norm, got {self.axis}")
        options = Norm(self.epsilon, self.zero_centered_gamma)
        normed = gamma = beta = None
        if self.enable_layernorm:
            gamma, beta = self.make_norm_params(
                x.shape[-1],
                self.layernorm_type,
                self.scale_init,
                self.scale_axes,
                self.ln_bias_init,
                self.ln_bias_axes,
                self.zero_centered_gamma,
                self.param_dtype or self.dtype,
            )
        separate = self.return_layernorm_output or self.enable_low_rank_adaptation or bool(self.dot_input_axes)
        if self.enable_layernorm and separate:
            x = normed = constrain(norm(options, x, gamma, beta), self.dot_input_axes)
        x, k_axes = contracted_last(x, self.axis)
        kernel, bias, features = self._make_kernel(x, k_axes)
        quantizers, unused = self.gemm_quantizers("gemm")
        if self.enable_layernorm and normed is None:
            y = layernorm_dense(x, gamma, beta, kernel, bias, norm_options=options, quantizers=quantizers)
        else:
            y = dense(x, kernel, bias, k_axes=k_axes, quantizers=quantizers)
        y = self._finish(y, x, k_axes, features, unused)
        if self.depth_scaling is not None:
            y = y / self.depth_scaling
        returned = (normed if self.enable_layernorm else x) if self.return_layernorm_output else None
        return y, returned
