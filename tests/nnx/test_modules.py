"""Every NNX module equals its Linen twin, bit for bit: values, gradients, next FP8 state; options and dropout."""

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
import twins
from flax import nnx
from steps import CURRENT, DELAYED

import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import testing

B, S, K, H, D = 4, 16, 32, 4, 8
X, Y = (jnp.asarray(a) for a in emulated.normal(5, (B, S, K), (B, 8, 24)))
Q, KEY, VALUE = (jnp.asarray(a) for a in emulated.normal(6, (B, S, H, D), (B, S, 2, D), (B, S, 2, D)))
LORA = dict(enable_low_rank_adaptation=True, low_rank_adaptation_dim=4, low_rank_adaptation_alpha=8.0)
RECIPES = pytest.mark.parametrize("rec", [None, DELAYED, CURRENT], ids=["off", "delayed", "current"])

# name -> (class, sizes of the NNX module, fields of both, fields of Linen's, arguments)
CASES = {
    "layernorm": ("LayerNorm", (K,), dict(zero_centered_gamma=True), {}, (X,)),
    "rmsnorm": ("RMSNorm", (K,), {}, {}, (X,)),
    "dense": ("DenseGeneral", (K, 48), {}, dict(features=48), (X,)),
    "dense bf16": ("DenseGeneral", (K, 48), dict(dtype=jnp.bfloat16, param_dtype=jnp.float32), dict(features=48), (X,)),
    "no norm, axis": (
        "LayerNormDenseGeneral",
        (B, 4),
        dict(axis=0, enable_layernorm=False, return_layernorm_output=True),
        dict(features=4),
        (X,),
    ),
    "dense axes": ("DenseGeneral", ((S, K), (3, 16)), dict(axis=[1, 2], **LORA), dict(features=(3, 16)), (X,)),
    "dense bias apart": ("DenseGeneral", (K, 48), dict(return_bias=True), dict(features=48), (X,)),
    "dense split": (
        "DenseGeneral",
        (K, (3, 16)),
        dict(parameters_split=("query", "key", "value")),
        dict(features=(3, 16)),
        (X,),
    ),
    "layernorm dense split": (
        "LayerNormDenseGeneral",
        (K, 48),
        dict(parameters_split={"query": 32, "kv": 16}, use_bias=True),
        dict(features=48),
        (X,),
    ),
    "layernorm dense": ("LayerNormDenseGeneral", (K, 48), dict(use_bias=True), dict(features=48), (X,)),
    "layernorm dense, all": (
        "LayerNormDenseGeneral",
        (K, (3, 16)),
        dict(
            return_layernorm_output=True,
            layernorm_type="rmsnorm",
            depth_scaling=2.0,
            return_bias=True,
            use_bias=True,
            **LORA,
        ),
        dict(features=(3, 16)),
        (X,),
    ),
    "no layernorm": (
        "LayerNormDenseGeneral",
        (K, 48),
        dict(enable_layernorm=False, return_layernorm_output=True),
        dict(features=48),
        (X,),
    ),
    "mlp": ("LayerNormMLP", (K,), dict(intermediate_dim=48, use_bias=True), {}, (X,)),
    "mlp, swiglu": (
        "LayerNormMLP",
        (K,),
        dict(intermediate_dim=48, activations=["silu", "linear"], layernorm_type="rmsnorm"),
        {},
        (X,),
    ),
    "mlp, clamped": (
        "LayerNormMLP",
        (K,),
        dict(
            intermediate_dim=48,
            activations=("clamped_silu", "clamped_linear"),
            activation_params={"limit": 1.0, "alpha": 1.5},
        ),
        {},
        (X,),
    ),
    "mlp, callable": ("LayerNormMLP", (K,), dict(intermediate_dim=48, activations=(jnp.tanh,)), {}, (X,)),
    "mlp by stages": (
        "LayerNormMLP",
        (K,),
        dict(intermediate_dim=48, use_bias=True, return_bias=True, return_layernorm_output=True, **LORA),
        {},
        (X,),
    ),
    "attention": ("DotProductAttention", (D, H), dict(num_gqa_groups=2), {}, (Q, KEY, VALUE)),
    "attention, learnable": ("DotProductAttention", (D, H), dict(softmax_type="learnable"), {}, (Q, Q, Q)),
    "mha": ("MultiHeadAttention", (K, D, H), dict(use_bias=True, return_layernorm_output=True), {}, (X,)),
    "mha unfused, rope": (
        "MultiHeadAttention",
        (K, D, H),
        dict(fuse_qkv_params=False, num_gqa_groups=2, enable_rotary_pos_emb=True, layernorm_type="rmsnorm"),
        {},
        (X,),
    ),
    "mha, gqa, lora": (
        "MultiHeadAttention",
        (K, D, H),
        dict(num_gqa_groups=2, low_rank_adaptation_scope="all", low_rank_adaptation_dim=4, scale_attn_logits=True),
        {},
        (X,),
    ),
    "mha, norms of queries and keys": (
        "MultiHeadAttention",
        (K, D, H),
        dict(
            qk_norm_type="layernorm",
            qk_norm_before_rope=True,
            enable_rotary_pos_emb=True,
            scale_attn_logits=True,
            zero_centered_gamma=True,
            checkpoint_core_attention=True,
        ),
        {},
        (X,),
    ),
    "layer": ("TransformerLayer", (), dict(use_bias=True), {}, (X,)),
    "parallel layer": (
        "TransformerLayer",
        (),
        dict(
            parallel_attention_mlp=True,
            kv_channels=6,
            qk_norm_type="l2norm",
            scale_attn_logits=True,
            enable_relative_embedding=False,
        ),
        {},
        (X,),
    ),
    "decoder": (
        "TransformerLayer",
        (),
        dict(layer_type=te_nnx.TransformerLayerType.DECODER, encoded_size=24, use_bias=True, num_gqa_groups=2),
        {},
        (X, Y),
    ),
    "post-norm layer": (
        "TransformerLayer",
        (),
        dict(apply_residual_connection_post_layernorm=True, output_layernorm=True, enable_relative_embedding=False),
        {},
        (X,),
    ),
    "transposed layer": (
        "TransformerLayer",
        (),
        dict(
            transpose_batch_sequence=True,
            mlp_activations=("silu", "linear"),
            num_gqa_groups=2,
            enable_rotary_pos_emb=True,
            low_rank_adaptation_scope="exclude_mlp",
            low_rank_adaptation_dim=4,
        ),
        {},
        (X,),
    ),
}
LAYER = dict(hidden_size=K, mlp_hidden_size=48, num_attention_heads=H, hidden_dropout=0.0, attention_dropout=0.0)
DECODER = dict(**LAYER, layer_type=te_nnx.TransformerLayerType.DECODER)


def pair(name):
    """(the Linen module, the NNX module, arguments, functions that call them)."""
    cls, sizes, fields, linen_fields, args = CASES[name]
    fields = {**(LAYER if cls == "TransformerLayer" else {}), **fields}
    model = twins.make(getattr(te_nnx, cls), *sizes, **fields)
    named = {}
    if cls in ("DotProductAttention", "MultiHeadAttention"):
        named = dict(head_dim=D, num_attention_heads=H)
    fields.pop("encoded_size", None)
    return getattr(te_flax, cls)(**fields, **named, **linen_fields), model, args


# Modules without products know no recipe; the others are told to leave them to their own precision in a few cases.
OFF = ("layernorm", "rmsnorm", "attention", "attention, learnable", "dense", "mlp by stages", "layer")
RUNS = [(name, None) for name in OFF] + [
    (name, rec) for name in CASES if name not in OFF[:4] for rec in (DELAYED, CURRENT)
]


@pytest.mark.parametrize("name,rec", RUNS, ids=[f"{name}, {type(rec).__name__}" for name, rec in RUNS])
def test_equals_its_linen_twin(name, rec):
    linen, model, args = pair(name)
    variables = twins.twins(linen, model, *args)
    with steps.autocast(rec):
        out, (grads, *dargs) = steps.step(linen.apply, variables, *args)
        out_, (grads_, *dargs_) = twins.step(twins.call, model, *args)
    testing.assert_same_bytes(out_, out, "value")
    # The same products in another order of the passes around them: XLA may sum and fuse differently in f32.
    bound = 4 * testing.epsilon(jnp.bfloat16 if "bf16" in name else jnp.float32)
    testing.assert_close(dargs_, dargs, bound, "gradient of the inputs")
    testing.assert_close(twins.as_linen(grads_), grads, bound, "gradient")
    assert jax.tree.structure(te_nnx.to_linen(model)) == jax.tree.structure(variables)
    testing.assert_same_bytes(te_nnx.to_linen(model), variables, "converted back")


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_positions_equal_linens(bidirectional):
    model = te_nnx.RelativePositionBiases(8, 16, H, rngs=nnx.Rngs(0))
    linen = te_flax.RelativePositionBiases(8, 16, H)
    out, (grads,) = steps.step(lambda v: linen.apply(v, 5, 7, bidirectional), te_nnx.to_linen(model))
    out_, (grads_,) = twins.step(lambda m: m(5, 7, bidirectional), model)
    testing.assert_same_bytes((out_, twins.as_linen(grads_)), (out, grads))


@pytest.mark.parametrize("fields", [dict(), dict(fuse_qkv_params=False, num_gqa_groups=2)], ids=["fused", "unfused"])
@RECIPES
def test_cross_attention_equals_its_linen_twin(fields, rec):
    fields = dict(head_dim=D, num_attention_heads=H, attn_mask_type="padding", use_bias=True, **fields)
    mask = jnp.asarray(np.arange(8)[None, None, None, :] >= np.array([8, 3, 5, 1])[:, None, None, None])
    linen = te_flax.MultiHeadAttention(**fields)
    model = twins.make(te_nnx.MultiHeadAttention, K, in_kv_features=24, **fields)
    variables = steps.randomized(steps.init(linen, X, Y, mask, rec=DELAYED))
    te_nnx.from_linen(model, variables)
    with steps.autocast(rec):
        out, (grads, *dargs) = steps.step(lambda v, x, y: linen.apply(v, x, y, mask), variables, X, Y)
        out_, (grads_, *dargs_) = twins.step(lambda m, x, y: m(x, y, mask), model, X, Y)
    testing.assert_same_bytes(out_, out, "value")
    # The keys' bias shifts all logits of a query alike: its gradient is rounding, so the bound is on the whole tree.
    bound = 4 * testing.epsilon(jnp.float32)
    assert testing.relative_error((twins.as_linen(grads_), dargs_), (grads, dargs)) <= bound


def test_a_mask_type_of_a_call_may_be_spelled_as_that_of_a_field():
    fields = dict(enable_rotary_pos_emb=True, scale_attn_logits=True, attn_mask_type="padding_causal")
    model = twins.make(te_nnx.MultiHeadAttention, K, head_dim=D, num_attention_heads=H, **fields)
    ids, places = jnp.ones((B, S), jnp.int32), jnp.tile(jnp.arange(S) * 7 % S, (B, 1))
    sequences = te_flax.SequenceDescriptor.from_segment_ids_and_pos(ids, places)
    expected = model(X, sequence_descriptor=sequences)
    got = model(X, sequence_descriptor=sequences, attn_mask_type="PADDING_CAUSAL")
    testing.assert_same_bytes(got[0], expected[0])


def test_inputs_may_be_given_by_their_name():
    """That of NVIDIA's modules."""
    rngs = nnx.Rngs(0)
    for linen, module in (
        (te_flax.DenseGeneral(features=8), te_nnx.DenseGeneral(K, 8, rngs=rngs)),
        (te_flax.LayerNormDenseGeneral(features=8), te_nnx.LayerNormDenseGeneral(K, 8, rngs=rngs)),
        (te_flax.LayerNormMLP(intermediate_dim=8), te_nnx.LayerNormMLP(K, intermediate_dim=8, rngs=rngs)),
    ):
        variables = linen.init(jax.random.key(0), inputs=X)
        testing.assert_same_bytes(linen.apply(variables, inputs=X), linen.apply(variables, X))
        testing.assert_same_bytes(module(inputs=X), module(X))


def test_softmax_is_linens():
    kinds, mask = te_nnx.SoftmaxFusionType, jnp.asarray(np.random.default_rng(0).random((1, 1, S, S)) < 0.5)
    scores = jnp.asarray(emulated.normal(8, (2, H, S, S))[0])
    offset = jnp.arange(float(H))
    for kind, args in (
        (kinds.SCALED, (None, scores[:1])),
        (kinds.SCALED_MASKED, (mask, None, offset)),
        (kinds.SCALED_UPPER_TRIANG_MASKED, ()),
    ):
        fields = dict(
            scale_factor=0.5, softmax_fusion_type=kind, softmax_type="learnable" if len(args) > 2 else "vanilla"
        )
        expected = steps.step(lambda x, fields=fields, args=args: te_flax.Softmax(**fields).apply({}, x, *args), scores)
        got = steps.step(lambda x, fields=fields, args=args: te_nnx.Softmax(**fields)(x, *args), scores)
        testing.assert_same_bytes(got, expected)
    with pytest.raises(ValueError, match="mask: expected one with SCALED_MASKED"):
        te_nnx.Softmax(softmax_fusion_type=kinds.SCALED_MASKED)(scores)


ARGUMENTS = {
    "a mask and a bias": (
        dict(self_attn_mask_type="padding_causal"),
        dict(
            attention_mask=jnp.zeros((B, 1, 1, S), bool).at[0, ..., 9:].set(True),
            core_attention_bias=jnp.ones((1, H, S, S)),
        ),
    ),
    "packed, with angles": (
        dict(self_attn_mask_type="padding"),
        dict(
            sequence_descriptor=te_flax.SequenceDescriptor.from_seqlens(jnp.asarray([[3, 9], [16, 0], [1, 1], [0, 4]])),
            rotary_pos_emb=jnp.asarray(emulated.normal(9, (S, 3))[0]),
        ),
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_a_layer_are_linens(name):
    fields, call = ARGUMENTS[name]
    linen, model = te_flax.TransformerLayer(**LAYER, **fields), twins.make(te_nnx.TransformerLayer, **LAYER, **fields)
    variables = steps.randomized(steps.init(linen, X, rec=DELAYED, **call))
    te_nnx.from_linen(model, variables)
    expected = jax.jit(lambda v, x: linen.apply(v, x, **call))(variables, X)
    testing.assert_close(nnx.jit(lambda m, x: m(x, **call))(model, X), expected, 4 * testing.epsilon(jnp.float32))


@pytest.mark.parametrize("masked", [True, False])
def test_masks_of_a_decoder_are_linens(masked):
    fields = DECODER
    mask = jnp.zeros((B, 1, 1, 8), bool).at[0, ..., 3:].set(True) if masked else None
    linen, model = te_flax.TransformerLayer(**fields), twins.make(te_nnx.TransformerLayer, **fields, encoded_size=24)
    variables = steps.randomized(steps.init(linen, X, Y, rec=DELAYED))
    te_nnx.from_linen(model, variables)
    expected = jax.jit(lambda v: linen.apply(v, X, Y, None, mask))(variables)
    testing.assert_close(nnx.jit(lambda m: m(X, Y, None, mask))(model), expected, 4 * testing.epsilon(jnp.float32))


def test_what_is_given_in_short():
    """One activation by its name alone; a learnable softmax without a stream, for it starts at zero."""
    make = lambda activations: te_nnx.LayerNormMLP(16, intermediate_dim=8, activations=activations, rngs=nnx.Rngs(0))
    x = jnp.asarray(emulated.normal(2, (4, 16))[0])
    testing.assert_same_bytes(make("gelu")(x)[0], make(("gelu",))(x)[0])
    assert not te_nnx.DotProductAttention(8, 4, softmax_type="learnable").softmax_offset.get_value().any()


def test_a_descriptor_that_the_mask_type_ignores_moves_no_token():
    model = te_nnx.MultiHeadAttention(16, 8, 2, enable_rotary_pos_emb=True, rngs=nnx.Rngs(0))
    x, ones = jnp.asarray(emulated.normal(2, (2, 4, 16))[0]), jnp.ones((2, 4), int)
    spread = te_flax.SequenceDescriptor.from_segment_ids_and_pos(ones, 3 * jnp.cumsum(ones, axis=1))
    with pytest.warns(UserWarning, match="sequence_descriptor= is ignored"):
        got = model(x, sequence_descriptor=spread)[0]
    testing.assert_same_bytes(got, model(x)[0])


def test_graphs_are_hashable_whatever_their_fields():
    fields = dict(activations=["clamped_silu", "clamped_linear"], activation_params={"limit": 7.0})
    make = lambda: te_nnx.LayerNormMLP(16, intermediate_dim=8, **fields, rngs=nnx.Rngs(0))
    first, second = (nnx.split(make(), nnx.Variable)[0] for _ in range(2))
    assert hash(first) == hash(second) and first == second


def test_initial_variance_of_an_adaptation_is_one_over_what_is_contracted():
    adapted = dict(enable_low_rank_adaptation=True, low_rank_adaptation_dim=64)
    kernel = te_nnx.DenseGeneral(64, (3, 16), **adapted, rngs=nnx.Rngs(0)).lora_a_kernel.get_value()
    assert kernel.shape == (64, 3, 64) and 0.9 < float(jnp.var(kernel)) * 64 < 1.1


def test_relative_positions_only_where_they_are_enabled():
    biases = te_nnx.RelativePositionBiases(32, 128, 2, rngs=nnx.Rngs(1))
    fields = dict(hidden_size=16, mlp_hidden_size=8, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0)
    make = lambda **more: te_nnx.TransformerLayer(**fields, enable_relative_embedding=False, **more, rngs=nnx.Rngs(0))
    x = jnp.asarray(emulated.normal(2, (2, 4, 16))[0])
    testing.assert_same_bytes(make(relative_embedding=biases)(x), make()(x))


def test_initial_values_and_logical_axes_are_linens():
    # Large enough that an estimated standard deviation is within 3 %.
    fields = dict(hidden_size=64, mlp_hidden_size=256, num_attention_heads=8, use_bias=True)
    model = te_nnx.TransformerLayer(**fields, mlp_activations=("gelu", "linear"), rngs=nnx.Rngs(0, dropout=1))
    linen = te_flax.TransformerLayer(**fields, mlp_activations=("gelu", "linear"))
    boxed = linen.init(jax.random.key(0), jnp.ones((1, 4, 64)), deterministic=True)
    expected = steps.layout(boxed)
    found = nnx.to_flat_state(nnx.state(model, nnx.Param))
    assert {"/".join(p): (v.shape, str(v.dtype), v.get_metadata("out_sharding", None)) for p, v in found} == expected
    params = nn.unbox(boxed)["params"]
    for path, variable in found:
        value = params
        for part in path:
            value = value[part]
        a, b = np.asarray(variable.get_value()), np.asarray(value)
        if "kernel" in path[-1]:
            parts = zip(np.moveaxis(a, 1, 0), np.moveaxis(b, 1, 0)) if path[-2] == "qkv" else [(a, b)]
            assert all(0.94 < x.std() / y.std() < 1.06 for x, y in parts), path
        elif path[-1] != "rel_embedding":
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_nnx_can_tabulate(name):
    """Which compiles each of a module's functions."""
    model, args = pair(name)[1:]
    with steps.autocast(DELAYED):
        assert CASES[name][0] in nnx.tabulate(model, *args, console_kwargs={"width": 200})
