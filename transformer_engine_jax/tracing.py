"""What is computed once in a trace, however often it is asked for; and the trace of any function."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import set_current_trace


def kept_on(trace, name: str) -> dict:
    """A dictionary that lives as long as a trace, under this name."""
    if type(trace).__name__ == "ShardMapTrace":  # of one that runs at once, of which nobody takes a gradient
        return {}
    if not hasattr(trace, "__dict__"):  # a function's that is jitted or rematerialised; this much of it has one
        trace = getattr(getattr(trace, "frame", None), "constid_to_tracer", None)
    if hasattr(trace, "__dict__"):
        return trace.__dict__.setdefault(name, {})
    warnings.warn(
        f"transformer_engine_jax: nothing can be kept on a trace of JAX {jax.__version__}: FP8 states and main_grads "
        "of modules that a step calls several times may count several times; expected JAX 0.10 to 0.12",
        RuntimeWarning,
        stacklevel=level_of_user(),
    )
    return {}


def once(what: Hashable, arrays: Sequence[Any], make: Callable[[], Any]) -> Any:
    """make(), which depends on these arrays: at the level of tracing where they live, on the mesh there, and once.

    Each time anew where they are not traced, or not all at one level, and where JAX looks for leaked tracers.
    """
    if not _at_one_level(arrays):
        return make()
    trace = arrays[0]._trace
    known, key = kept_on(trace, "_te_once"), (what, *map(id, arrays))
    if key not in known:
        with set_current_trace(trace), jax.sharding.use_abstract_mesh(jax.typeof(arrays[0]).sharding.mesh):
            known[key] = (make(), arrays)  # the arrays too, lest an id be used again
    return known[key][0]


def made(what: Hashable, arrays: Sequence[Any]) -> Any:
    """What `once` made of these arrays, None where it did not yet."""
    known = kept_on(arrays[0]._trace, "_te_once") if _at_one_level(arrays) else {}
    return known.get((what, *map(id, arrays)), (None,))[0]


def _at_one_level(arrays: Sequence[Any]) -> bool:
    traced = all(isinstance(x, jax.core.Tracer) for x in arrays) and len({id(x._trace) for x in arrays}) == 1
    return traced and not jax.config.jax_check_tracer_leaks


def trace_of(fn: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> jax.stages.Traced:
    """fn, jitted or not, traced: by nnx.jit where it is an NNX model or takes one, of which changes are results too.

    Keywords of one that is not jitted are static where they hold Python's bools or strings.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx and isinstance(fn, nnx.Module):
        fn, args = lambda model, *args, **kwargs: model(*args, **kwargs), (fn, *args)
    if not hasattr(fn, "trace"):
        is_nnx = lambda x: nnx is not None and isinstance(x, nnx.Module | nnx.Variable)
        takes_nnx = any(map(is_nnx, jax.tree.leaves((args, kwargs), is_leaf=is_nnx)))
        switches = {k: v for k, v in kwargs.items() if any(isinstance(x, bool | str) for x in jax.tree.leaves(v))}
        kwargs = {k: v for k, v in kwargs.items() if k not in switches}
        fn = (nnx.jit if takes_nnx else jax.jit)(functools.partial(fn, **switches))
    try:
        traced = fn.trace(*args, **kwargs)
    except Exception as error:
        if type(error).__name__ != "CallCompactUnboundModuleError":
            raise
        raise TypeError(
            "expected a function, got a Linen module, which has no variables: give its `apply`, and then its variables"
        ) from error
    return getattr(traced, "traced", traced)  # nnx.jit's has JAX's in it


def level_of_user() -> int:
    """The stacklevel of its caller's warning: of the innermost function that is not ours, Flax's or JAX's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_USER:
        level, frame = level + 1, frame.f_back
    return level


_NOT_THE_USER = (__name__.split(".")[0], "flax", "jax", "contextlib", "functools")
