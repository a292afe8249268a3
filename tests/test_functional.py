"""The functional ops with nothing but JAX: a pytree of parameters and states, trained; vmap; and what is exported."""

import subprocess
import sys
import warnings

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from steps import CURRENT, DELAYED

import transformer_engine_jax as te
from transformer_engine_jax import sharding, testing
from transformer_engine_jax.flax import STATE_COLLECTION, LayerNormMLP
from transformer_engine_jax.ops.layernorm_projections import layernorm_projections

(X,) = (jnp.asarray(a) for a in emulated.normal(0, (4, 8, 16)))
MODULE = LayerNormMLP(intermediate_dim=32, activations=("silu", "linear"), layernorm_type="rmsnorm")


def mlp(params, states, x, rec):
    """A block as one without modules writes it."""
    return te.layernorm_mlp(
        x,
        params["scale"],
        None,
        (params["wi_kernel"], params["wo_kernel"]),
        activations=("silu", "linear"),
        quantizers=tuple(te.gemm_quantizers(state, rec) for state in states) if rec else None,
    )


@pytest.mark.parametrize("rec", [None, DELAYED, CURRENT], ids=["off", "delayed", "current"])
def test_is_the_module(rec):
    variables = steps.randomized(steps.init(MODULE, X, rec=DELAYED))
    with steps.autocast(DELAYED):
        variables = steps.settle(MODULE.apply, variables, X, steps=2)
    collection = variables[STATE_COLLECTION]
    states = [collection[f"gemm_{i}_state"] for i in (1, 2)]
    y, (grads, new, dx) = steps.step(lambda p, s, x: mlp(p, s, x, rec), variables["params"], states, X)
    with steps.autocast(rec):
        (y_, _), (grads_, dx_) = steps.step(MODULE.apply, variables, X)
    bound = emulated.FLIP if rec else emulated.F32  # two programs: XLA may fuse f32 arithmetic otherwise
    testing.assert_close((y, dx, grads), (y_, dx_, grads_["params"]), bound)
    if rec is DELAYED:
        expected = grads_[STATE_COLLECTION]
        expected = [expected[f"gemm_{i}_state"] for i in (1, 2)]
        testing.assert_close(new, expected, emulated.F32)


def test_vmap_over_stacked_experts_is_one_by_one():
    params = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p]), steps.init(MODULE, X)["params"])
    states = [te.GemmState.create(DELAYED)] * 2
    run = lambda params, x: mlp(params, states, x, DELAYED)
    both = jax.jit(jax.vmap(run))(params, jnp.stack([X, 2 * X]))
    for i, x in enumerate((X, 2 * X)):
        testing.assert_close(both[i], run(jax.tree.map(lambda p, i=i: p[i], params), x), emulated.FLIP)


def passed_on(op):
    """A function (parameters, x) -> all results of an op that gives x back, or adds it."""

    def run(p, x, rec):
        quantizers = [te.gemm_quantizers(te.GemmState.create(rec), rec) if rec else None for _ in range(2)]
        kernels, one, two = (p["up"], p["down"]), quantizers[0], tuple(quantizers) if rec else None
        if op == "layernorm_dense":
            return te.layernorm_dense(x, p["gamma"], None, p["down"].T, quantizers=one, return_input=True)
        if op == "projections":
            each = [p["down"].T, p["up"][:, 0]]
            return layernorm_projections(x, p["gamma"], None, each, [None] * 2, quantizers=two, return_input=True)
        fields = dict(residual=op == "residual", return_input=op == "layernorm_mlp")
        return te.layernorm_mlp(x, p["gamma"], None, kernels, quantizers=two, **fields)

    return run


@pytest.mark.parametrize("rec", [None, DELAYED, CURRENT], ids=["off", "delayed", "current"])
@pytest.mark.parametrize("op", ["layernorm_dense", "projections", "layernorm_mlp", "residual"])
@pytest.mark.parametrize("stacked", ["gamma", "down"])
def test_vmap_of_parameters_alone_gives_x_the_sum_of_their_gradients(stacked, op, rec):
    shapes = dict(gamma=(16,), up=(16, 1, 32), down=(32, 16))
    p = dict(zip(shapes, map(jnp.asarray, emulated.normal(1, *((3, *shape) for shape in shapes.values())))))
    axes = {name: 0 if name == stacked else None for name in p}
    p = {name: value if axes[name] == 0 else value[0] for name, value in p.items()}
    example = lambda p, i: {name: value[i] if axes[name] == 0 else value for name, value in p.items()}
    loss = lambda p, x: steps.loss(passed_on(op)(p, x, rec))
    both = jax.jit(jax.grad(lambda p, x: jax.vmap(loss, in_axes=(axes, None))(p, x).sum(), argnums=(0, 1)))(p, X)
    expected = jax.jit(jax.grad(lambda p, x: sum(loss(example(p, i), x) for i in range(3)), argnums=(0, 1)))(p, X)
    testing.assert_close(both, expected, emulated.FLIP if rec else emulated.F32)


def test_quantize_and_dequantize():
    scale = jnp.float32(37.0)
    out = te.quantize(X, scale, dtype=jnp.float8_e4m3fn, q_t=True)
    back = te.dequantize(out.q, 1 / scale, dtype=jnp.bfloat16)
    assert (back.dtype, out.q_t.shape, float(out.amax)) == (jnp.bfloat16, (16, 4, 8), float(np.abs(X).max()))
    testing.assert_close(back, X, emulated.fp8_bound(jnp.float8_e4m3fn))


def test_a_table_of_angles_is_positions_times_frequencies():
    x, frequencies = X[:, :, None], te.rope_frequencies(16)
    angles = jnp.arange(8.0)[:, None] * frequencies
    for group in ("consecutive", "alternate"):
        turned = te.rope(x, frequencies, group=group)
        testing.assert_close(turned, te.rope_table(x, angles, group=group), emulated.F32)
        assert not np.array_equal(turned, x)


def test_needs_no_flax():
    shared = ", ".join(
        f"transformer_engine_jax.modules.{name}" for name in ("attention", "dense", "mlp", "transformer")
    )
    code = f"import sys, transformer_engine_jax as te, {shared}; te.fp8_dot_general; print('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_all_that_is_promised_is_there():
    names = "dense layernorm rmsnorm layernorm_dense layernorm_mlp activation softmax fused_attn dot_product_attention"
    names += " quantize dequantize fp8_dot_general dot_general einsum gemm_quantizers GemmState QuantizerState policies"
    names += " rope rope_table rope_frequencies"
    assert all(hasattr(te, name) and name in te.__all__ for name in names.split())
    assert te.__all__ == sorted(te.__all__)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: te.quantize(jnp.arange(3), 1.0, dtype=jnp.float8_e4m3fn), "quantize: x: .* got int32"),
        (lambda: te.quantize(X, 1.0, dtype=jnp.int8), "quantize: dtype: .* float8_e5m2, got int8"),
        (lambda: te.quantize(X, 1.0, dtype="fp8"), "quantize: dtype: .* float8_e5m2, got fp8"),
        (lambda: te.dequantize(X.astype(jnp.float8_e5m2), 1.0, dtype="bfloat"), "dequantize: dtype: .* got bfloat"),
        (lambda: te.quantize(X, jnp.ones(3), dtype=jnp.float8_e5m2), r"quantize: scale: expected f32\[\], got .*\[3\]"),
        (lambda: te.quantize(X, 1.0, dtype=jnp.float8_e5m2, k_axes=4), "quantize: k_axes: expected 0 to 3, .* got 4"),
        (lambda: te.dequantize(X, 1.0, dtype=jnp.float32), "dequantize: q: .* got float32"),
        (lambda: te.dequantize(X.astype(jnp.float8_e5m2), 1.0, dtype=jnp.int32), "dequantize: dtype: .* got int32"),
    ],
)
def test_mistakes_in_casts(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_casts_have_no_gradient_and_say_so():
    cast = lambda x: te.quantize(x, 1.0, dtype=jnp.float8_e4m3fn).q.astype(jnp.float32).sum()
    with pytest.raises(NotImplementedError, match="quantize: .*FP8 has neither tangents nor second"):
        jax.grad(cast)(X)


KERNEL = jnp.ones((X.shape[-1], 48))
DPA = te.recipe.DelayedScaling(fp8_dpa=True)


def mlp_of_ones(**options):
    return te.layernorm_mlp(X, KERNEL[:, 0], None, (KERNEL[:, None], KERNEL.T), **options)


def test_a_state_that_a_step_leaves_out_is_kept_by_update_collections():
    state = trained = jax.grad(lambda s: jnp.sum(te.dense(X, KERNEL, quantizers=te.gemm_quantizers(s, DELAYED))))(
        te.GemmState.create(DELAYED)
    )
    unused = jax.grad(lambda s: jnp.sum(te.dense(X, KERNEL, quantizers=te.gemm_quantizers(s))))(state)
    assert not unused.packed.any()
    testing.assert_same_bytes(te.update_collections(unused, state), trained)
    testing.assert_same_bytes(te.update_collections(trained, te.GemmState.create(DELAYED)), trained)


def test_the_states_of_a_vmap_of_gradients_are_refused():
    state, xs = te.GemmState.create(DELAYED), jnp.stack([X, 2 * X])
    loss = lambda s, x: jnp.sum(te.dense(x, KERNEL, quantizers=te.gemm_quantizers(s, DELAYED)))
    of_each = jax.vmap(jax.grad(loss), (None, 0))(state, xs)
    with pytest.raises(ValueError, match=r"expected one with the leading axes \[\] of the model's, got \[2\]; a vmap"):
        te.update_collections(of_each, state)
    of_all = jax.grad(lambda s: jnp.sum(jax.vmap(loss, (None, 0))(s, xs)))(state)
    newest, largest = te.update_collections(of_all, state).x.amax_history[1], jnp.abs(xs).max()
    assert of_all.x.uses == 1 and largest <= newest <= 1.25 * largest


def test_no_quantizers_of_two_products_are_none():
    testing.assert_same_bytes(mlp_of_ones(quantizers=(None, None)), mlp_of_ones())


def test_none_is_no_bias_and_no_axes():
    testing.assert_same_bytes(mlp_of_ones(biases=None, kernel_axes=None), mlp_of_ones())


def test_a_state_as_a_checkpoint_has_it():
    """Restored without a target: a mapping, whose gradient is one."""
    state = te.GemmState.create(DELAYED)
    new = [
        jax.grad(lambda s: jnp.sum(te.dense(X, KERNEL, quantizers=te.gemm_quantizers(s, DELAYED))))(given)
        for given in (state, {"packed": state.packed})
    ]
    testing.assert_same_bytes(new[0].packed, new[1]["packed"])
    assert new[0].x.scale != 1


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda q: te.dense(X, KERNEL, quantizers=te.GemmState.create(DELAYED)), TypeError, "quantizers: .* GemmState"),
        (lambda q: te.dense(X, KERNEL, k_axes=-1), ValueError, "k_axes: expected .*1 or more, got -1"),
        (lambda q: te.layernorm_mlp(X, KERNEL[:, 0], None, KERNEL), ValueError, "kernels: expected two"),
        (lambda q: te.layernorm_mlp(X, None, None, (KERNEL, KERNEL), quantizers=q), ValueError, "quantizers: expected"),
        (
            lambda q: te.layernorm_dense(X, KERNEL[:, 0], None, KERNEL, norm_options=None),
            TypeError,
            "norm_options: expected a te.Norm .*got None",
        ),
        (
            lambda q: te.dot_general(X, te.Accumulating(KERNEL, KERNEL), (((2,), (0,)), ((), ()))),
            TypeError,
            "dot_general: kernel: expected an array, got Accumulating",
        ),
        (lambda q: te.dense(X, KERNEL, q), TypeError, "dense: an optional argument: expected an array, got GemmQ"),
        (lambda q: te.gemm_quantizers(CURRENT), TypeError, "state: expected None, GemmState.* got Float8.* second"),
        (
            lambda q: te.attention_quantizers(te.GemmState.create(), DPA),
            TypeError,
            r"expected None, AttentionState.create\(recipe\)",
        ),
        (
            lambda q: mlp_of_ones(quantizers=(q, None)),
            ValueError,
            "expected those of both products, or None, got .*one",
        ),
        (lambda q: mlp_of_ones(biases=jnp.ones(3)), ValueError, "biases: expected two, of the two products, got Array"),
        (lambda q: mlp_of_ones(names="ffn"), ValueError, "names: expected two, of the two products, got str"),
        (lambda q: mlp_of_ones(kernel_axes=((),)), ValueError, "kernel_axes: expected two, .*got 1"),
        (lambda q: te.rope_frequencies(15), ValueError, "head_dim: expected an even number, 2 or more, got 15"),
    ],
)
def test_mistakes_in_products(call, error, message):
    with pytest.raises(error, match=message):
        call(te.gemm_quantizers(None, CURRENT))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: te.dense(None, KERNEL), "dense: x"),
        (lambda: te.dense(X, None), "dense: kernel"),
        (lambda: te.dense(X, te.Accumulating(KERNEL, None)), "dense: main_grad"),
        (lambda: te.dot_product_attention(None, X, X, options=te.Attention(1.0)), "dot_product_attention: query"),
        (lambda: te.layernorm(X, None, KERNEL[:, 0]), "layernorm: gamma"),
        (lambda: te.rmsnorm(None, KERNEL[:, 0]), "rmsnorm: x"),
        (lambda: te.layernorm_dense(X, None, None, KERNEL), "layernorm_dense: gamma"),
        (lambda: te.layernorm_mlp(X, None, None, (KERNEL[:, None], KERNEL.T)), "layernorm_mlp: gamma"),
        (lambda: te.activation(None, "gelu"), "activation: z"),
        (lambda: te.softmax(None), "softmax: logits"),
        (lambda: te.rope(None, jnp.ones(8)), "rope: x"),
        (lambda: te.rope_table(X[..., None, :], None), "rope_table: angles"),
        (lambda: te.einsum("bsk,kn->bsn", X, None), "einsum: kernel"),
        (lambda: te.quantize(X, None, dtype=jnp.float8_e4m3fn), "quantize: scale"),
        (lambda: te.dequantize(None, 1.0, dtype=jnp.float32), "dequantize: q"),
    ],
)
def test_none_in_place_of_an_array(call, message):
    with pytest.raises(TypeError, match=f"{message}: expected an array, got None"):
        call()


def test_no_norm_has_no_parameters():
    kernels = KERNEL[:, None], KERNEL.T
    te.layernorm_mlp(X, None, None, kernels, norm_options=None)
    with pytest.raises(ValueError, match="layernorm_mlp: gamma, beta: expected None where norm_options is None"):
        te.layernorm_mlp(X, KERNEL[:, 0], None, kernels, norm_options=None)


def test_modules_are_attributes_once_asked_for():
    code = "import transformer_engine_jax as te; print(te.flax.DenseGeneral.__name__, te.nnx.DenseGeneral.__name__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "DenseGeneral DenseGeneral\n"
    assert {"flax", "nnx"} <= set(dir(te)) and sharding.global_shard_guard is te.global_shard_guard
    with pytest.raises(AttributeError, match="quantize_once: not there yet"):
        te.quantize_once  # noqa: B018
    assert not hasattr(te, "anything")


def test_f64_where_kernels_compute():
    with jax.enable_x64(True):
        x, kernel = X.astype(jnp.float64), KERNEL.astype(jnp.float64)
        assert te.dense(x, kernel).dtype == jnp.float64
        with pytest.raises(ValueError, match="dense: kernel: expected f32, f16 or bf16, got float64"):
            te.dense(X, kernel, quantizers=te.gemm_quantizers(None, CURRENT))


@pytest.mark.parametrize("rec", [DELAYED, CURRENT], ids=["delayed", "current"])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_a_state_that_is_left_out_of_the_gradient_is_told_of(jit, rec):
    state = te.GemmState.create(rec)

    def loss(kernel, state):
        return jnp.sum(te.dense(X, kernel, quantizers=te.gemm_quantizers(state, rec)) ** 2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jit(jax.grad(loss, argnums=(0, 1)))(KERNEL, state)
        jit(loss)(KERNEL, state)
        if not rec.stateful:
            jit(jax.grad(loss))(KERNEL, state)
    if rec.stateful:
        with pytest.warns(RuntimeWarning, match="a kernel's gradient is taken and its state's is not") as warned:
            jit(jax.grad(loss))(KERNEL, state)
        assert {w.filename for w in warned} == {__file__}, "where the user's code is"


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_so_is_one_that_gradients_pass_by(jit):
    """Of what comes before a frozen kernel, as LoRA's branches or prompts."""
    state = te.GemmState.create(DELAYED)
    loss = lambda x, state: jnp.sum(te.dense(x, KERNEL, quantizers=te.gemm_quantizers(state, DELAYED)) ** 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jit(jax.grad(loss, argnums=(0, 1)))(X, state)
        jit(jax.grad(loss, argnums=1))(X, state)
    with pytest.warns(RuntimeWarning, match="a gradient is taken through a product and its state's is not"):
        jit(jax.grad(loss))(X, state)
