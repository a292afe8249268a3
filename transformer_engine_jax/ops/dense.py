"""dense: x @ kernel + bias with FP8 operands: one GEMM forward, and one each for the gradients of x and kernel."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_engine_jax.autocast import current
from transformer_engine_jax.decisions import devices
from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.ops.after import in_turn
from transformer_engine_jax.ops.arrays import arrays
from transformer_engine_jax.ops.dense_checks import check_dense, check_quantizers, check_residual
from transformer_engine_jax.ops.gemm import gemm
from transformer_engine_jax.ops.main_grad import Accumulating, claimed, collected, unpacked
from transformer_engine_jax.ops.product import by_xla, computes, kernel_last, product
from transformer_engine_jax.ops.quantize import (
    FLOATS,
    Cast,
    named,
    observe,
    quantize_for,
    transpose,
    watch,
    watch_gradient,
)
from transformer_engine_jax.ops.transpose import transposed
from transformer_engine_jax.ops.xla_product import xla_product
from transformer_engine_jax.order import all_at_once, computed_once
from transformer_engine_jax.quantized import QuantizedTensor
from transformer_engine_jax.quantizers import GemmQuantizers, Quantizer
from transformer_engine_jax.recipe import MMParams
from transformer_engine_jax.sharding import (
    FREE,
    Axes,
    SequenceShards,
    constrain,
    gathered_axis,
    tensor_parallel,
)


class Dense(NamedTuple):
    """What a dense product needs to know at trace time."""

    k_axes: int
    x_dtype: np.dtype
    kernel_dtype: np.dtype
    bias_dtype: np.dtype | None
    y_dtype: np.dtype | None = None  # of the output; None: x's
    residual: bool = False  # whether there is one to add
    adds: bool | None = None  # whether the kernel's gradient is added to its buffer; None where there is none
    x_axes: Axes = ()  # logical axes of x[m.., k..] in the product, of which m.. are those of the output there
    gathers_x: bool = False  # whether each device has some of x's tokens before the product
    gathers_dy: bool = False  # whether each device has some of the output's behind it
    rounds_wgrad: bool = False  # see autocast's round_wgrad
    by_xla: bool = False  # of 16 bits, see product.by_xla
    x_t_later: bool = False  # whether x's transposed copy is made for the backward pass, and not kept till then
    # Where each device has a shard of the kernel, logical axes of the copy that is gathered: of q[k.., n..], or of
    # q_t[n, k..], by its first axis, so that shards lie one after another.
    q_axes: Axes = ()
    q_t_axes: Axes = ()

    @classmethod
    def of(cls, x, kernel, bias, k_axes: int, kernel_axes: Axes = (), **fields) -> Dense:
        axis = gathered_axis(kernel_axes, kernel.shape)
        if axis == 0:
            fields |= {"q_axes": kernel_axes}
        elif axis == k_axes == kernel.ndim - 1:
            fields |= {"q_t_axes": (kernel_axes[-1], *kernel_axes[:-1])}
        bias_dtype = None if bias is None else np.dtype(bias.dtype)
        fields |= {"rounds_wgrad": current().round_wgrad}
        return cls(k_axes, np.dtype(x.dtype), np.dtype(kernel.dtype), bias_dtype, **fields)

    @property
    def wgrad_dtype(self) -> np.dtype:
        """Of the kernel's gradient as its product yields it."""
        if self.adds is not None:
            return np.dtype(np.float32)
        if not self.rounds_wgrad:
            return self.kernel_dtype
        return min(self.x_dtype, self.kernel_dtype, key=lambda dtype: dtype.itemsize)


class Saved(NamedTuple):
    """What the backward of a dense product needs of its forward."""

    x: QuantizedTensor | None  # [k.., m..]; [m.., k..] where it is gathered; None where it is made later
    kernel: QuantizedTensor  # [k.., n..]; [n, k..] where that is gathered
    x_amax: jax.Array | None  # as Cast.amax
    kernel_amax: jax.Array | None
    main_grad: jax.Array | None  # f32[k.., n..] what the gradient of the kernel is added to
    quantizers: GemmQuantizers


def matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    bias,
    k_axes: int,
    dtype,
    accumulation: MMParams,
    residual=None,
    in_place: bool = False,
) -> jax.Array:
    """a[m.., k..] b[n.., k..]^T + bias[n..] + residual[m.., n..] -> [m.., n..], in_place: in residual's buffer.

    The bias is added as `dtype`, as cuBLASLt has it, and as the field does.
    """
    bias = None if bias is None else bias.astype(dtype)
    return gemm(
        a.data,
        b.data,
        a.scale_inv,
        b.scale_inv,
        bias,
        residual,
        None,
        k_axes=k_axes,
        dtype=dtype,
        split_accumulator=accumulation.use_split_accumulator,
        in_place=in_place,
    ).d


def placed(x: QuantizedTensor, axes: Axes, whole: bool = False) -> QuantizedTensor:
    """x, sharded as its logical axes say, and then whole along the first: what is gathered for that are bytes."""
    if not axes:
        return x
    codes = constrain(jax.lax.bitcast_convert_type(x.data, np.uint8), axes)
    if whole:
        codes = constrain(codes, (None, *axes[1:]), whole=True)
    return dataclasses.replace(x, data=jax.lax.bitcast_convert_type(codes, x.data.dtype))


def forward_matmul(a: QuantizedTensor, b: QuantizedTensor, *args) -> jax.Array:
    """matmul, of operands that a scan may stack."""
    return matmul(*computed_once((a, b), of="quantized"), *args)


def dense_forward(
    static: Dense, cast_x: Cast, kernel, bias, main_grad, quantizers: GemmQuantizers, residual=None
) -> tuple[jax.Array, Saved]:
    """The output, from an input quantized as `quantize_input` does, and what the backward needs."""
    kernel_t, cast_kernel = quantize_kernel(static, kernel, quantizers.kernel)
    recipe = quantizers.x.spec.recipe
    q = placed(cast_x.q, static.x_axes)
    y_dtype = static.y_dtype or static.x_dtype
    y = forward_matmul(q, kernel_t, bias, static.k_axes, y_dtype, recipe.fp8_gemm_fprop, residual)
    y, x = all_at_once(y, kept(static, cast_x))
    return y, save(static, x, cast_x.amax, cast_kernel, main_grad, quantizers)


def kept(static: Dense, cast_x: Cast) -> QuantizedTensor | None:
    """The copy of x that is saved. What is gathered is transposed behind that: XLA needs twice as long to put shards of
    transposed copies in order, and a gradient would be gathered twice."""
    return cast_x.q if static.gathers_x else cast_x.q_t


def save(static: Dense, x, x_amax, cast_kernel: Cast, main_grad, quantizers: GemmQuantizers) -> Saved:
    """What a product's backward needs, under the names that checkpoint policies know."""
    x, x_amax = named(quantizers.x, (x, x_amax))
    kept_kernel = cast_kernel.q_t if static.q_t_axes else cast_kernel.q
    kernel, kernel_amax = named(quantizers.kernel, (kept_kernel, cast_kernel.amax))
    return Saved(x, kernel, x_amax, kernel_amax, main_grad if static.adds else None, quantizers)


def dense_backward(
    static: Dense,
    saved: Saved,
    cast_dy: Cast,
    dx=None,
    then=lambda dx: dx,
    last_up_to: float = 0.0,
    x_t: QuantizedTensor | None = None,
    more: bool = False,
):
    """From a quantized gradient then(that of x, added to `dx`), those of (kernel, bias, main_grad), reports.

    Before `then` comes the kernel's gradient, which lets go of its operands, unless it is `kernel_last`.
    last_up_to: the `most` of that. x_t: the transposed copy of x, where it is gathered already, or only now made.
    more: another product adds to the gradient of x.
    """
    quantizers = saved.quantizers
    recipe, n_axes = quantizers.grad.spec.recipe, saved.kernel.data.ndim - static.k_axes
    m_axes = cast_dy.q.data.ndim - n_axes
    several, partial = devices() > 1, tensor_parallel()
    x_t = gathered_input(static, saved.x, cast_dy) if x_t is None else x_t
    dy, dy_t = _gathered_gradient(static, cast_dy, n_axes)
    # Sums over shards of n are added to each other before their shards are: that is one exchange.
    others, dx = (dx, None) if partial else (None, dx)
    dx = matmul(
        dy, _gathered_kernel(static, saved.kernel, cast_dy), None, n_axes, static.x_dtype, recipe.fp8_gemm_dgrad, dx
    )
    dx = dx if others is None else others + dx
    accumulates = static.adds is not None
    last = kernel_last(static, saved.kernel.data, cast_dy.q.data, last_up_to)
    if last:
        dx, x_t, dy_t = all_at_once(then(dx), x_t, dy_t)
    if static.q_t_axes and not accumulates:  # so that what is scattered lies in order, too
        dkernel = matmul(dy_t, x_t, None, m_axes, static.wgrad_dtype, recipe.fp8_gemm_wgrad)
        dkernel = transpose(constrain(dkernel, static.q_t_axes), static.k_axes)
    else:
        added = dict(residual=saved.main_grad, in_place=bool(static.adds))
        dkernel = matmul(x_t, dy_t, None, m_axes, static.wgrad_dtype, recipe.fp8_gemm_wgrad, **added)
        dkernel = constrain(dkernel, static.q_axes or (*static.q_t_axes[1:], *static.q_t_axes[:1]))
    if not (last or (partial and more)):
        dx, dkernel = in_turn(dx, dkernel) if several else all_at_once(dx, dkernel)
    if not last:
        dx = then(dx)
    dbias = None if static.bias_dtype is None else cast_dy.colsum.astype(static.bias_dtype)
    reports = GemmQuantizers(*observe(quantizers, (saved.x_amax, saved.kernel_amax, cast_dy.amax)))
    gradients = (None, dbias, dkernel) if accumulates else (dkernel.astype(static.kernel_dtype), dbias, None)
    return dx, gradients, reports


def gathered_input(static: Dense, x: QuantizedTensor, cast_dy: Cast) -> QuantizedTensor:
    """The transposed copy of x with all tokens of the product; x is what was `kept`, or that already.

    It is not gathered before the gradient is there: until then each device keeps its own tokens alone.
    """
    if not static.gathers_x and (not static.x_axes or devices() == 1):
        return x
    x, _ = jax.lax.optimization_barrier((x, cast_dy.q))
    if static.gathers_x:
        return transposed(placed(x, static.x_axes), static.k_axes)
    return placed(x, (*static.x_axes[-static.k_axes :], *static.x_axes[: -static.k_axes]))


def _gathered_gradient(static: Dense, cast_dy: Cast, n_axes: int) -> tuple[QuantizedTensor, QuantizedTensor]:
    """dy and its transposed copy, likewise."""
    tokens, free = static.x_axes[: -static.k_axes], (FREE,) * n_axes
    dy, dy_t = cast_dy.q, cast_dy.q_t
    if static.x_axes:
        dy, dy_t = placed(dy, (*tokens, *free)), dy_t and placed(dy_t, (*free, *tokens))
    return dy, transposed(dy, n_axes) if dy_t is None else dy_t


def quantize_kernel(static: Dense, kernel, quantizer: Quantizer) -> tuple[QuantizedTensor, Cast]:
    """([n.., k..] whole, the kernel quantized both ways); one way where it is gathered, and then transposed."""
    n_axes = kernel.ndim - static.k_axes
    cast = quantize_for(quantizer, kernel, k_axes=n_axes, q=not static.q_t_axes, q_t=not static.q_axes)
    if static.q_axes:
        return transposed(placed(cast.q, static.q_axes, whole=True), n_axes), cast
    return placed(cast.q_t, static.q_t_axes, whole=True), cast


def _gathered_kernel(static: Dense, kernel: QuantizedTensor, cast_dy: Cast) -> QuantizedTensor:
    """[k.., n..] whole. Not before the gradient is there, as with the input."""
    if not (static.q_axes or static.q_t_axes):
        return kernel
    kernel, _ = jax.lax.optimization_barrier((kernel, cast_dy.q))
    kernel = placed(kernel, static.q_axes or static.q_t_axes, whole=True)
    return transposed(kernel, static.k_axes) if static.q_t_axes else kernel


def quantize_input(static: Dense, x, quantizer: Quantizer) -> Cast:
    """x quantized both ways, or as it is where it is gathered."""
    return quantize_for(quantizer, x, k_axes=static.k_axes, q_t=not static.gathers_x)


def quantize_gradient(static: Dense, saved: Saved, dy: jax.Array) -> Cast:
    """The gradient of the output likewise, with its column sums where there is a bias."""
    n_axes, biased = saved.kernel.data.ndim - static.k_axes, static.bias_dtype is not None
    return quantize_for(saved.quantizers.grad, dy, k_axes=n_axes, q_t=not static.gathers_dy, colsum=biased)


def _forward(static: Dense, x, kernel, bias, main_grad, quantizers: GemmQuantizers, residual):
    cast_x = quantize_input(static, x, quantizers.x)
    return dense_forward(static, cast_x, kernel, bias, main_grad, quantizers, residual)


def _backward(static: Dense, saved: Saved, dy):
    dx, parameters, reports = dense_backward(static, saved, quantize_gradient(static, saved, dy))
    return dx, *parameters, reports, dy if static.residual else None


_fp8_dense = differentiable(_forward, _backward, gives="product")


def dense(
    x,
    kernel: jax.Array | Accumulating,
    bias=None,
    *,
    k_axes: int = 1,
    quantizers: GemmQuantizers | None = None,
    residual=None,
    by_kernels: bool = False,
    input_axes: Axes = (),
    output_axes: Axes = (),
    kernel_axes: Axes = (),
    preferred_element_type: Any = None,
) -> jax.Array:
    """x[m.., k..] contracted with kernel[k.., n..], plus bias[n..] and residual[m.., n..] -> [m.., n..] in x's dtype.

    Args:
      x: f32, f16 or bf16; without quantizers f64 too.
      kernel: likewise. Accumulating(kernel, main_grad) stands for a kernel whose gradient is added to main_grad, and
        comes out as the gradient of that.
      bias: f32, f16, bf16 or f64, or None; added in the result's.
      k_axes: how many axes are contracted.
      quantizers: how x, kernel and the gradient of the output become FP8; None computes in x's precision.
      residual: the result's dtype, or None; in FP8 it is added inside the product, before the result's one rounding.
      by_kernels: let `product` compute it where it can, which has gradients but no tangents and no second derivatives.
      input_axes, output_axes: logical axes of x and of the result, see `sharding.constrain`. Where tokens of the result
        are sharded over more mesh axes than those of x, the product scatters its sums, and its backward gathers the
        gradient, in FP8 the bytes.
      kernel_axes: those of the kernel. One that FSDP shards is gathered for each product, in FP8 its bytes.
      preferred_element_type: the result's dtype in place of x's; f32 of 16 bits has the sums as they are.

    Raises:
      ValueError: the shapes or dtypes do not fit.
      TypeError: `quantizers` are not of gemm_quantizers.
    """
    check_quantizers("dense", quantizers)
    x, bias, residual = arrays("dense", {"x": x}, bias, residual)
    k_axes = operator.index(k_axes)
    input_axes, output_axes, kernel_axes = input_axes or (), output_axes or (), kernel_axes or ()
    x, m_axes = constrain(x, input_axes), x.ndim - k_axes
    shards = SequenceShards.of(x, output_axes[:m_axes], input_axes[:m_axes])
    y = _dense(
        shards.split(x), kernel, bias, k_axes, quantizers, None if residual is None else shards.split(residual),
        by_kernels, shards.axes(input_axes), shards.gathered, kernel_axes, np.dtype(preferred_element_type or x.dtype),
    )  # fmt: skip
    return shards.join(constrain(y, shards.axes(output_axes, between=True)))


def _dense(
    x,
    kernel,
    bias,
    k_axes: int,
    quantizers,
    residual,
    by_kernels: bool,
    x_axes: Axes,
    gathers_dy: bool,
    kernel_axes: Axes,
    dtype: np.dtype,
) -> jax.Array:
    """`dense`, of arrays and of x as its logical axes say."""
    kernel, main_grad = unpacked("dense", kernel)
    check_dense("dense", x, kernel, bias, k_axes, quantizers)
    if residual is not None:
        check_residual("dense", residual, (*x.shape[: x.ndim - k_axes], *kernel.shape[k_axes:]), dtype)
    main_grad, adds = claimed(main_grad, x, kernel)
    if quantizers is not None and not quantizers.x.spec.calibrating:
        fields = dict(y_dtype=dtype if dtype in FLOATS else np.dtype(np.float32), residual=residual is not None)
        fields |= dict(adds=adds, x_axes=x_axes, gathers_dy=gathers_dy, kernel_axes=kernel_axes)
        static = Dense.of(x, kernel, bias, k_axes, **fields)
        residual = None if residual is None else residual.astype(static.y_dtype)
        return _fp8_dense(static, x, kernel, bias, main_grad, quantizers, residual).astype(dtype)
    if by_kernels and quantizers is None and dtype == x.dtype and computes(x, kernel, k_axes):
        fields = dict(residual=residual is not None, adds=adds, by_xla=by_xla(x, kernel, k_axes))
        static = Dense.of(x, kernel, bias, k_axes, **fields)
        return product(static, x, kernel, bias, main_grad, residual)
    if main_grad is not None:
        kernel = collected(adds, kernel, main_grad)
    if quantizers is not None:
        x, kernel = watch(x, quantizers.x), watch(kernel, quantizers.kernel)
    y = xla_product(x, kernel.astype(x.dtype), bias, k_axes, dtype)
    if residual is not None:
        y = y + residual
    return y if quantizers is None else watch_gradient(y, quantizers.grad)
