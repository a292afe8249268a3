"""Modules with fields drawn at random: what fits together runs, forward and backward, in each recipe and in NNX."""

import warnings
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import steps
from emulated import BF16, F32, normal
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from steps import CURRENT, DELAYED

import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import testing
from transformer_engine_jax.flax import (
    LayerNormMLP,
    MultiHeadAttention,
    SequenceDescriptor,
    TransformerLayer,
    TransformerLayerType,
    init_state,
)

B, S, SOURCE, HIDDEN, HEADS = 2, 8, 6, 32, 4
X, ENCODED, BIAS = normal(13, (B, S, HIDDEN), (B, SOURCE, HIDDEN), (1, HEADS, S, S))
LENGTHS = np.array([S, 5])
PADDING = np.arange(S)[None, None, None, :] >= LENGTHS[:, None, None, None]

few = settings(max_examples=8, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
flag = st.booleans()
one_of = lambda *values: st.sampled_from(values)
rate = one_of(0.0, 0.5)
setup = st.fixed_dictionaries(
    {"rec": one_of(None, DELAYED, CURRENT), "dtype": one_of(jnp.float32, jnp.bfloat16), "deterministic": flag}
)

NORM = dict(layernorm_type=one_of("layernorm", "rmsnorm"), zero_centered_gamma=flag, use_bias=flag)
ROPE = dict(
    enable_rotary_pos_emb=flag,
    rotary_pos_emb_windows=one_of((1, 10000), (2, 500)),
    rotary_pos_emb_group_method=one_of("consecutive", "alternate"),
)
ATTENTION = dict(
    num_gqa_groups=one_of(None, 1, 2),
    attention_dropout=rate,
    **ROPE,
    fuse_qkv_params=flag,
    scale_attn_logits=flag,
    scaled_query_init=flag,
    window_size=one_of(None, (3, 0), (2, 3)),
    softmax_type=one_of("vanilla", "off_by_one", "learnable"),
    qk_norm_type=one_of(None, "layernorm", "rmsnorm", "l2norm"),
    qk_norm_before_rope=flag,
    checkpoint_core_attention=flag,
    transpose_batch_sequence=flag,
)
MASKS = ("no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding_causal_bottom_right")
ADAPTATION = dict(low_rank_adaptation_dim=one_of(2, 4), low_rank_adaptation_alpha=one_of(None, 3.0))
SCOPES = dict(low_rank_adaptation_scope=one_of("none", "all", "qkv_proj", "exclude_mlp"), **ADAPTATION)
ACTIVATIONS = one_of(("gelu",), ("silu", "linear"), ("squared_relu", "linear"), (jnp.tanh,), ("quick_gelu", jnp.sin))


def drawn(**strategies):
    return given(st.fixed_dictionaries(strategies), setup)


def turned(transposed: bool, x):
    return np.swapaxes(x, 0, 1) if transposed else x


def padding(mask_type: str, by_descriptor: bool, mask_name: str) -> dict:
    """What a call with padding needs, as a mask or as lengths."""
    if "padding" not in mask_type:
        return {}
    if by_descriptor:
        return {"sequence_descriptor": SequenceDescriptor.from_seqlens(LENGTHS)}
    return {mask_name: PADDING}


def random_variables(module, rec, *args, **call):
    """Near what init gives, without compiling it: kernels of unit gain, scales about one, all else about zero."""
    shapes = jax.eval_shape(partial(module.init, jax.random.key(0), **call), *args)["params"]
    rng = np.random.default_rng(0)

    def draw(path, p):
        noise, name = rng.standard_normal(p.shape, np.float32), path[-1].key
        if "kernel" in name:
            return jnp.asarray(noise / np.sqrt(p.shape[0]), p.dtype)
        return jnp.asarray(("scale" in name and not module.zero_centered_gamma) + 0.2 * noise, p.dtype)

    variables = {"params": jax.tree_util.tree_map_with_path(draw, nn.unbox(shapes))}
    with steps.autocast(rec):
        return variables if rec is None else init_state(module, variables, *args, **call)


def assert_runs(module, x, *, rec, dtype, twin=None, **call) -> None:
    """Outputs like the inputs, gradients like the variables, all finite; the recipe changes little.

    twin: makes the NNX module of these fields, which without dropout has the same outputs.
    """
    call = {name: v.astype(dtype) if name == "encoded" else v for name, v in call.items()}
    x = jnp.asarray(x, dtype)
    run = partial(module.apply, rngs={"dropout": jax.random.key(0)}, **call)
    variables = random_variables(module, rec, x, **{**call, "deterministic": True})
    with warnings.catch_warnings(), steps.autocast(rec):
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "dot_product_attention: computed in plain JAX")  # on GPUs, rightly so
        out, (grads, dx) = steps.step(run, variables, x)
    layout = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
    first = out[0] if isinstance(out, tuple) else out
    assert layout(first) == layout(x) and layout((grads, dx)) == layout((variables, x))
    assert all(jnp.isfinite(a.astype(jnp.float32)).all() for a in jax.tree.leaves((out, grads, dx)))
    without = jax.jit(run)(variables, x)
    # Up to eight products in a row of two E4M3 factors: sqrt(8) * 0.036, and scales of 1 that fit only roughly.
    assert testing.relative_error(out, without) < 0.2
    if twin is not None and call["deterministic"]:
        with steps.autocast(rec):
            model = twin(rngs=nnx.Rngs(0))
        te_nnx.from_linen(model, variables)
        got = nnx.jit(lambda model, x: model(x, **call))(model, x)
        testing.assert_close(got, without, 5 * F32 if dtype == jnp.float32 else 2 * BF16)


@few
@drawn(**NORM, **ATTENTION, **SCOPES, input_layernorm=flag, return_layernorm_output=flag, attn_mask_type=one_of(*MASKS),
       attn_bias_type=one_of(None, "pre_scale_bias", "post_scale_bias"), biased=flag, by_descriptor=flag)  # fmt: skip
def test_multi_head_attention(fields, setup):
    x = turned(fields["transpose_batch_sequence"], X)
    call = padding(fields["attn_mask_type"], fields.pop("by_descriptor"), "mask")
    if fields.pop("biased"):
        call |= {"bias": BIAS}
    else:
        fields["attn_bias_type"] = None
    assert_runs(MultiHeadAttention(head_dim=6, num_attention_heads=HEADS, **fields), x, **call, **setup)


@few
@drawn(**NORM, **ADAPTATION, activations=ACTIVATIONS, enable_layernorm=flag, enable_low_rank_adaptation=flag,
       return_layernorm_output=flag, intermediate_dropout_rate=rate,
       intermediate_hidden_dropout_dims=one_of((), (0,), (-2,)))  # fmt: skip
def test_layernorm_mlp(fields, setup):
    assert_runs(LayerNormMLP(intermediate_dim=24, **fields), X, **setup)


@few
@drawn(**NORM, **ATTENTION, **SCOPES, mlp_activations=ACTIVATIONS, hidden_dropout=rate,
       hidden_dropout_dims=one_of((), (1,)), intermediate_dropout=rate, drop_path=rate, post=flag,
       output_layernorm=flag, parallel=flag, decoder=flag,
       self_attn_mask_type=one_of(*MASKS), self_attn_bias_type=one_of(None, "pre_scale_bias", "post_scale_bias"),
       enable_relative_embedding=flag, kv_channels=one_of(None, 6), biased=flag, by_descriptor=flag)  # fmt: skip
def test_transformer_layer(fields, setup):
    decoder, transposed = fields.pop("decoder"), fields["transpose_batch_sequence"]
    call = padding(fields["self_attn_mask_type"], fields.pop("by_descriptor"), "attention_mask")
    if fields.pop("biased"):
        call |= {"core_attention_bias": BIAS}
    elif not fields["enable_relative_embedding"]:
        fields["self_attn_bias_type"] = None
    call |= {"encoded": turned(transposed, ENCODED)} if decoder else {}
    post = fields.pop("post")
    parallel = fields.pop("parallel") and not (decoder or post)
    fields |= dict(
        hidden_size=HIDDEN,
        mlp_hidden_size=24,
        num_attention_heads=HEADS,
        layer_type=TransformerLayerType.DECODER if decoder else TransformerLayerType.ENCODER,
        apply_residual_connection_post_layernorm=post,
        parallel_attention_mlp=parallel,
    )
    twin = partial(te_nnx.TransformerLayer, **fields)
    assert_runs(TransformerLayer(**fields), turned(transposed, X), twin=twin, **call, **setup)
