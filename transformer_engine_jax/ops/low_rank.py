"""low_rank: the branch that LoRA adds beside a frozen kernel (Hu et al., 2021)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from transformer_engine_jax.ops.xla_product import wants_one_axis


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
    if one_axis:
        x = x.reshape(math.prod(tokens), *x.shape[x.ndim - k_axes :])
    contract = tuple(range(x.ndim - k_axes, x.ndim)), tuple(range(k_axes))
    down = jax.lax.dot_general(x, a.astype(x.dtype), (contract, ((), ())))
    features, stack = (*b.shape[:-2], b.shape[-1]), math.prod(b.shape[:-2])
    down = down.reshape(*x.shape[: x.ndim - k_axes], stack, dim)
    b = b.astype(x.dtype).reshape(stack, dim, b.shape[-1])
    if one_axis:  # one by one, as XLA on CPUs sums the gradient of several in bf16 too
        up = jnp.stack([down[:, i] @ b[i] for i in range(stack)], axis=1)
    else:
        up = jnp.einsum("...sr,srn->...sn", down, b)
    factor = 1.0 if alpha is None else alpha / dim
    if isinstance(factor, jax.Array):  # traced: it must not widen the result
        factor = factor.astype(up.dtype)
    return (up * factor).reshape(*tokens, *features)
