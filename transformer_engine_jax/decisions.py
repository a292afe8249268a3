"""Choices that an op makes while it is traced, kept in the names of what it traces: explain and profiles show them."""

from __future__ import annotations

import contextlib
import re

import jax

_FORM = re.compile(r"\w+: [\w-]+ \(.*\)")


def decided(what: str, choice: str, why: str) -> contextlib.AbstractContextManager:
    """A scope that says what was chosen and why: `with decided("attention", "reference", "cuDNN has no sinks"): ...`"""
    return jax.named_scope(f"{what}: {choice} ({why})")


def is_decision(scope: str) -> bool:
    """Whether `decided` made this name."""
    return _FORM.fullmatch(scope) is not None
