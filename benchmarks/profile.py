"""Where a step's time goes on the GPU: kernels by total time, from JAX's own profiler."""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import tempfile
from collections.abc import Callable

import jax

from benchmarks.command import add_contenders, chosen
from benchmarks.layer import Step
from benchmarks.peers import CONTENDERS
from benchmarks.shapes import SHAPES


def kernel_times(call: Callable[[], object], *, calls: int = 5) -> tuple[dict[str, tuple[float, float]], float]:
    """({kernel: (us a call, launches a call)}, span in us a call from first start to last end) of device 0."""
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                out = call()
            jax.block_until_ready(out)
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        times: dict[str, list[float]] = collections.defaultdict(list)
        first, last = float("inf"), 0.0
        for plane in data.planes:
            if not plane.name.startswith("/device:GPU:0"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    times[_short(event.name)].append(event.duration_ns / 1e3)
                    first, last = (
                        min(first, event.start_ns / 1e3),
                        max(last, (event.start_ns + event.duration_ns) / 1e3),
                    )
    return {k: (sum(v) / calls, len(v) / calls) for k, v in times.items()}, (last - first) / calls


def _short(name: str) -> str:
    name = re.sub(r"^void |\(anonymous namespace\)::|te::|\bcudaStream_t\b", "", name)
    return name if len(name) <= 88 else name[:85] + "..."


def table(call: Callable[[], object], most: int = 40) -> str:
    """A table a person can read: us a call, launches, kernel."""
    times, span = kernel_times(call)
    busy = sum(us for us, _ in times.values())
    rows = [
        f"{us:9.1f} us {count:5.1f} x  {name}" for name, (us, count) in sorted(times.items(), key=lambda t: -t[1][0])
    ]
    return "\n".join([*rows[:most], f"{busy:9.1f} us busy of {span:.1f} us"])


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_contenders(command)


def show(args: argparse.Namespace) -> None:
    """Prints a table for each config and contender."""
    for config in args.config:
        for name in chosen(args.against or ["te"], CONTENDERS):
            print(f"{config} {name}\n{table(Step(name, SHAPES[config]))}\n", flush=True)
