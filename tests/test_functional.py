"""The functional ops with nothing but JAX: a pytree of parameters and states, trained; vmap; and what is exported."""

import subprocess
import sys

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from steps import CURRENT, DELAYED

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.flax import STATE_COLLECTION, LayerNormMLP

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


def test_quantize_and_dequantize():
    scale = jnp.float32(37.0)
    out = te.quantize(X, scale, dtype=jnp.float8_e4m3fn, q_t=True)
    back = te.dequantize(out.q, 1 / scale, dtype=jnp.bfloat16)
    assert (back.dtype, out.q_t.shape, float(out.amax)) == (jnp.bfloat16, (16, 4, 8), float(np.abs(X).max()))
    testing.assert_close(back, X, emulated.fp8_bound(jnp.float8_e4m3fn))


def test_needs_no_flax():
    code = "import sys, transformer_engine_jax as te; te.fp8_dot_general; print('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_all_that_is_promised_is_there():
    names = "dense layernorm rmsnorm layernorm_dense layernorm_mlp activation softmax fused_attn dot_product_attention"
    names += " quantize dequantize fp8_dot_general dot_general einsum gemm_quantizers GemmState QuantizerState policies"
    assert all(hasattr(te, name) and name in te.__all__ for name in names.split())
    assert te.__all__ == sorted(te.__all__)
