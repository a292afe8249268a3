"""explain tells what runs: every kernel and product of a step, how often, in which precision, and where."""

import importlib
import re
from types import SimpleNamespace

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.decisions import decided
from transformer_engine_jax.explain import _compiled, _products
from transformer_engine_jax.explanation import _short, _size
from transformer_engine_jax.handlers import HANDLERS
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.attention import backends
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.gemm import gemm
from transformer_engine_jax.ops.layernorm_dense import layernorm_dense
from transformer_engine_jax.ops.layernorm_projections import layernorm_projections
from transformer_engine_jax.ops.quantize import quantize

X = jax.ShapeDtypeStruct((2, 16, 32), jnp.bfloat16)


def rows_of(explanation, name: str):
    return [row for row in explanation.rows if row.name == name]


def gradients(module):
    """(step, its abstract arguments): all gradients of a module and its next state."""
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    state, params = flax.core.pop(flax.core.meta.unbox(variables), "params")

    def step(params, state, x):
        def loss(params, state):
            y = module.apply({"params": params, **state}, x)
            return jnp.sum(jax.tree.leaves(y)[0].astype(jnp.float32))

        return jax.value_and_grad(loss, argnums=(0, 1))(params, state)

    return step, (params, state, X)


@pytest.fixture(scope="module")
def fp8_mlp():
    with te.fp8_autocast(True, recipe.DelayedScaling()):
        step, arguments = gradients(te_flax.LayerNormMLP(intermediate_dim=48))
        return te.explain(step, *arguments, compile=True)


def test_products_of_a_step_with_their_sizes_and_formats(fp8_mlp):
    found = [(r.phase, *(r.sizes[a] for a in "mnk"), r.dtypes) for r in rows_of(fp8_mlp, "gemm")]
    forward, dgrad, wgrad = "a=e4m3 b=e4m3 -> d=bf16", "a=e5m2 b=e4m3 -> d=bf16", "a=e4m3 b=e5m2 -> d=f32"
    assert sorted(found) == sorted([
        ("forward", 32, 48, 32, forward), ("forward", 32, 32, 48, forward),
        ("backward", 32, 48, 32, dgrad), ("backward", 48, 32, 32, wgrad),
        ("backward", 32, 32, 48, dgrad), ("backward", 32, 48, 32, wgrad),
    ])  # fmt: skip


PRODUCTS = {
    "dense": lambda x, k, q: dense(x, k, quantizers=q),
    "layernorm_dense": lambda x, k, q: layernorm_dense(x, jnp.ones(32), None, k, quantizers=q),
    "layernorm_projections": lambda x, k, q: layernorm_projections(x, jnp.ones(32), None, [k], [None], quantizers=[q])[
        0
    ][0],
}


@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize("split", ["fprop", "dgrad", "wgrad"])
def test_each_product_adds_up_as_the_recipe_says_of_it(op, split):
    params = {f"fp8_gemm_{kind}": recipe.MMParams(kind == split) for kind in ("fprop", "dgrad", "wgrad")}
    rec = recipe.DelayedScaling(**params)

    def loss(x, kernel, state):
        return PRODUCTS[op](x, kernel, te.gemm_quantizers(state, rec)).astype(jnp.float32).sum()

    arguments = X, jnp.ones((32, 48)), te.GemmState.create(rec)
    rows = rows_of(te.explain(jax.value_and_grad(loss, argnums=(0, 1)), *arguments), "gemm")
    kind = lambda row: "fprop" if row.phase == "forward" else "dgrad" if row.sizes["k"] == 48 else "wgrad"
    found = {kind(row): row.options["split_accumulator"] for row in rows}
    assert len(rows) == 3 and found == {kind: kind == split for kind in ("fprop", "dgrad", "wgrad")}


def test_casts_say_where_they_are_fused(fp8_mlp):
    (norm,) = rows_of(fp8_mlp, "layernorm_fwd")
    assert (norm.sizes, norm.phase, norm.count) == ({"tokens": 32, "k": 32}, "forward", 1)
    assert norm.dtypes.endswith("-> y=e4m3 y_t=e4m3 mean=f32 rstd=f32 report=f32") and norm.options["epsilon"] == 1e-6
    # x, y, y_t; gamma, beta, mean, rstd; the state of the GEMM, the report and scale_inv
    assert norm.bytes == 32 * 32 * (2 + 1 + 1) + 4 * 32 * 4 + (3 * 18 + 512 + 1) * 4
    (curve,) = rows_of(fp8_mlp, "activation_bwd")
    assert curve.phase == "backward" and "dz=e5m2 dz_t=e5m2" in curve.dtypes
    assert curve.options == {"activation": "gelu", "scale_from": "states", "tensor": 2}
    platform = {"cpu": "C++", "gpu": "CUDA"}[jax.default_backend()]
    assert norm.runs == platform
    assert norm.where.endswith("LayerNormMLP") and norm.source.split(":")[0] == __file__


def test_the_table_and_the_memory(fp8_mlp):
    text = str(fp8_mlp)
    assert "m=32 k=32 n=48" in text and "a=e5m2 b=e4m3 -> d=bf16" in text and "no collectives" in text
    platform = {"cpu": " C++ ", "gpu": " CUDA "}[jax.default_backend()]
    assert len({line.index(platform) for line in text.splitlines() if platform in line}) == 1  # aligned
    assert "m=48 k=32 n=32" in text and "k_axes=2 split_accumulator\n" in text and "split_accumulator=" not in text
    flop = 6 * 2 * 32 * 32 * 48
    assert f"in all: 6 products in FP8 of {flop / 1e3:.1f} kFLOP, 0 products in other precisions of 0 FLOP, " in text
    assert f"{sum(not row.is_product for row in fp8_mlp.rows)} other calls that move " in text
    assert sum(row.flop for row in fp8_mlp.rows) == flop and all(row.in_fp8 for row in fp8_mlp.rows if row.flop)
    assert fp8_mlp.compiled.temp_bytes > 0 and fp8_mlp.compiled.argument_bytes > 4 * 2 * 32 * 48


def test_lines_of_the_table():
    def twice(x):
        for name in ("first", "second"):
            with jax.named_scope(name):
                x = te.rmsnorm(x, jnp.ones(32), epsilon=1 / 3)
        return x

    line = str(te.explain(twice, X)).splitlines()[2]
    assert line.startswith("2 ") and re.search("  first and 1 more +epsilon=0.3333$", line)
    line = str(te.explain(lambda x: jax.vjp(lambda x: te.rmsnorm(x, jnp.ones(32)), x)[0], X)).splitlines()[2]
    assert re.search(rf"  {re.escape(__file__)}:\d+( |$)", line), "without a scope the caller's line"
    scanned = te.explain(lambda x: jax.lax.scan(lambda x, _: (te.rmsnorm(x, jnp.ones(32)), None), x, length=3)[0], X)
    assert str(scanned).endswith(f" 3 other calls that move {_size(3 * scanned.rows[0].bytes)}")
    assert [_size(n) for n in (1023, 3 << 10, 5 << 20, 3 << 29)] == ["1023 B", "3.0 KiB", "5.0 MiB", "1.5 GiB"]
    names = {jnp.bfloat16: "bf16", jnp.float8_e5m2: "e5m2", jnp.int32: "i32", jnp.bool_: "bool"}
    assert {dtype: _short(dtype) for dtype in names} == names


def test_a_gpus_algorithms_are_told_where_it_is_compiled(fp8_mlp):
    products = fp8_mlp.compiled.products
    if jax.default_backend() == "cpu":
        assert products == ()
        return
    assert sum(p.count for p in products) == 6
    assert {p.name.split(" -> ")[0] for p in products} >= {"m=32 n=48 k=32 f8_e4m3fn x f8_e4m3fn"}
    assert all(p.algorithm.startswith(("cuBLASLt's algorithm ", "our kernel: ")) for p in products)
    assert f" x {products[0].name} by {products[0].algorithm}" in str(fp8_mlp)


def test_calls_of_te_gemm_are_found_in_a_compiled_program(monkeypatch):
    call = (
        '%ffi_call.{0} = (bf16[256,64], u8[33554688]) custom-call(%a, %b), custom_call_target="te_gemm", '
        "api_version=API_VERSION_TYPED_FFI, backend_config={{buffers = dense<[16, 2, 256, {1}]> : tensor<4xi64>, "
        'c_scale = 1.000000e+00 : f32, k_axes = 1 : i64, k_first = "", split_accumulator = true}}'
    )
    answers = {256: "m=256 f8 x f8: cuBLASLt's algorithm 2: 0.5 ms", 512: ""}  # the second has none: an empty product
    module = importlib.import_module("transformer_engine_jax.explain")  # te.explain is the function
    monkeypatch.setattr(module, "gemm_algorithm", lambda b, k_axes, split, k_first: answers[b[-1]] if split else "")
    text = "\n".join(call.format(i, k) for i, k in enumerate((256, 512, 256)))
    (product,) = _products(text)
    assert product == ("m=256 f8 x f8", 2, "cuBLASLt's algorithm 2: 0.5 ms")


def test_high_precision_products_and_references_are_told_apart():
    w = jnp.zeros((32, 8), jnp.bfloat16)
    (product,) = rows_of(te.explain(te.dense, X, w), "dot_general")
    assert (product.sizes, product.runs) == ({"m": 32, "n": 8, "k": 32}, "XLA")
    assert product.dtypes == "a=bf16 b=bf16 -> d=bf16"
    batched = te.explain(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), jnp.zeros((3, 4, 5)), jnp.zeros((3, 6, 5)))
    assert batched.rows[0].sizes == {"m": 4, "n": 6, "k": 5, "batch": 3}
    highest = te.explain(lambda a: jnp.dot(a, a, precision="highest"), jnp.ones((4, 4)))
    assert highest.rows[0].options == {"precision": "HIGHEST"}
    of_nothing = te.explain(te.dense, jnp.ones((0, 4)), jnp.ones((4, 3)))
    assert [b.name for b in of_nothing.rows[0].operands + of_nothing.rows[0].results] == ["b"]
    with testing.reference_kernels():
        (norm,) = te.explain(te.rmsnorm, X, jnp.ones(32)).rows
    assert norm.runs == "plain JAX: references are asked for"


def test_calls_are_counted_through_loops_and_recomputation():
    def layer(x, w):
        return te.rmsnorm(x, w)

    def looped(x, ws):
        x = jax.lax.scan(lambda x, w: (jax.lax.scan(lambda x, _: (layer(x, w), None), x, length=3)[0], None), x, ws)[0]
        x = jax.lax.cond(x[0, 0, 0] > 0, lambda x: layer(x, ws[0]), lambda x: x, x)
        inner = lambda x: jax.lax.cond(x[0, 0, 1] > 0, lambda x: x, lambda x: layer(x, ws[0]), x)
        return jax.lax.while_loop(lambda x: x[0, 0, 0] > 1, inner, x)

    rows = te.explain(jax.jit(looped), X, jax.ShapeDtypeStruct((5, 32), jnp.float32)).rows
    assert [(r.count, r.why) for r in rows] == [
        (15, ""), (1, "in branch 1 of a cond"), (1, "in each turn of a while loop, in branch 0 of a cond")
    ]  # fmt: skip
    assert str(te.explain(looped, X, jnp.ones((5, 32)))).endswith(" (each branch, and one turn of while loops)")

    def loss(x, w):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(layer(x, w)))(x).astype(jnp.float32))

    rows = te.explain(jax.value_and_grad(loss), X, jnp.ones(32)).rows
    assert [(r.name, r.phase) for r in rows] == [
        ("rmsnorm_fwd", "forward"), ("rmsnorm_fwd", "recomputed"), ("rmsnorm_bwd", "backward")
    ]  # fmt: skip


@pytest.mark.parametrize("compile", [False, True])
def test_functions_that_nnx_jits(compile):
    with te.autocast(True):
        model = te_nnx.DenseGeneral(32, 48, rngs=nnx.Rngs(0))
        run = nnx.jit(lambda model, x: nnx.grad(lambda model, x: jnp.sum(model(x)))(model, x))
        explanation = te.explain(run, model, jnp.ones((8, 32)), compile=compile)
    assert len(rows_of(explanation, "gemm")) == 1 and (explanation.compiled is not None) == compile


def test_nnx_models_change_in_a_function_that_is_not_jitted():
    """README's step returns the loss alone: what becomes of the model is a result too."""
    model = te_nnx.LayerNormMLP(32, intermediate_dim=48, intermediate_dropout_rate=0.1, rngs=nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer, x):
        loss_fn = lambda model: jnp.sum(model(x)[0])
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, te_nnx.TRAINED))(model)
        optimizer.update(model, te_nnx.update_state(model, grads))
        return loss

    x, before = jnp.ones((8, 32)), jax.device_get(te_nnx.to_linen(model))
    with te.autocast(True):
        rows = te.explain(step, model, optimizer, x).rows
        assert rows == te.explain(nnx.jit(step), model, optimizer, x).rows
        assert "backward" in {row.phase for row in rows}
        of_model = te.explain(model, x)
        assert len(rows_of(of_model, "gemm")) == 2
        assert {row.where for row in of_model.rows} == {"LayerNormMLP"}
        mine = type("Mine", (te_nnx.LayerNormMLP,), {})(32, intermediate_dim=48, rngs=nnx.Rngs(0))
        assert {row.where for row in te.explain(mine, x).rows} == {"Mine"}
    testing.assert_same_bytes(te_nnx.to_linen(model), before)


def test_what_no_result_depends_on_is_left_out():
    rows = te.explain(lambda x: (te.rmsnorm(x, jnp.ones(32)), x + 1)[1], X).rows
    assert rows == ()
    assert str(te.explain(jnp.sin, X)) == f"on {jax.default_backend()}:\nno kernels, products or collectives"


def test_collectives():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))

    def reduced(x):
        return jax.lax.psum(quantize(x, jnp.float32(1), dtype=jnp.float8_e4m3fn).amax, "data")

    shard_map = jax.shard_map(reduced, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    cast, summed = te.explain(shard_map, X).rows
    assert cast.name == "quantize" and summed.name.startswith("psum") and summed.options == {"over": "data"}

    def moved(x):
        x = jax.lax.ppermute(jax.lax.all_gather(x, "data", tiled=True), "data", [(0, 0)])
        return jax.lax.psum_scatter(jax.lax.all_to_all(x, "data", 0, 0), "data", tiled=True)

    shard_map = jax.shard_map(moved, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    rows = te.explain(shard_map, jax.ShapeDtypeStruct((1, 4), jnp.float32)).rows
    assert [row.name for row in rows] == ["all_gather", "ppermute", "all_to_all", "reduce_scatter"]
    assert all(row.options == {"over": "data"} for row in rows)


def test_collectives_that_the_compiler_inserts():
    mesh = testing.mesh_of((2,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
    (collective,) = te.explain(lambda x: jnp.sum(x, axis=0), x, compile=True).compiled.collectives
    assert (collective.name, collective.count, collective.bytes) == ("all-reduce", 1, 16)


def test_collectives_of_many_arrays_and_of_two_halves():
    """As XLA prints them; what begins one repeats its operand."""
    text = """
  %all-reduce = (f32[4]{0}, f32[4]{0}, f32[4]{0}, f32[4]{0}, f32[4]{0}, /*index=5*/f32[4]{0}) all-reduce(%a, %b, %c)
  %start = (f32[4]{0}, f32[32]{0}) all-gather-start(%p), channel_id=1
  %done = f32[32]{0} all-gather-done(%start)
  %f = f32[4]{0} fusion(%all-reduce), kind=kLoop, calls=%all-reduce.1
"""
    memory = SimpleNamespace(temp_size_in_bytes=0, argument_size_in_bytes=0, output_size_in_bytes=0)
    program = SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: memory)
    found = _compiled(program).collectives
    assert [(c.name, c.count, c.bytes) for c in found] == [("all-reduce", 1, 6 * 16), ("all-gather", 1, 128)]


@pytest.mark.parametrize("ours", [False, True], ids=["JAX's call", "ours"])
def test_attention_of_cudnn(ours, monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    from transformer_engine_jax.ops.attention import cudnn as choice

    monkeypatch.setattr(choice, "_has_handlers", lambda *_: ours)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # nothing is compiled: only what would run is said
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *_: True)

    def step(query, key):
        attend = lambda q: te.dot_product_attention(q, key, key, options=te.Attention(scale=0.5, causal=True))
        out, vjp = jax.vjp(attend, query)
        return out, vjp(out)

    query, key = (jax.ShapeDtypeStruct((2, 128, heads, 64), jnp.bfloat16) for heads in (4, 2))
    forward, backward = te.explain(step, query, key).rows
    said = [(r.phase, r.name[-3:], r.runs.partition(":")[0]) for r in (forward, backward)]
    by = "cuDNN" if not ours else "CUDA" if "te_attention_fwd" in HANDLERS.get("CUDA", {}) else "nothing"
    assert said == [("forward", "fwd", by), ("backward", "bwd", by)]
    sizes = {"batch": 2, "queries": 128, "keys": 128, "heads": 4, "groups": 2, "size": 64}
    if ours:
        sizes = {"b": 2, "q": 128, "g": 2, "r": 2, "d": 64, "k": 128}
    assert forward.sizes == backward.sizes == sizes and forward.options["scale"] == 0.5


def test_choices_of_an_op_and_their_reasons():
    def attend(x):
        with decided("attention", "reference", "cuDNN has no sinks"):
            return jnp.sum(x @ x.T)

    rows = te.explain(jax.value_and_grad(attend), jnp.ones((4, 4))).rows
    assert [row.phase for row in rows] == ["forward", "backward", "backward"]
    assert {row.why for row in rows} == {"attention: reference (cuDNN has no sinks)"}
    assert not any("attention" in row.where for row in rows)


def test_attention_and_products_say_why_something_else_runs(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # nothing is compiled: only what would run is said

    def step(q, k, v, a, b):
        options = te.Attention(scale=1.0, score_mod=lambda scores, *_: jnp.tanh(scores))
        attended = te.dot_product_attention(q, k, v, options=options)
        return attended, gemm(a, b, None, None, None, None, None, dtype=jnp.float32).d

    heads = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.bfloat16)
    for n, k, why in (
        (16, 32, ""),
        (16, 24, "k filled up to a multiple of 16"),
        (24, 32, "in bf16: FP8 tensor cores need n in multiples of 16"),
    ):
        a, b = (jax.ShapeDtypeStruct((rows, k), jnp.float8_e4m3fn) for rows in (8, n))
        with pytest.warns(UserWarning, match="score_mod"):
            backends._warn.cache_clear()
            *attention, product = te.explain(step, heads, heads, heads, a, b).rows
        assert product.why == why and product.in_fp8 == (not why.startswith("in bf16"))
        assert {r.why for r in attention} == {"attention: reference (JAX's cuDNN call has no score_mod)"}
        with testing.reference_kernels():
            *_, product = te.explain(step, heads, heads, heads, a, b).rows
        assert product.why == ""


def test_a_new_kernel_shows_up_by_itself():
    @kernel("... k, k -> ... k")
    def scale_columns(x, factor, *, power: int = 1) -> jax.Array:
        return x * factor**power

    def step(x, factor):
        with testing.reference_kernels():
            return scale_columns(x, factor, power=2)

    (row,) = te.explain(step, jnp.ones((2, 3, 5)), jnp.ones(5)).rows
    assert (row.name, row.sizes, row.options) == ("scale_columns", {"tokens": 6, "k": 5}, {"power": 2})
    (row,) = te.explain(scale_columns, jnp.ones((2, 3)), jnp.ones(3)).rows
    assert row.runs.startswith("nothing: te_scale_columns has no")


def test_a_linen_model_is_told_to_give_its_apply():
    with pytest.raises(TypeError, match="got a Linen module, which has no variables: give its `apply`"):
        te.explain(te_flax.DenseGeneral(8), {}, X)
