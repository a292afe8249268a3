"""What jax.checkpoint and nn.remat save: policies that know this library's products and quantized tensors.

They combine with JAX's own by jax.checkpoint_policies.save_from_both_policies. What modules give a name
(quantization_checkpoint_name, ffn1_ckpt_name, ..) is saved by jax.checkpoint_policies.save_only_these_names.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax._src.lax.lax import _reduce_precision_lower
from jax.interpreters import mlir

from transformer_engine_jax.ops.quantize import is_fp8
from transformer_engine_jax.order import computed_once_p
from transformer_engine_jax.primitive import kernel_p


def gemms_saveable(primitive, *operands, **params) -> bool:
    """Saves the results of all matrix products, ours and JAX's; the rest is computed again."""
    return _is_gemm(primitive, params) or jax.checkpoint_policies.dots_saveable(primitive, *operands, **params)


def gemms_with_no_batch_dims_saveable(primitive, *operands, **params) -> bool:
    """Saves the results of matrix products that have no batch axes: those with weights, not attention's scores."""
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return _is_gemm(primitive, params) or dots(primitive, *operands, **params)


def quantized_saveable(primitive, *operands, **params) -> bool:
    """Saves what is quantized, with its scales and amaxes, so that no tensor is quantized twice."""
    if primitive is jax.lax.bitcast_convert_type_p:
        return is_fp8(operands[0].dtype)  # as bytes, see stored.py
    if primitive is computed_once_p:
        return params["of"] == "quantized"
    if primitive is not kernel_p:
        return False
    call = params["call"]
    return _only_measures(call) or any(r is not None and is_fp8(r.dtype) for r in call.result_shapes(operands))


def _only_measures(call) -> bool:
    """Whether the results are amaxes, and statistics of rows, for a call that quantizes."""
    attributes = dict(call.attributes)
    return call.kernel.name == "measure" or not (attributes.get("y", True) or attributes.get("y_t"))


def _is_gemm(primitive, params) -> bool:
    if primitive is computed_once_p:
        return params["of"] == "product"
    return primitive is kernel_p and params["call"].kernel.name == "gemm"


# What jax.checkpoint saves and the forward reads too, it passes through reduce_precision to its own precision, lest XLA
# keep more. That is the identity for every float but FP8: there it means IEEE's exponents, without subnormals, and
# without E4M3's values above 240, which become NaN. So it is made the identity for FP8 too.


def _keep_fp8(ctx, operand, *, exponent_bits: int, mantissa_bits: int):
    dtype = ctx.avals_in[0].dtype
    if is_fp8(dtype) and (exponent_bits, mantissa_bits) == (jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant):
        return [operand]
    return _reduce_precision_lower(ctx, operand, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits)


mlir.register_lowering(jax.lax.reduce_precision_p, _keep_fp8)
