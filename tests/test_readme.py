"""What README, GUIDE and MIGRATION.md say is so: blocks of Python run as they stand, names and tests exist.

And the JAX example that users bring along runs.
"""

import ast
import dataclasses
import pathlib
import re
from collections import defaultdict
from itertools import takewhile

import jax.numpy as jnp
import numpy as np
import pytest

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import recipe

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "GUIDE.md", "MIGRATION.md")}
BLOCKS = {name: re.findall(r"^```(\w+)\n(.*?)^```", page, re.M | re.S) for name, page in PAGES.items()}
CODE = [
    pytest.param(name, code, id=f"{name}-{i}")
    for name, blocks in BLOCKS.items()
    for i, (language, code) in enumerate(blocks)
    if language == "python"
]


def test_all_blocks_are_run_or_plain_text():
    assert {language for blocks in BLOCKS.values() for language, _ in blocks} == {"python", "text"}
    assert all(page.count("```") == 2 * len(BLOCKS[name]) for name, page in PAGES.items())


@pytest.mark.parametrize("name", te.__all__)
def test_every_public_name_is_on_a_page(name):
    assert any(re.search(rf"\bte\.{name}\b", page) or name in ("recipe", "policies") for page in PAGES.values())


@pytest.mark.parametrize("name, code", CODE)
def test_block(name, code):
    exec(compile(code, name, "exec"), {"__name__": "page"})


def anchors(page: str) -> set[str]:
    """What links of GitHub's name the headings of a page by."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [*PAGES, "benchmarks/README.md", "benchmarks/NOTES.md"])
def test_links_lead_somewhere(name):
    page = ROOT / name
    links = re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text())
    for path, anchor in links:
        assert "://" not in path, f"{path}: a page elsewhere, which no test can look up"
        target = (page.parent / path) if path else page
        assert target.exists(), f"{name}: no {path}"
        assert not anchor or anchor in anchors(target.read_text()), f"{name}: no heading #{anchor} in {target.name}"


# --- The tables of MIGRATION.md --------------------------------------------------------------------------------------


def table(header: str) -> list[list[str]]:
    """The cells of the rows below a header, such as "PyTorch | JAX"."""
    lines = PAGES["MIGRATION.md"].split(f"\n| {header} |\n")[1].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in takewhile(bool, lines)]


JAX, DEFAULTS = table("NVIDIA's | here | what differs"), table("field | NVIDIA's | here")
MODULES, OPTIONS = table("PyTorch | JAX"), table("PyTorch | JAX | tested by")


def names(cell: str) -> list[str]:
    """What a cell calls by name, up to an argument list."""
    return [re.split(r"[ (\[:]", code)[0] for code in re.findall(r"`([^`]+)`", cell)]


def test_names_exist():
    modules = {"te": te, "te_flax": te_flax, "te_nnx": te_nnx, "recipe": recipe}
    found = [name.split(".") for row in JAX + MODULES + OPTIONS for cell in row for name in names(cell)]
    ours = [name for name in found if name[0] in modules]
    assert len(ours) > 40
    for module, *path in ours:
        value = modules[module]
        for name in path:
            value = getattr(value, name)


def cited(cell: str) -> list[tuple[str, str]]:
    """(file, function) of the tests that a cell names."""
    return re.findall(r"`([^`]+)::(\w+)`", cell)


def definitions(path: str) -> dict[str, list[ast.stmt]]:
    """Name -> what defines it in a file of tests: functions, classes, constants."""
    found = defaultdict(list)
    for node in ast.parse((ROOT / "tests" / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name].append(node)
        elif isinstance(node, ast.Assign):
            for name in (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)):
                found[name].append(node)
    return found


def words(node: ast.AST) -> set[str]:
    """The names and strings in a piece of code: fields, arguments, functions; no comments, no text."""
    values = [getattr(n, kind, None) for n in ast.walk(node) for kind in ("id", "attr", "arg", "name", "value")]
    return {value for value in values if isinstance(value, str)}


def used_by(path: str, test: str) -> set[str]:
    """The words of a test, and of all in its file that it uses."""
    defined, seen, new = definitions(path), set(), {test}
    while new:
        seen |= new
        new = set().union(*[words(node) for name in new for node in defined[name]]) - seen
    return seen


def test_tests_exist():
    for option, ours, tested in OPTIONS:
        assert cited(tested) or "not yet" in ours, f"{option}: neither a test nor 'not yet'"
        for path, test in cited(tested):
            assert [type(node) for node in definitions(path)[test]] == [ast.FunctionDef], (path, test)


def subjects(cell: str) -> set[str]:
    """What a cell is about: arguments in te.MeshResource(tp_resource=...), the function in te.dense(x, kernel)."""
    codes = re.findall(r"`([^`]+)`", cell)
    return {name for code in codes for name in re.findall(r"(\w+)=", code) or [code.split("(")[0].split(".")[-1]]}


def test_tests_use_what_they_are_cited_for():
    for option, ours, tested in OPTIONS:
        about = subjects(ours) | (subjects(option) if ours.startswith("the same") else set())
        unused = about - set().union(*[used_by(*test) for test in cited(tested)])
        assert not (cited(tested) and unused), f"{option}: no test that is cited uses {unused}"


# Fields of NVIDIA's JAX modules whose defaults are the same here; those that are not are in a table.
NVIDIA_FIELDS = {
    "LayerNorm": dict(
        epsilon=1e-6, layernorm_type="layernorm", zero_centered_gamma=False, scale_axes=("embed",),
        bias_axes=("embed",), transpose_batch_sequence=False, dtype=jnp.float32,
    ),
    "Softmax": dict(scale_factor=1.0, softmax_fusion_type=te_flax.SoftmaxFusionType.SCALED),
    "DenseGeneral": dict(
        kernel_axes=(), use_bias=True, bias_axes=(), enable_low_rank_adaptation=False, low_rank_adaptation_dim=32,
        low_rank_adaptation_alpha=None, axis=-1, dtype=jnp.float32, input_axes=(), transpose_batch_sequence=False,
    ),
    "LayerNormDenseGeneral": dict(
        enable_layernorm=True, layernorm_type="layernorm", epsilon=1e-6, zero_centered_gamma=False,
        scale_axes=("embed",), ln_bias_axes=("embed",), kernel_axes=(), use_bias=False, bias_axes=(),
        enable_low_rank_adaptation=False, low_rank_adaptation_dim=32, low_rank_adaptation_alpha=None, axis=-1,
        dtype=jnp.float32, depth_scaling=None, transpose_batch_sequence=False,
    ),
    "LayerNormMLP": dict(
        intermediate_dim=2048, enable_layernorm=True, layernorm_type="layernorm", epsilon=1e-6,
        zero_centered_gamma=False, scale_axes=("embed",), ln_bias_axes=("embed",),
        kernel_axes_1=("embed", "act", "mlp"), kernel_axes_2=("mlp", "embed"), use_bias=False,
        bias_axes_1=("act", "mlp"), bias_axes_2=("embed",), activation_params=None,
        intermediate_dropout_rng_name="dropout", intermediate_hidden_dropout_dims=(), enable_low_rank_adaptation=False,
        low_rank_adaptation_dim=32, low_rank_adaptation_alpha=None, axis=-1, dtype=jnp.float32, ffn1_ckpt_name="ffn1",
        ffn2_ckpt_name="ffn2", transpose_batch_sequence=False,
    ),
    "DotProductAttention": dict(
        num_gqa_groups=None, attention_dropout=0.0, attn_mask_type="causal", attn_bias_type=None,
        dropout_rng_name="dropout", float32_logits=False, qkv_layout="bshd_bshd_bshd", scale_factor=None,
        window_size=None, max_segments_per_seq=1, context_parallel_causal_load_balanced=False,
        context_parallel_axis="", context_parallel_strategy="DEFAULT", context_checkpoint_name="context",
        softmax_type="vanilla", score_mod=None,
    ),
    "MultiHeadAttention": dict(
        num_gqa_groups=None, attention_dropout=0.0, dropout_rng_name="dropout", input_layernorm=True,
        layernorm_type="layernorm", layernorm_epsilon=1e-6, return_layernorm_output=False, zero_centered_gamma=False,
        use_bias=False, attn_mask_type="causal", attn_bias_type=None, enable_rotary_pos_emb=False,
        rotary_pos_emb_windows=(1, 10000), rotary_pos_emb_group_method="consecutive", low_rank_adaptation_scope="none",
        low_rank_adaptation_dim=32, low_rank_adaptation_alpha=None, dtype=jnp.float32, fuse_qkv_params=True,
        enable_sequence_parallel=False, scale_attn_logits=False, scaled_query_init=True, float32_logits=False,
        window_size=None, softmax_type="vanilla",
    ),
    "RelativePositionBiases": dict(embedding_axes=("heads", "relpos_buckets"), dtype=jnp.float32),
    "TransformerLayer": dict(
        hidden_size=512, mlp_hidden_size=2048, num_attention_heads=8, num_gqa_groups=None, layernorm_type="layernorm",
        layernorm_epsilon=1e-6, zero_centered_gamma=False, hidden_dropout=0.1, hidden_dropout_dims=(),
        attention_dropout=0.1, intermediate_dropout_dims=(), dropout_rng_name="dropout", mlp_activation_params=None,
        use_bias=False, apply_residual_connection_post_layernorm=False, output_layernorm=False,
        float32_attention_logits=False, layer_type=te_flax.TransformerLayerType.ENCODER, self_attn_mask_type="causal",
        self_attn_bias_type=None, enable_relative_embedding=True, relative_embedding=None, enable_rotary_pos_emb=False,
        rotary_pos_emb_windows=(1, 10000), rotary_pos_emb_group_method="consecutive", low_rank_adaptation_scope="none",
        low_rank_adaptation_dim=32, low_rank_adaptation_alpha=None, dtype=jnp.float32, drop_path=0.0,
        fuse_qkv_params=True, transpose_batch_sequence=False, enable_sequence_parallel=False, scale_attn_logits=False,
        scaled_query_init=True, window_size=None, softmax_type="vanilla",
    ),
}  # fmt: skip


def defaults_of(module: str) -> dict:
    return {field.name: field.default for field in dataclasses.fields(getattr(te_flax, module))}


@pytest.mark.parametrize("module", NVIDIA_FIELDS)
def test_fields_and_defaults_are_nvidias(module):
    assert defaults_of(module) | NVIDIA_FIELDS[module] == defaults_of(module)


def test_defaults_that_differ_are_ours():
    for fields, _, ours in DEFAULTS:
        for module, name in (field.split(".") for field in names(fields)):
            default = defaults_of(module)[name]
            assert name not in NVIDIA_FIELDS[module]
            assert not ours.startswith("`") or default == ast.literal_eval(re.search("`([^`]+)`", ours)[1])


# Of NVIDIA's documentation of its PyTorch modules and contexts.
PYTORCH_OPTIONS = """
in_features out_features bias init_method parameters_split sequence_parallel tp_group tp_size parallel_mode
fuse_wgrad_accumulation return_bias params_dtype weight is_first_microbatch hidden_size eps zero_centered_gamma
return_layernorm_output normalization skip_weight_param_allocation ffn_hidden_size activation
output_layer_init_method set_parallel_mode seq_length micro_batch_size num_attention_heads kv_channels num_gqa_groups
attention_dropout attn_mask_type layer_number attention_mask checkpoint_core_attention core_attention_bias_type
core_attention_bias fast_zero_fill layernorm_epsilon hidden_dropout apply_residual_connection_post_layernorm
output_layernorm layer_type self_attn_mask_type qkv_weight_interleaved drop_path_rate fuse_qkv_params encoder_output
enc_dec_attn_mask inference_params rotary_pos_emb fp8_autocast checkpoint distribute_saved_activations
get_cuda_rng_tracker onnx_export fp8_model_init reduce_amax
""".split()


def test_every_option_of_pytorch_has_a_row():
    assert not set(PYTORCH_OPTIONS) - {name for row in OPTIONS for name in names(row[0])}


def test_overview_example_of_the_original():
    """reference/overview_readme.txt: unchanged but for its import lines."""
    import flax
    import jax
    import jax.numpy as jnp

    import transformer_engine_jax as te
    import transformer_engine_jax.flax as te_flax
    from transformer_engine_jax.common import recipe

    BATCH = 32
    SEQLEN = 128
    HIDDEN = 1024

    # Initialize RNG and inputs.
    rng = jax.random.PRNGKey(0)
    init_rng, data_rng = jax.random.split(rng)
    inp = jax.random.normal(data_rng, [BATCH, SEQLEN, HIDDEN], jnp.float32)

    # Create an FP8 recipe. Note: All input args are optional.
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.HYBRID)

    # Enable autocasting for the forward pass
    with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
        model = te_flax.DenseGeneral(features=HIDDEN)

        def loss_fn(params, other_vars, inp):
            out = model.apply({"params": params, **other_vars}, inp)
            return jnp.mean(out)

        # Initialize models.
        variables = model.init(init_rng, inp)
        other_variables, params = flax.core.pop(variables, "params")

        # Construct the forward and backward function
        fwd_bwd_fn = jax.value_and_grad(loss_fn, argnums=(0, 1))

        for _ in range(10):
            loss, (param_grads, other_grads) = fwd_bwd_fn(params, other_variables, inp)

    assert jnp.isfinite(loss)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((param_grads, other_grads)))
    # d mean(x W + b) / d b is 1 / HIDDEN for every feature.
    assert jnp.allclose(param_grads["bias"], 1 / HIDDEN)
    state = other_grads["_overwrite_with_gradient"]["gemm_state"]
    assert state.x.scale == np.float32(448) / np.abs(inp).max()
    assert state.grad.scale == 57344.0 * inp.size  # the gradient is 1 / (BATCH * SEQLEN * HIDDEN) everywhere

    # The example drops the new state, so its gradients of 2e-7 never get a scale. One step that keeps it:
    with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
        loss, (param_grads, _) = fwd_bwd_fn(params, other_grads, inp)
    expected = jnp.mean(inp, axis=(0, 1))[:, None] / HIDDEN * jnp.ones((1, HIDDEN))
    error = jnp.linalg.norm(param_grads["kernel"] - expected) / jnp.linalg.norm(expected)
    assert error < 0.1  # one rounding to E4M3, at most 2**-4
