"""layernorm_dense: against its two stages, in plain JAX, emulated and composed; and that the fusion is real."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import BF16, DELAYED, F32, FLIP, RECIPES, fp8_bound
from jax.sharding import PartitionSpec as P

from transformer_engine_jax import testing
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.layernorm import Norm, norm
from transformer_engine_jax.ops.layernorm_dense import layernorm_dense
from transformer_engine_jax.ops.quantize import E4M3, E5M2

NORM = Norm()
NORMS = pytest.mark.parametrize("centred", [True, False], ids=["layernorm", "rmsnorm"])


def inputs(dtype=jnp.float32, centred=True):
    """(x, gamma, beta or None, kernel, bias), cotangent of the output."""
    x, gamma, beta, kernel, bias, dy = emulated.normal(1, (4, 8, 64), 64, 64, (64, 3, 16), (3, 16), (4, 8, 3, 16))
    arrays = (2 * x + 0.5, 1 + 0.3 * gamma, 0.3 * beta, kernel / 8, bias)
    x, gamma, beta, kernel, bias = (jnp.asarray(a.astype(dtype)) for a in arrays)
    return (x, gamma, beta if centred else None, kernel, bias), jnp.asarray(dy.astype(dtype))


def fused(x, gamma, beta, kernel, bias, quantizers=None, options=NORM):
    return layernorm_dense(x, gamma, beta, kernel, bias, norm_options=options, quantizers=quantizers)


def composed(x, gamma, beta, kernel, bias, quantizers=None, options=NORM):
    return dense(norm(options, x, gamma, beta), kernel, bias, quantizers=quantizers)


def plain(x, gamma, beta, kernel, bias, roundings=None, options=NORM):
    return emulated.dense(emulated.norm(x, gamma, beta, **options._asdict()), kernel, bias, roundings=roundings)


@partial(jax.jit, static_argnames=("op", "rec", "options"))
def step(op, arrays, dy, states, rec, options=NORM):
    """The output, the gradients of the arrays, and the next states."""
    f = lambda arrays, states: op(*arrays, quantizers=emulated.quantizers(states, rec), options=options)
    y, vjp = jax.vjp(f, arrays, states)
    return y, *vjp(dy)


@partial(jax.jit, static_argnames=("roundings", "options"))
def plain_step(arrays, dy, roundings=None, options=NORM):
    y, vjp = jax.vjp(lambda arrays: plain(*arrays, roundings=roundings, options=options), arrays)
    return y, vjp(dy.astype(jnp.float32))[0]


@NORMS
def test_f32_and_bf16(centred):
    for dtype, bound in ((jnp.float32, F32), (jnp.bfloat16, 3 * BF16)):  # three roundings: norm, product, bias
        arrays, dy = inputs(dtype, centred)
        y, vjp = jax.vjp(jax.jit(lambda arrays: fused(*arrays)), arrays)
        testing.assert_close((y, vjp(dy)[0]), plain_step(arrays, dy), bound, str(dtype))


@pytest.mark.parametrize("options", [NORM, Norm(1e-2, True)], ids=["plain gamma", "zero-centred gamma"])
@NORMS
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_fp8_is_the_emulated_one(name, centred, options):
    arrays, dy = inputs(centred=centred)
    y, grads, _ = step(fused, arrays, dy, emulated.states(), RECIPES[name], options)
    expected = plain_step(arrays, dy, emulated.roundings(RECIPES[name]), options)
    testing.assert_close((y, grads), expected, FLIP)


@NORMS
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_fused_is_composed(name, centred):
    arrays, dy = inputs(centred=centred)
    got = step(fused, arrays, dy, emulated.states(), RECIPES[name])
    expected = step(composed, arrays, dy, emulated.states(), RECIPES[name])
    testing.assert_same_bytes(got, expected)


def test_delayed_fp8_is_near_the_exact_result():
    arrays, dy = inputs()
    states = emulated.states((1.0, 1.0, 1.0))
    for _ in range(3):
        y, grads, states = step(fused, arrays, dy, states, DELAYED)
    y_, expected = plain_step(arrays, dy)
    testing.assert_close(y, y_, fp8_bound(E4M3, E4M3), "y")
    testing.assert_close(grads[:4], expected[:4], fp8_bound(E4M3, E5M2), "gradient of ")
    testing.assert_close(grads[4], expected[4], F32, "dbias")


def test_next_state_holds_the_amax_of_the_normed_input():
    (x, gamma, beta, kernel, bias), dy = inputs()
    *_, states = step(fused, (x, gamma, beta, kernel, bias), dy, emulated.states(), DELAYED)
    normed = norm(Norm(), x, gamma, beta)
    for got, tensor, dtype in zip(states.states().values(), (normed, kernel, dy), (E4M3, E4M3, E5M2)):
        testing.assert_same_bytes(got, emulated.next_state(1.0, tensor, dtype))


def casts(op, rec) -> dict[str, int]:
    """How often one step calls each kernel."""
    arrays, dy = inputs()
    text = str(jax.make_jaxpr(lambda *a: step(op, *a, rec))(arrays, dy, emulated.states()))
    return {k: text.count(f"<kernel {k}:") for k in ("quantize", "layernorm_fwd", "layernorm_bwd", "gemm", "measure")}


def test_the_norm_writes_fp8_itself():
    assert casts(fused, DELAYED) == dict(quantize=2, layernorm_fwd=1, layernorm_bwd=1, gemm=3, measure=0)
    assert casts(composed, DELAYED)["quantize"] == 3
    # Current scaling runs it twice, first to measure.
    assert casts(fused, RECIPES["current"]) == dict(quantize=2, layernorm_fwd=2, layernorm_bwd=1, gemm=3, measure=2)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_sharded_is_unsharded(explicit):
    arrays, dy = inputs()
    expected = jax.device_get(step(fused, arrays, dy, emulated.states(), DELAYED))
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    column = (P("data"), P(), P(), P(None, None, "model"), P(None, "model"))
    with testing.on_mesh(mesh):
        local = testing.shard(mesh, arrays, column)
        dy = testing.shard(mesh, dy, P("data", None, None, "model"))
        got = jax.device_get(step(fused, local, dy, emulated.states(), DELAYED))
    testing.assert_close(got[:2], expected[:2], F32)
    testing.assert_same_bytes(got[2], expected[2])


@pytest.mark.parametrize("fp8", [False, True])
def test_shapes_that_do_not_fit_are_named(fp8):
    (x, gamma, beta, kernel, bias), _ = inputs()
    run = partial(layernorm_dense, quantizers=emulated.quantizers(emulated.states(), DELAYED) if fp8 else None)
    with pytest.raises(ValueError, match=r"gamma: expected \[64\], x's last axis, got \[63\]"):
        run(x, gamma[:63], beta, kernel, bias)
    with pytest.raises(ValueError, match=r"beta: expected \[64\], x's last axis, got \[1\]"):
        run(x, gamma, beta[:1], kernel, bias)
    with pytest.raises(ValueError, match=r"dense: kernel has K=\[32\] but x has K=\[64\]"):
        run(x, gamma, beta, kernel[:32], bias)
    with pytest.raises(ValueError, match=r"bias: expected the shape \(3, 16\)"):
        run(x, gamma, beta, kernel, bias[0])
    with pytest.raises(ValueError, match="x: expected f32, f16 or bf16, got int32"):
        run(np.ones(x.shape, np.int32), gamma, beta, kernel, bias)
    with pytest.raises(ValueError, match="epsilon: expected 0 or more, got -1"):
        run(x, gamma, beta, kernel, bias, norm_options=Norm(-1))


@pytest.mark.parametrize("fp8", [False, True])
def test_lists_and_an_integer_epsilon_will_do(fp8):
    arrays, _ = inputs()
    run = partial(layernorm_dense, quantizers=emulated.quantizers(emulated.states(), DELAYED) if fp8 else None)
    got = run(*[a.tolist() for a in arrays], norm_options=Norm(0))
    testing.assert_same_bytes(got, run(*arrays, norm_options=Norm(0.0)))
