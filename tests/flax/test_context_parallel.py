"""Context parallelism of the modules: a layer whose sequence a mesh axis shards is the layer."""

from functools import partial

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import steps
from emulated import F32
from flax import nnx
from jax.sharding import PartitionSpec as P
from steps import DELAYED

import transformer_engine_jax as te
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import testing
from transformer_engine_jax.flax import MultiHeadAttention, TransformerLayer
from transformer_engine_jax.modules.transformer import check_fields

(X,) = (jnp.asarray(a) for a in emulated.normal(3, (4, 16, 64)))
FIELDS = dict(
    hidden_size=64,
    mlp_hidden_size=96,
    num_attention_heads=4,
    num_gqa_groups=2,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    enable_relative_embedding=False,
    enable_rotary_pos_emb=True,
    scale_attn_logits=True,
)
SEQUENCE = dict(enable_sequence_parallel=True)
RESOURCE = te.MeshResource(dp_resource="data", tp_resource="model", cp_resource="cp")
ORDER = partial(te.reorder_causal_load_balancing, cp_size=2)
BACK = partial(te.inverse_reorder_causal_load_balancing, cp_size=2)


@pytest.mark.parametrize(
    "strategy, balanced, rec, explicit, fields",
    [
        ("ALL_GATHER", False, None, False, {}),
        ("RING", True, None, False, {}),
        ("DEFAULT", True, DELAYED, True, {}),
        ("DEFAULT", False, DELAYED, True, SEQUENCE),
        ("DEFAULT", False, None, True, dict(SEQUENCE, apply_residual_connection_post_layernorm=True)),
    ],
)
def test_a_layer_with_its_sequence_sharded(strategy, balanced, rec, explicit, fields):
    layer = TransformerLayer(
        **FIELDS,
        **fields,
        context_parallel_axis="cp",
        context_parallel_strategy=strategy,
        context_parallel_causal_load_balanced=balanced,
    )
    whole = TransformerLayer(**FIELDS, **{name: x for name, x in fields.items() if name not in SEQUENCE})
    boxed = steps.init(whole, X, rec=DELAYED, unbox=False)
    variables = steps.randomized(nn.unbox(boxed))
    boxed = {**boxed, "params": nn.meta.replace_boxed(boxed["params"], variables["params"])}
    mesh = testing.mesh_of((2, 2, 2), ("data", "cp", "model"), explicit=explicit)
    with jax.default_device(mesh.devices.flat[0]), steps.autocast(rec):
        y, (grads, dx) = jax.device_get(steps.step(whole.apply, variables, X))
    # Tokens that were moved meet another part of the random cotangent: it is moved along.
    run = (lambda v, x: BACK(layer.apply(v, ORDER(x)))) if balanced else layer.apply
    with testing.on_mesh(mesh), steps.autocast(rec, mesh_resource=RESOURCE):
        placed = steps.place(mesh, boxed, RESOURCE)
        x = testing.shard(mesh, X, P("data") if balanced else P("data", "cp"))
        y_, (grads_, dx_) = jax.device_get(steps.step(run, placed, x))
    testing.assert_close((y_, grads_, dx_), (y, grads, dx), 0.02 if rec else 5 * F32)


def test_lengths_in_the_balanced_order():
    """Rotations too are by the place in the sequence, not by that in memory."""
    fields = dict(enable_rotary_pos_emb=True, attn_mask_type="padding_causal")
    whole = MultiHeadAttention(16, 4, **fields)
    layer = MultiHeadAttention(16, 4, **fields, context_parallel_axis="cp", context_parallel_causal_load_balanced=True)
    lengths = te.SequenceDescriptor.from_seqlens(jnp.array([5, 16, 9, 12]))
    variables = nn.unbox(whole.init(jax.random.key(0), X, sequence_descriptor=lengths))
    expected = jax.device_get(whole.apply(variables, X, sequence_descriptor=lengths)[0])
    with testing.on_mesh(testing.mesh_of((4, 2), ("data", "cp"))):
        got = jax.device_get(BACK(layer.apply(variables, ORDER(X), sequence_descriptor=lengths)[0]))
    testing.assert_close(got, expected, F32)


def test_nnx_is_linen():
    fields = dict(context_parallel_axis="cp", context_parallel_causal_load_balanced=True)
    linen = TransformerLayer(**FIELDS, **fields)
    variables = steps.init(TransformerLayer(**FIELDS), X)
    model = te_nnx.TransformerLayer(**FIELDS, **fields, rngs=nnx.Rngs(0))
    te_nnx.from_linen(model, variables)
    with testing.on_mesh(testing.mesh_of((4, 2), ("data", "cp"))):
        expected = jax.jit(linen.apply)(variables, X)
        got = nnx.jit(lambda model, x: model(x))(model, X)
    testing.assert_close(jax.device_get(got), jax.device_get(expected), F32)


def test_misuse():
    biases = TransformerLayer(
        **{**FIELDS, "enable_relative_embedding": True},
        context_parallel_axis="cp",
        context_parallel_causal_load_balanced=True,
    )
    with pytest.raises(ValueError, match="load_balanced: expected False with relative position biases"):
        biases.init(jax.random.key(0), X)
    check_fields(biases.clone(enable_relative_embedding=False, relative_embedding=biases))  # which is not used
    attention = MultiHeadAttention(16, 4, context_parallel_axis="cp", context_parallel_causal_load_balanced=True)
    with testing.on_mesh(testing.mesh_of((4, 2), ("data", "cp"))):
        with pytest.raises(ValueError, match="load_balanced: expected False in cross-attention"):
            attention.init(jax.random.key(0), X, X + 1)
        with pytest.raises(ValueError, match="context_parallel_axis: expected '' with a KV cache"):
            MultiHeadAttention(16, 4, context_parallel_axis="cp").init(jax.random.key(0), X, decode=True)
