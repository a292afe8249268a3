"""Residual connections: added inside the products and the backward of norms, equal to sums of their own."""

import emulated
import jax
import jax.numpy as jnp
import pytest
from emulated import BF16, DELAYED, F32
from flax import nnx

import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import autocast, testing
from transformer_engine_jax.flax import LayerNormMLP, MultiHeadAttention, TransformerLayer
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.layernorm import Norm
from transformer_engine_jax.ops.layernorm_dense import layernorm_dense
from transformer_engine_jax.ops.layernorm_mlp import layernorm_mlp
from transformer_engine_jax.primitive import kernel_p

M, K, N = (4, 8), 64, 96
X, GAMMA, KERNEL, OUT, UP, DOWN, BIAS = emulated.normal(5, (*M, K), K, (K, N), (N, K), (K, 1, N), (N, K), K)
ARRAYS = [2 * X, 1 + 0.3 * GAMMA, KERNEL / 8, OUT / 10, UP / 8, DOWN / 10, BIAS]


def block(x, gamma, kernel, out, up, down, bias, *, quantizers, fused: bool):
    """norm, product, product, residual; norm, MLP, residual."""
    first, second, *mlp = quantizers or (None,) * 4
    mlp = dict(norm_options=Norm(), quantizers=tuple(mlp) if quantizers else None)
    if fused:
        y, x = layernorm_dense(x, gamma, None, kernel, quantizers=first, return_input=True)
        x = dense(y, out, bias, quantizers=second, residual=x)
        return layernorm_mlp(x, gamma, None, (up, down), **mlp, residual=True)
    y = layernorm_dense(x, gamma, None, kernel, quantizers=first)
    x = x + dense(y, out, bias, quantizers=second)
    return x + layernorm_mlp(x, gamma, None, (up, down), **mlp)


def step(arrays, dy, rec, fused):
    def run(arrays, states):
        quantizers = states and [emulated.quantizers(s, rec) for s in states]
        return block(*arrays, quantizers=quantizers, fused=fused)

    states = rec and [emulated.states() for _ in range(4)]
    y, vjp = jax.vjp(run, arrays, states)
    return y, *vjp(dy)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", [None, "delayed", "current"])
def test_equals_sums_of_their_own(name, dtype):
    rec = name and emulated.RECIPES[name]
    arrays = [jnp.asarray(a, dtype) for a in ARRAYS]
    dy = jnp.asarray(emulated.normal(6, X.shape)[0], dtype)
    got, expected = (jax.jit(step, static_argnums=(2, 3))(arrays, dy, rec, fused) for fused in (True, False))
    # In f32 sums associate otherwise. In bf16 sums of their own round once more, by u = 2^-9: of the E5M2 codes after
    # that u / 2^-2 flip, sqrt(u / 2^-2) 2^-2 / sqrt(3) = 0.013 in each of four products.
    bound = {jnp.float32: F32, jnp.bfloat16: 3 * BF16}[dtype]
    if rec:
        bound = emulated.FLIP if dtype == jnp.float32 else 4 * 0.013
    testing.assert_close(got[:2], expected[:2], bound)


def test_no_sum_of_its_own_is_left():
    arrays = [jnp.asarray(a) for a in ARRAYS]
    whole = f"f32[{','.join(map(str, X.shape))}] = add"
    for fused, sums in ((True, 0), (False, 4)):
        text = str(jax.make_jaxpr(lambda a, f=fused: step(a, a[0], emulated.DELAYED, f))(arrays))
        assert text.count(" = add_any ") + text.count(" = add ") >= sums
        assert (whole in text) == (not fused), text


def norms_that_add(step, *args) -> list[bool]:
    """Of each backward pass of a norm in a step, whether a residual's gradient is added there."""
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive is kernel_p and eqn.params["call"].kernel.name in ("layernorm_bwd", "rmsnorm_bwd"):
                found.append(not eqn.params["call"].absent[-1])
            for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    visit(getattr(inner, "jaxpr", inner))

    visit(jax.make_jaxpr(step)(*args).jaxpr)
    return found


@pytest.mark.parametrize("rec", [None, emulated.DELAYED], ids=["high precision", "fp8"])
def test_norms_add_what_reaches_their_input_past_them_and_nothing_else(rec):
    arrays = [jnp.asarray(a) for a in ARRAYS]
    for fused in (True, False):
        run = lambda a, fused=fused: step(a, a[0], rec, fused)
        assert norms_that_add(run, arrays) == 2 * [fused]
        of_gradients = f"f32[{','.join(map(str, X.shape))}] = add_any"
        assert (of_gradients in str(jax.make_jaxpr(run)(arrays))) == (not fused)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_attention_hands_its_input_past_the_norm_only_where_it_is_added(residual, fp8):
    layer = MultiHeadAttention(head_dim=16, num_attention_heads=4, attention_dropout=0.0)
    x = jnp.asarray(X)
    with autocast(fp8, emulated.RECIPES["current"]):
        variables = layer.init(jax.random.key(0), x, residual=residual)
        step = lambda x, dy: jax.vjp(lambda x: layer.apply(variables, x, residual=residual)[0], x)[1](dy)
        assert norms_that_add(step, x, x) == [residual]


@pytest.mark.parametrize("rec", [None, emulated.DELAYED], ids=["high precision", "fp8"])
def test_a_residual_that_is_added_later_has_its_gradient_in_the_norm(rec):
    x, gamma, _, _, up, down, _ = (jnp.asarray(a) for a in ARRAYS)

    def run(arrays, states, returns):
        x, gamma, up, down = arrays
        quantizers = states and tuple(emulated.quantizers(s, rec) for s in states)
        y = layernorm_mlp(x, gamma, None, (up, down), quantizers=quantizers, return_input=returns)
        y, past = y if returns else (y, x)
        return jnp.sin(y) + past

    def gradients(arrays, dy, returns):
        y, vjp = jax.vjp(lambda a, s: run(a, s, returns), arrays, rec and [emulated.states() for _ in range(2)])
        return y, *vjp(dy)

    arrays, dy = [x, gamma, up, down], jnp.asarray(emulated.normal(6, X.shape)[0])
    for returns in (True, False):
        assert norms_that_add(lambda a, dy, r=returns: gradients(a, dy, r), arrays, dy) == [returns]
    got, expected = (jax.jit(gradients, static_argnums=2)(arrays, dy, returns) for returns in (True, False))
    testing.assert_close(got[:2], expected[:2], F32)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_a_layers_norms_add_with_dropout_as_without(flavour, dropout, fp8):
    fields = dict(hidden_size=64, mlp_hidden_size=96, num_attention_heads=4, attention_dropout=0.0)
    x = jnp.asarray(X)
    with autocast(fp8, emulated.RECIPES["current"]):
        if flavour == "linen":
            layer = TransformerLayer(hidden_dropout=dropout, **fields)
            variables = layer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
            run = lambda x: layer.apply(variables, x, rngs={"dropout": jax.random.key(2)})
            step = lambda x, dy: jax.vjp(run, x)[1](dy)
        else:
            graph, state = nnx.split(te_nnx.TransformerLayer(hidden_dropout=dropout, rngs=nnx.Rngs(0), **fields))
            product = lambda layer, x, dy: jnp.vdot(layer(x), dy)
            step = lambda x, dy: nnx.grad(product, argnums=1)(nnx.merge(graph, state, copy=True), x, dy)
        assert norms_that_add(step, x, x) == 2 * [True]
        if dropout or fp8:  # else it is XLA's
            assert f"f32[{','.join(map(str, X.shape))}] = add" not in str(jax.make_jaxpr(step)(x, x))


@pytest.mark.parametrize("fp8", [False, True])
def test_an_mlps_norm_adds_under_sequence_parallelism_too(fp8):
    layer = LayerNormMLP(intermediate_dim=96, dot_1_input_axes=("batch", "seqlen", "embed_activations"))
    x = jnp.asarray(X)
    with autocast(fp8, emulated.RECIPES["current"]):
        variables = layer.init(jax.random.key(0), x)
        for residual in (False, True, lambda y, x: jnp.sin(y) + x):
            step = lambda x, dy, r=residual: jax.vjp(lambda x: layer.apply(variables, x, residual=r)[0], x)[1](dy)
            assert norms_that_add(step, x, x) == [bool(residual)]
        y = layer.apply(variables, x)[0]
        testing.assert_close(layer.apply(variables, x, residual=residual)[0], jnp.sin(y) + x, F32)


def test_a_residual_unlike_the_result_is_named():
    x, _, kernel, *_ = (jnp.asarray(a) for a in ARRAYS)
    with pytest.raises(ValueError, match=r"residual: expected float32\[4, 8, 96\], as the result, got"):
        dense(x, kernel, residual=x)
    with pytest.raises(ValueError, match=r"residual: expected float32\[4, 8, 96\].* got bfloat16"):
        dense(x, kernel, residual=jnp.zeros((4, 8, 96), jnp.bfloat16))
    with pytest.raises(ValueError, match=r"layernorm_mlp: residual: expected float32\[4, 8, 32\], as the result, got"):
        layernorm_mlp(x, None, None, (jnp.ones((64, 1, 8)), jnp.ones((8, 32))), norm_options=None, residual=True)
    with pytest.raises(ValueError, match="return_input: expected False where the residual is added"):
        layernorm_mlp(x, None, None, (jnp.ones((64, 1, 8)), jnp.ones((8, 64))), norm_options=None, residual=True,
                      return_input=True)  # fmt: skip


@pytest.mark.parametrize("rec", [None, DELAYED], ids=["f32", "delayed"])
@pytest.mark.parametrize("how", ["residual", "return_input"])
def test_an_mlp_without_a_norm_has_the_residual_s_gradient(how, rec):
    x, up, down, dy = map(jnp.asarray, emulated.normal(6, (*M, K), (K, 1, N), (N, K), (*M, K)))

    def run(x, states, fused: bool):
        quantizers = states and tuple(emulated.quantizers(s, rec) for s in states)
        more = {how: True} if fused else {}
        y = layernorm_mlp(x, None, None, (up / 8, down / 10), norm_options=None, quantizers=quantizers, **more)
        return y + x if not fused else y if how == "residual" else y[0] + y[1]

    def step(x, states, fused: bool):
        y, vjp = jax.vjp(lambda x, states: run(x, states, fused), x, states)
        return y, vjp(dy)[0]

    states = rec and [emulated.states() for _ in range(2)]
    got, expected = (jax.jit(step, static_argnums=2)(x, states, fused) for fused in (True, False))
    testing.assert_close(got, expected, F32)
