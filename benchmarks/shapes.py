"""The shapes that are measured, and the matrix products of a layer of each."""

from typing import NamedTuple

import numpy as np


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
    documents: int = 1  # sequences that a row holds, of random lengths
    dropout: float = 0.0  # of what is added to the residual stream
    param_dtype: str = "float32"
    relative: bool = False  # biases of relative positions, as TransformerLayer has them unless told otherwise

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    @property
    def kernels(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the layer's four kernels."""
        mlp = self.mlp * (2 if self.gated else 1)
        return {
            "qkv": (self.hidden, (self.heads + 2 * self.groups) * self.head),
            "proj": (self.hidden, self.hidden),
            "fc1": (self.hidden, mlp),
            "fc2": (self.mlp, self.hidden),
        }

    @property
    def parameters(self) -> int:
        """Entries of the four kernels."""
        return sum(k * n for k, n in self.kernels.values())

    @property
    def segment_ids(self) -> np.ndarray:
        """i32[batch, seq] the number of each token's document, from 1 on."""
        rng = np.random.default_rng(0)
        begins = np.zeros((self.batch, self.seq), np.int32)
        for row in begins:
            row[rng.choice(np.arange(1, self.seq), self.documents - 1, replace=False)] = 1
        return 1 + np.cumsum(begins, axis=1, dtype=np.int32)

    @property
    def attention_flop(self) -> int:
        """Floating-point operations of causal attention, forward: half of the two full products."""
        lengths = [np.bincount(row) for row in self.segment_ids]
        return 2 * self.heads * self.head * int(sum(np.sum(n.astype(np.int64) ** 2) for n in lengths))

    @property
    def flop(self) -> int:
        """Of a layer's products and attention, forward and backward: three times the forward, nothing recomputed."""
        return 3 * (2 * self.tokens * self.parameters + self.attention_flop)


class Product(NamedTuple):
    """d[m, n] = a[m, k] b[n, k]^T."""

    name: str
    m: int
    n: int
    k: int
    dtype: str = "bfloat16"  # of d

    @property
    def of_gradient(self) -> str:
        """Which operand is a gradient: "a", "b", or "" in the forward pass."""
        return {"fprop": "", "dgrad": "a", "wgrad": "b"}[self.name.split()[1]]

    @property
    def flop(self) -> int:
        return 2 * self.m * self.n * self.k


def products(shape: Shape) -> list[Product]:
    """The twelve products of a layer's step."""
    found = []
    for name, (k, n) in shape.kernels.items():
        t = shape.tokens
        found += [
            Product(f"{name} fprop", t, n, k),
            Product(f"{name} dgrad", t, k, n),
            Product(f"{name} wgrad", k, n, t, shape.param_dtype),
        ]
    return found


_LLAMA = {"rmsnorm": True, "gated": True, "rope": True, "biases": False}
SHAPES = {
    "gpt": Shape(8, 2048, 4096, 16384, 32, 32),
    "llama": Shape(4, 4096, 4096, 14336, 32, 8, **_LLAMA),
    "small": Shape(8, 1024, 1024, 4096, 16, 16),
    "gpt-dropout": Shape(8, 2048, 4096, 16384, 32, 32, dropout=0.1),
    "small-dropout": Shape(8, 1024, 1024, 4096, 16, 16, dropout=0.1),
    "gpt-relative": Shape(8, 2048, 4096, 16384, 32, 32, relative=True),
    "small-relative": Shape(8, 1024, 1024, 4096, 16, 16, relative=True),
    "gpt2": Shape(8, 1024, 768, 3072, 12, 12),
    "gpt2-xl": Shape(4, 1024, 1600, 6400, 25, 25),
    "gpt3-xl": Shape(4, 2048, 2048, 8192, 16, 16),
    "gpt3-13b": Shape(2, 2048, 5120, 20480, 40, 40),
    "llama2-7b": Shape(2, 4096, 4096, 11008, 32, 32, **_LLAMA),
    "llama-1b": Shape(4, 2048, 2048, 8192, 32, 8, **_LLAMA),
    "llama-8k": Shape(1, 8192, 4096, 14336, 32, 8, **_LLAMA),
    "llama-32k": Shape(1, 32768, 4096, 14336, 32, 8, **_LLAMA),
    "llama-packed": Shape(4, 4096, 4096, 14336, 32, 8, documents=8, **_LLAMA),
    "llama-70b": Shape(2, 4096, 8192, 28672, 64, 8, **_LLAMA),
    "gpt-16bit": Shape(8, 2048, 4096, 16384, 32, 32, param_dtype="bfloat16"),
    "llama-16bit": Shape(4, 4096, 4096, 14336, 32, 8, **_LLAMA, param_dtype="bfloat16"),
    "llama-1b-16bit": Shape(4, 2048, 2048, 8192, 32, 8, **_LLAMA, param_dtype="bfloat16"),
    "qwen2-0.5b": Shape(8, 1024, 896, 4864, 14, 2, **_LLAMA),
    "gpt-1x1024": Shape(1, 1024, 4096, 16384, 32, 32),  # few tokens for the size of the kernels, as are the next
    "gpt-1x2048": Shape(1, 2048, 4096, 16384, 32, 32),
    "llama-1x1024": Shape(1, 1024, 4096, 14336, 32, 8, **_LLAMA),
    "llama-1x2048": Shape(1, 2048, 4096, 14336, 32, 8, **_LLAMA),
    "tiny": Shape(2, 64, 128, 256, 4, 4),  # for machines without a GPU, as are the next
    "tiny-llama": Shape(2, 64, 128, 256, 4, 2, **_LLAMA),
    "tiny-dropout": Shape(2, 64, 128, 256, 4, 4, dropout=0.1),
    "tiny-relative": Shape(2, 64, 128, 256, 4, 4, relative=True),
    "tiny-packed": Shape(2, 64, 128, 256, 4, 2, documents=3, **_LLAMA),
    "tiny-16bit": Shape(2, 64, 128, 256, 4, 2, **_LLAMA, param_dtype="bfloat16"),
}
