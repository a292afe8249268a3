"""dot_product_attention: one reference in plain JAX that defines it, and cuDNN's flash attention where it can.

options: what is known at trace time. sequences: which tokens belong together. reference: the definition, in blocks
where sequences are long. context_parallel: sequences sharded over a mesh axis. shards: axes of the mesh that are
explicit. backends: who can compute a case. cudnn: which call of it. flash: handlers of our own on cuDNN, and the ops on
them: cudnn_flash, with dropout or without, flash_qkv, of one array, flash_packed, of rows of several sequences,
flash_cached, over a KV cache, and fp8, whose forward pass is in FP8. cudnn_parts: its calls where a mesh axis shards
the sequence. decode: attention over a KV cache.
"""

from transformer_engine_jax.ops.attention.backends import attention_backend
from transformer_engine_jax.ops.attention.context_parallel import (
    ContextParallel,
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
)
from transformer_engine_jax.ops.attention.op import dot_product_attention
from transformer_engine_jax.ops.attention.options import SOFTMAX_TYPES, Attention
from transformer_engine_jax.ops.attention.reference import attention_reference
from transformer_engine_jax.ops.attention.sequences import SequenceDescriptor

__all__ = [
    "SOFTMAX_TYPES",
    "Attention",
    "ContextParallel",
    "SequenceDescriptor",
    "attention_backend",
    "attention_reference",
    "dot_product_attention",
    "inverse_reorder_causal_load_balancing",
    "reorder_causal_load_balancing",
]
