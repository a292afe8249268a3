"""The order in which a step is computed, which bounds its memory, and what in it XLA computes once: barriers."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from transformer_engine_jax.decisions import devices
from transformer_engine_jax.stored import restored, stored


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


def in_scan() -> bool:
    """Whether this is the body of a scan, over layers, tokens or microbatches, or a pass over it."""
    return _scan() is not None


def in_scanned_layers() -> bool:
    """Whether this is a pass over layers that a scan runs, which stacks what the forward pass keeps."""
    return _scan() in ("forward", "backward")


def traces_layers() -> bool:
    """Whether this is the body of scanned layers, or a pass over it, for all that can be told: of the innermost scan.

    A body that takes gradients itself is a training step, or what one makes of a microbatch.
    """
    takes_gradients, frame = False, sys._getframe()
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file == _LOOPS and name.startswith("_scan_"):
            return True
        if file == _LOOPS and name == "scan":
            return not takes_gradients
        takes_gradients = takes_gradients or file == _GRADIENTS
        frame = frame.f_back
    return False


def of_scanned_layers(kernel, x) -> bool:
    """Whether a scan's body has this kernel of a stack, for all that can be told: it is the body's, as x is.

    Where a scan goes over tokens or microbatches, and the kernel is the same for all, it comes from outside.
    """
    return traces_layers() and getattr(kernel, "_trace", None) is getattr(x, "_trace", x)


_LOOPS = inspect.unwrap(jax.lax.scan).__code__.co_filename
_GRADIENTS = inspect.unwrap(ad.instantiate_zeros).__code__.co_filename


def _scan() -> str | None:
    """Of a scan whose body JAX traces, the "forward" or "backward" pass, or "body" where it is not differentiated.

    Only its functions on Python's stack tell. Where gradients are taken inside of a body, as over microbatches, that is
    a "body" in both passes. JAX's caches do not see it: a function that is jitted by itself, and called both in a scan
    and outside, has the barriers of the call that was traced first. With these its results are the same; only time and
    memory differ. But it has that call's choice of FP8 too, see precision.py.
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


def without_unused(used: list[bool], *others):
    """The dce rule of a primitive whose n-th result is its n-th operand."""
    *_, eqn = others  # from JAX 0.12 on, which inputs live on comes before it
    if not any(used):
        return used, None
    kept = lambda variables: [v for v, keep in zip(variables, used) if keep]
    return used, eqn.replace(invars=kept(eqn.invars), outvars=kept(eqn.outvars))


partial_eval.dce_rules[all_at_once_p] = without_unused


computed_once_p = Primitive("te_computed_once")
computed_once_p.def_impl(lambda x, of: x)
computed_once_p.def_abstract_eval(lambda x, of: x)
mlir.register_lowering(
    computed_once_p, mlir.lower_fun(lambda x, of: jax.lax.optimization_barrier(x), multiple_results=False)
)
batching.primitive_batchers[computed_once_p] = lambda x, axes, of: (computed_once_p.bind(*x, of=of), *axes)
ad.primitive_jvps[computed_once_p] = lambda x, dx, of: (computed_once_p.bind(*x, of=of), *dx)
