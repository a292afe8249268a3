"""Every block of Python in the README runs as it stands, and so does the JAX example that users bring along."""

import pathlib
import re

import numpy as np
import pytest

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)


def test_all_blocks_are_run_or_plain_text():
    assert {language for language, _ in BLOCKS} == {"python", "text"}
    assert README.count("```") == 2 * len(BLOCKS)


@pytest.mark.parametrize("code", [code for language, code in BLOCKS if language == "python"])
def test_block(code):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_overview_example_of_the_original():
    """reference/overview_readme.txt: unchanged but for its import lines."""
    import flax
    import jax
    import jax.numpy as jnp

    import transformer_engine_jax as te
    import transformer_engine_jax.flax as te_flax
    from transformer_engine_jax.common import recipe

    BATCH = 32
    SEQLEN = 128
    HIDDEN = 1024

    # Initialize RNG and inputs.
    rng = jax.random.PRNGKey(0)
    init_rng, data_rng = jax.random.split(rng)
    inp = jax.random.normal(data_rng, [BATCH, SEQLEN, HIDDEN], jnp.float32)

    # Create an FP8 recipe. Note: All input args are optional.
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.HYBRID)

    # Enable autocasting for the forward pass
    with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
        model = te_flax.DenseGeneral(features=HIDDEN)

        def loss_fn(params, other_vars, inp):
            out = model.apply({"params": params, **other_vars}, inp)
            return jnp.mean(out)

        # Initialize models.
        variables = model.init(init_rng, inp)
        other_variables, params = flax.core.pop(variables, "params")

        # Construct the forward and backward function
        fwd_bwd_fn = jax.value_and_grad(loss_fn, argnums=(0, 1))

        for _ in range(10):
            loss, (param_grads, other_grads) = fwd_bwd_fn(params, other_variables, inp)

    assert jnp.isfinite(loss)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((param_grads, other_grads)))
    # d mean(x W + b) / d b is 1 / HIDDEN for every feature.
    assert jnp.allclose(param_grads["bias"], 1 / HIDDEN)
    state = other_grads["_overwrite_with_gradient"]
    assert state["gemm_x"].scale == np.float32(448) / np.abs(inp).max()
    assert state["gemm_grad"].scale == 57344.0 * inp.size  # the gradient is 1 / (BATCH * SEQLEN * HIDDEN) everywhere

    # The example drops the new state, so its gradients of 2e-7 never get a scale. One step that keeps it:
    with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
        loss, (param_grads, _) = fwd_bwd_fn(params, other_grads, inp)
    expected = jnp.mean(inp, axis=(0, 1))[:, None] / HIDDEN * jnp.ones((1, HIDDEN))
    error = jnp.linalg.norm(param_grads["kernel"] - expected) / jnp.linalg.norm(expected)
    assert error < 0.1  # one rounding to E4M3, at most 2**-4
