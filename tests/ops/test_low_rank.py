"""low_rank against the product of its two matrices written out, for plain and stacked kernels."""

import emulated
import jax
import jax.numpy as jnp
import pytest

from transformer_engine_jax import testing
from transformer_engine_jax.ops.low_rank import low_rank

CASES = {
    "plain": (((3, 5, 16), (16, 4), (4, 24)), dict(), "msk,kr,rn->msn", 1.0),
    "stacked, scaled": (((3, 5, 16), (16, 2, 4), (2, 4, 24)), dict(alpha=8.0), "msk,kar,arn->msan", 2.0),
    "two contracted axes": (((5, 3, 16), (3, 16, 4), (4, 24)), dict(k_axes=2, alpha=1.0), "mjk,jkr,rn->mn", 0.25),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_is_the_product_of_its_matrices(name, dtype):
    shapes, options, formula, scale = CASES[name]
    args = [jnp.asarray(a).astype(dtype) for a in emulated.normal(2, *shapes)]

    def plain(x, a, b):
        return scale * jnp.einsum(formula, x, a, b, precision="highest")

    # x A is rounded to x's dtype, and so are the result and every gradient: a few roundings.
    bound = 4 * testing.epsilon(dtype)
    testing.check_op(
        lambda *a: low_rank(*a, **options), plain, args, value_bound=bound, gradient_bound=bound, key=jax.random.key(0)
    )
