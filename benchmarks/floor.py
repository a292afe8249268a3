"""The least time a layer can take: its products at the best algorithm's time, its attention at the best backend's, and
the bytes that each other stage must move, at a copy's speed; all measured in the process that measures the layer.

Not counted: what an epilogue can do (biases, residual additions), vectors, launches. A stage's operands and results
count once each; nothing stays in a cache between stages.

In short turns products are faster than under a load that lasts as a layer's does, likely as the limit of power then
lowers the clocks. The sustained floor is the same sum, each part measured in turns as long as the layer's.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from benchmarks import attention, gemm, kernels
from benchmarks.shapes import Product, Shape, products
from benchmarks.timing import TURN, Timing

COPY = (16384, 16384)  # rows and columns of the copy that bandwidth is measured with
TIMING = {"calls_per_round": 2}
FP8_BOTH_WAYS, BF16, F32 = 2, 2, 4  # bytes an entry


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
    products and of attention, and what a norm or a curve keeps for its backward, are bf16. Weights are f32.
    """
    operand = FP8_BOTH_WAYS if fp8 else BF16
    x = shape.tokens * shape.hidden
    z = shape.tokens * shape.kernels["fc1"][1]  # the activation's input; twice its output where it is gated
    a = shape.tokens * shape.mlp
    qkv = shape.tokens * shape.kernels["qkv"][1]
    turned = shape.tokens * (shape.heads + shape.groups) * shape.head
    moved = {
        "weights": shape.parameters * (F32 + operand),
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
    """What floors are made of, measured on this machine when first asked for."""

    def __init__(self, copy: tuple[int, int] = COPY, turn: float = TURN):
        self._timing = {**TIMING, "turn": turn, "rounds": 6 if turn <= TURN else 3}  # long turns vary less
        self._bandwidth = kernels.copy_bandwidth(*copy, **self._timing)
        self._attention = functools.cache(self._attention)

    def floor(self, shape: Shape, fp8: bool) -> Floor:
        gemms = sum(self._gemm(product, fp8) for product in products(shape))
        return Floor(gemms, self._attention(shape), sum(stages(shape, fp8).values()) / self._bandwidth)

    def _gemm(self, product: Product, fp8: bool) -> float:
        against = [name for name in gemm.CONTENDERS if (gemm.precision(name) == "fp8") == fp8]
        return _best(gemm.measure(product, against, **self._timing))

    def _attention(self, shape: Shape) -> float:
        return _best(attention.measure(shape, "forward+backward", ["te", "jax-cudnn"], **self._timing))


def _best(measured: tuple[dict[str, Timing], dict[str, str]]) -> float:
    times, failed = measured
    if not times:
        raise RuntimeError(f"floor: nothing that it needs ran: {failed}")
    return min(timing.median for timing in times.values())
