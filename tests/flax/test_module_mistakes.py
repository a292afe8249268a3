"""Mistakes in Linen modules that several of them share are told by name, and what need not be one works."""

import re

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from flax import nnx, traverse_util
from steps import DELAYED

import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import testing

(X,) = (jnp.asarray(a) for a in emulated.normal(0, (2, 4, 16)))
LAYER = dict(hidden_size=16, mlp_hidden_size=32, num_attention_heads=2)
LORA = dict(intermediate_dim=32, enable_low_rank_adaptation=True)


class OfRates(nn.Module):
    """Layers in a scan, each with a rate of its own."""

    @nn.compact
    def __call__(self, x):
        layer = lambda module, x, rate: (te_flax.TransformerLayer(**LAYER, drop_path=rate, parent=module)(x), None)
        return nn.scan(layer, {"params": 0}, split_rngs={"params": True})(self, x, jnp.linspace(0, 0.2, 3))


@pytest.mark.parametrize(
    "module, message",
    [
        (te_flax.TransformerLayer(**LAYER, hidden_dropout=None), r"hidden_dropout: expected a rate in .*, got None"),
        (OfRates(), r"drop_path: expected a rate in .*, got .*float32"),
        (te_flax.TransformerLayer(**LAYER, hidden_dropout="0.1"), r"hidden_dropout: expected a rate in .*, got '0.1'"),
        (te_flax.LayerNormMLP(intermediate_dim=None), "intermediate_dim: expected a positive integer, got None"),
        (te_flax.LayerNormMLP(**LORA, low_rank_adaptation_dim=None), "adaptation_dim: expected a positive .*got None"),
        (te_flax.LayerNormMLP(**LORA, low_rank_adaptation_alpha="1"), "adaptation_alpha: expected a number .*got '1'"),
        (te_flax.LayerNormMLP(**LORA, low_rank_adaptation_alpha=np.str_("1")), "adaptation_alpha: expected a number"),
        (
            te_flax.DenseGeneral(4, use_bias=True, bias_init=None),
            "DenseGeneral.bias: expected an initialiser.*got None",
        ),
        (te_flax.DenseGeneral(4, kernel_init="normal"), "DenseGeneral.kernel: expected an initialiser.*got 'normal'"),
        (te_flax.LayerNormMLP(32, kernel_init="normal"), "kernel_init: expected an initialiser.*got 'normal'"),
        (
            te_flax.TransformerLayer(**LAYER, relative_embedding=te_flax.RelativePositionBiases),
            "relative_embedding: expected a module, such as RelativePositionBiases.*got <class",
        ),
    ],
)
def test_misuse_is_named(module, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(module.init, jax.random.key(0), X)


@pytest.mark.parametrize(
    "cls, fields, field, value",
    [
        (te_flax.TransformerLayer, LAYER, "scale_attn_logits", 0.125),
        (te_flax.TransformerLayer, LAYER, "output_layernorm", None),
        (te_flax.MultiHeadAttention, dict(head_dim=8, num_attention_heads=2), "use_bias", "qkv"),
        (te_flax.MultiHeadAttention, dict(head_dim=8, num_attention_heads=2), "enable_rotary_pos_emb", 0.5),
        (te_flax.LayerNorm, {}, "zero_centered_gamma", "False"),
        (te_flax.DenseGeneral, dict(features=4), "return_bias", 1),
    ],
)
def test_what_is_neither_true_nor_false(cls, fields, field, value):
    """In NNX too; NumPy's and JAX's are as good as Python's."""
    hint = "; to scale by another number multiply the query's kernel" if field == "scale_attn_logits" else ""
    message = f"{cls.__name__}.{field}: expected True or False, got {value!r}{hint}"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(cls(**fields, **{field: value}).init, jax.random.key(0), X)
    sizes = [] if cls is te_flax.TransformerLayer else [16]
    with pytest.raises(ValueError, match=message):
        getattr(te_nnx, cls.__name__)(*sizes, **fields, **{field: value}, rngs=nnx.Rngs(0))
    for value in (np.bool_(False), jnp.array(False)):
        jax.eval_shape(cls(**fields, **{field: value}).init, jax.random.key(0), X)
        getattr(te_nnx, cls.__name__)(*sizes, **fields, **{field: value}, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("dtype", [jnp.int32, "half precision", jnp.float8_e4m3fn, np.complex64])
def test_dtypes_that_are_no_floats_of_modules(dtype):
    for field, make in (
        ("DenseGeneral.dtype", lambda: te_flax.DenseGeneral(4, dtype=dtype)),
        ("LayerNorm.dtype", lambda: te_flax.LayerNorm(dtype=dtype)),
        ("TransformerLayer.dtype", lambda: te_flax.TransformerLayer(**LAYER, dtype=dtype)),
        ("DenseGeneral.dtype", lambda: te_nnx.DenseGeneral(4, 4, dtype=dtype, rngs=nnx.Rngs(0))),
        ("DenseGeneral.param_dtype", lambda: te_flax.DenseGeneral(4, dtype="bfloat16", param_dtype=dtype)),
    ):
        with pytest.raises(ValueError, match=f"{field}: expected f32, f16, bf16 or f64, got "):
            make()
    assert te_flax.DenseGeneral(4, dtype=None).dtype is None


@pytest.mark.parametrize("op", [te_flax.init_state, te_flax.main_grads])
def test_model_and_variables_swapped(op):
    model = te_flax.LayerNormMLP(intermediate_dim=32)
    message = f"{op.__name__}: expected a Linen module and then its variables, got dict and LayerNormMLP"
    with steps.autocast(DELAYED), pytest.raises(TypeError, match=message):
        op(steps.init(model, X), model, X)


def test_no_promise_of_segments_may_be_none():
    attention, x = te_flax.DotProductAttention(8, 2, max_segments_per_seq=None), X.reshape(2, 4, 2, 8)
    sequences = te_flax.SequenceDescriptor.from_segment_ids_and_pos(jnp.ones((2, 4), jnp.int32))
    expected = te_flax.DotProductAttention(8, 2).apply({}, x, x, x, sequences)
    testing.assert_same_bytes(attention.apply({}, x, x, x, sequences), expected)


def test_a_layer_takes_what_arrays_are_made_of():
    layer = te_flax.TransformerLayer(**LAYER)
    variables = steps.init(layer, X)
    run = lambda x: layer.apply(variables, x, deterministic=True)
    testing.assert_same_bytes(run(np.asarray(X).tolist()), run(X))


# --- Parameters of other fields, which would go unused ----------------------------------------------------------------

ATTENTION = dict(head_dim=8, num_attention_heads=2)
PLAIN_LAYER = dict(**LAYER, enable_relative_embedding=False, hidden_dropout=0.0, attention_dropout=0.0)
# (module, its fields, the field whose parameters it is given but does not use)
UNUSED = [
    (te_flax.LayerNorm, dict(layernorm_type="rmsnorm"), dict(layernorm_type="layernorm"), "ln_bias"),
    (te_flax.DenseGeneral, dict(features=4, use_bias=False), dict(use_bias=True), "bias"),
    (te_flax.DenseGeneral, dict(features=4, use_bias=False, parameters_split=["a"]), dict(use_bias=True), "a_bias"),
    (te_flax.LayerNormDenseGeneral, dict(features=4, enable_layernorm=False), dict(enable_layernorm=True), "scale"),
    (te_flax.LayerNormMLP, dict(intermediate_dim=32), dict(use_bias=True), "wi_bias"),
    (te_flax.MultiHeadAttention, ATTENTION, dict(use_bias=True), "bias"),
    (te_flax.MultiHeadAttention, ATTENTION, dict(qk_norm_type="rmsnorm"), "query_norm"),
    (te_flax.MultiHeadAttention, dict(**ATTENTION, num_gqa_groups=1), dict(softmax_type="learnable"), "softmax_offset"),
    (te_flax.TransformerLayer, PLAIN_LAYER, dict(output_layernorm=True), "output_layernorm"),
    (te_flax.TransformerLayer, PLAIN_LAYER, dict(enable_relative_embedding=True), "relpos_bias"),
]


@pytest.mark.parametrize("transform", [lambda cls: cls, nn.remat, nn.jit], ids=["", "remat", "jit"])
@pytest.mark.parametrize("cls, fields, other, name", UNUSED)
def test_parameters_that_go_unused_are_named(cls, fields, other, name, transform):
    given = jax.eval_shape(transform(cls)(**fields | other).init, jax.random.key(0), X)
    own = jax.eval_shape(transform(cls)(**fields).init, jax.random.key(0), X)
    # As weights of a model with both: those that the module needs, and others.
    params = traverse_util.flatten_dict(given["params"]) | traverse_util.flatten_dict(own["params"])
    variables = {"params": traverse_util.unflatten_dict(params)}
    (field,) = other
    with pytest.raises(ValueError, match=f"expected no parameters .*{name}.* with {field}="):
        jax.eval_shape(transform(cls)(**fields).apply, variables, X)
    jax.eval_shape(transform(cls)(**fields).apply, own, X)


class Beside(te_flax.DenseGeneral):
    """A user's class with a parameter of a name that is ours."""

    @nn.compact
    def __call__(self, x):
        return super().__call__(x) * self.param("bias", nn.initializers.ones, (4,))


class Around(nn.Module):
    """One in whose scope ours is."""

    def setup(self):
        self.inner = te_flax.DenseGeneral(4, use_bias=False)
        nn.share_scope(self, self.inner)

    @nn.compact
    def __call__(self, x):
        scale = self.param("bias", nn.initializers.ones, (4,))
        return self.inner(x) * scale


class Within(nn.Module):
    """Which calls that by the name of what is inside."""

    @nn.compact
    def __call__(self, x):
        return Around(name="inner")(x)


def test_parameters_of_others_are_let_alone():
    """Those of users' names and classes, and what stands for none in a tree that is masked."""
    for module in (Within(), Beside(4, use_bias=False), Around()):
        variables = module.init(jax.random.key(0), X)
        params = variables["params"].get("inner", variables["params"])
        assert set(params) == {"kernel", "bias"}
        testing.assert_same_bytes(module.apply(variables, X), X @ params["kernel"])
    others = {"adapter": jnp.ones(3), "lora_kernel": jnp.ones(3), "bias": None}
    params = {"kernel": variables["params"]["kernel"], **others}
    got = te_flax.DenseGeneral(4, use_bias=False).apply({"params": params}, X)
    testing.assert_same_bytes(got, X @ params["kernel"])


def test_a_recurrence_that_hides_the_state_gets_a_remedy_that_works():
    class Cell(nn.RNNCellBase):
        @nn.compact
        def __call__(self, carry, x):
            h = jnp.tanh(te_flax.DenseGeneral(16, name="dense")(x) + carry)
            return h, h

        @nn.nowrap
        def initialize_carry(self, rng, input_shape):
            return jnp.zeros((*input_shape[:-1], 16))

        num_feature_axes = property(lambda self: 1)

    remedy = dict(variable_broadcast=["params", te_flax.STATE_COLLECTION])
    with steps.autocast(DELAYED):
        with pytest.raises(ValueError, match=re.escape(f"variable_broadcast={remedy['variable_broadcast']}")):
            nn.RNN(Cell()).init(jax.random.key(0), X)
        assert te_flax.STATE_COLLECTION in nn.RNN(Cell(), **remedy).init(jax.random.key(0), X)
