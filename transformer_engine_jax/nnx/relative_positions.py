"""T5's relative position biases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from transformer_engine_jax import flax as linen
from transformer_engine_jax.flax.relative_positions import SIZES
from transformer_engine_jax.modules.checks import check_positive
from transformer_engine_jax.nnx.base import Fp8Module, array, module


@module
class RelativePositionBiases(Fp8Module):
    """T5's relative position biases (Raffel et al., 2019); param `rel_embedding` [heads, num_buckets]."""

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    _: KW_ONLY
    embedding_init: InitVar[Callable] = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
    embedding_axes: tuple[str | None, ...] = ("heads", "relpos_buckets")
    dtype: Any = jnp.float32
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, embedding_init, rngs):
        check_positive(self, *SIZES)
        shape = (self.num_attention_heads, self.num_buckets)
        self.make_param("rel_embedding", embedding_init, self.embedding_axes, shape, self.dtype, rngs)

    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> jax.Array:
        """Lengths -> biases [1, heads, q_seqlen, k_seqlen]."""
        # The buckets are the Linen module's, a pure function of its table.
        biases = linen.RelativePositionBiases(
            self.num_buckets, self.max_distance, self.num_attention_heads, parent=None
        )
        table = {"params": {"rel_embedding": array(self.rel_embedding)}}
        return biases.apply(table, q_seqlen, k_seqlen, bidirectional)
