"""DenseGeneral, and LayerNormDenseGeneral, whose norm writes FP8 directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_engine_jax.modules.checks import canonical_tuple
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.layernorm import Norm, norm
from transformer_engine_jax.ops.layernorm_dense import layernorm_dense
from transformer_engine_jax.ops.main_grad import Accumulating
from transformer_engine_jax.precision import Product, in_fp8
from transformer_engine_jax.quantizers import GemmQuantizers, keep
from transformer_engine_jax.sharding import constrain, sharded_as


def contracted_axes(x: jax.Array, axis) -> tuple[int, ...]:
    """The axes of x to contract, counted from 0."""
    axes = tuple(a % x.ndim if -x.ndim <= a < x.ndim else x.ndim for a in canonical_tuple(axis))
    if x.ndim in axes or len(set(axes)) != len(axes):
        raise ValueError(f"DenseGeneral.axis: expected distinct axes of x{list(x.shape)}, got {axis}")
    return axes


def contracted_last(x: jax.Array, axis) -> tuple[jax.Array, int]:
    """x with the axes to contract moved to its end, and their number."""
    axes = contracted_axes(x, axis)
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
    named = all(isinstance(name, str) for name in share)
    sizes = {f"{name.rstrip('_')}_": size for name, size in share.items()} if named else {}
    if len(sizes) != len(split) or sum(sizes.values()) != features or min(sizes.values(), default=0) < 1:
        raise ValueError(
            f"{module}.parameters_split: expected distinct names whose sizes add up to the {features} of the first "
            f"output axis, as {{name: size}}, or names that share it equally, got {split!r}"
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


class ProjectionParts(NamedTuple):
    """What a LayerNormDenseGeneral computes with; None for what it has not."""

    gamma: jax.Array | None
    beta: jax.Array | None
    kernel: Kernel
    kernel_axes: tuple[str | None, ...]
    bias: jax.Array | None
    quantizers: GemmQuantizers | None
    unused: Any  # states


def computed_in(module: Any, x) -> jax.Array:
    """x as a dense module computes with it."""
    x = jnp.asarray(x)
    # `dtype` names the parameters' dtype, and x brings its own, unless param_dtype frees `dtype` for x.
    return x if module.param_dtype is None else x.astype(module.dtype)


Adapt = Callable[[jax.Array, int], jax.Array]


def run_dense(
    module: Any,
    x: jax.Array,
    kernel: Kernel,
    bias: jax.Array | None,
    adapt: Adapt | None,
    residual: jax.Array | None = None,
):
    """What a DenseGeneral returns for x.

    adapt: the LoRA branch, of x with the axes to contract last and their number.
    """

    def product(x, k_axes, quantizers, bias):
        return dense(
            x, kernel, bias, k_axes=k_axes, quantizers=quantizers, residual=residual,
            by_kernels=residual is not None, input_axes=axes_contracted_last(module.input_axes, module.axis),
            output_axes=module.output_axes, kernel_axes=module.kernel_axes,
        )  # fmt: skip

    y, bias = _run(module, x, product, bias, adapt)
    return (y, bias) if module.return_bias else y


def run_layernorm_dense(
    module: Any,
    x: jax.Array,
    gamma: jax.Array | None,
    beta: jax.Array | None,
    kernel: Kernel,
    bias: jax.Array | None,
    adapt: Adapt | None,
) -> tuple[jax.Array | None, ...]:
    """What a LayerNormDenseGeneral returns for x; adapt: as of `run_dense`."""
    options = Norm(module.epsilon, module.zero_centered_gamma)
    separate = module.return_layernorm_output or adapt is not None
    fused = module.enable_layernorm and not separate
    if not fused:
        x = constrain(x, module.layernorm_input_axes)
    if module.enable_layernorm and separate:
        x = norm(options, x, gamma, beta)
    normed = x if module.return_layernorm_output else None

    def product(x, k_axes, quantizers, bias):
        if fused:
            return layernorm_dense(
                x, gamma, beta, kernel, bias, norm_options=options, quantizers=quantizers,
                norm_input_axes=module.layernorm_input_axes, dot_input_axes=module.dot_input_axes,
                kernel_axes=module.kernel_axes,
            )  # fmt: skip
        return dense(
            x, kernel, bias, k_axes=k_axes, quantizers=quantizers, kernel_axes=module.kernel_axes,
            input_axes=axes_contracted_last(module.dot_input_axes, module.axis),
        )  # fmt: skip

    y, bias = _run(module, x, product, bias, adapt, casts_x=not fused)
    if module.depth_scaling is not None:
        y, bias = y / module.depth_scaling, None if bias is None else bias / module.depth_scaling
    return (y, bias, normed) if module.return_bias else (y, normed)


def _run(
    module: Any, x, product: Callable, bias, adapt: Adapt | None, casts_x: bool = True
) -> tuple[jax.Array, jax.Array | None]:
    """(the product of x, with its bias unless the module returns that; the bias)."""
    x, k_axes = contracted_last(x, module.axis)
    of = canonical_tuple(module.features), module.param_dtype or module.dtype
    fp8, scope = in_fp8([Product.of(x, k_axes, *of, casts_x=casts_x)])
    quantizers, unused = module.gemm_quantizers("gemm", fp8, module.quantization_checkpoint_name)
    with scope:
        y = product(x, k_axes, quantizers, None if module.return_bias else bias)
    return keep(y if adapt is None else y + sharded_as(adapt(x, k_axes), y), unused), bias
