"""What a layer's step, or a training step of several, needs of an H200's memory, compiled where there is none.

JAX's CUDA plugin compiles without a GPU or its driver: `pip install "jax[cuda13]"` beside a build with TE_CUDA=ON. Of
ours it says what an H200 measures; in Flax's layer XLA would choose products by timing them, and with them temporaries.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import train
from benchmarks.layer import gradients
from benchmarks.peers import CONTENDERS
from benchmarks.shapes import SHAPES, Shape
from examples.gpt.training import adamw
from transformer_engine_jax.handlers import HANDLERS

DEFAULT = ["flax", "te"]
# What XLA asks of a GPU, in the text format of its GpuTargetConfigProto.
H200 = """
gpu_device_info {
  name: "NVIDIA H200"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.19.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 19 }
"""


def mesh_of_an_h200() -> jax.sharding.Mesh:
    """Of one, to compile for; SystemExit where the CUDA plugin or our CUDA module is not here."""
    from jax.experimental import topologies

    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # that of a driver
    if "CUDA" not in HANDLERS:
        raise SystemExit(
            "benchmarks memory: expected our CUDA module; build with `--config-settings=cmake.define.TE_CUDA=ON`"
        )
    try:
        topology = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1")
    except NotImplementedError:
        raise SystemExit('benchmarks memory: expected JAX\'s CUDA plugin; `pip install "jax[cuda13]"`') from None
    return jax.sharding.Mesh(np.array(topology.devices), ("device",))


def compiled(name: str, shape: Shape, layers: int, mesh: jax.sharding.Mesh):
    """A layer's step as benchmarks.layer times it, or a training step of layers, compiled for the mesh's device."""
    layer, context = CONTENDERS[name](shape)
    key = jax.random.key(0)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = dict(in_shardings=everywhere, out_shardings=everywhere)
    x = jax.ShapeDtypeStruct((shape.batch, shape.seq, shape.hidden), jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((shape.batch, shape.seq), jnp.int32)
    model, of_model = (train.Decoder(shape, layers, name), tokens) if layers else (layer, x)
    with context():
        variables = nn.unbox(jax.eval_shape(lambda x: model.init(key, x), of_model))
        if layers:
            optimizer = adamw(1e-4, 10, 100)
            windows = jax.ShapeDtypeStruct((shape.batch, shape.seq + 1), jnp.uint8)
            step = train.step(model, optimizer, **placed)
            args = variables, jax.eval_shape(optimizer.init, variables["params"]), windows
        else:
            state, params = flax.core.pop(variables, "params")
            step, args = jax.jit(gradients(layer), **placed), (params, state, x, x)
        with jax.set_mesh(mesh):
            return step.lower(*args).compile({"xla_gpu_autotune_level": 0})


def run(configs: list[str], against: list[str], layers: int = 0) -> Iterator[dict]:
    """A row for each config and contender: GiB of temporaries, of what goes in and of what comes out.

    layers: how many a training step has, which updates its parameters in place; 0: one layer's gradients alone.
    """
    mesh = mesh_of_an_h200()
    for config in configs:
        for name in against:
            began = time.perf_counter()
            memory = compiled(name, SHAPES[config], layers, mesh).memory_analysis()
            row = {"config": config, "contender": name, "layers": layers, "compiled_for": "NVIDIA H200"}
            row["compile_s"] = time.perf_counter() - began
            for what in ("temp", "argument", "output"):
                row[f"{what}_gib"] = getattr(memory, f"{what}_size_in_bytes") / 2**30
            yield row


def line(row: dict) -> str:
    return (
        f"{row['config']:>9} {row['contender']:<14} temporaries {row['temp_gib']:.3f} GiB, "
        f"in {row['argument_gib']:.3f}, out {row['output_gib']:.3f}  trace and compile {row['compile_s']:.1f} s"
    )
