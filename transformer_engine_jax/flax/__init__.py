"""Linen modules: `import transformer_engine_jax.flax as te_flax`."""

from transformer_engine_jax.flax.attention import MultiHeadAttention
from transformer_engine_jax.flax.base import MAIN_GRADS_COLLECTION, STATE_COLLECTION
from transformer_engine_jax.flax.dense import DenseGeneral, LayerNormDenseGeneral
from transformer_engine_jax.flax.dot_general import (
    make_dot_general_cls,
    make_einsum_cls,
    wrap_function_in_te_state_module,
)
from transformer_engine_jax.flax.dot_product_attention import DotProductAttention
from transformer_engine_jax.flax.layernorm import LayerNorm, RMSNorm
from transformer_engine_jax.flax.main_grads import main_grads, take_main_grads
from transformer_engine_jax.flax.mlp import LayerNormMLP
from transformer_engine_jax.flax.relative_positions import RelativePositionBiases
from transformer_engine_jax.flax.softmax import Softmax, SoftmaxFusionType
from transformer_engine_jax.flax.state import init_state
from transformer_engine_jax.flax.transformer import TransformerLayer
from transformer_engine_jax.modules.transformer import TransformerLayerType
from transformer_engine_jax.ops.attention import SequenceDescriptor
from transformer_engine_jax.sharding import extend_logical_axis_rules

__all__ = [
    "MAIN_GRADS_COLLECTION",
    "STATE_COLLECTION",
    "DenseGeneral",
    "DotProductAttention",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "MultiHeadAttention",
    "RMSNorm",
    "RelativePositionBiases",
    "SequenceDescriptor",
    "Softmax",
    "SoftmaxFusionType",
    "TransformerLayer",
    "TransformerLayerType",
    "extend_logical_axis_rules",
    "init_state",
    "main_grads",
    "make_dot_general_cls",
    "make_einsum_cls",
    "take_main_grads",
    "wrap_function_in_te_state_module",
]
