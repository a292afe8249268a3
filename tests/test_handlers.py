"""Every kernel has its handlers; and what a user gets whose extension, JAX or GPU do not go together."""

import importlib
import pathlib
import pkgutil
import re
import types

import jax
import jax.numpy as jnp
import pytest

import transformer_engine_jax as te
from transformer_engine_jax import handlers, ops, primitive
from transformer_engine_jax.handlers import HANDLERS
from transformer_engine_jax.kernel import Kernel
from transformer_engine_jax.ops.attention import flash

ROOT = pathlib.Path(__file__).parent.parent


def declared() -> dict[str, Kernel]:
    """Every kernel of the package by its name."""
    names = [module.name for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")]
    modules = [vars(importlib.import_module(name)).values() for name in names]
    return {each.name: each for module in modules for each in module if isinstance(each, Kernel)}


@pytest.mark.parametrize("platform, suffix", [("cpu", "cc"), ("cuda", "cu")])
def test_every_kernel_has_its_handlers(platform, suffix):
    sources = (ROOT / "cpp" / "ops").glob(f"*.{suffix}")
    handlers = {name for path in sources for name in re.findall(r"^TE_HANDLER\((\w+),", path.read_text(), re.M)}
    kernels = {name for name, each in declared().items() if platform in each.platforms}
    assert handlers - {"after"} == kernels  # of ops/after.py, which is no kernel
    built = {target.removeprefix("te_") for target in HANDLERS.get("cpu" if platform == "cpu" else "CUDA", handlers)}
    without_cudnn = {name for name in handlers if name.startswith("attention_")} if flash.missing() else set()
    assert built | without_cudnn == handlers


def test_the_sanitizer_runs_every_kernel_of_ours():
    """What attention's handlers launch of our own is in ops/packed_rows.cu; the others do no more than call cuDNN."""
    tried = set(re.findall(r'check\(\s*"(\w+)"', (ROOT / "cpp" / "sanitize.cu").read_text()))
    ours = {name for name, each in declared().items() if "cuda" in each.platforms and not name.startswith("attention_")}
    assert ours - tried == set()


def test_the_modules_fit_the_jaxlib_that_is_installed():
    major, minor = handlers._ffi_version()
    handlers._check_version("_cpu", (major, minor))
    handlers._check_version("_cpu", (major, minor - 1))
    for newer in ((major, minor + 1), (major + 1, 0)):
        with pytest.raises(ImportError, match=r"_cpu was built with a newer jaxlib, of FFI .* build it again"):
            handlers._check_version("_cpu", newer)


def test_modules_of_older_sources_are_refused(monkeypatch):
    old = types.SimpleNamespace(ffi_version=(0, 0))
    monkeypatch.setattr(importlib, "import_module", lambda name: old)
    with pytest.raises(ImportError, match=r"_cpu was built of older sources; build it with `pip install .`"):
        handlers._register_handlers()


def test_modules_of_a_newer_jaxlib_are_not_registered(monkeypatch):
    monkeypatch.setattr(handlers, "_ffi_version", lambda: (0, 0))
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: pytest.fail("registered"))
    with pytest.raises(ImportError, match="_cpu was built with a newer jaxlib"):
        handlers._register_handlers()


def test_gpus_that_the_kernels_are_not_compiled_for_are_named(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(handlers.HANDLERS, "CUDA", {})
    monkeypatch.setattr(primitive, "compute_capabilities", lambda: [9.0, 8.0])
    call = lambda x: te.quantize(x, 1.0, dtype=jnp.float8_e4m3fn)
    with pytest.raises(RuntimeError, match=r"quantize: expected GPUs of compute capability 8.9 .* got 8.0; hide it"):
        jax.jit(call).trace(jnp.ones((16, 16))).lower(lowering_platforms=("cuda",))
