"""Every field of every module with a value that changes something, and what a module computes with such values."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from steps import DELAYED

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import testing

B, S, HIDDEN, HEADS = 4, 16, 16, 4
SIZE = HIDDEN // HEADS
X = jnp.zeros((B, S, HIDDEN))
BIAS = jnp.ones((1, 1, 1, 1))
DECODER = te_flax.TransformerLayerType.DECODER
constant = nn.initializers.constant


class With(NamedTuple):
    """A value of a field that shows only where other fields have these values."""

    value: Any
    others: dict[str, Any]


def low_rank(switch: str, value) -> dict:
    switched = {switch: value}
    return {**switched, "low_rank_adaptation_dim": With(4, switched), "low_rank_adaptation_alpha": With(8.0, switched)}


BASE = {
    "DenseGeneral": dict(features=6),
    "LayerNormDenseGeneral": dict(features=6),
    "LayerNormMLP": dict(intermediate_dim=24),
    "DotProductAttention": dict(head_dim=SIZE, num_attention_heads=HEADS),
    "MultiHeadAttention": dict(head_dim=SIZE, num_attention_heads=HEADS),
    "RelativePositionBiases": dict(num_buckets=8, max_distance=16, num_attention_heads=HEADS),
    "TransformerLayer": dict(
        hidden_size=HIDDEN, mlp_hidden_size=24, num_attention_heads=HEADS, hidden_dropout=0.0, attention_dropout=0.0
    ),
}

NORM = dict(
    epsilon=1e-3,
    layernorm_type="rmsnorm",
    zero_centered_gamma=With(True, dict(scale_init=constant(1.0))),
    scale_init=constant(2.0),
    scale_axes=("mine",),
)
DENSE = dict(
    features=8,
    kernel_init=constant(2.0),
    kernel_axes=("mine", "yours"),
    bias_init=With(constant(2.0), dict(use_bias=True)),
    bias_axes=With(("mine",), dict(use_bias=True)),
    **low_rank("enable_low_rank_adaptation", True),
    dtype=jnp.bfloat16,
    param_dtype=jnp.bfloat16,
    quantization_checkpoint_name="mine",
    parameters_split=("one", "two"),
    return_bias=True,
)
ROPE = dict(enable_rotary_pos_emb=True)
QK_NORM = dict(qk_norm_type="rmsnorm")
RING = dict(context_parallel_axis="model")
CORE = dict(  # of all that have attention inside
    num_attention_heads=2,
    num_gqa_groups=2,
    attention_dropout=0.5,
    dropout_rng_name=With("mine", dict(attention_dropout=0.5)),
    transpose_batch_sequence=True,
    window_size=(3, 0),
    softmax_type="off_by_one",
    score_mod=lambda scores, q, k: scores - (q - k),
    checkpoint_core_attention=True,
    **RING,
    context_parallel_strategy=With("RING", RING),
    context_parallel_causal_load_balanced=With(True, RING),
)
ATTENTION = dict(  # of MultiHeadAttention and TransformerLayer
    **CORE,
    layernorm_type="rmsnorm",
    layernorm_epsilon=1e-3,
    zero_centered_gamma=True,
    use_bias=True,
    bias_init=With(constant(2.0), dict(use_bias=True)),
    **ROPE,
    rotary_pos_emb_windows=With((2, 500), ROPE),
    rotary_pos_emb_group_method=With("alternate", ROPE),
    **low_rank("low_rank_adaptation_scope", "all"),
    dtype=jnp.bfloat16,
    fuse_qkv_params=False,
    enable_sequence_parallel=True,
    scale_attn_logits=True,
    scaled_query_init=False,
    **QK_NORM,
    qk_norm_epsilon=With(1e-3, QK_NORM),
    qk_norm_before_rope=With(True, dict(**QK_NORM, **ROPE)),
)
LAYERNORM = dict(layernorm_type="layernorm")
CHANGES = {
    "LayerNorm": dict(**NORM, bias_init=constant(2.0), bias_axes=("mine",), dtype=jnp.bfloat16),
    "RMSNorm": dict(
        **NORM | LAYERNORM,
        bias_init=With(constant(2.0), LAYERNORM),
        bias_axes=With(("mine",), LAYERNORM),
        dtype=jnp.bfloat16,
    ),
    "Softmax": dict(
        scale_factor=0.5,
        softmax_fusion_type=te_flax.SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED,
        softmax_type="off_by_one",
    ),
    "DenseGeneral": dict(
        **DENSE, use_bias=False, axis=1, input_axes=("batch", None, "mlp"), output_axes=("batch", None, "mlp")
    ),
    "LayerNormDenseGeneral": dict(
        **DENSE,
        **NORM,
        ln_bias_init=constant(2.0),
        ln_bias_axes=("mine",),
        use_bias=True,
        axis=With(1, dict(enable_layernorm=False)),
        enable_layernorm=False,
        return_layernorm_output=True,
        layernorm_input_axes=("batch", None, "mlp"),
        dot_input_axes=("batch", None, "mlp"),
        depth_scaling=2.0,
    ),
    "LayerNormMLP": dict(
        **NORM,
        ln_bias_init=constant(2.0),
        ln_bias_axes=("mine",),
        intermediate_dim=32,
        enable_layernorm=False,
        kernel_init=constant(2.0),
        kernel_axes_1=("mine", "yours", "theirs"),
        kernel_axes_2=("mine", "yours"),
        use_bias=True,
        bias_init=With(constant(2.0), dict(use_bias=True)),
        bias_axes_1=With(("mine", "yours"), dict(use_bias=True)),
        bias_axes_2=With(("mine",), dict(use_bias=True)),
        return_bias=True,
        return_layernorm_output=True,
        activations=("silu", "linear"),
        activation_params=With({"limit": 1.0}, dict(activations=("clamped_silu", "clamped_linear"))),
        intermediate_dropout_rate=0.5,
        intermediate_dropout_rng_name=With("mine", dict(intermediate_dropout_rate=0.5)),
        intermediate_hidden_dropout_dims=With((1,), dict(intermediate_dropout_rate=0.5)),
        **low_rank("enable_low_rank_adaptation", True),
        layernorm_input_axes=("batch", None, "mlp"),
        dot_1_input_axes=("batch", None, "mlp"),
        dot_2_input_axes=("batch", None, "mlp"),
        ffn1_ckpt_name="mine",
        ffn2_ckpt_name="mine",
        quantization_checkpoint_name="mine",
        dtype=jnp.bfloat16,
    ),
    "DotProductAttention": dict(
        **CORE,
        head_dim=8,
        attn_mask_type="no_mask",
        attn_bias_type=With("pre_scale_bias", dict(attn_bias_type="post_scale_bias")),
        qkv_layout="bs3hd",
        scale_factor=2.0,
        context_checkpoint_name="mine",
    ),
    "MultiHeadAttention": dict(
        **ATTENTION,
        head_dim=8,
        input_layernorm=False,
        return_layernorm_output=True,
        kernel_init=constant(2.0),
        attn_mask_type="no_mask",
        attn_bias_type=With("pre_scale_bias", dict(attn_bias_type="post_scale_bias")),
    ),
    "RelativePositionBiases": dict(
        num_buckets=16,
        max_distance=32,
        num_attention_heads=2,
        embedding_init=constant(2.0),
        embedding_axes=("mine", "yours"),
        dtype=jnp.bfloat16,
    ),
    "TransformerLayer": dict(
        **ATTENTION
        | dict(context_parallel_causal_load_balanced=With(True, dict(**RING, enable_relative_embedding=False))),
        hidden_size=32,
        mlp_hidden_size=32,
        hidden_dropout=0.5,
        hidden_dropout_dims=With((1,), dict(hidden_dropout=0.5)),
        intermediate_dropout=0.5,
        intermediate_dropout_dims=With((1,), dict(intermediate_dropout=0.5)),
        mha_kernel_init=constant(2.0),
        mlp_kernel_init=constant(2.0),
        mlp_activations=("silu", "linear"),
        mlp_activation_params=With({"limit": 1.0}, dict(mlp_activations=("clamped_silu", "clamped_linear"))),
        apply_residual_connection_post_layernorm=True,
        output_layernorm=True,
        layer_type=DECODER,
        self_attn_mask_type="no_mask",
        self_attn_bias_type=With("pre_scale_bias", dict(self_attn_bias_type="post_scale_bias")),
        enable_relative_embedding=False,
        relative_embedding=te_flax.RelativePositionBiases(8, 16, HEADS),
        drop_path=0.5,
        kv_channels=8,
        parallel_attention_mlp=True,
    ),
}
# What is so anyway: logits are in f32, an MLP's axis is the last, there may be any number of segments, and modules that
# treat all tokens alike do not mind their order.
NO_EFFECT = {
    "LayerNorm": dict(transpose_batch_sequence=True),
    "RMSNorm": dict(transpose_batch_sequence=True),
    "DenseGeneral": dict(transpose_batch_sequence=True),
    "LayerNormDenseGeneral": dict(transpose_batch_sequence=True),
    "LayerNormMLP": dict(transpose_batch_sequence=True, axis=(-1,)),
    "DotProductAttention": dict(float32_logits=True, max_segments_per_seq=2),
    "MultiHeadAttention": dict(float32_logits=True),
    "TransformerLayer": dict(float32_attention_logits=True),
}


def arguments(name: str, fields: dict) -> tuple[tuple, dict]:
    """What a module with these fields is called with."""
    if name == "RelativePositionBiases":
        return (S, S), {}
    biases = {"attn_bias_type": "bias", "self_attn_bias_type": "core_attention_bias"}
    call = {argument: BIAS for field, argument in biases.items() if field in fields}
    if name == "DotProductAttention":
        heads, size = fields["num_attention_heads"], fields["head_dim"]
        shapes = [(B, S, n, size) for n in (heads, *[fields.get("num_gqa_groups", heads)] * 2)]
        arrays = tuple(jnp.zeros(shape) for shape in shapes)
        return (jnp.stack(arrays, axis=2),) if "qkv_layout" in fields else arrays, call
    x = jnp.zeros((B, S, fields.get("hidden_size", HIDDEN)))
    return (x,), call | (dict(encoded=x) if "layer_type" in fields else {})


@contextlib.contextmanager
def on_a_mesh(recipe=DELAYED):
    """Where the axes of activations show, and in FP8 the names of what is quantized."""
    resource = te.MeshResource(dp_resource="data", tp_resource="model")
    mesh = testing.mesh_of((2, 2), ("data", "model"))
    with testing.on_mesh(mesh), steps.autocast(recipe, mesh_resource=resource):
        yield


class Program(NamedTuple):
    """What a module computes from a seed to its outputs; constants, and each parameter's shape, dtype and axes."""

    text: str
    constants: list
    layout: dict[str, tuple]
    outputs: jax.tree_util.PyTreeDef

    @classmethod
    def of(cls, jaxpr, layout: dict[str, tuple], out):
        return cls(str(jaxpr), [np.asarray(c).tobytes() for c in jaxpr.consts], layout, jax.tree.structure(out))


def differentiated(f: Callable, *args):
    """f(*args) as it is where gradients are taken: what is kept for these has its checkpoint names there alone."""
    return jax.vjp(lambda one: f(*[one * a if isinstance(a, jax.Array) else a for a in args]), 1.0)[0]


def program(name: str, fields: dict, recipe=DELAYED) -> Program:
    fields = {**BASE.get(name, {}), **fields}
    module, (args, call) = getattr(te_flax, name)(**fields), arguments(name, fields)
    run = lambda keys: differentiated(lambda *args: module.init_with_output(keys, *args, **call), *args)
    with on_a_mesh(recipe):
        keys = {stream: jax.random.key(0) for stream in ("params", "dropout", "mine")}
        jaxpr, (out, variables) = jax.make_jaxpr(run, return_shape=True)(keys)
    return Program.of(jaxpr, steps.layout(variables) if variables else {}, out)


def fields_of(module: type) -> set[str]:
    return inspect.signature(module.__init__).parameters.keys() - {"self", "parent", "name", "rngs"}


def every(table: dict) -> list:
    return [pytest.param(name, field, id=f"{name}.{field}") for name in table for field in sorted(table[name])]


@functools.cache
def by_default(program: Callable, name: str) -> Program:
    return program(name, {})


def before_and_after(program: Callable, change, name: str, field: str, more: dict | None = None) -> list[Program]:
    """What a module computes without and with a change of a field; with `more` fields in both."""
    value, others = change if isinstance(change, With) else (change, {})
    others = {**others, **(more or {})}
    before = program(name, others) if others else by_default(program, name)
    return [before, program(name, {**others, field: value})]


def modules_of(package, kind: type) -> set[str]:
    return {
        name for name in package.__all__ if isinstance(one := getattr(package, name), type) and issubclass(one, kind)
    }


# Asked for its norm's output, a module cannot fuse what follows.
STAGES = dict(return_layernorm_output=True)
STAGED = ("LayerNormDenseGeneral", "LayerNormMLP", "MultiHeadAttention")
BY_STAGES = every({name: CHANGES[name].keys() - STAGES.keys() for name in STAGED})
