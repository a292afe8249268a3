"""TransformerLayer: attention, MLP, residuals and dropout."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_engine_jax.flax.attention import MultiHeadAttention, RelativePositionBiases, adapts
from transformer_engine_jax.flax.layernorm import LayerNorm
from transformer_engine_jax.flax.mlp import LayerNormMLP
from transformer_engine_jax.sharding import constrain


class TransformerLayerType(enum.Enum):
    ENCODER = "encoder"
    DECODER = "decoder"


class TransformerLayer(nn.Module):
    """One layer of a Transformer; submodules `attention`, `mlp`, `relpos_bias`, `output_layernorm`.

    Pre-norm by default. output_layernorm=True moves the first norm to the end; with
    apply_residual_connection_post_layernorm=True too, residuals start at the norms' outputs: the post-norm layer.
    enable_relative_embedding: T5's biases, of 32 buckets up to distance 128, unless relative_embedding is given.
    """

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    num_gqa_groups: int | None = None
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    hidden_dropout: float = 0.1
    hidden_dropout_dims: Sequence[int] = ()
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.0
    intermediate_dropout_dims: Sequence[int] = ()
    dropout_rng_name: str = "dropout"
    mha_kernel_init: Callable | None = None
    mlp_kernel_init: Callable | None = None
    mlp_activations: Sequence[str | Callable] = ("gelu",)
    mlp_activation_params: dict | None = None
    use_bias: bool = False
    bias_init: Callable = nn.initializers.zeros
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    float32_attention_logits: bool = False
    layer_type: TransformerLayerType = TransformerLayerType.ENCODER
    self_attn_mask_type: str = "causal"
    self_attn_bias_type: str | None = None
    enable_relative_embedding: bool = True
    relative_embedding: nn.Module | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: Any = jnp.float32
    drop_path: float = 0.0
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Callable | None = None

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        encoder_decoder_mask: jax.Array | None = None,
        deterministic: bool = False,
        decode: bool = False,
        max_decode_length: int | None = None,
    ) -> jax.Array:
        """inputs [B, S, hidden] -> [B, S, hidden]; attention_mask bool, broadcastable to [B, H, S, S], True masks."""
        if self.layer_type is not TransformerLayerType.ENCODER or encoded is not None:
            raise ValueError("TransformerLayer.layer_type: expected ENCODER, the decoder is not available yet")
        if decode or max_decode_length is not None:
            raise ValueError("TransformerLayer: decode=True, a KV cache, is not available yet")
        if inputs.ndim != 3 or inputs.shape[-1] != self.hidden_size:
            raise ValueError(f"TransformerLayer: inputs: expected [B, S, {self.hidden_size}], got {list(inputs.shape)}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"TransformerLayer: hidden_size={self.hidden_size} does not divide into "
                f"{self.num_attention_heads} heads"
            )
        tokens = ("seqlen", "batch") if self.transpose_batch_sequence else ("batch", "seqlen")
        inputs = constrain(inputs, (*tokens, "embed_activations"))
        post = self.apply_residual_connection_post_layernorm

        attended, normed = MultiHeadAttention(
            head_dim=self.hidden_size // self.num_attention_heads,
            num_attention_heads=self.num_attention_heads,
            num_gqa_groups=self.num_gqa_groups,
            attention_dropout=self.attention_dropout,
            dropout_rng_name=self.dropout_rng_name,
            input_layernorm=not self.output_layernorm,
            layernorm_type=self.layernorm_type,
            layernorm_epsilon=self.layernorm_epsilon,
            return_layernorm_output=post,
            zero_centered_gamma=self.zero_centered_gamma,
            kernel_init=self.mha_kernel_init,
            use_bias=self.use_bias,
            bias_init=self.bias_init,
            attn_mask_type=self.self_attn_mask_type,
            attn_bias_type=self.self_attn_bias_type,
            enable_rotary_pos_emb=self.enable_rotary_pos_emb,
            rotary_pos_emb_windows=self.rotary_pos_emb_windows,
            rotary_pos_emb_group_method=self.rotary_pos_emb_group_method,
            low_rank_adaptation_scope=self.low_rank_adaptation_scope,
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha,
            dtype=self.dtype,
            fuse_qkv_params=self.fuse_qkv_params,
            transpose_batch_sequence=self.transpose_batch_sequence,
            enable_sequence_parallel=self.enable_sequence_parallel,
            scale_attn_logits=self.scale_attn_logits,
            scaled_query_init=self.scaled_query_init,
            float32_logits=self.float32_attention_logits,
            window_size=self.window_size,
            softmax_type=self.softmax_type,
            score_mod=self.score_mod,
            name="attention",
        )(inputs, inputs, attention_mask, self._position_bias(inputs), deterministic=deterministic)
        x = self._residual(attended, normed if post else inputs, deterministic)

        fed, normed = LayerNormMLP(
            intermediate_dim=self.mlp_hidden_size,
            layernorm_type=self.layernorm_type,
            epsilon=self.layernorm_epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            kernel_init=self.mlp_kernel_init,
            use_bias=self.use_bias,
            bias_init=self.bias_init,
            return_layernorm_output=post,
            activations=self.mlp_activations,
            activation_params=self.mlp_activation_params,
            intermediate_dropout_rng_name=self.dropout_rng_name,
            intermediate_dropout_rate=self.intermediate_dropout,
            intermediate_hidden_dropout_dims=self.intermediate_dropout_dims,
            enable_low_rank_adaptation=adapts(self.low_rank_adaptation_scope, "mlp"),
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha,
            dtype=self.dtype,
            name="mlp",
        )(x, deterministic=deterministic)
        x = self._residual(fed, normed if post else x, deterministic)

        if self.output_layernorm:
            x = LayerNorm(
                epsilon=self.layernorm_epsilon,
                layernorm_type=self.layernorm_type,
                zero_centered_gamma=self.zero_centered_gamma,
                dtype=self.dtype,
                name="output_layernorm",
            )(x)
        return x

    def _position_bias(self, inputs) -> jax.Array | None:
        if self.relative_embedding is None and not self.enable_relative_embedding:
            return None
        embedding = self.relative_embedding or RelativePositionBiases(
            num_buckets=32,
            max_distance=128,
            num_attention_heads=self.num_attention_heads,
            dtype=self.dtype,
            name="relpos_bias",
        )
        length = inputs.shape[0 if self.transpose_batch_sequence else 1]
        return embedding(length, length, self.layer_type is TransformerLayerType.ENCODER)

    def _residual(self, branch, residual, deterministic: bool) -> jax.Array:
        """residual + branch, with dropout of features and of whole samples (stochastic depth) on the branch."""
        if self.hidden_dropout > 0 and not deterministic:
            branch = nn.Dropout(
                self.hidden_dropout,
                broadcast_dims=tuple(self.hidden_dropout_dims),
                rng_collection=self.dropout_rng_name,
            )(branch, deterministic=False)
        if self.drop_path > 0 and not deterministic:
            batch = 1 if self.transpose_batch_sequence else 0
            others = tuple(axis for axis in range(branch.ndim) if axis != batch)
            branch = nn.Dropout(self.drop_path, broadcast_dims=others, rng_collection=self.dropout_rng_name)(
                branch, deterministic=False
            )
        return residual + branch
