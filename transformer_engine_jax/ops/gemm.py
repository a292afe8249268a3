"""The one matrix product: FP8 or high-precision operands, with scales, bias, accumulation and an FP8 result."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.quantize import E5M2, is_fp8
from transformer_engine_jax.ops.result import store

FP8_MULTIPLE = 16  # what FP8 tensor cores want of the contracted axes, and of the columns of the result


class Gemm(NamedTuple):
    d: jax.Array  # [m.., n..] in `dtype`
    amax: jax.Array | None  # f32[] max |d|, of an FP8 d before its scale and cast


def _needs_all_of_k(attributes: Mapping[str, Any]) -> str:
    """Partial sums can be added up over shards, but neither FP8 codes nor the amaxes of partial sums can."""
    return "k" if attributes["amax"] or is_fp8(attributes["dtype"]) else ""


def _limits_of_cublaslt(a, b, bias, c, dtype, amax: bool, k: int, n: int):
    """(whether it is past the limit, the limit) of one fused call; `fused` in cpp/ops/gemm.cu is the same rule."""
    c_as_d = c is None or c.dtype == dtype
    yield k == 0, "an empty sum is no product"
    if not is_fp8(a.dtype):
        yield dtype not in (a.dtype, np.float32), "the result's dtype is neither the operands' nor f32"
        yield not c_as_d, "c has another dtype than d"
        yield amax, "cuBLASLt finds the amax of FP8 results alone"
        return
    yield bool(n % FP8_MULTIPLE), f"in bf16: FP8 tensor cores need n in multiples of {FP8_MULTIPLE}"
    yield a.dtype == E5M2 and b.dtype == E5M2, "in bf16: FP8 tensor cores have no product of E5M2 and E5M2"
    if is_fp8(dtype):
        yield dtype == E5M2 and E5M2 not in (a.dtype, b.dtype), "in bf16: an E5M2 result needs an E5M2 operand"
        yield c is not None and c.dtype == np.float32, "in bf16: c is f32 and the result FP8"
    else:
        exact_bias = bias is None or dtype != np.float32 or bias.dtype == jnp.bfloat16
        yield not exact_bias, "in bf16: the bias of an f32 result would be rounded to bf16"
        yield not c_as_d, "in bf16: c has another dtype than d"
        yield amax, "in bf16: cuBLASLt finds the amax of FP8 results alone"


def _sizes(a, b, k_axes: int) -> tuple[int, int, int]:
    """m, n, k."""
    m, n = (prod(x.shape[: x.ndim - k_axes]) for x in (a, b))
    return m, n, prod(a.shape[a.ndim - k_axes :])


def _note(a, b, a_scale_inv, b_scale_inv, bias, c, d_scale, *, dtype, k_axes, amax, **_) -> str:
    """Why cuBLASLt needs help with this product, "" where it does not."""
    _, n, k = _sizes(a, b, k_axes)
    limits = _limits_of_cublaslt(a, b, bias, c, np.dtype(dtype), amax, k, n)
    filled = f"k filled up to a multiple of {FP8_MULTIPLE}" if is_fp8(a.dtype) and k % FP8_MULTIPLE else ""
    return next((why for past, why in limits if past), filled)


def _scratch(a, b, a_scale_inv, b_scale_inv, bias, c, d_scale, *, dtype, k_axes, amax, in_place, **_) -> int:
    """Scratch of the CUDA handler: cuBLASLt's own, a bias in another dtype and FP8 operands with more of k; where
    cuBLASLt can't do it all, the sums in f32 and FP8 operands in bf16. Each piece is aligned to 256 bytes."""
    dtype = np.dtype(dtype)
    m, n, k = _sizes(a, b, k_axes)
    if not any(past for past, _ in _limits_of_cublaslt(a, b, bias, c, dtype, amax, k, n)):
        pieces = [0 if bias is None else 4 * n]
        if is_fp8(a.dtype) and k % FP8_MULTIPLE:
            pieces += [rows * -(-k // FP8_MULTIPLE) * FP8_MULTIPLE for rows in (m, n)]
    else:
        pieces = [0 if dtype == np.float32 and not in_place else 4 * m * n]
        pieces += [2 * m * k, 2 * n * k] if is_fp8(a.dtype) else []
    return 256 + sum(-(-size // 256) * 256 for size in [32 << 20, *pieces])


def _layouts(a, b, *_, k_axes, k_first, **__) -> dict[str, tuple[int, ...]]:
    def of(x):
        axes = tuple(range(x.ndim))
        return axes[x.ndim - k_axes :] + axes[: x.ndim - k_axes]

    return {name: of(x) for name, x in (("a", a), ("b", b)) if name in k_first}


@kernel(
    "m* k*, n* k*, -, -, n*, m* n*, - -> m* n*, -",
    whole=_needs_all_of_k,
    reduce={"d": "sum", "amax": "max"},
    once=("bias",),
    parts={"c": "c_scale"},
    aliases={"c": "d"},
    workspace=_scratch,
    note=_note,
    prepared=True,
    layouts=_layouts,
)
def gemm(
    a,
    b,
    a_scale_inv,
    b_scale_inv,
    bias,
    c,
    d_scale,
    *,
    dtype,
    k_axes=1,
    split_accumulator=True,
    amax=False,
    in_place=False,
    k_first="",
    c_scale=1.0,
) -> Gemm:
    """d = a b^T * a_scale_inv * b_scale_inv + bias + c_scale c, summed in f32 and returned as `dtype`.

    Args:
      a: [m.., k..] FP8, f32, f16 or bf16; its last `k_axes` axes are contracted with those of b.
      b: [n.., k..] of a's dtype; where a is FP8, of either FP8 dtype.
      a_scale_inv, b_scale_inv: f32[] what one unit of an FP8 operand stands for; None is 1.
      bias: [n..] or None; c: [m.., n..] or None; each f32, f16 or bf16.
      d_scale: f32[] multiplies d before the cast to `dtype`; given exactly where that is FP8.
      split_accumulator: False lets Hopper's tensor cores keep FP8 sums in fewer than 23 bits throughout: up to 10 %
        faster. With True they are taken out every 128 terms, or 512 (cpp/core/fp8_product.cu).
      amax: asks for max |d|.
      in_place: d takes c's buffer, where it has its dtype; XLA copies a c that is still needed.
      k_first: "", "a", "b" or "ab": which operands, not of FP8, CUDA wants to lie in memory with the contracted axes
        first, as a kernel does, and x and dy for a product of their transposes. They must be views of such arrays, lest
        XLA transpose them.
      c_scale: where each of n devices has a shard of k.., and d is their sum, 1 / n.
    """
    a_k, b_k = a.shape[a.ndim - k_axes :], b.shape[b.ndim - k_axes :]
    if a_k != b_k:
        raise ValueError(f"gemm: b: expected its last {k_axes} axes to be {a_k} as a's {a.shape}, got {b.shape}")
    if is_fp8(a.dtype) != is_fp8(b.dtype) or not (is_fp8(a.dtype) or a.dtype == b.dtype):
        raise ValueError(f"gemm: b: expected {'an FP8 dtype' if is_fp8(a.dtype) else a.dtype} as a, got {b.dtype}")
    # FP8 codes as f32: XLA on the CPU multiplies nothing narrower any faster.
    operands = [x.astype(jnp.float32) if is_fp8(x.dtype) else x for x in (a, b)]
    contracted = [tuple(range(x.ndim - k_axes, x.ndim)) for x in (a, b)]
    value = jax.lax.dot_general(
        *operands, (contracted, ((), ())), precision="highest", preferred_element_type=jnp.float32
    )
    for scale_inv in (a_scale_inv, b_scale_inv):
        value = value if scale_inv is None else value * scale_inv
    value = value if bias is None else value + bias.astype(jnp.float32)
    value = value if c is None else value + c_scale * c.astype(jnp.float32)
    stored = store("gemm", value, d_scale, dtype=dtype, k_axes=0, transposed=False, amax=amax)
    return Gemm(stored.y, stored.amax)
