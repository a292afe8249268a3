"""Training over the devices of two processes, as on two hosts, is that of one process that has them all."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from transformer_engine_jax import testing

# PROCESS COUNT PORT FOLDER: trains layers over 2 x 2 devices of COUNT processes, and writes what they then are.
PROGRAM = """
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx

process, count, port, folder = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
if count > 1:
    jax.distributed.initialize(f"localhost:{port}", count, process, initialization_timeout=120)
assert jax.device_count() == 4 and jax.local_device_count() == 4 // count

X = np.random.default_rng(0).standard_normal((8, 16, 32), np.float32)
FIELDS = dict(hidden_size=32, mlp_hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0)
RECIPE = te.recipe.DelayedScaling(amax_history_len=4)


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


def placed(mesh):
    return jax.make_array_from_callback(X.shape, NamedSharding(mesh, PartitionSpec("data")), lambda index: X[index])


def linen():
    mesh = mesh_of(AxisType.Auto)
    layer = te_flax.TransformerLayer(**FIELDS)
    resource = te.MeshResource(fsdp_resource="data", tp_resource="model")
    with jax.set_mesh(mesh), te.autocast(True, RECIPE, mesh_resource=resource):
        boxed = jax.eval_shape(layer.init, jax.random.key(0), X)
        rules = te_flax.extend_logical_axis_rules(())
        shardings = nn.unbox(nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules))
        variables = jax.jit(lambda: nn.unbox(layer.init(jax.random.key(0), X)), out_shardings=shardings)()

        @jax.jit
        def step(variables, x):
            gradients = jax.grad(lambda v: ((layer.apply(v, x, deterministic=True) - x) ** 2).mean())(variables)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], gradients["params"])
            return {**gradients, "params": params}

        variables = step(variables, placed(mesh))
        with ocp.CheckpointManager(f"{folder}/checkpoints") as manager:
            manager.save(1, args=ocp.args.StandardSave(variables))
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), variables)
        with ocp.CheckpointManager(f"{folder}/checkpoints") as manager:
            variables = manager.restore(1, args=ocp.args.StandardRestore(like))
        return step(variables, placed(mesh))


def on_nnx():
    mesh = mesh_of(AxisType.Explicit)
    resource = te.MeshResource(dp_resource="data", tp_resource="model")
    with jax.set_mesh(mesh), te.autocast(True, RECIPE, mesh_resource=resource):
        model = nnx.jit(lambda: te_nnx.TransformerLayer(**FIELDS, rngs=nnx.Rngs(0)))()

        @nnx.jit
        def step(model, x):
            loss = lambda model: ((model(x, deterministic=True) - x) ** 2).mean()
            gradients = te_nnx.update_state(model, nnx.grad(loss, argnums=nnx.DiffState(0, te_nnx.TRAINED))(model))
            params = nnx.state(model, nnx.Param)
            nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients))

        with open(f"{folder}/program.{process}", "w") as file:
            file.write(step.lower(model, placed(mesh)).as_text())
        for _ in range(2):
            step(model, placed(mesh))
        return nnx.state(model, te_nnx.TRAINED)


for name, train in {"linen": linen, "nnx": on_nnx}.items():
    arrays = [np.asarray(multihost_utils.process_allgather(x, tiled=True)) for x in jax.tree.leaves(train())]
    if process == 0:
        np.savez(f"{folder}/{name}.npz", *arrays)
"""


def start(process: int, count: int, port: int, folder: Path) -> subprocess.Popen:
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    flags.append(f"--xla_force_host_platform_device_count={4 // count}")
    with (folder / f"{process}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(process), str(count), str(port), str(folder)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "PYTHONHASHSEED": str(process + 1)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def run_together(folders: dict[int, Path]) -> None:
    """One process that trains alone, and two together; where one fails, none is left behind."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = {
        folder / f"{process}.log": start(process, count, port, folder)
        for count, folder in folders.items()
        for process in range(count)
    }
    try:
        while any(process.poll() is None for process in running.values()):
            for log, process in running.items():
                assert process.poll() in (None, 0), log.read_text()[-4000:]
            time.sleep(0.1)
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def test_two_processes_train_as_one_does(tmp_path):
    folders = {1: tmp_path / "alone", 2: tmp_path / "together"}
    for folder in folders.values():
        folder.mkdir()
    run_together(folders)
    one, other = ((folders[2] / f"program.{process}").read_text() for process in range(2))
    assert one == other, "their hashes differ, and sets have another order in each"
    for name in ("linen", "nnx"):
        alone, together = (list(np.load(folder / f"{name}.npz").values()) for folder in folders.values())
        assert len(alone) > 8 and any(x.shape[-2:] == (3, 6) for x in alone), "parameters and states"
        testing.assert_close(together, alone, 1e-5)
