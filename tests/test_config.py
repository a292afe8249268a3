"""Options of JAX that users set for a whole program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.flax import STATE_COLLECTION, DenseGeneral, DotProductAttention
from transformer_engine_jax.ops.attention import Attention
from transformer_engine_jax.ops.dropout import drop

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 32)), jnp.float32)
KEY = jax.random.key(1)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["at once", "jitted"])
def test_what_is_evaluated_while_tracing(jit):
    norm = lambda x, g: jax.value_and_grad(lambda g: jnp.sum(te.rmsnorm(x, g) ** 3))(g)
    expected = jit(norm)(X, X[0])
    with jax.ensure_compile_time_eval():
        testing.assert_same_bytes(jit(norm)(X, X[0]), expected)


@pytest.mark.parametrize(
    "drops",
    [
        lambda: drop(X, KEY, 0.5, (1,)),
        lambda: te.dot_product_attention(*3 * [X[None, :, None]], options=Attention(1.0, dropout=0.5), dropout_key=KEY),
    ],
    ids=["by rows", "attention"],
)
def test_64_bits_change_no_dropout(drops):
    expected = drops()
    with jax.enable_x64(True):
        testing.assert_same_bytes(drops(), expected)


@pytest.mark.parametrize("softmax_type", ["vanilla", "off_by_one"])
def test_64_bits_do_not_widen_attention_in_a_ring(softmax_type):
    options = dict(context_parallel_axis="cp", context_parallel_strategy="RING")
    attention = DotProductAttention(32, 1, attn_mask_type="causal", softmax_type=softmax_type, **options)
    mesh = testing.mesh_of((4,), ("cp",))
    with testing.on_mesh(mesh), jax.enable_x64(True):
        (q,) = testing.shard(mesh, [X[None, :, None]], [P(None, "cp")])
        loss = lambda q: jnp.sum(attention.apply({}, q, q, q, deterministic=True) ** 2)
        assert not re.search(r"f64\[\d", str(jax.make_jaxpr(jax.value_and_grad(loss))(q)))


def test_infinities_are_looked_for_where_there_are_none():
    own = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=lambda history: history.max())
    model = DenseGeneral(features=4)
    jax.config.update("jax_debug_infs", True)
    try:
        with te.fp8_autocast(True, own):
            variables = model.init(KEY, X)
            grads = jax.grad(lambda v: jnp.sum(model.apply(v, X)))(variables)
    finally:
        jax.config.update("jax_debug_infs", False)
    assert grads[STATE_COLLECTION]["gemm_state"].x.scale > 1


def test_buffers_that_count_several_times_are_told_of():
    def loss(buffer, kernel):
        kernel = te.Accumulating(kernel, buffer)
        return jnp.sum(te.dense(te.dense(X, kernel), kernel))

    step, kernel = lambda: jax.grad(loss)(jnp.ones((32, 32)), jnp.eye(32)), jnp.eye(32)
    expected = step()
    testing.assert_close(expected - 1, jax.grad(lambda k: jnp.sum(X @ k @ k))(kernel), 1e-6)
    with jax.checking_leaks(), pytest.warns(RuntimeWarning, match="main_grads: while JAX looks for leaked") as told:
        step()
    assert told[0].filename == __file__, "where the user's code is"
