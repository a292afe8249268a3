"""The derivative and the transpose of a kernel's call: those of its reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

if TYPE_CHECKING:
    from transformer_engine_jax.kernel import Call


def derivative(primals, tangents, *, call: Call):
    """That of the reference, where nothing is in FP8: what an op's two passes compute has it, so second derivatives."""
    if any(_is_fp8(x.dtype) for x in (*primals, *call.result_shapes(primals)) if x is not None):
        name = call.kernel.name
        instead = f" (te.{name} has none, train with te.dense)" if name in ("quantize", "dequantize") else ""
        raise NotImplementedError(
            f"{name}: expected to be differentiated inside an op, once and in reverse mode (jax.grad, jax.vjp): FP8 "
            f"has neither tangents nor second derivatives{instead}. Leave it off there, by te.autocast(enabled=False); "
            "or, where a gradient inside of a loss is not to be differentiated itself, put jax.lax.stop_gradient on "
            "all that it is computed from, parameters and state too, before it is"
        )
    moving = [not isinstance(t, ad.Zero) for t in tangents]  # products with zeros, of others, would be computed
    only = lambda values: tuple(x for x, m in zip(values, moving) if m)
    with jax.numpy_rank_promotion("allow"):
        return jax.jvp(_of_some(call, primals, moving), only(primals), only(tangents))


def _of_some(call: Call, operands: Sequence[Any], chosen: Sequence[bool]) -> Callable:
    """The reference as a function of the chosen operands."""

    def run(*given):
        it = iter(given)
        return call.run_given(*[next(it) if c else x for x, c in zip(operands, chosen)])

    return run


def transpose(cotangents, *operands, call: Call):
    """That of the reference, of a kernel that is linear in some operands."""
    chosen = list(map(ad.is_undefined_primal, operands))
    avals = [x.aval for x, c in zip(operands, chosen) if c]
    with jax.numpy_rank_promotion("allow"):
        transposed = jax.linear_transpose(_of_some(call, operands, chosen), *avals)
        out = iter(transposed(list(map(ad.instantiate_zeros, cotangents))))
    return [next(out) if c else None for c in chosen]


def _is_fp8(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize == 1
