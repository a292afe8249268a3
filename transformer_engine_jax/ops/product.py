"""product: x @ kernel + bias + residual in 16 bits, and its gradients' products, in layers, on one GPU.

By cuBLASLt: algorithms are timed, biases and residual additions are epilogues, and operands are read as they lie. XLA
adds a bias in a pass of its own; and a CUDA graph waits 5 us where a kernel of cuBLAS has a counter cleared first. But
few tokens are XLA's, in the same order.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.decisions import devices, few, platform
from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.ops.gemm import gemm
from transformer_engine_jax.ops.xla_product import xla_product
from transformer_engine_jax.order import all_at_once, in_scan, in_scanned_layers, of_scanned_layers


def computes(x, kernel, k_axes: int) -> bool:
    """Whether it computes these: 16 bits, on one GPU; over several, XLA hides collectives behind its own products.

    In a scan over tokens few of them have dense's in plain JAX, which XLA fuses with what is around.
    """
    fits = x.dtype in (jnp.bfloat16, jnp.float16) and x.size > 0 and kernel.size > 0
    return fits and platform() == "gpu" and devices() == 1 and not (in_scan() and by_xla(x, kernel, k_axes))


def by_xla(x, kernel, k_axes: int) -> bool:
    """Whether it leaves the products to XLA: of few tokens, but not in scanned layers.

    There XLA copies a kernel out of its stack, or converts the whole stack, where cuBLASLt reads it in its place. Four
    of llama's layers then take 0.65 ms for 1.45 forward, of 8 tokens in 16 bits, and 6.7 for 9.0 with all gradients, of
    64 and kernels in f32.
    """
    tokens, converted = math.prod(x.shape[: x.ndim - k_axes]), kernel.dtype != x.dtype
    return few(tokens, converted) and not of_scanned_layers(kernel, x)


def _last(x, axes: int) -> jax.Array:
    """x with its first axes last: a view, for an operand that CUDA reads as x lies."""
    return jnp.moveaxis(x, range(axes), range(-axes, 0))


def _forward(static, x, kernel, bias, main_grad, residual):
    given, kernel = kernel, kernel.astype(x.dtype)
    if static.by_xla:
        y = xla_product(x, kernel, bias, static.k_axes, x.dtype)
        return y if residual is None else y + residual, (x, kernel, main_grad if static.adds else None)
    bias = None if bias is None else bias.astype(x.dtype)
    options = dict(k_axes=static.k_axes, dtype=x.dtype, k_first="b")
    y = gemm(x, _last(kernel, static.k_axes), None, None, bias, residual, None, **options).d
    # A scan has the kernels as they are given, and would stack them once more in 16 bits.
    again = in_scanned_layers() or _converts_again(static, kernel, y)
    return y, (x, given if again else kernel, main_grad if static.adds else None)


def kernel_last(static, kernel, y, most: float = math.inf) -> bool:
    """Whether the kernel's gradient comes after that of the input, whenever XLA will; y is the output, or its gradient.

    That is on one device, where it is larger than its operands, up to `most` times, as tokens are few for the size of
    the kernel. XLA keeps what a step holds meanwhile, as the copy of the kernel that the other gradient reads, in the
    buffers of gradients that are not there yet. A layer of llama's with 1024 tokens then takes 0.14 GiB of temporaries
    in bf16 for 0.30, and a training step of three of gpt3-13b's 4.0 for 4.3, under delayed scaling 3.7 for 4.1.
    """
    (k, n), tokens = _sizes(static, kernel), math.prod(y.shape[: y.ndim - kernel.ndim + static.k_axes])
    if not isinstance(tokens, int):  # known at run time only, of what is exported
        return False
    gradient, operands = static.wgrad_dtype.itemsize * k * n, y.dtype.itemsize * tokens * (k + n)
    return devices() == 1 and static.adds is None and operands < gradient <= most * operands


def _converts_again(static, kernel, y) -> bool:
    """Whether the backward pass converts the kernel to 16 bits once more, and it is not kept till then.

    Where the gradient comes last, of a kernel that is two or three for one input, as that of queries, keys and values:
    what is kept of it outlives all else of a layer. It takes 1 % of gpt3-13b's layer, and saves a fifth of its
    temporaries; those of an MLP would take more than twice as much, and save less. A training step with gradients of 16
    bits has the room: four layers of gpt's with 1024 tokens then need 2.05 GiB of temporaries for 1.67, Flax's 2.24.
    """
    k, n = _sizes(static, kernel)
    return not static.rounds_wgrad and k < n <= 3 * k and kernel_last(static, kernel, y)


def _sizes(static, kernel) -> tuple[int, int]:
    """Of the axes of a kernel that are contracted, and of the others."""
    return math.prod(kernel.shape[: static.k_axes]), math.prod(kernel.shape[static.k_axes :])


def _gradient_dtype(static, x, kernel) -> np.dtype:
    """Of the kernel's gradient as its product yields it: that wanted, or 16 bits to be converted.

    In f32 it saves the conversion, 1 to 3 % of a layer; XLA converts as it writes. But where the kernel widens and its
    gradient of f32 has room for the output of 16 bits, XLA keeps that there for as long as the gradient is not written;
    and converts it where an optimizer reads it, for less memory and time of a training step.
    """
    if static.adds is not None or static.rounds_wgrad:
        return static.wgrad_dtype
    if static.by_xla:
        return x.dtype
    k, n = _sizes(static, kernel)
    m = x.size // k
    at_once = static.kernel_dtype == np.float32 and (n <= k or m > 2 * k)
    return static.kernel_dtype if at_once else x.dtype


def _backward(static, residuals, dy):
    x, kernel, main_grad = residuals
    kernel = kernel.astype(x.dtype)
    n_axes, m_axes = kernel.ndim - static.k_axes, x.ndim - static.k_axes

    def kernel_gradient(x, dy):
        dtype = _gradient_dtype(static, x, kernel)
        if static.by_xla:
            dkernel = xla_product(_last(x, m_axes), dy, None, m_axes, dtype)
            return main_grad + dkernel if static.adds else dkernel
        options = dict(k_axes=m_axes, dtype=dtype, k_first="ab", in_place=bool(static.adds))
        return gemm(_last(x, m_axes), _last(dy, m_axes), None, None, None, main_grad, None, **options).d

    def input_gradient(dy):
        if static.by_xla:
            return xla_product(dy, _last(kernel, static.k_axes), None, n_axes, x.dtype)
        return gemm(dy, kernel, *[None] * 5, k_axes=n_axes, dtype=x.dtype).d

    if kernel_last(static, kernel, dy):
        dx, *operands = all_at_once(input_gradient(dy), x, dy)
        dkernel = kernel_gradient(*operands)
    else:
        after, dkernel = all_at_once(dy, kernel_gradient(x, dy))  # which lets go of x before dx takes its room
        dx = input_gradient(after)
    dbias = None
    if static.bias_dtype is not None:
        dbias = jnp.sum(dy, axis=tuple(range(m_axes)), dtype=np.float32).astype(static.bias_dtype)
    of_kernel, of_buffer = (dkernel.astype(static.kernel_dtype), None) if static.adds is None else (None, dkernel)
    return dx, of_kernel, dbias, of_buffer, dy if static.residual else None


# (static: ops.dense.Dense, x[m.., k..], kernel[k.., n..], bias[n..], main_grad[k.., n..], residual[m.., n..])
# -> [m.., n..] in x's dtype.
product = differentiable(_forward, _backward, gives="product")
