"""Eight virtual CPU devices for the sharding tests, and f32 products in f32; must run before JAX starts."""

import os

flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()

import jax  # noqa: E402

# On GPUs JAX multiplies f32 in TF32 by default, and 10 bits are no reference.
jax.config.update("jax_default_matmul_precision", "highest")
