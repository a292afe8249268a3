"""What is computed once in a trace, however often it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.extend.core import set_current_trace


def kept_on(trace, name: str) -> dict:
    """A dictionary that lives as long as a trace, under this name."""
    if not hasattr(trace, "__dict__"):  # a function's that is jitted or rematerialised; this much of it has one
        trace = getattr(getattr(trace, "frame", None), "constid_to_tracer", None)
    return trace.__dict__.setdefault(name, {}) if hasattr(trace, "__dict__") else {}


def once(what: Hashable, arrays: Sequence[Any], make: Callable[[], Any]) -> Any:
    """make(), which depends on these arrays: at the level of tracing where they live, on the mesh there, and once.

    Each time anew where they are not traced, or not all at one level, and where JAX looks for leaked tracers.
    """
    traced = all(isinstance(x, jax.core.Tracer) for x in arrays) and len({id(x._trace) for x in arrays}) == 1
    if not traced or jax.config.jax_check_tracer_leaks:
        return make()
    trace = arrays[0]._trace
    known, key = kept_on(trace, "_te_once"), (what, *map(id, arrays))
    if key not in known:
        with set_current_trace(trace), jax.sharding.use_abstract_mesh(jax.typeof(arrays[0]).sharding.mesh):
            known[key] = (make(), arrays)  # the arrays too, lest an id be used again
    return known[key][0]
