"""FP8 products inside modules that are not ours: their dot_general replaced, their parameters left to them."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_engine_jax.autocast import current
from transformer_engine_jax.flax.base import Fp8Module
from transformer_engine_jax.ops.dot_general import as_dot_general, dot_general, einsum
from transformer_engine_jax.precision import dot_general_product, in_fp8
from transformer_engine_jax.quantizers import GemmQuantizers, keep, under
from transformer_engine_jax.recipe import Recipe


class _Made(type(Fp8Module)):
    """The type of the classes made here. One with `made_by`, (function, arguments), is pickled as that call."""


copyreg.pickle(_Made, lambda cls: vars(cls).get("made_by", cls.__qualname__))


def wrap_function_in_te_state_module(
    f: Callable,
    quantization_recipe: Recipe | None = None,
    name: str | None = None,
    quantization_checkpoint_name: str | None = None,
) -> type[nn.Module]:
    """A Linen module class that holds the FP8 state of the products in a function.

    Args:
      f: called as f(generate_quantizer_set, *args, **kwargs) with what the module is called with.
        generate_quantizer_set(name="gemm", fp8=True) gives the quantizers of one product, for `te.dense` or
        `te.dot_general`, or None where FP8 is off, or for this product; a name for each product.
      quantization_recipe: None means that of the autocast in force.
      name: of the class, and so of the state among the variables; None means f's own, if it has one.
      quantization_checkpoint_name: a name that checkpoint policies see on what is quantized.

    Returns:
      The class. Its instances have no parameters; each has a state of its own, so make one for each call of f.
    """

    class StateModule(Fp8Module, metaclass=_Made):
        @nn.compact
        def __call__(self, *args, **kwargs):
            unused: list[Any] = []
            asked: set[str] = set()

            def generate_quantizer_set(name: str = "gemm", fp8: bool = True) -> GemmQuantizers | None:
                if name in asked:
                    raise ValueError(
                        f"{type(self).__name__}: generate_quantizer_set({name!r}): expected a new name for "
                        "each product of a call, got this one twice"
                    )
                asked.add(name)
                with under(quantization_recipe):
                    quantizers, states = self.gemm_quantizers(name, fp8, quantization_checkpoint_name)
                unused.extend(states)
                return quantizers

            return keep(f(generate_quantizer_set, *args, **kwargs), unused)

    StateModule.__name__ = StateModule.__qualname__ = f"Fp8_{name or getattr(f, '__name__', 'function')}"
    return StateModule


@functools.cache  # one class for one recipe, lest what is compiled for a module is compiled anew for its equal
def _class_of(product: Callable, name: str, recipe: Recipe | None, checkpoint_name: str | None) -> type[nn.Module]:
    cls = wrap_function_in_te_state_module(functools.partial(product, recipe), recipe, name, checkpoint_name)
    cls.made_by = _class_of, (product, name, recipe, checkpoint_name)
    return cls


def make_dot_general_cls(
    quantization_recipe: Recipe | None = None, quantization_checkpoint_name: str | None = None
) -> type[nn.Module]:
    """A module class for nn.Dense(dot_general_cls=...) and nn.DenseGeneral, batch axes included.

    Args:
      quantization_recipe: None means that of the autocast in force.
      quantization_checkpoint_name: a name that checkpoint policies see on what is quantized.

    Returns:
      A class whose instances are called as jax.lax.dot_general is; each holds the state of one product.
    """
    return _class_of(quantized_dot_general, "dot_general", quantization_recipe, quantization_checkpoint_name)


def make_einsum_cls(
    quantization_recipe: Recipe | None = None, quantization_checkpoint_name: str | None = None
) -> type[nn.Module]:
    """A module class whose instances are called as jax.numpy.einsum is, with an explicit equation of two operands.

    Args:
      quantization_recipe: None means that of the autocast in force.
      quantization_checkpoint_name: a name that checkpoint policies see on what is quantized.
    """
    return _class_of(quantized_einsum, "einsum", quantization_recipe, quantization_checkpoint_name)


def quantized_dot_general(
    recipe: Recipe | None, generate_quantizer_set: Callable, x, kernel, dimension_numbers, *args, **options
) -> jax.Array:
    """dot_general with the arguments of jax.lax.dot_general; in FP8 where the recipe says so of its sizes."""
    fp8, scope = _decided(recipe, x, kernel, lambda: dimension_numbers)
    quantizers = generate_quantizer_set(fp8=fp8)
    with scope:
        if quantizers is None:
            return jax.lax.dot_general(x, kernel, dimension_numbers, *args, **options)
        product = functools.partial(dot_general, x, kernel, dimension_numbers, quantizers=quantizers)
        return _as_asked(product, *args, **options)


def quantized_einsum(
    recipe: Recipe | None, generate_quantizer_set: Callable, equation: str, x, kernel, **options
) -> jax.Array:
    """einsum with the arguments of jax.numpy.einsum; likewise."""
    fp8, scope = _decided(recipe, x, kernel, lambda: as_dot_general(equation, x, kernel)[0])
    quantizers = generate_quantizer_set(fp8=fp8)
    with scope:
        if quantizers is None:
            return jnp.einsum(equation, x, kernel, **options)
        return _as_asked(functools.partial(einsum, equation, x, kernel, quantizers=quantizers), **options)


def _decided(recipe: Recipe | None, x, kernel, dimension_numbers: Callable):
    """`in_fp8` of a product under a recipe; where none is on, what is wrong with its axes is JAX's to say."""
    with under(recipe):
        return in_fp8([] if current().recipe is None else [dot_general_product(x, kernel, dimension_numbers())])


def _as_asked(product: Callable, precision=None, preferred_element_type=None, out_sharding=None) -> jax.Array:
    del precision  # says nothing about FP8
    y = product(preferred_element_type=preferred_element_type)
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)
