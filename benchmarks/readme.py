"""Writes the tables of README.md and benchmarks/README.md from the committed results in benchmarks/results."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable, Iterable

from benchmarks.shapes import SHAPES, Shape

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- written by `python -m benchmarks readme` -->\n", "<!-- end -->"

# The columns of each benchmark's table: title -> a row's text.
Columns = dict[str, Callable[[dict], str]]
SPEEDUP: Columns = {"speed-up": lambda r: f"{r['speedup']:.2f}" if "speedup" in r else ""}  # none without the first
LAYER: Columns = {
    "config": lambda r: r["config"],
    "layer": lambda r: r["contender"],
    "ms": lambda r: f"{r['ms']:.3g}",
    "spread": lambda r: f"{r['spread']:.0%}",
    **SPEEDUP,
    "of the floor": lambda r: f"{r['of_floor']:.2f}" if "of_floor" in r else "",
    "of the sustained floor": lambda r: f"{r['of_sustained_floor']:.2f}" if "of_sustained_floor" in r else "",
    "compile s": lambda r: f"{r['compile_s']:.1f}",
    "temp GiB": lambda r: f"{r['temp_gib']:.2f}",
}
RATE: Columns = {"ms": lambda r: f"{r['ms']:.3g}", "TFLOP/s": lambda r: f"{r['tflop_per_s']:.0f}"}
OFF: Columns = {"off": lambda r: f"{r['off']:.0e}"}
TABLES: dict[str, tuple[str, Columns]] = {
    "layer": ("One Transformer layer, forward and backward with all gradients", LAYER),
    "gemm": (
        "Matrix products",
        {
            "config": lambda r: r["config"],
            "product": lambda r: r["product"],
            "m x n x k": lambda r: f"{r['m']} x {r['n']} x {r['k']}",
            "by": lambda r: r["contender"],
            **RATE,
            **OFF,
        },
    ),
    "accumulation": (
        "Accumulation of FP8 products, against f32",
        {
            "length": lambda r: str(r["k"]),
            "data": lambda r: r["data"],
            "accumulation": lambda r: r["contender"],
            **OFF,
            "lost": lambda r: f"{r['lost']:.1%}",
        },
    ),
    "precision": (
        "A dense op with all its gradients, casts and states included",
        {
            "m x n x k": lambda r: f"{r['m']} x {r['n']} x {r['k']}",
            "kernel": lambda r: r["kernel"],
            "FP8 ms": lambda r: f"{r['fp8_ms']:.3g}",
            "bf16 ms": lambda r: f"{r['bf16_ms']:.3g}",
            **SPEEDUP,
        },
    ),
    "attention": (
        "Causal attention",
        {
            "config": lambda r: r["config"],
            "pass": lambda r: r["pass"],
            "by": lambda r: f"{r['contender']} ({r['backend']})" if "backend" in r else r["contender"],
            **RATE,
            **OFF,
        },
    ),
    "kernels": (
        "Memory-bound kernels",
        {
            "kernel": lambda r: r["kernel"],
            "size": lambda r: f"{r['rows']} x {r['hidden']}",
            "TB/s": lambda r: f"{r['tb_per_s']:.2f}",
            "of a copy": lambda r: f"{r['of_copy']:.2f}",
            **OFF,
        },
    ),
    "stack": (
        "A stack of layers: forward, backward and an update in place",
        {
            "config": lambda r: f"{r['layers']} of {r['config']}, {r['kind']}",
            "layer": lambda r: r["contender"],
            "ms": lambda r: f"{r['ms']:.3g}",
            "spread": lambda r: f"{r['spread']:.0%}",
            **SPEEDUP,
            "compile s": lambda r: f"{r['compile_s']:.1f}",
            "temp GiB": lambda r: f"{r['temp_gib']:.2f}",
        },
    ),
    "train": (
        "Training on real bytes",
        {
            "config": lambda r: f"{r['layers']} layers of {r['config']}, {r['steps']} steps, seed {r['seed']}",
            "precision": lambda r: r["contender"],
            "tokens/s": lambda r: f"{r['tokens_per_s']:.0f}",
            "TFLOP/s": lambda r: f"{r['tflop_per_s']:.0f}",
            "final loss": lambda r: f"{r['final_loss']:.4f}",
            "difference": lambda r: f"{r['difference']:+.2%}" if "difference" in r else "",
        },
    ),
    "sharded": (
        "One Transformer layer over several GPUs",
        {
            "config": lambda r: r["config"],
            "layer": lambda r: r["contender"],
            "GPUs": lambda r: f"{r['devices']} x {r['layout']}" if r["devices"] > 1 else "1",
            "ms": lambda r: f"{r['ms']:.3g}",
            "of one GPU": lambda r: f"{r['speedup']:.2f}",
            "speed-up": lambda r: f"{r['speedup_over_first']:.2f}" if "speedup_over_first" in r else "",
            "temp GiB": lambda r: f"{r['temp_gib']:.2f}",
        },
    ),
    "memory": (
        "Memory of a step, compiled without a GPU",
        {
            "config": lambda r: f"{r['layers']} layers of {r['config']}, trained" if r.get("layers") else r["config"],
            "layer": lambda r: r["contender"],
            "for": lambda r: r["compiled_for"] + (f", {r['devices']} x {r['layout']}" if r["devices"] > 1 else ""),
            "temp GiB": lambda r: f"{r['temp_gib']:.2f}",
            "in GiB": lambda r: f"{r['argument_gib']:.2f}",
            "out GiB": lambda r: f"{r['output_gib']:.2f}",
        },
    ),
}
# What README shows of the layers.
HEADLINE = ("gpt", "llama", "small", "llama-70b", "llama-packed")
GLANCE = {
    "Flax bf16": "flax",
    "Flax FP8": "flax-fp8",
    "NVIDIA's, delayed FP8": "nvidia-delayed",
    "ours, bf16": "te-bf16",
    "ours, delayed FP8": "te-delayed",
    "ours, current FP8": "te-current",
}


def table(columns: Columns, rows: Iterable[dict]) -> str:
    rows = [[text(row) for text in columns.values()] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [list(columns), ["---"] * len(columns), *rows])


def section(document: dict) -> str:
    """One result: what was run on what, and its rows."""
    _, columns = TABLES[document["benchmark"]]
    done = [row for row in document["rows"] if "skipped" not in row]
    skipped = sorted({row.get("contender") for row in document["rows"]} - {row.get("contender") for row in done})
    versions = document["versions"]
    said = ["cublas", "cudnn-cu13", "jax", "flax", "transformer-engine"]
    libraries = ", ".join(f"{name} {v}" for name in said if (v := versions.get(name) or versions.get(f"nvidia-{name}")))
    commit = f", at commit {document['commit']}" if document.get("commit") else ""
    count = max(row.get("devices", 1) for row in document["rows"])
    devices = "One" if count == 1 else str(count)
    head = f"{devices} {document['device']}, {libraries}; `{document['command']}`{commit}."
    if skipped:
        head += f" Not run here: {', '.join(skipped)}."
    return f"{head}\n\n{table(columns, done)}\n"


def at_a_glance(documents: list[dict]) -> str:
    """ms and speed-up of the HEADLINE layers that were measured.

    Of several results that which keeps the GPU busy and has most of the columns, then what others have besides.
    """
    layers = [document for document in documents if document["benchmark"] == "layer"]
    layers.sort(key=lambda document: ("--turn" in document["command"], _columns(document)), reverse=True)
    measured: dict[str, dict[str, dict]] = {}
    for row in itertools.chain.from_iterable(document["rows"] for document in layers):
        if "skipped" not in row:
            measured.setdefault(row["config"], {}).setdefault(row["contender"], row)

    def cell(row: dict | None) -> str:
        if row is None:
            return ""
        return f"{row['ms']:.3g} ms" + (
            f", x{row['speedup']:.2f}" if row["contender"] != "flax" and "speedup" in row else ""
        )

    def temporaries(rows: dict[str, dict]) -> str:
        of = [rows.get(contender, {}).get("temp_gib") for contender in ("flax", "te-bf16", "te-delayed")]
        return ", ".join("" if gib is None else f"{gib:.2f}" for gib in of) + " GiB"

    columns: Columns = {"layer": lambda config: f"{config}: {_in_words(SHAPES[config])}"}
    for title, contender in GLANCE.items():
        columns[title] = lambda config, contender=contender: cell(measured[config].get(contender))
    columns["temporaries: Flax, ours in bf16, in FP8"] = lambda config: temporaries(measured[config])
    return table(columns, [config for config in HEADLINE if config in measured]) + "\n" if measured else ""


def _columns(document: dict) -> int:
    return len({row["contender"] for row in document["rows"]} & set(GLANCE.values()))


def _in_words(shape: Shape) -> str:
    heads = f"{shape.heads} heads" + (f", {shape.groups} kv heads" if shape.groups != shape.heads else "")
    packed = f", {shape.documents} documents a row" if shape.documents > 1 else ""
    dropout = f", dropout {shape.dropout}" if shape.dropout else ""
    relative = ", relative positions" if shape.relative else ""
    dtype = "" if shape.param_dtype == "float32" else f", parameters in {shape.param_dtype}"
    more = f"{packed}{dropout}{relative}{dtype}"
    return f"{shape.batch} x {shape.seq} tokens of {shape.hidden}, MLP {shape.mlp}, {heads}{more}"


def all_results(documents: list[dict]) -> str:
    """A table for each result, by benchmark and file name."""
    parts = []
    for benchmark, group in itertools.groupby(documents, key=lambda document: document["benchmark"]):
        parts += [f"## {TABLES[benchmark][0]}\n", *(section(document) for document in group)]
    return "\n".join(parts)


# The pages, and what stands between their markers.
PAGES = {ROOT / "README.md": at_a_glance, ROOT / "benchmarks" / "README.md": all_results}


def written(text: str, render: Callable[[list[dict]], str], results: pathlib.Path = RESULTS) -> str:
    """A page's text with its tables as the results say."""
    documents = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    documents.sort(key=lambda document: list(TABLES).index(document["benchmark"]))
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{render(documents)}{END}{after}"


def write() -> None:
    for page, render in PAGES.items():
        page.write_text(written(page.read_text(), render))
