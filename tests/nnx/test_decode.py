"""KV-cache decoding with NNX: tokens and chunks equal the full forward pass, and the Linen modules' cache."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
import twins
from emulated import F32
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import testing

B, S, HIDDEN, HEADS, SOURCE = 2, 8, 16, 4, 6
X, ENCODED = (jnp.asarray(a) for a in emulated.normal(7, (B, S, HIDDEN), (B, SOURCE, HIDDEN)))
SOURCE_PADDING = jnp.asarray(np.arange(SOURCE)[None, None, None, :] >= np.array([SOURCE, 3])[:, None, None, None])
LAYER = dict(
    hidden_size=HIDDEN, mlp_hidden_size=24, num_attention_heads=HEADS, hidden_dropout=0.0, attention_dropout=0.0
)

CASES = {
    "GQA, RoPE, window, transposed": (
        dict(num_gqa_groups=2, enable_rotary_pos_emb=True, enable_relative_embedding=False, window_size=(3, 0),
             transpose_batch_sequence=True, qk_norm_type="rmsnorm"),
        {},
    ),
    "relative positions, cross-attention": (
        dict(layer_type=te_nnx.TransformerLayerType.DECODER, enable_rotary_pos_emb=True, use_bias=True),
        dict(encoded=ENCODED, encoder_decoder_mask=SOURCE_PADDING),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_chunks_and_tokens_equal_the_full_pass(case):
    fields, call = CASES[case]
    linen = te_flax.TransformerLayer(**LAYER, **fields)
    model = twins.make(te_nnx.TransformerLayer, **LAYER, **fields)
    time = 0 if linen.transpose_batch_sequence else 1
    x = jnp.swapaxes(X, 0, 1) if time == 0 else X
    variables = steps.randomized(steps.init(linen, x, rec=steps.DELAYED, decode=True, **call))
    cache = variables.pop("cache")
    te_nnx.from_linen(model, variables)
    expected = nnx.jit(lambda m: m(x, **call))(model)
    model.init_cache(x.shape, x.dtype)
    step = nnx.jit(lambda m, x: m(x, decode=True, **call))
    outs, at = [], 0
    for n in (3, *(1,) * (S - 3)):
        outs.append(step(model, jax.lax.slice_in_dim(x, at, at + n, axis=time)))
        at += n
    # As in flax/test_decode.py.
    testing.assert_close(jnp.concatenate(outs, axis=time), expected, 2 * emulated.F32)
    found = {tuple(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(nnx.state(model, nnx.Cache))}
    layout = lambda flat: {path: (a.shape, a.dtype) for path, a in flat.items()}
    assert layout(found) == layout({tuple(k.key for k in p): a for p, a in jax.tree.leaves_with_path(cache)})
    # The cache is no parameter, and beginning again is making it anew.
    assert jax.tree.structure(te_nnx.to_linen(model)) == jax.tree.structure(variables)
    model.init_cache(x.shape, x.dtype)
    testing.assert_same_bytes(step(model, jax.lax.slice_in_dim(x, 0, 3, axis=time)), outs[0])


def test_a_cache_has_the_dtype_asked_for_and_is_of_decoding_alone():
    model = twins.make(te_nnx.TransformerLayer, **LAYER, enable_rotary_pos_emb=True)
    expected = model(X[:, :5])
    model.init_cache(X.shape, jnp.bfloat16)
    assert model.attention.cached_key.dtype == model.attention.cached_value.dtype == jnp.bfloat16
    testing.assert_same_bytes(model(X[:, :5]), expected)
    nnx.pop(model, nnx.Cache)
    testing.assert_same_bytes(model(X[:, :5]), expected)
    with pytest.raises(ValueError, match="needs a KV cache; call init_cache"):
        model(X[:, :5], decode=True)


@pytest.mark.parametrize("explicit", [False, True])
def test_on_a_mesh_the_cache_is_sharded_as_the_keys_are(explicit):
    model = twins.make(te_nnx.TransformerLayer, **LAYER, enable_rotary_pos_emb=True)
    expected = nnx.jit(lambda m: m(X))(model)
    graph, state = nnx.split(model)
    mesh = testing.mesh_of((2, 2), ("data", "model"), explicit=explicit)
    resource = te.MeshResource(dp_resource="data", tp_resource="model")
    with testing.on_mesh(mesh), te.autocast(mesh_resource=resource):
        model = nnx.merge(graph, jax.device_put(jax.device_get(state), NamedSharding(mesh, P())))
        model.init_cache(X.shape, X.dtype)
        step = nnx.jit(lambda m, x: m(x, decode=True))
        outs = [step(model, X[:, at : at + n]) for at, n in ((0, 5), (5, 1), (6, 2))]
        assert model.attention.cached_key.get_value().sharding.spec[:3] == ("data", None, "model")
    testing.assert_close(np.concatenate(jax.device_get(outs), axis=1), expected, 2 * emulated.F32)


def test_a_call_that_was_refused_moves_nothing():
    layer = twins.make(te_nnx.TransformerLayer, **LAYER)
    expected = layer(X[:, :3])
    layer.init_cache(X.shape)
    with pytest.raises(ValueError, match="KV cache: key"):
        layer(X[:1, :3], decode=True)
    with pytest.raises(ValueError, match="longer|as long as the inputs it was made for"):
        layer(jnp.concatenate([X, X], axis=1), decode=True)
    testing.assert_close(layer(X[:, :3], decode=True), expected, F32)
