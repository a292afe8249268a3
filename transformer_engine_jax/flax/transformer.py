"""TransformerLayer: attention, MLP, residuals and dropout."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_engine_jax.flax.attention import MultiHeadAttention
from transformer_engine_jax.flax.attention_stages import adapts
from transformer_engine_jax.flax.base import check_common, check_dims, check_positive, check_rate, one_of
from transformer_engine_jax.flax.layernorm import LayerNorm
from transformer_engine_jax.flax.mlp import LayerNormMLP
from transformer_engine_jax.flax.relative_positions import RelativePositionBiases
from transformer_engine_jax.ops.attention import SequenceDescriptor
from transformer_engine_jax.ops.dropout import Residual, drop_and_add
from transformer_engine_jax.sharding import activation_axes, constrain


class TransformerLayerType(enum.Enum):
    ENCODER = "encoder"
    DECODER = "decoder"


def check_fields(layer) -> None:
    """ValueError where the fields of a TransformerLayer do not fit together."""
    check_common(layer)
    one_of(layer, "layer_type", tuple(TransformerLayerType))
    for field in ("hidden_dropout", "intermediate_dropout", "attention_dropout", "drop_path"):
        check_rate(layer, field)
    for field in ("hidden_dropout_dims", "intermediate_dropout_dims"):
        check_dims(layer, field)
    check_positive(layer, "hidden_size", "mlp_hidden_size", "num_attention_heads", "num_gqa_groups", "kv_channels")
    if layer.kv_channels is None and layer.hidden_size % layer.num_attention_heads:
        raise ValueError(
            f"TransformerLayer: hidden_size={layer.hidden_size} does not divide into {layer.num_attention_heads} "
            "heads; give their size as kv_channels"
        )
    for value, what in (
        (layer.layer_type is TransformerLayerType.DECODER, "layer_type=DECODER, whose MLP follows the cross-attention"),
        (
            layer.apply_residual_connection_post_layernorm,
            "apply_residual_connection_post_layernorm: there are two norms",
        ),
    ):
        if layer.parallel_attention_mlp and value:
            raise ValueError(f"TransformerLayer.parallel_attention_mlp: expected False with {what}")
    if layer.context_parallel_causal_load_balanced and (layer.enable_relative_embedding or layer.relative_embedding):
        raise ValueError(
            "TransformerLayer.context_parallel_causal_load_balanced: expected False with relative position biases, "
            "which are in the order of the sequence; set enable_relative_embedding=False"
        )


def check_inputs(layer, inputs, encoded, of_encoded) -> None:
    """ValueError where the inputs do not fit a TransformerLayer; of_encoded: what belongs to `encoded`, by name."""
    if inputs.ndim != 3 or inputs.shape[-1] != layer.hidden_size:
        raise ValueError(f"TransformerLayer: inputs: expected [B, S, {layer.hidden_size}], got {list(inputs.shape)}")
    batch = 1 if layer.transpose_batch_sequence else 0
    if layer.layer_type is TransformerLayerType.DECODER:
        if encoded is None or jnp.ndim(encoded) != 3 or encoded.shape[batch] != inputs.shape[batch]:
            raise ValueError(
                "TransformerLayer: encoded: expected the encoder's output, of inputs' batch and of rank 3, for the "
                f"cross-attention of layer_type=DECODER, got {None if encoded is None else list(jnp.shape(encoded))}"
            )
        return
    given = [name for name, x in {"encoded": encoded, **of_encoded}.items() if x is not None]
    if given:
        raise ValueError(
            f"TransformerLayer: {', '.join(given)}: expected None, for layer_type=ENCODER has no cross-attention that "
            "would use it; make the layer with layer_type=TransformerLayerType.DECODER"
        )


def attended_length(layer, inputs, cached_key, max_decode_length: int | None) -> int:
    """The number of keys of the self-attention: of the KV cache where there is one, else of the inputs."""
    length = inputs.shape[0 if layer.transpose_batch_sequence else 1] if cached_key is None else cached_key.shape[1]
    if max_decode_length not in (None, length):
        raise ValueError(
            f"TransformerLayer: max_decode_length: expected {length}, the length of the KV cache or of the inputs that "
            f"it is made for, got {max_decode_length}"
        )
    return length


def summed_bias(relative, given):
    """The sum of a layer's relative position biases and of the bias given to it; either may be None."""
    if relative is None or given is None:
        return given if relative is None else relative
    batch_free = relative.shape[1:]
    if jnp.ndim(given) != 4 or any(n not in (1, m) for n, m in zip(given.shape[1:], batch_free)):
        raise ValueError(
            f"TransformerLayer: core_attention_bias: expected a shape that broadcasts to [B, "
            f"{', '.join(map(str, batch_free))}], got {list(jnp.shape(given))}"
        )
    return relative + given


class TransformerLayer(nn.Module):
    """One layer of a Transformer.

    Submodules `attention`, `mlp`, `relpos_bias`, `output_layernorm`; with layer_type DECODER `self_attention` and
    `encoder_decoder_attention` in place of `attention`. Pre-norm by default. output_layernorm=True moves the first norm
    to the end; with apply_residual_connection_post_layernorm=True too, residuals start at the norms' outputs: the
    post-norm layer. parallel_attention_mlp: both blocks take the layer's inputs, each by its own norm.
    enable_relative_embedding: T5's biases, of 32 buckets up to distance 128, unless relative_embedding is given; for
    both directions in an encoder only. kv_channels: the size of a head, None means hidden_size / num_attention_heads.
    window_size, score_mod, softmax_type, self_attn_* are of the self-attention. The fields of RoPE hold for both
    attentions; qk_norm_*, checkpoint_core_attention and enable_sequence_parallel too: see MultiHeadAttention;
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
          attention_mask: bool, broadcastable to [B, H, S, S], True masks; for self_attn_mask_type with "padding".
          encoder_decoder_mask: bool, broadcastable to [B, H, S, Sk], True masks.
          deterministic: switches dropout off.
          decode: the self-attention keeps a KV cache, as MultiHeadAttention's does; masks and biases are of its length.
          max_decode_length: that length, which is checked; not needed.
          sequence_descriptor, encoder_decoder_sequence_descriptor: sequences of padded or packed rows, in place of the
            masks; the latter of pairs, for queries and for keys.
          core_attention_bias: broadcastable to [B, H, S, S], of the self-attention, beside relative position biases.
          rotary_pos_emb: RoPE of the self-attention in place of what the fields say, as MultiHeadAttention takes it.

        Raises:
          ValueError: shapes or options do not fit.
        """
        check_fields(self)
        decoder = self.layer_type is TransformerLayerType.DECODER
        of_encoded = dict(
            encoder_decoder_mask=encoder_decoder_mask,
            encoder_decoder_sequence_descriptor=encoder_decoder_sequence_descriptor,
        )
        check_inputs(self, inputs, encoded, of_encoded)
        inputs = self._constrained(inputs)
        post = self.apply_residual_connection_post_layernorm
        attend = self._attention(
            "self_attention" if decoder else "attention",
            input_layernorm=not self.output_layernorm,
            attn_mask_type=self.self_attn_mask_type,
            attn_bias_type=self.self_attn_bias_type,
            window_size=self.window_size,
            softmax_type=self.softmax_type,
            score_mod=self.score_mod,
            context_parallel_causal_load_balanced=self.context_parallel_causal_load_balanced,
            context_parallel_axis=self.context_parallel_axis,
            context_parallel_strategy=self.context_parallel_strategy,
        )
        cached_key = attend.get_variable("cache", "cached_key") if decode else None
        length = attended_length(self, inputs, cached_key, max_decode_length)
        add = self._addition(deterministic)
        attended, normed = attend(
            inputs, inputs, attention_mask, summed_bias(self._position_bias(length), core_attention_bias),
            decode=decode, deterministic=deterministic, sequence_descriptor=sequence_descriptor,
            rotary_pos_emb=rotary_pos_emb, residual=not post and add,
        )  # fmt: skip
        x = add(attended, normed) if post else attended

        if decoder:
            masked = any(value is not None for value in of_encoded.values())
            cross = self._attention("encoder_decoder_attention", attn_mask_type="padding" if masked else "no_mask")
            add = self._addition(deterministic)
            attended, normed = cross(
                x, encoded, encoder_decoder_mask,
                decode=decode, deterministic=deterministic, sequence_descriptor=encoder_decoder_sequence_descriptor,
                residual=not post and add,
            )  # fmt: skip
            x = add(attended, normed) if post else attended

        add = self._addition(deterministic)
        if self.parallel_attention_mlp:
            fed, _ = self._mlp()(inputs, deterministic=deterministic)
            x = self._constrained(x + fed) if add is True else add(fed, x)
        else:
            fed, normed = self._mlp()(x, deterministic=deterministic, residual=not post and add)
            x = add(fed, normed) if post else self._constrained(fed)

        if self.output_layernorm:
            x = LayerNorm(
                epsilon=self.layernorm_epsilon,
                layernorm_type=self.layernorm_type,
                zero_centered_gamma=self.zero_centered_gamma,
                dtype=self.dtype,
                name="output_layernorm",
            )(x)
        return x

    @nn.nowrap
    def _attention(self, name: str, **fields) -> MultiHeadAttention:
        return MultiHeadAttention(
            head_dim=self.kv_channels or self.hidden_size // self.num_attention_heads,
            num_attention_heads=self.num_attention_heads,
            num_gqa_groups=self.num_gqa_groups,
            attention_dropout=self.attention_dropout,
            dropout_rng_name=self.dropout_rng_name,
            layernorm_type=self.layernorm_type,
            layernorm_epsilon=self.layernorm_epsilon,
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            zero_centered_gamma=self.zero_centered_gamma,
            kernel_init=self.mha_kernel_init,
            use_bias=self.use_bias,
            bias_init=self.bias_init,
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
            qk_norm_type=self.qk_norm_type,
            qk_norm_epsilon=self.qk_norm_epsilon,
            qk_norm_before_rope=self.qk_norm_before_rope,
            checkpoint_core_attention=self.checkpoint_core_attention,
            name=name,
            **fields,
        )

    @nn.nowrap
    def _mlp(self) -> LayerNormMLP:
        axes = {}
        if self.enable_sequence_parallel:
            of = partial(activation_axes, transposed=self.transpose_batch_sequence)
            axes = dict(
                layernorm_input_axes=of(sequence_parallel=True), dot_1_input_axes=of(), dot_2_input_axes=of("mlp")
            )
        return LayerNormMLP(
            intermediate_dim=self.mlp_hidden_size,
            layernorm_type=self.layernorm_type,
            epsilon=self.layernorm_epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            kernel_init=self.mlp_kernel_init,
            use_bias=self.use_bias,
            bias_init=self.bias_init,
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
            name="mlp",
            **axes,
        )

    def _position_bias(self, length: int) -> jax.Array | None:
        if not self.enable_relative_embedding:
            return None
        embedding = self.relative_embedding or RelativePositionBiases(
            num_buckets=32,
            max_distance=128,
            num_attention_heads=self.num_attention_heads,
            dtype=self.dtype,
            name="relpos_bias",
        )
        return embedding(length, length, self.layer_type is TransformerLayerType.ENCODER)

    def _constrained(self, x) -> jax.Array:
        axes = dict(transposed=self.transpose_batch_sequence, sequence_parallel=self.enable_sequence_parallel)
        return constrain(x, activation_axes(**axes))

    def _addition(self, deterministic: bool) -> Residual:
        """How a residual connection adds: with dropout of features and of whole samples (stochastic depth) on its way.

        Where nothing happens on the way, products do; one sharded along the sequence would be gathered for that.
        """
        others = (0, 2) if self.transpose_batch_sequence else (1, 2)  # a sample is kept or dropped as a whole
        dropouts = ((self.hidden_dropout, self.hidden_dropout_dims), (self.drop_path, others))
        keyed = [(self.make_rng(self.dropout_rng_name), *d) for d in dropouts if d[0] > 0 and not deterministic]
        if not (keyed or self.apply_residual_connection_post_layernorm or self.enable_sequence_parallel):
            return True
        return lambda branch, residual: self._constrained(drop_and_add(branch, residual, keyed))
