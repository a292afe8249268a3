"""TransformerLayer: attention, MLP, residuals and dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from transformer_engine_jax.flax.attention import adapts
from transformer_engine_jax.flax.dot_product_attention import one_of
from transformer_engine_jax.flax.transformer import TransformerLayerType
from transformer_engine_jax.nnx.attention import MultiHeadAttention, RelativePositionBiases
from transformer_engine_jax.nnx.base import Fp8Module, make_dropout, module
from transformer_engine_jax.nnx.layernorm import LayerNorm
from transformer_engine_jax.nnx.mlp import LayerNormMLP
from transformer_engine_jax.sharding import constrain


@module
class TransformerLayer(Fp8Module):
    """One layer of a Transformer; submodules `attention`, `mlp`, `relpos_bias`, `output_layernorm`.

    Pre-norm by default. output_layernorm=True moves the first norm to the end; with
    apply_residual_connection_post_layernorm=True too, residuals start at the norms' outputs: the post-norm layer.
    enable_relative_embedding: T5's biases, of 32 buckets up to distance 128, unless relative_embedding is given.
    """

    _: KW_ONLY
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
    mha_kernel_init: InitVar[Callable | None] = None
    mlp_kernel_init: InitVar[Callable | None] = None
    mlp_activations: Sequence[str | Callable] = ("gelu",)
    mlp_activation_params: dict | None = None
    use_bias: bool = False
    bias_init: InitVar[Callable] = nn.initializers.zeros
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: InitVar[bool] = False
    float32_attention_logits: bool = False
    layer_type: TransformerLayerType = TransformerLayerType.ENCODER
    self_attn_mask_type: str = "causal"
    self_attn_bias_type: str | None = None
    enable_relative_embedding: bool = True
    relative_embedding: nnx.Module | None = None
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
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, mha_kernel_init, mlp_kernel_init, bias_init, output_layernorm, rngs):
        self.freeze_fields()
        one_of(self, "layer_type", (TransformerLayerType.ENCODER,), " (the decoder is not available yet)")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"TransformerLayer.hidden_size: expected a multiple of num_attention_heads={self.num_attention_heads}, "
                f"got {self.hidden_size}"
            )
        self.attention = self._make_attention(mha_kernel_init, bias_init, not output_layernorm, rngs)
        self.mlp = self._make_mlp(mlp_kernel_init, bias_init, rngs)
        self.relpos_bias = nnx.data(None)
        if self.enable_relative_embedding and self.relative_embedding is None:
            self.relpos_bias = RelativePositionBiases(32, 128, self.num_attention_heads, dtype=self.dtype, rngs=rngs)
        self.output_layernorm = nnx.data(None)
        if output_layernorm:
            self.output_layernorm = LayerNorm(
                self.hidden_size,
                epsilon=self.layernorm_epsilon,
                layernorm_type=self.layernorm_type,
                zero_centered_gamma=self.zero_centered_gamma,
                dtype=self.dtype,
                rngs=rngs,
            )
        self.dropout = make_dropout(self.hidden_dropout, self.hidden_dropout_dims, self.dropout_rng_name, rngs)
        others = (0, 2) if self.transpose_batch_sequence else (1, 2)  # a sample is kept or dropped as a whole
        self.path_dropout = make_dropout(self.drop_path, others, self.dropout_rng_name, rngs)

    def _make_attention(self, kernel_init, bias_init, input_layernorm: bool, rngs) -> MultiHeadAttention:
        return MultiHeadAttention(
            self.hidden_size,
            self.hidden_size // self.num_attention_heads,
            self.num_attention_heads,
            num_gqa_groups=self.num_gqa_groups,
            attention_dropout=self.attention_dropout,
            dropout_rng_name=self.dropout_rng_name,
            input_layernorm=input_layernorm,
            layernorm_type=self.layernorm_type,
            layernorm_epsilon=self.layernorm_epsilon,
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            zero_centered_gamma=self.zero_centered_gamma,
            kernel_init=kernel_init,
            use_bias=self.use_bias,
            bias_init=bias_init,
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
            rngs=rngs,
        )

    def _make_mlp(self, kernel_init, bias_init, rngs) -> LayerNormMLP:
        return LayerNormMLP(
            self.hidden_size,
            intermediate_dim=self.mlp_hidden_size,
            layernorm_type=self.layernorm_type,
            epsilon=self.layernorm_epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            kernel_init=kernel_init,
            use_bias=self.use_bias,
            bias_init=bias_init,
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            activations=self.mlp_activations,
            activation_params=self.mlp_activation_params,
            intermediate_dropout_rng_name=self.dropout_rng_name,
            intermediate_dropout_rate=self.intermediate_dropout,
            intermediate_hidden_dropout_dims=self.intermediate_dropout_dims,
            enable_low_rank_adaptation=adapts(self.low_rank_adaptation_scope, "mlp"),
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha,
            dtype=self.dtype,
            rngs=rngs,
        )

    def __call__(
        self, inputs: jax.Array, attention_mask: jax.Array | None = None, *, deterministic: bool | None = None
    ) -> jax.Array:
        """inputs [B, S, hidden] -> [B, S, hidden]; attention_mask bool, broadcastable to [B, H, S, S], True masks.

        deterministic: switches dropout off; None is what model.train() and model.eval() said.
        """
        if inputs.ndim != 3 or inputs.shape[-1] != self.hidden_size:
            raise ValueError(f"TransformerLayer: inputs: expected [B, S, {self.hidden_size}], got {list(inputs.shape)}")
        tokens = ("seqlen", "batch") if self.transpose_batch_sequence else ("batch", "seqlen")
        inputs = constrain(inputs, (*tokens, "embed_activations"))
        post = self.apply_residual_connection_post_layernorm
        bias = self._position_bias(inputs)
        attended, normed = self.attention(inputs, mask=attention_mask, bias=bias, deterministic=deterministic)
        x = self._residual(attended, normed if post else inputs, deterministic)
        fed, normed = self.mlp(x, deterministic=deterministic)
        x = self._residual(fed, normed if post else x, deterministic)
        return x if self.output_layernorm is None else self.output_layernorm(x)

    def _position_bias(self, inputs) -> jax.Array | None:
        embedding = self.relpos_bias if self.relative_embedding is None else self.relative_embedding
        if embedding is None:
            return None
        length = inputs.shape[0 if self.transpose_batch_sequence else 1]
        return embedding(length, length, self.layer_type is TransformerLayerType.ENCODER)

    def _residual(self, branch, residual, deterministic: bool | None) -> jax.Array:
        """residual + branch, with dropout of features and of whole samples (stochastic depth) on the branch."""
        for dropout in (self.dropout, self.path_dropout):
            branch = branch if dropout is None else dropout(branch, deterministic=deterministic)
        return residual + branch
