"""dot_general: jax.lax.dot_general with quantized operands, any axes contracted and batched; and its pure form."""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from transformer_engine_jax.autocast import current
from transformer_engine_jax.ops.arrays import arrays
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.main_grad import Accumulating
from transformer_engine_jax.quantized import GemmState
from transformer_engine_jax.quantizers import GemmQuantizers, gemm_quantizers, keep, under
from transformer_engine_jax.recipe import Recipe

# ((contracted axes of x, of the kernel), (batch axes of x, of the kernel))
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def dot_general(
    x, kernel, dimension_numbers: DimensionNumbers, *, quantizers: GemmQuantizers | None = None,
    preferred_element_type: Any = None,
) -> jax.Array:  # fmt: skip
    """jax.lax.dot_general(x, kernel, dimension_numbers), its products in FP8.

    Args:
      x, kernel: f32, f16 or bf16; without quantizers f64 too.
      dimension_numbers: ((axes of x, axes of kernel) to contract, (axes of x, axes of kernel) that are a batch).
      quantizers: how x, kernel and the gradient of the output become FP8; None computes in x's precision.
      preferred_element_type: the result's dtype in place of x's.

    Returns:
      [batch.., free axes of x.., free axes of kernel..] in x's dtype. A batch of products is computed one by one; a
      recipe that takes scales from the tensor itself gives each of them its own.

    Raises:
      ValueError: the axes are not distinct ones of x and kernel, or their sizes differ.
    """
    x, kernel = _array("dot_general", "x", x), _array("dot_general", "kernel", kernel)
    (x_k, kernel_k), (x_batch, kernel_batch) = checked_numbers(x, kernel, dimension_numbers)
    x_free = [a for a in range(x.ndim) if a not in (*x_k, *x_batch)]
    kernel_free = [a for a in range(kernel.ndim) if a not in (*kernel_k, *kernel_batch)]
    a = x.transpose(*x_batch, *x_free, *x_k)
    b = kernel.transpose(*kernel_batch, *kernel_k, *kernel_free)
    # `dense` wants something to contract and a column; where there is none it gets an axis of one.
    if not x_k:
        a, b = a[..., None], jnp.expand_dims(b, len(x_batch))
    if not kernel_free:
        b = b[..., None]
    options = dict(quantizers=quantizers, preferred_element_type=preferred_element_type)
    product = functools.partial(dense, k_axes=max(len(x_k), 1), **options)
    for _ in x_batch:
        product = jax.vmap(product)
    y = product(a, b)
    return y if kernel_free else y[..., 0]


def _array(op: str, name: str, x) -> jax.Array:
    if isinstance(x, Accumulating):
        raise TypeError(
            f"{op}: {name}: expected an array, got Accumulating; dense and its like add gradients to a buffer"
        )
    return arrays(op, {name: x})[0]


def checked_numbers(x, kernel, dimension_numbers) -> DimensionNumbers:
    """The dimension numbers with their axes counted from the front; ValueError where they do not fit."""
    try:
        contracted, batch = [tuple(map(tuple, pair)) for pair in dimension_numbers]
        (x_k, kernel_k), (x_batch, kernel_batch) = contracted, batch
    except (TypeError, ValueError):
        raise ValueError(
            "dot_general: dimension_numbers: expected ((axes of x, axes of kernel) to contract, (axes of x, axes of "
            f"kernel) of a batch), got {dimension_numbers!r}"
        ) from None
    out = []
    for name, array, axes in (("x", x, (x_k, x_batch)), ("kernel", kernel, (kernel_k, kernel_batch))):
        flat = [a + array.ndim if a < 0 else a for side in axes for a in side]
        if len(set(flat)) != len(flat) or not all(0 <= a < array.ndim for a in flat):
            raise ValueError(
                f"dot_general: dimension_numbers: expected distinct axes of {name}{list(array.shape)}, "
                f"got {axes[0]} to contract and {axes[1]} as a batch"
            )
        out.append((tuple(flat[: len(axes[0])]), tuple(flat[len(axes[0]) :])))
    pairs = tuple(zip(*out))
    for what, (x_axes, kernel_axes) in zip(("contracted", "batch"), pairs):
        sizes = [tuple(array.shape[a] for a in axes) for array, axes in ((x, x_axes), (kernel, kernel_axes))]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"dot_general: {what} axes: expected the same sizes, got {sizes[0]} of x{list(x.shape)} and {sizes[1]} "
                f"of kernel{list(kernel.shape)}"
            )
    return pairs


def einsum(
    equation: str, x, kernel, *, quantizers: GemmQuantizers | None = None, preferred_element_type: Any = None
) -> jax.Array:
    """jax.numpy.einsum(equation, x, kernel), its products in FP8.

    Args:
      equation: such as "bsd,dhk->bshk", with its result; "..." stands for leading axes.
      x, kernel: as in `dot_general`.
      quantizers, preferred_element_type: as in `dot_general`.

    Returns:
      The result, in x's dtype. Raises ValueError for an equation that is not one product of x and kernel.
    """
    x, kernel = _array("einsum", "x", x), _array("einsum", "kernel", kernel)
    dimension_numbers, order = as_dot_general(equation, x, kernel)
    options = dict(quantizers=quantizers, preferred_element_type=preferred_element_type)
    return dot_general(x, kernel, dimension_numbers, **options).transpose(order)


def as_dot_general(equation: str, x, kernel) -> tuple[DimensionNumbers, list[int]]:
    """An einsum's dimension numbers, and its result's axes among those of the dot_general."""
    x_names, kernel_names, names = _names(equation, x.ndim, kernel.ndim)
    both = [n for n in x_names if n in kernel_names]
    contracted, batch = [n for n in both if n not in names], [n for n in both if n in names]
    dimension_numbers = tuple(
        tuple([side.index(n) for n in letters] for side in (x_names, kernel_names)) for letters in (contracted, batch)
    )
    free = [n for side in (x_names, kernel_names) for n in side if n not in both]
    return dimension_numbers, [(batch + free).index(n) for n in names]


def _names(equation: str, *ranks: int) -> tuple[str, str, str]:
    """The axes of both operands and of the result, one letter each."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    terms = operands.split(",")
    if not arrow or len(terms) != 2:
        raise ValueError(f"einsum: equation: expected two operands and a result, such as 'bk,kn->bn', got {equation!r}")
    leading = "".join(c for c in string.ascii_letters if c not in equation)
    counts = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks)]
    full = [t.replace("...", leading[-n:] if n > 0 else "") for t, n in zip(terms, counts)]
    most = max([n for t, n in zip(terms, counts) if "..." in t], default=0)
    result = result.replace("...", leading[-most:] if most else "")
    for term, name, rank in zip(full, ("x", "kernel"), ranks):
        if len(term) != rank or len(set(term)) != rank:
            raise ValueError(
                f"einsum: {equation!r} does not name the {rank} axes of {name}, each by a letter of its own"
            )
    once = set(full[0]) ^ set(full[1])
    if len(set(result)) != len(result) or not once <= set(result) <= set(full[0]) | set(full[1]):
        raise ValueError(
            f"einsum: equation: expected a result with each axis that only one operand has, once, got {equation!r}"
        )
    return full[0], full[1], result


def fp8_dot_general(
    x, kernel, dimension_numbers: DimensionNumbers, state: GemmState | None = None, *, recipe: Recipe | None = None
) -> jax.Array:
    """`dot_general` as a pure function of its operands and their state: the gradient of `state` is the next state.

    Args:
      x, kernel, dimension_numbers: as in `dot_general`.
      state: of GemmState.create(recipe), or the "gradient" that the step before returned for it; a recipe that keeps
        no history needs none.
      recipe: None means that of the autocast in force; without either the product is in x's precision, and the
        gradient of the state is the state itself.

    Returns:
      [batch.., free axes of x.., free axes of kernel..] in x's dtype.

    Raises:
      ValueError: the axes do not fit, or the recipe needs a state and there is none, or one of another history.
      TypeError: `state` is not a GemmState.
    """
    if not isinstance(state, GemmState | None):
        raise TypeError(
            "fp8_dot_general: state: expected a GemmState, such as GemmState.create(recipe), got "
            f"{type(state).__name__}"
        )
    with under(recipe):
        in_force = current().recipe
        quantizers = gemm_quantizers(state)
    y = dot_general(x, kernel, dimension_numbers, quantizers=quantizers)
    return y if in_force is not None and in_force.stateful else keep(y, state)
