"""What README claims, as commands:

python -m benchmarks layer --config gpt llama small --against flax,flax-fp8,te --json FILE
python -m benchmarks gemm --config gpt
python -m benchmarks attention --config llama
python -m benchmarks kernels --hidden 4096 16384
python -m benchmarks accumulation
python -m benchmarks precision
python -m benchmarks agreement --cases 30
python -m benchmarks stack --config llama --layers 4
python -m benchmarks generate --config llama
python -m benchmarks train --steps 300
python -m benchmarks sharded --config llama
python -m benchmarks memory --config llama
python -m benchmarks profile --config gpt --against te-delayed
python -m benchmarks readme
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import jax

from benchmarks import profile, readme, report
from benchmarks.registry import BENCHMARKS
from benchmarks.shapes import SHAPES


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    for name, module in {**BENCHMARKS, "profile": profile}.items():
        command = commands.add_parser(name, help=module.__doc__.splitlines()[0], description=module.__doc__)
        if name in BENCHMARKS:
            command.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows to this file too")
        module.add_arguments(command)
    commands.add_parser("readme", help=readme.__doc__.splitlines()[0])
    return checked(parser.parse_args(argv))


# Of a command, or of all: times have a spread from two on, and those of the first steps do not count.
LEAST = {
    ("train", "first_seed"): 0,
    ("agreement", "first_seed"): 0,
    ("memory", "layers"): 0,
    ("train", "steps"): 3,
    "rounds": 2,
}


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments; SystemExit where one counts less of something than can be, a shape drops where no key is given to
    the step, the rows have no place to go, or there is no GPU to look at."""
    for name, given in vars(args).items():
        least = LEAST.get((args.what, name), LEAST.get(name, 1))
        for number in given if isinstance(given, list) else [given]:
            if type(number) is int and number < least:
                flag = "--" + name.replace("_", "-")
                raise SystemExit(f"benchmarks {args.what}: {flag}: expected {least} or more, got {number}")
    configs = getattr(args, "config", [])
    configs = [configs] if isinstance(configs, str) else configs
    trains = args.what in ("stack", "train") or (args.what == "memory" and args.layers > 0)
    if trains and (dropping := [config for config in configs if SHAPES[config].dropout]):
        raise SystemExit(
            f"benchmarks {args.what}: --config: expected shapes without dropout, got {', '.join(dropping)}"
        )
    if args.what == "profile" and jax.default_backend() != "gpu":
        raise SystemExit(f"benchmarks profile: expected a GPU, whose kernels it lists, got {jax.default_backend()}")
    path = getattr(args, "json", None)
    if path and (path.is_dir() or not path.parent.is_dir()):
        raise SystemExit(f"benchmarks {args.what}: --json: expected a file in a folder that exists, got {path}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.what == "readme":
        readme.write()
    elif args.what == "profile":
        profile.show(args)
    else:
        if jax.default_backend() != "gpu" and args.what not in ("memory", "agreement"):
            print(
                f"benchmarks {args.what}: no GPU here but {jax.default_backend()}: of shapes as large as most of "
                "these, a row takes it minutes to hours",
                file=sys.stderr,
                flush=True,
            )
        benchmark, rows = BENCHMARKS[args.what], []
        for row in benchmark.rows(args):
            rows.append(row)
            print(benchmark.line(row), flush=True)
            if args.json:  # after every row: a run that is cut short keeps what it has measured
                report.save(args.json, args.what, rows)


if __name__ == "__main__":
    main()
