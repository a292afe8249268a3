"""A layer of a Transformer: what its fields and inputs must be, what its parts are, how it adds them up."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from transformer_engine_jax.modules.attention import adapts
from transformer_engine_jax.modules.checks import check_common, check_dims, check_positive, check_rate, one_of
from transformer_engine_jax.ops.dropout import Residual, drop_and_add
from transformer_engine_jax.sharding import activation_axes, constrain


class TransformerLayerType(enum.Enum):
    """ENCODER: self-attention and an MLP; DECODER: cross-attention between them."""

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
    embedding = layer.relative_embedding
    if embedding is not None and (isinstance(embedding, type) or not callable(embedding)):
        raise ValueError(
            "TransformerLayer.relative_embedding: expected a module, such as RelativePositionBiases(num_buckets=32, "
            f"max_distance=128, num_attention_heads={layer.num_attention_heads}), or None, got {embedding!r}"
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
    if layer.context_parallel_causal_load_balanced and layer.enable_relative_embedding:
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
        if encoded is None or jnp.ndim(encoded) != 3 or jnp.shape(encoded)[batch] != inputs.shape[batch]:
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


def attention_fields(layer: Any) -> dict[str, Any]:
    """Fields of a MultiHeadAttention that a TransformerLayer hands down, to either of two."""
    return dict(
        head_dim=layer.kv_channels or layer.hidden_size // layer.num_attention_heads,
        num_attention_heads=layer.num_attention_heads,
        num_gqa_groups=layer.num_gqa_groups,
        attention_dropout=layer.attention_dropout,
        dropout_rng_name=layer.dropout_rng_name,
        layernorm_type=layer.layernorm_type,
        layernorm_epsilon=layer.layernorm_epsilon,
        return_layernorm_output=layer.apply_residual_connection_post_layernorm,
        zero_centered_gamma=layer.zero_centered_gamma,
        use_bias=layer.use_bias,
        enable_rotary_pos_emb=layer.enable_rotary_pos_emb,
        rotary_pos_emb_windows=layer.rotary_pos_emb_windows,
        rotary_pos_emb_group_method=layer.rotary_pos_emb_group_method,
        low_rank_adaptation_scope=layer.low_rank_adaptation_scope,
        low_rank_adaptation_dim=layer.low_rank_adaptation_dim,
        low_rank_adaptation_alpha=layer.low_rank_adaptation_alpha,
        dtype=layer.dtype,
        fuse_qkv_params=layer.fuse_qkv_params,
        transpose_batch_sequence=layer.transpose_batch_sequence,
        enable_sequence_parallel=layer.enable_sequence_parallel,
        scale_attn_logits=layer.scale_attn_logits,
        scaled_query_init=layer.scaled_query_init,
        float32_logits=layer.float32_attention_logits,
        qk_norm_type=layer.qk_norm_type,
        qk_norm_epsilon=layer.qk_norm_epsilon,
        qk_norm_before_rope=layer.qk_norm_before_rope,
        checkpoint_core_attention=layer.checkpoint_core_attention,
    )


def self_attention_fields(layer: Any) -> dict[str, Any]:
    """`attention_fields`, and those that are of the self-attention alone."""
    return attention_fields(layer) | dict(
        attn_mask_type=layer.self_attn_mask_type,
        attn_bias_type=layer.self_attn_bias_type,
        window_size=layer.window_size,
        softmax_type=layer.softmax_type,
        score_mod=layer.score_mod,
        context_parallel_causal_load_balanced=layer.context_parallel_causal_load_balanced,
        context_parallel_axis=layer.context_parallel_axis,
        context_parallel_strategy=layer.context_parallel_strategy,
    )


def mlp_fields(layer: Any) -> dict[str, Any]:
    """Fields of a LayerNormMLP that a TransformerLayer hands down."""
    axes = {}
    if layer.enable_sequence_parallel:
        of = partial(activation_axes, transposed=layer.transpose_batch_sequence)
        axes = dict(layernorm_input_axes=of(sequence_parallel=True), dot_1_input_axes=of(), dot_2_input_axes=of("mlp"))
    return dict(
        intermediate_dim=layer.mlp_hidden_size,
        layernorm_type=layer.layernorm_type,
        epsilon=layer.layernorm_epsilon,
        zero_centered_gamma=layer.zero_centered_gamma,
        use_bias=layer.use_bias,
        return_layernorm_output=layer.apply_residual_connection_post_layernorm,
        activations=layer.mlp_activations,
        activation_params=layer.mlp_activation_params,
        intermediate_dropout_rng_name=layer.dropout_rng_name,
        intermediate_dropout_rate=layer.intermediate_dropout,
        intermediate_hidden_dropout_dims=layer.intermediate_dropout_dims,
        enable_low_rank_adaptation=adapts(layer.low_rank_adaptation_scope, "mlp"),
        low_rank_adaptation_dim=layer.low_rank_adaptation_dim,
        low_rank_adaptation_alpha=layer.low_rank_adaptation_alpha,
        dtype=layer.dtype,
        **axes,
    )


def of_samples(layer: Any) -> tuple[int, int]:
    """The axes of [B, S, hidden], or transposed, along which drop_path keeps or drops: a sample goes as a whole."""
    return (0, 2) if layer.transpose_batch_sequence else (1, 2)


def constrained(layer: Any, x) -> jax.Array:
    """x [B, S, hidden] sharded as between the blocks of a layer."""
    axes = dict(transposed=layer.transpose_batch_sequence, sequence_parallel=layer.enable_sequence_parallel)
    return constrain(x, activation_axes(**axes))


def addition(layer: Any, dropouts: Sequence[tuple]) -> Residual:
    """How a residual connection adds; dropouts: (key, rate, broadcast dimensions) of each on its way.

    Where nothing happens on the way, products do; one sharded along the sequence would be gathered for that.
    """
    if not (dropouts or layer.apply_residual_connection_post_layernorm or layer.enable_sequence_parallel):
        return True
    return lambda branch, residual: constrained(layer, drop_and_add(branch, residual, dropouts))


Block = Callable[..., tuple[jax.Array, jax.Array | None]]


def run_layer(layer: Any, x, attentions: Sequence[Block], mlp: Block, addition: Callable[[], Residual]) -> jax.Array:
    """The blocks of a TransformerLayer one after another, on x [B, S, hidden].

    Blocks: (x, residual=...) -> (result, the norm's output or None). addition: asked before each, as dropout differs.
    """
    inputs, post = x, layer.apply_residual_connection_post_layernorm

    def after(x, block: Block) -> jax.Array:
        add = addition()
        y, normed = block(x, residual=not post and add)
        return add(y, normed) if post else y

    for attention in attentions:
        x = after(x, attention)
    if not layer.parallel_attention_mlp:
        x = after(x, mlp)
        return x if post else constrained(layer, x)
    add = addition()
    y, _ = mlp(inputs, residual=False)
    return constrained(layer, x + y) if add is True else add(y, x)
