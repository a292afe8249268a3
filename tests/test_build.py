"""What CMake says of a CUDA compiler that will not do."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TOOLS = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])


pytestmark = pytest.mark.skipif(not shutil.which("cmake", path=TOOLS), reason="no cmake")


@pytest.fixture
def configure(tmp_path):
    """(settings, of the environment) -> CMake's run, where there are a GPU and an nvcc that does not work."""
    pytest.importorskip("nanobind")
    for name, code in {"nvidia-smi": "echo GPU 0: H200", "nvcc": "echo unsupported GNU version; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)

    def run(*settings: str, **environment: str) -> subprocess.CompletedProcess:
        command = ["cmake", "-S", ROOT, "-B", tmp_path / "build", f"-DPython_EXECUTABLE={sys.executable}", *settings]
        env = {name: value for name, value in os.environ.items() if not name.startswith("CUDA")} | environment
        env["PATH"] = f"{tmp_path}{os.pathsep}{TOOLS}"
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)

    return run


def test_an_nvcc_that_does_not_work_is_named_and_not_kept(configure, tmp_path):
    broken = configure()
    assert broken.returncode == 1 and "unsupported GNU version" in broken.stdout
    assert f"TE_CUDA=AUTO needs a CUDA compiler that works: what {tmp_path}/nvcc" in " ".join(broken.stderr.split())
    assert "CMAKE_CUDA_COMPILER" not in (tmp_path / "build" / "CMakeCache.txt").read_text()
    assert configure("-DTE_CUDA=OFF").returncode == 0


def test_another_nvcc_is_not_blamed_for_what_cudacxx_names(configure):
    missing = configure("-DTE_CUDA=ON", CUDACXX="/nowhere/nvcc")
    assert missing.returncode == 1 and "unsupported GNU version" not in missing.stdout
    assert "TE_CUDA=ON needs a CUDA compiler: install" in " ".join(missing.stderr.split())
