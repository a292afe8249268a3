"""KV-cache decoding: tokens one by one, and in chunks, equal the full forward pass; the cache's end; misuse."""

import re
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
from steps import CURRENT

import transformer_engine_jax as te
from transformer_engine_jax import decisions, testing
from transformer_engine_jax.flax import MultiHeadAttention, SequenceDescriptor, TransformerLayer, TransformerLayerType
from transformer_engine_jax.ops.attention import Attention
from transformer_engine_jax.ops.attention.decode import decode_attention

B, S, HIDDEN, HEADS, SOURCE = 2, 8, 16, 4, 6
X, ENCODED, BIAS = (jnp.asarray(a) for a in emulated.normal(7, (B, S, HIDDEN), (B, SOURCE, HIDDEN), (1, HEADS, S, S)))
# Row 1 begins with two tokens of padding, as prompts of other lengths are aligned; and some pairs are hidden.
LEFT_PADDING = jnp.asarray(np.arange(S)[None, None, None, :] < np.array([0, 2])[:, None, None, None])
PAIRS = jnp.asarray(np.random.default_rng(0).random((B, HEADS, S, S)) < 0.3)
SOURCE_PADDING = jnp.asarray(np.arange(SOURCE)[None, None, None, :] >= np.array([SOURCE, 3])[:, None, None, None])
ANGLES = jnp.asarray(np.random.default_rng(1).uniform(0, 6, (S + 3, 1)), jnp.float32)

Layer = partial(
    TransformerLayer, hidden_size=HIDDEN, mlp_hidden_size=24, num_attention_heads=HEADS,
    hidden_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
DECODER = dict(layer_type=TransformerLayerType.DECODER)


def fading(scores, q, k):
    return scores - 0.3 * (q - k)


# name -> (fields, arguments of the full pass and of every step)
CASES = {
    "GQA, RoPE, window": (
        dict(num_gqa_groups=2, enable_rotary_pos_emb=True, enable_relative_embedding=False, window_size=(3, 0),
             layernorm_type="rmsnorm", scale_attn_logits=True, qk_norm_type="rmsnorm", softmax_type="off_by_one"),
        {},
    ),
    "relative positions, cross-attention": (
        dict(**DECODER, use_bias=True, enable_rotary_pos_emb=True, rotary_pos_emb_group_method="alternate",
             output_layernorm=True, apply_residual_connection_post_layernorm=True),
        dict(encoded=ENCODED, encoder_decoder_mask=SOURCE_PADDING),
    ),
    "padding, bias, transposed": (
        dict(transpose_batch_sequence=True, self_attn_mask_type="padding_causal", fuse_qkv_params=False,
             self_attn_bias_type="pre_scale_bias", checkpoint_core_attention=True, relative_embedding=None),
        dict(attention_mask=LEFT_PADDING, core_attention_bias=BIAS),
    ),
    "pairs masked, angles, score_mod": (
        dict(self_attn_mask_type="causal_padding", enable_relative_embedding=False, score_mod=fading),
        dict(attention_mask=PAIRS, rotary_pos_emb=ANGLES),
    ),
}  # fmt: skip


def decoded(layer, params, x, chunks, **call):
    """Outputs of the layer on x in chunks, one after the other, and the cache they leave."""
    time = 0 if layer.transpose_batch_sequence else 1
    full = jax.eval_shape(partial(layer.init, decode=True, **call), jax.random.key(0), x)
    cache = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), full["cache"])

    @jax.jit
    def step(cache, x):
        return layer.apply({"params": params, "cache": cache}, x, decode=True, mutable=["cache"], **call)

    outs, at = [], 0
    for n in chunks:
        out, changed = step(cache, jax.lax.slice_in_dim(x, at, at + n, axis=time))
        cache, at = changed["cache"], at + n
        outs.append(out)
    return jnp.concatenate(outs, axis=time), cache


@pytest.mark.parametrize("case", CASES)
def test_chunks_and_tokens_equal_the_full_pass(case):
    fields, call = CASES[case]
    layer = Layer(**fields)
    x = jnp.swapaxes(X, 0, 1) if layer.transpose_batch_sequence else X
    call_full = dict(call)
    if "rotary_pos_emb" in call:
        call_full["rotary_pos_emb"] = call["rotary_pos_emb"][:S]
    if layer.layer_type is TransformerLayerType.DECODER:
        call["max_decode_length"] = S
    variables = steps.randomized(steps.init(layer, x, **call_full))
    expected = jax.jit(partial(layer.apply, **call_full))(variables, x)
    got, cache = decoded(layer, variables["params"], x, (3,) + (1,) * (S - 3), **call)
    testing.assert_close(got, expected, 2 * F32)
    own = cache["self_attention" if "self_attention" in cache else "attention"]
    groups = fields.get("num_gqa_groups", HEADS)
    layout = {name: (a.shape, a.dtype) for name, a in own.items()}
    shape = (B, S, groups, HIDDEN // HEADS)
    assert layout == {
        "cached_key": (shape, jnp.float32), "cached_value": (shape, jnp.float32), "cache_index": ((), jnp.int32)
    }  # fmt: skip
    assert int(own["cache_index"]) == S


def test_init_makes_an_empty_cache():
    layer = Layer(enable_rotary_pos_emb=True)
    got, variables = jax.jit(partial(layer.init_with_output, decode=True))(jax.random.key(0), X)
    params, made = {"params": variables["params"]}, {"cache": variables["cache"]}
    expected = jax.jit(layer.apply)(params, X)
    testing.assert_close(got, expected, F32)
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(made))
    # The whole sequence as one chunk.
    got, _ = jax.jit(partial(layer.apply, decode=True, mutable=["cache"]))({**params, **made}, X)
    testing.assert_close(got, expected, F32)


class Twice(nn.Module):
    """A layer that is used twice, as its initialisation is too."""

    @nn.compact
    def __call__(self, x):
        layer = Layer()
        return layer(layer(x, decode=True), decode=True)


def test_init_leaves_the_cache_of_a_layer_that_is_used_twice_empty():
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(Twice().init(jax.random.key(0), X)["cache"]))


def test_a_cache_among_the_variables_is_of_decoding_alone():
    layer = Layer(enable_rotary_pos_emb=True)
    variables = steps.randomized(steps.init(layer, X, decode=True))
    params = {"params": variables["params"]}
    testing.assert_same_bytes(layer.apply(variables, X[:, :5]), layer.apply(params, X[:, :5]))


def test_past_the_end_there_are_nans_and_nothing_else_changes():
    layer = Layer(enable_relative_embedding=False)
    variables = steps.randomized(steps.init(layer, X, decode=True))
    cache = {"cache": variables.pop("cache")}
    expected = jax.jit(layer.apply)(variables, X)
    longer = jnp.concatenate([X, X[:, :4]], axis=1)
    step = jax.jit(partial(layer.apply, decode=True, mutable=["cache"]))
    outs = []
    for at in range(0, S + 4, 3):
        out, cache = step({**variables, **cache}, longer[:, at : at + 3])
        outs.append(out)
    got = jnp.concatenate(outs, axis=1)
    testing.assert_close(got[:, :S], expected, 2 * F32)
    assert np.isnan(got[:, S:]).all()
    assert np.isfinite(cache["cache"]["attention"]["cached_key"]).all()


def test_places_in_a_cache_are_counted_from_its_start():
    """From wherever positions are counted without one."""
    query, key = jnp.ones((B, 2, HEADS, 4)), jax.random.normal(jax.random.key(0), (B, S, HEADS, 4))
    attend = lambda bottom_right: decode_attention(
        query,
        key,
        key,
        index=3,
        options=Attention(0.5, True, bottom_right=bottom_right, score_mod=lambda s, q, k: s * jnp.cos(q + 2 * k)),
    )
    testing.assert_same_bytes(attend(True), attend(False))


def test_bidirectional_tokens_see_what_is_there():
    layer = Layer(self_attn_mask_type="no_mask", enable_relative_embedding=False)
    variables = steps.randomized(steps.init(layer, X))
    got, _ = decoded(layer, variables["params"], X, (3, 1))
    alone = jax.jit(layer.apply)
    testing.assert_close(got[:, :3], alone(variables, X[:, :3]), 2 * F32)
    testing.assert_close(got[:, 3:], alone(variables, X[:, :4])[:, 3:], 2 * F32)


def test_in_fp8_and_bf16():
    layer = Layer(enable_rotary_pos_emb=True, enable_relative_embedding=False)
    variables = steps.randomized(steps.init(layer, X))
    expected = jax.jit(layer.apply)(variables, X)
    with steps.autocast(CURRENT):
        got, cache = decoded(layer, variables["params"], X.astype(jnp.bfloat16), (1,) * S)
    assert got.dtype == cache["attention"]["cached_key"].dtype == jnp.bfloat16
    testing.assert_close(got.astype(jnp.float32), expected, 0.1)  # as in test_transformer.test_fp8_is_near


@pytest.fixture(params=["here", "of few tokens"])
def tokens(request, monkeypatch):
    """Where tokens are few, XLA computes what kernels do elsewhere, as on a GPU."""
    if request.param != "here":
        monkeypatch.setattr(decisions, "platform", lambda: "gpu")
        monkeypatch.setattr(decisions, "FEW_TOKENS", 64)


@pytest.mark.parametrize("fields", [{}, dict(num_gqa_groups=2, layernorm_type="rmsnorm", use_bias=True)], ids=str)
def test_one_row_alone(fields, tokens):
    layer = Layer(enable_rotary_pos_emb=True, mlp_activations=("silu", "linear"), **fields)
    variables, x = steps.randomized(steps.init(layer, X[:1])), X[:1]
    got, _ = decoded(layer, variables["params"], x, (3, *(1,) * (S - 3)))
    testing.assert_close(got, jax.jit(layer.apply)(variables, x), F32)


@pytest.mark.parametrize("explicit, cache_placed", [(False, True), (True, True), (True, False)])
def test_sharded_is_unsharded(explicit, cache_placed, tokens):
    layer = Layer(enable_rotary_pos_emb=True)
    x = jnp.tile(X, (2, 1, 1))
    boxed = steps.init(layer, x, unbox=False, decode=True)
    expected = jax.jit(layer.apply)(nn.unbox({"params": boxed["params"]}), x)
    cache = boxed.pop("cache")
    resource = te.MeshResource(dp_resource="data", tp_resource="model")
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    with testing.on_mesh(mesh), te.autocast(mesh_resource=resource):
        placed = steps.place(mesh, boxed, resource)
        specs = jax.tree.map(lambda a: P("data", None, "model") if a.ndim else P(), cache)
        cache = {"cache": testing.shard(mesh, cache, specs) if cache_placed else cache}
        step = jax.jit(partial(layer.apply, decode=True, mutable=["cache"]))
        outs = []
        for at, n in ((0, 3), (3, 3), (6, 1), (7, 1)):
            out, cache = step({**placed, **cache}, testing.shard(mesh, x[:, at : at + n], P("data")))
            outs.append(np.asarray(out))
        assert cache["cache"]["attention"]["cached_key"].sharding.spec[:3] == ("data", None, "model")
    testing.assert_close(np.concatenate(outs, axis=1), expected, 2 * F32)


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("explicit", [False, True])
def test_the_cache_that_init_makes_on_a_mesh(explicit, batch):
    """Sharded as the keys are; one token is fewer than the devices that share the sequence."""
    layer = Layer(enable_rotary_pos_emb=True, enable_sequence_parallel=True)
    x = jnp.concatenate([X, X[:1]])[:batch]
    expected = jax.jit(layer.apply)(nn.unbox(layer.init(jax.random.key(0), x)), x)
    mesh = testing.mesh_of((2, 2), ("data", "model"), explicit=explicit)
    resource = te.MeshResource(dp_resource="data", tpsp_resource="model")
    with testing.on_mesh(mesh), te.autocast(mesh_resource=resource):
        variables = jax.jit(partial(layer.init, decode=True))(jax.random.key(0), x)
        params, cache = variables["params"], {"cache": variables["cache"]}
        step = jax.jit(partial(layer.apply, decode=True, mutable=["cache"]))
        outs = []
        of_batch = "data" if batch == 2 else None
        for at, n in ((0, 4), (4, 3), (7, 1)):
            spec = cache["cache"]["attention"]["cached_key"].sharding.spec
            assert (*spec, None, None)[:3] == (of_batch, None, "model")
            out, cache = step({"params": params, **cache}, x[:, at : at + n])
            outs.append(jax.device_get(out))
    testing.assert_close(np.concatenate(outs, axis=1), expected, 2 * F32)


class Stack(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, x):
        body = lambda layer, x, _: (layer(x, deterministic=True, decode=self.decode), None)
        options = dict(split_rngs={"params": True}, length=3, metadata_params={nn.PARTITION_NAME: "layers"})
        scan = nn.scan(body, variable_axes={"params": 0, "cache": 0}, **options)
        return scan(Layer(enable_rotary_pos_emb=True), x, None)[0]


def test_scanned_layers_have_stacked_caches():
    variables = steps.randomized(steps.init(Stack(), X))
    expected = jax.jit(Stack().apply)(variables, X)
    cache = steps.init(Stack(decode=True), X)["cache"]
    assert {a.shape[0] for a in jax.tree.leaves(cache)} == {3}
    step = jax.jit(partial(Stack(decode=True).apply, mutable=["cache"]))
    first, cache = step({**variables, "cache": cache}, X[:, :5])
    second, _ = step({**variables, **cache}, X[:, 5:])
    testing.assert_close(jnp.concatenate([first, second], axis=1), expected, 5 * F32)


# --- Misuse ----------------------------------------------------------------------------------------------------------

LENGTHS = SequenceDescriptor.from_seqlens(jnp.full(B, S))
MISUSE = {
    "cache not mutable": ({}, dict(), dict(mutable=False), "got .*, not mutable; .*mutable=\\['cache'\\]"),
    "descriptor": (
        dict(self_attn_mask_type="padding"), dict(sequence_descriptor=LENGTHS), {}, "expected None with a KV cache",
    ),
    "too many tokens": ({}, dict(x=jnp.zeros((B, S + 1, HIDDEN))), {}, "expected .2, 1 to 8 tokens, 4, 4., got"),
    "another batch": ({}, dict(x=X[:1]), {}, "KV cache: key: expected"),
    "mask of a token": (
        dict(self_attn_mask_type="padding_causal"), dict(attention_mask=jnp.zeros((B, 1, 1, 5), bool)), {},
        "mask: expected a shape that broadcasts to",
    ),
    "bias of other length": ({}, dict(core_attention_bias=jnp.zeros((1, HEADS, 3, S))), {}, "bias: expected a shape"),
    "another length": ({}, dict(max_decode_length=16), {}, "max_decode_length: expected 8, .* got 16"),
}  # fmt: skip


NAMES = ["cache_index", "cached_key", "cached_value"]
LACKING = [("attention", NAMES), ("attention", NAMES[:1]), ("attention", NAMES[1:]),
           ("encoder_decoder_attention", NAMES[:1])]  # fmt: skip


@pytest.mark.parametrize("attention, lacking", LACKING)
def test_a_cache_that_lacks_something_is_no_cache(attention, lacking):
    """Else a prompt would go into one that is made for it, and be lost, or the next token count as the first."""
    decoder = attention != "attention"
    layer = Layer(enable_rotary_pos_emb=True, **(DECODER if decoder else {}))
    encoded = [ENCODED] if decoder else []
    variables = jax.jit(partial(layer.init, decode=True))(jax.random.key(0), X, *encoded)
    for name in lacking:
        del variables["cache"][attention][name]
    there = sorted({*(NAMES[:1] if decoder else NAMES)} - {*lacking})
    message = re.escape(f"got {there or 'none'}; take it from init(..., decode=True)")
    with pytest.raises(ValueError, match=message):
        layer.apply(variables, X[:, :5], *encoded, decode=True, mutable=["cache"])


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_named(name):
    fields, call, how, message = MISUSE[name]
    layer = Layer(enable_relative_embedding=False, **fields)
    x = call.pop("x", X[:, :1])
    masked = dict(attention_mask=jnp.zeros((B, 1, 1, S), bool)) if "self_attn_mask_type" in fields else {}
    variables = jax.eval_shape(partial(layer.init, decode=True, **masked), jax.random.key(0), X)
    variables = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), variables)
    with pytest.raises(ValueError, match=message):
        layer.apply(variables, x, decode=True, **{"mutable": ["cache"], **call, **how})


def test_cross_attention_has_no_cache_of_keys():
    module = MultiHeadAttention(head_dim=4, num_attention_heads=HEADS, attn_mask_type="no_mask")
    variables = jax.eval_shape(partial(module.init, decode=True), jax.random.key(0), X, ENCODED)
    assert "cache" not in variables


def test_inputs_that_jit_makes_two_of_do_not_pass_for_cross_attention():
    module = MultiHeadAttention(head_dim=8, num_attention_heads=4, num_gqa_groups=2)
    variables = module.init(jax.random.key(0), X, decode=True)
    step = jax.jit(lambda v, q, kv: module.apply(v, q, kv, decode=True, mutable=["cache"]))
    with pytest.raises(
        ValueError, match="inputs_kv: expected none, or inputs_q itself, with a KV cache of self-attention"
    ):
        step(variables, X[:, :1], X[:, :1])


class Scanned(nn.Module):
    """Three layers in a scan."""

    fields: dict

    @nn.compact
    def __call__(self, x, **call):
        layer = nn.scan(
            lambda module, x, _: (module(x, **call), None),
            variable_axes={"params": 0, "cache": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layer(Layer(**self.fields, name="layers"), x, None)[0]


def test_layers_that_were_scanned_generate_one_after_the_other():
    """As GUIDE says: each with its slice of the parameters and a cache of its own, which a scan would copy."""
    fields = dict(enable_rotary_pos_emb=True, enable_relative_embedding=False)
    scanned, layer, call = Scanned(fields), Layer(**fields), dict(decode=True, deterministic=True)
    variables = nn.unbox(scanned.init(jax.random.key(0), X, **call))
    stack, stacked_cache = variables["params"]["layers"], variables["cache"]
    cache = [layer.init(jax.random.key(0), X, **call)["cache"] for _ in range(3)]

    @jax.jit
    def one_after_the_other(stack, cache, x):
        cache = list(cache)
        for i, given in enumerate(cache):
            params = jax.tree.map(lambda a: a[i], stack)
            x, new = layer.apply({"params": params, "cache": given}, x, **call, mutable=["cache"])
            cache[i] = new["cache"]
        return x, cache

    for tokens in (X[:, :5], X[:, 5:6], X[:, 6:7]):
        y, cache = one_after_the_other(stack, cache, tokens)
        given = {"params": variables["params"], "cache": stacked_cache}
        expected, new = scanned.apply(given, tokens, **call, mutable=["cache"])
        stacked_cache = new["cache"]
        testing.assert_close(y, expected, F32)
