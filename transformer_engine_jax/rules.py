"""The rule of a kernel, which names the axes of its buffers: kernel.py says how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformer_engine_jax.kernel import Kernel


class Axes(NamedTuple):
    """The names of the axes of one call's buffers; None for a buffer that is absent."""

    operands: tuple[tuple[str, ...] | None, ...]
    results: tuple[tuple[str, ...] | None, ...]


def parse(rule: str) -> tuple[list[list[str]], list[list[str]]]:
    def side(text: str) -> list[list[str]]:
        return [[t for t in buffer.split() if t != "-"] for buffer in text.split(",")]

    operands, results = rule.split("->")
    return side(operands), side(results)


def is_group(token: str) -> bool:
    return token == "..." or token.endswith("*")


def name_axes(kernel: Kernel, attributes: Mapping[str, Any], ranks: Sequence[int | None], result_ranks) -> Axes:
    """Names every axis of a call from the ranks of its buffers; ValueError where a rank contradicts the rule."""
    groups = {name[0] + "*": value for name, value in attributes.items() if name.endswith("_axes")}
    for (name, tokens), rank in zip(zip(kernel.operand_names, kernel.operands), ranks):
        if rank is None:
            continue
        unknown = [t for t in tokens if is_group(t) and t not in groups]
        rest = rank - sum(groups.get(t, 1) for t in tokens if t not in unknown)
        if len(unknown) == 1:
            groups[unknown[0]] = rest
            rest = min(rest, 0)
        if rest != 0 or len(unknown) > 1:
            raise ValueError(
                f"{kernel.name}: {name} has {rank} axes, which does not fit `{' '.join(tokens) or 'a scalar'}` "
                f"of the rule `{kernel.rule}`"
            )

    def names(tokens: list[str]) -> tuple[str, ...]:
        out: list[str] = []
        for t in tokens:
            out.extend([f"{t}{i}" for i in range(groups[t])] if is_group(t) else [t])
        return tuple(out)

    return Axes(
        tuple(None if r is None else names(t) for t, r in zip(kernel.operands, ranks)),
        tuple(None if r is None else names(t) for t, r in zip(kernel.results, result_ranks)),
    )
