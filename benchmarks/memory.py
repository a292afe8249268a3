"""What a layer's step, on one or several, or a training step of layers needs of an H200's memory; without a GPU.

JAX's CUDA plugin compiles without a GPU or its driver: `pip install "jax[cuda13]"` beside a build with TE_CUDA=ON. Of
ours it says what an H200 measures; in Flax's layer XLA would choose products by timing them, and with them temporaries.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import sharded, train
from benchmarks.command import Columns, add_contenders, chosen
from benchmarks.layer import gradients
from benchmarks.peers import CONTENDERS
from benchmarks.shapes import SHAPES, Shape
from examples.gpt.training import adamw
from transformer_engine_jax.handlers import HANDLERS

DEFAULT = ["flax", "te"]
WITHOUT_A_GPU = {"xla_gpu_autotune_level": 0}
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


def mesh_of_h200s(devices: int = 1) -> jax.sharding.Mesh:
    """To compile for; SystemExit where the CUDA plugin or our CUDA module is not here."""
    from jax.experimental import topologies

    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # that of a driver
    if "CUDA" not in HANDLERS:
        raise SystemExit(
            "benchmarks memory: expected our CUDA module; build with `--config-settings=cmake.define.TE_CUDA=ON`"
        )
    try:
        topology = topologies.get_topology_desc("", "cuda", target_config=H200, topology=f"1x1x{devices}")
    except NotImplementedError:
        raise SystemExit('benchmarks memory: expected JAX\'s CUDA plugin; `pip install "jax[cuda13]"`') from None
    return jax.sharding.Mesh(np.array(topology.devices), (sharded.AXIS,))


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
            return step.lower(*args).compile(WITHOUT_A_GPU)


def compiled_sharded(name: str, shape: Shape, layout: str, mesh: jax.sharding.Mesh):
    """A layer's step as benchmarks.sharded times it, compiled for the mesh's devices."""
    program = sharded.Program(name, shape, sharded.LAYOUTS[layout], mesh)
    with program.context():
        return program.step.lower(*program.args).compile(WITHOUT_A_GPU)


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_contenders(command)
    add = command.add_argument
    add("--layers", type=int, default=0, help="of a training step (default: the gradients of one layer alone)")
    sharded.add_layouts(command, devices=1)


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each config and contender: GiB of temporaries, of what goes in and of what comes out, on each device.

    A step trains `--layers` layers and updates their parameters in place. Where these are 0 it is one layer's gradients
    alone, with a row for each of `--layouts` where `--devices` are several.
    """
    layers, devices = args.layers, args.devices
    against = chosen(args.against or DEFAULT, CONTENDERS if devices == 1 else sharded.CONTENDERS)
    if devices > 1 and layers:
        raise SystemExit(f"benchmarks memory: --layers: expected none with --devices, got {layers}")
    mesh = mesh_of_h200s(devices)
    layouts = args.layouts if devices > 1 else [sharded.ONE]
    for config, name, layout in itertools.product(args.config, against, layouts):
        shape = SHAPES[config]
        row = {"config": config, "contender": name, "compiled_for": "NVIDIA H200", "devices": devices}
        row |= {"layers": layers} if devices == 1 else {"layout": layout}
        if why := sharded.lack(name, layout, "auto", shape, devices) if devices > 1 else "":
            yield row | {"skipped": why}
            continue
        began = time.perf_counter()
        step = compiled(name, shape, layers, mesh) if devices == 1 else compiled_sharded(name, shape, layout, mesh)
        row["compile_s"], memory = time.perf_counter() - began, step.memory_analysis()
        yield row | {
            f"{what}_gib": getattr(memory, f"{what}_size_in_bytes") / 2**30 for what in ("temp", "argument", "output")
        }


def line(row: dict) -> str:
    what = f"{row['config']:>9} {row['contender']:<14}"
    if row["devices"] > 1:
        what += f" {row['devices']} x {row['layout']:<18}"
    if "skipped" in row:
        return f"{what} skipped: {row['skipped']}"
    return (
        f"{what} temporaries {row['temp_gib']:.3f} GiB, "
        f"in {row['argument_gib']:.3f}, out {row['output_gib']:.3f}  trace and compile {row['compile_s']:.1f} s"
    )


TITLE = "Memory of a step, compiled without a GPU"
COLUMNS: Columns = {
    "config": lambda r: f"{r['layers']} layers of {r['config']}, trained" if r.get("layers") else r["config"],
    "layer": lambda r: r["contender"],
    "for": lambda r: r["compiled_for"] + (f", {r['devices']} x {r['layout']}" if r["devices"] > 1 else ""),
    "temp GiB": lambda r: f"{r['temp_gib']:.2f}",
    "in GiB": lambda r: f"{r['argument_gib']:.2f}",
    "out GiB": lambda r: f"{r['output_gib']:.2f}",
}
