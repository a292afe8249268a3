"""Eight virtual CPU devices for the sharding tests, and f32 products in f32; must run before JAX starts."""

import os
from importlib.metadata import version
from pathlib import Path

flags = os.environ.get("XLA_FLAGS", "").split()
if not any("xla_force_host_platform_device_count" in flag for flag in flags):
    flags.append("--xla_force_host_platform_device_count=8")
if not Path("/dev/nvidiactl").exists():
    # Most of the time of these tests is the compiler's, on programs that run once.
    flags += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    flags.append("--xla_cpu_parallel_codegen_split_count=1")  # of programs this small, parts cost more than they save
    if version("jaxlib").startswith("0.10."):  # later ones have no choice, and do not know the flag
        flags.append("--xla_cpu_use_fusion_emitters=false")  # in whose place older code takes half the time
os.environ["XLA_FLAGS"] = " ".join(flags)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU

import jax  # noqa: E402
import pytest  # noqa: E402

# On GPUs JAX multiplies f32 in TF32 by default, and 10 bits are no reference.
jax.config.update("jax_default_matmul_precision", "highest")

from transformer_engine_jax import decisions, precision  # noqa: E402

# Most tests are of FP8 at sizes for which a GPU would not use it; tests/test_precision.py is of that choice. Nor would
# it use kernels for so few tokens; tests/flax/test_decode.py is of that.
precision.platform = lambda: "cpu"
decisions.FEW_TOKENS = decisions.FEW_WHERE_CONVERTED = 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes that `-n auto` starts: one a core, of which each needs up to 4 GiB of memory (`bounded`)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    of_container = Path("/sys/fs/cgroup/memory.max")
    if of_container.exists() and (limit := of_container.read_text().strip()) != "max":
        memory = min(memory, int(limit))
    return max(1, min(cores, memory // 2**32))


PROC = Path("/proc/self")


@pytest.fixture(autouse=True, scope="module")
def bounded():
    """Compiled programs are let go of where they take over 3 GiB of memory, or a third of the pieces that Linux allows.

    Past 65530 pieces XLA crashes.
    """
    yield
    if not PROC.exists():
        return
    pieces = (PROC / "maps").read_bytes().count(b"\n")
    resident = int((PROC / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if pieces > 20000 or resident > 3 * 2**30:
        jax.clear_caches()
