"""What attention needs to know at trace time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

SOFTMAX_TYPES = ("vanilla", "off_by_one", "learnable")


class Attention(NamedTuple):
    """The static options of `dot_product_attention`; hashable.

    scale: multiplies q k^T.
    causal: a query sees keys up to its own position.
    window: (left, right) how many keys before and after its own position a query sees, -1 for all.
    bias_before_scale: the bias is scaled too.
    dropout: rate at which weights are dropped, in [0, 1).
    bottom_right: positions are counted back from the ends of the query's and the key's sequence, not from their starts;
      with a mask [.., Q, K] they end with the last token of which it leaves anything.
    softmax_type: "off_by_one" adds one to the denominator; "learnable" adds exp(softmax_offset) of each head.
    score_mod: `score_mod(scores f32[B, H, Q, K], q_positions i32[B or 1, 1, Q, 1], k_positions i32[B or 1, 1, 1, K])
      -> scores`, of the scaled scores with their bias, before mask and softmax. Long sequences come in blocks of
      queries, so it must treat each score by itself; positions are those that causality and window compare.
    """

    scale: float
    causal: bool = False
    window: tuple[int, int] | None = None
    bias_before_scale: bool = False
    dropout: float = 0.0
    bottom_right: bool = False
    softmax_type: str = "vanilla"
    score_mod: Callable | None = None

    @property
    def reach(self) -> tuple[int, int]:
        """How many positions back and ahead a query sees, -1 for all."""
        left, right = (min(int(n), 2**30) for n in self.window or (-1, -1))  # places are i32
        return left, 0 if self.causal else right

    def check(self) -> None:
        """Raises ValueError for options that no attention has."""
        if self.softmax_type not in SOFTMAX_TYPES:
            raise ValueError(f"attention: softmax_type: expected one of {SOFTMAX_TYPES}, got {self.softmax_type!r}")
        for name in ("causal", "bias_before_scale", "bottom_right"):
            if isinstance(value := getattr(self, name), str) or value is None:
                raise ValueError(f"attention: {name}: expected a bool, got {value!r}")
        if not isinstance(self.scale, jax.core.Tracer) and not math.isfinite(_number(self.scale)):
            raise ValueError(f"attention: scale: expected a finite number, got {self.scale!r}")
        if not 0 <= _number(self.dropout) < 1:
            raise ValueError(f"attention: dropout: expected a rate in [0, 1), got {self.dropout!r}")
        if self.score_mod is not None and not callable(self.score_mod):
            raise ValueError(
                "attention: score_mod: expected a function of (scores, q_positions, k_positions) or None, got "
                f"{self.score_mod!r}"
            )
        if self.window is not None and not (
            isinstance(self.window, tuple)
            and len(self.window) == 2
            and all(isinstance(n, int | np.integer) and n >= -1 for n in self.window)
        ):
            raise ValueError(
                f"attention: window: expected (left, right), a tuple of -1 for all or what is >= 0, got {self.window!r}"
            )


def _number(given) -> float:
    try:
        return float(given)
    except (TypeError, ValueError):
        return math.nan


def as_window(window_size):
    """Attention.window of what a user gives, which `check` judges."""
    return tuple(window_size) if np.ndim(window_size) else window_size
