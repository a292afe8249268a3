"""te.explain of what is none of ours: products of JAX, branches of platforms, Pallas; and how functions are given."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax

MATRIX, GROUPS = jnp.ones((8, 16)), jnp.array([3, 5])
SQUARE = lambda x: x @ x.T


def in_pallas(x):
    def kernel(x, out):
        out[...] = SQUARE(x[...])

    blocks = dict(in_specs=[pl.BlockSpec((2, 16), lambda i: (i, 0))], out_specs=pl.BlockSpec((2, 2), lambda i: (i, 0)))
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct((8, 2), x.dtype), grid=(4,), interpret=True, **blocks)(x)


@pytest.mark.parametrize(
    "fn, expected",
    [
        (lambda x: jax.lax.ragged_dot(x, jnp.ones((2, 16, 4)), GROUPS), [("ragged_dot_general", 1)]),
        (lambda x: jax.lax.conv(x[None, None], jnp.ones((1, 1, 3, 3)), (1, 1), "SAME"), [("conv_general_dilated", 1)]),
        (jax.vmap(lambda x: jax.lax.pmean(x, "i"), axis_name="i"), []),
        (
            lambda x: jax.lax.platform_dependent(x, cpu=SQUARE, default=lambda x: SQUARE(SQUARE(x))),
            [("dot_general", 1)],
        ),
        (
            lambda x: jax.lax.platform_dependent(x, default=SQUARE, tpu=lambda x: SQUARE(SQUARE(x))),
            [("dot_general", 1)],
        ),
        (in_pallas, [("dot_general", 4)]),
    ],
    ids=["ragged", "convolution", "collective of vmap", "of the platform", "of all other platforms", "pallas"],
)
def test_what_jax_runs_otherwise(fn, expected):
    with jax.default_device(jax.devices("cpu")[0]):
        assert [(row.name, row.count) for row in te.explain(fn, MATRIX).rows] == expected


def test_keywords_that_are_switches_or_names():
    module = te_flax.LayerNormMLP(intermediate_dim=8, intermediate_dropout_rate=0.5)
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, MATRIX)
    for fn, args in ((module.apply, (variables, MATRIX)), (module.bind(variables), (MATRIX,))):
        assert te.explain(fn, *args, deterministic=True).rows
    assert te.explain(module.apply, variables, MATRIX, deterministic=True, mutable=["cache"]).rows
    assert te.explain(lambda x, fn: SQUARE(x) * fn, MATRIX, fn=2.0).rows
