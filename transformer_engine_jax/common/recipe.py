"""transformer_engine_jax.recipe under the path of NVIDIA's package."""

from transformer_engine_jax.recipe import *  # noqa: F403
