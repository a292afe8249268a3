"""Differentiable ops from their two passes.

The only module that gives ops gradients by custom_vjp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from transformer_engine_jax.alignment import align
from transformer_engine_jax.order import all_at_once, computed_once, without_unused
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
        return _batched_alike(computed_once(_output(forward, static, args), args, of=gives))

    def op_forward(static, *args):
        out, residuals = forward(static, *args)
        once = computed_once(out, args, of=gives)
        kept = dict(zip(map(id, jax.tree.leaves(out)), jax.tree.leaves(once)))
        out, residuals = once, jax.tree.map(lambda x: kept.get(id(x), x), residuals)
        shardings = _Shardings(jax.typeof(x).sharding if is_array(x) else None for x in args)
        return _batched_alike(out), (stored(residuals), shardings)

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


def _batched_alike(output: Any) -> Any:
    """The output, of which vmap batches all arrays where it batches one.

    Of an array that it does not batch, as an x that is passed on beside results of batched parameters, JAX has the sum
    of the examples' cotangents, gives that to the backward pass of each, and adds up what they make of it. So
    vmap's out_axes can't be None for it.
    """
    leaves, tree = jax.tree.flatten(output)
    return jax.tree.unflatten(tree, batched_alike_p.bind(*leaves)) if len(leaves) > 1 else output


def spread(values: Sequence[jax.Array], axes: Sequence[int | None]) -> list[jax.Array]:
    """What vmap batches along these axes, where it does, all batched along the first."""
    size = next(x.shape[axis] for x, axis in zip(values, axes) if axis is not None)
    of_one = lambda x, axis: jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
    return list(map(of_one, values, axes))


def _batched(values, axes):
    return batched_alike_p.bind(*spread(values, axes)), [0] * len(values)


batched_alike_p = Primitive("te_batched_alike")
batched_alike_p.multiple_results = True
batched_alike_p.def_impl(lambda *values: list(values))
batched_alike_p.def_abstract_eval(lambda *values: list(values))
mlir.register_lowering(batched_alike_p, lambda context, *values: values)
batching.primitive_batchers[batched_alike_p] = _batched
ad.primitive_jvps[batched_alike_p] = lambda values, tangents: (batched_alike_p.bind(*values), tangents)
partial_eval.dce_rules[batched_alike_p] = without_unused


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
