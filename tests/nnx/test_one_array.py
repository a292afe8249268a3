"""NNX's attention leaves queries, keys and values in one array where Linen's does."""

import emulated
import jax
import jax.numpy as jnp
import pytest
import steps
import twins
from hopper import choose_as_on_hopper_or_be_there
from steps import DELAYED

import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import flax as te_flax
from transformer_engine_jax import testing

K, H, D = 64, 4, 16
X = jnp.asarray(*emulated.normal(12, (2, 32, K)), jnp.bfloat16)


@pytest.mark.parametrize("rec", [None, DELAYED], ids=["bf16", "delayed"])
def test_is_the_linen_twin(rec, monkeypatch):
    choose_as_on_hopper_or_be_there(monkeypatch)
    fields = dict(use_bias=True, attn_mask_type="causal", enable_rotary_pos_emb=True)
    linen = te_flax.MultiHeadAttention(D, H, **fields)
    model = twins.make(te_nnx.MultiHeadAttention, K, head_dim=D, num_attention_heads=H, **fields)
    variables = twins.twins(linen, model, X)
    with steps.autocast(rec):
        assert "attention_qkv_fwd" in str(jax.make_jaxpr(lambda x: model(x))(X))
        expected = steps.step(linen.apply, variables, X)
        out, (grads, dx) = twins.step(twins.call, model, X)
    bound = 2e-2 if jax.default_backend() == "gpu" else 1e-6
    testing.assert_close((out, (twins.as_linen(grads), dx)), expected, bound)
