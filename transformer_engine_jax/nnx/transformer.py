"""TransformerLayer: attention, MLP, residuals and dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from transformer_engine_jax.modules.checks import check_bool
from transformer_engine_jax.modules.transformer import (
    TransformerLayerType,
    addition,
    attended_length,
    attention_fields,
    check_fields,
    check_inputs,
    constrained,
    mlp_fields,
    of_samples,
    run_layer,
    self_attention_fields,
    summed_bias,
)
from transformer_engine_jax.nnx.attention import MultiHeadAttention
from transformer_engine_jax.nnx.base import Fp8Module, dropping, make_dropout, module
from transformer_engine_jax.nnx.layernorm import LayerNorm
from transformer_engine_jax.nnx.mlp import LayerNormMLP
from transformer_engine_jax.nnx.relative_positions import RelativePositionBiases
from transformer_engine_jax.ops.attention import SequenceDescriptor
from transformer_engine_jax.ops.dropout import Residual


@module
class TransformerLayer(Fp8Module):
    """One layer of a Transformer; fields, submodules and arguments are those of the Linen module.

    encoded_size: of the encoder's output, for layer_type DECODER; None means hidden_size.
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
    kv_channels: int | None = None
    parallel_attention_mlp: bool = False
    qk_norm_type: str | None = None
    qk_norm_epsilon: float = 1e-6
    qk_norm_before_rope: bool = False
    checkpoint_core_attention: bool = False
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    encoded_size: int | None = None
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, mha_kernel_init, mlp_kernel_init, bias_init, output_layernorm, rngs):
        check_fields(self)
        check_bool(self, "output_layernorm", output_layernorm)
        inits = dict(kernel_init=mha_kernel_init, bias_init=bias_init, rngs=rngs)
        own = self_attention_fields(self) | dict(input_layernorm=not output_layernorm)
        attention = MultiHeadAttention(self.hidden_size, **own, **inits)
        if self.layer_type is TransformerLayerType.DECODER:
            cross = attention_fields(self) | dict(attn_mask_type="padding")
            self.self_attention = attention
            self.encoder_decoder_attention = MultiHeadAttention(
                self.hidden_size, in_kv_features=self.encoded_size or self.hidden_size, **cross, **inits
            )
        else:
            self.attention = attention
        of_mlp = dict(mlp_fields(self), kernel_init=mlp_kernel_init, bias_init=bias_init, rngs=rngs)
        if nnx.has_data(self.mlp_activations):
            of_mlp["activations"] = nnx.data(self.mlp_activations)
        self.mlp = LayerNormMLP(self.hidden_size, **of_mlp)
        self.hand_on("score_mod", "mlp_activations")
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
        self.path_dropout = make_dropout(self.drop_path, of_samples(self), self.dropout_rng_name, rngs)

    def init_cache(self, input_shape: tuple[int, ...], dtype=jnp.float32) -> None:
        """Makes an empty KV cache for calls with decode=True; input_shape [B, S, hidden], S the greatest length."""
        for attention in (self._own_attention(), getattr(self, "encoder_decoder_attention", None)):
            if attention is not None:
                attention.init_cache(input_shape, dtype)

    def _own_attention(self) -> MultiHeadAttention:
        return self.self_attention if self.layer_type is TransformerLayerType.DECODER else self.attention

    def __call__(
        self,
        inputs: jax.Array,
        encoded: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        encoder_decoder_mask: jax.Array | None = None,
        deterministic: bool | None = None,
        decode: bool = False,
        max_decode_length: int | None = None,
        *,
        sequence_descriptor: SequenceDescriptor | None = None,
        encoder_decoder_sequence_descriptor: SequenceDescriptor | None = None,
        core_attention_bias: jax.Array | None = None,
        rotary_pos_emb=None,
    ) -> jax.Array:
        """inputs [B, S, hidden] -> [B, S, hidden]; arguments as of the Linen module.

        deterministic: switches dropout off; None is what model.train() and model.eval() said. decode: the
        self-attention attends to the KV cache that `init_cache` makes, and puts the tokens into it.
        """
        of_encoded = dict(
            encoder_decoder_mask=encoder_decoder_mask,
            encoder_decoder_sequence_descriptor=encoder_decoder_sequence_descriptor,
        )
        inputs = jnp.asarray(inputs)
        check_inputs(self, inputs, encoded, of_encoded)
        inputs, common = constrained(self, inputs), dict(decode=decode, deterministic=deterministic)
        attention = self._own_attention()
        length = attended_length(
            self, inputs, getattr(attention, "cached_key", None) if decode else None, max_decode_length
        )
        bias = summed_bias(self._position_bias(length), core_attention_bias)
        attentions = [
            lambda x, residual: attention(
                x, None, attention_mask, bias, sequence_descriptor=sequence_descriptor, rotary_pos_emb=rotary_pos_emb,
                residual=residual, **common,
            )
        ]  # fmt: skip
        if self.layer_type is TransformerLayerType.DECODER:
            mask_type = "no_mask" if all(value is None for value in of_encoded.values()) else "padding"
            attentions.append(
                lambda x, residual: self.encoder_decoder_attention(
                    x, encoded, encoder_decoder_mask, sequence_descriptor=encoder_decoder_sequence_descriptor,
                    attn_mask_type=mask_type, residual=residual, **common,
                )
            )  # fmt: skip
        feed = partial(self.mlp, deterministic=deterministic)
        x = run_layer(self, inputs, attentions, feed, partial(self._addition, deterministic))
        return x if self.output_layernorm is None else self.output_layernorm(x)

    def _position_bias(self, length: int) -> jax.Array | None:
        embedding = self.relpos_bias if self.relative_embedding is None else self.relative_embedding
        if embedding is None or not self.enable_relative_embedding:
            return None
        return embedding(length, length, self.layer_type is TransformerLayerType.ENCODER)

    def _addition(self, deterministic: bool | None) -> Residual:
        """How a residual connection adds, with dropout of features and of whole samples (stochastic depth)."""
        dropouts = [d for d in (self.dropout, self.path_dropout) if dropping(d, deterministic)]
        return addition(self, [(d.rngs(), d.rate, d.broadcast_dims) for d in dropouts])
