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
from transformer_engine_jax.ops.dense import (
    Dense,
    Saved,
    arrays,
    check_dense,
    dense,
    dense_backward,
    forward_matmul,
    quantize_gradient,
    save,
)
from transformer_engine_jax.ops.layernorm import Norm, norm_and_input, norm_backward
from transformer_engine_jax.ops.layernorm_dense import check_norm, norm_forward
from transformer_engine_jax.ops.main_grad import Accumulating, claimed, unpacked
from transformer_engine_jax.ops.quantize import Cast, quantize_for, quantize_stack_for
from transformer_engine_jax.quantized import GemmQuantizers, QuantizedTensor


class _Static(NamedTuple):
    norm: Norm | None
    products: tuple[Dense, ...]
    return_input: bool
    split: bool


def _product(
    static: Dense, cast_x: Cast, kernel, bias, main_grad, quantizers: GemmQuantizers, split: bool
) -> tuple[list[jax.Array], Saved]:
    """The results of one kernel [K, N], or [K, P, N], which gives P where they are split."""
    cast = quantize_for(quantizers.kernel, kernel, k_axes=kernel.ndim - 1, q_t=True)
    transposed, accumulation = cast.q_t, quantizers.x.spec.recipe.fp8_gemm_fprop

    def result(kernel_t, bias):
        one = QuantizedTensor(kernel_t, transposed.scale_inv)
        return forward_matmul(cast_x.q, one, bias, 1, static.x_dtype, accumulation)

    if kernel.ndim == 2 or not split:
        results = [result(transposed.data, bias)]
    else:
        results = [result(transposed.data[i], None if bias is None else bias[i]) for i in range(kernel.shape[1])]
    return results, save(static, cast_x, cast, main_grad, quantizers)


def _forward(static: _Static, x, gamma, beta, quantizers: tuple[GemmQuantizers, ...], *parameters):
    quantizer, norm_saved = quantizers[0].x, None
    if static.norm is None:
        cast_x = quantize_for(quantizer, x, q_t=True)
    else:
        cast_x, norm_saved = norm_forward(static.norm, x, gamma, beta, quantizer)
    results, saved = [], []
    for i, (product, of_product) in enumerate(zip(static.products, quantizers)):
        ys, kept = _product(product, cast_x, *parameters[3 * i : 3 * i + 3], of_product, static.split)
        results += ys
        saved.append(kept)
    return (results, x if static.return_input else None), (norm_saved, saved)


def _backward(static: _Static, residuals: tuple, cotangents):
    norm_saved, saved = residuals
    (dys, past), dx = cotangents, None
    dys, parameters, reports = iter(dys), [], []
    for product, kept in zip(static.products, saved):
        if static.split and kept.kernel.data.ndim == 3:
            parts = [next(dys) for _ in range(kept.kernel.data.shape[1])]
            cast_dy = quantize_stack_for(kept.quantizers.grad, parts, colsum=product.bias_dtype is not None)
        else:
            cast_dy = quantize_gradient(product, kept, next(dys))
        dx, of_product, report = dense_backward(product, kept, cast_dy, dx)
        parameters += of_product
        reports.append(report)
    dgamma = dbeta = None
    if static.norm is not None:
        dx, dgamma, dbeta = norm_backward(static.norm, norm_saved, dx, past)
    elif past is not None:
        dx = dx + past
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
      return_input: as in `layernorm_dense`.

    Raises:
      ValueError: the shapes do not fit.
    """
    x, gamma, beta = arrays(x, gamma, beta)
    given, biases = kernels, arrays(*biases)
    kernels, main_grads = zip(*[unpacked("layernorm_projections", kernel) for kernel in given])
    for kernel, bias in zip(kernels, biases, strict=True):
        if kernel.ndim not in (2, 3) or (kernel.ndim == 3 and kernel.shape[1] not in (2, 3)):
            raise ValueError(
                f"layernorm_projections: kernels: expected [K, N], [K, 2, N] or [K, 3, N], got {list(kernel.shape)}"
            )
        check_dense("layernorm_projections", x, kernel, bias, 1)
    if norm_options is not None:
        norm_options = check_norm("layernorm_projections", norm_options, x, gamma, beta)
    if quantizers is None or quantizers[0].x.spec.calibrating:
        (normed, past), results = norm_and_input(norm_options, x, gamma, beta, return_input), []
        for kernel, bias, of_product in zip(given, biases, quantizers or [None] * len(kernels), strict=True):
            y = dense(normed, kernel, bias, quantizers=of_product, by_kernels=norm_options is not None)
            stacked = split and y.ndim > normed.ndim
            results += [y[..., i, :] for i in range(y.shape[-2])] if stacked else [y]
        return results, past
    products, parameters = [], []
    for kernel, bias, main_grad in zip(kernels, biases, main_grads):
        main_grad, adds = claimed(main_grad, x, kernel)
        products.append(Dense.of(x, kernel, bias, 1, adds=adds))
        parameters += [kernel, bias, main_grad]
    static = _Static(norm_options, tuple(products), return_input, split)
    return _fp8_layernorm_projections(static, x, gamma, beta, tuple(quantizers), *parameters)
