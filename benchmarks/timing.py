"""Interleaved rounds: contenders take turns, so that clocks and temperature treat them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax


class Timing(NamedTuple):
    median: float  # ms a call
    spread: float  # (third quartile - first) / median


def interleaved(
    calls: dict[str, Callable[[], object]], *, rounds: int = 12, calls_per_round: int = 5
) -> dict[str, Timing]:
    """Milliseconds of each call: medians over rounds in which every contender runs `calls_per_round` times."""
    for call in calls.values():
        for _ in range(3):
            jax.block_until_ready(call())
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            for _ in range(calls_per_round):
                out = call()
            jax.block_until_ready(out)
            samples[name].append((time.perf_counter() - began) / calls_per_round * 1e3)
    timings = {}
    for name, times in samples.items():
        first, median, third = statistics.quantiles(times, n=4)
        timings[name] = Timing(median, (third - first) / median)
    return timings
