"""layernorm_dense: a norm and the dense product that reads it; in FP8 the norm writes its result quantized."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax

from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.ops.arrays import arrays
from transformer_engine_jax.ops.dense import (
    Dense,
    Saved,
    dense,
    dense_backward,
    dense_forward,
    gathered_input,
    quantize_gradient,
    quantize_input,
)
from transformer_engine_jax.ops.dense_checks import check_dense, check_quantizers
from transformer_engine_jax.ops.layernorm import (
    Norm,
    NormSaved,
    check_options,
    checked_norm,
    norm_and_input,
    norm_backward,
    norm_kernel,
    statistics,
)
from transformer_engine_jax.ops.main_grad import Accumulating, claimed, unpacked
from transformer_engine_jax.ops.quantize import Cast, Casting, named
from transformer_engine_jax.order import computed_once, in_scanned_layers
from transformer_engine_jax.quantized import QuantizedTensor
from transformer_engine_jax.quantizers import GemmQuantizers, Quantizer
from transformer_engine_jax.sharding import Axes, SequenceShards, constrain


class Normed(NamedTuple):
    """What the backward needs of a norm that writes FP8."""

    of_norm: NormSaved | None  # None where there is no norm
    scale: jax.Array | None  # the operand of the cast, where that is made again for the transposed copy


def transposes_later(static: Norm | None, kernel, gathers_x: bool, quantizer: Quantizer) -> bool:
    """Whether the transposed copy of a norm's result is made for the backward pass, from the norm's input.

    That is kept anyway, for the norm's own backward. To read it again takes 0.3 % of a layer's time, so this is only
    where kernels have 16 bits: Flax's layer in bf16 holds no copies of those, and ours would need more memory.
    """
    unnamed = quantizer.spec.checkpoint_name is None  # else it is promised to what saves it
    return static is not None and kernel.dtype.itemsize == 2 and not gathers_x and unnamed


def norm_forward(static: Norm | None, product: Dense, x, gamma, beta, quantizer: Quantizer) -> tuple[Cast, Normed]:
    """(x[.., K], normed where there is a norm, quantized as the product reads and keeps it; what the backward needs).

    A recipe that needs its amax first takes that and the statistics of rows in a pass of its own, and computes the norm
    again: that moves fewer bytes than to store it in between.
    """
    if static is None:
        return quantize_input(product, x, quantizer), Normed(None, None)
    run = functools.partial(norm_kernel, static, x, gamma, beta)
    measured = None if quantizer.spec.recipe.stateful else run(None, y=False, amax=True)
    casting = Casting.of(quantizer, lambda: measured.amax)
    known = (None, None) if measured is None else computed_once(statistics(measured), of="quantized")
    out = run(casting.scale, *known, y_t=not (product.gathers_x or product.x_t_later), **casting.options)
    saved = named(quantizer, statistics(out) if measured is None else known)
    normed = Normed(NormSaved(x, gamma, beta, *saved), casting.scale if product.x_t_later else None)
    return casting.result(out.y, out.y_t, out), normed


def transposed_now(
    static: Norm | None, product: Dense, normed: Normed, quantizer: Quantizer, cast_dy: Cast
) -> QuantizedTensor | None:
    """The transposed copy [K, ..] of the norm's result where it was left for now, else None.

    Not before the product's quantized gradient is there, which lets go of what that was computed from.
    """
    if not product.x_t_later:
        return None
    x, gamma, beta, mean, rstd = normed.of_norm
    if not in_scanned_layers():
        x, _ = jax.lax.optimization_barrier((x, cast_dy.q))
    cast = dict(dtype=quantizer.spec.dtype, scaling=quantizer.scaling, scale_inv=True)
    out = norm_kernel(static, x, gamma, beta, normed.scale, mean, rstd, y=False, y_t=True, **cast)
    return gathered_input(product, Casting.result(None, out.y_t, out).q_t, cast_dy)


class _Static(NamedTuple):
    norm: Norm
    dense: Dense
    x_axes: Axes
    return_input: bool


def _forward(static: _Static, x, gamma, beta, kernel, bias, main_grad, quantizers: GemmQuantizers):
    cast, normed = norm_forward(static.norm, static.dense, x, gamma, beta, quantizers.x)
    y, saved = dense_forward(static.dense, cast, kernel, bias, main_grad, quantizers)
    return (y, x if static.return_input else None), (normed, saved)


def _backward(static: _Static, residuals: tuple[Normed, Saved], cotangents):
    normed, saved = residuals
    dy, past = cotangents
    cast_dy = quantize_gradient(static.dense, saved, dy)
    x_t = transposed_now(static.norm, static.dense, normed, saved.quantizers.x, cast_dy)
    dnormed, parameters, reports = dense_backward(static.dense, saved, cast_dy, x_t=x_t)
    dx, dgamma, dbeta = norm_backward(static.norm, normed.of_norm, constrain(dnormed, static.x_axes), past)
    return dx, dgamma, dbeta, *parameters, reports


_fp8_layernorm_dense = differentiable(_forward, _backward, gives="product")


def layernorm_dense(
    x,
    gamma,
    beta,
    kernel: jax.Array | Accumulating,
    bias=None,
    *,
    norm_options: Norm = Norm(),
    quantizers: GemmQuantizers | None = None,
    return_input: bool = False,
    norm_input_axes: Axes = (),
    dot_input_axes: Axes = (),
    kernel_axes: Axes = (),
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """norm(x[.., K]) contracted with kernel[K, n..], plus bias[n..] -> [.., n..] in x's dtype.

    Args:
      x: f32, f16 or bf16.
      gamma, beta: [K]; beta None makes it an RMSNorm.
      kernel, bias: as in `dense`; bias may be None.
      norm_options: epsilon and zero_centered_gamma.
      quantizers: how the normed x, kernel and the gradient of the output become FP8; None: x's precision.
      return_input: return (that, x). What is added to this x, a residual connection, has its gradient added to the
        norm's in one pass, and not by a sum of its own.
      norm_input_axes, dot_input_axes: logical axes of x and of what the product reads, see `sharding.constrain`. Tokens
        that are sharded over more mesh axes before the product are gathered for it, in FP8 their bytes, and its
        gradient is scattered.
      kernel_axes: as in `dense`.

    Raises:
      ValueError: the shapes or dtypes do not fit.
      TypeError: `quantizers` are not of gemm_quantizers, or norm_options is no Norm.
    """
    check_quantizers("layernorm_dense", quantizers)
    check_options("layernorm_dense", norm_options)
    x, gamma, beta, bias = arrays("layernorm_dense", {"x": x, "gamma": gamma}, beta, bias)
    norm_input_axes, dot_input_axes, kernel_axes = norm_input_axes or (), dot_input_axes or (), kernel_axes or ()
    x = constrain(x, norm_input_axes)
    shards = SequenceShards.of(x, norm_input_axes[:-1], dot_input_axes[:-1])
    axes = shards.axes(norm_input_axes, between=True), shards.axes(dot_input_axes)
    y, past = _layernorm_dense(
        shards.split(x), gamma, beta, kernel, bias, norm_options, quantizers, return_input, axes, shards.gathered,
        kernel_axes,
    )  # fmt: skip
    y = shards.join(y)
    return (y, shards.join(past)) if return_input else y


def _layernorm_dense(
    x,
    gamma,
    beta,
    kernel,
    bias,
    norm_options: Norm,
    quantizers,
    return_input: bool,
    axes: tuple[Axes, Axes],
    gathers_x: bool,
    kernel_axes: Axes,
) -> tuple[jax.Array, jax.Array | None]:
    """`layernorm_dense`, of arrays and of x as the first logical axes say."""
    x_axes, dot_axes = axes
    if quantizers is None or quantizers.x.spec.calibrating:
        normed, past = norm_and_input(norm_options, x, gamma, beta, return_input)
        return dense(normed, kernel, bias, quantizers=quantizers, by_kernels=True, input_axes=dot_axes), past
    norm_options, x, gamma, beta = checked_norm("layernorm_dense", norm_options, x, gamma, beta)
    kernel, main_grad = unpacked("layernorm_dense", kernel)
    check_dense("layernorm_dense", x, kernel, bias, 1, quantizers)
    main_grad, adds = claimed(main_grad, x, kernel)
    later = transposes_later(norm_options, kernel, gathers_x, quantizers.x)
    fields = dict(adds=adds, x_axes=dot_axes, gathers_x=gathers_x, x_t_later=later)
    product = Dense.of(x, kernel, bias, 1, kernel_axes, **fields)
    static = _Static(norm_options, product, x_axes, return_input)
    return _fp8_layernorm_dense(static, x, gamma, beta, kernel, bias, main_grad, quantizers)
