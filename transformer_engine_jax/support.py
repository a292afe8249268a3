"""What runs here: GPUs, libraries, FFI targets, and each recipe as supported, emulated or not."""

from __future__ import annotations

import importlib.metadata
import platform

import jax

from transformer_engine_jax.decisions import compute_capabilities
from transformer_engine_jax.distribution import name_conflict
from transformer_engine_jax.handlers import CUDA_IMPORT_ERROR, HANDLERS
from transformer_engine_jax.ops.attention.flash import missing


def gpu_compute_capability() -> float | None:
    """The smallest compute capability of the GPUs that JAX runs on, None where it runs on none."""
    if jax.default_backend() != "gpu":
        return None
    return min(compute_capabilities())


def is_fp8_available() -> tuple[bool, str]:
    """(whether FP8 GEMMs run on FP8 hardware here, why not); where not, they are emulated with the same casts."""
    capability = gpu_compute_capability()
    if capability is None:
        return False, f"JAX runs on {jax.default_backend()}, FP8 is emulated; FP8 hardware is an NVIDIA GPU"
    if capability < 8.9:
        return False, f"compute capability {capability}: FP8 tensor cores need 8.9 (Ada) or newer"
    if "CUDA" not in HANDLERS:
        return False, f"built without the CUDA module: {CUDA_IMPORT_ERROR}"
    return True, ""


def recipe_support() -> list[tuple[str, str, str]]:
    """(recipe, "supported" | "emulated" | "not supported", why) for every recipe that API users may look for."""
    available, why = is_fp8_available()
    capability = gpu_compute_capability()
    if available:
        status = ("supported", "FP8 tensor cores through cuBLASLt")
    elif capability is None:
        status = ("emulated", f"{why}; same casts, high-precision products")
    else:
        status = ("not supported", why)
    later = ("not supported", "not part of this version")
    return [
        ("DelayedScaling", *status),
        ("Float8CurrentScaling", *status),
        ("Float8BlockScaling", *later),
        ("MXFP8BlockScaling", *later),
        ("NVFP4BlockScaling", *later),
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[tuple[str, str]]:
    rows = [("backend", f"{jax.default_backend()}, {jax.local_device_count()} device(s)")]
    for device in jax.local_devices() if jax.default_backend() == "gpu" else []:
        rows.append((f"gpu {device.id}", f"{device.device_kind}, compute capability {device.compute_capability}"))
    return rows


def report() -> str:
    """The text that `python -m transformer_engine_jax` prints."""
    rows = [("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    rows += [(p, _version(p)) for p in ("transformer-engine-jax", "jax", "jaxlib", "flax", "numpy")]
    try:
        rows += _devices()
        recipes = [(name, f"{status}: {why}") for name, status, why in recipe_support()]
    except (AssertionError, RuntimeError) as error:  # JAX_PLATFORMS asks for what does not start
        rows.append(("backend", f"none, JAX raises {type(error).__name__}: {error}"))
        recipes = []
    if "CUDA" in HANDLERS:
        from transformer_engine_jax import _cuda

        rows.append(("CUDA module", _cuda.versions()))
    else:
        rows.append(("CUDA module", f"not built ({CUDA_IMPORT_ERROR})"))
    without = missing()
    rows.append(("attention dropout", f"plain JAX: {without}" if without else "by cuDNN"))
    rows.append(("attention in FP8", f"not on GPUs: {without}" if without else "by cuDNN, from Hopper on"))
    rows += [(p, _version(p)) for p in ("nvidia-cublas", "nvidia-cudnn-cu13") if _version(p) != "not installed"]
    for name, targets in HANDLERS.items():
        rows.append((f"{name} targets", ", ".join(sorted(targets))))
    rows += recipes
    if conflict := name_conflict():
        rows.append(("CONFLICT", conflict))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
