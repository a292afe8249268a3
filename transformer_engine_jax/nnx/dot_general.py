"""FP8 products inside modules that are not ours: what nnx.Linear(dot_general=..) and nnx.Einsum(einsum_op=..) take."""

from __future__ import annotations

from typing import ClassVar

import jax

from transformer_engine_jax.flax.dot_general import quantized_dot_general, quantized_einsum
from transformer_engine_jax.nnx.base import Fp8Module, module
from transformer_engine_jax.quantized import GemmState
from transformer_engine_jax.quantizers import GemmQuantizers, keep, under
from transformer_engine_jax.recipe import Recipe


@module
class DotGeneral(Fp8Module):
    """Called as jax.lax.dot_general, with the FP8 state of one product: nnx.Linear(.., dot_general=DotGeneral(recipe)).

    quantization_recipe: None means that of the autocast in force. quantization_checkpoint_name: a name that checkpoint
    policies see on what is quantized.
    """

    FP8_STATES: ClassVar = {"gemm_state": GemmState}

    quantization_recipe: Recipe | None = None
    quantization_checkpoint_name: str | None = None

    def __post_init__(self):
        with under(self.quantization_recipe):
            self.make_fp8_state("gemm")

    def __call__(self, x, kernel, dimension_numbers, *args, **options) -> jax.Array:
        return self._run(quantized_dot_general, x, kernel, dimension_numbers, *args, **options)

    def _run(self, f, *args, **options) -> jax.Array:
        unused = []

        def generate_quantizer_set(fp8: bool) -> GemmQuantizers | None:
            with under(self.quantization_recipe):
                quantizers, states = self.gemm_quantizers("gemm", fp8, self.quantization_checkpoint_name)
            unused.extend(states)
            return quantizers

        return keep(f(self.quantization_recipe, generate_quantizer_set, *args, **options), unused)


@module
class Einsum(DotGeneral):
    """Called as jax.numpy.einsum with two operands: nnx.Einsum(.., einsum_op=te_nnx.Einsum(recipe))."""

    def __call__(self, equation: str, x, kernel, **options) -> jax.Array:
        return self._run(quantized_einsum, equation, x, kernel, **options)
