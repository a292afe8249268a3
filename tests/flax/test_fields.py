"""Every field of every module does something, and what it names, starts or shards is what it should."""

import contextlib
import functools
import inspect
import re
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


# --- Every field -----------------------------------------------------------------------------------------------------


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


def test_all_modules_are_here():
    assert modules_of(te_flax, nn.Module) == CHANGES.keys()


@pytest.mark.parametrize("name", CHANGES)
def test_all_fields_are_here(name):
    assert fields_of(getattr(te_flax, name)) == CHANGES[name].keys() | NO_EFFECT.get(name, {}).keys()


@pytest.mark.parametrize("name, field", every(CHANGES))
def test_a_field_changes_what_is_computed(name, field):
    before, after = before_and_after(program, CHANGES[name][field], name, field)
    assert before != after


# Asked for its norm's output, a module cannot fuse what follows.
STAGES = dict(return_layernorm_output=True)
STAGED = ("LayerNormDenseGeneral", "LayerNormMLP", "MultiHeadAttention")
BY_STAGES = every({name: CHANGES[name].keys() - STAGES.keys() for name in STAGED})


@pytest.mark.parametrize("name, field", BY_STAGES)
def test_a_field_changes_what_is_computed_by_stages(name, field):
    before, after = before_and_after(program, CHANGES[name][field], name, field, STAGES)
    assert before != after


@pytest.mark.parametrize("name, field", every(NO_EFFECT))
def test_a_field_that_says_what_is_so_anyway_changes_nothing(name, field):
    before, after = before_and_after(program, NO_EFFECT[name][field], name, field)
    assert before == after


# --- What modules give to those inside them --------------------------------------------------------------------------

EVERYTHING = {field: c.value if isinstance(c, With) else c for field, c in CHANGES["TransformerLayer"].items()} | dict(
    mlp_activations=("clamped_silu", "clamped_linear"),
    float32_attention_logits=True,
    context_parallel_strategy="ALL_GATHER",
    parallel_attention_mlp=False,
    relative_embedding=None,
)
LAYERS = {
    "balanced": EVERYTHING,
    "with relative positions": EVERYTHING
    | dict(enable_relative_embedding=True, context_parallel_causal_load_balanced=False),
}


def same(fields: str) -> dict[str, str]:
    return {field: field for field in fields.split()}


NORM_OF_ALL = same("layernorm_type zero_centered_gamma dtype")
PRODUCT_OF_ALL = same("use_bias low_rank_adaptation_dim low_rank_adaptation_alpha dtype")
CORE_OF_ALL = same("num_attention_heads num_gqa_groups attention_dropout dropout_rng_name checkpoint_core_attention")
CORE_OF_ONE = same("""window_size softmax_type score_mod context_parallel_axis context_parallel_strategy
    context_parallel_causal_load_balanced""")  # fmt: skip
ATTENTION_OF_LAYER = {
    **NORM_OF_ALL,
    **PRODUCT_OF_ALL,
    **CORE_OF_ALL,
    **same("""layernorm_epsilon enable_rotary_pos_emb rotary_pos_emb_windows rotary_pos_emb_group_method
        low_rank_adaptation_scope fuse_qkv_params transpose_batch_sequence enable_sequence_parallel scale_attn_logits
        scaled_query_init qk_norm_type qk_norm_epsilon qk_norm_before_rope"""),
    "head_dim": "kv_channels",
    "float32_logits": "float32_attention_logits",
    "return_layernorm_output": "apply_residual_connection_post_layernorm",
}  # fmt: skip
QK_NORM_OF_ATTENTION = {
    **same("zero_centered_gamma dtype"),
    "epsilon": "qk_norm_epsilon",
    "layernorm_type": "qk_norm_type",
}
# module -> its fields, and what they are called in the module that it is in
HANDED_ON = {
    "encoder_decoder_attention": ATTENTION_OF_LAYER,
    "self_attention": {
        **ATTENTION_OF_LAYER,
        **CORE_OF_ONE,
        "attn_mask_type": "self_attn_mask_type",
        "attn_bias_type": "self_attn_bias_type",
    },
    "mlp": {
        **NORM_OF_ALL,
        **PRODUCT_OF_ALL,
        "epsilon": "layernorm_epsilon",
        "intermediate_dim": "mlp_hidden_size",
        "activations": "mlp_activations",
        "activation_params": "mlp_activation_params",
        "intermediate_dropout_rate": "intermediate_dropout",
        "intermediate_dropout_rng_name": "dropout_rng_name",
        "intermediate_hidden_dropout_dims": "intermediate_dropout_dims",
        "return_layernorm_output": "apply_residual_connection_post_layernorm",
    },
    "output_layernorm": {**NORM_OF_ALL, "epsilon": "layernorm_epsilon"},
    "relpos_bias": same("num_attention_heads dtype"),
    "query": {
        **NORM_OF_ALL,
        **PRODUCT_OF_ALL,
        "epsilon": "layernorm_epsilon",
        "enable_layernorm": "input_layernorm",
    },
    "key": PRODUCT_OF_ALL,
    "value": PRODUCT_OF_ALL,
    "out": PRODUCT_OF_ALL,
    "query_norm": QK_NORM_OF_ATTENTION,
    "key_norm": QK_NORM_OF_ATTENTION,
    "core_attention": {
        **CORE_OF_ALL,
        **CORE_OF_ONE,
        **same("head_dim float32_logits attn_mask_type attn_bias_type"),
    },
}


BETWEEN, WHOLE = (("seqlen_tp", "batch", "embed_activations"), ("seqlen", "batch", "embed_activations"))
# The axes of the inputs of products, and of norms before them, of transposed sequences in parallel.
AXES_INSIDE = {
    "mlp": dict(
        layernorm_input_axes=BETWEEN, dot_1_input_axes=WHOLE, dot_2_input_axes=("seqlen", "batch", "mlp")
    ),
    "query": dict(layernorm_input_axes=BETWEEN, dot_input_axes=WHOLE),
    "key": dict(input_axes=WHOLE),
    "value": dict(input_axes=WHOLE),
    "out": dict(input_axes=("seqlen", "batch", "heads"), output_axes=BETWEEN),
}  # fmt: skip


def assert_fields_are_handed_on(modules: dict[tuple[str, ...], Any]) -> None:
    """Modules by their path, the outermost by ()."""
    inside = {path: module for path, module in modules.items() if path and path[-1] in HANDED_ON}
    assert {path[-1] for path in inside} | {"relpos_bias"} == HANDED_ON.keys()
    for path, module in inside.items():
        for own, given in HANDED_ON[path[-1]].items():
            assert getattr(module, own) == getattr(modules[path[:-1]], given), (path, own)
        for own, axes in AXES_INSIDE.get(path[-1], {}).items():
            assert getattr(module, own) == axes, (path, own)


@pytest.mark.parametrize("case", LAYERS)
def test_fields_are_handed_on_to_all_inside(case):
    modules = {}

    def listen(run, args, kwargs, context):
        modules[context.module.path] = context.module
        return run(*args, **kwargs)

    with nn.intercept_methods(listen):
        program("TransformerLayer", LAYERS[case])
    assert_fields_are_handed_on(modules)


# --- Initial values --------------------------------------------------------------------------------------------------

KERNEL, BIASES = dict(kernel_init=constant(2.0)), dict(use_bias=True, bias_init=constant(3.0))
KERNELS = dict(mha_kernel_init=constant(2.0), mlp_kernel_init=constant(6.0), enable_relative_embedding=False)
STARTS = dict(scale_init=constant(4.0), ln_bias_init=constant(5.0))
NORM_AS_EVER = {"scale": 1.0, "ln_bias": 0.0}
# A query's kernel starts smaller by the square root of the heads' size.
QKV = np.array([2 * SIZE**-0.5, 2.0, 2.0])[:, None]


def below(prefix: str, values: dict) -> dict:
    return {f"{prefix}/{name}": value for name, value in values.items()}


BLOCK = {
    **below("qkv", {**NORM_AS_EVER, "kernel": QKV, "bias": 3.0}),
    **below("out", {"kernel": 2.0, "bias": 3.0}),
}
CROSS = {
    **below("query", {**NORM_AS_EVER, "kernel": 2 * SIZE**-0.5, "bias": 3.0}),
    **below("kv", {"kernel": 2.0, "bias": 3.0}),
    **below("out", {"kernel": 2.0, "bias": 3.0}),
}
QK_NORMS = {f"{name}_norm/{which}": 0.0 for name in ("query", "key") for which in ("scale", "ln_bias")}
MLP = {"wi_kernel": 6.0, "wi_bias": 3.0, "wo_kernel": 6.0, "wo_bias": 3.0}
# (module, fields, the value of each parameter)
INITIAL = {
    "norm": ("LayerNorm", dict(scale_init=constant(4.0), bias_init=constant(5.0)), {"scale": 4.0, "ln_bias": 5.0}),
    "dense": ("DenseGeneral", dict(**KERNEL, **BIASES), {"kernel": 2.0, "bias": 3.0}),
    "split dense": (
        "DenseGeneral",
        dict(**KERNEL, **BIASES, parameters_split=("one", "two")),
        {"one_kernel": 2.0, "one_bias": 3.0, "two_kernel": 2.0, "two_bias": 3.0},
    ),
    "layernorm dense": (
        "LayerNormDenseGeneral",
        dict(**KERNEL, **BIASES, **STARTS),
        {"scale": 4.0, "ln_bias": 5.0, "kernel": 2.0, "bias": 3.0},
    ),
    "mlp": (
        "LayerNormMLP",
        dict(**STARTS, kernel_init=constant(6.0), **BIASES, activations=("silu", "linear")),
        {"scale": 4.0, "ln_bias": 5.0, **MLP},
    ),
    "attention": ("MultiHeadAttention", dict(**KERNEL, **BIASES), BLOCK),
    "attention with groups": ("MultiHeadAttention", dict(**KERNEL, **BIASES, num_gqa_groups=2), CROSS),
    "unfused attention": (
        "MultiHeadAttention",
        dict(**KERNEL, **BIASES, fuse_qkv_params=False, input_layernorm=False),
        {
            **below("query", {"kernel": 2 * SIZE**-0.5, "bias": 3.0}),
            **below("key", {"kernel": 2.0, "bias": 3.0}),
            **below("value", {"kernel": 2.0, "bias": 3.0}),
            **below("out", {"kernel": 2.0, "bias": 3.0}),
        },
    ),
    "relative positions": ("RelativePositionBiases", dict(embedding_init=constant(7.0)), {"rel_embedding": 7.0}),
    "encoder": (
        "TransformerLayer",
        dict(**KERNELS, **BIASES),
        {**below("attention", BLOCK), **below("mlp", {**NORM_AS_EVER, **MLP})},
    ),
    "decoder": (
        "TransformerLayer",
        dict(**KERNELS, **BIASES, layer_type=DECODER),
        {
            **below("self_attention", BLOCK),
            **below("encoder_decoder_attention", CROSS),
            **below("mlp", {**NORM_AS_EVER, **MLP}),
        },
    ),
    "zero-centred decoder": (
        "TransformerLayer",
        dict(
            **KERNELS,
            zero_centered_gamma=True,
            layernorm_type="rmsnorm",
            qk_norm_type="layernorm",
            output_layernorm=True,
            layer_type=DECODER,
        ),
        {
            **below("self_attention", {"qkv/kernel": QKV, "out/kernel": 2.0, **QK_NORMS}),
            **below("encoder_decoder_attention", {"query/scale": 0.0, "query/kernel": 2 * SIZE**-0.5, **QK_NORMS}),
            **below("encoder_decoder_attention", {"kv/kernel": 2.0, "out/kernel": 2.0}),
            **below("mlp", {"scale": 0.0, "wi_kernel": 6.0, "wo_kernel": 6.0}),
            "output_layernorm/scale": 0.0,
        },
    ),
}  # fmt: skip


def assert_starts_at(params: dict[str, jax.Array], expected: dict[str, Any]) -> None:
    """Parameters by their path: these and no others, each of one value."""
    assert params.keys() == expected.keys()
    for path, value in params.items():
        np.testing.assert_allclose(value, np.broadcast_to(expected[path], value.shape), rtol=1e-6, err_msg=path)


@pytest.mark.parametrize("case", INITIAL)
def test_initialisers_are_those_of_exactly_their_parameters(case):
    name, fields, expected = INITIAL[case]
    fields = {**BASE.get(name, {}), **fields}
    args, call = arguments(name, fields)
    params = nn.unbox(getattr(te_flax, name)(**fields).init(jax.random.key(0), *args, **call))["params"]
    found = {"/".join(key.key for key in path): value for path, value in jax.tree.leaves_with_path(params)}
    assert_starts_at(found, expected)


# --- Dtypes, logical axes --------------------------------------------------------------------------------------------

ADAPTED, SCOPE = dict(use_bias=True, enable_low_rank_adaptation=True), dict(low_rank_adaptation_scope="all")
# (module, field, others, so that there are all kinds of parameters)
DTYPES = [
    ("LayerNorm", "dtype", {}),
    ("DenseGeneral", "dtype", ADAPTED),
    ("DenseGeneral", "param_dtype", ADAPTED),
    ("LayerNormDenseGeneral", "dtype", ADAPTED),
    ("LayerNormDenseGeneral", "param_dtype", ADAPTED),
    ("LayerNormMLP", "dtype", ADAPTED),
    ("MultiHeadAttention", "dtype", dict(use_bias=True, qk_norm_type="layernorm", **SCOPE)),
    ("RelativePositionBiases", "dtype", {}),
    ("TransformerLayer", "dtype", dict(use_bias=True, output_layernorm=True, layer_type=DECODER, **SCOPE)),
]
EACH_DTYPE = pytest.mark.parametrize("name, field, others", DTYPES)


@EACH_DTYPE
def test_all_parameters_have_the_dtype_asked_for(name, field, others):
    layout = program(name, {**others, field: jnp.bfloat16}).layout
    assert {dtype for _, dtype, _ in layout.values()} == {"bfloat16"}


NORM_AXES = dict(scale_axes=("a",), ln_bias_axes=("b",))
# (module, fields, the axes of each parameter)
AXES = {
    "norm": ("LayerNorm", dict(scale_axes=("a",), bias_axes=("b",)), {"scale": ("a",), "ln_bias": ("b",)}),
    "dense": (
        "DenseGeneral",
        dict(kernel_axes=("c", "d"), bias_axes=("e",)),
        {"kernel": ("c", "d"), "bias": ("e",)},
    ),
    "layernorm dense": (
        "LayerNormDenseGeneral",
        dict(**NORM_AXES, kernel_axes=("c", "d"), bias_axes=("e",), use_bias=True),
        {"scale": ("a",), "ln_bias": ("b",), "kernel": ("c", "d"), "bias": ("e",)},
    ),
    "mlp": (
        "LayerNormMLP",
        dict(
            **NORM_AXES,
            use_bias=True,
            kernel_axes_1=("c", "d", "e"),
            bias_axes_1=("f", "g"),
            kernel_axes_2=("h", "i"),
            bias_axes_2=("j",),
        ),
        {
            "scale": ("a",),
            "ln_bias": ("b",),
            "wi_kernel": ("c", "d", "e"),
            "wi_bias": ("f", "g"),
            "wo_kernel": ("h", "i"),
            "wo_bias": ("j",),
        },
    ),
    "relative positions": ("RelativePositionBiases", dict(embedding_axes=("a", "b")), {"rel_embedding": ("a", "b")}),
}


@pytest.mark.parametrize("case", AXES)
def test_parameters_carry_the_axes_asked_for(case):
    name, fields, expected = AXES[case]
    layout = program(name, fields).layout
    assert {path: axes for path, (_, _, axes) in layout.items()} == expected


SHARDED = dict(layernorm_input_axes=("batch", None, None), dot_input_axes=(None, None, "mlp"))
SHARDED_MLP = dict(
    layernorm_input_axes=("batch", None, None),
    dot_1_input_axes=(None, None, "mlp"),
    dot_2_input_axes=("batch", None, "mlp"),
)
# (module, fields, the shards of activations, in the order of the program, and the steps between them)
SHARDS = {
    "dense": ("DenseGeneral", dict(input_axes=("batch", None, "mlp")), "'data', None, 'model'; product"),
    "dense, moved": ("DenseGeneral", dict(axis=1, input_axes=("batch", "mlp", None)), "'data', None, 'model'; product"),
    "dense's output": ("DenseGeneral", dict(output_axes=("batch", None, "mlp")), "product; 'data', None, 'model'"),
    "layernorm dense": ("LayerNormDenseGeneral", SHARDED, "'data', None, None; norm; None, None, 'model'; product"),
    "no norm": (
        "LayerNormDenseGeneral",
        SHARDED | dict(enable_layernorm=False),
        "'data', None, None; None, None, 'model'; product",
    ),
    "mlp": (
        "LayerNormMLP",
        SHARDED_MLP,
        "'data', None, None; norm; None, None, 'model'; product; activation; 'data', None, 'model'; product; "
        "'data', None, UNCONSTRAINED",  # as they were before the first product gathered them
    ),
}


def shards_and_steps(jaxpr: str) -> str:
    names = {"layernorm_fwd": "norm", "activation_fwd": "activation", "": "product"}
    found = re.findall(r"spec=P\((.*?)\)|<kernel (\w+)|( dot_general\[)", jaxpr)
    return "; ".join(spec or names[kernel] for spec, kernel, _ in found)


@pytest.mark.parametrize("case", SHARDS)
def test_inputs_are_sharded_as_asked_just_before_their_step(case):
    name, fields, expected = SHARDS[case]
    assert shards_and_steps(program(name, fields, recipe=None).text) == expected


# --- Names, dropout, precision ---------------------------------------------------------------------------------------

# (module, field, other fields)
NAMES = {
    "attention": ("DotProductAttention", "context_checkpoint_name", {}),
    "ffn1": ("LayerNormMLP", "ffn1_ckpt_name", {}),
    "ffn2": ("LayerNormMLP", "ffn2_ckpt_name", {}),
    "ffn1 by stages": ("LayerNormMLP", "ffn1_ckpt_name", STAGES),
    "ffn2 by stages": ("LayerNormMLP", "ffn2_ckpt_name", STAGES),
}
# (module, other fields, products)
QUANTIZED = {
    "dense": ("DenseGeneral", {}, 1),
    "layernorm dense": ("LayerNormDenseGeneral", {}, 1),
    "layernorm dense by stages": ("LayerNormDenseGeneral", STAGES, 1),
    "mlp": ("LayerNormMLP", {}, 2),
    "mlp by stages": ("LayerNormMLP", STAGES, 2),
}


def names_of(program: Program) -> list[str]:
    """The checkpoint names in a program, as often as they are given."""
    return sorted(re.findall(r"name\[name=(\w+)\]", program.text))


def names_in_fp8(jaxpr) -> list[str]:
    """Those of arrays in FP8, which bear them as bytes."""
    return re.findall(r":u8\[[\d,]*\] = name\[name=(\w+)\]", str(jaxpr))


def assert_renames(program: Callable, name: str, field: str, others: dict) -> None:
    """What has the field's default for a checkpoint name has another if that is asked for; all else is as it was."""
    default = inspect.signature(getattr(te_flax, name)).parameters[field].default
    before, after = map(names_of, before_and_after(program, With("mine", others), name, field))
    assert default in before and after == sorted("mine" if one == default else one for one in before)


@pytest.mark.parametrize("case", NAMES)
def test_what_had_a_checkpoint_name_has_the_one_asked_for(case):
    assert_renames(program, *NAMES[case])


@pytest.mark.parametrize("case", QUANTIZED)
def test_both_operands_of_each_product_have_the_checkpoint_name_asked_for(case):
    name, others, products = QUANTIZED[case]
    found = program(name, {**others, "quantization_checkpoint_name": "mine"})
    assert names_in_fp8(found.text) == ["mine"] * 2 * products


# What replaces another module's product, and its arguments.
PRODUCTS = {
    "dot_general": (te_flax.make_dot_general_cls(DELAYED, "mine"), (X, X[0], (((2,), (0,)), ((), ())))),
    "einsum": (te_flax.make_einsum_cls(DELAYED, "mine"), ("bsk,kn->bsn", X, X[0])),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_operands_of_another_modules_product_have_the_checkpoint_name_asked_for(case):
    cls, args = PRODUCTS[case]
    run = lambda *args: cls().init_with_output(jax.random.key(0), *args)[0]
    jaxpr = jax.make_jaxpr(lambda: differentiated(run, *args))()
    assert names_in_fp8(jaxpr) == ["mine", "mine"]


# Of zeros, an MLP makes ones and leaves them to its last kernel, which does nothing: what comes out is dropout's.
ONES = dict(
    mlp_hidden_size=HIDDEN,
    mlp_activations=(jnp.cos,),
    mlp_kernel_init=lambda key, shape, dtype: jnp.eye(*shape, dtype=dtype),
    enable_relative_embedding=False,
    intermediate_dropout=0.5,
)
DIMS = pytest.mark.parametrize("dims", [(), (1,), (0, 2)])


def assert_shares_its_pattern(dropped: np.ndarray, dims: tuple[int, ...]) -> None:
    assert 0.2 < dropped.mean() < 0.8
    for axis in range(3):
        assert (dropped == dropped.take([0], axis)).all() == (axis in dims)


@DIMS
def test_intermediate_dropout_of_a_layer_shares_its_pattern_over_given_axes(dims):
    layer = te_flax.TransformerLayer(**{**BASE["TransformerLayer"], **ONES}, intermediate_dropout_dims=dims)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    assert_shares_its_pattern(np.asarray(layer.init_with_output(keys, X)[0] == 0), dims)


# (module, field)
LOGITS = {
    "attention": ("DotProductAttention", "float32_logits"),
    "multi-head attention": ("MultiHeadAttention", "float32_logits"),
    "layer": ("TransformerLayer", "float32_attention_logits"),
}
IN_PLAIN_JAX = jax.default_device(jax.devices("cpu")[0])  # where there is a GPU, cuDNN's softmax is not to be seen


def precisions_of_powers(jaxpr) -> set[str]:
    """Of the exponentials of a softmax."""
    return set(re.findall(r":(\w+)\[[\d,]*\] = exp ", str(jaxpr)))


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("case", LOGITS)
def test_logits_of_bf16_are_f32_whether_asked_for_or_not(case, asked):
    name, field = LOGITS[case]
    fields = {**BASE[name], field: asked}
    args, call = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arguments(name, fields))
    run = lambda: getattr(te_flax, name)(**fields).init_with_output(jax.random.key(0), *args, **call)[0]
    with IN_PLAIN_JAX:
        assert precisions_of_powers(jax.make_jaxpr(run)()) == {"f32"}
