"""Which products of modules run in FP8 under autocast: on a GPU those that gain by it, elsewhere all of them.

FP8 halves the time of a product, and pays for it with casts and with the upkeep of scales. So small products lose, and
those of few tokens for the size of their kernels. What is decided is decided at trace time, by sizes, the dtype that
kernels are said to have, the recipe and where layers are scanned, for steps of training; `te.explain` shows it, and the
recipe's `fp8_gemms` overrides it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.autocast import current
from transformer_engine_jax.decisions import decided, platform
from transformer_engine_jax.ops.dot_general import checked_numbers
from transformer_engine_jax.ops.gemm import FP8_MULTIPLE
from transformer_engine_jax.order import traces_layers
from transformer_engine_jax.recipe import Recipe


class Product(NamedTuple):
    """Sizes of x[m, k] kernel[k, n], of whole arrays, or of shards inside a manual shard_map; the kernel's dtype.

    casts_x, casts_dy: whether the cast of x, or of the output's gradient, is a pass of its own, and no norm or
    activation has it.
    """

    m: int
    k: int
    n: int
    kernel_dtype: Any = jnp.float32
    casts_x: bool = True
    casts_dy: bool = True

    @classmethod
    def of(cls, x, k_axes: int, features: Sequence[int], kernel_dtype, **casts: bool) -> Product:
        """Of x, whose last k_axes axes are contracted, with a kernel of these output axes."""
        m, k = math.prod(x.shape[: x.ndim - k_axes]), math.prod(x.shape[x.ndim - k_axes :])
        return cls(m, k, math.prod(features), kernel_dtype, **casts)


def dot_general_product(x, kernel, dimension_numbers) -> Product:
    """That of a dot_general: one of its batch."""
    numbers = checked_numbers(x, kernel, dimension_numbers)
    x_k = numbers[0][0]
    free = [[n for i, n in enumerate(a.shape) if i not in (*k, *b)] for a, k, b in zip((x, kernel), *numbers)]
    return Product(math.prod(free[0]), math.prod(x.shape[i] for i in x_k), math.prod(free[1]), kernel.dtype)


def mlp_products(x, activations: int, size: int, kernel_dtype, norm: bool) -> tuple[list[Product], list[Product]]:
    """The two products of an MLP of x[.., K] with so many activations of this size, each of its own input."""
    first = Product.of(x, 1, (activations, size), kernel_dtype, casts_x=not norm, casts_dy=False)
    return [first], [Product(first.m, size, first.k, kernel_dtype, casts_x=False)]


# Seconds, fitted to steps of training on an H200, of single products (`python -m benchmarks precision`) and of layers
# (benchmarks/NOTES.md, Few tokens in FP8): what a floating-point operation of a product saves in FP8, what a byte of
# the casts costs, and what all launches of one product cost.
SAVED, BYTE, EACH = 0.60e-15, 1 / 3.5e12, 12e-6


def _bytes_of_kernel(product: Product, recipe: Recipe, rounds_wgrad: bool) -> float:
    """What a training step moves more for each of a kernel's values in FP8 than in bf16, in bytes.

    The cast of 16 bits reads them and writes two copies, that of f32 takes about as long as its conversion to 16 bits.
    The gradient of f32 stays that until an optimizer has read it, where in bf16 it has 16 bits (but in scanned
    layers, of which it is stacked in f32). Current scaling reads the kernel once more before.
    """
    if np.dtype(product.kernel_dtype).itemsize <= 2:
        return 5 if recipe.stateful else 6.5
    of_gradient = 0 if rounds_wgrad or traces_layers() else 4
    return of_gradient + (0.5 if recipe.stateful else 3.5)


def gain(products: Sequence[Product], recipe: Recipe, rounds_wgrad: bool = False, devices: int = 1) -> float:
    """Seconds that a training step saves on each of so many devices with these products, which read one x, in FP8."""
    m, k = products[0].m, products[0].k
    # Features that the tensor cores do not take make products of FP8 values in bf16.
    flop = sum(6 * m * k * p.n for p in products if k % FP8_MULTIPLE == p.n % FP8_MULTIPLE == 0)
    # A pass of its own reads what it casts in bf16, and writes it in FP8 as it is and transposed. Where the tokens need
    # filling up, all transposed copies are read and written once more; current scaling reads all before.
    each = (2 if m % FP8_MULTIPLE else 0) + (0 if recipe.stateful else 2)
    moved = m * (k * (each + 4 * products[0].casts_x) + sum(p.n * (each + 4 * p.casts_dy) for p in products))
    moved += sum(_bytes_of_kernel(p, recipe, rounds_wgrad) * k * p.n for p in products)
    return (SAVED * flop - BYTE * moved) / devices - EACH * len(products)


def in_fp8(*groups: Sequence[Product]) -> tuple[bool, contextlib.AbstractContextManager]:
    """(whether products run in FP8 under the autocast in force, a scope that tells `explain` why).

    groups: products that are decided together, those that read the same x in one group.
    """
    context, nothing = current(), contextlib.nullcontext()
    if context.recipe is None:
        return False, nothing
    asked = context.recipe.fp8_gemms
    if context.calibrating or asked == "all" or (asked == "auto" and platform() != "gpu"):
        return True, nothing
    if callable(asked):
        fp8 = all(asked(p.m, p.k, p.n) for group in groups for p in group)
        return fp8, decided("precision", "fp8" if fp8 else "high", "as the recipe's fp8_gemms says")
    if not all(isinstance(size, int | np.integer) for group in groups for p in group for size in (p.m, p.k, p.n)):
        return True, decided("precision", "fp8", "sizes are known at run time only")
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes)  # sizes: of a shard
    saved = sum(gain(group, context.recipe, context.round_wgrad, devices) for group in groups) * 1e6
    why = f"FP8 saves about {saved:.0f} us a step" if saved >= 0 else f"FP8 would cost about {-saved:.0f} us a step"
    return saved >= 0, decided("precision", "fp8" if saved >= 0 else "high", why)
