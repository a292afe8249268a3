"""Differentiable ops from their two passes.

The only module that gives ops gradients by custom_vjp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import partial_eval

from transformer_engine_jax.alignment import align
from transformer_engine_jax.order import all_at_once, computed_once
from transformer_engine_jax.stored import is_array, restored, stored


def differentiable(forward: Callable, backward: Callable, gives: str | None = None, waits: bool = True) -> Callable:
    """An op from its two passes: ``op(static, *args)``.

    Args:
      forward: (static, *args) -> (output, residuals).
      backward: (static, residuals, cotangent of the output) -> one cotangent (a pytree, or None) per arg.
      gives: what the output is to checkpoint policies, see computed_once.
      waits: whether the backward is computed when all it needs is there. Of a few numbers, zeros that XLA can see are
        worth more.

    `static` is any hashable value: what the op needs to know at trace time, grouped in one place. Inside a manual
    shard_map, args that are arrays get summed cotangents where they are replicated; for other pytrees (states)
    the backward itself must return what is the same on every shard.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def op(static, *args):
        return computed_once(_output(forward, static, args), args, of=gives)

    def op_forward(static, *args):
        out, residuals = forward(static, *args)
        once = computed_once(out, args, of=gives)
        kept = dict(zip(map(id, jax.tree.leaves(out)), jax.tree.leaves(once)))
        out, residuals = once, jax.tree.map(lambda x: kept.get(id(x), x), residuals)
        shardings = _Shardings(jax.typeof(x).sharding if is_array(x) else None for x in args)
        return out, (stored(residuals), shardings)

    def op_backward(static, saved, cotangent):
        residuals, shardings = saved
        residuals = restored(residuals)
        if waits:  # a cotangent that is given early, for the forward
            residuals, cotangent = all_at_once(residuals, cotangent)
        return tuple(map(_resharded, backward(static, residuals, cotangent), shardings))

    op.defvjp(op_forward, op_backward)

    @functools.wraps(forward)
    def aligned(static, *args):
        arrays = iter(align(*[x for x in args if is_array(x)]))
        return op(static, *[next(arrays) if is_array(x) else x for x in args])

    return aligned


def _output(forward: Callable, static, args: tuple) -> Any:
    """forward's output, traced without what only a backward pass needs, as transposed copies that kernels make too."""
    leaves, tree = jax.tree.flatten(args)
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
        return forward(static, *args)[0]
    output = lambda *leaves: forward(static, *jax.tree.unflatten(tree, leaves))[0]
    traced, shapes = jax.make_jaxpr(output, return_shape=True)(*leaves)
    shapes, out_tree = jax.tree.flatten(shapes)
    needed, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(shapes), instantiate=True)
    return jax.tree.unflatten(out_tree, jax.core.eval_jaxpr(needed, traced.consts, *leaves))


@jax.tree_util.register_static
class _Shardings(tuple):
    """Shardings of an op's arguments, None where one is not an array, as a static residual."""


def _resharded(cotangent, sharding):
    """The cotangent as its argument is sharded: a kernel's gradient under FSDP comes out whole. Explicit axes only."""
    if cotangent is None or sharding is None or sharding.mesh.empty or jax.typeof(cotangent).sharding == sharding:
        return cotangent
    return jax.sharding.reshard(cotangent, sharding)
