"""Whether another distribution has this package's import name, or a checkout hides the one that is installed."""

from __future__ import annotations

import glob
import importlib.machinery
import os
import sys


def name_conflict() -> str | None:
    """The path of another distribution's compiled module of this package's name, and what to do; None if alone."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for folder in dict.fromkeys([*sys.path, here]):
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            for path in glob.glob(os.path.join(glob.escape(folder or "."), "transformer_engine_jax" + suffix)):
                return (
                    f"{path} has the import name transformer_engine_jax too (NVIDIA's transformer_engine[jax] installs "
                    "such a compiled module). Only one of the two can be imported: use separate virtual environments, "
                    "or `pip uninstall transformer_engine transformer_engine_jax` and install this package again."
                )
    return None


def hidden_installation() -> str | None:
    """Where the package is installed that a checkout of sources alone hides, and what to do; None if it hides none."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for folder in sys.path:
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            if os.path.exists(os.path.join(folder, "transformer_engine_jax", "_cpu" + suffix)):
                return (
                    f"{here} has the sources alone, and hides the package that is installed in {folder}. Run Python in "
                    "another folder, or install with `pip install -e .`, which works in all."
                )
    return None
