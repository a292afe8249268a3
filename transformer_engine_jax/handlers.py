"""Loads the compiled extension modules and registers their FFI handlers with XLA."""

from __future__ import annotations

import importlib
import pathlib
import re
from typing import Any

import jax

from transformer_engine_jax.distribution import hidden_installation, name_conflict

_BUILD_HINT = "build it with `pip install .` (or `make test`) from a checkout"


def _ffi_version() -> tuple[int, int]:
    """Of the FFI of the jaxlib that is installed. It takes handlers as old as may be, and none that are newer."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR"))
    return int(major[1]), int(minor[1])


def _check_version(module: str, built: tuple[int, int]) -> None:
    """ImportError where XLA would refuse the module's handlers, and from then on to compute at all."""
    if built > (installed := _ffi_version()):
        raise ImportError(
            f"transformer_engine_jax.{module} was built with a newer jaxlib, of FFI {built[0]}.{built[1]}, than the "
            f"installed {jax.lib.__version__}, of {installed[0]}.{installed[1]}; build it again in this environment, "
            "`pip install --force-reinstall --no-deps .`, or install that jaxlib"
        )


def _register_handlers() -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], str | None]:
    """Registers the compiled modules' handlers with XLA: (those, by platform and target; likewise how many operands and
    results each takes, and which attributes; why CUDA's are not there)."""
    found, signatures, cuda_import_error = {}, {}, None
    for platform, module in (("cpu", "_cpu"), ("CUDA", "_cuda")):
        try:
            extension = importlib.import_module(f"transformer_engine_jax.{module}")
        except ImportError as error:
            if platform == "cpu":
                hidden = hidden_installation() if isinstance(error, ModuleNotFoundError) else None
                reason = name_conflict() or hidden or f"{_BUILD_HINT} ({error})"
                raise ImportError(f"transformer_engine_jax._cpu cannot be imported: {reason}") from error
            cuda_import_error = str(error)
            continue
        _check_version(module, tuple(extension.ffi_version))
        if not hasattr(extension, "signatures"):
            raise ImportError(f"transformer_engine_jax.{module} was built of older sources; {_BUILD_HINT}")
        found[platform] = extension.registrations()
        signatures[platform] = extension.signatures()
        for target, stages in found[platform].items():
            handler = stages["execute"] if set(stages) == {"execute"} else stages
            jax.ffi.register_ffi_target(target, handler, platform=platform)
    return found, signatures, cuda_import_error


HANDLERS, SIGNATURES, CUDA_IMPORT_ERROR = _register_handlers()


def gemm_algorithm(buffers: list[int], k_axes: int, split_accumulator: bool, k_first: str) -> str:
    """What a call of te_gemm with these attributes runs on this process's GPU, once compiled; "" where it is not."""
    if "CUDA" not in HANDLERS:
        return ""
    cuda = importlib.import_module("transformer_engine_jax._cuda")
    return cuda.gemm_algorithm(buffers, k_axes, split_accumulator, k_first)
