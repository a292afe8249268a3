"""Mistakes in NNX modules are told by name: in their fields, and in what they are called with."""

from typing import Any

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import transformer_engine_jax as te
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import recipe
from transformer_engine_jax.nnx.base import Fp8Module, module

B, S, K, H, D = 4, 16, 32, 4, 8
X, Y = (jnp.asarray(a) for a in emulated.normal(5, (B, S, K), (B, 8, 24)))
(Q,) = (jnp.asarray(a) for a in emulated.normal(6, (B, S, H, D)))
LAYER = dict(hidden_size=K, mlp_hidden_size=48, num_attention_heads=H, hidden_dropout=0.0, attention_dropout=0.0)
DECODER = dict(**LAYER, layer_type=te_nnx.TransformerLayerType.DECODER)

MISUSE = {
    "features": (lambda r: te_nnx.DenseGeneral(K, 0, rngs=r), "DenseGeneral.features: expected positive sizes"),
    "in_features": (lambda r: te_nnx.DenseGeneral((K, 2), 4, rngs=r), "in_features: expected one for each axis"),
    "wrong K": (lambda r: te_nnx.DenseGeneral(K + 1, 4, rngs=r)(X), r"kernel has K=\[33\] but x has K=\[32\]"),
    "axes": (lambda r: te_nnx.DenseGeneral(K, 4, kernel_axes=("a",), rngs=r), "kernel: expected 2 logical axes"),
    "norm": (lambda r: te_nnx.LayerNorm(K, layernorm_type="batch", rngs=r), "layernorm_type: expected one of"),
    "no norm": (
        lambda r: te_nnx.LayerNormMLP(K, enable_layernorm=False, layernorm_type="batch", rngs=r),
        "layernorm_type: expected one of",
    ),
    "epsilon": (lambda r: te_nnx.RMSNorm(K, epsilon=-1, rngs=r), "epsilon: expected 0 or more, got -1"),
    "scalar": (lambda r: te_nnx.LayerNorm(K, rngs=r)(1.0), "x: expected at least one axis, got a scalar"),
    "depth_scaling": (lambda r: te_nnx.LayerNormDenseGeneral(K, 4, depth_scaling=0, rngs=r), "expected a divisor"),
    "norm axis": (lambda r: te_nnx.LayerNormDenseGeneral(K, 4, axis=1, rngs=r), "axis: expected -1"),
    "mlp axis": (lambda r: te_nnx.LayerNormMLP(K, axis=1, rngs=r), "axis: expected -1"),
    "intermediate_dim": (lambda r: te_nnx.LayerNormMLP(K, intermediate_dim=8.0, rngs=r), "expected a positive integer"),
    "mlp dropout": (
        lambda r: te_nnx.LayerNormMLP(K, intermediate_hidden_dropout_dims=(7,), rngs=r)(X),
        r"intermediate_hidden_dropout_dims: expected axes of 3, got \(7,\)",
    ),
    "layer dropout": (
        lambda r: te_nnx.TransformerLayer(intermediate_dropout_dims=(9,), rngs=r),
        r"axes of 3, got \(9,",
    ),
    "dropout of all": (
        lambda r: te_nnx.DotProductAttention(D, H, attention_dropout=1.0, rngs=r),
        r"dropout: expected a rate in \[0, 1\), got 1.0",
    ),
    "mlp rate": (
        lambda r: te_nnx.LayerNormMLP(K, intermediate_dropout_rate=1.0, rngs=r),
        r"LayerNormMLP.intermediate_dropout_rate: expected a rate in \[0, 1\), got 1.0",
    ),
    "mlp of nothing": (lambda r: te_nnx.LayerNormMLP(0, rngs=r), "in_features: expected a positive integer, got 0"),
    "no groups": (
        lambda r: te_nnx.MultiHeadAttention(K, D, H, num_gqa_groups=0, rngs=r),
        "MultiHeadAttention.num_gqa_groups: expected a positive integer, got 0",
    ),
    "activation 3": (lambda r: te_nnx.LayerNormMLP(K, activations=(3,), rngs=r), "expected some of .*got 3"),
    "groups": (lambda r: te_nnx.DotProductAttention(D, H, num_gqa_groups=0)(Q, Q, Q), "num_gqa_groups: expected a pos"),
    "group method": (
        lambda r: te_nnx.MultiHeadAttention(K, D, H, rotary_pos_emb_group_method="x", rngs=r),
        "rotary_pos_emb_group_method: expected one of",
    ),
    "biases of no head": (lambda r: te_nnx.RelativePositionBiases(8, 20, 0, rngs=r), "num_attention_heads: expected a"),
    "ignored mask": (lambda r: te_nnx.DotProductAttention(D, H)(Q, Q, Q, mask=jnp.ones((9, 9))), "mask: expected a sh"),
    "activation": (lambda r: te_nnx.LayerNormMLP(K, activations=("nope",), rngs=r), "nope"),
    "scope": (lambda r: te_nnx.MultiHeadAttention(K, D, H, low_rank_adaptation_scope="x", rngs=r), "expected one of"),
    "keys of others": (lambda r: te_nnx.MultiHeadAttention(K, D, H, rngs=r)(X, Y), "expected None or inputs_q itself"),
    "no keys": (lambda r: te_nnx.MultiHeadAttention(K, D, H, in_kv_features=24, rngs=r)(X), "expected an array"),
    "hidden": (lambda r: te_nnx.TransformerLayer(hidden_size=30, rngs=r), "hidden_size=30 does not divide into 8"),
    "encoded": (lambda r: te_nnx.TransformerLayer(**LAYER, rngs=r)(X, Y), "encoded: expected None, for layer_type=ENC"),
    "no encoded": (lambda r: te_nnx.TransformerLayer(**DECODER, rngs=r)(X), "encoded: expected the encoder's output"),
    "parallel decoder": (
        lambda r: te_nnx.TransformerLayer(**DECODER, parallel_attention_mlp=True, rngs=r),
        "expected False with layer_type",
    ),
    "rank": (lambda r: te_nnx.MultiHeadAttention(K, D, H, rngs=r)(X[0]), "inputs_q: expected .B, S, features"),
    "qk_norm_type": (lambda r: te_nnx.MultiHeadAttention(K, D, H, qk_norm_type="x", rngs=r), "expected one of"),
    "no cache": (lambda r: te_nnx.TransformerLayer(**LAYER, rngs=r)(X, decode=True), "call init_cache"),
    "cache of a rank": (lambda r: te_nnx.TransformerLayer(**LAYER, rngs=r).init_cache((B, S)), "input_shape: expected"),
    "no stream": (
        lambda r: te_nnx.TransformerLayer(**{**LAYER, "hidden_dropout": 0.1}, rngs=nnx.Rngs(params=0)),
        r"dropout: rngs: expected a stream 'dropout' or a default one, .* where the dropout rate is 0.1, got params",
    ),
    "a seed": (lambda r: te_nnx.DenseGeneral(K, 4, rngs=0), r"DenseGeneral.kernel: rngs: expected nnx.Rngs.*got 0"),
    "a key": (lambda r: te_nnx.LayerNorm(K, rngs=jax.random.key(0)), r"LayerNorm.scale: rngs: expected nnx.Rngs"),
    "no stream of parameters": (
        lambda r: te_nnx.DenseGeneral(K, 4, rngs=nnx.Rngs(dropout=0)),
        "rngs: expected .*a stream 'params' or a default one, got the streams dropout",
    ),
    "rate of attention": (lambda r: te_nnx.DotProductAttention(D, H, attention_dropout=None), "a rate .*, got None"),
    "bias_init": (lambda r: te_nnx.DenseGeneral(K, 4, use_bias=True, bias_init=None, rngs=r), "an initialiser.*None"),
    "alpha": (
        lambda r: te_nnx.DenseGeneral(K, 4, enable_low_rank_adaptation=True, low_rank_adaptation_alpha="1", rngs=r),
        "low_rank_adaptation_alpha: expected a number or None, .*got '1'",
    ),
    "embedding": (
        lambda r: te_nnx.TransformerLayer(**LAYER, relative_embedding=te_nnx.RelativePositionBiases, rngs=r),
        "relative_embedding: expected a module, .*got <class",
    ),
    "inputs": (lambda r: te_nnx.TransformerLayer(**LAYER, rngs=r)(X[0]), r"inputs: expected \[B, S, 32\]"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_says_what_is_wrong(name):
    make, message = MISUSE[name]
    with pytest.raises(ValueError, match=message):
        make(nnx.Rngs(0, dropout=1))


def test_model_and_variables_swapped():
    with pytest.raises(TypeError, match="from_linen: expected an NNX module and then .*, got dict and DenseGeneral"):
        te_nnx.from_linen({"params": {}}, te_nnx.DenseGeneral(K, 4, rngs=nnx.Rngs(0)))


def test_variables_go_into_a_dictionary_of_modules_too():
    model, kernel = {"a": te_nnx.DenseGeneral(K, 4, use_bias=False, rngs=nnx.Rngs(0))}, jnp.ones((K, 4))
    te_nnx.from_linen(model, {"params": {"a": {"kernel": kernel}}})
    np.testing.assert_array_equal(te_nnx.to_linen(model)["params"]["a"]["kernel"], kernel)


def test_a_layer_takes_what_arrays_are_made_of():
    layer = te_nnx.TransformerLayer(**LAYER, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(np.asarray(X).tolist()), layer(X))


def test_modules_check_their_fields_without_a_call_of_their_own():
    @module
    class Mine(Fp8Module):
        dtype: Any = jnp.float32
        sizes: Any = ()

    class Derived(Mine):
        def __post_init__(self, **fields):
            super().__post_init__(**fields)

    assert Mine(sizes=[1, 2]).sizes == Derived(sizes=[1, 2]).sizes == (1, 2)
    with pytest.raises(ValueError, match="dtype: expected"):
        Mine(dtype=jnp.int32)


def test_states_of_vmapped_gradients_are_refused():
    model = te_nnx.DenseGeneral(K, 8, rngs=nnx.Rngs(0))
    te_nnx.init_fp8_state(model)
    of_trained = nnx.grad(lambda model, x: jnp.sum(model(x)), argnums=nnx.DiffState(0, te_nnx.TRAINED))
    with te.autocast(True, recipe.DelayedScaling()):
        grads = nnx.vmap(of_trained, in_axes=(None, 0))(model, X)
    with pytest.raises(ValueError, match=r"expected one with the leading axes \[\] of the model's, got \[4\]; a vmap"):
        te_nnx.update_state(model, grads)


def test_gradients_that_are_not_the_models_are_refused():
    model = te_nnx.DenseGeneral(K, 8, rngs=nnx.Rngs(0))
    with te.autocast(True):
        both = nnx.value_and_grad(lambda m: jnp.sum(m(X)), argnums=nnx.DiffState(0, te_nnx.TRAINED))(model)
    with pytest.raises(ValueError, match=r"expected those of the model, got \['1.gemm_state'\] .* a tuple of 2"):
        te_nnx.update_state(model, both)
    with pytest.raises(ValueError, match=r"got \['gemm_state'\] that it has not"):
        te_nnx.update_state(te_nnx.LayerNormMLP(K, rngs=nnx.Rngs(0)), both[1])


def test_states_are_made_for_recipes_alone():
    with pytest.raises(TypeError, match="init_fp8_state: recipe: expected an instance of a recipe .*, got <class"):
        te_nnx.init_fp8_state(te_nnx.DenseGeneral(K, 8, rngs=nnx.Rngs(0)), recipe.DelayedScaling)
