"""Second derivatives, which exist without FP8: gradients of gradients, and products with Hessians."""

from functools import partial

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from plain import plain_layer

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import recipe, testing

X, Z, GAMMA, BETA, KERNEL, MASK = map(
    jnp.asarray, emulated.normal(5, (2, 8, 16), (2, 8, 2, 16), (16,), (16,), (16, 24), (2, 1, 8, 8))
)
HEADS = X.reshape(2, 8, 2, 8)
CAUSAL, SWIGLU = te.Attention(scale=0.5, causal=True), ("silu", "linear")
GATED, INNER = KERNEL.reshape(16, 2, 12) / 4, KERNEL.T[:12] / 4

# A function and what it is differentiated by.
OPS = {
    "dense": (lambda x, w: te.dense(jnp.tanh(x), w), X, KERNEL),
    "layernorm": (te.layernorm, X, GAMMA, BETA),
    "rmsnorm": (te.rmsnorm, X, GAMMA),
    "gelu": (lambda z: te.activation(z[..., :1, :], ("gelu",)), Z),
    "swiglu": (lambda z: te.activation(z, SWIGLU), Z),
    "squared relu": (lambda z: te.activation(jnp.square(z[..., :1, :] / 2), ("squared_relu",)), Z),
    "softmax": (lambda x: te.softmax(x[:, None], mask=MASK[..., :16] > 1, causal=False, scale_factor=0.5), X @ X.mT),
    "rope": (lambda x: te.rope(jnp.tanh(x), te.rope_frequencies(8)), HEADS),
    "attention": (lambda q, k, v: te.dot_product_attention(q, k, v, options=CAUSAL), HEADS, HEADS + 1, HEADS),
    "layernorm_dense": (lambda x, w: te.layernorm_dense(x, GAMMA, BETA, w), X, KERNEL),
    "layernorm_mlp": (lambda x, *w: te.layernorm_mlp(x, GAMMA, None, w, activations=SWIGLU), X, GATED, INNER),
    "dropout": (lambda x: dropped(x), X),
}


def dropped(x):
    """What a layer makes of x with dropout of what it adds."""
    layer = te_flax.TransformerLayer(16, 32, 2, hidden_dropout=0.5, attention_dropout=0.0)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return layer.init_with_output(rngs, x)[0]


def hessian_product(f, args, directions):
    """The Hessian of f at the args times the directions, by a gradient of a gradient."""
    along = lambda *args: sum(jnp.sum(g * d) for g, d in zip(jax.grad(f, range(len(args)))(*args), directions))
    return jax.grad(along, range(len(args)))(*args)


def of_random_cotangent(f):
    return lambda *args: jnp.sum(jnp.sin((y := f(*args)) / 4) * emulated.normal(6, y.shape)[0])


@pytest.mark.parametrize("op", OPS)
def test_a_gradient_of_a_gradient_is_its_difference_quotient(op):
    f, *args = OPS[op]
    f, args = of_random_cotangent(f), tuple(args)
    directions = tuple(map(jnp.asarray, emulated.normal(7, *(x.shape for x in args))))
    got = jax.jit(partial(hessian_product, f))(args, directions)
    gradient = jax.jit(jax.grad(f, range(len(args))))
    ahead, behind = (gradient(*(x + e * d for x, d in zip(args, directions))) for e in (2e-3, -2e-3))
    testing.assert_close(got, jax.tree.map(lambda a, b: (a - b) / 4e-3, ahead, behind), 1e-2)
    _, forward = jax.jvp(jax.grad(f, range(len(args))), args, directions)
    testing.assert_close(forward, got, emulated.F32)


def test_where_arrays_of_other_ranks_may_not_meet():
    with jax.numpy_rank_promotion("raise"):
        of_norm = lambda x: jnp.sum(jnp.sin(te.layernorm(x, GAMMA, BETA)))
        got = jax.grad(lambda x: jnp.sum(jax.grad(of_norm)(x)))(X)
    testing.assert_close(got, hessian_product(of_norm, (X,), (jnp.ones_like(X),))[0], emulated.F32)


def test_of_logits_that_are_all_minus_infinity_there_are_none():
    logits = jnp.zeros((1, 2, 3)).at[0, 0].set(-jnp.inf)
    of_softmax = lambda x: jnp.sum(jnp.sin(te.softmax(x)))
    (got,) = hessian_product(of_softmax, (logits,), (jnp.arange(6.0).reshape(logits.shape),))
    assert not got[0, 0].any() and got[0, 1].any()


@pytest.mark.parametrize("kind", ["encoder's", "llama's"])
def test_those_of_a_layer_are_those_of_plain_jax(kind):
    fields, options = dict(self_attn_mask_type="no_mask"), {}
    if kind == "llama's":
        fields = dict(layernorm_type="rmsnorm", mlp_activations=SWIGLU, num_gqa_groups=2)
        fields |= dict(enable_rotary_pos_emb=True, enable_relative_embedding=False)
        options = dict(causal=True, relpos=False, activations=SWIGLU, groups=2, rope="consecutive")
        options["scale"] = 0.5
        fields["scale_attn_logits"] = True
    layer = te_flax.TransformerLayer(
        hidden_size=16, mlp_hidden_size=24, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, **fields
    )
    variables = steps.randomized(nn.unbox(layer.init(jax.random.key(0), X)))
    args = variables["params"], X

    def penalty(apply, params, x):
        return jnp.sum(jnp.square(jax.grad(of_random_cotangent(lambda x: apply({"params": params}, x)))(x)))

    got, expected = (
        jax.jit(jax.value_and_grad(partial(penalty, apply), (0, 1)))(*args)
        for apply in (layer.apply, partial(plain_layer, **options))
    )
    testing.assert_close(got, expected, 30 * emulated.F32)


def test_a_penalty_of_gradients_without_fp8_in_a_step_with_it():
    model = te_flax.LayerNormMLP(intermediate_dim=32, use_bias=True)

    def penalty(variables, x):
        with te.autocast(enabled=False):
            of_x = jax.grad(of_random_cotangent(lambda x: model.apply(variables, x)[0]))(x)
        return jnp.sum(jnp.square(of_x))

    def loss(variables, x, weight):
        return jnp.sum(model.apply(variables, x)[0]) + weight * penalty(variables, x)

    with te.autocast(enabled=True, recipe=recipe.DelayedScaling()):
        variables = model.init(jax.random.key(0), X)
        with_it, without = (jax.jit(jax.grad(loss))(variables, X, weight) for weight in (1.0, 0.0))
        alone = jax.grad(penalty)(variables, X)
    added = jax.tree.map(jnp.subtract, with_it["params"], without["params"])
    testing.assert_close(added, alone["params"], 100 * emulated.F32)
    states = [tree[te_flax.STATE_COLLECTION] for tree in (with_it, without)]
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_in_fp8_there_are_none_and_the_error_says_what_helps():
    model = te_flax.DenseGeneral(features=32)
    with te.autocast(enabled=True, recipe=recipe.Float8CurrentScaling()):
        variables = model.init(jax.random.key(0), X)
        run = of_random_cotangent(lambda x: model.apply(variables, x))
        with pytest.raises(NotImplementedError, match=r"second derivatives.*autocast\(enabled=False\).*stop_gradient"):
            hessian_product(run, (X,), (X,))


@pytest.mark.parametrize("explicit", [False, True])
def test_over_devices(explicit):
    mesh = testing.mesh_of((2,), ("data",), explicit=explicit)
    *args, gamma, beta = map(np.asarray, (X, GATED[:, :1], INNER, GAMMA, BETA))
    run = lambda x, w, v: jnp.sum(jnp.sin(te.layernorm_mlp(x, gamma, beta, (w, v), activations=("gelu",))))
    with jax.default_device(mesh.devices.flat[0]):
        expected = jax.jit(partial(hessian_product, run))(args, args)
    placed = testing.shard(mesh, args, [jax.P("data"), jax.P(), jax.P()])
    with testing.on_mesh(mesh):
        got = jax.jit(partial(hessian_product, run))(placed, placed)
    testing.assert_close(got, expected, 10 * emulated.F32)
