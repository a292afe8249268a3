"""What a user gets whose extension, JAX or GPU do not go together."""

import jax
import jax.numpy as jnp
import pytest

import transformer_engine_jax as te
from transformer_engine_jax import handlers, primitive


def test_the_modules_fit_the_jaxlib_that_is_installed():
    major, minor = handlers._ffi_version()
    handlers._check_version("_cpu", (major, minor))
    handlers._check_version("_cpu", (major, minor - 1))
    for newer in ((major, minor + 1), (major + 1, 0)):
        with pytest.raises(ImportError, match=r"_cpu was built with a newer jaxlib, of FFI .* build it again"):
            handlers._check_version("_cpu", newer)


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
