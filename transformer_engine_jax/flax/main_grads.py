"""Buffers in which the gradients of kernels are added up over microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_engine_jax.flax.base import MAIN_GRADS_COLLECTION, MAKES_MAIN_GRADS
from transformer_engine_jax.flax.state import check_model, shapes_of_call


def main_grads(model: nn.Module, variables: Mapping[str, Any], *args, **kwargs) -> dict[str, Any]:
    """Zeros, f32, for the kernels of the model's products: the collection "main_grads". Nothing is computed.

    With the collection among its variables, a model's gradient with respect to a buffer is the buffer plus that of the
    kernel, added by the product that computes it and in place; the gradient of the kernel itself is of what else a loss
    makes of it, as in a penalty of its norm, and zero without. What comes out of a microbatch goes into the next one,
    and `take_main_grads` puts the sums where an optimizer looks for them. Modules may be used several times in a step;
    `te.Accumulating` tells of the exceptions. A buffer has the gradient of the kernel as a product takes it: leave out
    those of parameters that nn.map_variables changes on the way. Each microbatch must use every kernel that has a
    buffer: to JAX the gradient of what is not used is zero, and so is the buffer then.

    Args:
      model: any Linen module; around the modules of transformer_engine_jax in it transforms such as nn.scan must name
        the collection, variable_axes={"params": 0, "main_grads": 0}, else the kernels inside get no buffers.
      variables: of the model. Buffers are boxed as the kernels are, and sharded as they are, unless made by a jitted
        function on the compiler's axes, which places its results as it likes: give it out_shardings.
      args, kwargs: of a call of the model, as `init_state` takes them.

    Returns:
      The buffers, named as the kernels of variables["params"]; those of other modules, such as nn.Dense, have none.
    """
    check_model("main_grads", model, variables)
    rest = {name: value for name, value in variables.items() if name != MAIN_GRADS_COLLECTION}
    token = MAKES_MAIN_GRADS.set(True)
    try:
        needed = shapes_of_call(model, rest, args, kwargs)[0].get(MAIN_GRADS_COLLECTION, {})
    finally:
        MAKES_MAIN_GRADS.reset(token)
    return _zeros(flax.core.unfreeze(needed), variables["params"])


def take_main_grads(main_grads: Mapping[str, Any], grads: Mapping[str, Any]) -> Any:
    """The gradients with those in the buffers added to those of the kernels.

    Args:
      main_grads: the collection, after the last microbatch.
      grads: of the parameters, summed over the microbatches.

    Returns:
      A mapping of the type of `grads`, f32 where there is a buffer.

    Raises:
      ValueError: grads lack a kernel that has a buffer.
    """
    taken = dict(grads)
    for name, inside in main_grads.items():
        if name not in grads:
            raise ValueError(
                f"take_main_grads: grads: expected those of all kernels with buffers, got {sorted(grads)} without "
                f"{name!r}"
            )
        add = take_main_grads if isinstance(inside, Mapping) else partial(jax.tree.map, jnp.add)
        taken[name] = add(inside, grads[name])
    return taken if type(grads) is dict else type(grads)(taken)


def _zeros(needed: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    def buffer(name: str, inside: Any):
        if isinstance(inside, Mapping):
            return _zeros(inside, params[name])
        return jax.tree.map(lambda kernel: jnp.zeros_like(kernel, jnp.float32), params[name])

    return {name: buffer(name, inside) for name, inside in needed.items()}
