"""The place where NVIDIA's package keeps `recipe`; here it is transformer_engine_jax.recipe."""

from transformer_engine_jax import recipe

__all__ = ["recipe"]
