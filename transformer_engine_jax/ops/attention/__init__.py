"""dot_product_attention: one reference in plain JAX that defines it, and cuDNN's flash attention where it can.

options: what is known at trace time. sequences: which tokens belong together. reference: the definition, in blocks
where sequences are long. backends: who can compute a case. cudnn: its call.
"""

from transformer_engine_jax.ops.attention.backends import attention_backend
from transformer_engine_jax.ops.attention.op import dot_product_attention
from transformer_engine_jax.ops.attention.options import SOFTMAX_TYPES, Attention
from transformer_engine_jax.ops.attention.reference import attention_reference
from transformer_engine_jax.ops.attention.sequences import SequenceDescriptor

__all__ = [
    "SOFTMAX_TYPES",
    "Attention",
    "SequenceDescriptor",
    "attention_backend",
    "attention_reference",
    "dot_product_attention",
]
