"""What `dense` and the ops around it ask of what they are given."""

from __future__ import annotations

import numpy as np

from transformer_engine_jax.ops.quantize import FLOATS
from transformer_engine_jax.quantizers import GemmQuantizers


def check_quantizers(op: str, *quantizers: GemmQuantizers | None) -> None:
    """TypeError where they are of another kind, such as a state."""
    for given in quantizers:
        if not isinstance(given, GemmQuantizers | None):
            raise TypeError(
                f"{op}: quantizers: expected None or what te.gemm_quantizers(state) returns, got {type(given).__name__}"
            )


def check_dense(op: str, x, kernel, bias, k_axes: int, quantizers: GemmQuantizers | None) -> None:
    """ValueError where the shapes or dtypes of a dense op do not fit."""
    in_kernels = () if quantizers is None else ("x", "kernel")
    for name, array in (("x", x), ("kernel", kernel), ("bias", bias)):
        if array is None or array.dtype in FLOATS:
            continue
        if name in in_kernels or array.dtype != np.float64:
            raise ValueError(f"{op}: {name}: expected f32, f16 or bf16, got {array.dtype}; convert it first")
    if k_axes < 1:
        raise ValueError(f"{op}: k_axes: expected how many axes are contracted, 1 or more, got {k_axes}")
    if not k_axes < kernel.ndim or x.ndim < k_axes:
        raise ValueError(
            f"{op}: expected x[.., {k_axes} contracted axes] and a kernel with more than {k_axes} axes, "
            f"got x{list(x.shape)} and kernel{list(kernel.shape)}"
        )
    if x.shape[x.ndim - k_axes :] != kernel.shape[:k_axes]:
        raise ValueError(
            f"{op}: kernel has K={list(kernel.shape[:k_axes])} but x has K={list(x.shape[x.ndim - k_axes :])}"
        )
    if bias is not None and bias.shape != kernel.shape[k_axes:]:
        raise ValueError(
            f"{op}: bias: expected the shape {kernel.shape[k_axes:]} of the kernel's outputs, got {bias.shape}"
        )


def check_residual(op: str, residual, shape, dtype) -> None:
    """ValueError where a residual is not like the result that it is added to."""
    if residual.shape != tuple(shape) or residual.dtype != dtype:
        raise ValueError(
            f"{op}: residual: expected {dtype}{list(shape)}, as the result, got {residual.dtype}{list(residual.shape)}"
        )
