"""low_rank: the branch that LoRA adds beside a frozen kernel (Hu et al., 2021)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from transformer_engine_jax.ops.xla_product import rows_times, wants_one_axis


def low_rank(x, a, b, *, k_axes: int = 1, alpha: float | None = None) -> jax.Array:
    """x contracted with a and then b, times alpha / r -> [m.., stack.., n] in x's dtype.

    Args:
      x: [m.., k..] f32, f16 or bf16.
      a: [k.., stack.., r] any float dtype, the stack being that of the products in one kernel, if any.
      b: [stack.., r, n] any float dtype.
      k_axes: how many axes of x are contracted.
      alpha: None scales by 1.
    """
    dim, tokens = a.shape[-1], x.shape[: x.ndim - k_axes]
    one_axis = not jax.typeof(x).sharding.mesh.explicit_axes and wants_one_axis(x)
    features, stack = (*b.shape[:-2], b.shape[-1]), math.prod(b.shape[:-2])
    a, b = a.astype(x.dtype), b.astype(x.dtype).reshape(stack, dim, b.shape[-1])
    if one_axis:  # and one by one, as XLA on CPUs sums the gradient of several in bf16 too
        rows, k = math.prod(tokens), math.prod(x.shape[x.ndim - k_axes :])
        down = rows_times(x.reshape(rows, k), a.reshape(k, stack * dim), dtype=x.dtype).reshape(rows, stack, dim)
        up = jnp.stack([rows_times(down[:, i], b[i], dtype=x.dtype) for i in range(stack)], axis=1)
    else:
        contract = tuple(range(x.ndim - k_axes, x.ndim)), tuple(range(k_axes))
        down = jax.lax.dot_general(x, a, (contract, ((), ()))).reshape(*tokens, stack, dim)
        up = jnp.einsum("...sr,srn->...sn", down, b)
    factor = 1.0 if alpha is None else alpha / dim
    if isinstance(factor, jax.Array):  # traced: it must not widen the result
        factor = factor.astype(up.dtype)
    return (up * factor).reshape(*tokens, *features)
