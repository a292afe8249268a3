"""layernorm_projections: a norm and several products that read it, as attention's q, k and v.

In FP8 the norm writes its result quantized, once for all products. A kernel of stacked outputs, [K, P, N], gives P
results of their own, so that what reads them needs no copy; nor are their gradients copied together again: the cast
reads them where they are. What reads them out of one array is given one, by one product. The gradients of the input are
added up by the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.ops.arrays import arrays
from transformer_engine_jax.ops.dense import (
    Dense,
    Saved,
    dense,
    dense_backward,
    forward_matmul,
    gathered_input,
    kept,
    placed,
    quantize_gradient,
    quantize_kernel,
    save,
)
from transformer_engine_jax.ops.dense_checks import check_dense
from transformer_engine_jax.ops.layernorm import Norm, checked_norm, norm_and_input, norm_backward
from transformer_engine_jax.ops.layernorm_dense import norm_forward, transposed_now, transposes_later
from transformer_engine_jax.ops.main_grad import Accumulating, claimed, unpacked
from transformer_engine_jax.ops.quantize import quantize_stack_for
from transformer_engine_jax.quantized import QuantizedTensor
from transformer_engine_jax.quantizers import GemmQuantizers
from transformer_engine_jax.sharding import Axes, SequenceShards, constrain


class _Static(NamedTuple):
    norm: Norm | None
    products: tuple[Dense, ...]
    x_axes: Axes
    return_input: bool
    split: bool


def _product(
    static: Dense, x: QuantizedTensor, kept_x, amax, kernel, bias, main_grad, quantizers: GemmQuantizers, split: bool
) -> tuple[list[jax.Array], Saved]:
    """The results of one kernel [K, N], or [K, P, N], which gives P where they are split."""
    transposed, cast = quantize_kernel(static, kernel, quantizers.kernel)
    accumulation = quantizers.x.spec.recipe.fp8_gemm_fprop

    def result(kernel_t, bias):
        one = QuantizedTensor(kernel_t, transposed.scale_inv)
        return forward_matmul(x, one, bias, 1, static.x_dtype, accumulation)

    if kernel.ndim == 2 or not split:
        results = [result(transposed.data, bias)]
    else:
        results = [result(transposed.data[i], None if bias is None else bias[i]) for i in range(kernel.shape[1])]
    return results, save(static, kept_x, amax, cast, main_grad, quantizers)


def _forward(static: _Static, x, gamma, beta, quantizers: tuple[GemmQuantizers, ...], *parameters):
    first = static.products[0]
    cast_x, normed = norm_forward(static.norm, first, x, gamma, beta, quantizers[0].x)
    of_x = placed(cast_x.q, first.x_axes), kept(first, cast_x), cast_x.amax
    results, saved = [], []
    for i, (product, of_product) in enumerate(zip(static.products, quantizers)):
        ys, of_ys = _product(product, *of_x, *parameters[3 * i : 3 * i + 3], of_product, static.split)
        results += ys
        saved.append(of_ys)
    return (results, x if static.return_input else None), (normed, saved)


def _backward(static: _Static, residuals: tuple, cotangents):
    normed, saved = residuals
    (dys, past), dx = cotangents, None
    dys, casts, parameters, reports = iter(dys), [], [], []
    for product, of_ys in zip(static.products, saved):
        if static.split and of_ys.kernel.data.ndim == 3:
            parts = [next(dys) for _ in range(of_ys.kernel.data.shape[1])]
            casts.append(quantize_stack_for(of_ys.quantizers.grad, parts, colsum=product.bias_dtype is not None))
        else:
            casts.append(quantize_gradient(product, of_ys, next(dys)))
    first, of_first, cast = static.products[0], saved[0], casts[0]
    x_t = transposed_now(static.norm, first, normed, of_first.quantizers.x, cast)
    x_t = gathered_input(first, of_first.x, cast) if x_t is None else x_t
    for i, (product, of_ys, cast_dy) in enumerate(zip(static.products, saved, casts), 1):
        dx, of_product, report = dense_backward(product, of_ys, cast_dy, dx, x_t=x_t, more=i < len(saved))
        parameters += of_product
        reports.append(report)
    dx, dgamma, dbeta = norm_backward(static.norm, normed.of_norm, constrain(dx, static.x_axes), past)
    return dx, dgamma, dbeta, tuple(reports), *parameters


_fp8_layernorm_projections = differentiable(_forward, _backward, gives="product")


def layernorm_projections(
    x,
    gamma,
    beta,
    kernels: Sequence[jax.Array | Accumulating],
    biases: Sequence[jax.Array | None],
    *,
    norm_options: Norm | None = Norm(),
    quantizers: Sequence[GemmQuantizers] | None = None,
    return_input: bool = False,
    split: bool = True,
    norm_input_axes: Axes = (),
    dot_input_axes: Axes = (),
    kernel_axes: Sequence[Axes] | None = None,
) -> tuple[list[jax.Array], jax.Array | None]:
    """(norm(x[.., K]) times each kernel, plus its bias; and x itself where return_input asks for it, else None).

    Args:
      x: f32, f16 or bf16; results have its dtype.
      gamma, beta: [K]; beta None makes it an RMSNorm; both None where norm_options is None (no norm).
      kernels: [K, N], which gives one result [.., N]; or [K, P, N] with P 2 or 3, which gives P of them, or one
        [.., P, N] where `split` is False; as in `dense`.
      biases: [N], [P, N] or None, one for each kernel.
      norm_options: epsilon and zero_centered_gamma, or None for no norm.
      quantizers: one for each kernel; the normed x is quantized by the first one's. None computes in x's precision.
      return_input, norm_input_axes, dot_input_axes: as in `layernorm_dense`.
      kernel_axes: logical axes of each kernel, as `dense` has them, or None.

    Raises:
      ValueError: the shapes do not fit.
    """
    x, gamma, beta, *biases = arrays("layernorm_projections", {"x": x}, gamma, beta, *biases)
    x = constrain(x, norm_input_axes)
    shards = SequenceShards.of(x, norm_input_axes[:-1], dot_input_axes[:-1])
    axes = shards.axes(norm_input_axes, between=True), shards.axes(dot_input_axes)
    results, past = _layernorm_projections(
        shards.split(x), gamma, beta, kernels, biases, norm_options, quantizers, return_input, split, axes,
        shards.gathered, kernel_axes or [()] * len(kernels),
    )  # fmt: skip
    return [shards.join(y) for y in results], None if past is None else shards.join(past)


def _layernorm_projections(
    x, gamma, beta, given, biases, norm_options: Norm | None, quantizers, return_input: bool, split: bool,
    axes: tuple[Axes, Axes], gathers_x: bool, kernel_axes: Sequence[Axes],
) -> tuple[list[jax.Array], jax.Array | None]:  # fmt: skip
    """`layernorm_projections`, of arrays and of x as the first logical axes say."""
    x_axes, dot_axes = axes
    if quantizers is not None and len(quantizers) != len(given):
        raise ValueError(
            f"layernorm_projections: quantizers: expected {len(given)}, one for each kernel, got {len(quantizers)}"
        )
    kernels, main_grads = zip(*[unpacked("layernorm_projections", kernel) for kernel in given])
    for kernel, bias, of_product in zip(kernels, biases, quantizers or [None] * len(kernels), strict=True):
        if kernel.ndim not in (2, 3) or (kernel.ndim == 3 and kernel.shape[1] not in (2, 3)):
            raise ValueError(
                f"layernorm_projections: kernels: expected [K, N], [K, 2, N] or [K, 3, N], got {list(kernel.shape)}"
            )
        check_dense("layernorm_projections", x, kernel, bias, 1, of_product)
    if norm_options is not None:
        norm_options, x, gamma, beta = checked_norm("layernorm_projections", norm_options, x, gamma, beta)
    if quantizers is None or quantizers[0].x.spec.calibrating:
        (normed, past), results = norm_and_input(norm_options, x, gamma, beta, return_input), []
        normed = constrain(normed, dot_axes)
        for kernel, bias, of_product in zip(given, biases, quantizers or [None] * len(kernels), strict=True):
            y = dense(normed, kernel, bias, quantizers=of_product, by_kernels=norm_options is not None)
            stacked = split and y.ndim > normed.ndim
            results += [y[..., i, :] for i in range(y.shape[-2])] if stacked else [y]
        return results, past
    later = transposes_later(norm_options, kernels[0], gathers_x, quantizers[0].x)
    products, parameters = [], []
    for kernel, bias, main_grad, axes_of_kernel in zip(kernels, biases, main_grads, kernel_axes, strict=True):
        main_grad, adds = claimed(main_grad, x, kernel)
        fields = dict(adds=adds, x_axes=dot_axes, gathers_x=gathers_x, x_t_later=later)
        products.append(Dense.of(x, kernel, bias, 1, axes_of_kernel, **fields))
        parameters += [kernel, bias, main_grad]
    static = _Static(norm_options, tuple(products), x_axes, return_input, split)
    return _fp8_layernorm_projections(static, x, gamma, beta, tuple(quantizers), *parameters)
