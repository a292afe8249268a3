"""The layer that peers are measured with: plain Flax in bf16 with cuDNN attention, and the same with XLA's FP8."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.shapes import Shape
from transformer_engine_jax.ops.rope import rope, rope_frequencies


class FlaxLayer(nn.Module):
    """A pre-norm Transformer layer as one writes it in Flax: f32 parameters, bf16 computation."""

    shape: Shape
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        s = self.shape

        def norm(x):
            kind = nn.RMSNorm if s.rmsnorm else nn.LayerNorm
            return kind(epsilon=1e-6, dtype=jnp.bfloat16)(x)

        def product(x, features, axis=-1):
            extra = {} if self.dot_general_cls is None else {"dot_general_cls": self.dot_general_cls}
            return nn.DenseGeneral(features, axis=axis, use_bias=s.biases, dtype=jnp.bfloat16, **extra)(x)

        head = s.hidden // s.heads
        y = norm(x)
        if s.groups == s.heads:
            qkv = product(y, (3, s.heads, head))
            q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        else:
            q = product(y, (s.heads, head))
            kv = product(y, (2, s.groups, head))
            k, v = kv[:, :, 0], kv[:, :, 1]
        if s.rope:
            frequencies = rope_frequencies(head)
            q, k = rope(q, frequencies, group="alternate"), rope(k, frequencies, group="alternate")
        implementation = "cudnn" if jax.default_backend() == "gpu" else None
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        x = x + product(y, s.hidden, axis=(-2, -1))
        y = norm(x)
        if s.gated:
            y = jax.nn.silu(product(y, s.mlp)) * product(y, s.mlp)
        else:
            y = jax.nn.gelu(product(y, s.mlp))
        return x + product(y, s.hidden)
