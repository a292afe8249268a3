"""The benchmarks by the names of their commands, in the order of help and tables: a new one is a module and its name.

What belongs to one is its module's: `add_arguments(command)`; `rows(args)`, an iterator over what it measures;
`line(row)`, for the screen; and its table in benchmarks/README.md, TITLE and COLUMNS.
"""

from __future__ import annotations

import importlib

NAMES = (
    "layer",
    "gemm",
    "accumulation",
    "precision",
    "agreement",
    "attention",
    "kernels",
    "stack",
    "generate",
    "train",
    "sharded",
    "memory",
)
BENCHMARKS = {name: importlib.import_module(f"benchmarks.{name}") for name in NAMES}
