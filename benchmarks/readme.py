"""Writes the tables of README.md and benchmarks/README.md from the committed results in benchmarks/results."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable, Iterable

from benchmarks.command import Columns
from benchmarks.registry import BENCHMARKS, NAMES
from benchmarks.shapes import SHAPES, Shape

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- written by `python -m benchmarks readme` -->\n", "<!-- end -->"

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
    columns = BENCHMARKS[document["benchmark"]].COLUMNS
    done = [row for row in document["rows"] if "skipped" not in row]
    skipped = sorted({row.get("contender") for row in document["rows"]} - {row.get("contender") for row in done})
    versions = document["versions"]
    said = ["cublas", "cudnn-cu13", "jax", "flax", "transformer-engine"]
    libraries = ", ".join(f"{name} {v}" for name in said if (v := versions.get(name) or versions.get(f"nvidia-{name}")))
    commit = f", at commit {document['commit']}" if document.get("commit") else ""
    commit += f"; {document['remark']}" if "remark" in document else ""
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
        parts += [f"## {BENCHMARKS[benchmark].TITLE}\n", *(section(document) for document in group)]
    return "\n".join(parts)


# The pages, and what stands between their markers.
PAGES = {ROOT / "README.md": at_a_glance, ROOT / "benchmarks" / "README.md": all_results}


def written(text: str, render: Callable[[list[dict]], str], results: pathlib.Path = RESULTS) -> str:
    """A page's text with its tables as the results say."""
    documents = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    documents.sort(key=lambda document: NAMES.index(document["benchmark"]))
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{render(documents)}{END}{after}"


def write() -> None:
    for page, render in PAGES.items():
        page.write_text(written(page.read_text(), render))
