"""Buffers in which the gradients of kernels are added up over microbatches, as NNX Variables of their own type."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from transformer_engine_jax.nnx.base import SUFFIX, Fp8Module
from transformer_engine_jax.nnx.state import MainGrad


def main_grads(model: nnx.Module) -> None:
    """Gives the kernels of the model's products buffers, f32 zeros, in place.

    From then on the gradient with respect to te_nnx.TRAINED has a buffer's next value, the buffer plus the gradient of
    its kernel, added by the product that computes it; that of the kernel itself is zero. Each microbatch hands its
    gradients to `update_state`, and `take_main_grads` ends it. A module that a loop uses again and again must be closed
    over: passed with in_axes=None, or to several calls of nnx.jit or nnx.remat in one step, a buffer counts each time.
    Each microbatch must use every kernel that has a buffer: one that goes unused comes out as zeros.

    Args:
      model: any module; buffers are those of the modules of transformer_engine_jax in it, sharded as their kernels,
        unless made by a jitted function on the compiler's axes, which places its results as it likes.
    """
    for _, node in list(nnx.iter_graph(model)):
        if isinstance(node, Fp8Module):
            for name, kernel in list(vars(node).items()):
                if isinstance(kernel, nnx.Param) and name.endswith("kernel") and "lora_" not in name:
                    zeros = jnp.zeros_like(kernel.get_value(), jnp.float32)
                    setattr(node, f"{name}{SUFFIX}", MainGrad(zeros, **kernel.get_metadata()))


def take_main_grads(model: nnx.Module, grads: Any) -> Any:
    """Takes the buffers off the model, in place, and returns the gradients with them in the place of the kernels'.

    Args:
      model: with the buffers of `main_grads` after the last microbatch.
      grads: of its parameters, summed over the microbatches; those of kernels with buffers are not looked at.

    Returns:
      grads for nnx.Optimizer.update.

    Raises:
      ValueError: grads lack a kernel that has a buffer; the buffers are then still there.
    """
    flat = dict(nnx.to_flat_state(grads))
    of_kernel = lambda path: (*path[:-1], path[-1].removesuffix(SUFFIX))
    kernels = [of_kernel(path) for path, _ in nnx.to_flat_state(nnx.state(model, MainGrad))]
    if missing := [".".join(map(str, path)) for path in kernels if path not in flat]:
        raise ValueError(f"take_main_grads: grads: expected those of all kernels with buffers, got none of {missing}")
    for path, buffer in nnx.to_flat_state(nnx.pop(model, MainGrad)):
        flat[of_kernel(path)] = flat[of_kernel(path)].replace(buffer.get_value())
    return nnx.from_flat_state(flat)
