"""Gradients of kernels added up over microbatches, by the products that compute them and in place.

An op that is given Accumulating(kernel, main_grad) in place of a kernel returns main_grad + dkernel as the gradient of
main_grad: like an FP8 state's, a buffer's gradient is its next value. That of the kernel is zero.
"""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, set_current_trace, take_current_trace
from jax.interpreters import ad, batching, mlir

from transformer_engine_jax.differentiable import differentiable, spread
from transformer_engine_jax.ops.arrays import arrays
from transformer_engine_jax.tracing import kept_on, level_of_user


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulating:
    """A kernel whose gradient is added to a buffer: what `dense` and its like take in place of the kernel.

    Several products of a step may use a buffer, which counts once. It counts each time where JAX adds up gradients out
    of sight of the ops: those of several calls of a function that is jitted or rematerialised by itself, with the
    gradient taken outside of it, of calls of a scan or vmap that slices it each time, of the steps of a scan with the
    buffer in its carry, of the shards of a shard_map with check_vma=False (there, reduce over the mesh after the last
    microbatch), and of traces that JAX checks for leaks.
    """

    kernel: jax.Array  # [k.., n..] f32, f16 or bf16
    main_grad: jax.Array  # f32[k.., n..] the sum so far; its gradient is the next one

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kernel.shape


def unpacked(op: str, kernel) -> tuple[jax.Array, jax.Array | None]:
    """(the kernel, its buffer or None); ValueError where the buffer does not fit."""
    if not isinstance(kernel, Accumulating):
        return *arrays(op, {"kernel": kernel}), None
    (kernel,), main_grad = arrays(op, {"kernel": kernel.kernel}), kernel.main_grad
    if not isinstance(main_grad, jax.Array):  # of one JAX may make another, and `claimed` would take that for another
        (main_grad,) = arrays(op, {"main_grad": main_grad})
    if main_grad.shape != kernel.shape or main_grad.dtype != jnp.float32:
        raise ValueError(
            f"{op}: main_grad: expected float32{list(kernel.shape)}, the kernel's shape, got "
            f"{main_grad.dtype}{list(main_grad.shape)}; start from jnp.zeros_like(kernel, jnp.float32)"
        )
    return kernel, main_grad


# --- Once, however often a buffer is used ----------------------------------------------------------------------------


# A buffer as two: for the product that adds to it, and for the rest. The gradient of the first is the buffer plus that
# product's, or a symbolic zero where none is taken through it, as behind stop_gradient: then the buffer is added here.
enter_p = Primitive("te_main_grad")
enter_p.multiple_results = True
enter_p.def_impl(lambda x, main_grad: [x, x])
enter_p.def_abstract_eval(lambda x, main_grad: [x, x])
mlir.register_lowering(enter_p, lambda context, x, main_grad: [x, x])
batching.primitive_batchers[enter_p] = lambda values, axes: (enter_p.bind(*spread(values, axes)), [0, 0])


def _enter_derivative(primals, tangents):
    x, main_grad = primals  # returned as it is: what a scan slices is then kept for its backward pass where it lies
    return [x, x], enter_p.bind(ad.instantiate_zeros(tangents[0]), main_grad)


def _enter_transpose(cotangents, x, main_grad):
    del x
    first, rest = cotangents
    if isinstance(rest, ad.Zero):
        return first, None
    return (main_grad if isinstance(first, ad.Zero) else first) + rest, None


ad.primitive_jvps[enter_p] = _enter_derivative
ad.primitive_transposes[enter_p] = _enter_transpose


def _known_on(trace) -> dict:
    """What `claimed` keeps; nothing where JAX would take that for a leak."""
    if not jax.config.jax_check_tracer_leaks:
        return kept_on(trace, "_te_main_grads")
    warnings.warn(
        "main_grads: while JAX looks for leaked tracers (jax_check_tracer_leaks), a buffer of a kernel that a step "
        "uses several times counts each time",
        RuntimeWarning,
        stacklevel=level_of_user(),
    )
    return {}


def claimed(main_grad: jax.Array | None, *others: jax.Array) -> tuple[jax.Array | None, bool | None]:
    """(what stands for a buffer in a product with these others, whether the product adds to it); None without one.

    A product's gradient of the buffer is buffer + dkernel where it adds, else dkernel, and JAX adds up those of several
    products: so one of them adds. The first does, unless it may run several times for this one buffer: where the buffer
    comes from further out (the body of a scan, vmap), or the others vary over manual mesh axes and it does not. Then
    enter_p, placed where the buffer comes from, adds it to the sum of the products, in a pass of its own.
    """
    if main_grad is None or not isinstance(main_grad, jax.core.Tracer):
        return main_grad, None if main_grad is None else True
    with take_current_trace() as here:
        pass
    trace = main_grad._trace
    known = _known_on(trace)
    if id(main_grad) in known:
        return known[id(main_grad)][1], False
    varying = [jax.typeof(x).manual_axis_type.varying for x in (main_grad, *others)]
    adds = trace is here and varying[0].issuperset(frozenset().union(*varying))
    with set_current_trace(trace):
        first, rest = enter_p.bind(main_grad, main_grad)
    known[id(main_grad)] = main_grad, rest  # the buffer too, lest its id be used again
    return first if adds else rest, adds


# --- Products of high precision --------------------------------------------------------------------------------------


def _collect_forward(adds: bool, kernel, main_grad):
    return kernel, main_grad if adds else None


def _collect_backward(adds: bool, main_grad, dkernel):
    dkernel = dkernel.astype(jnp.float32)
    return None, main_grad + dkernel if adds else dkernel


# The kernel itself, its gradient going to what `claimed` returned: for products that JAX differentiates.
collected = differentiable(_collect_forward, _collect_backward)
