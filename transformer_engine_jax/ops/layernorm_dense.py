"""layernorm_dense: a norm and the dense product that reads it; in FP8 the norm writes its result quantized."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax

from transformer_engine_jax.differentiable import computed_once, differentiable
from transformer_engine_jax.ops.dense import (
    Dense,
    Saved,
    arrays,
    check_dense,
    dense,
    dense_backward,
    dense_forward,
    quantize_gradient,
)
from transformer_engine_jax.ops.layernorm import (
    Norm,
    NormSaved,
    checked_norm,
    norm_and_input,
    norm_backward,
    norm_kernel,
    statistics,
)
from transformer_engine_jax.ops.main_grad import Accumulating, claimed, unpacked
from transformer_engine_jax.ops.quantize import Cast, Casting, named
from transformer_engine_jax.quantizers import GemmQuantizers, Quantizer
from transformer_engine_jax.sharding import Axes, SequenceShards, constrain


def check_norm(op: str, static: Norm, x, gamma, beta) -> Norm:
    """The options of a norm (of an RMSNorm where beta is None); ValueError where they, shapes or dtypes do not fit."""
    checked_norm(op, x, gamma=gamma, **({} if beta is None else {"beta": beta}))
    return static.checked(op)


def norm_forward(static: Norm, x, gamma, beta, quantizer: Quantizer, transposed: bool = True) -> tuple[Cast, NormSaved]:
    """The norm of x[.., K], quantized both ways in the pass that computes it, and what its backward needs.

    A recipe that needs its amax first takes that and the statistics of rows in a pass of its own, and computes the norm
    again: that moves fewer bytes than to store it in between.
    """
    run = functools.partial(norm_kernel, static, x, gamma, beta)
    measured = None if quantizer.spec.recipe.stateful else run(None, y=False, amax=True)
    casting = Casting.of(quantizer, lambda: measured.amax)
    known = (None, None) if measured is None else computed_once(statistics(measured), of="quantized")
    out = run(casting.scale, *known, y_t=transposed, **casting.options)
    saved = named(quantizer, statistics(out) if measured is None else known)
    return casting.result(out.y, out.y_t, out), NormSaved(x, gamma, beta, *saved)


class _Static(NamedTuple):
    norm: Norm
    dense: Dense
    x_axes: Axes
    return_input: bool


def _forward(static: _Static, x, gamma, beta, kernel, bias, main_grad, quantizers: GemmQuantizers):
    cast, norm_saved = norm_forward(static.norm, x, gamma, beta, quantizers.x, not static.dense.gathers_x)
    y, saved = dense_forward(static.dense, cast, kernel, bias, main_grad, quantizers)
    return (y, x if static.return_input else None), (norm_saved, saved)


def _backward(static: _Static, residuals: tuple[NormSaved, Saved], cotangents):
    norm_saved, saved = residuals
    dy, past = cotangents
    cast_dy = quantize_gradient(static.dense, saved, dy)
    dnormed, parameters, reports = dense_backward(static.dense, saved, cast_dy)
    dx, dgamma, dbeta = norm_backward(static.norm, norm_saved, constrain(dnormed, static.x_axes), past)
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
      kernel, bias: any float dtype, as in `dense`; bias may be None.
      norm_options: epsilon and zero_centered_gamma.
      quantizers: how the normed x, kernel and the gradient of the output become FP8; None: x's precision.
      return_input: return (that, x). What is added to this x, a residual connection, has its gradient added to the
        norm's in one pass, and not by a sum of its own.
      norm_input_axes, dot_input_axes: logical axes of x and of what the product reads, see `sharding.constrain`. Tokens
        that are sharded over more mesh axes before the product are gathered for it, in FP8 their bytes, and its
        gradient is scattered.
      kernel_axes: as in `dense`.

    Raises:
      ValueError: the shapes do not fit.
    """
    x, gamma, beta, bias = arrays(x, gamma, beta, bias)
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
    norm_options = check_norm("layernorm_dense", norm_options, x, gamma, beta)
    kernel, main_grad = unpacked("layernorm_dense", kernel)
    check_dense("layernorm_dense", x, kernel, bias, 1)
    main_grad, adds = claimed(main_grad, x, kernel)
    product = Dense.of(x, kernel, bias, 1, kernel_axes, adds=adds, x_axes=dot_axes, gathers_x=gathers_x)
    static = _Static(norm_options, product, x_axes, return_input)
    return _fp8_layernorm_dense(static, x, gamma, beta, kernel, bias, main_grad, quantizers)
