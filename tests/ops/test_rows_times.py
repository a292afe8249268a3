"""The product that `dense` has on CPUs in 16 bits: JAX's transformations make of it what they make of lax.dot."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.ops.xla_product import rows_times

X, W = (jnp.asarray(np.random.default_rng(0).standard_normal(s), jnp.bfloat16) for s in ((6, 8), (8, 4)))
times = lambda x, w: rows_times(x, w, dtype=jnp.bfloat16)


def products(f, *operands) -> int:
    return str(jax.make_jaxpr(f)(*operands)).count("dot_general[")


@pytest.mark.parametrize("of", [0, 1])
def test_transposed(of):
    alone = lambda f: lambda moving: f(moving, W) if of == 0 else f(X, moving)
    dy, given = jnp.ones((6, 4), jnp.bfloat16), (X, W)[of]
    got, expected = (jax.linear_transpose(jax.jit(alone(f)), given)(dy) for f in (times, jnp.dot))
    testing.assert_same_bytes(got, expected)


def test_no_product_with_zeros():
    assert products(lambda w: jax.jvp(lambda w: times(X, w), (w,), (w,)), W) == 2
    assert products(lambda x: jax.vjp(lambda x: times(x, W), x)[1](jnp.ones((6, 4), x.dtype)), X) == 2
    assert products(lambda x: jax.jvp(times, (x, W), (x, W)), X) == 3


@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, 1)])
def test_examples_with_matrices_of_their_own_are_one_product(axes):
    x, w = (a if n is None else jnp.stack([a, 2 * a, -a], n) for a, n in zip((X, W), axes))
    program = jax.make_jaxpr(jax.vmap(times, axes))(x, w)
    assert products(jax.vmap(times, axes), x, w) == 1 and not re.search("scan|while", str(program))
    testing.assert_same_bytes(jax.vmap(times, axes)(x, w), jax.vmap(jnp.dot, axes)(x, w))


def test_exported_with_a_matrix_for_each_of_any_number_of_examples():
    (n,) = jax.export.symbolic_shape("n")
    shapes = (jax.ShapeDtypeStruct((n, *a.shape), a.dtype) for a in (X, W))
    run = jax.export.export(jax.jit(jax.vmap(times)))(*shapes)
    testing.assert_same_bytes(run.call(X[None], W[None])[0], times(X, W))


@pytest.mark.parametrize("op", [te.dense, lambda x, w: te.rmsnorm(x, w[:, 0])], ids=["dense", "rmsnorm"])
def test_in_a_shard_map_that_leaves_the_compiler_an_axis_of_one_device(op):
    mesh, x = testing.mesh_of((4, 1), ("data", "model")), jnp.stack([X] * 4)
    run = jax.shard_map(op, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
    with testing.on_mesh(mesh):
        got = jax.device_get(jax.jit(run)(x, W.astype(jnp.float32)))
    testing.assert_close(got, np.asarray(jnp.stack([op(X, W.astype(jnp.float32))] * 4)), 2**-7)
