"""dot_general and einsum: any axes, against JAX's own and against emulated FP8; explicit state; misuse."""

import dataclasses
from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import DELAYED, F32, SCALES

import transformer_engine_jax as te
from transformer_engine_jax import testing

CURRENT = te.recipe.Float8CurrentScaling()
KEY = jax.random.key(7)

# name -> (shapes of x and kernel, dimension numbers, the same as an equation)
CASES = {
    "matrix": (((8, 32), (32, 16)), (((1,), (0,)), ((), ())), "mk,kn->mn"),
    "two axes, out of order": (
        ((4, 3, 8, 6), (6, 5, 3, 2)),
        (((1, 3), (2, 0)), ((), ())),
        "akbl,lnkp->abnp",
    ),
    "batch in front": (((3, 8, 32), (3, 32, 16)), (((2,), (1,)), ((0,), (0,))), "bmk,bkn->bmn"),
    "batch behind": (((8, 32, 2, 3), (16, 3, 32, 2)), (((1,), (2,)), ((3, 2), (1, 3))), "mkcb,nbkc->bcmn"),
    "nothing contracted": (((8,), (6,)), (((), ()), ((), ())), "m,n->mn"),
    "vectors": (((32,), (32,)), (((0,), (0,)), ((), ())), "k,k->"),
    "no rows": (((32,), (32, 4)), (((0,), (0,)), ((), ())), "k,kn->n"),
}


def operands(name):
    (x_shape, kernel_shape), dims, equation = CASES[name]
    x, kernel = (jnp.asarray(a) for a in emulated.normal(3, x_shape, kernel_shape))
    return x, kernel, dims, equation


def plain(x, kernel, dims, roundings=None):
    if roundings is not None:
        x = emulated.straight_through(x, roundings.x)
        kernel = emulated.straight_through(kernel, roundings.kernel)
    y = jax.lax.dot_general(x, kernel, dims, precision="highest")
    return y if roundings is None else emulated.round_gradient(y, roundings.grad)


@pytest.mark.parametrize("name", CASES)
def test_is_jax_where_fp8_is_off_and_emulated_where_it_is_on(name):
    x, kernel, dims, equation = operands(name)
    for rec in (None, DELAYED):
        quantizers = emulated.quantizers(emulated.states(), rec) if rec else None
        roundings = emulated.roundings(rec) if rec else None
        expected = testing.gradients(partial(plain, dims=dims, roundings=roundings), (x, kernel), KEY)
        run = jax.jit(lambda x, k, q=quantizers: testing.gradients(partial(te.dot_general, dimension_numbers=dims, quantizers=q), (x, k), KEY))  # noqa: E501  # fmt: skip
        testing.assert_close(run(x, kernel), expected, F32, f"{rec}")
    testing.assert_close(te.einsum(equation, x, kernel), jnp.einsum(equation, x, kernel, precision="highest"), F32)


def test_negative_axes_and_a_narrower_kernel():
    x, kernel, _, _ = operands("batch in front")
    y = te.dot_general(x.astype(jnp.bfloat16), kernel, (((-1,), (-2,)), ((-3,), (0,))))
    assert y.dtype == jnp.bfloat16
    testing.assert_close(y, jnp.einsum("bmk,bkn->bmn", x, kernel), 3 * testing.epsilon(jnp.bfloat16))


def test_a_batch_of_current_scaling_gives_each_product_its_own_scale():
    x, kernel, dims, _ = operands("batch in front")
    x = x * jnp.asarray([1.0, 1e-6, 1e6])[:, None, None]
    y = te.fp8_dot_general(x, kernel, dims, recipe=CURRENT)
    one = [te.fp8_dot_general(x[i], kernel[i], (((1,), (0,)), ((), ())), recipe=CURRENT) for i in range(3)]
    testing.assert_close(y, jnp.stack(one), F32)


@pytest.mark.parametrize(
    "equation, shapes",
    [
        ("...k,kn->...n", ((2, 3, 32), (32, 4))),
        ("...mk,...kn->...mn", ((2, 3, 8), (2, 8, 5))),
        ("bsd,dhk->bhsk", ((2, 3, 8), (8, 4, 5))),
        ("hk,bsk->bsh", ((8, 16), (2, 3, 16))),
        ("abm,abn->abmn", ((2, 3, 8), (2, 3, 5))),
    ],
)
def test_einsum(equation, shapes):
    x, kernel = (jnp.asarray(a) for a in emulated.normal(1, *shapes))
    testing.assert_close(te.einsum(equation, x, kernel), jnp.einsum(equation, x, kernel, precision="highest"), F32)


# --- Explicit state --------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    """A layer as Equinox or Haliax would have it: a pytree with its state among its fields."""

    weight: jax.Array
    state: te.GemmState

    def __call__(self, x, recipe):
        return te.fp8_dot_general(x, self.weight, (((x.ndim - 1,), (0,)), ((), ())), self.state, recipe=recipe)


def updated(model, grads, rate):
    """Weights by their gradients; a state by its own, which is the next state."""
    is_state = lambda leaf: isinstance(leaf, te.GemmState)
    return jax.tree.map(lambda p, g: g if is_state(p) else p - rate * g, model, grads, is_leaf=is_state)


@pytest.mark.parametrize("rec", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_a_pytree_model_trains_by_overwriting_states_with_their_gradients(rec):
    x, weight, target = (jnp.asarray(a) for a in emulated.normal(2, (64, 32), (32, 16), (32, 16)))
    target = x @ target
    model = Linear(weight / 6, te.GemmState.create(rec))

    @jax.jit
    def step(model):
        return jax.value_and_grad(lambda m: jnp.mean((m(x, rec) - target) ** 2))(model)

    losses = []
    for _ in range(40):
        loss, grads = step(model)
        losses.append(float(loss))
        model = updated(model, grads, 3.0)
    assert losses[-1] < 0.02 * losses[0], losses[::8]
    state = model.state
    if rec is CURRENT:
        assert state == te.GemmState(None) and state.x is None and not jax.tree.leaves(state)
    else:
        assert float(state.x.scale) == np.float32(448) / np.float32(np.abs(np.asarray(x)).max())
        assert all(bool((s.amax_history > 0).all()) for s in state.states().values()), "40 steps fill a history of 4"


def test_the_context_names_the_recipe_and_outside_of_it_the_state_is_kept():
    x, kernel, dims, _ = operands("matrix")
    state = emulated.states()
    f = jax.jit(jax.value_and_grad(lambda s: jnp.sum(te.fp8_dot_general(x, kernel, dims, s))))
    exact, kept = f(state)
    testing.assert_same_bytes(kept, state)
    with te.fp8_autocast(True, CURRENT):
        _, kept = f(state)
        testing.assert_same_bytes(kept, state)
    with te.fp8_autocast(True, DELAYED):
        value, grads = f(state)
    expected = testing.gradients(lambda s: te.fp8_dot_general(x, kernel, dims, s, recipe=DELAYED), (state,), KEY)
    assert float(value) != float(exact)
    testing.assert_same_bytes((grads.x, grads.kernel), (expected[1][0].x, expected[1][0].kernel))
    testing.assert_same_bytes(grads.x, emulated.next_state(SCALES[0], x, DELAYED.forward_dtype))


def test_in_scan_and_vmap():
    x, weights = (jnp.asarray(a) for a in emulated.normal(4, (8, 16), (3, 16, 16)))
    layers = Linear(weights / 4, jax.tree.map(lambda a: jnp.stack([a] * 3), emulated.states()))

    def scanned(layers, x):
        return jax.lax.scan(lambda x, layer: (layer(x, DELAYED), None), x, layers)[0]

    def looped(layers, x):
        for i in range(3):
            x = jax.tree.map(lambda a, i=i: a[i], layers)(x, DELAYED)
        return x

    run = jax.jit(lambda f, *a: testing.gradients(f, a, KEY), static_argnums=0)
    testing.assert_close(run(scanned, layers, x), run(looped, layers, x), F32)
    testing.assert_close(
        jax.vmap(lambda layer: layer(x, DELAYED))(layers), jnp.stack([Linear(w / 4, emulated.states())(x, DELAYED) for w in weights]), F32  # noqa: E501
    )  # fmt: skip


# --- Misuse ----------------------------------------------------------------------------------------------------------

X, K = jnp.ones((4, 8, 32)), jnp.ones((32, 16))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: te.dot_general(X, K, (((2,), (1,)), ((), ()))), ValueError, r"contracted axes: .* got \(32,\) of x"),
        (lambda: te.dot_general(X, K, (((2,), (0,)), ((0,), (1,)))), ValueError, "batch axes: expected the same"),
        (lambda: te.dot_general(X, K, (((3,), (0,)), ((), ()))), ValueError, r"distinct axes of x\[4, 8, 32\]"),
        (lambda: te.dot_general(X, K, (((2,), (0,)), ((2,), (1,)))), ValueError, "distinct axes of x"),
        (lambda: te.dot_general(X, K, ((2,), (0,))), ValueError, "dimension_numbers: expected"),
        (lambda: te.einsum("bsk,kn", X, K), ValueError, "two operands and a result"),
        (lambda: te.einsum("sk,kn->sn", X, K), ValueError, "the 3 axes of x"),
        (lambda: te.einsum("bsk,kk->bs", X, K), ValueError, "the 2 axes of kernel"),
        (lambda: te.einsum("bsk,kn->bn", X, K), ValueError, "each axis that only one operand has"),
        (lambda: te.einsum("bsk,kn->bsnn", X, K), ValueError, "each axis that only one operand has, once"),
        (lambda: te.fp8_dot_general(X, K, (((2,), (0,)), ((), ())), recipe=DELAYED), ValueError, "the states of what"),
        (lambda: te.fp8_dot_general(X, K, (((2,), (0,)), ((), ())), {}), TypeError, "expected a GemmState"),
    ],
)  # fmt: skip
def test_misuse(call, error, message):
    with pytest.raises(error, match=message):
        call()
