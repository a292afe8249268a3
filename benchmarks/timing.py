"""How all is timed: contenders take turns in one process, so that clocks and temperature treat them alike."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

AT_ONCE = 6 * 10**9  # bytes
TURN = 0.03  # seconds that a contender runs at least in each round


class Timing(NamedTuple):
    median: float  # ms a call
    spread: float  # (third quartile - first) / median

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, (third - first) / median)


class Repeated:
    """One program that runs `call` on several sets of operands.

    A call from Python costs more than a small kernel, and operands that were just read lie in the L2 cache. So a
    program makes many calls, each on buffers of its own, which exceed the cache by far. Results stay in the program,
    which returns a number of each: to make hundreds of arrays takes the host longer than the GPU takes to fill them.
    """

    def __init__(self, call: Callable, sets: Sequence[Sequence[jax.Array]]):
        self.sets, self.count = sets, len(sets)
        self._compiled = jax.jit(lambda sets: _touched([call(*operands) for operands in sets])).lower(sets).compile()

    def __call__(self):
        return self._compiled(self.sets)


class Copies:
    """One program that copies each of `arrays` to an array that it was given and gives back: XLA has the driver do it.

    At most 4: of 5 or more XLA makes a CUDA graph, whose copies of 0.5 GB move 2.7 TB/s for 4.1.
    """

    def __init__(self, arrays: Sequence[jax.Array]):
        assert len(arrays) <= 4, f"at most 4 arrays, got {len(arrays)}"
        self.arrays, self.count = list(arrays), len(arrays)
        self.copies = [jnp.zeros_like(x) for x in arrays]
        copy = jax.jit(lambda copies, arrays: [jnp.copy(x) for x in arrays], donate_argnums=0, keep_unused=True)
        self._compiled = copy.lower(self.copies, self.arrays).compile()

    def __call__(self):
        self.copies = self._compiled(self.copies, self.arrays)
        return self.copies


def _touched(results) -> jax.Array:
    """The first element of each array among `results`, all of which are in memory then, and at the same time."""
    leaves = [x for x in jax.tree.leaves(jax.lax.optimization_barrier(results)) if x.size]
    return jnp.stack([x[(slice(0, 1),) * x.ndim].astype(jnp.float32).reshape(()) for x in leaves])


def operand_sets(operands: Sequence[jax.Array], size: int, most: int = 64) -> list[list[jax.Array]]:
    """2 to `most` copies of `operands`, for calls that touch `size` bytes each; as many as fit into `AT_ONCE`."""
    count = 2 if jax.default_backend() == "cpu" else min(max(AT_ONCE // max(size, 1), 2), most)
    return [list(operands)] + [[jnp.copy(x) for x in operands] for _ in range(count - 1)]


def interleaved(
    calls: dict[str, Callable[[], object]], *, rounds: int = 12, calls_per_round: int = 5, turn: float = TURN
) -> dict[str, Timing]:
    """Milliseconds of each call: medians over rounds in which each contender runs `calls_per_round` times or `turn`.

    Python starts the next call while the device computes; what a turn's first and last call wait for each other must
    not count as theirs. A `Repeated` counts as the calls that it makes. In turns of 0.2 s a GPU is as slow as its power
    limit makes it for each contender alone; in short ones, as for all together. Each round has an order of its own, the
    same in every run: a contender finds the GPU as warm as the one before left it. A first round, which finds it cool,
    does not count.
    """
    shortest = float("inf")
    for call in calls.values():
        for _ in range(3):
            began = time.perf_counter()
            jax.block_until_ready(call())
            shortest = min(shortest, time.perf_counter() - began)
    calls_per_round = max(calls_per_round, min(math.ceil(turn / shortest), math.ceil(100 * turn / TURN)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for round in range(-1, max(rounds, 2)):
        for name, call in order.sample(list(calls.items()), len(calls)):
            began = time.perf_counter()
            for _ in range(calls_per_round):
                out = call()
            jax.block_until_ready(out)
            count = calls_per_round * getattr(call, "count", 1)
            if round >= 0:
                samples[name].append((time.perf_counter() - began) / count * 1e3)
            del out
    return {name: Timing.of(times) for name, times in samples.items()}


def without_failures(
    calls: dict[str, Callable[[], Callable]], peer: Callable[[str], bool]
) -> tuple[dict[str, Callable], dict[str, str]]:
    """(contenders that were made and ran once, why the others did not); only a `peer` may fail, ours raises."""
    ready, failed = {}, {}
    for name, make in calls.items():
        try:
            call = make()
            jax.block_until_ready(call())
            ready[name] = call
        except (ImportError, OSError, RuntimeError, AssertionError) as error:
            # Not installed, its libraries missing; no such hardware, out of memory; not for this version or shape.
            if not peer(name):
                raise
            failed[name] = str(error).strip().splitlines()[0][:160]
    return ready, failed
