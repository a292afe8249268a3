"""Low-rank adaptation of a dense layer: two small products beside its own, in FP8 and with a frozen kernel."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from emulated import F32
from steps import DELAYED

from transformer_engine_jax import testing
from transformer_engine_jax.flax import DenseGeneral, LayerNormDenseGeneral, LayerNormMLP, MultiHeadAttention

(X,) = (jnp.asarray(a) for a in emulated.normal(0, (4, 8, 64)))
X4 = X.reshape(4, 8, 4, 16)
LORA = dict(enable_low_rank_adaptation=True, low_rank_adaptation_dim=4)


@pytest.mark.parametrize("alpha", [None, 8.0])
def test_low_rank_adaptation_adds_a_b(alpha):
    x = X4
    module = DenseGeneral(features=(3, 16), axis=(-2, -1), low_rank_adaptation_alpha=alpha, **LORA)
    variables = steps.init(module, x)
    assert not np.asarray(variables["params"]["lora_b_kernel"]).any(), "starts as the kernel alone"
    variables = steps.randomized(variables)

    def plain(variables, x):
        p = variables["params"]
        a, b = p["lora_a_kernel"].reshape(64, 3, 4), p["lora_b_kernel"]
        low = jnp.einsum("bsk,kqr,qrn->bsqn", x.reshape(4, 8, 64), a, b, precision="highest")
        return emulated.dense(x, p["kernel"], p["bias"], k_axes=2) + low * (1.0 if alpha is None else alpha / 4)

    testing.assert_close(steps.step(module.apply, variables, x), steps.step(plain, variables, x), F32)


@pytest.mark.parametrize(
    "module, names",
    [
        (DenseGeneral(features=8), "'lora_a_kernel', 'lora_b_kernel'"),
        (LayerNormDenseGeneral(features=8), "'lora_a_kernel', 'lora_b_kernel'"),
        (
            LayerNormMLP(intermediate_dim=8),
            "'wi_lora_a_kernel', 'wi_lora_b_kernel', 'wo_lora_a_kernel', 'wo_lora_b_kernel'",
        ),
    ],
)
def test_branches_are_not_dropped(module, names):
    trained = module.clone(**LORA).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=rf"expected no parameters \[{names}\] with enable_low_rank_adaptation=False"):
        module.apply(trained, X)


@pytest.mark.parametrize("fields", [{}, dict(num_gqa_groups=2), dict(fuse_qkv_params=False)])
@pytest.mark.parametrize("scope", ["qkv_proj", "output_proj"])
def test_nor_are_those_of_attention(scope, fields):
    module = MultiHeadAttention(16, 4, **fields)
    trained = module.clone(low_rank_adaptation_scope=scope).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="expected no parameters .'lora_a_kernel', 'lora_b_kernel'"):
        module.apply(trained, X)


def plain_lora(variables, x, roundings=None):
    """x[.., 8 contracted in the middle, K], the kernel's part in FP8 where roundings are given."""
    p, x = variables["params"], jnp.moveaxis(x, 1, -1)
    y = emulated.dense(x, p["kernel"], roundings=roundings)
    low = jnp.einsum("bdek,kqr,qrn->bdeqn", x, p["lora_a_kernel"], p["lora_b_kernel"], precision="highest")
    return y + low * 2.0, p["bias"]


def test_low_rank_adaptation_of_a_middle_axis_with_the_bias_apart_and_in_fp8():
    module = DenseGeneral(features=(3, 5), axis=1, return_bias=True, low_rank_adaptation_alpha=8.0, **LORA)
    variables = steps.randomized(steps.init(module, X4, rec=DELAYED))
    assert variables["params"]["lora_a_kernel"].shape == (8, 3, 4)
    for rec in (None, DELAYED):
        with steps.autocast(rec):
            if rec:
                variables = steps.settle(module.apply, variables, X4)
            out, (grads, dx) = steps.step(module.apply, variables, X4)
        plain = partial(plain_lora, roundings=steps.gemm_roundings(variables) if rec else None)
        out_, (grads_, dx_) = steps.step(plain, variables, X4)
        testing.assert_close((out, dx, grads["params"]), (out_, dx_, grads_["params"]), F32, str(rec))


def test_initial_variance_of_an_adaptation_is_one_over_what_is_contracted():
    module = DenseGeneral(features=(3, 16), enable_low_rank_adaptation=True, low_rank_adaptation_dim=64)
    kernel = steps.init(module, X)["params"]["lora_a_kernel"]
    assert kernel.shape == (64, 3, 64) and 0.9 < float(jnp.var(kernel)) * 64 < 1.1


def test_adapting_a_frozen_kernel_costs_no_gradient_of_it():
    module = DenseGeneral(features=(3, 16), **LORA)
    variables = steps.randomized(steps.init(module, X, rec=DELAYED))
    adapters = {k: v for k, v in variables["params"].items() if "lora" in k}

    def loss(chosen):
        return steps.loss(module.apply({**variables, "params": {**variables["params"], **chosen}}, X))

    with steps.autocast(DELAYED):
        run, (value, expected) = jax.jit(jax.value_and_grad(loss)), jax.value_and_grad(loss)(variables["params"])
        text = run.lower(adapters).compile().as_text()
        testing.assert_close(run(adapters), (value, {k: expected[k] for k in adapters}), F32)
    assert text.count('custom_call_target="te_gemm"') == 1, "neither the kernel's gradient nor that of the input"
