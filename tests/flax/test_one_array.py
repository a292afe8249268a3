"""Self-attention whose queries, keys and values stay in the array that one product gives, as cuDNN reads them there."""

from functools import partial

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import steps
from hopper import choose_as_on_hopper, choose_as_on_hopper_or_be_there
from jax.sharding import PartitionSpec as P
from steps import CURRENT, DELAYED

import transformer_engine_jax as te
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.flax import DotProductAttention, MultiHeadAttention, TransformerLayer
from transformer_engine_jax.flax import attention as module_of_mha
from transformer_engine_jax.modules.attention import in_one_array, rotations

B, S, H, D = 2, 32, 4, 16
HIDDEN = H * D
X, QKV = (jnp.asarray(x, jnp.bfloat16) for x in emulated.normal(11, (B, S, HIDDEN), (B, S, 3, H, D)))
MHA = partial(MultiHeadAttention, head_dim=D, num_attention_heads=H, use_bias=True)
RECIPES = {"bf16": None, "delayed": DELAYED, "current": CURRENT}
# Attention's bf16 results, and what FP8 makes of their last bits.
BOUND = {"bf16": 2e-2, "delayed": 4e-2, "current": 4e-2}


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    choose_as_on_hopper_or_be_there(monkeypatch)


def kernels(f, *args) -> str:
    return str(jax.make_jaxpr(f)(*args))


def trained(module, rec, *args):
    with steps.autocast(rec):
        variables = steps.randomized(steps.init(module, *args, rec=rec))
        return steps.settle(module.apply, variables, *args) if rec is DELAYED else variables


FIELDS = [
    dict(),
    dict(input_layernorm=False),
    dict(return_layernorm_output=True),
    dict(enable_rotary_pos_emb=True),
    dict(enable_rotary_pos_emb=True, rotary_pos_emb_group_method="alternate"),
]


@pytest.mark.parametrize("rec", RECIPES)
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_is_attention_of_three_arrays(fields, rec, monkeypatch):
    module, bound, rec = MHA(**fields), BOUND[rec], RECIPES[rec]
    variables = trained(module, rec, X)
    with steps.autocast(rec):
        assert "attention_qkv_fwd" in kernels(lambda v: module.apply(v, X), variables)
        got = steps.step(lambda v, x: module.apply(v, x), variables, X)
        monkeypatch.setattr(module_of_mha, "in_one_array", lambda *args: False)
        assert "attention_qkv_fwd" not in kernels(lambda v: module.apply(v, X), variables)
        expected = steps.step(lambda v, x: module.apply(v, x, None), variables, X)
    testing.assert_close(got[0], expected[0], bound)
    testing.assert_close(got[1], expected[1], bound)


def test_a_layer_has_one_product_and_no_copies():
    """Of a layer's step under FP8: twelve products, where q, k and v of their own make it fourteen."""
    fields = dict(hidden_size=HIDDEN, mlp_hidden_size=2 * HIDDEN, num_attention_heads=H, hidden_dropout=0.0)
    layer = TransformerLayer(**fields, attention_dropout=0.1, enable_relative_embedding=False)
    with steps.autocast(CURRENT):
        variables = steps.init(layer, X, rec=CURRENT)
        run = lambda v: layer.apply(v, X, rngs={"dropout": jax.random.key(0)})
        text = kernels(lambda v: jax.vjp(run, v)[1](X), variables)
    expected = dict(attention_qkv_fwd=1, attention_qkv_bwd=1, gemm=12, quantize_stack=0)
    assert {kernel: text.count(f"<kernel {kernel}:") for kernel in expected} == expected


@pytest.mark.parametrize(
    "fields, call, rec",
    [
        (dict(), dict(rotary_pos_emb=(jnp.ones(4), jnp.ones(4))), None),
        (dict(), dict(rotary_pos_emb=jnp.ones((S, 4))), None),
        (dict(num_gqa_groups=2), {}, None),
        (dict(fuse_qkv_params=False), {}, None),
        (dict(qk_norm_type="l2norm"), {}, None),
        (dict(transpose_batch_sequence=True), {}, None),
        (dict(softmax_type="off_by_one"), {}, None),
        (dict(), dict(bias=jnp.zeros((1, 1, S, S))), None),
        (dict(context_parallel_axis="cp"), {}, None),
        (dict(), {}, recipe.Float8CurrentScaling(fp8_dpa=True)),
    ],
    ids=["rope of each", "rope tables", "gqa", "kernels", "qk_norm", "transposed", "softmax", "bias", "cp", "fp8_dpa"],
)
def test_what_is_done_to_parts_takes_them_apart(fields, call, rec):
    module = MHA(**fields)
    decide = in_one_array
    with steps.autocast(rec):
        core = module._core_attention(parent=None).options()
        turns = rotations(module, call.get("rotary_pos_emb"))
        assert not decide(module, core, X, turns, [call.get("bias")])
        assert decide(MHA(), core, X, (None, None), [None]) == (rec is None and not fields.get("softmax_type"))


def test_decoding_takes_them_apart(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91900)  # nothing is compiled: what would run is traced
    module = MHA()
    variables = jax.eval_shape(partial(module.init, decode=True), jax.random.key(0), X)
    run = lambda v: module.apply(v, X, decode=True, mutable=["cache"])
    assert "attention_qkv_fwd" not in kernels(run, variables)
    cache = jax.eval_shape(run, variables)[1]["cache"]
    assert {"cached_key", "cached_value"} < set(cache)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_layout_of_one_array_is_read_where_it_is(checkpointed):
    module = DotProductAttention(D, H, qkv_layout="bs3hd", checkpoint_core_attention=checkpointed)
    apart = DotProductAttention(D, H)
    assert "attention_qkv_fwd" in kernels(lambda x: module.apply({}, x), QKV)
    got = steps.step(lambda x: module.apply({}, x), QKV)
    expected = steps.step(lambda x: apart.apply({}, *(x[:, :, i] for i in range(3))), QKV)
    testing.assert_close(got, expected, BOUND["bf16"])


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("rec", [None, DELAYED], ids=["bf16", "delayed"])
@pytest.mark.parametrize(
    "resource",
    [
        te.MeshResource(dp_resource="data", tp_resource="model"),
        te.MeshResource(fsdp_resource="data"),
        te.MeshResource(dp_resource="data", tpsp_resource="model"),
    ],
    ids=["tensor", "fsdp", "sequence"],
)
def test_sharded_is_sharded_attention_of_three_arrays(resource, rec, explicit, monkeypatch):
    """Which is as far from unsharded: a layer's FP8 codes flip where bf16 sums over shards are rounded."""
    choose_as_on_hopper(monkeypatch)  # also for a mesh of CPUs
    fields = dict(hidden_size=HIDDEN, mlp_hidden_size=2 * HIDDEN, num_attention_heads=H, use_bias=True)
    layer = TransformerLayer(
        **fields, hidden_dropout=0.0, attention_dropout=0.0, enable_relative_embedding=False,
        enable_rotary_pos_emb=True, enable_sequence_parallel=resource.tpsp_resource is not None,
    )  # fmt: skip
    x = jnp.concatenate([X, 2 * X[::-1]])
    boxed = steps.init(layer, x, rec=DELAYED, unbox=False)
    variables = steps.randomized(nn.unbox(boxed))
    boxed = {**boxed, "params": nn.meta.replace_boxed(boxed["params"], variables["params"])}
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    with jax.default_device(mesh.devices.flat[0]), steps.autocast(rec):
        unsharded = jax.device_get(steps.step(layer.apply, variables, x))
    with testing.on_mesh(mesh), steps.autocast(rec, mesh_resource=resource):
        placed, x = steps.place(mesh, boxed, resource), testing.shard(mesh, x, P("data"))
        assert "attention_qkv_fwd" in kernels(layer.apply, placed, x)
        got = jax.device_get(steps.step(layer.apply, placed, x))
        monkeypatch.setattr(module_of_mha, "in_one_array", lambda *args: False)
        expected = jax.device_get(steps.step(lambda v, x: layer.apply(v, x), placed, x))
    testing.assert_close(got, expected, BOUND["bf16"] if mesh.devices.flat[0].platform == "gpu" else 1e-6)
    testing.assert_close(got, unsharded, 0.1 if rec else 2e-2)
