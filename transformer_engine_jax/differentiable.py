"""Differentiable ops from their two passes, and the order in which gradients are computed.

The only module that touches custom_vjp.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from transformer_engine_jax.decisions import devices


def _is_array(x) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def align(*args: jax.Array) -> tuple[jax.Array, ...]:
    """Makes arrays vary over the same manual mesh axes, so that AD sums the cotangents of replicated ones.

    Constants among arrays on explicit mesh axes are put on that mesh, where their cotangents will be.
    """
    types = [jax.typeof(x) for x in args]
    meshes = explicit_meshes(*args)
    varying = frozenset().union(*[t.manual_axis_type.varying for t in types])

    def aligned(x, t):
        if meshes and t.sharding.mesh.empty:
            x = _put(x, NamedSharding(meshes[0], PartitionSpec(*[None] * t.ndim)))
        missing = tuple(sorted(varying - t.manual_axis_type.varying))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return tuple(aligned(x, t) for x, t in zip(args, types))


def explicit_meshes(*args: jax.Array) -> list[Mesh | AbstractMesh]:
    """Those of arrays whose shardings are types; with their devices, where arrays are no tracers but have some."""
    explicit = [x for x in args if jax.typeof(x).sharding.mesh.explicit_axes]
    return [(jax.typeof(x) if isinstance(x, jax.core.Tracer) else x).sharding.mesh for x in explicit]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _put(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """x on a mesh, where its cotangent stays: JAX would put that where x was, which vmap over the mesh can't."""
    return jax.sharding.reshard(x, sharding)


_put.defvjp(lambda x, sharding: (_put(x, sharding), None), lambda sharding, _, cotangent: (cotangent,))


@jax.tree_util.register_static
class _Shardings(tuple):
    """Shardings of an op's arguments, None where one is not an array, as a static residual."""


def _resharded(cotangent, sharding):
    """The cotangent as its argument is sharded: a kernel's gradient under FSDP comes out whole. Explicit axes only."""
    if cotangent is None or sharding is None or sharding.mesh.empty or jax.typeof(cotangent).sharding == sharding:
        return cotangent
    return jax.sharding.reshard(cotangent, sharding)


# --- What a backward needs, stored ------------------------------------------------------------------------------------
#
# A scan stacks it, and XLA on the CPU moves values of FP8 one by one, hundreds of times as slowly as bytes.


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class _Fp8Codes:
    """An FP8 array as its bytes."""

    codes: jax.Array  # u8
    dtype: np.dtype


def stored(values: Any) -> Any:
    """The values with FP8 arrays as bytes, for `restored`."""

    def store(x):
        is_fp8 = _is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1
        return _Fp8Codes(jax.lax.bitcast_convert_type(x, jnp.uint8), np.dtype(x.dtype)) if is_fp8 else x

    return jax.tree.map(store, values)


def restored(values: Any) -> Any:
    """What `stored` was given."""
    is_fp8 = lambda x: isinstance(x, _Fp8Codes)
    restore = lambda x: jax.lax.bitcast_convert_type(x.codes, x.dtype) if is_fp8(x) else x
    return jax.tree.map(restore, values, is_leaf=is_fp8)


# --- Ops -------------------------------------------------------------------------------------------------------------


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
        shardings = _Shardings(jax.typeof(x).sharding if _is_array(x) else None for x in args)
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
        arrays = iter(align(*[x for x in args if _is_array(x)]))
        return op(static, *[next(arrays) if _is_array(x) else x for x in args])

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


# --- Order -------------------------------------------------------------------------------------------------------


def all_at_once(*values):
    """The values behind a barrier: XLA uses none of them before all have been computed.

    On one device XLA computes first what leads on to the inputs' gradients, and last of all the gradients of weights
    (and what the forward pass returns), so that the operands of all of them stay in memory. Over several devices that
    would wait for collectives too: see ops/after.py. In layers that are scanned the order is left to XLA: there kernels
    use their places in stacked arrays as they are, unless a barrier is between.
    """
    if devices() > 1 or in_scanned_layers():
        return values
    leaves, tree = jax.tree.flatten(values)
    return jax.tree.unflatten(tree, all_at_once_p.bind(*leaves))


def computed_once(values: Any, given: Any = (), of: str | None = None) -> Any:
    """The values, which XLA computes once even where a scan's body uses them and the scan stacks them too.

    A kernel whose result is only stacked writes it into the stack. Where the result is used as well, XLA would run the
    kernel twice (as of jaxlib 0.11.2), for the stack and for the use; behind a barrier it runs once, and is copied.

    given: arrays that nothing here computes; they pass as they are.
    of: what the values are to checkpoint policies, which must save them behind the barrier: a "product" or "quantized".
    """
    if _scan() not in ("body", "forward"):
        return values
    as_they_are = set(map(id, jax.tree.leaves(given)))
    once = functools.partial(computed_once_p.bind, of=of)
    return jax.tree.map(lambda x: x if id(x) in as_they_are else restored(jax.tree.map(once, stored(x))), values)


def in_scanned_layers() -> bool:
    """Whether this is a pass over layers that a scan runs, which stacks what the forward pass keeps."""
    return _scan() in ("forward", "backward")


_LOOPS = inspect.unwrap(jax.lax.scan).__code__.co_filename


def _scan() -> str | None:
    """Of a scan whose body JAX traces, the "forward" or "backward" pass, or "body" where it is not differentiated.

    Only its functions on Python's stack tell. Where gradients are taken inside of a body, as over microbatches, that is
    a "body" in both passes. JAX's caches do not see it: a function that is jitted by itself, and called both in a scan
    and outside, has the barriers of the call that was traced first. Its results are the same; only time and memory
    differ.
    """
    found = None
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == _LOOPS:
            name = frame.f_code.co_name
            if name.startswith("_scan_transpose"):
                return "backward"
            if name in ("_scan_linearize", "_scan_jvp"):
                found = "forward"
            elif name == "scan":
                found = found or "body"
        frame = frame.f_back
    return found


# A barrier of XLA's, but one that lets go of what nobody uses: a rematerialised block that wants one of the values must
# not compute the others again.
all_at_once_p = Primitive("te_all_at_once")
all_at_once_p.multiple_results = True
all_at_once_p.def_impl(lambda *values: list(values))
all_at_once_p.def_abstract_eval(lambda *values: list(values))
mlir.register_lowering(
    all_at_once_p, mlir.lower_fun(lambda *values: jax.lax.optimization_barrier(values), multiple_results=True)
)
batching.primitive_batchers[all_at_once_p] = lambda values, axes: (all_at_once_p.bind(*values), axes)
ad.primitive_jvps[all_at_once_p] = lambda values, tangents: (all_at_once_p.bind(*values), tangents)


def _without_unused(used: list[bool], *others):
    *_, eqn = others  # from JAX 0.12 on, which inputs live on comes before it
    if not any(used):
        return used, None
    kept = lambda variables: [v for v, keep in zip(variables, used) if keep]
    return used, eqn.replace(invars=kept(eqn.invars), outvars=kept(eqn.outvars))


partial_eval.dce_rules[all_at_once_p] = _without_unused


computed_once_p = Primitive("te_computed_once")
computed_once_p.def_impl(lambda x, of: x)
computed_once_p.def_abstract_eval(lambda x, of: x)
mlir.register_lowering(
    computed_once_p, mlir.lower_fun(lambda x, of: jax.lax.optimization_barrier(x), multiple_results=False)
)
batching.primitive_batchers[computed_once_p] = lambda x, axes, of: (computed_once_p.bind(*x, of=of), *axes)
ad.primitive_jvps[computed_once_p] = lambda x, dx, of: (computed_once_p.bind(*x, of=of), *dx)


def _in_order_forward(_, *values):
    return values, None


def _in_order_backward(_, residuals, cotangents):
    return all_at_once(*cotangents)


_in_order = differentiable(_in_order_forward, _in_order_backward)


def gradients_at_once(*values: Any) -> tuple[Any, ...]:
    """The values, none of whose gradients is used before all are there; see all_at_once. Only of arrays."""
    return _in_order(None, *values) if all(map(_is_array, values)) else values
