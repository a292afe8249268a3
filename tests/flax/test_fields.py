"""Every field of every module does something, and reaches the modules inside that it is for."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fields import (
    BASE,
    BY_STAGES,
    CHANGES,
    NO_EFFECT,
    STAGES,
    With,
    X,
    before_and_after,
    every,
    fields_of,
    modules_of,
    program,
)

import transformer_engine_jax.flax as te_flax


def test_all_modules_are_here():
    assert modules_of(te_flax, nn.Module) == CHANGES.keys()


@pytest.mark.parametrize("name", CHANGES)
def test_all_fields_are_here(name):
    assert fields_of(getattr(te_flax, name)) == CHANGES[name].keys() | NO_EFFECT.get(name, {}).keys()


@pytest.mark.parametrize("name, field", every(CHANGES))
def test_a_field_changes_what_is_computed(name, field):
    before, after = before_and_after(program, CHANGES[name][field], name, field)
    assert before != after


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


# --- Names -----------------------------------------------------------------------------------------------------------

SPELLED = [
    ("DotProductAttention", "qkv_layout", "BSHD_BS2HD", "bshd_bs2hd"),
    ("DotProductAttention", "qkv_layout", "THD_THD_THD", "thd_thd_thd"),
    ("DotProductAttention", "attn_bias_type", "NO_BIAS", "no_bias"),
    ("DotProductAttention", "attn_bias_type", None, None),
    ("DotProductAttention", "context_parallel_strategy", "allgather", "ALL_GATHER"),
    ("DotProductAttention", "attn_mask_type", "causal_padding", "padding_causal"),
    ("DotProductAttention", "attn_mask_type", "bottom_right_causal", "causal_bottom_right"),
    ("DotProductAttention", "attn_mask_type", "causal_padding_bottom_right", "padding_causal_bottom_right"),
    ("LayerNormMLP", "layernorm_type", "RMS_Norm", "rmsnorm"),
    ("LayerNormMLP", "activations", ("SiLU", "linear"), ("silu", "linear")),
    ("LayerNormMLP", "activations", ["SiLU", "linear"], ("silu", "linear")),
    ("MultiHeadAttention", "attn_mask_type", " Causal ", "causal"),
    ("LayerNorm", "layernorm_type", "RMSNorm", "rmsnorm"),
    ("TransformerLayer", "rotary_pos_emb_group_method", "Alternate", "alternate"),
    ("TransformerLayer", "low_rank_adaptation_scope", "Exclude_MLP", "exclude_mlp"),
    ("TransformerLayer", "low_rank_adaptation_scope", None, "none"),
    ("TransformerLayer", "self_attn_mask_type", "causal-padding", "padding_causal"),
    ("TransformerLayer", "layernorm_type", "batchnorm", "batchnorm"),
]


@pytest.mark.parametrize("name, field, given, here", SPELLED)
def test_names_may_be_spelled_as_nvidias_are(name, field, given, here):
    module = getattr(te_flax, name)(**BASE.get(name, {}) | {field: given})
    assert getattr(module, field) == here and getattr(module.clone(), field) == here


NUMBERS = [
    ("TransformerLayer", "drop_path"),
    ("TransformerLayer", "low_rank_adaptation_alpha"),
    ("LayerNormMLP", "intermediate_dropout_rate"),
    ("LayerNormDenseGeneral", "depth_scaling"),
    ("DotProductAttention", "attention_dropout"),
]


@pytest.mark.parametrize("half", [np.float64(0.5), np.array(0.5), jnp.bfloat16(0.5)], ids=["scalar", "array", "jax"])
@pytest.mark.parametrize("name, field", NUMBERS)
def test_numbers_of_numpy_and_jax_are_pythons(name, field, half):
    module = getattr(te_flax, name)(**BASE.get(name, {}) | {field: half})
    assert type(getattr(module, field)) is type(getattr(module.clone(), field)) is float
    rate = jax.jit(lambda: getattr(te_flax, name)(**BASE.get(name, {}) | {field: half}).clone().__dict__[field])()
    assert rate == 0.5


def test_numbers_that_a_program_computes():
    def adapted(alpha):
        module = te_flax.DenseGeneral(8, enable_low_rank_adaptation=True, low_rank_adaptation_alpha=alpha)
        return module.init_with_output(jax.random.key(0), X.astype(jnp.bfloat16))[0]

    assert jax.eval_shape(adapted, jnp.float32(8)).dtype == jnp.bfloat16
    assert jax.eval_shape(jax.vmap(adapted), jnp.arange(3.0)).shape[0] == 3


class OfAUser(te_flax.DenseGeneral):
    temperature: Any = None
    later: int = dataclasses.field(init=False)


@pytest.mark.parametrize("temperature", [np.float32(0.5), jnp.float32(0.5), jax.random.key(0)])
def test_fields_of_a_user_s_own_stay(temperature):
    module = OfAUser(8, temperature=temperature, low_rank_adaptation_alpha=np.float32(2))
    assert module.temperature is temperature and type(module.low_rank_adaptation_alpha) is float


def test_a_name_alone_may_be_spelled_as_nvidias_are():
    assert te_flax.LayerNormMLP(32, activations="GELU").activations == ("gelu",)


def test_such_numbers_do_not_widen_results():
    fields = dict(drop_path=np.linspace(0, 0.1, 3)[1], low_rank_adaptation_alpha=np.float64(8))
    layer = te_flax.TransformerLayer(**BASE["TransformerLayer"] | fields, low_rank_adaptation_scope="all")
    key, x = jax.random.key(0), X.astype(jnp.bfloat16)
    y, _ = jax.eval_shape(layer.init_with_output, {"params": key, "dropout": key}, x)
    assert y.dtype == jnp.bfloat16
