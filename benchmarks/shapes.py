"""The shapes that are measured."""

from typing import NamedTuple


class Shape(NamedTuple):
    batch: int
    seq: int
    hidden: int
    mlp: int
    heads: int
    groups: int  # of keys and values
    rmsnorm: bool = False
    gated: bool = False  # swiglu instead of gelu
    rope: bool = False
    biases: bool = True


SHAPES = {
    "gpt": Shape(8, 2048, 4096, 16384, 32, 32),
    "llama": Shape(4, 4096, 4096, 14336, 32, 8, rmsnorm=True, gated=True, rope=True, biases=False),
    "small": Shape(8, 1024, 1024, 4096, 16, 16),
    "tiny": Shape(2, 64, 128, 256, 4, 4),  # for machines without a GPU
}
