"""What the benchmarks' commands share: arguments, what these mean, and columns of tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.shapes import SHAPES
from benchmarks.timing import TURN

# The columns of a command's table: title -> a row's text.
Columns = dict[str, Callable[[dict], str]]
SPEEDUP: Columns = {"speed-up": lambda r: f"{r['speedup']:.2f}" if "speedup" in r else ""}  # none without the first
RATE: Columns = {"ms": lambda r: f"{r['ms']:.3g}", "TFLOP/s": lambda r: f"{r['tflop_per_s']:.0f}"}
OFF: Columns = {"off": lambda r: f"{r['off']:.0e}"}


def add_contenders(command: argparse.ArgumentParser, only: str | None = None) -> None:
    """--config and --against. only: the default of a command that takes one shape; None: it takes several."""
    several = {"nargs": "+", "default": ["gpt", "llama", "small"]}
    command.add_argument("--config", choices=list(SHAPES), **({"default": only} if only else several))
    command.add_argument("--against", nargs="+", metavar="NAMES", help="contenders, separated by spaces or commas")


def chosen(texts: Iterable[str], known: Iterable[str]) -> list[str]:
    """The names that comma-separated lists mean: where `te` is no name itself, it is each of te-bf16, te-delayed ..."""
    known, names = list(known), []
    for given in ",".join(texts).split(","):
        found = [given] if given in known else [name for name in known if name.startswith(given + "-")]
        if not found:
            raise SystemExit(f"benchmarks: --against: expected some of {', '.join(known)}, got {given!r}")
        names += found
    return list(dict.fromkeys(names))


def add_timing(command: argparse.ArgumentParser) -> None:
    """--rounds, --calls and --turn, which `timing` reads."""
    add = command.add_argument
    add("--rounds", type=int, default=12, help="in each of which every contender runs")
    add("--calls", type=int, default=5, help="of each contender in a round")
    add("--turn", type=float, default=TURN, metavar="SECONDS", help="that it runs in a round at least")


def timing(args: argparse.Namespace) -> dict[str, Any]:
    """What `interleaved` is told."""
    return {"rounds": args.rounds, "calls_per_round": args.calls, "turn": args.turn}
