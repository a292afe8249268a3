"""DenseGeneral, and LayerNormDenseGeneral, whose norm writes FP8 directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.flax.base import (
    Fp8Module,
    canonical_tuple,
    default_kernel_init,
    flat_kernel_init,
    last_size,
)
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.layernorm import Norm, norm
from transformer_engine_jax.ops.layernorm_dense import layernorm_dense
from transformer_engine_jax.ops.main_grad import Accumulating
from transformer_engine_jax.precision import Product, in_fp8
from transformer_engine_jax.quantizers import GemmQuantizers, keep
from transformer_engine_jax.sharding import constrain


def contracted_last(x: jax.Array, axis) -> tuple[jax.Array, int]:
    """x with the axes to contract moved to its end, and their number."""
    axes = tuple(a % x.ndim if -x.ndim <= a < x.ndim else x.ndim for a in canonical_tuple(axis))
    if x.ndim in axes or len(set(axes)) != len(axes):
        raise ValueError(f"DenseGeneral.axis: expected distinct axes of x{list(x.shape)}, got {axis}")
    last = tuple(range(x.ndim - len(axes), x.ndim))
    return (x if axes == last else jnp.moveaxis(x, axes, last)), len(axes)


def axes_contracted_last(names, axis) -> tuple:
    """The logical axes of what `contracted_last` gives, from those of its x; () where there are none."""
    names = names or ()
    axes = [a % len(names) for a in canonical_tuple(axis)] if names else []
    return tuple(name for a, name in enumerate(names) if a not in axes) + tuple(names[a] for a in axes)


ParametersSplit = Sequence[str] | Mapping[str, int]


def split_sizes(module: str, split: ParametersSplit | None, features: int) -> dict[str, int]:
    """Prefix of a parameter's name -> its share of `features`; one share without a prefix where nothing is split."""
    if split is None:
        return {"": features}
    if isinstance(split, str):
        raise ValueError(f"{module}.parameters_split: expected a list of names, such as [{split!r}], got a string")
    share = dict(split) if isinstance(split, Mapping) else dict.fromkeys(split, features // max(len(split), 1))
    sizes = {f"{name.rstrip('_')}_": size for name, size in share.items()}
    if len(sizes) != len(split) or sum(sizes.values()) != features or min(sizes.values(), default=0) < 1:
        raise ValueError(
            f"{module}.parameters_split: expected distinct names whose sizes add up to the {features} of the first "
            f"output axis, or names that share it equally, got {split!r}"
        )
    return sizes


def joined(parts: Sequence[jax.Array], axis: int) -> jax.Array | None:
    """The parts side by side, None where there are none."""
    return (jnp.concatenate(parts, axis) if len(parts) > 1 else parts[0]) if parts else None


Kernel = jax.Array | Accumulating


def joined_kernels(kernels: Sequence[Kernel], axis: int) -> Kernel:
    """The kernels side by side, and so their buffers, which all have or none."""
    if not any(isinstance(kernel, Accumulating) for kernel in kernels):
        return joined(kernels, axis)
    if not all(isinstance(kernel, Accumulating) for kernel in kernels):
        raise ValueError("main_grads: expected a buffer for each kernel of one product, or for none of them")
    return Accumulating(joined([k.kernel for k in kernels], axis), joined([k.main_grad for k in kernels], axis))


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

    def _make_kernel(self, x: jax.Array, k_axes: int) -> tuple[Kernel, jax.Array | None, tuple[int, ...]]:
        """(kernel, bias or None, features) for x, whose last k_axes axes are contracted."""
        features = canonical_tuple(self.features)
        if not features or not all(isinstance(f, int | np.integer) and f > 0 for f in features):
            raise ValueError(f"{type(self).__name__}.features: expected positive sizes, got {self.features!r}")
        dtype = self.param_dtype or self.dtype
        inputs = x.shape[x.ndim - k_axes :]
        init = self.kernel_init or flat_kernel_init(default_kernel_init, k_axes)
        kernels, biases = [], []
        for prefix, size in split_sizes(type(self).__name__, self.parameters_split, features[0]).items():
            part = (size, *features[1:])
            kernels.append(self.make_kernel(f"{prefix}kernel", init, self.kernel_axes, inputs + part, dtype))
            if self.use_bias:
                biases.append(self.make_param(f"{prefix}bias", self.bias_init, self.bias_axes, part, dtype))
        return joined_kernels(kernels, k_axes), joined(biases, 0), features

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
    input_axes, output_axes: logical axes of x and of y. return_bias: return (y, bias) with the bias not added.
    low_rank_adaptation_*: LoRA beside the kernel. parameters_split: names, or names and sizes, of slices of the first
    output axis that are parameters of their own, `<name>_kernel` and `<name>_bias`; they are one product.
    quantization_checkpoint_name: the name of what is quantized for checkpoint policies.
    """

    input_axes: tuple[str | None, ...] = ()
    output_axes: tuple[str | None, ...] = ()
    return_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, residual: jax.Array | None = None):
        """x[.., contracted..] (+ residual) -> [.., features..] in x's dtype, or (that, bias) with return_bias.

        residual: [.., features..] in x's dtype, added inside the product.
        """
        x = self._computed_in(jnp.asarray(x))
        input_axes = axes_contracted_last(self.input_axes, self.axis)
        x, k_axes = contracted_last(x, self.axis)
        kernel, bias, features = self._make_kernel(x, k_axes)
        fp8, scope = in_fp8([Product.of(x, k_axes, features)])
        quantizers, unused = self.gemm_quantizers("gemm", fp8, self.quantization_checkpoint_name)
        added = None if self.return_bias else bias
        with scope:
            y = dense(
                x, kernel, added, k_axes=k_axes, quantizers=quantizers, residual=residual,
                by_kernels=residual is not None, input_axes=input_axes, output_axes=self.output_axes,
                kernel_axes=self.kernel_axes,
            )  # fmt: skip
        y = self._finish(y, x, k_axes, features, unused)
        return (y, bias) if self.return_bias else y


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
    one pass: the norm's output is then kept in high precision too. depth_scaling: y is divided by it.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array | None, ...]:
        """x[.., K] -> ([.., features..] in x's dtype, [.., K] or None)."""
        x = self._computed_in(jnp.asarray(x))
        if self.enable_layernorm and canonical_tuple(self.axis) not in ((-1,), (x.ndim - 1,)):
            raise ValueError(f"LayerNormDenseGeneral.axis: expected -1, the axis of the norm, got {self.axis}")
        options = Norm(self.epsilon, self.zero_centered_gamma)
        gamma, beta = self.make_norm(last_size(self, x), self.param_dtype or self.dtype)
        separate = self.return_layernorm_output or self.enable_low_rank_adaptation
        fused = self.enable_layernorm and not separate
        if not fused:
            x = constrain(x, self.layernorm_input_axes)
        if self.enable_layernorm and separate:
            x = norm(options, x, gamma, beta)
        returned = x if self.return_layernorm_output else None
        x, k_axes = contracted_last(x, self.axis)
        kernel, bias, features = self._make_kernel(x, k_axes)
        fp8, scope = in_fp8([Product.of(x, k_axes, features)])
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
        y = self._finish(y, x, k_axes, features, unused)
        if self.depth_scaling is not None:
            y, bias = y / self.depth_scaling, None if bias is None else bias / self.depth_scaling
        return (y, bias, returned) if self.return_bias else (y, returned)


class ProjectionParts(NamedTuple):
    """What a LayerNormDenseGeneral computes with; None for what it has not."""

    gamma: jax.Array | None
    beta: jax.Array | None
    kernel: Kernel
    kernel_axes: tuple[str | None, ...]
    bias: jax.Array | None
    quantizers: GemmQuantizers | None
    unused: Any  # states


class Projection(_LayerNormDense):
    """A LayerNormDenseGeneral of x[.., inputs] that another module computes, together with others: its `parts`."""

    inputs: int = 0
    fp8: bool = False  # whether autocast applies

    def setup(self):
        x = jax.ShapeDtypeStruct((self.inputs,), jnp.float32)
        norm = self.make_norm(
            self.inputs, self.param_dtype or self.dtype
        )  # in the order of LayerNormDenseGeneral, on which initial values depend
        kernel, bias, _ = self._make_kernel(x, 1)
        quantizers = self.gemm_quantizers("gemm", self.fp8, self.quantization_checkpoint_name)
        self.parts = ProjectionParts(*norm, kernel, self.kernel_axes, bias, *quantizers)
