"""layernorm_projections: equal to a norm and products of their own, with one quantized copy of the normed input."""

import itertools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import F32, FLIP, RECIPES
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.layernorm import Norm, norm
from transformer_engine_jax.ops.layernorm_projections import layernorm_projections

X, K = (4, 8, 64), 64
# Shapes of kernels, with biases, LayerNorm (True), RMSNorm (False) or none
CASES = {
    "qkv, biases": ([(K, 3, 48)], True, True),
    "q, kv": ([(K, 96), (K, 2, 32)], False, False),
    "q, k, v, biases": ([(K, 96), (K, 32), (K, 32)], True, False),
    "odd qkv": ([(K, 3, 13)], True, True),
    "no norm": ([(K, 2, 32)], False, None),
}


def inputs(case):
    shapes, biased, centred = CASES[case]
    x, gamma, beta, *kernels = emulated.normal(2, X, K, K, *shapes)
    biases = emulated.normal(3, *[s[1:] for s in shapes])
    outs = [s for shape in shapes for s in [(*X[:-1], shape[-1])] * (shape[1] if len(shape) == 3 else 1)]
    arrays = (
        2 * x,
        None if centred is None else 1 + 0.3 * gamma,
        beta if centred else None,
        [k / np.sqrt(K) for k in kernels],
        list(biases) if biased else [None] * len(shapes),
    )
    return jax.tree.map(jnp.asarray, (arrays, emulated.normal(4, *outs, X)))


def fused(x, gamma, beta, kernels, biases, quantizers, split=True):
    options = None if gamma is None else Norm()
    ys, x = layernorm_projections(
        x, gamma, beta, kernels, biases, norm_options=options, quantizers=quantizers, return_input=True, split=split
    )
    return [*ys, x]


def in_one(*arrays):
    """Results of a kernel [K, P, N] left in the array of its one product, [.., P, N], and taken out of it here."""
    *ys, x = fused(*arrays, split=False)
    parts = [[y] if kernel.ndim == 2 else [*jnp.moveaxis(y, -2, 0)] for y, kernel in zip(ys, arrays[3])]
    return [*itertools.chain(*parts), x]


def composed(x, gamma, beta, kernels, biases, quantizers):
    normed = x if gamma is None else norm(Norm(), x, gamma, beta)
    ys = []
    for i, (kernel, bias) in enumerate(zip(kernels, biases)):
        of_this = quantizers and quantizers[i]._replace(x=quantizers[0].x)
        y = dense(normed, kernel, bias, quantizers=of_this)
        ys += [y] if kernel.ndim == 2 else [y[..., j, :] for j in range(kernel.shape[1])]
    return [*ys, x]


def step(op, arrays, dys, rec):
    def run(arrays, states):
        return op(*arrays, states and [emulated.quantizers(s, rec) for s in states])

    states = rec and [emulated.states((37.0, 413.0, 1234.5 + i)) for i in range(len(arrays[3]))]
    ys, vjp = jax.vjp(run, arrays, states)
    return ys, *vjp(list(dys))


step = jax.jit(step, static_argnums=(0, 3))


@pytest.mark.parametrize("name", [None, "delayed", "current"])
@pytest.mark.parametrize("op, case", [*((fused, case) for case in CASES), (in_one, "qkv, biases"), (in_one, "q, kv")])
def test_is_a_norm_and_products(op, case, name):
    arrays, dys = inputs(case)
    rec = name and RECIPES[name]
    ys, grads, states = step(op, arrays, dys, rec)
    ys_, grads_, states_ = step(composed, arrays, dys, rec)
    testing.assert_close((ys, grads), (ys_, grads_), FLIP if rec else F32)
    if name == "delayed":
        # Kernels and gradients as before; every product's input reports what the one cast of it saw.
        for state, state_ in zip(states, states_):
            testing.assert_same_bytes((state.kernel, state.grad), (state_.kernel, state_.grad))
            testing.assert_same_bytes(state.x.amax_history, states[0].x.amax_history)
        assert np.any(np.asarray(states[0].x.amax_history))


def calls(op, case, rec):
    arrays, dys = inputs(case)
    text = str(jax.make_jaxpr(lambda a, d: step(op, a, d, rec))(arrays, dys))
    names = ("quantize", "quantize_stack", "rmsnorm_fwd", "rmsnorm_bwd", "gemm")
    return {k: text.count(f"<kernel {k}:") for k in names}


def test_the_input_is_quantized_once_and_gradients_where_they_are():
    norms = dict(rmsnorm_fwd=1, rmsnorm_bwd=1)
    expected = dict(quantize=3, quantize_stack=1, gemm=7, **norms)  # q's kernel and gradient, kv's kernel
    assert calls(fused, "q, kv", RECIPES["delayed"]) == expected
    assert calls(composed, "q, kv", RECIPES["delayed"]) == dict(quantize=6, quantize_stack=0, gemm=6, **norms)
    assert calls(in_one, "q, kv", RECIPES["delayed"]) == dict(quantize=4, quantize_stack=0, gemm=6, **norms)


@pytest.mark.parametrize("explicit", [False, True])
def test_sharded_is_unsharded(explicit):
    arrays, dys = inputs("qkv, biases")
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    with jax.default_device(mesh.devices.flat[0]):
        expected = jax.device_get(step(fused, arrays, dys, RECIPES["delayed"]))
    specs = (P("data"), P(), P(), [P("data", None, "model")], [P(None, "model")])
    of_outputs = [P("data", None, "model")] * 3 + [P("data")]
    with testing.on_mesh(mesh):
        arrays, dys = testing.shard(mesh, (arrays, list(dys)), (specs, of_outputs))
        got = jax.device_get(step(fused, arrays, dys, RECIPES["delayed"]))
    testing.assert_close(got[:2], expected[:2], FLIP)
    testing.assert_same_bytes(got[2], expected[2])


def test_kernels_that_do_not_fit_are_named():
    (x, gamma, beta, _, _), _ = inputs("qkv, biases")
    with pytest.raises(ValueError, match=r"kernels: expected \[K, N\], \[K, 2, N\] or \[K, 3, N\], got \[64, 4, 8\]"):
        layernorm_projections(x, gamma, beta, [jnp.zeros((K, 4, 8))], [None])
    with pytest.raises(ValueError, match=r"kernel has K=\[32\] but x has K=\[64\]"):
        layernorm_projections(x, gamma, beta, [jnp.zeros((32, 8))], [None])
    with pytest.raises(ValueError, match="epsilon: expected 0 or more, got -1"):
        layernorm_projections(x, gamma, beta, [jnp.zeros((K, 8))], [None], norm_options=Norm(-1))
    one = te.gemm_quantizers(None, te.recipe.Float8CurrentScaling())
    with pytest.raises(ValueError, match="quantizers: expected 2, one for each kernel, got 1"):
        layernorm_projections(x, gamma, beta, [jnp.zeros((K, 8))] * 2, [None] * 2, quantizers=[one])


def test_lists_will_do():
    arrays, _ = inputs("qkv, biases")
    got = layernorm_projections(*jax.tree.map(lambda a: a.tolist(), arrays))
    testing.assert_same_bytes(got, layernorm_projections(*arrays))


@pytest.mark.parametrize("left_out", [0, 1])
def test_the_state_of_each_product_is_looked_at(left_out):
    """The warning of a state without its gradient is not of the first product alone."""
    states = [te.GemmState.create(emulated.DELAYED) for _ in range(2)]

    def loss(kernels, state):
        given = [state, states[left_out]] if left_out else [states[left_out], state]
        quantizers = [te.gemm_quantizers(s, emulated.DELAYED) for s in given]
        ys, _ = layernorm_projections(jnp.ones(X), jnp.ones(K), None, kernels, [None, None], quantizers=quantizers)
        return sum(jnp.sum(y) for y in ys)

    with pytest.warns(RuntimeWarning, match="a kernel's gradient is taken and its state's is not") as warned:
        jax.grad(loss, argnums=(0, 1))([jnp.ones((K, 32)), jnp.ones((K, 16))], states[1 - left_out])
    assert len(warned) == 1
