"""TransformerLayer: attention, MLP, residuals and dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_engine_jax.flax.attention import MultiHeadAttention
from transformer_engine_jax.flax.base import Fp8Module
from transformer_engine_jax.flax.layernorm import LayerNorm
from transformer_engine_jax.flax.mlp import LayerNormMLP
from transformer_engine_jax.flax.relative_positions import RelativePositionBiases
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
from transformer_engine_jax.ops.attention import SequenceDescriptor
from transformer_engine_jax.ops.dropout import Residual


class TransformerLayer(Fp8Module):
    """One layer of a Transformer; it computes in its inputs' dtype, `dtype` is that of its parameters.

    Submodules `attention`, `mlp`, `relpos_bias`, `output_layernorm`; with layer_type DECODER `self_attention` and
    `encoder_decoder_attention` in place of `attention`. Pre-norm by default. output_layernorm=True moves the first norm
    to the end; with apply_residual_connection_post_layernorm=True too, residuals start at the norms' outputs: the
    post-norm layer. parallel_attention_mlp: both blocks take the layer's inputs, each by its own norm.
    enable_relative_embedding: T5's biases, of 32 buckets up to distance 128, unless relative_embedding is given; for
    both directions in an encoder only. kv_channels: the size of a head, None means hidden_size / num_attention_heads.
    hidden_dropout_dims, intermediate_dropout_dims: axes along which what is dropped is the same, of [B, S, hidden] and
    [B, S, mlp_hidden], or of [S, B, ..] where they lie so; drop_path: the rate at which a block's output is dropped for
    an example (stochastic depth, Huang et al., 2016). low_rank_adaptation_scope: MultiHeadAttention's, and "mlp" and
    "exclude_mlp". window_size, score_mod, softmax_type, self_attn_* are of the self-attention. The fields of RoPE hold
    for both attentions; qk_norm_*, checkpoint_core_attention and enable_sequence_parallel too: see MultiHeadAttention;
    context_parallel_* are of the self-attention: see DotProductAttention.
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
    kv_channels: int | None = None
    parallel_attention_mlp: bool = False
    qk_norm_type: str | None = None
    qk_norm_epsilon: float = 1e-6
    qk_norm_before_rope: bool = False
    checkpoint_core_attention: bool = False
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"

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
        *,
        sequence_descriptor: SequenceDescriptor | None = None,
        encoder_decoder_sequence_descriptor: SequenceDescriptor | None = None,
        core_attention_bias: jax.Array | None = None,
        rotary_pos_emb=None,
    ) -> jax.Array:
        """inputs [B, S, hidden] -> [B, S, hidden], in the dtype of inputs.

        Args:
          encoded: [B, Sk, h], the encoder's output; of layer_type DECODER, and only of it.
          attention_mask: bool, four axes that broadcast to [B, H, S, S], True masks; for self_attn_mask_type with
            "padding".
          encoder_decoder_mask: likewise, to [B, H, S, Sk].
          deterministic: switches dropout off.
          decode: the self-attention keeps a KV cache, as MultiHeadAttention's does; masks and biases are of its length.
          max_decode_length: that length, which is checked; not needed.
          sequence_descriptor, encoder_decoder_sequence_descriptor: sequences of padded or packed rows, in place of the
            masks; the latter of pairs, for queries and for keys.
          core_attention_bias: four axes that broadcast to [B, H, S, S], of the self-attention, beside relative position
            biases.
          rotary_pos_emb: RoPE of the self-attention in place of what the fields say, as MultiHeadAttention takes it.

        Raises:
          ValueError: shapes or options do not fit.
          TypeError: a SequenceDescriptor in place of a mask.
        """
        check_fields(self)
        of_encoded = dict(
            encoder_decoder_mask=encoder_decoder_mask,
            encoder_decoder_sequence_descriptor=encoder_decoder_sequence_descriptor,
        )
        inputs = jnp.asarray(inputs)
        check_inputs(self, inputs, encoded, of_encoded)
        inputs = constrained(self, inputs)
        decoder = self.layer_type is TransformerLayerType.DECODER
        common = dict(decode=decode, deterministic=deterministic)
        attention = self._attention(
            "self_attention" if decoder else "attention",
            **self_attention_fields(self) | dict(input_layernorm=not self.output_layernorm),
        )
        cached_key = attention.get_variable("cache", "cached_key") if decode else None
        length = attended_length(self, inputs, cached_key, max_decode_length)
        bias = summed_bias(self._position_bias(length), core_attention_bias)
        attentions = [
            lambda x, residual: attention(
                x, None, attention_mask, bias, sequence_descriptor=sequence_descriptor, rotary_pos_emb=rotary_pos_emb,
                residual=residual, **common,
            )
        ]  # fmt: skip
        if decoder:
            mask_type = "no_mask" if all(value is None for value in of_encoded.values()) else "padding"
            cross = self._attention(
                "encoder_decoder_attention", **attention_fields(self) | dict(attn_mask_type=mask_type)
            )
            attentions.append(
                lambda x, residual: cross(
                    x, encoded, encoder_decoder_mask, sequence_descriptor=encoder_decoder_sequence_descriptor,
                    residual=residual, **common,
                )
            )  # fmt: skip
        mlp = LayerNormMLP(kernel_init=self.mlp_kernel_init, bias_init=self.bias_init, name="mlp", **mlp_fields(self))
        feed = partial(mlp, deterministic=deterministic)
        x = run_layer(self, inputs, attentions, feed, partial(self._addition, deterministic))
        if self.output_layernorm:
            x = LayerNorm(
                epsilon=self.layernorm_epsilon,
                layernorm_type=self.layernorm_type,
                zero_centered_gamma=self.zero_centered_gamma,
                dtype=self.dtype,
                name="output_layernorm",
            )(x)
        else:
            self.check_absent("output_layernorm", "output_layernorm")
        return x

    @nn.nowrap
    def _attention(self, name: str, **fields) -> MultiHeadAttention:
        return MultiHeadAttention(kernel_init=self.mha_kernel_init, bias_init=self.bias_init, name=name, **fields)

    def _position_bias(self, length: int) -> jax.Array | None:
        if not self.enable_relative_embedding:
            return self.check_absent("enable_relative_embedding", "relpos_bias", "relative_embedding")
        embedding = self.relative_embedding or RelativePositionBiases(
            num_buckets=32,
            max_distance=128,
            num_attention_heads=self.num_attention_heads,
            dtype=self.dtype,
            name="relpos_bias",
        )
        return embedding(length, length, self.layer_type is TransformerLayerType.ENCODER)

    def _addition(self, deterministic: bool) -> Residual:
        """How a residual connection adds, with dropout of features and of whole samples (stochastic depth)."""
        dropouts = ((self.hidden_dropout, self.hidden_dropout_dims), (self.drop_path, of_samples(self)))
        on = [dropout for dropout in dropouts if dropout[0] > 0 and not deterministic]
        return addition(self, [(self.make_rng(self.dropout_rng_name), *dropout) for dropout in on])
