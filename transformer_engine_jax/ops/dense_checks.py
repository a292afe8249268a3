"""What `dense` and the ops around it ask of what they are given."""

from __future__ import annotations

import warnings

import jax
import numpy as np

from transformer_engine_jax.ops.quantize import FLOATS
from transformer_engine_jax.quantizers import GemmQuantizers
from transformer_engine_jax.tracing import level_of_user


def check_quantizers(op: str, *quantizers: GemmQuantizers | None) -> None:
    """TypeError where they are of another kind, such as a state."""
    for given in quantizers:
        if not isinstance(given, GemmQuantizers | None):
            raise TypeError(
                f"{op}: quantizers: expected None or what te.gemm_quantizers(state) returns, got {type(given).__name__}"
            )


def check_dense(op: str, x, kernel, bias, k_axes: int, quantizers: GemmQuantizers | None) -> None:
    """ValueError where the shapes or dtypes of a dense op do not fit; a warning where its FP8 state is left out."""
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
    if quantizers is not None and quantizers.x.observed is not None:
        _check_differentiated(x, kernel, quantizers.x.observed)


def _check_differentiated(x, kernel, of_state) -> None:
    """A warning where JAX takes a gradient through a product but not that of its state, which then stays as it is.

    As far as it can be seen: not through a function that is jitted, rematerialised or scanned inside of the gradient.
    """
    for array, what in ((kernel, "a kernel's gradient is taken"), (x, "a gradient is taken through a product")):
        takes_gradient = isinstance(array, jax.core.Tracer) and type(array).__name__ in ("LinearizeTracer", "JVPTracer")
        if takes_gradient and getattr(of_state, "_trace", None) is not array._trace:
            warnings.warn(
                f"FP8: {what} and its state's is not, so the state stays as it is, and so do its "
                "scales. Its next value is its gradient: differentiate with respect to all variables, params and "
                "_overwrite_with_gradient, or in NNX by argnums=nnx.DiffState(0, te_nnx.TRAINED) and "
                "te_nnx.update_state; also where kernels are frozen. A gradient of another loss than that which the "
                "state is trained by, as one inside of it, is for recipe.Float8CurrentScaling() or no FP8",
                RuntimeWarning,
                stacklevel=level_of_user(),
            )
            return


def check_residual(op: str, residual, shape, dtype) -> None:
    """ValueError where a residual is not like the result that it is added to."""
    if residual.shape != tuple(shape) or residual.dtype != dtype:
        raise ValueError(
            f"{op}: residual: expected {dtype}{list(shape)}, as the result, got {residual.dtype}{list(residual.shape)}"
        )
