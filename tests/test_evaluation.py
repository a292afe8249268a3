"""Passes that nobody differentiates: the same results, without what only a backward pass needs."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval
from steps import CURRENT, DELAYED

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.flax import TransformerLayer
from transformer_engine_jax.primitive import kernel_p

(X,) = (jnp.asarray(a) for a in emulated.normal(0, (2, 16, 32)))
GPT = dict(use_bias=True)
LLAMA = dict(layernorm_type="rmsnorm", mlp_activations=("silu", "linear"), num_gqa_groups=2, enable_rotary_pos_emb=True)


def results(jaxpr, needed: bool = False) -> list[tuple[str, list[str]]]:
    """Each kernel of a program, loops' and ops' bodies included, with the results it makes; of those, the `needed`."""
    if needed:
        jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    found = []
    for eqn in jaxpr.eqns:
        found += [r for inner in jaxprs_in_params(eqn.params) for r in results(getattr(inner, "jaxpr", inner), needed)]
        if eqn.primitive is kernel_p:
            kernel, shapes = eqn.params["call"].kernel, eqn.params["call"].result_shapes([v.aval for v in eqn.invars])
            found.append((kernel.name, [n for n, shape in zip(kernel.result_names, shapes) if shape is not None]))
    return found


@pytest.mark.parametrize("fields", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("fp8", [DELAYED, CURRENT, None], ids=["delayed", "current", "high precision"])
def test_kernels_make_only_what_the_output_needs(fp8, fields):
    layer = TransformerLayer(
        hidden_size=32, mlp_hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, **fields
    )

    def evaluate(variables, x):
        with te.autocast(fp8 is not None, fp8):
            return layer.apply(variables, x)

    with te.autocast(fp8 is not None, fp8):
        variables = layer.init(jax.random.key(0), X)
    trained = jax.jit(lambda v, x: jax.vjp(evaluate, v, x)[0])(variables, X)
    testing.assert_same_bytes(jax.jit(evaluate)(variables, X), trained)
    # In high precision XLA computes most of it on a GPU, products in TF32, one way in a program and another in pieces.
    exact = fp8 is not None or jax.default_backend() == "cpu"
    same = testing.assert_same_bytes if exact else partial(testing.assert_close, bound=1e-3)
    same(evaluate(variables, X), trained)

    traced = jax.make_jaxpr(evaluate)(variables, X).jaxpr
    assert results(traced) == results(traced, needed=True) != []
    looped = jax.make_jaxpr(lambda v, xs: jax.lax.map(lambda x: evaluate(v, x), xs))(variables, X[None]).jaxpr
    assert results(looped) == results(traced)
