"""The report, and what a newcomer's machine may get wrong."""

import importlib.machinery
import os
import pathlib
import re
import subprocess
import sys

import jax

import transformer_engine_jax as te
from transformer_engine_jax import distribution, nnx, support


def python(code: str, **environment) -> subprocess.CompletedProcess:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)


def test_report_names_versions_targets_and_every_recipe():
    text = support.report()
    for name in ("python", "jax", "jaxlib", "flax", "backend", "cpu targets", "te_gemm", "te_quantize"):
        assert name in text
    status = dict((name, status) for name, status, _ in support.recipe_support())
    assert set(status) >= {"DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"}
    assert status["DelayedScaling"] == ("emulated" if jax.default_backend() == "cpu" else "supported")
    chosen = re.search("algorithms: (the fastest measured, kept in .|our kernel|the first offered)", text)
    assert bool(chosen) == (jax.default_backend() == "gpu")


def test_the_report_is_a_command():
    out = subprocess.run([sys.executable, "-m", "transformer_engine_jax"], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0 and re.search(r"^DelayedScaling +(supported|emulated|not supported)", out.stdout, re.M)
    wrong = subprocess.run([sys.executable, "-m", "transformer_engine_jax", "--gpu"], capture_output=True, timeout=120)
    assert wrong.returncode == 2 and b"unrecognized arguments: --gpu" in wrong.stderr


def test_the_report_is_there_where_jax_has_no_backend():
    command = [sys.executable, "-m", "transformer_engine_jax"]
    env = os.environ | {"JAX_PLATFORMS": "nonsense"}
    out = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert out.returncode == 0 and re.search("^backend +none, .*nonsense", out.stdout, re.M) and "te_gemm" in out.stdout


def test_the_package_s_version_is_that_of_what_is_installed():
    assert re.fullmatch(r"\d+\.\d+\.\d+", te.__version__)
    text = support.report()
    assert re.search(rf"^transformer-engine-jax +({re.escape(te.__version__)}|not installed)$", text, re.M)


def test_is_fp8_available_gives_a_reason():
    available, reason = te.is_fp8_available()
    assert available == (jax.default_backend() == "gpu") and (available or "GPU" in reason)


def test_import_is_quick_and_loads_no_gpu_library():
    code = """
import pathlib, time, jax, jax.numpy
began = time.perf_counter()
import transformer_engine_jax
took = time.perf_counter() - began
of_linux = pathlib.Path("/proc/self/maps")
maps = of_linux.read_text() if of_linux.exists() else ""
print(took, [name for name in ("libcuda.so", "libcublas", "libcudnn") if name in maps])
"""
    out = python(code, JAX_PLATFORMS="cpu")
    assert out.returncode == 0, out.stderr
    took, libraries = out.stdout.split(" ", 1)
    assert float(took) < 2 and libraries.strip() == "[]"


def test_another_distribution_with_our_import_name_is_named(tmp_path):
    folder = tmp_path / "site[1]"
    folder.mkdir()
    foreign = folder / ("transformer_engine_jax" + importlib.machinery.EXTENSION_SUFFIXES[0])
    foreign.touch()
    out = python(f"import sys; sys.path.append({str(folder)!r}); import transformer_engine_jax", JAX_PLATFORMS="cpu")
    assert out.returncode == 0 and str(foreign) in out.stderr and "separate virtual environments" in out.stderr


def test_a_missing_extension_says_how_to_build_it():
    code = """
import sys
sys.modules["transformer_engine_jax._cpu"] = None
import transformer_engine_jax
"""
    out = python(code, JAX_PLATFORMS="cpu")
    assert out.returncode != 0 and re.search(r"pip install (-e )?\.", out.stderr)


def test_an_installed_package_that_a_checkout_hides_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert distribution.hidden_installation() is None
    module = tmp_path / "transformer_engine_jax" / ("_cpu" + importlib.machinery.EXTENSION_SUFFIXES[0])
    module.parent.mkdir()
    module.touch()
    assert f"hides the package that is installed in {tmp_path}. Run" in distribution.hidden_installation()


def test_type_checkers_see_annotations_and_fields():
    assert (pathlib.Path(te.__file__).parent / "py.typed").exists()
    assert nnx.base.module.__dataclass_transform__["eq_default"] is False
