"""python -m benchmarks layer --config gpt llama small --against flax ours-delayed --json FILE
python -m benchmarks profile --config gpt --against ours-delayed"""

from __future__ import annotations

import argparse
import json
import pathlib

import jax

from benchmarks import layer, profile
from benchmarks.shapes import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", choices=["layer", "profile"])
    parser.add_argument("--config", nargs="+", choices=list(SHAPES), default=["gpt", "llama", "small"])
    parser.add_argument("--against", nargs="+", choices=list(layer.CONTENDERS), default=list(layer.CONTENDERS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=pathlib.Path, help="write the rows to this file too")
    args = parser.parse_args()
    if args.what == "profile":
        for config in args.config:
            for name in args.against:
                print(f"{config} {name}\n{profile.table(layer.Step(name, SHAPES[config]))}\n", flush=True)
        return
    rows = []
    for config in args.config:
        for row in layer.run(config, args.against, args.rounds):
            rows.append(row)
            print(
                f"{row['config']:>6} {row['contender']:<14} {row['ms']:8.3f} ms  x{row['speedup']:.2f}  "
                f"+-{row['spread']:.1%}  trace {row['trace_s']:.1f} s  compile {row['compile_s']:.1f} s  "
                f"temp {row['temp_gib']:.2f} GiB",
                flush=True,
            )
    if args.json:
        device = jax.devices()[0].device_kind
        args.json.write_text(json.dumps({"device": device, "jax": jax.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
