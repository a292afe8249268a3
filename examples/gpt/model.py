"""A decoder-only Transformer over bytes, made of transformer_engine_jax's layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import transformer_engine_jax.flax as te_flax

from .data import VOCABULARY

# What the model adds to the logical axes of te_flax's layers, and the mesh axis that it is sharded over.
LOGICAL_AXIS_RULES = (("vocab", None),)


class GPT(nn.Module):
    """Next-byte logits, f32[B, S, 256], of tokens, i32[B, S]."""

    layers: int
    hidden: int
    heads: int
    mlp: int
    dtype: jnp.dtype = jnp.float32  # of activations; parameters are f32, and the layers compute in their input's dtype

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", "embed"))
        embedding = self.param("embedding", init, (VOCABULARY, self.hidden))
        # A product with one-hot rows, not a lookup: so is its gradient, where a lookup's would be a sum by atomics that
        # all meet in 256 rows.
        x = jax.nn.one_hot(tokens, VOCABULARY, dtype=self.dtype) @ embedding.astype(self.dtype)
        x = nn.with_logical_constraint(x, ("batch", "seqlen", None))
        for index in range(self.layers):
            x = te_flax.TransformerLayer(
                hidden_size=self.hidden,
                mlp_hidden_size=self.mlp,
                num_attention_heads=self.heads,
                layer_type=te_flax.TransformerLayerType.ENCODER,
                self_attn_mask_type="causal",
                enable_relative_embedding=False,
                enable_rotary_pos_emb=True,
                rotary_pos_emb_group_method="alternate",
                scale_attn_logits=True,
                scaled_query_init=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                name=f"layer_{index}",
            )(x, deterministic=True)
        x = te_flax.LayerNorm(name="norm")(x)
        # The head is the embedding again. With 256 outputs it costs next to nothing, so it stays in f32.
        return x.astype(jnp.float32) @ embedding.T
