"""FP8 training for Transformers in JAX: `import transformer_engine_jax as te`, and `.flax` for the modules."""

import importlib as _importlib
import warnings as _warnings

from transformer_engine_jax import policies, recipe
from transformer_engine_jax.autocast import MeshResource, autocast, fp8_autocast, global_shard_guard
from transformer_engine_jax.collections import update_collections
from transformer_engine_jax.distribution import name_conflict as _name_conflict
from transformer_engine_jax.explain import explain
from transformer_engine_jax.export import export_checks
from transformer_engine_jax.ops.activation import activation
from transformer_engine_jax.ops.attention import (
    Attention,
    ContextParallel,
    SequenceDescriptor,
    dot_product_attention,
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
)
from transformer_engine_jax.ops.casts import Quantized, dequantize, quantize
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.dot_general import dot_general, einsum, fp8_dot_general
from transformer_engine_jax.ops.fused_attn import fused_attn
from transformer_engine_jax.ops.layernorm import Norm, layernorm, rmsnorm
from transformer_engine_jax.ops.layernorm_dense import layernorm_dense
from transformer_engine_jax.ops.layernorm_mlp import layernorm_mlp
from transformer_engine_jax.ops.main_grad import Accumulating
from transformer_engine_jax.ops.rope import rope, rope_frequencies, rope_table
from transformer_engine_jax.ops.softmax import softmax
from transformer_engine_jax.quantized import AttentionState, GemmState, QuantizerState
from transformer_engine_jax.quantizers import attention_quantizers, gemm_quantizers
from transformer_engine_jax.support import is_fp8_available

__all__ = [
    "Accumulating",
    "Attention",
    "AttentionState",
    "ContextParallel",
    "GemmState",
    "MeshResource",
    "Norm",
    "Quantized",
    "QuantizerState",
    "SequenceDescriptor",
    "activation",
    "attention_quantizers",
    "autocast",
    "dense",
    "dequantize",
    "dot_general",
    "dot_product_attention",
    "einsum",
    "explain",
    "export_checks",
    "fp8_autocast",
    "fp8_dot_general",
    "fused_attn",
    "gemm_quantizers",
    "global_shard_guard",
    "inverse_reorder_causal_load_balancing",
    "is_fp8_available",
    "layernorm",
    "layernorm_dense",
    "layernorm_mlp",
    "policies",
    "quantize",
    "recipe",
    "reorder_causal_load_balancing",
    "rmsnorm",
    "rope",
    "rope_frequencies",
    "rope_table",
    "softmax",
    "update_collections",
]

__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted({*globals(), "flax", "nnx"})


def __getattr__(name: str):
    if name in ("flax", "nnx"):
        return _importlib.import_module(f"{__name__}.{name}")
    if name in ("quantize_once", "fp8_model_init"):
        raise AttributeError(f"{__name__}.{name}: not there yet; kernels are quantized in each step")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if _conflict := _name_conflict():
    _warnings.warn(_conflict, RuntimeWarning, stacklevel=2)
