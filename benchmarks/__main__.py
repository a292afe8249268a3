"""What README claims, as commands:

python -m benchmarks layer --config gpt llama small --against flax,flax-fp8,te --json FILE
python -m benchmarks gemm --config gpt
python -m benchmarks attention --config llama
python -m benchmarks kernels --hidden 4096 16384
python -m benchmarks accumulation
python -m benchmarks precision
python -m benchmarks stack --config llama --layers 4
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
from collections.abc import Iterable

import jax

from benchmarks import (
    accumulation,
    attention,
    gemm,
    kernels,
    layer,
    memory,
    peers,
    precision,
    profile,
    readme,
    report,
    sharded,
    stack,
    train,
)
from benchmarks.shapes import SHAPES
from benchmarks.timing import TURN

MODULES = {
    "layer": layer,
    "gemm": gemm,
    "accumulation": accumulation,
    "precision": precision,
    "attention": attention,
    "kernels": kernels,
    "stack": stack,
    "train": train,
    "sharded": sharded,
    "memory": memory,
}
LAYERS = ["flax", "flax-fp8", "te", "nvidia"]


def chosen(texts: Iterable[str], known: Iterable[str]) -> list[str]:
    """The names that comma-separated lists mean: where `te` is no name itself, it is each of te-bf16, te-delayed ..."""
    known, names = list(known), []
    for given in ",".join(texts).split(","):
        found = [given] if given in known else [name for name in known if name.startswith(given + "-")]
        if not found:
            raise SystemExit(f"benchmarks: --against: expected some of {', '.join(known)}, got {given!r}")
        names += found
    return list(dict.fromkeys(names))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    for name in (*MODULES, "profile"):
        module = MODULES.get(name, profile)
        command = commands.add_parser(name, help=module.__doc__.splitlines()[0], description=module.__doc__)
        add = command.add_argument
        if name != "profile":
            add("--json", type=pathlib.Path, metavar="FILE", help="write the rows to this file too")
        if name == "accumulation":
            add("--lengths", type=int, nargs="+", default=list(accumulation.LENGTHS), help="of the sums")
            add("--size", type=int, default=accumulation.SIZE, help="rows and columns of the result")
            continue
        if name == "precision":
            add("--tokens", type=int, nargs="+", default=list(precision.TOKENS))
            add("--kernels", nargs="+", choices=precision.KERNELS, default=list(precision.KERNELS), help="their dtypes")
        elif name == "kernels":
            add("--hidden", type=int, nargs="+", default=list(kernels.HIDDEN))
            add("--rows", type=int, default=16384)
            add("--only", default="", metavar="TEXT", help="kernels whose name holds TEXT")
            add("--no-time", action="store_true", help="only compare with the references, for compute-sanitizer")
        else:
            several = {"nargs": "+", "default": ["gpt", "llama", "small"]} if name != "train" else {"default": "llama"}
            add("--config", choices=list(SHAPES), **several)
            add("--against", nargs="+", metavar="NAMES", help="contenders, separated by spaces or commas")
        if name == "train":
            train.add_arguments(command)
        elif name == "memory":
            add("--layers", type=int, default=0, help="of a training step (default: the gradients of one layer alone)")
        elif name != "profile":
            add("--rounds", type=int, default=12, help="in each of which every contender runs")
            add("--calls", type=int, default=5, help="of each contender in a round")
            add("--turn", type=float, default=TURN, metavar="SECONDS", help="that it runs in a round at least")
        if name == "stack":
            add("--layers", type=int, default=stack.LAYERS)
            add("--kinds", nargs="+", choices=list(stack.KINDS), default=list(stack.KINDS))
        if name in ("sharded", "memory"):
            default = "all" if name == "sharded" else "1"
            devices = None if name == "sharded" else 1
            add("--devices", type=int, default=devices, metavar="N", help=f"how many (default: {default})")
            add("--layouts", choices=list(sharded.LAYOUTS), nargs="+", default=list(sharded.LAYOUTS))
        if name == "sharded":
            add("--axes", choices=list(sharded.AXES), default="auto", help="of the mesh: the compiler's, or in types")
        if name == "layer":
            add("--no-floor", action="store_true", help="skip measuring what the layer could take at least")
            add(
                "--copy",
                type=int,
                nargs=2,
                default=list(layer.COPY),
                help="size of the copy that the floor counts with",
            )
    commands.add_parser("readme", help=readme.__doc__.splitlines()[0])
    return checked(parser.parse_args(argv))


# Of a command, or of all: times have a spread from two on, and those of the first steps do not count.
LEAST = {("train", "first_seed"): 0, ("memory", "layers"): 0, ("train", "steps"): 3, "rounds": 2}


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


def rows_of(args: argparse.Namespace) -> Iterable[dict]:
    if args.what == "train":
        return train.run(args.config, chosen(args.against or train.DEFAULT, peers.CONTENDERS), train.Options.of(args))
    if args.what == "accumulation":
        return accumulation.run(args.lengths, args.size)
    if args.what == "memory":
        known = peers.CONTENDERS if args.devices == 1 else sharded.CONTENDERS
        against = chosen(args.against or memory.DEFAULT, known)
        return memory.run(args.config, against, args.layers, args.devices, args.layouts)
    timing = {"rounds": args.rounds, "calls_per_round": args.calls, "turn": args.turn}
    if args.what == "precision":
        return precision.run(args.tokens, args.kernels, **timing)
    if args.what == "kernels":
        return kernels.run(args.hidden, args.rows, args.only, time=not args.no_time, **timing)
    if args.what == "layer":
        against = chosen(args.against or LAYERS, peers.CONTENDERS)
        return layer.run(args.config, against, floor=not args.no_floor, copy=tuple(args.copy), **timing)
    if args.what == "stack":
        against = chosen(args.against or stack.DEFAULT, peers.CONTENDERS)
        return stack.run(args.config, against, args.kinds, args.layers, **timing)
    module = MODULES[args.what]
    if args.what == "sharded":
        timing |= {"devices": args.devices, "axes": args.axes, "layouts": args.layouts}
    return module.run(args.config, chosen(args.against or module.CONTENDERS, module.CONTENDERS), **timing)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.what == "readme":
        readme.write()
    elif args.what == "profile":
        for config in args.config:
            for name in chosen(args.against or ["te"], peers.CONTENDERS):
                print(f"{config} {name}\n{profile.table(layer.Step(name, SHAPES[config]))}\n", flush=True)
    else:
        if jax.default_backend() != "gpu" and args.what != "memory":
            print(
                f"benchmarks {args.what}: no GPU here but {jax.default_backend()}: of shapes as large as most of "
                "these, a row takes it minutes to hours",
                file=sys.stderr,
                flush=True,
            )
        rows = []
        for row in rows_of(args):
            rows.append(row)
            print(MODULES[args.what].line(row), flush=True)
            if args.json:  # after every row: a run that is cut short keeps what it has measured
                report.save(args.json, args.what, rows)


if __name__ == "__main__":
    main()
