"""TransformerLayer: against attention, MLP and residuals written out, with every option that exists; shards; misuse."""

from functools import partial

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from emulated import F32
from jax.sharding import PartitionSpec as P
from plain import plain_layer
from steps import CURRENT, DELAYED

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import testing
from transformer_engine_jax.flax import (
    STATE_COLLECTION,
    RelativePositionBiases,
    SequenceDescriptor,
    TransformerLayer,
    TransformerLayerType,
)

B, S, HIDDEN, HEADS, INNER = 4, 16, 64, 4, 96
(X,) = (jnp.asarray(a) for a in emulated.normal(3, (B, S, HIDDEN)))
PADDING = jnp.asarray(np.arange(S)[None, None, None, :] >= np.array([S, 10, 5, S])[:, None, None, None])
LENGTHS = SequenceDescriptor.from_seqlens(jnp.asarray([S, 10, 5, S]))
CORE_BIAS = jnp.asarray(emulated.normal(4, (1, HEADS, S, S))[0])
DECODER = dict(layer_type=TransformerLayerType.DECODER)

Layer = partial(
    TransformerLayer,
    hidden_size=HIDDEN,
    mlp_hidden_size=INNER,
    num_attention_heads=HEADS,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


CASES = {
    "default": ({}, {}, dict(causal=True)),
    "llama": (
        dict(layernorm_type="rmsnorm", mlp_activations=("silu", "linear"), num_gqa_groups=2, enable_rotary_pos_emb=True,
             enable_relative_embedding=False, scale_attn_logits=True, rotary_pos_emb_group_method="alternate"),
        {}, dict(causal=True, relpos=False, activations=("silu", "linear"), groups=2, rope="alternate", scale=0.25),
    ),
    "zero-centred with biases": (
        dict(layernorm_type="rmsnorm", zero_centered_gamma=True, use_bias=True, enable_rotary_pos_emb=True,
             fuse_qkv_params=False),
        {}, dict(causal=True, zero_centered=True, rope="consecutive"),
    ),
    "residuals from the norms": (
        dict(apply_residual_connection_post_layernorm=True, use_bias=True, zero_centered_gamma=True),
        {}, dict(causal=True, post_residual=True, zero_centered=True),
    ),
    "output norm": (dict(output_layernorm=True, window_size=(5, 0)), {}, dict(causal=True, window=(5, 0))),
    "post-norm": (
        dict(output_layernorm=True, apply_residual_connection_post_layernorm=True, use_bias=True),
        {}, dict(causal=True, post_residual=True),
    ),
    "padding": (dict(self_attn_mask_type="padding"), dict(attention_mask=PADDING), dict(mask=PADDING)),
    "causal padding, no biases": (
        dict(self_attn_mask_type="padding_causal", enable_relative_embedding=False),
        dict(attention_mask=PADDING), dict(mask=PADDING, causal=True, relpos=False),
    ),
    "GPT-J's blocks": (
        dict(parallel_attention_mlp=True, use_bias=True, enable_rotary_pos_emb=True, output_layernorm=False),
        {}, dict(causal=True, parallel=True, rope="consecutive"),
    ),
    "kv_channels": (
        dict(kv_channels=8, num_attention_heads=6, num_gqa_groups=2, enable_relative_embedding=False),
        {}, dict(causal=True, heads=6, groups=2, relpos=False),
    ),
    "core attention bias": (
        dict(checkpoint_core_attention=True), dict(core_attention_bias=CORE_BIAS),
        dict(causal=True, core_bias=CORE_BIAS),
    ),
    "core attention bias alone, scaled": (
        dict(enable_relative_embedding=False, self_attn_bias_type="pre_scale_bias", scale_attn_logits=True),
        dict(core_attention_bias=CORE_BIAS), dict(causal=True, relpos=False, core_bias=CORE_BIAS / 4, scale=0.25),
    ),
    "no mask": (dict(self_attn_mask_type="no_mask", num_gqa_groups=1), {}, dict(groups=1)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_is_its_stages(case):
    fields, call, options = CASES[case]
    layer = Layer(**fields)
    variables = steps.randomized(steps.init(layer, X, **call))
    got = steps.step(partial(layer.apply, **call), variables, X)
    expected = steps.step(partial(plain_layer, **options), variables, X)
    # One key's bias shifts all logits of a query alike: its exact gradient is 0, and what is computed is rounding.
    for grads in (got[1][0]["params"], expected[1][0]["params"]):
        attention = grads["attention"]
        if "key" in attention and "bias" in attention["key"] and not fields.get("enable_rotary_pos_emb"):
            attention["key"].pop("bias")
        if "qkv" in attention and "bias" in attention["qkv"]:
            attention["qkv"]["bias"] = attention["qkv"]["bias"][::2]
    testing.assert_close(got, expected, 5 * F32)


@pytest.mark.parametrize("rec", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_fp8_is_near(rec):
    layer = Layer(layernorm_type="rmsnorm", mlp_activations=("silu", "linear"))
    variables = steps.randomized(steps.init(layer, X, rec=DELAYED))
    exact, (expected, dx_) = steps.step(layer.apply, variables, X)
    with steps.autocast(rec):
        if rec.stateful:
            variables = steps.settle(layer.apply, variables, X, steps=4)
        y, (grads, dx) = steps.step(layer.apply, variables, X)
    # Each of up to eight products in a row has two E4M3 factors, or an E5M2 one in the backward; see
    # emulated.fp8_bound: sqrt(8) * 0.051 for values in the branches, sqrt(4) * (0.051^2 + 0.081^2)^0.5 for gradients.
    testing.assert_close(y, exact, 0.1, "y")
    testing.assert_close((grads["params"], dx), (expected["params"], dx_), 0.2, "gradient")


def test_transposed_inputs_are_the_same():
    fields = dict(
        enable_rotary_pos_emb=True, use_bias=True, output_layernorm=True, self_attn_mask_type="padding_causal"
    )
    variables = steps.randomized(steps.init(Layer(**fields), X, attention_mask=PADDING))
    turned = lambda v, x: jnp.swapaxes(
        Layer(transpose_batch_sequence=True, **fields).apply(v, jnp.swapaxes(x, 0, 1), attention_mask=PADDING), 0, 1
    )
    straight = partial(Layer(**fields).apply, attention_mask=PADDING)
    got, expected = (steps.step(f, variables, X) for f in (turned, straight))
    key_bias = [g[1][0]["params"]["attention"]["qkv"].pop("bias") for g in (got, expected)]
    testing.assert_close(key_bias[0][::2], key_bias[1][::2], 5 * F32)
    testing.assert_close(got, expected, 5 * F32)


def test_a_shared_relative_embedding_is_used():
    shared = RelativePositionBiases(num_buckets=8, max_distance=16, num_attention_heads=HEADS, name="mine")
    layer = Layer(relative_embedding=shared)
    variables = steps.init(layer, X)
    assert "relpos_bias" not in variables["params"]
    embedding = jax.tree.leaves(jax.tree_util.tree_map_with_path(
        lambda path, p: p if "rel_embedding" in str(path) else None, variables["params"]))  # fmt: skip
    assert [e.shape for e in embedding] == [(HEADS, 8)]


# --- Dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["hidden_dropout", "attention_dropout", "intermediate_dropout", "drop_path"])
def test_dropout_is_seeded_and_off_when_deterministic(field):
    layer = Layer(**{field: 0.5, "dropout_rng_name": "mine"})
    variables = steps.init(layer, X, deterministic=True)
    run = jax.jit(lambda key: layer.apply(variables, X, rngs={"mine": key}))
    one, again, other = run(jax.random.key(0)), run(jax.random.key(0)), run(jax.random.key(1))
    testing.assert_same_bytes(one, again)
    assert testing.relative_error(one, other) > 0.05
    without = jax.jit(Layer().apply)(variables, X)
    assert testing.relative_error(one, without) > 0.05
    testing.assert_close(jax.jit(partial(layer.apply, deterministic=True))(variables, X), without, F32)


@pytest.mark.parametrize("transposed", [False, True])
def test_drop_path_drops_whole_samples_of_a_branch(transposed):
    x = jnp.tile(X, (8, 1, 1))
    variables = steps.init(Layer(), x)
    # With the attention's output switched off, the layer is x + branch(x) with the branch of the MLP.
    variables["params"]["attention"]["out"]["kernel"] *= 0
    branch = jax.jit(Layer().apply)(variables, x) - x
    turn = (lambda t: jnp.swapaxes(t, 0, 1)) if transposed else (lambda t: t)
    layer = Layer(drop_path=0.25, transpose_batch_sequence=transposed)
    out = jax.jit(lambda x: turn(layer.apply(variables, turn(x), rngs={"dropout": jax.random.key(1)})))(x)
    ratio = np.asarray(jnp.sum((out - x) * branch, (1, 2)) / jnp.sum(branch**2, (1, 2)))
    np.testing.assert_allclose(ratio, np.where(ratio > 0.5, 1 / 0.75, 0.0), atol=1e-5)
    assert 1 <= (ratio < 0.5).sum() <= 16
    testing.assert_close(out - x, branch * ratio[:, None, None], 1e-5)


def test_hidden_dropout_shares_its_pattern_over_given_axes():
    variables = steps.init(Layer(), X)
    variables["params"]["attention"]["out"]["kernel"] *= 0
    for dims in ((), (1,)):
        layer = Layer(hidden_dropout=0.5, hidden_dropout_dims=dims)
        out = jax.jit(lambda x, layer=layer: layer.apply(variables, x, rngs={"dropout": jax.random.key(0)}))(X)
        dropped = np.asarray(out == X)
        assert 0.4 < dropped.mean() < 0.6
        assert (dropped == dropped[:, :1]).all() == (dims == (1,))


# --- Parameters ------------------------------------------------------------------------------------------------------

NORM = {"scale": ((64,), "float32", ("embed",)), "ln_bias": ((64,), "float32", ("embed",))}


def of(module: str, entries: dict) -> dict:
    return {f"{module}/{name}": entry for name, entry in entries.items()}


def test_parameters():
    qkv = {"kernel": ((64, 3, 64), "float32", ("embed", "qkv", "heads"))}
    out = {"kernel": ((64, 64), "float32", ("heads", "embed"))}
    mlp = {
        "wi_kernel": ((64, 1, 96), "float32", ("embed", "act", "mlp")),
        "wo_kernel": ((96, 64), "float32", ("mlp", "embed")),
    }
    shapes = jax.eval_shape(partial(Layer().init, jax.random.key(0)), X)
    relpos = {"rel_embedding": ((4, 32), "float32", ("heads", "relpos_buckets"))}
    body = {**of("attention/qkv", {**NORM, **qkv}), **of("attention/out", out), **of("mlp", {**NORM, **mlp})}
    assert steps.layout(shapes) == {**body, **of("relpos_bias", relpos)}
    shapes = jax.eval_shape(
        partial(Layer(output_layernorm=True, enable_relative_embedding=False).init, jax.random.key(0)), X
    )
    moved = {k: v for k, v in body.items() if not k.startswith("attention/qkv/") or k == "attention/qkv/kernel"}
    assert steps.layout(shapes) == {**moved, **of("output_layernorm", NORM)}


def test_four_products_have_a_state_each():
    with steps.autocast(DELAYED):
        shapes = jax.eval_shape(partial(Layer().init, jax.random.key(0)), X)
    attention, mlp = (shapes[STATE_COLLECTION][name] for name in ("attention", "mlp"))
    assert {name: set(states) for name, states in attention.items()} == {"qkv": {"gemm_state"}, "out": {"gemm_state"}}
    assert set(mlp) == {"gemm_1_state", "gemm_2_state"}
    leaves = jax.tree.leaves(shapes[STATE_COLLECTION])
    assert [leaf.shape for leaf in leaves] == 4 * [(3, 2 + DELAYED.amax_history_len)]


def test_a_state_that_goes_unused_costs_one_pass():
    layer, high = Layer(), te.recipe.DelayedScaling(fp8_gemms=lambda m, k, n: False)
    variables = steps.init(layer, X, rec=high)
    with steps.autocast(high):
        text = jax.jit(jax.grad(lambda v: jnp.sum(layer.apply(v, X)[0]))).lower(variables).compile().as_text()
    made = [line for line in text[text.index("\nENTRY") :].splitlines() if "f32[3,18]{1,0} " in line]
    assert [sum(op in line for line in made) for op in (" parameter(", " fusion(")] == [4, 4] and len(made) == 8


@pytest.mark.parametrize(
    "scope, adapted",
    [
        ("none", set()), ("all", {"qkv", "out", "mlp"}), ("qkv_proj", {"qkv"}), ("output_proj", {"out"}),
        ("mlp", {"mlp"}), ("exclude_qkv_proj", {"out", "mlp"}), ("exclude_output_proj", {"qkv", "mlp"}),
        ("exclude_mlp", {"qkv", "out"}),
    ],
)  # fmt: skip
def test_low_rank_adaptation_scopes(scope, adapted):
    shapes = jax.eval_shape(partial(Layer(low_rank_adaptation_scope=scope).init, jax.random.key(0)), X)
    modules = {**shapes["params"]["attention"], "mlp": shapes["params"]["mlp"]}
    assert {name for name, p in modules.items() if any("lora" in n for n in p)} == adapted


# --- Shards ----------------------------------------------------------------------------------------------------------

RESOURCES = {
    "dp and tp": te.MeshResource(dp_resource="data", tp_resource="model"),
    "fsdp and tp": te.MeshResource(fsdp_resource="data", tp_resource="model"),
}


@pytest.mark.parametrize(
    "resource, explicit, rec, dtype",
    [
        ("dp and tp", False, DELAYED, jnp.float32),
        ("dp and tp", True, DELAYED, jnp.bfloat16),
        ("fsdp and tp", False, DELAYED, jnp.bfloat16),
        ("fsdp and tp", True, DELAYED, jnp.float32),
        ("fsdp and tp", True, None, jnp.float32),
    ],
)
def test_sharded_is_unsharded(resource, explicit, rec, dtype):
    layer = Layer(use_bias=True, mlp_activations=("silu", "linear"), enable_rotary_pos_emb=True, dtype=dtype)
    resource = RESOURCES[resource]
    boxed = steps.init(layer, X, rec=DELAYED, unbox=False)
    variables = steps.randomized(nn.unbox(boxed))
    boxed = {**boxed, "params": nn.meta.replace_boxed(boxed["params"], variables["params"])}
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    with jax.default_device(mesh.devices.flat[0]), steps.autocast(rec):
        expected = jax.device_get(steps.step(layer.apply, variables, X))
    with testing.on_mesh(mesh), steps.autocast(rec, mesh_resource=resource):
        placed = steps.place(mesh, boxed, resource)
        got = jax.device_get(steps.step(layer.apply, placed, testing.shard(mesh, X, P("data"))))
    # In FP8, sums in another order flip a code here and there, seen in gradients of little else.
    testing.assert_close(got, expected, 0.02 if rec else 5 * F32)
    got, expected = (g[1][0][STATE_COLLECTION] for g in (got, expected))
    if rec:  # of what no product comes before
        for state in (got, expected):
            qkv, first, second = (
                state["attention"]["qkv"]["gemm_state"], state["mlp"]["gemm_1_state"], state["mlp"]["gemm_2_state"]
            )  # fmt: skip
            state["same"] = [qkv.x, qkv.kernel, first.kernel, second.kernel, second.grad]
        testing.assert_same_bytes(got["same"], expected["same"])


@pytest.mark.parametrize(
    "explicit, rec, transposed, of_batch",
    [
        (False, None, False, "dp"),
        (False, DELAYED, True, "dp"),
        (True, None, True, "dp"),
        (True, CURRENT, False, "dp"),
        (False, DELAYED, False, "fsdp"),
        (True, DELAYED, True, "fsdp"),
    ],
)
def test_sequence_parallel_is_unsharded_and_sharded_as_asked(explicit, rec, transposed, of_batch):
    fields = dict(use_bias=True, enable_rotary_pos_emb=True, transpose_batch_sequence=transposed)
    turn = (lambda t: jnp.swapaxes(t, 0, 1)) if transposed else (lambda t: t)
    layer = Layer(enable_sequence_parallel=True, **fields)
    x = turn(X)
    boxed = steps.init(layer, x, rec=DELAYED, unbox=False)
    variables = steps.randomized(nn.unbox(boxed))
    boxed = {**boxed, "params": nn.meta.replace_boxed(boxed["params"], variables["params"])}
    with steps.autocast(rec):
        expected = jax.device_get(steps.step(Layer(**fields).apply, variables, x))
    resource = te.MeshResource(**{f"{of_batch}_resource": "data"}, tpsp_resource="model")
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    with testing.on_mesh(mesh), steps.autocast(rec, mesh_resource=resource):
        placed = steps.place(mesh, boxed, resource)
        given = testing.shard(mesh, x, P(None, "data") if transposed else P("data"))
        out, grads = steps.step(layer.apply, placed, given)
        assert out.sharding.spec[:2] == (("model", "data") if transposed else ("data", "model"))
    testing.assert_close(jax.device_get((out, grads)), expected, 0.02 if rec else 5 * F32)


# --- Misuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, call, message",
    [
        ({"layer_type": "decoder"}, {}, "layer_type: expected one of .*got 'decoder'"),
        ({}, {"encoded": X}, "encoded: expected None, for layer_type=ENCODER has no cross-attention"),
        ({}, {"encoder_decoder_mask": PADDING}, "encoder_decoder_mask: expected None, for layer_type=ENCODER"),
        (DECODER, {}, "encoded: expected the encoder's output, .* got None"),
        (DECODER, {"encoded": X[0]}, "encoded: expected the encoder's output, .* got .16, 64."),
        (DECODER, {"encoded": X[:1]}, "encoded: expected the encoder's output, of inputs' batch"),
        (DECODER, {"encoded": X, "encoder_decoder_mask": PADDING[..., 1:]}, "mask: expected a shape that broadcasts"),
        ({"parallel_attention_mlp": True, **DECODER}, {}, "parallel_attention_mlp: expected False with layer_type"),
        (
            {"parallel_attention_mlp": True, "apply_residual_connection_post_layernorm": True},
            {},
            "parallel_attention_mlp: expected False with apply_residual",
        ),
        ({}, {"max_decode_length": 8}, "max_decode_length: expected 16, .* got 8"),
        ({"kv_channels": 15, "enable_rotary_pos_emb": True}, {}, "head_dim: expected an even size for RoPE"),
        ({"self_attn_mask_type": "padding"}, {"attention_mask": PADDING[0]}, "mask: expected a shape that broadcasts"),
        (
            {"self_attn_mask_type": "padding"},
            {"attention_mask": PADDING, "sequence_descriptor": LENGTHS},
            "got both mask and sequence_descriptor",
        ),
        ({}, {"core_attention_bias": CORE_BIAS[:, :3]}, "core_attention_bias: expected a shape that broadcasts"),
        ({"hidden_size": 32}, {}, r"inputs: expected \[B, S, 32\], got \[4, 16, 64\]"),
        ({"num_attention_heads": 0}, {}, "num_attention_heads: expected a positive integer, got 0"),
        ({"kv_channels": 0}, {}, "kv_channels: expected a positive integer, got 0"),
        ({"mlp_hidden_size": 8.0}, {}, "mlp_hidden_size: expected a positive integer, got 8.0"),
        ({"num_gqa_groups": 0}, {}, "num_gqa_groups: expected a positive integer, got 0"),
        ({"intermediate_dropout_dims": (9,)}, {}, r"intermediate_dropout_dims: expected axes of 3, got \(9,\)"),
        ({"hidden_dropout_dims": 1}, {}, "hidden_dropout_dims: expected axes of 3, got 1"),
        ({"rotary_pos_emb_group_method": "pairs"}, {}, "rotary_pos_emb_group_method: expected one of .*got 'pairs'"),
        ({"layernorm_epsilon": -1}, {}, "layernorm_epsilon: expected 0 or more, got -1"),
        ({"qk_norm_type": "l2norm", "qk_norm_epsilon": -1}, {}, "qk_norm_epsilon: expected 0 or more, got -1"),
        ({"hidden_dropout": 1.5}, {}, r"hidden_dropout: expected a rate in \[0, 1\), got 1.5"),
        ({"drop_path": -0.1}, {}, r"drop_path: expected a rate in \[0, 1\), got -0.1"),
        ({"intermediate_dropout": 1}, {}, r"intermediate_dropout: expected a rate in \[0, 1\), got 1"),
        ({"hidden_dropout_dims": (7,)}, {}, r"hidden_dropout_dims: expected axes of 3, got \(7,\)"),
        ({"hidden_dropout_dims": (-4,)}, {}, r"hidden_dropout_dims: expected axes of 3, got \(-4,\)"),
        ({"num_attention_heads": 5}, {}, "hidden_size=64 does not divide into 5 heads"),
        ({"num_gqa_groups": 3}, {}, "4 heads do not divide into 3 groups"),
        ({"layernorm_type": "batchnorm"}, {}, "layernorm_type: expected one of .*got 'batchnorm'"),
        ({"self_attn_mask_type": "padding"}, {}, "attn_mask_type='padding' needs .*mask="),
        ({"self_attn_mask_type": "upper"}, {}, "attn_mask_type: expected one of"),
        ({"mlp_activations": ("swiglu",)}, {}, "activations: expected some of .*got 'swiglu'"),
        ({"mlp_activation_params": {"limit": 7}}, {}, "params: expected none for"),
        ({"softmax_type": "sparse"}, {}, "softmax_type: expected one of .*got 'sparse'"),
        ({"low_rank_adaptation_scope": "some"}, {}, "low_rank_adaptation_scope: expected one of"),
    ],
)
def test_misuse_is_named(fields, call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: Layer(**fields).init(jax.random.key(0), X, **call))


def test_relative_positions_only_where_they_are_enabled():
    embedding = te_flax.RelativePositionBiases(32, 128, 4)
    fields = dict(hidden_size=32, mlp_hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0)
    for enabled in (True, False):
        layer = te_flax.TransformerLayer(**fields, relative_embedding=embedding, enable_relative_embedding=enabled)
        params = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((2, 8, 32)))["params"]
        assert ("relative_embedding" in params) is enabled


def test_masks_that_say_the_reverse_are_refused():
    layer, x = te_flax.TransformerLayer(hidden_size=32, mlp_hidden_size=64, num_attention_heads=4), jnp.ones((2, 8, 32))
    for mask, error, message in (
        (nn.make_causal_mask(x[..., 0]), ValueError, "expected bool, int8 or uint8, .* float32; Flax's masks"),
        (nn.make_causal_mask(x[..., 0], dtype=int), ValueError, "int32; .*Hugging Face's attention_mask .*mask == 0"),
        (te.SequenceDescriptor.from_seqlens(jnp.full((2,), 8)), TypeError, "mask: .* it is sequence_descriptor="),
    ):
        with pytest.raises(error, match=message):
            layer.init(jax.random.key(0), x, attention_mask=mask, deterministic=True)
