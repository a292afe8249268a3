"""Parameters start as asked for, in the dtype and on the axes asked for; inputs are sharded as asked for."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fields import BASE, DECODER, SIZE, arguments, constant, program
from flax import nnx

import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx

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


@pytest.mark.parametrize("name", ["DenseGeneral", "TransformerLayer"])
@pytest.mark.parametrize("api", [te_flax, te_nnx])
def test_kernels_of_16_bits_are_those_of_f32_rounded(api, name):
    """Drawn in 16 bits they would be JAX's 128 values, whose mean is 2 % of their deviation."""

    def drawn(dtype):
        fields = {**BASE[name], **(dict(enable_relative_embedding=False) if name == "TransformerLayer" else {})}
        if api is te_flax:
            args, call = arguments(name, fields)
            return te_flax.__dict__[name](**fields, dtype=dtype).init(jax.random.key(0), *args, **call)["params"]
        inputs = (SIZE,) if name == "DenseGeneral" else ()
        module = te_nnx.__dict__[name](*inputs, **fields, dtype=dtype, rngs=nnx.Rngs(0))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    with jax.numpy_dtype_promotion("strict"):
        half, single = (nn.unbox(drawn(dtype)) for dtype in (jnp.bfloat16, jnp.float32))
    # Kernels that are stacked are multiplied by their scale, which is rounded too, and rounded once more.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=3 * 2**-8), half, single)


def test_initialisers_of_boxes_say_whose_the_axes_are():
    """The module's, where it names them; else Flax's boxes and NNX's metadata stay, as in Flax's own layers."""
    x, normal, key = jnp.ones((2, 8, 64)), nn.initializers.lecun_normal(), jax.random.key(0)

    def boxed(box):
        return lambda key, shape, dtype: box(normal, (*[None] * (len(shape) - 1), "mine"))(key, shape, dtype)

    for box in (nn.with_partitioning, nn.with_logical_partitioning):
        named = (
            te_flax.DenseGeneral(features=64, kernel_init=boxed(box), kernel_axes=("embed", "mlp")),
            te_flax.LayerNormMLP(intermediate_dim=128, kernel_init=boxed(box)),
            te_flax.MultiHeadAttention(16, 4, kernel_init=boxed(box)),
        )
        for module in named:
            with pytest.raises(ValueError, match="expected an initialiser that returns an array, got .*Partitioned"):
                module.init(key, x)
        free = te_flax.DenseGeneral(features=64, kernel_init=boxed(box))
        assert free.init(key, x)["params"]["kernel"].names == (None, "mine")
    tagged = nnx.with_metadata(normal, tag="mine")
    assert te_nnx.DenseGeneral(64, 64, kernel_init=tagged, rngs=nnx.Rngs(0)).kernel.tag == "mine"
    for make in (
        lambda: te_nnx.DenseGeneral(64, 64, kernel_init=tagged, kernel_axes=("embed", "mlp"), rngs=nnx.Rngs(0)),
        lambda: te_nnx.LayerNormMLP(64, intermediate_dim=128, kernel_init=tagged, rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(ValueError, match="expected an initialiser that returns an array, got .*VariableMetadata"):
            make()


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
