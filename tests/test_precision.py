"""Which products run in FP8: those that gain by it on a GPU, all elsewhere, or as the recipe says."""

import itertools
import json
import pathlib

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import precision, recipe, testing
from transformer_engine_jax.precision import BYTE, Product, gain, in_fp8

X = jax.random.normal(jax.random.key(0), (4, 16, 64), jnp.bfloat16)
LAYER = te_flax.TransformerLayer(
    hidden_size=64, mlp_hidden_size=128, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0
)
DELAYED = recipe.DelayedScaling()
MEASURED = sorted((pathlib.Path(__file__).parent.parent / "benchmarks" / "results").glob("precision-*.json"))


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(precision, "platform", lambda: "gpu")


def products(model, variables, x=X) -> list[tuple[str, str]]:
    """(its precision, why) of each product of a model's call; attention's own aside."""
    rows = te.explain(lambda v, x: model.apply(v, x)[0], variables, x).rows
    found = [row for row in rows if row.name in ("gemm", "dot_general") and "attention" not in row.where.split("/")[-1]]
    found = [row for row in found if "core_attention" not in row.where and "precision" in row.why]
    return [(in_precision(row), row.why) for row in found]


def in_precision(row) -> str:
    """Of a product: one in high precision is XLA's or, on one GPU, cuBLASLt's."""
    return "fp8" if row.dtypes.startswith("a=e") else "high"


def large(hidden: int):
    """A layer of this size and its variables and inputs, as shapes."""
    layer = te_flax.LayerNormMLP(intermediate_dim=4 * hidden)
    x = jax.ShapeDtypeStruct((8, 2048, hidden), jnp.bfloat16)
    return layer, jax.eval_shape(layer.init, jax.random.key(0), x), x


def test_small_products_stay_in_high_precision_on_a_gpu(on_gpu):
    with te.autocast(True):
        variables = steps.init(LAYER, X, rec=DELAYED)
        found = products(LAYER, variables)
        assert found and {chosen for chosen, _ in found} == {"high"}
        assert all("precision: high (FP8 would cost about" in why for _, why in found)
        got = steps.step(LAYER.apply, variables, X)
    state, params = flax.core.pop(variables, "params")
    expected = steps.step(LAYER.apply, {"params": params}, X)
    testing.assert_same_bytes(got[0], expected[0])
    testing.assert_close(got[1][0]["params"], expected[1][0]["params"], 1e-6)  # XLA adds up in other programs
    jax.tree.map(np.testing.assert_array_equal, got[1][0][te_flax.STATE_COLLECTION], state[te_flax.STATE_COLLECTION])


def test_large_products_run_in_fp8_on_a_gpu(on_gpu):
    with te.autocast(True):
        found = products(*large(4096))
        assert {chosen for chosen, _ in found} == {"fp8"}
        assert all("precision: fp8 (FP8 saves about" in why for _, why in found)


def test_elsewhere_all_do():
    with te.autocast(True):
        rows = te.explain(lambda v: LAYER.apply(v, X)[0], steps.init(LAYER, X, rec=DELAYED)).rows
        assert sum(row.name == "gemm" for row in rows) == 6 and not any("precision" in row.why for row in rows)


@pytest.mark.parametrize("kind", [recipe.DelayedScaling, recipe.Float8CurrentScaling])
def test_the_recipe_overrides(on_gpu, kind):
    module = te_flax.LayerNormMLP(intermediate_dim=128)
    variables = steps.init(module, X, rec=DELAYED)
    with te.autocast(True, kind(fp8_gemms="all")):
        rows = te.explain(lambda v: module.apply(v, X)[0], variables).rows
        assert [row.name for row in rows if row.name in ("gemm", "dot_general")] == ["gemm", "gemm"]
    asked = []

    def some(m, k, n):
        asked.append((m, k, n))
        return False

    with te.autocast(True, kind(fp8_gemms=some)):
        assert {chosen for chosen, _ in products(module, variables)} == {"high"}
    assert (64, 64, 128) in asked
    with pytest.raises(ValueError, match=r"fp8_gemms: expected 'auto', 'all' or a function of m, k, n, got 'some'"):
        kind(fp8_gemms="some")


def test_calibrating_watches_all(on_gpu):
    with te.autocast(calibrating=True):
        variables = steps.init(LAYER, X, rec=DELAYED)
        _, (grads, _) = steps.step(LAYER.apply, variables, X)
    gemms = jax.tree.leaves(grads[te_flax.STATE_COLLECTION], is_leaf=lambda s: isinstance(s, te.GemmState))
    states = [one for gemm in gemms for one in gemm.states().values()]
    assert len(states) == 12 and all(float(s.amax_history.max()) > 0 for s in states)


def test_nnx_decides_likewise(on_gpu):
    from flax import nnx

    model = te_nnx.TransformerLayer(hidden_size=64, mlp_hidden_size=128, num_attention_heads=4, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    with te.autocast(True):
        rows = te.explain(lambda state: nnx.merge(graph, state)(X, deterministic=True), state).rows
    made = [row for row in rows if row.name in ("gemm", "dot_general")]
    assert {in_precision(row) for row in made} == {"high"} and sum("precision: high" in row.why for row in made) >= 4


def test_sizes_that_are_not_known_yet(on_gpu):
    module, (tokens,) = te_flax.DenseGeneral(features=32), jax.export.symbolic_shape("tokens")
    with te.autocast(True):
        variables = steps.init(module, X[0], rec=DELAYED)
        rows = te.explain(module.apply, variables, jax.ShapeDtypeStruct((tokens, 64), jnp.bfloat16)).rows
    assert [row.why for row in rows if row.name == "gemm"] == ["precision: fp8 (sizes are known at run time only)"]


@pytest.mark.parametrize("kind", [recipe.DelayedScaling, recipe.Float8CurrentScaling])
def test_gain_follows_what_was_measured(kind):
    """Where FP8 or bf16 was at least a twentieth faster, that is what is chosen."""
    rows = [row for path in MEASURED for row in json.loads(path.read_text())["rows"]]
    time = "delayed_ms" if kind is recipe.DelayedScaling else "current_ms"
    rows = [(Product(r["m"], r["k"], r["n"], r["kernel"]), r[time], r["bf16_ms"]) for r in rows]
    clear = [(product, fp8 < bf16) for product, fp8, bf16 in rows if abs(bf16 / fp8 - 1) > 0.05]
    outcomes = {(product.kernel_dtype, faster) for product, faster in clear}
    assert len(clear) > 60 and outcomes == set(itertools.product(("float32", "bfloat16"), (True, False)))
    for product, faster in clear:
        assert (gain([product], kind()) > 0) == faster, product


LLAMA_MLP = [Product(256, 4096, 28672)]


def test_gradients_that_stay_in_f32_cost_where_tokens_are_few():
    """As measured of layers: 256 tokens train faster under delayed scaling where gradients have 16 bits, or in a scan.

    Not under current scaling, which reads kernels twice.
    """
    of_each = lambda rec, **options: gain(LLAMA_MLP, rec, **options)
    rounded, current = dict(rounds_wgrad=True), recipe.Float8CurrentScaling()
    assert of_each(DELAYED) < 0 < of_each(DELAYED, **rounded)
    assert of_each(current) < of_each(current, **rounded) < 0
    in_a_scan = []
    jax.lax.scan(lambda x, _: (x, in_a_scan.append((of_each(DELAYED), of_each(current)))), 0, length=1)
    assert set(in_a_scan) == {(of_each(DELAYED, **rounded), of_each(current, **rounded))}
    in_a_step = []
    step = jax.grad(lambda x: (in_a_step.append(of_each(DELAYED)), x)[1])
    jax.lax.scan(lambda x, _: (step(x), None), 0.0, length=1)
    assert set(in_a_step) == {of_each(DELAYED)}
    of_16_bits = [p._replace(kernel_dtype=jnp.bfloat16) for p in LLAMA_MLP]
    assert gain(of_16_bits, DELAYED) == gain(of_16_bits, DELAYED, **rounded)


def test_autocast_s_rounding_counts(on_gpu):
    for rounds in (False, True):
        with te.autocast(True, round_wgrad=rounds):
            assert in_fp8(LLAMA_MLP)[0] == rounds


@pytest.mark.parametrize("of_kernel", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "module, fields",
    [
        (te_flax.LayerNormDenseGeneral, dict(features=14336)),
        (te_flax.LayerNormMLP, dict(intermediate_dim=14336)),
        (te_flax.MultiHeadAttention, dict(head_dim=128, num_attention_heads=112)),
    ],
    ids=["dense", "mlp", "attention"],
)
def test_a_few_tokens_do_not_pay_for_the_cast_of_a_kernel_of_16_bits(on_gpu, module, fields, of_kernel):
    """256 tokens through 4096 x 14336: a kernel of f32 would be cast in any case."""
    x, layer = jax.ShapeDtypeStruct((1, 256, 4096), jnp.bfloat16), module(**fields, dtype=of_kernel)
    with te.autocast(True, round_wgrad=True):
        found = products(layer, jax.eval_shape(layer.init, jax.random.key(0), x), x)
    assert {chosen for chosen, _ in found} == {"fp8" if of_kernel == jnp.float32 else "high"}


def test_features_that_tensor_cores_do_not_take_stay_in_high_precision(on_gpu):
    module, x = te_flax.LayerNormMLP(intermediate_dim=12000), jax.ShapeDtypeStruct((16384, 4000), jnp.bfloat16)
    odd = te_flax.LayerNormMLP(intermediate_dim=12001)
    with te.autocast(True):
        for model, chosen in ((module, "fp8"), (odd, "high")):
            variables = jax.eval_shape(model.init, jax.random.key(0), x)
            assert {precision for precision, _ in products(model, variables, x)} == {chosen}


def test_tokens_that_need_filling_up_gain_less():
    whole, odd = (gain([Product(tokens, 2048, 2048)], DELAYED) for tokens in (8192, 8191))
    assert 0 < odd < 0.9 * whole


def test_gain_grows_with_size_and_shrinks_with_devices():
    sizes = [Product(8192, n, n) for n in (256, 1024, 4096)]
    gains = [gain([p], DELAYED) for p in sizes]
    assert gains == sorted(gains) and gains[0] < 0 < gains[-1]
    assert gain([sizes[-1]], DELAYED, devices=8) < gain([sizes[-1]], DELAYED) / 8


def test_products_that_read_one_input_cast_it_once_and_each_has_its_launches():
    product = Product(8192, 1536, 1536)
    for rec, bytes_moved in ((DELAYED, 4), (recipe.Float8CurrentScaling(), 6)):
        saved = bytes_moved * BYTE * product.m * product.k
        assert gain([product] * 2, rec) == pytest.approx(2 * gain([product], rec) + saved)


def test_casts_that_a_norm_or_an_activation_has_cost_no_pass():
    product = Product(8192, 1024, 4096)
    for field, size in (("casts_x", 1024), ("casts_dy", 4096)):
        fused = product._replace(**{field: False})
        for rec in (DELAYED, recipe.Float8CurrentScaling()):
            assert gain([fused], rec) == pytest.approx(gain([product], rec) + 4 * BYTE * 8192 * size)


MLP, DENSE, ATTENTION = te_flax.LayerNormMLP, te_flax.LayerNormDenseGeneral, te_flax.MultiHeadAttention


@pytest.mark.parametrize(
    "module, fields, expected",
    [
        (MLP, {}, [(False, False), (False, True)]),
        (MLP, {"enable_layernorm": False}, [(True, False), (False, True)]),
        (DENSE, {}, [(False, True)]),
        (DENSE, {"enable_layernorm": False}, [(True, True)]),
        (DENSE, {"return_layernorm_output": True}, [(True, True)]),
        (ATTENTION, {}, [(False, True), (True, True)]),
        (ATTENTION, {"input_layernorm": False}, [(True, True), (True, True)]),
    ],
)
def test_modules_tell_which_casts_are_passes_of_their_own(module, fields, expected, on_gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(precision, "gain", lambda products, *_: asked.extend(products) or 0.0)
    sizes = {MLP: {"intermediate_dim": 128}, DENSE: {"features": 128}, ATTENTION: {"head_dim": 16}}[module]
    sizes |= {"num_attention_heads": 4} if module is ATTENTION else {}
    model = module(**sizes, **fields)
    with te.autocast(True):
        jax.eval_shape(lambda x: model.init(jax.random.key(0), *[x] * (2 if module is ATTENTION else 1)), X)
    assert [(p.casts_x, p.casts_dy) for p in asked] == expected


def test_products_are_those_of_one_device(on_gpu):
    products = [Product(8192, 1536, 1536)]
    with te.autocast(True):
        assert in_fp8(products)[0]
        with testing.on_mesh(testing.mesh_of((8,), ("data",))):
            assert not in_fp8(products)[0]
