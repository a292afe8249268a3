"""Dropout in NNX: what switches it on and off, its mean, and that the same streams draw the same."""

import emulated
import jax.numpy as jnp
import numpy as np
import pytest
import twins
from flax import nnx

import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import testing

B, S, K, H, D = 4, 16, 32, 4, 8
(X,) = (jnp.asarray(a) for a in emulated.normal(5, (B, S, K)))
LAYER = dict(hidden_size=K, mlp_hidden_size=48, num_attention_heads=H, hidden_dropout=0.0, attention_dropout=0.0)


def test_dropout_follows_train_eval_and_the_call():
    model = te_nnx.TransformerLayer(
        **LAYER | dict(hidden_dropout=0.5, attention_dropout=0.2), intermediate_dropout=0.3, drop_path=0.2,
        rngs=nnx.Rngs(0, dropout=1),
    )  # fmt: skip
    exact = model(X, deterministic=True)
    testing.assert_same_bytes(model(X, deterministic=True), exact)
    assert testing.relative_error(model(X), model(X)) > 0.1  # each call draws anew
    model.eval()
    testing.assert_same_bytes(model(X), exact)
    assert testing.relative_error(model(X, deterministic=False), exact) > 0.1
    model.train()
    assert testing.relative_error(model(X), exact) > 0.1
    testing.assert_same_bytes(nnx.view(model, deterministic=True)(X), exact)


@pytest.mark.parametrize("field", ["hidden_dropout", "attention_dropout", "intermediate_dropout", "drop_path"])
def test_dropout_has_the_right_mean_and_is_reproducible(field):
    fields = LAYER | {field: 0.25}
    model = te_nnx.TransformerLayer(**fields, rngs=nnx.Rngs(0, dropout=1))
    again = te_nnx.TransformerLayer(**fields, rngs=nnx.Rngs(0, dropout=1))
    run = nnx.jit(twins.call)
    testing.assert_same_bytes(run(model, X), run(again, X))

    @nnx.split_rngs(splits=400)
    @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), None), out_axes=0)
    def many(model, x):
        return model.attention(x, deterministic=False)[0] if field == "attention_dropout" else model(x)

    draws = nnx.jit(many)(model, X)
    draw, exact = draws[0], model(X, deterministic=True)
    if field == "attention_dropout":
        exact = model.attention(X, deterministic=True)[0]
        assert testing.relative_error(draw, exact) > 0.05
        # 400 draws of relative variance below p / (1 - p) = 1/3 on the weights; nothing after them is not linear.
        testing.assert_close(jnp.mean(draws, 0), exact, 0.06)
    elif field == "drop_path":
        moved = np.asarray(jnp.any(draws != X[None], axis=(2, 3)))  # both branches of a sample dropped: 1/16
        assert 0.02 < 1 - moved.mean() < 0.12
    else:
        assert 0.05 < testing.relative_error(draw, exact) < 0.8


def test_dropout_without_a_stream_says_what_to_do():
    with pytest.raises(ValueError, match="rngs: expected"):
        te_nnx.DotProductAttention(D, H, attention_dropout=0.1)
