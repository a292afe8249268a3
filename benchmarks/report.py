"""What a run leaves behind: its rows as JSON, with all that is needed to repeat it."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import shlex
import subprocess
import sys

import jax

OURS_AND_PEERS = ("transformer-engine-jax", "transformer-engine")
PACKAGES = ("jax", "jaxlib", "flax", *OURS_AND_PEERS, "nvidia-cublas", "nvidia-cudnn-cu13")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with + where files differ from it; None outside a checkout."""
    git = ["git", "--no-optional-locks", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        out = subprocess.run(git, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=True)
        return out.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def document(path: pathlib.Path, benchmark: str, rows: list[dict]) -> dict:
    arguments = [path.name if argument == str(path) else argument for argument in sys.argv[1:]]  # no machine's folders
    return {
        "benchmark": benchmark,
        "command": shlex.join(["python", "-m", "benchmarks", *arguments]),
        "device": jax.devices()[0].device_kind,
        "versions": {package: v for package in PACKAGES if (v := _version(package))},
        "commit": _commit(),
        "rows": rows,
    }


def _rounded(value):
    """Five digits: more than a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


def save(path: pathlib.Path, benchmark: str, rows: list[dict]) -> None:
    """Writes the rows to `path`, one a line, so that a difference between two runs reads well."""
    head = document(path, benchmark, [])
    body = ",\n".join("  " + json.dumps(_rounded(row)) for row in rows)
    fields = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items() if k != "rows")
    path.write_text(f'{{\n{fields},\n "rows": [\n{body}\n ]\n}}\n')
