"""Every field of every NNX module does something, and what it names, starts or shards is what it should."""

import inspect

import fields as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fields import DECODER, HEADS, HIDDEN, NO_EFFECT, B, S, With, X
from flax import nnx
from steps import DELAYED

import transformer_engine_jax.nnx as te_nnx
from tests.flax import test_fields, test_parameters, test_programs

WIDTH = 24  # not that of Linen's inputs
BASE = {
    **linen.BASE,
    "LayerNorm": dict(num_features=HIDDEN),
    "RMSNorm": dict(num_features=HIDDEN),
    "DenseGeneral": dict(in_features=HIDDEN, **linen.BASE["DenseGeneral"]),
    "LayerNormDenseGeneral": dict(in_features=HIDDEN, **linen.BASE["LayerNormDenseGeneral"]),
    "LayerNormMLP": dict(in_features=HIDDEN, **linen.BASE["LayerNormMLP"]),
    "MultiHeadAttention": dict(in_features=HIDDEN, **linen.BASE["MultiHeadAttention"]),
}
OF_NNX = {
    "LayerNorm": dict(num_features=WIDTH),
    "RMSNorm": dict(num_features=WIDTH),
    "DenseGeneral": dict(in_features=WIDTH),
    "LayerNormDenseGeneral": dict(in_features=WIDTH),
    "LayerNormMLP": dict(in_features=WIDTH),
    "MultiHeadAttention": dict(in_features=WIDTH, in_kv_features=WIDTH),
    "TransformerLayer": dict(
        encoded_size=With(WIDTH, dict(layer_type=DECODER)),
        relative_embedding=te_nnx.RelativePositionBiases(8, 16, HEADS, rngs=nnx.Rngs(0)),
    ),
}
CHANGES = {name: {**changes, **OF_NNX.get(name, {})} for name, changes in linen.CHANGES.items()}


def arguments(name: str, fields: dict) -> tuple[tuple, dict]:
    """What a module with these fields is called with."""
    args, call = linen.arguments(name, fields)
    wide = jnp.zeros((B, S, WIDTH))
    args = tuple(wide for _ in args) if WIDTH in (fields.get("in_features"), fields.get("num_features")) else args
    call |= {"inputs_kv": wide} if "in_kv_features" in fields else {}
    return args, call | ({"encoded": wide} if "encoded_size" in fields else {})


def make(name: str, fields: dict, **streams: int):
    cls = getattr(te_nnx, name)
    rngs = {"rngs": nnx.Rngs(0, **streams)} if "rngs" in inspect.signature(cls.__init__).parameters else {}
    return cls(**{**BASE.get(name, {}), **fields}, **rngs)


def parameters(model: nnx.Module) -> dict[str, nnx.Param]:
    return {"/".join(map(str, path)): p for path, p in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def program(name: str, fields: dict, recipe=DELAYED) -> linen.Program:
    args, call = arguments(name, {**BASE.get(name, {}), **fields})
    layout = {}

    def run(*args):
        model = make(name, fields, dropout=1, mine=2)
        for path, p in parameters(model).items():
            value = p.get_value()
            layout[path] = (value.shape, str(value.dtype), p.get_metadata("out_sharding", None))
        return model(*args, **call)

    with linen.on_a_mesh(recipe):
        jaxpr, out = jax.make_jaxpr(lambda: linen.differentiated(run, *args), return_shape=True)()
    return linen.Program.of(jaxpr, layout, out)


def test_all_modules_are_here():
    replacing = {"DotGeneral", "Einsum"}  # products inside other modules; see below
    assert linen.modules_of(te_nnx, nnx.Module) == CHANGES.keys() | replacing


@pytest.mark.parametrize("name", CHANGES)
def test_all_fields_are_here(name):
    assert linen.fields_of(getattr(te_nnx, name)) == CHANGES[name].keys() | NO_EFFECT.get(name, {}).keys()


@pytest.mark.parametrize("name, field", linen.every(CHANGES))
def test_a_field_changes_what_is_computed(name, field):
    before, after = linen.before_and_after(program, CHANGES[name][field], name, field)
    assert before != after


@pytest.mark.parametrize("name, field", linen.BY_STAGES)
def test_a_field_changes_what_is_computed_by_stages(name, field):
    before, after = linen.before_and_after(program, CHANGES[name][field], name, field, linen.STAGES)
    assert before != after


@pytest.mark.parametrize("name, field", linen.every(NO_EFFECT))
def test_a_field_that_says_what_is_so_anyway_changes_nothing(name, field):
    before, after = linen.before_and_after(program, NO_EFFECT[name][field], name, field)
    assert before == after


@pytest.mark.parametrize("case", test_fields.LAYERS)
def test_fields_are_handed_on_to_all_inside(case):
    with linen.on_a_mesh():
        model = make("TransformerLayer", test_fields.LAYERS[case], dropout=1, mine=2)
    modules = {path: node for path, node in nnx.iter_graph(model) if type(node).__name__ in CHANGES}
    test_fields.assert_fields_are_handed_on(modules)


# --- Initial values, dtypes, axes, shards ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", test_parameters.INITIAL)
def test_initialisers_are_those_of_exactly_their_parameters(case):
    name, fields, expected = test_parameters.INITIAL[case]
    found = parameters(make(name, fields))
    test_parameters.assert_starts_at({path: p.get_value() for path, p in found.items()}, expected)


@test_parameters.EACH_DTYPE
def test_all_parameters_have_the_dtype_asked_for(name, field, others):
    layout = program(name, {**others, field: jnp.bfloat16}).layout
    assert {dtype for _, dtype, _ in layout.values()} == {"bfloat16"}


@pytest.mark.parametrize("case", test_parameters.AXES)
def test_parameters_carry_the_axes_asked_for(case):
    name, fields, expected = test_parameters.AXES[case]
    found = parameters(make(name, fields))
    assert {path: p.get_metadata("out_sharding") for path, p in found.items()} == expected


@pytest.mark.parametrize("case", test_parameters.SHARDS)
def test_inputs_are_sharded_as_asked_just_before_their_step(case):
    name, fields, expected = test_parameters.SHARDS[case]
    model = make(name, fields)
    with linen.on_a_mesh(None):
        assert test_parameters.shards_and_steps(str(jax.make_jaxpr(model)(X))) == expected


# --- Names, dropout, precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", test_programs.NAMES)
def test_what_had_a_checkpoint_name_has_the_one_asked_for(case):
    test_programs.assert_renames(program, *test_programs.NAMES[case])


@pytest.mark.parametrize("case", test_programs.QUANTIZED)
def test_both_operands_of_each_product_have_the_checkpoint_name_asked_for(case):
    name, others, products = test_programs.QUANTIZED[case]
    found = program(name, {**others, "quantization_checkpoint_name": "mine"})
    assert test_programs.names_in_fp8(found.text) == ["mine"] * 2 * products


@pytest.mark.parametrize("case, cls", [("dot_general", te_nnx.DotGeneral), ("einsum", te_nnx.Einsum)])
def test_operands_of_another_modules_product_have_the_checkpoint_name_asked_for(case, cls):
    _, args = test_programs.PRODUCTS[case]
    run = lambda *args: cls(quantization_recipe=DELAYED, quantization_checkpoint_name="mine")(*args)
    assert test_programs.names_in_fp8(jax.make_jaxpr(lambda: linen.differentiated(run, *args))()) == ["mine", "mine"]


@test_programs.DIMS
def test_intermediate_dropout_of_a_layer_shares_its_pattern_over_given_axes(dims):
    model = make("TransformerLayer", {**test_programs.ONES, "intermediate_dropout_dims": dims}, dropout=1)
    test_programs.assert_shares_its_pattern(np.asarray(model(X) == 0), dims)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("case", test_programs.LOGITS)
def test_logits_of_bf16_are_f32_whether_asked_for_or_not(case, asked):
    name, field = test_programs.LOGITS[case]
    args, call = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arguments(name, BASE[name]))
    with test_programs.IN_PLAIN_JAX:
        model = make(name, {field: asked})
        assert test_programs.precisions_of_powers(jax.make_jaxpr(lambda: model(*args, **call))()) == {"f32"}


@pytest.mark.parametrize("rate", ["hidden_dropout", "attention_dropout", "intermediate_dropout", "drop_path"])
def test_dropout_of_a_layer_draws_from_the_stream_asked_for_and_no_other(rate):
    fields = {**BASE["TransformerLayer"], rate: 0.5, "dropout_rng_name": "mine"}
    run = lambda seed: te_nnx.TransformerLayer(**fields, rngs=nnx.Rngs(params=0, mine=seed))(X)
    one, again, other = (str(jax.make_jaxpr(lambda seed=seed: run(seed))()) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize("name, field, given, here", test_fields.SPELLED[:-1])
def test_names_may_be_spelled_as_nvidias_are(name, field, given, here):
    module = getattr(te_nnx, name)(**BASE.get(name, {}) | {field: given}, rngs=nnx.Rngs(0))
    assert getattr(module, field) == here


@pytest.mark.parametrize("name, field", test_fields.NUMBERS)
def test_numbers_of_numpy_are_pythons(name, field):
    module = getattr(te_nnx, name)(**BASE.get(name, {}) | {field: np.float64(0.5)}, rngs=nnx.Rngs(0))
    assert type(getattr(module, field)) is float
