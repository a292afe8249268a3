"""Choices made while tracing: by the platform, and kept in the names of what is traced, where explain shows them."""

from __future__ import annotations

import contextlib
import math
import os
import re

import jax

# Of fewer tokens GPUs do better by XLA: by its fusions, and by its products of kernels in 16 bits, or of others.
FEW_TOKENS = 64
FEW_WHERE_CONVERTED = 320

_FORM = re.compile(r"\w+: [\w-]+ \(.*\)")


def platform() -> str:
    """Where JAX computes here, at trace time, by the mesh in force or the default device: "cpu", "gpu", ..."""
    meshed = jax.sharding.get_abstract_mesh().abstract_device
    if meshed is not None and meshed.platform is not None:
        return meshed.platform
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def devices() -> int:
    """How many a step may span, at trace time: those of the mesh in force, without one all of JAX's."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() if mesh.empty else mesh.size


def few(tokens, converted: bool = False) -> bool:
    """Whether GPUs do better by XLA's own products and fusions of so few tokens, as of those that are generated.

    A kernel of one token takes 2 us, whatever it does: what is fused with its neighbours is free. In a product of a
    kernel that is converted to 16 bits XLA converts as it reads, and its gradient as it is written.
    """
    least = FEW_WHERE_CONVERTED if converted else FEW_TOKENS
    return isinstance(tokens, int) and tokens < least and platform() == "gpu"


def shards(x) -> int:
    """Over how many devices the compiler may shard an axis of x, at trace time: not over manual mesh axes, and over
    explicit ones only together with its own."""
    mesh = jax.typeof(x).sharding.mesh
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    if mesh.empty:
        return jax.device_count()
    if not mesh.auto_axes:
        return 1
    return math.prod(mesh.shape[name] for name in mesh.axis_names if name not in mesh.manual_axes)


def compute_capabilities() -> list[float]:
    """Of the GPUs here, such as 9.0 for Hopper; none where there is no GPU to ask, and a choice is made for another."""
    try:
        return [float(gpu.compute_capability) for gpu in jax.local_devices(backend="gpu")]
    except RuntimeError:
        return []


def deterministic() -> bool:
    """Whether XLA_FLAGS ask for the same bits in every run; cpp/core/settings.h is the same rule."""

    def on(flag: str) -> bool:
        values = re.findall(rf"--{flag}(\S*)", os.environ.get("XLA_FLAGS", ""))
        return bool(values) and values[-1] in ("", "=true", "=1")

    return on("xla_gpu_deterministic_ops") or on("xla_gpu_exclude_nondeterministic_ops")


def decided(what: str, choice: str, why: str) -> contextlib.AbstractContextManager:
    """A scope that says what was chosen and why: `with decided("attention", "reference", "cuDNN has no sinks"): ...`"""
    return jax.named_scope(f"{what}: {choice} ({why})")


def is_decision(scope: str) -> bool:
    """Whether `decided` made this name."""
    return _FORM.fullmatch(scope) is not None
