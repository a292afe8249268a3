"""The choices of a Hopper GPU, where there is none: its attention then runs by the kernels' references."""

import jax
import pytest

from transformer_engine_jax.ops.attention import backends, cudnn, flash


def of_handlers(*cases):
    """What only a handler tells apart: on a GPU all of the cases, and one elsewhere, where the reference computes."""
    return cases if jax.default_backend() == "gpu" else cases[:1]


def choose_as_on_hopper(monkeypatch) -> None:
    monkeypatch.setattr(backends, "platform", lambda: "gpu")
    for module in (backends, cudnn):
        monkeypatch.setattr(module, "missing", lambda: "")


def choose_as_on_hopper_or_be_there(monkeypatch) -> None:
    """On a GPU the test is of cuDNN's handlers, skipped in a build that was made without cuDNN's headers."""
    if jax.default_backend() != "gpu":
        choose_as_on_hopper(monkeypatch)
    elif flash.missing():
        pytest.skip(flash.missing())
