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
    its kernel, added by the product that computes it; that of the kernel itself is of what else a loss makes of it, as
    in a penalty of its norm, and zero without. Each microbatch hands its gradients to `update_state`, and
    `take_main_grads` ends it. Products that share a kernel share its buffer. A module that a loop uses again and again
    must be closed over: passed with in_axes=None, or to several calls of nnx.jit or nnx.remat in one step, a buffer
    counts each time. Each microbatch must use every kernel that has a buffer: one that goes unused comes out as zeros.

    Args:
      model: any module; buffers are those of the modules of transformer_engine_jax in it, sharded as their kernels,
        unless made by a jitted function on the compiler's axes, which places its results as it likes.
    """
    buffers: dict[int, MainGrad] = {}
    for _, node in list(nnx.iter_graph(model)):
        if isinstance(node, Fp8Module):
            for name, kernel in list(vars(node).items()):
                if isinstance(kernel, nnx.Param) and name.endswith("kernel") and "lora_" not in name:
                    if id(kernel) not in buffers:
                        zeros = jnp.zeros_like(kernel.get_value(), jnp.float32)
                        buffers[id(kernel)] = MainGrad(zeros, **kernel.get_metadata())
                    setattr(node, f"{name}{SUFFIX}", buffers[id(kernel)])


def take_main_grads(model: nnx.Module, grads: Any) -> Any:
    """Takes the buffers off the model, in place, and returns the gradients with those of kernels added to them.

    Args:
      model: with the buffers of `main_grads` after the last microbatch.
      grads: of its parameters, summed over the microbatches.

    Returns:
      grads for nnx.Optimizer.update.

    Raises:
      ValueError: grads lack a kernel that has a buffer; the buffers are then still there.
    """
    flat = dict(nnx.to_flat_state(grads))
    paths = {path: same for same in nnx.find_duplicates(model) for path in same}  # of what is tied
    kernels, missing = {}, []
    for path, buffer in nnx.to_flat_state(nnx.state(model, MainGrad)):
        kernel = (*path[:-1], path[-1].removesuffix(SUFFIX))
        found = [other for other in paths.get(kernel, [kernel]) if other in flat]
        missing += [] if found else [".".join(map(str, kernel))]
        kernels |= dict.fromkeys(found[:1], buffer.get_value())
    if missing:
        raise ValueError(f"take_main_grads: grads: expected those of all kernels with buffers, got none of {missing}")
    for _, node in list(nnx.iter_graph(model)):
        if isinstance(node, Fp8Module):
            for name in [name for name, value in vars(node).items() if isinstance(value, MainGrad)]:
                delattr(node, name)
    for path, buffer in kernels.items():
        flat[path] = flat[path].replace(buffer + flat[path].get_value().astype(buffer.dtype))
    return nnx.from_flat_state(flat)
