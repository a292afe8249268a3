"""Random modules on this GPU, or by the kernels' references, against the same on its CPU: results and all gradients.

A case is a module with random fields, of a random recipe, size and dtype, on its own or in one of JAX's transforms.
What another rounding of its inputs and parameters does to a result on the CPU is its noise; `off` is by how much of
that, and of the dtype's own rounding, the other's differs at most. Beyond LIMIT it is marked: look at it, as noise has
a tail. Set TE_GEMM_TUNING=0, or each product is timed first, and run several at once, with other seeds: most of the
time XLA compiles. benchmarks/gpu.sh does both.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from benchmarks.command import Columns
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.quantized import QuantizerStates

LIMIT = 4.0
DECODER = te_flax.TransformerLayerType.DECODER

# --- What is drawn ---------------------------------------------------------------------------------------------------

RECIPES = (
    None,
    *(recipe.DelayedScaling(fp8_gemms="all", fp8_dpa=dpa, margin=margin) for dpa, margin in ((False, 0), (True, 1))),
    *(recipe.Float8CurrentScaling(fp8_gemms="all", fp8_dpa=dpa) for dpa in (False, True)),
)
DTYPES = (jnp.bfloat16, jnp.bfloat16, jnp.float16, jnp.float32)
BATCHES = (1, 2, 3, 8)
LENGTHS = (1, 7, 16, 33, 64, 65, 96, 128, 192, 257)
WIDTHS = (32, 48, 64, 96, 100, 128, 256, 520)
HEADS = ((1, 1), (2, 2), (4, 2), (4, 1), (3, 3))  # of queries, and of keys and values
BOTH = (True, False)
RATES = (0.0, 0.0, 0.3)
PARAMETERS = dict(dtype=(jnp.float32, jnp.float32, jnp.bfloat16))
NORM = dict(layernorm_type=("layernorm", "rmsnorm"), zero_centered_gamma=BOTH)
LOW_RANK = dict(enable_low_rank_adaptation=(False, False, True), low_rank_adaptation_dim=(8,))
DENSE = dict(features=(16, 48, 65, 128, (2, 64), (3, 20)), use_bias=BOTH, **LOW_RANK, **PARAMETERS)
MLP_DROPOUT = dict(intermediate_dropout_rate=RATES, intermediate_hidden_dropout_dims=((), (), (1,)))
ACTIVATIONS = (
    *((name,) for name in ("gelu", "relu", "silu", "quick_gelu", "squared_relu")),
    *((name, "linear") for name in ("gelu", "silu", "relu", "clamped_silu")),
)
MASKS = ("no_mask", "causal", "causal_bottom_right", "padding", "padding_causal")
CORE = dict(
    float32_logits=BOTH,
    softmax_type=("vanilla", "vanilla", "off_by_one", "learnable"),
    window_size=(None, None, (5, 3), (16, 0), (-1, -1)),
)
ATTENTION = dict(
    **CORE,
    input_layernorm=BOTH,
    use_bias=BOTH,
    fuse_qkv_params=BOTH,
    transpose_batch_sequence=(False, False, True),
    scale_attn_logits=BOTH,
    enable_rotary_pos_emb=BOTH,
    rotary_pos_emb_group_method=("consecutive", "alternate"),
    qk_norm_type=(None, None, "layernorm", "rmsnorm", "l2norm"),
    qk_norm_before_rope=BOTH,
    low_rank_adaptation_scope=("none", "none", "all", "qkv_proj"),
    low_rank_adaptation_dim=(8,),
    **NORM,
    **PARAMETERS,
)
LAYER = dict(
    {name: values for name, values in ATTENTION.items() if name not in ("float32_logits", "input_layernorm")},
    mlp_hidden_size=(48, 128, 260),
    hidden_dropout=RATES,
    drop_path=RATES,
    intermediate_dropout=RATES,
    attention_dropout=(0.0,),  # cuDNN draws its own bits
    mlp_activations=ACTIVATIONS,
    apply_residual_connection_post_layernorm=(False, False, True),
    output_layernorm=(False, False, True),
    layer_type=(te_flax.TransformerLayerType.ENCODER, te_flax.TransformerLayerType.ENCODER, DECODER),
    enable_relative_embedding=(False, False, True),
    parallel_attention_mlp=(False, False, True),
)


class Case(NamedTuple):
    """A module, what it is called with, and how."""

    module: nn.Module
    inputs: tuple[np.ndarray, ...]  # those of which gradients are taken
    options: dict[str, Any]
    recipe: recipe.Recipe | None
    way: str


def _drawn(rng: np.random.Generator, choices: dict[str, tuple]) -> dict[str, Any]:
    return {name: values[rng.integers(len(values))] for name, values in choices.items()}


class Stack(nn.Module):
    """Layers in a scan, each rematerialised."""

    fields: dict[str, Any]

    @nn.compact
    def __call__(self, x, *encoded, **options):
        class Body(nn.Module):
            fields: dict[str, Any]

            @nn.compact
            def __call__(self, x, _):
                return te_flax.TransformerLayer(**self.fields)(x, *encoded, **options), None

        axes = {"params": 0, te_flax.STATE_COLLECTION: 0}
        layers = nn.scan(nn.remat(Body), axes, split_rngs={"params": True, "dropout": True}, length=2)
        return layers(self.fields)(x, None)[0]


def _module(
    rng: np.random.Generator, dtype
) -> tuple[nn.Module, tuple[np.ndarray, ...], dict[str, Any], tuple[str, ...]]:
    """(module, inputs, options of the call, the ways that suit it)."""
    pick = lambda values: values[rng.integers(len(values))]
    kind = pick(("dense", "norm_dense", "mlp", "core", "attention", "layer", "layer", "stack"))
    batch, length, width = pick(BATCHES), pick(LENGTHS), pick(WIDTHS)
    normal = lambda *shape: (rng.normal(size=shape) * pick((0.3, 1.0, 4.0))).astype(dtype)
    x = normal(batch, length, width)
    ways = ("alone", "remat", "vmap", "scan")
    if kind == "dense":
        return te_flax.DenseGeneral(**_drawn(rng, DENSE)), (x,), {}, ways
    if kind == "norm_dense":
        fields = _drawn(rng, DENSE | NORM | dict(enable_layernorm=(True, True, False), return_layernorm_output=BOTH))
        return te_flax.LayerNormDenseGeneral(**fields), (x,), {}, ways
    if kind == "mlp":
        choices = dict(intermediate_dim=(48, 65, 128, 260), activations=ACTIVATIONS, use_bias=BOTH)
        fields = _drawn(rng, choices | LOW_RANK | MLP_DROPOUT | NORM | PARAMETERS)
        return te_flax.LayerNormMLP(**fields), (x,), {}, ways
    heads, groups = pick(HEADS)
    of_heads = dict(num_attention_heads=heads, num_gqa_groups=groups)
    mask = pick(MASKS)
    keys = pick((length, length, pick(LENGTHS)))
    lengths = [rng.integers(1, n + 1, batch).astype(np.int32) for n in (length, keys)]
    if kind == "core":
        size = pick((8, 16, 32, 64, 80, 128))
        module = te_flax.DotProductAttention(head_dim=size, attn_mask_type=mask, **of_heads, **_drawn(rng, CORE))
        inputs = (normal(batch, length, heads, size), *(normal(batch, keys, groups, size) for _ in range(2)))
        if "padding" not in mask:
            return module, inputs, {}, ways
        return module, inputs, dict(sequence_descriptor=te.SequenceDescriptor.from_seqlens(tuple(lengths))), ways
    itself = lambda: te.SequenceDescriptor.from_seqlens(lengths[0])
    if kind == "attention":
        size = pick((16, 32, 64))
        fields = _drawn(rng, ATTENTION) | dict(head_dim=size, attn_mask_type=mask, **of_heads)
        options = dict(sequence_descriptor=itself()) if "padding" in mask else {}
        decodes = ("decode",) if mask == "causal" and not fields["transpose_batch_sequence"] else ()
        return te_flax.MultiHeadAttention(**fields), (x,), options, (*ways, *decodes)
    fields = _drawn(rng, LAYER) | dict(self_attn_mask_type=mask, **of_heads)
    width = fields["hidden_size"] = heads * pick((16, 32, 64))
    transposed = fields["transpose_batch_sequence"]
    shape = lambda n: (n, batch, width) if transposed else (batch, n, width)
    inputs, options = (normal(*shape(length)),), {}
    if fields["layer_type"] is DECODER:
        inputs += (normal(*shape(keys)),)
    if "padding" in mask:
        options["sequence_descriptor"] = itself()
    if kind == "stack":
        return Stack(fields), inputs, options, ("alone",)
    decodes = ("decode",) if mask == "causal" and len(inputs) == 1 and not transposed else ()
    return te_flax.TransformerLayer(**fields), inputs, options, (*ways, *decodes)


def draw(seed: int) -> Case:
    """The case of this seed; combinations of fields that the module refuses are drawn anew."""
    rng = np.random.default_rng(seed)
    while True:
        module, inputs, options, ways = _module(rng, DTYPES[rng.integers(len(DTYPES))])
        case = Case(module, inputs, options, RECIPES[rng.integers(len(RECIPES))], ways[rng.integers(len(ways))])
        if case.recipe is not None and case.recipe.fp8_dpa and inputs[0].dtype == np.float32:
            continue  # a GPU has no FP8 attention of f32, a CPU imitates it
        try:
            with jax.default_device(jax.devices("cpu")[0]):
                jax.eval_shape(lambda: forward(case)(variables(case), *inputs))
            return case
        except ValueError:
            pass


# --- What is computed ------------------------------------------------------------------------------------------------


def autocast(case: Case) -> Any:
    return te.fp8_autocast(case.recipe is not None, case.recipe)


def variables(case: Case) -> Any:
    """Random parameters, none of them constant, and a fresh FP8 state."""
    rng, rngs = np.random.default_rng(0), {"params": jax.random.key(0), "dropout": jax.random.key(0)}

    def drawn(path, x):
        gamma = jax.tree_util.keystr(path).endswith("scale']")
        fan_in = max(x.size // x.shape[-1], 16)
        return (gamma + rng.normal(size=x.shape) / np.sqrt(fan_in)).astype(x.dtype)

    init = lambda: case.module.init(rngs, *case.inputs, **case.options)
    params = jax.tree_util.tree_map_with_path(drawn, nn.unbox(jax.eval_shape(init)).get("params", {}))
    if case.recipe is None:
        return {"params": params}
    with autocast(case):
        return te_flax.init_state(case.module, {"params": params}, *case.inputs, **case.options, rngs=rngs)


def forward(case: Case) -> Callable:
    """(variables, *inputs) -> the module's results, under the case's recipe."""

    def one(given, *inputs):
        return case.module.apply(given, *inputs, **case.options, rngs={"dropout": jax.random.key(3)})

    def both(*inputs):
        return [jnp.stack([x, jnp.flip(x)]) for x in inputs]

    def generated(given, x):
        """A prompt, and then token by token."""
        call = dict(decode=True, deterministic=True)
        cache, outs, prompt = case.module.init(jax.random.key(0), x, **call)["cache"], [], max(x.shape[1] - 2, 1)
        for tokens in jnp.split(x, np.arange(prompt, x.shape[1]), axis=1):
            out, changed = case.module.apply({**given, "cache": cache}, tokens, **call, mutable=["cache"])
            cache = changed["cache"]
            outs.append(out)
        return outs

    ways = {
        "alone": one,
        "remat": jax.checkpoint(one),
        "vmap": lambda given, *inputs: jax.vmap(lambda xs: one(given, *xs))(both(*inputs)),
        "scan": lambda given, *inputs: jax.lax.scan(lambda _, xs: (None, one(given, *xs)), None, both(*inputs))[1],
        "decode": generated,
    }

    def run(given, *inputs):
        with autocast(case):
            return ways[case.way](given, *inputs)

    return run


# XLA's own optimisations are not what is tried, and take most of the time. On a CPU it needs them to sum in f32.
QUICK = {
    "gpu": {
        "xla_backend_optimization_level": 0,
        "xla_gpu_autotune_level": 0,
        "xla_gpu_force_compilation_parallelism": 1,
    },
    "cpu": {"xla_llvm_disable_expensive_passes": True},
}


def compiled(case: Case, platform: str) -> Callable:
    """(variables, inputs, cotangents) -> {path: the module's results and, but for generated ones, its gradients}."""
    device = jax.devices(platform)[0]

    @functools.partial(jax.jit, compiler_options=QUICK[platform])
    def run(given, inputs, cotangents):
        if case.way == "decode":
            return forward(case)(given, *inputs)
        out, vjp = jax.vjp(forward(case), given, *inputs)
        return out, vjp(cotangents)

    def results(*operands):
        with jax.default_device(device):
            out = run(*jax.device_put(operands, device))
        is_states = lambda x: isinstance(x, QuantizerStates)
        out = jax.tree.map(lambda x: x.states() if is_states(x) else x, out, is_leaf=is_states)
        named = {jax.tree_util.keystr(path): np.asarray(x, np.float32) for path, x in jax.tree.leaves_with_path(out)}
        return {path: x for path, x in named.items() if not path.endswith(".scale")}  # which follows from the amaxes

    return results


def rounded(tree: Any, seed: int) -> Any:
    """The floating-point arrays with each number up to 2^-8 off, as bf16 rounds it; FP8 states as they are."""
    rng = np.random.default_rng(seed)

    def off(x):
        return (np.asarray(x, np.float32) * (1 + rng.uniform(-1, 1, np.shape(x)) * 2**-8)).astype(x.dtype)

    is_states = lambda x: isinstance(x, QuantizerStates)
    return jax.tree.map(lambda x: x if is_states(x) else off(x), tree, is_leaf=is_states)


# Of every result besides: what rounds otherwise inside, as TF32 does, in which XLA computes products of f32 on GPUs. Of
# attention in FP8, the weights, which cuDNN scales by the largest so far of their row. And of all gradients' mean size,
# for those that are zero but for roundings, as that of a bias that all keys have.
FLOOR, FP8_FLOOR, SMALL = 2**-10, 2**-5, 2**-9


def compared(case: Case) -> tuple[float, str]:
    """(how many times its noise the result that is most so differs, its path)."""
    given = variables(case)
    rng = np.random.default_rng(0)
    draw_like = lambda y: rng.normal(size=y.shape).astype(y.dtype)
    operands = given, case.inputs, jax.tree.map(draw_like, jax.eval_shape(forward(case), given, *case.inputs))
    on_cpu = compiled(case, "cpu")
    expected, *shaken = (on_cpu(*x) for x in (operands, *(rounded(operands, seed) for seed in (1, 2, 3))))
    if "gpu" in testing.platforms():
        tried = compiled(case, "gpu")(*operands)
    else:
        with testing.reference_kernels():
            tried = compiled(case, "cpu")(*operands)
    floor = FP8_FLOOR if case.recipe is not None and case.recipe.fp8_dpa else FLOOR
    is_amax = lambda path: path.endswith("amax_history")
    sizes = {kind: [_size(x) for path, x in expected.items() if is_amax(path) == kind] for kind in (False, True)}

    def times(path: str) -> float:
        right, finite = expected[path], np.isfinite(expected[path])
        if not np.array_equal(finite, np.isfinite(tried[path])):
            return float("inf")
        off = lambda x: _size((x - right)[finite])
        noise = max(off(other[path]) for other in shaken) + floor * _size(right[finite])
        noise += SMALL * np.sqrt(np.mean(np.square(sizes[is_amax(path)])))
        return off(tried[path]) / noise if noise else 0.0

    return max((times(path), path) for path in expected)


def _size(x: np.ndarray) -> float:
    """The root of the mean square of what is finite."""
    x = x[np.isfinite(x)]
    return float(np.linalg.norm(x.astype(np.float64)) / np.sqrt(max(x.size, 1)))


# --- The command -----------------------------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--first-seed", type=int, default=0, metavar="SEED", help="of the first case")
    command.add_argument("--cases", type=int, default=100, help="with this and the following seeds")


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each case."""
    for seed in range(args.first_seed, args.first_seed + args.cases):
        case = draw(seed)
        name = "bf16" if case.recipe is None else type(case.recipe).__name__
        row = {"seed": seed, "module": type(case.module).__name__, "way": case.way, "recipe": name}
        row["inputs"] = [f"{x.dtype}{list(x.shape)}" for x in case.inputs]
        try:
            row["off"], row["where"] = compared(case)
        except Exception as error:  # what the CPU computes and the GPU refuses is what this looks for
            row["off"], row["where"] = float("inf"), f"{type(error).__name__}: {str(error).splitlines()[0]}"
        yield row


def line(row: dict) -> str:
    told = f"  DIFFERS: {row['where']}" if row["off"] > LIMIT else ""
    what = f"{row['module']} {row['way']} {row['recipe']} {', '.join(row['inputs'])}"
    return f"{row['seed']:>7} {row['off']:6.2f}  {what}{told}"


TITLE = "Random modules on the GPU against the CPU"
COLUMNS: Columns = {
    "seed": lambda r: str(r["seed"]),
    "module": lambda r: r["module"],
    "in": lambda r: r["way"],
    "recipe": lambda r: r["recipe"],
    "times the noise": lambda r: f"{r['off']:.2f}",
}
