"""LayerNorm and RMSNorm modules against Flax's own."""

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import steps
from emulated import BF16, F32

from transformer_engine_jax import testing
from transformer_engine_jax.flax import LayerNorm, LayerNormDenseGeneral, RMSNorm

(X,) = emulated.normal(0, (2, 8, 64))
X = jnp.asarray(3 * X + 1)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_is_flax(kind, zero_centered):
    module = LayerNorm(layernorm_type=kind, zero_centered_gamma=zero_centered, epsilon=1e-3)
    variables = steps.init(module, X)
    gamma = variables["params"]["scale"]
    assert (gamma == (0 if zero_centered else 1)).all()
    variables = steps.randomized(variables)
    theirs = nn.LayerNorm(epsilon=1e-3) if kind == "layernorm" else nn.RMSNorm(epsilon=1e-3)

    def plain(variables, x):
        p = variables["params"]
        names = {"scale": p["scale"] + zero_centered, **({"bias": p["ln_bias"]} if kind == "layernorm" else {})}
        return theirs.apply({"params": names}, x)

    testing.assert_close(steps.step(module.apply, variables, X), steps.step(plain, variables, X), F32)


def test_rmsnorm_is_a_layernorm_without_mean_and_bias():
    assert steps.layout(steps.init(RMSNorm(), X, unbox=False)) == {"scale": ((64,), "float32", ("embed",))}


def test_parameters():
    module = LayerNorm(scale_axes=("a",), bias_axes=("b",), dtype=jnp.bfloat16)
    assert steps.layout(steps.init(module, X, unbox=False)) == {
        "scale": ((64,), "bfloat16", ("a",)),
        "ln_bias": ((64,), "bfloat16", ("b",)),
    }


def test_bf16_in_bf16_out():
    x = X.astype(jnp.bfloat16)
    variables = steps.randomized(steps.init(LayerNorm(), x))
    y = LayerNorm().apply(variables, x)
    assert y.dtype == jnp.bfloat16
    p = variables["params"]
    testing.assert_close(y, emulated.norm(x, p["scale"], p["ln_bias"]), BF16)


def test_misuse_is_named():
    with pytest.raises(ValueError, match="layernorm_type: expected one of .*got 'batchnorm'"):
        steps.init(LayerNorm(layernorm_type="batchnorm"), X)
    with pytest.raises(ValueError, match="LayerNorm.epsilon: expected 0 or more, got -1"):
        steps.init(LayerNorm(epsilon=-1), X)
    with pytest.raises(ValueError, match=r"scale: expected 1 logical axes for the shape \(64,\), got \('a', 'b'\)"):
        steps.init(LayerNorm(scale_axes=("a", "b")), X)


def test_lists_and_scalars():
    module, variables = LayerNorm(), steps.init(LayerNorm(), X)
    testing.assert_close(module.apply(variables, X.tolist()), module.apply(variables, X), F32)
    for norm in (module, LayerNormDenseGeneral(4)):
        with pytest.raises(ValueError, match="x: expected at least one axis, got a scalar"):
            norm.init(jax.random.key(0), 1.0)


def test_rmsnorm_is_a_class():
    assert isinstance(RMSNorm(), LayerNorm) and not isinstance(LayerNorm(), RMSNorm)
    assert RMSNorm().layernorm_type == "rmsnorm"
