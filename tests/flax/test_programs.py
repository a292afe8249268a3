"""What a program of a module names for checkpoints, drops and computes in f32 is what its fields ask for."""

import inspect
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fields import BASE, HIDDEN, STAGES, Program, With, X, arguments, before_and_after, differentiated, program
from steps import DELAYED

import transformer_engine_jax.flax as te_flax

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
