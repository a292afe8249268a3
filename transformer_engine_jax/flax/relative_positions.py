"""T5's relative position biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.flax.base import with_axes
from transformer_engine_jax.modules.checks import check_positive

SIZES = ("num_buckets", "max_distance", "num_attention_heads")


class RelativePositionBiases(nn.Module):
    """T5's relative position biases (Raffel et al., 2019); param `rel_embedding` [heads, num_buckets]."""

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Callable = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
    embedding_axes: tuple[str | None, ...] = ("heads", "relpos_buckets")
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> jax.Array:
        """Lengths -> biases [1, heads, q_seqlen, k_seqlen]; ValueError where buckets and distances do not fit."""
        check_positive(self, *SIZES)
        self._check(q_seqlen, k_seqlen, bidirectional)
        shape = (self.num_attention_heads, self.num_buckets)
        init = with_axes(self, "rel_embedding", self.embedding_init, self.embedding_axes, shape)
        table = self.param("rel_embedding", init, shape, self.dtype)
        if not q_seqlen or not k_seqlen:
            return jnp.zeros((1, len(table), q_seqlen, k_seqlen), table.dtype)
        # By distance first: a table [q_seqlen, k_seqlen] of buckets would be a constant of the program. Products and
        # reshapes, no lookups: their gradients are sums in a fixed order, not atomics that meet in a few buckets.
        farthest = self.max_distance
        buckets = jnp.asarray(self._bucket(np.arange(-farthest, farthest + 1), bidirectional))
        # jnp: an exported program may have lengths that are symbols.
        distance = jnp.clip(jnp.arange(1 - q_seqlen, k_seqlen + 1), -farthest, farthest)
        one_hot = jax.nn.one_hot(buckets[distance + farthest], self.num_buckets, axis=0, dtype=table.dtype)
        of_distance = jnp.matmul(table, one_hot, precision="highest")
        # Row q starts one entry before row q - 1. So, of the table's copies in a row, rows one shorter than a copy.
        width = q_seqlen + k_seqlen
        rows = jnp.tile(of_distance, (1, q_seqlen))[:, q_seqlen - 1 : q_seqlen * width - 1]
        return rows.reshape(len(table), q_seqlen, width - 1)[None, :, :, :k_seqlen]

    def _check(self, q_seqlen: int, k_seqlen: int, bidirectional: bool) -> None:
        sides = 2 if bidirectional else 1
        for name, value, least in (
            ("q_seqlen", q_seqlen, 0),
            ("k_seqlen", k_seqlen, 0),
            ("num_buckets", self.num_buckets, 2 * sides),
            ("max_distance", self.max_distance, self.num_buckets // sides // 2 + 1),
        ):
            if value < least:
                raise ValueError(
                    f"RelativePositionBiases: {name}: expected {least} or more with bidirectional={bidirectional}, "
                    f"got {value}"
                )

    def _bucket(self, distance: np.ndarray, bidirectional: bool) -> np.ndarray:
        """Half of the buckets count small distances exactly, the others grow with their logarithm."""
        buckets, first = self.num_buckets, np.zeros_like(distance)
        if bidirectional:
            buckets //= 2
            first = np.where(distance > 0, buckets, 0)
            distance = np.abs(distance)
        else:
            distance = np.maximum(-distance, 0)
        exact = buckets // 2
        ratio = np.log(np.maximum(distance, 1) / exact) / np.log(self.max_distance / exact)
        far = np.minimum(exact + (ratio * (buckets - exact)).astype(np.int32), buckets - 1)
        return first + np.where(distance < exact, distance, far)
