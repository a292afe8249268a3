"""The least time a layer can take: its products at the best algorithm's time, its attention at the best backend's, and
the bytes that each other stage must move, at a copy's speed; all measured in the process that measures the layer.

Not counted: what an epilogue can do (biases, residual additions), vectors, launches. A stage's operands and results
count once each; nothing stays in a cache between stages.

In short turns products are faster than under a load that lasts as a layer's does, likely as the limit of power then
lowers the clocks. The sustained floor is the same sum, each part measured in turns as long as the layer's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks import attention, gemm, kernels
from benchmarks.shapes import Shape, products
from benchmarks.timing import TURN, interleaved

COPY = (16384, 16384)  # rows and columns of the copy that bandwidth is measured with
FP8_BOTH_WAYS, BF16 = 2, 2  # bytes an entry


class Floor(NamedTuple):
    gemms: float  # ms
    attention: float  # ms
    bytes: float  # ms

    @property
    def ms(self) -> float:
        return sum(self)


def stages(shape: Shape, fp8: bool) -> dict[str, int]:
    """Bytes that each memory-bound stage of a step must move.

    In FP8 what a product reads is written quantized, as it is and transposed, by the stage that computes it; results of
    products and of attention, and what a norm or a curve keeps for its backward, are bf16.
    """
    operand = FP8_BOTH_WAYS if fp8 else BF16
    x = shape.tokens * shape.hidden
    z = shape.tokens * shape.kernels["fc1"][1]  # the activation's input; twice its output where it is gated
    a = shape.tokens * shape.mlp
    qkv = shape.tokens * shape.kernels["qkv"][1]
    turned = shape.tokens * (shape.heads + shape.groups) * shape.head
    weight = np.dtype(shape.param_dtype).itemsize
    moved = {
        "weights": shape.parameters * (weight + operand) if fp8 or weight > BF16 else 0,
        "norms forward": 2 * x * (BF16 + operand),
        "norms backward": 2 * x * (BF16 + BF16 + BF16),  # gradient, input; gradient
        "activation forward": z * BF16 + a * operand,
        "activation backward": a * BF16 + z * (BF16 + operand),
    }
    if shape.rope:
        moved["rope, both passes"] = 2 * turned * (BF16 + BF16)
    if fp8:
        moved["cast of attention's result"] = x * (BF16 + operand)
        moved["cast of the gradients of the layer and of its middle"] = 2 * x * (BF16 + operand)
        moved["cast of the gradients of q, k and v"] = qkv * (BF16 + operand)
    return moved


class Machine:
    """What floors are made of, measured on this machine: in short turns and, where `turn` is longer, in such too."""

    def __init__(self, copy: tuple[int, int] = COPY, turn: float = TURN):
        self._timings = {"floor": {"calls_per_round": 2, "turn": TURN, "rounds": 5}}
        if turn > TURN:  # which varies less
            self._timings["sustained_floor"] = {"calls_per_round": 2, "turn": turn, "rounds": 2}
        copied, size = kernels.copying(*copy)
        self._bytes_per_ms = {kind: size / ms for kind, ms in self._least({"copy": copied}, {}).items()}
        self._attention = functools.cache(self._attention)

    def floors(self, shape: Shape, fp8: bool) -> dict[str, Floor]:
        """By kind: "floor" and "sustained_floor"."""
        against = [name for name in gemm.CONTENDERS if (gemm.precision(name) == "fp8") == fp8]
        gemms = [self._least(*gemm.programs(product, against)) for product in products(shape)]
        attended, moved = self._attention(shape), sum(stages(shape, fp8).values())
        return {
            kind: Floor(sum(ms[kind] for ms in gemms), attended[kind], moved / self._bytes_per_ms[kind])
            for kind in self._timings
        }

    def _attention(self, shape: Shape) -> dict[str, float]:
        return self._least(*attention.programs(shape, "forward+backward", ["te", "jax-cudnn"]))

    def _least(self, programs: dict[str, Callable], failed: dict[str, str]) -> dict[str, float]:
        """ms of the fastest program, in each kind of turns."""
        if not programs:
            raise RuntimeError(f"floor: nothing that it needs ran: {failed}")
        fastest = lambda timing: min(took.median for took in interleaved(programs, **timing).values())
        return {kind: fastest(timing) for kind, timing in self._timings.items()}
