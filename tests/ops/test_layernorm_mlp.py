"""layernorm_mlp: against its four stages, in plain JAX, emulated and composed; and that the fusion is real."""

import re
from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import BF16, DELAYED, F32, FLIP, RECIPES
from jax.sharding import PartitionSpec as P

from transformer_engine_jax import testing
from transformer_engine_jax.ops.activation import activation
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.layernorm import Norm, norm
from transformer_engine_jax.ops.layernorm_mlp import layernorm_mlp
from transformer_engine_jax.ops.quantize import E4M3, E5M2

X, HIDDEN, INNER = (4, 8, 64), 64, 96
SCALES = ((37.0, 413.0, 1234.5), (53.0, 331.0, 2345.0))
# Norm options (None: no norm), LayerNorm or RMSNorm, activations, with biases
CASES = {
    "layernorm gelu": (Norm(), True, ("gelu",), True),
    "rmsnorm swiglu": (Norm(1e-3), False, ("silu", "linear"), False),
    "zero-centred rmsnorm geglu": (Norm(zero_centered_gamma=True), False, ("gelu", "linear"), True),
    "no norm squared relu": (None, False, ("squared_relu",), True),
}


def inputs(case: str, dtype=jnp.float32):
    """((x, gamma, beta, kernels, biases), cotangent of the output), with None for what the case lacks."""
    options, centred, activations, biased = CASES[case]
    a = len(activations)
    x, gamma, beta, k1, k2, b1, b2, dy = emulated.normal(
        2, X, HIDDEN, HIDDEN, (HIDDEN, a, INNER), (INNER, HIDDEN), (a, INNER), HIDDEN, X
    )
    gamma = 0.3 * gamma if options and options.zero_centered_gamma else 1 + 0.3 * gamma
    arrays = (
        2 * x + 0.5 if options else x,
        gamma if options else None,
        0.3 * beta if options and centred else None,
        (k1 / np.sqrt(HIDDEN), k2 / np.sqrt(INNER)),
        (b1, b2) if biased else (None, None),
    )
    return jax.tree.map(lambda t: jnp.asarray(t.astype(dtype)), (arrays, dy))


def fused(x, gamma, beta, kernels, biases, *, case, quantizers=None):
    options, _, activations, _ = CASES[case]
    return layernorm_mlp(
        x, gamma, beta, kernels, biases, activations=activations, norm_options=options, quantizers=quantizers
    )


def composed(x, gamma, beta, kernels, biases, *, case, quantizers=(None, None)):
    options, _, activations, _ = CASES[case]
    x = x if options is None else norm(options, x, gamma, beta)
    z = dense(x, kernels[0], quantizers=quantizers[0])
    return dense(activation(z, activations, bias=biases[0]), kernels[1], biases[1], quantizers=quantizers[1])


def plain(x, gamma, beta, kernels, biases, *, case, roundings=(None, None)):
    options, _, activations, _ = CASES[case]
    x = x if options is None else emulated.norm(x, gamma, beta, **options._asdict())
    return emulated.mlp(x, kernels, biases, activations=activations, roundings=roundings)


def states(scales=SCALES):
    return tuple(emulated.states(s) for s in scales)


def roundings(rec):
    return tuple(emulated.roundings(rec, s) for s in SCALES)


@partial(jax.jit, static_argnames=("op", "case", "rec", "context"))
def step(op, case, arrays, dy, states, rec, context=()):
    """The output, the gradients of the arrays, and the next states."""
    quantizers = lambda states: tuple(emulated.quantizers(s, rec, **dict(context)) for s in states)
    f = lambda arrays, states: op(*arrays, case=case, quantizers=quantizers(states))
    y, vjp = jax.vjp(f, arrays, states)
    return y, *vjp(dy)


@partial(jax.jit, static_argnames=("case", "roundings"))
def plain_step(case, arrays, dy, roundings=(None, None)):
    y, vjp = jax.vjp(lambda arrays: plain(*arrays, case=case, roundings=roundings), arrays)
    return y, vjp(dy.astype(jnp.float32))[0]


@pytest.mark.parametrize("case", CASES)
def test_f32_and_bf16(case):
    # In bf16 each of norm, two products, two biases, and the activation rounds once, and so does each cotangent.
    for dtype, bound in ((jnp.float32, F32), (jnp.bfloat16, 4 * BF16)):
        arrays, dy = inputs(case, dtype)
        y, vjp = jax.vjp(jax.jit(lambda arrays: fused(*arrays, case=case)), arrays)
        testing.assert_close((y, vjp(dy)[0]), plain_step(case, arrays, dy), bound, str(dtype))


@pytest.mark.parametrize("bias_dtype", [jnp.float32, jnp.bfloat16])
def test_biases_are_added_and_have_gradients(bias_dtype):
    case = "layernorm gelu"
    (*rest, (b1, b2)), dy = inputs(case, jnp.bfloat16)
    # A first bias that dominates z: without it, or without its part in the gradients, everything is far off.
    arrays = *rest, ((4 * b1).astype(bias_dtype), b2.astype(bias_dtype))
    y, vjp = jax.vjp(jax.jit(lambda arrays: fused(*arrays, case=case)), arrays)
    grads = vjp(dy)[0]
    assert [b.dtype for b in grads[4]] == [bias_dtype] * 2
    testing.assert_close((y, grads), plain_step(case, arrays, dy), 4 * BF16)


def test_bias_of_the_first_product_is_the_activation_s():
    (x, gamma, beta, kernels, biases), dy = inputs("layernorm gelu", jnp.bfloat16)
    op = lambda *biases: fused(x, gamma, beta, kernels, biases, case="layernorm gelu")
    text = str(jax.make_jaxpr(lambda dy: jax.vjp(op, *biases)[1](dy))(dy))
    # Outside of kernels nothing with the inner features is added or summed; the second bias, of HIDDEN, is.
    by_jax = [line.split(" = ")[0] for line in text.splitlines() if re.search(r" = (add|reduce_sum\[)", line)]
    assert any(f"{HIDDEN}]" in result for result in by_jax)
    assert not any(f"{INNER}]" in result for result in by_jax), by_jax


def test_bias_of_the_first_product_is_the_activation_s_in_fp8():
    (x, gamma, beta, kernels, biases), _ = inputs("layernorm gelu", jnp.bfloat16)
    quantizers = tuple(emulated.quantizers(s, DELAYED) for s in states())
    op = lambda *biases: fused(x, gamma, beta, kernels, biases, case="layernorm gelu", quantizers=quantizers)
    text = str(jax.make_jaxpr(op)(*biases))
    absent = re.findall(r"<kernel (gemm|activation_fwd):.*absent=\(([^)]*)\)", text)
    without_bias = [(name, operands.split(", ")[{"gemm": 4, "activation_fwd": 2}[name]]) for name, operands in absent]
    assert without_bias == [("gemm", "True"), ("activation_fwd", "False"), ("gemm", "False")]


@pytest.mark.parametrize("name", RECIPES)
def test_biases_of_f64_are_added_as_f32(name):
    arrays, dy = inputs("layernorm gelu")
    y, grads, _ = step(fused, "layernorm gelu", arrays, dy, states(), RECIPES[name])
    with jax.enable_x64(True):
        wide = (*arrays[:4], tuple(b.astype(jnp.float64) for b in arrays[4]))
        y_64, grads_64, _ = step(fused, "layernorm gelu", wide, dy, states(), RECIPES[name])
    assert [b.dtype for b in grads_64[4]] == [jnp.float64] * 2
    testing.assert_same_bytes(y_64, y)
    testing.assert_close(grads_64, grads, 1e-7)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_high_precision_sharded_is_unsharded(explicit):
    case = "layernorm gelu"
    arrays, dy = inputs(case)

    @jax.jit
    def run(arrays, dy):
        y, vjp = jax.vjp(lambda arrays: fused(*arrays, case=case), arrays)
        return y, vjp(dy)[0]

    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    with jax.default_device(mesh.devices.flat[0]):
        expected = jax.device_get(run(arrays, dy))
    specs = (P("data"), P(), P(), (P(None, None, "model"), P("model")), (P(None, "model"), P()))
    with testing.on_mesh(mesh):
        got = jax.device_get(run(*testing.shard(mesh, (arrays, dy), (specs, P("data")))))
    testing.assert_close(got, expected, F32)


@pytest.mark.parametrize("name", ["delayed", "current"])
@pytest.mark.parametrize("case", CASES)
def test_fp8_is_the_emulated_one(case, name):
    arrays, dy = inputs(case)
    y, grads, _ = step(fused, case, arrays, dy, states(), RECIPES[name])
    testing.assert_close((y, grads), plain_step(case, arrays, dy, roundings(RECIPES[name])), FLIP)


@pytest.mark.parametrize("name", ["delayed", "current"])
@pytest.mark.parametrize("case", ["layernorm gelu", "rmsnorm swiglu"])
def test_fused_is_composed(case, name):
    arrays, dy = inputs(case)
    got = step(fused, case, arrays, dy, states(), RECIPES[name])
    expected = step(composed, case, arrays, dy, states(), RECIPES[name])
    # dbias of the first product sums other partial sums; all the rest is the same arithmetic.
    testing.assert_close(got[:2], expected[:2], 1e-6)
    testing.assert_same_bytes(got[0], expected[0])
    testing.assert_same_bytes(got[2], expected[2])


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_fp8_is_near_the_exact_result(name):
    case = "rmsnorm swiglu"
    arrays, dy = inputs(case)
    rec, current = RECIPES[name], states(((1.0,) * 3,) * 2)
    for _ in range(4 if rec.stateful else 1):  # z's scale settles a step after x's, dz's after dy's
        y, grads, current = step(fused, case, arrays, dy, current, rec)
    y_, expected = plain_step(case, arrays, dy)
    # y: two products of rounded E4M3 factors, the error of z counted twice, once for each side of the gate.
    # Gradients: the longest chain, dx, has the roundings of z's and a's products (E4M3) and dy's and dz's (E5M2).
    e4m3, e5m2 = emulated.fp8_bound(E4M3), emulated.fp8_bound(E5M2)
    testing.assert_close(y, y_, np.sqrt(2 * 2 + 2) * e4m3, "y")
    testing.assert_close(grads, expected, np.sqrt(6 * e4m3**2 + 2 * e5m2**2), "gradient ")


@pytest.mark.parametrize("calibrating", [False, True])
def test_next_states_hold_the_amax_of_each_operand(calibrating):
    case = "layernorm gelu"
    arrays, dy = inputs(case)
    context = (("calibrating", True),) if calibrating else ()
    *computed, after = step(fused, case, arrays, dy, states(), DELAYED, context)
    x, gamma, beta, kernels, biases = arrays
    # Calibrating, a gradient is watched before the bias is added, and is the same there.
    first, second = (None, None) if calibrating else roundings(DELAYED)
    testing.assert_close(tuple(computed), plain_step(case, arrays, dy, (first, second)), F32 if calibrating else FLIP)

    @jax.jit
    def intermediate():
        normed = norm(Norm(), x, gamma, beta)
        z = emulated.dense(normed, kernels[0], biases[0], roundings=first)
        a, dz_of_da = jax.vjp(lambda z: emulated.activation(z, ("gelu",)), z)
        da = jax.vjp(lambda a: emulated.dense(a, kernels[1], roundings=second), a)[1](dy)[0]
        return normed, a, dz_of_da(da)[0]

    normed, a, dz = intermediate()
    tensors = ((normed, kernels[0], dz), (a, kernels[1], dy))
    for got, operands in zip(after, tensors):
        for (field, state), tensor in zip(got.states().items(), operands):
            expected = emulated.next_state(1.0, tensor, E5M2 if field == "grad" else E4M3)
            testing.assert_close(state, expected, F32, field)


def kernel_calls(op, case, rec) -> dict[str, int]:
    """How often one step calls each kernel."""
    arrays, dy = inputs(case)
    text = str(jax.make_jaxpr(lambda *a: step(op, case, *a, rec))(arrays, dy, states()))
    names = ("quantize", "measure", "rmsnorm_fwd", "rmsnorm_bwd", "activation_fwd", "activation_bwd", "gemm")
    return {k: text.count(f"<kernel {k}:") for k in names}


def test_norm_and_activation_write_fp8_themselves():
    once = dict(rmsnorm_fwd=1, rmsnorm_bwd=1, activation_fwd=1, activation_bwd=1, gemm=6)
    # Two kernels and the incoming gradient; not the norm's output, the activation's, or the activation's gradient.
    assert kernel_calls(fused, "rmsnorm swiglu", DELAYED) == dict(quantize=3, measure=0, **once)
    assert kernel_calls(composed, "rmsnorm swiglu", DELAYED)["quantize"] == 6
    # Under current scaling they run twice, first to measure; the others take a pass of their own for that.
    twice = {**once, "rmsnorm_fwd": 2, "activation_fwd": 2, "activation_bwd": 2}
    assert kernel_calls(fused, "rmsnorm swiglu", RECIPES["current"]) == dict(quantize=3, measure=3, **twice)


def test_the_compiled_step_holds_as_many_casts():
    arrays, dy = inputs("rmsnorm swiglu")
    text = step.lower(fused, "rmsnorm swiglu", arrays, dy, states(), DELAYED).compile().as_text()
    calls = [line for line in text.splitlines() if "custom_call_target=" in line]
    assert sum('"te_quantize"' in c for c in calls) == 3 and sum('"te_gemm"' in c for c in calls) == 6


def test_activations_without_a_kernel_run_stage_by_stage():
    x, gamma, _, (k1, k2), _ = inputs("rmsnorm swiglu")[0]
    activations = ("gelu", "silu")

    @jax.jit
    def run():
        quantizers = tuple(emulated.quantizers(s, DELAYED) for s in states())
        op = partial(layernorm_mlp, x, gamma, None, (k1, k2), activations=activations)
        return op(), op(quantizers=quantizers)

    @jax.jit
    def plain():
        op = partial(emulated.mlp, emulated.norm(x, gamma), (k1, k2), activations=activations)
        return op(), op(roundings=roundings(DELAYED))

    (exact, rounded), (exact_, rounded_) = run(), plain()
    testing.assert_close(exact, exact_, F32)
    testing.assert_close(rounded, rounded_, FLIP)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ["delayed", "current"])
@pytest.mark.parametrize(
    "case, kernel_dtype",
    [("layernorm gelu", jnp.float32), ("rmsnorm swiglu", jnp.bfloat16)],
    ids=["gelu", "swiglu, transposed later"],
)
def test_sharded_is_unsharded(case, kernel_dtype, name, explicit):
    (*vectors, kernels, biases), dy = inputs(case)
    arrays = *vectors, tuple(k.astype(kernel_dtype) for k in kernels), biases
    rec = RECIPES[name]
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    with jax.default_device(mesh.devices.flat[0]):
        expected = jax.device_get(step(fused, case, arrays, dy, states(), rec))
    specs = (P("data"), P(), P(), (P(None, None, "model"), P("model")), (P(None, "model"), P()))
    with testing.on_mesh(mesh):
        local, dy = testing.shard(mesh, (arrays, dy), (specs, P("data")))
        got = jax.device_get(step(fused, case, local, dy, states(), rec))
    testing.assert_close(got[:2], expected[:2], FLIP)
    # Amaxes of what no product comes before are bit-equal; those of a and dz come after a sum.
    of_inputs = lambda states: (states[0].x, states[0].kernel, states[1].kernel, states[1].grad)
    testing.assert_same_bytes(of_inputs(got[2]), of_inputs(expected[2]))
    testing.assert_close(got[2], expected[2], F32)


@pytest.mark.parametrize("fp8", [False, True])
def test_shapes_that_do_not_fit_are_named(fp8):
    (x, gamma, beta, (k1, k2), (b1, b2)), _ = inputs("layernorm gelu")
    quantizers = tuple(emulated.quantizers(s, DELAYED) for s in states()) if fp8 else None
    run = partial(layernorm_mlp, quantizers=quantizers)
    with pytest.raises(ValueError, match=r"layernorm_mlp: kernel has K=\[32\] but x has K=\[64\]"):
        run(x, gamma, beta, (k1[:32], k2))
    with pytest.raises(ValueError, match=r"layernorm_mlp: gamma: expected \[64\].*got \[2\]"):
        run(x, gamma[:2], beta, (k1, k2))
    with pytest.raises(ValueError, match=r"layernorm_mlp: bias: expected the shape \(1, 96\)"):
        run(x, gamma, beta, (k1, k2), (b1[0], b2))
    with pytest.raises(ValueError, match=r"layernorm_mlp, second product: kernel has K=\[64\] but x has K=\[96\]"):
        run(x, gamma, beta, (k1, k2[:64]))
    with pytest.raises(ValueError, match=r"second product: bias: expected the shape \(64,\).*got \(3,\)"):
        run(x, gamma, beta, (k1, k2), (b1, b2[:3]))
    with pytest.raises(
        ValueError, match=r"kernels\[0\]: expected \[K, 2, N\] for \('gelu', 'linear'\), got \[64, 1, 96\]"
    ):
        run(x, gamma, beta, (k1, k2), activations=("gelu", "linear"))
    with pytest.raises(ValueError, match=r"activations: expected some of .*got 'tanh'"):
        run(x, gamma, beta, (k1, k2), activations=("tanh",))
    with pytest.raises(ValueError, match=r"activations: expected some of .*got 3"):
        run(x, gamma, beta, (k1, k2), activations=3)
    with pytest.raises(ValueError, match="epsilon: expected 0 or more, got -1"):
        run(x, gamma, beta, (k1, k2), norm_options=Norm(-1))
    for wrong in ("rmsnorm", (1e-6, False)):
        with pytest.raises(TypeError, match="norm_options: expected a te.Norm .*got "):
            run(x, gamma, beta, (k1, k2), norm_options=wrong)


@pytest.mark.parametrize("fp8", [False, True])
def test_lists_and_an_integer_epsilon_will_do(fp8):
    arrays, _ = inputs("layernorm gelu")
    quantizers = tuple(emulated.quantizers(s, DELAYED) for s in states()) if fp8 else None
    run = partial(layernorm_mlp, quantizers=quantizers, residual=True)
    got = run(*jax.tree.map(lambda a: a.tolist(), arrays), norm_options=Norm(0))
    testing.assert_same_bytes(got, run(*arrays, norm_options=Norm(0.0)))


def test_plain_jax_has_tangents_and_second_derivatives():
    (x, _, _, kernels, biases), _ = inputs("layernorm gelu")

    def loss(x):
        return jnp.sum(layernorm_mlp(x, None, None, kernels, biases, activations=(jnp.tanh,), norm_options=None) ** 2)

    (direction,) = emulated.normal(3, x.shape)
    along = jax.jvp(loss, (x,), (direction,))[1]
    testing.assert_close(along, jnp.vdot(jax.grad(loss)(x), direction), 2.0**-14)
    twice = jax.jvp(jax.grad(loss), (x,), (direction,))[1]
    step = 1e-2
    slope = (jax.grad(loss)(x + step * direction) - jax.grad(loss)(x - step * direction)) / (2 * step)
    testing.assert_close(twice, slope, 2e-2)
