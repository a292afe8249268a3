"""Each benchmark runs at a tiny size, its rows hold what it is for, and README says what the committed results say."""

import functools
import json
import math
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import transformer_engine_jax as te
from benchmarks import __main__ as command
from benchmarks import (
    attention,
    compare,
    floor,
    gemm,
    generate,
    kernels,
    layer,
    memory,
    peers,
    precision,
    readme,
    report,
    shapes,
    sharded,
    stack,
    timing,
)
from benchmarks.shapes import SHAPES, products
from examples.gpt.data import load
from transformer_engine_jax.flax import STATE_COLLECTION
from transformer_engine_jax.kernel import use_references
from transformer_engine_jax.ops.quantize import amax


def rows_of(tmp_path, *argv) -> list[dict]:
    """What `python -m benchmarks <argv> --json` writes."""
    path = tmp_path / "rows.json"
    command.main([*argv, "--json", str(path)])
    document = json.loads(path.read_text())
    assert document["benchmark"] == argv[0] and document["device"] and document["versions"]["jax"]
    assert readme.section(document).count("\n| ") >= 2  # README has a table for it
    return document["rows"]


QUICK = ("--rounds", "2", "--calls", "1")


def test_layer_has_ratios_to_the_first_contender_and_to_the_floor(tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "products", lambda shape: products(shape)[:2])
    monkeypatch.setattr(floor, "products", lambda shape: products(shape)[:2])
    rows = rows_of(
        tmp_path, "layer", "--config", "tiny-llama", "--against", "flax,te-delayed", "nvidia-bf16",
        "--copy", "64", "64", *QUICK, "--turn", "0.031",
    )  # fmt: skip
    flax, ours, nvidia = rows
    assert [r["contender"] for r in rows] == ["flax", "te-delayed", "nvidia-bf16"]
    assert "transformer_engine" in nvidia["skipped"]
    assert flax["speedup"] == 1 and math.isclose(ours["speedup"], flax["ms"] / ours["ms"], rel_tol=1e-4)
    for row in (flax, ours):
        for kind in ("floor", "sustained_floor"):  # of short turns, and of turns as long as the layer's
            assert math.isclose(sum(row[kind].values()), row[f"{kind}_ms"], rel_tol=1e-4)
            assert math.isclose(row["ms"] / row[f"{kind}_ms"], row[f"of_{kind}"], rel_tol=1e-3)
        assert math.isclose(row["tflop_per_s"] * row["ms"] * 1e9, SHAPES["tiny-llama"].flop, rel_tol=1e-2)
    assert flax["floor"]["gemms"] != ours["floor"]["gemms"]  # of bf16 and of FP8 products


def test_nvidias_package_takes_our_name_for_its_import_alone(tmp_path, monkeypatch):
    package = tmp_path / "transformer_engine"
    (package / "jax").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "jax" / "__init__.py").write_text(
        "import sys, types\n"
        "sys.modules['transformer_engine_jax'] = types.ModuleType('transformer_engine_jax')\n"
        "sys.modules['transformer_engine_jax'].compiled = True\n"
        "from transformer_engine_jax import compiled\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert peers.nvidias_package().jax.compiled and sys.modules["transformer_engine_jax"] is te
    finally:
        for name in ("transformer_engine", "transformer_engine.jax"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError, AssertionError])
def test_a_peer_that_fails_is_skipped_with_a_word_and_ours_is_not(error):
    def fails():
        raise error("no such library\nand more")

    makers = {"works": lambda: lambda: jnp.ones(()), "fails": fails}
    ready, failed = timing.without_failures(makers, peer=lambda name: name == "fails")
    assert list(ready) == ["works"] and failed == {"fails": "no such library"}
    with pytest.raises(error):
        timing.without_failures(makers, peer=lambda name: False)


def test_the_fp8_of_flax_is_products_of_fp8():
    step = layer.Step("flax-fp8", SHAPES["tiny"])
    gradients = jax.jit(layer.gradients(peers.CONTENDERS["flax-fp8"](SHAPES["tiny"]).layer))
    code = gradients.lower(step.params, step.state, step.x, step.dy).as_text()
    products = [line for line in code.splitlines() if "stablehlo.dot_general" in line]
    assert sum("f8E" in line for line in products) == 3 * 4, products  # of four dense layers; attention's are not


def test_every_contender_computes_the_same_layer():
    """The peers' layers and ours have the same kernels, so that the same work is timed."""
    for config in ("tiny", "tiny-llama"):
        shape = SHAPES[config]
        x = jax.ShapeDtypeStruct((shape.batch, shape.seq, shape.hidden), jnp.bfloat16)
        sizes = {
            name: sum(
                leaf.size
                for leaf in jax.tree.leaves(
                    nn.unbox(jax.eval_shape(peers.CONTENDERS[name](shape).layer.init, jax.random.key(0), x))["params"]
                )
                if leaf.ndim > 1 and leaf.size >= shape.hidden**2
            )
            for name in ("flax", "te-bf16")
        }
        assert set(sizes.values()) == {shape.parameters}


def parameters_of_flax(shape: shapes.Shape, ours) -> dict:
    """Our layer's parameters as the Flax peer has them."""
    attention, mlp = ours["attention"], ours["mlp"]
    by_head = lambda count: lambda x: x.reshape(*x.shape[:-1], count, shape.head)
    same = lambda x: x

    def norm(p):
        return {name: p[ours] for ours, name in (("scale", "scale"), ("ln_bias", "bias")) if ours in p}

    def product(p, kernel, bias, prefix=""):
        biases = {"bias": bias(p[f"{prefix}bias"])} if f"{prefix}bias" in p else {}
        return {"kernel": kernel(p[f"{prefix}kernel"])} | biases

    kind = "RMSNorm" if shape.rmsnorm else "LayerNorm"
    found = {f"{kind}_0": norm(attention["qkv" if "qkv" in attention else "query"]), f"{kind}_1": norm(mlp)}
    for name, here, count in (("qkv", "qkv", shape.heads), ("q", "query", shape.heads), ("kv", "kv", shape.groups)):
        if here in attention:
            found[name] = product(attention[here], *2 * [by_head(count)])
    found["out"] = product(attention["out"], lambda kernel: kernel.reshape(shape.heads, shape.head, -1), same)
    for i, name in enumerate(("gate", "up") if shape.gated else ("up",)):
        found[name] = product(mlp, lambda kernel, i=i: kernel[:, i], lambda bias, i=i: bias[i], "wi_")
    return found | {"down": product(mlp, same, same, "wo_")}


@pytest.mark.parametrize("config", ["tiny", "tiny-llama", "tiny-packed"])
def test_the_peers_layer_is_ours(config):
    """In bf16: output, and gradients of the input and of all parameters."""
    shape = SHAPES[config]
    size = shape.batch, shape.seq, shape.hidden
    x, dy = (jax.random.normal(jax.random.key(i), size, jnp.bfloat16) for i in (0, 1))
    ours, theirs = (peers.CONTENDERS[name](shape).layer for name in ("te-bf16", "flax"))
    params = nn.unbox(ours.init({"params": jax.random.key(2), "dropout": jax.random.key(3)}, x))["params"]
    params = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(jax.random.key(p.size), p.shape), params)
    of_flax = lambda tree: parameters_of_flax(shape, tree.get("TransformerLayer_0", tree))
    y, dparams, _, dx = jax.jit(layer.gradients(ours))(params, {}, x, dy)
    y_, dparams_, _, dx_ = jax.jit(layer.gradients(theirs))(of_flax(params), {}, x, dy)
    for got, expected in ((y, y_), (dx, dx_), (of_flax(dparams), dparams_)):
        assert compare.off(got, expected) < 2e-2


def test_gemm_has_all_products_and_their_best(tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "products", lambda shape: [p for p in products(shape) if p.name.startswith("fc1")])
    rows = rows_of(tmp_path, "gemm", "--config", "tiny-llama", *QUICK)
    assert len(rows) == 3 * len(gemm.CONTENDERS)
    assert all(r["off"] < 2**-8 for r in rows)  # bf16 results, of exact products
    fprop, dgrad, wgrad = (r for r in rows if r["contender"] == "fp8-fast")
    assert (fprop["m"], fprop["n"], fprop["k"]) == (128, 512, 128)  # both halves of swiglu in one
    assert (dgrad["m"], dgrad["n"], dgrad["k"]) == (128, 128, 512)
    assert (wgrad["m"], wgrad["n"], wgrad["k"]) == (128, 512, 128)
    for kind in ("fp8", "bf16"):
        best = [r["of_best"] for r in rows if r["product"] == "fc1 fprop" and gemm.precision(r["contender"]) == kind]
        assert max(best) == 1


def test_attention_names_the_backend_and_skips_what_is_not_there(tmp_path):
    rows = rows_of(
        tmp_path, "attention", "--config", "tiny-llama", "--against", "te,te-sinks,te-fp8,jax-cudnn,jax-xla", *QUICK
    )
    by = {(r["pass"], r["contender"]): r for r in rows}
    assert by["forward", "te"]["backend"] in ("cudnn", "reference") and "ms" in by["forward+backward", "jax-xla"]
    assert by["forward", "te-fp8"]["backend"] == "fp8" and 1e-2 < by["forward", "te-fp8"]["off"] < 8.1e-2
    assert all(row["off"] < 2e-2 for row in rows if "skipped" not in row and row["contender"] != "te-fp8")
    if by["forward", "te"]["backend"] == "reference":
        assert "skipped" in by["forward", "jax-cudnn"]
    assert by["forward", "te-sinks"]["backend"] == by["forward", "te"]["backend"]
    *inputs, sinks, _ = attention._operands(shapes.SHAPES["tiny-llama"], sinks=True)
    with_sinks, without = (attention._reference(shapes.SHAPES["tiny-llama"], *inputs, s) for s in (sinks, None))
    assert compare.off(with_sinks, without) > 0.1


def test_kernels_count_each_operand_and_result_once(tmp_path):
    rows = rows_of(
        tmp_path, "kernels", "--hidden", "128", "7", "--rows", "24", "--only", "gelu backward -> FP8", *QUICK
    )
    plain, dbias, odd, _ = rows
    # dy and z in bf16, a scale; dz in FP8 both ways, an amax
    assert plain["bytes"] == 24 * 128 * (2 + 2 + 1 + 1) + 4 + 4
    assert dbias["bytes"] == plain["bytes"] + 4 * 128
    assert odd["hidden"] == 7 and math.isclose(odd["of_copy"], odd["tb_per_s"] / odd["copy_tb_per_s"], rel_tol=1e-3)


def test_kernels_are_compared_with_their_references(tmp_path, monkeypatch):
    compared = tmp_path / "compared.json"
    command.main(["kernels", "--no-time", "--rows", "24", "--hidden", "32", "--json", str(compared)])
    rows = json.loads(compared.read_text())["rows"]
    assert len(rows) == len(list(kernels.cases(24, 32)))
    assert all(row["off"] <= kernels.MOST_OFF and "ms" not in row for row in rows)

    def wrong(x):  # in one value of 24 x 32, where it is not the reference
        y = amax(x) + x
        return y if use_references.value else y.at[3, 5].multiply(2.0)

    monkeypatch.setattr(kernels, "cases", lambda rows, hidden: [("wrong", wrong, [((rows, hidden), jnp.float32)])])
    with pytest.raises(AssertionError, match="wrong at 24 x 32: .* off from its reference, expected at most 2.0e-03"):
        command.main(["kernels", "--no-time", "--rows", "24", "--hidden", "32"])


def test_precision_has_all_of_each_size(tmp_path):
    sizes = "--tokens", "16", "--features", "32x32", "32x64"
    rows = rows_of(tmp_path, "precision", *sizes, "--kernels", "bfloat16", "float32", *QUICK)
    sizes = [(16, 32, 32), (16, 32, 64), (16, 64, 32)]
    assert [(r["m"], r["k"], r["n"]) for r in rows] == 2 * sizes
    assert [r["kernel"] for r in rows] == 3 * ["bfloat16"] + 3 * ["float32"]
    assert all(r[f"{name}_ms"] > 0 for r in rows for name in precision.RECIPES)


def test_accumulation_of_short_sums(tmp_path):
    rows = rows_of(tmp_path, "accumulation", "--lengths", "64", "--size", "32")
    assert [row["contender"] for row in rows] == 3 * ["split", "fast"]
    most = 1e-6 if jax.default_backend() == "cpu" else 1e-3  # a GPU's tensor cores cut off some bits
    assert all(row["off"] < most and abs(row["lost"]) < most for row in rows)
    assert math.isclose(compare.off([jnp.float32([3.0, 4.0])], [jnp.float32([3.0, 3.0])]), 1 / 18**0.5, rel_tol=1e-6)
    assert compare.off(jnp.zeros(3), jnp.zeros(3)) == 0 and compare.off(jnp.ones(3), jnp.zeros(3)) == math.inf


def test_all_kernels_of_a_layer_are_among_the_cases():
    names = {name for name, _, _ in kernels.cases(256, 128)}
    for kind in ("layernorm", "rmsnorm", "gelu", "silu_linear"):
        assert {f"{kind} forward", f"{kind} forward -> FP8 both ways", f"{kind} backward"} <= names


def test_train_compares_losses_on_the_same_bytes(tmp_path):
    data = tmp_path / "data.txt"
    data.write_bytes(b"a tiny corpus of bytes, again and again. " * 60)
    rows = rows_of(
        tmp_path, "train", "--config", "tiny-llama", "--layers", "1", "--steps", "12", "--seq", "32", "--lr", "3e-3",
        "--against", "te-bf16,te-delayed", "--data", str(data),
    )  # fmt: skip
    bf16, delayed = rows
    assert len(bf16["losses"]) == 12 and bf16["losses"][-1] < bf16["losses"][0]
    assert bf16["difference"] == 0 and 0 < abs(delayed["difference"]) < 0.05  # other numbers, the same training
    assert bf16["unigram_entropy"] == pytest.approx(load(str(data), 32).unigram_entropy, rel=1e-4)
    assert bf16["tokens_per_s"] > 0 and bf16["seq"] == 32
    assert math.isclose(bf16["tokens_per_s"] * bf16["ms"], 1e3 * bf16["batch"] * bf16["seq"], rel_tol=1e-2)
    ends = [row["final_loss"] for row in rows]
    assert math.isclose(delayed["difference"], ends[1] / ends[0] - 1, rel_tol=0.1, abs_tol=1e-4)


def test_stacks_of_all_kinds_are_the_same(tmp_path):
    rows = rows_of(tmp_path, "stack", "--config", "tiny", "--layers", "2", "--against", "flax,te-delayed", *QUICK)
    assert [(row["kind"], row["contender"]) for row in rows] == [
        (kind, contender) for kind in stack.KINDS for contender in ("flax", "te-delayed")
    ]
    assert all(row["ms"] > 0 and row["temp_gib"] > 0 for row in rows)
    first = {row["kind"]: row["ms"] for row in rows if row["contender"] == "flax"}
    assert all(math.isclose(row["speedup"], first[row["kind"]] / row["ms"], rel_tol=1e-3) for row in rows)
    steps = {name: stack.Step("te-delayed", SHAPES["tiny"], 2, kind) for name, kind in stack.KINDS.items()}
    one = lambda tree, i: jax.tree.map(lambda a: a[i], tree["layers"])
    by_layer = lambda tree: {f"layer_{i}": one(tree, i) for i in range(2)}
    stacked = lambda layers: {"layers": jax.tree.map(lambda *a: jax.numpy.stack(a), *layers.values())}
    unrolled = steps["unrolled"]
    unrolled.params = by_layer(steps["scanned"].params)
    unrolled.state = {STATE_COLLECTION: by_layer(steps["scanned"].state[STATE_COLLECTION])}
    _, expected = unrolled()
    expected = expected, stacked(unrolled.state[STATE_COLLECTION])
    for name in steps.keys() - {"unrolled"}:
        _, dx = steps[name]()
        got = dx, steps[name].state[STATE_COLLECTION]
        for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            assert float(compare.off(one, other)) < 1e-2, name  # XLA may fuse what is between kernels otherwise


@pytest.mark.parametrize("config", ["tiny", "tiny-llama"])
@pytest.mark.parametrize("tokens", ["1", "8"])
def test_generating_is_that_of_flax(tmp_path, config, tokens):
    size = "--size", "2", tokens, "16"
    rows = rows_of(tmp_path, "generate", "--config", config, "--layers", "2", "--against", "flax,te", *size, *QUICK)
    assert [row["contender"] for row in rows] == list(generate.CONTENDERS)
    assert [row.get("off", 0) < bound for row, bound in zip(rows, (1e-9, 0.02, 0.15, 0.15))] == [True] * 4
    assert all(row["ms"] > 0 and (row["batch"], row["cache"]) == (2, 16) for row in rows)


@pytest.mark.parametrize("axes, contenders", [("auto", ["flax", "te-delayed"]), ("explicit", ["flax", "te-bf16"])])
def test_sharded_is_the_layer(axes, contenders, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "devices", functools.partial(jax.devices, "cpu"))  # several, also where one GPU is
    args = ["--config", "tiny-llama", "--devices", "2", "--against", *contenders, "--axes", axes]
    rows = rows_of(tmp_path, "sharded", *args, *QUICK)
    assert [row["layout"] for row in rows] == len(contenders) * ["one device", *sharded.LAYOUTS]
    lacks = [row["layout"] for row in rows if "skipped" in row]
    assert lacks == (list(sharded.LAYOUTS) if axes == "explicit" else ["context, gathered", "context, ring"])
    for row in rows:
        if "skipped" in row:
            assert row["contender"] == "flax" and "ms" not in row
            continue
        assert row["speedup"] > 0 and ("output_off" in row) == (row["devices"] == 2)
        assert ("speedup_over_first" in row) == (row["layout"] not in lacks)
        # bf16: products are rounded before they are summed over devices; FP8: the next cast then flips, here and there.
        bound = 0.1 if row["contender"] == "te-delayed" else 2e-2
        assert row["devices"] == 1 or max(row["output_off"], row["gradients_off"]) < bound, row
    with pytest.raises(SystemExit, match="expected 2 devices or more, got 1"):
        command.main(["sharded", "--config", "tiny", "--devices", "1"])


def test_layouts_that_do_not_divide_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "devices", functools.partial(jax.devices, "cpu"))
    args = ["--config", "tiny-llama", "--devices", "3", "--against", "te-bf16", *QUICK]
    one, *rows = rows_of(tmp_path, "sharded", *args)
    assert one["ms"] > 0 and [row["layout"] for row in rows if "skipped" not in row] == []
    shape = SHAPES["tiny-llama"]
    assert rows[0]["skipped"] == f"expected multiples of 3, got batch {shape.batch}"
    assert rows[-1]["skipped"] == f"expected multiples of 6, got seq {shape.seq}"


def test_memory_is_compiled_for_or_says_what_lacks(tmp_path):
    """With the CUDA plugin and module, on a GPU machine or not, for an H200; here, without."""
    argv = ["memory", "--config", "tiny", "--against", "flax,te-delayed"]
    try:
        memory.mesh_of_h200s()
    except SystemExit as error:
        assert "pip install" in str(error) or "TE_CUDA=ON" in str(error)
        with pytest.raises(SystemExit, match="benchmarks memory: expected "):
            command.main(argv)
        return
    flax, ours = rows_of(tmp_path, *argv)
    for row in (flax, ours):
        assert row["temp_gib"] > 0 and row["argument_gib"] > row["output_gib"] / 2 > 0, row
    assert ours["temp_gib"] != flax["temp_gib"]
    (trained,) = rows_of(tmp_path, *argv[:3], "--against", "te-delayed", "--layers", "2")
    assert trained["argument_gib"] > 2 * 3 * ours["argument_gib"]  # two layers, and two moments for each parameter
    layouts = ["--devices", "2", "--layouts", "data", "fsdp", "context, ring"]
    by_data, by_fsdp, lacking, *ours = rows_of(tmp_path, *argv, *layouts)
    assert by_data["output_gib"] > by_fsdp["output_gib"] > 0 and "no attention of sharded" in lacking["skipped"]
    assert [row["layout"] for row in ours] == ["data", "fsdp", "context, ring"] and ours[0]["temp_gib"] > 0


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: str(page.relative_to(readme.ROOT)))
def test_pages_say_what_the_results_say(page):
    text = page.read_text()
    assert readme.written(text, readme.PAGES[page]) == text, "run `python -m benchmarks readme`"


def test_results_become_tables(tmp_path, monkeypatch):
    ran = {"config": "gpt", "contender": "te-delayed", "ms": 18.44, "spread": 0.02, "speedup": 1.704}
    ran |= {"compile_s": 3, "temp_gib": 1.5}
    report.save(tmp_path / "b.json", "layer", [ran, {"config": "gpt", "contender": "nvidia-bf16", "skipped": "absent"}])
    busy = [{**ran, "ms": 18.1, "speedup": 1.75}, {**ran, "contender": "flax", "ms": 31.4, "speedup": 1}]
    monkeypatch.setattr("sys.argv", ["benchmarks", "layer", "--turn", "0.2"])
    report.save(tmp_path / "a.json", "layer", busy)
    glance, full = (
        readme.written(f"before {readme.BEGIN}old{readme.END} after", render, tmp_path)
        for render in (readme.at_a_glance, readme.all_results)
    )
    for text in (glance, full):
        assert text.startswith("before ") and text.endswith(" after") and "old" not in text
    assert "| gpt | te-delayed | 18.4 | 2% | 1.70 |  |  | 3.0 | 1.50 |" in full and "Not run here: nvidia-bf16." in full
    assert "MLP 16384, 32 heads | 31.4 ms |  |  |  | 18.1 ms, x1.75 |  | 1.50, , 1.50 GiB |" in glance
    assert layer.line(ran | {"tflop_per_s": 1.0, "trace_s": 1.0})


def test_without_its_first_contender_nothing_is_compared(monkeypatch):
    ours = {"te-bf16": types.SimpleNamespace(trace_s=1.0, compile_s=1.0, temp_gib=1.0)}
    monkeypatch.setattr(layer, "interleaved", lambda steps, **_: {"te-bf16": timing.Timing(2.0, 0.1)})
    monkeypatch.setattr(layer, "without_failures", lambda makers, peer: (ours, {"nvidia-bf16": "absent"}))
    args = command.parse(["layer", "--config", "small", "--against", "nvidia-bf16", "te-bf16", "--no-floor"])
    skipped, row = layer.rows(args)
    assert skipped["skipped"] == "absent" and "speedup" not in row
    assert " x" not in layer.line(row)
