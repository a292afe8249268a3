"""One Transformer layer, forward and backward, over all devices against one of them: speed, and that it is the same."""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from benchmarks.command import Columns, add_contenders, add_timing, chosen, timing
from benchmarks.compare import off
from benchmarks.layer import gradients, temp_gib
from benchmarks.peers import FlaxLayer, our_layer
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import interleaved
from transformer_engine_jax import recipe


class Contender(NamedTuple):
    make: Callable[..., nn.Module]  # of a shape and fields
    recipe: recipe.Recipe | None = None
    round_wgrad: bool = False


CONTENDERS = {
    "flax": Contender(FlaxLayer),
    "te-bf16": Contender(our_layer),
    "te-delayed": Contender(our_layer, recipe.DelayedScaling()),
    "te-delayed-rounded": Contender(our_layer, recipe.DelayedScaling(), round_wgrad=True),
    "te-current": Contender(our_layer, recipe.Float8CurrentScaling()),
}
DEFAULT = ["flax", "te-bf16", "te-delayed", "te-current"]
AXIS, ONE = "devices", "one device"
AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
CONTEXT = dict(context_parallel_axis=AXIS, context_parallel_causal_load_balanced=True)


class Layout(NamedTuple):
    """What the mesh's one axis splits, and how the layer is told."""

    resource: te.MeshResource
    splits: tuple[str, ...]  # sizes of the Shape, which the number of devices must divide
    x: PartitionSpec = PartitionSpec()  # of activations [B, S, H]
    fields: Mapping[str, Any] = MappingProxyType({})


LAYOUTS = {
    "data": Layout(te.MeshResource(dp_resource=AXIS), ("batch",), PartitionSpec(AXIS)),
    "fsdp": Layout(te.MeshResource(fsdp_resource=AXIS), ("batch", "hidden"), PartitionSpec(AXIS)),
    "tensor": Layout(te.MeshResource(tp_resource=AXIS), ("groups", "mlp")),
    "tensor+sequence": Layout(
        te.MeshResource(tpsp_resource=AXIS),
        ("groups", "mlp", "seq"),
        PartitionSpec(None, AXIS),
        dict(enable_sequence_parallel=True),
    ),
    "context, gathered": Layout(
        te.MeshResource(cp_resource=AXIS),
        ("seq",),
        PartitionSpec(None, AXIS),
        dict(CONTEXT, context_parallel_strategy="ALL_GATHER"),
    ),
    "context, ring": Layout(
        te.MeshResource(cp_resource=AXIS),
        ("seq",),
        PartitionSpec(None, AXIS),
        dict(CONTEXT, context_parallel_strategy="RING"),
    ),
}


class Program:
    """The step of a layer on a mesh, whose devices need not be here: `args` are abstract, and lie as they should."""

    def __init__(self, name: str, shape: Shape, layout: Layout, mesh: Mesh):
        self.contender, self.layout, self.mesh = CONTENDERS[name], layout, mesh
        layer, key = self.contender.make(shape, **layout.fields), jax.random.key(2)
        x = jax.ShapeDtypeStruct((shape.batch, shape.seq, shape.hidden), jnp.bfloat16)
        x = x.update(sharding=NamedSharding(mesh, layout.x))

        def init(key, x):
            return nn.unbox(layer.init(key, x))

        with self.context():
            boxed = jax.eval_shape(layer.init, key, x)
            boxed = FlaxLayer.boxed(boxed) if name == "flax" else boxed
            sharding = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, nn.get_logical_axis_rules())
            variables = jax.eval_shape(init, key, x)
        variables = jax.tree.map(lambda a, s: a.update(sharding=s), variables, sharding)
        state, params = flax.core.pop(variables, "params")
        self.args = params, state, x, x
        # Gradients lie as the parameters do, for an optimizer: under FSDP XLA scatters their sums.
        placed = jax.tree.map(lambda a: a.sharding, (x, params, state, x))
        self.step, self.init = jax.jit(gradients(layer), out_shardings=placed), jax.jit(init, out_shardings=sharding)

    @contextlib.contextmanager
    def context(self):
        _, fp8, rounds = self.contender
        with (
            jax.set_mesh(self.mesh),
            te.autocast(fp8 is not None, fp8, mesh_resource=self.layout.resource, round_wgrad=rounds),
            nn.logical_axis_rules(te_flax.extend_logical_axis_rules(())),
        ):
            yield


class Step:
    """A compiled step on a mesh: all gradients of a layer under a fixed random cotangent; keeps its FP8 state."""

    def __init__(self, name: str, shape: Shape, layout: Layout, devices: list[jax.Device], axes: AxisType):
        mesh = Mesh(np.array(devices), (AXIS,), axis_types=(axes,))
        program = Program(name, shape, layout, mesh)
        balanced = "context_parallel_axis" in layout.fields
        self.ordered, self.restored = (
            partial(f, cp_size=len(devices)) if balanced else lambda x: x
            for f in (te.reorder_causal_load_balancing, te.inverse_reorder_causal_load_balancing)
        )

        def normal(seed: int) -> jax.Array:  # drawn on the host: the same numbers whatever the layout
            size = (shape.batch, shape.seq, shape.hidden)
            values = np.random.default_rng(seed).standard_normal(size, np.float32)
            return jax.device_put(self.ordered(values.astype(jnp.bfloat16)), NamedSharding(mesh, layout.x))

        self.x, self.dy = normal(0), normal(1)
        with program.context():
            self.state, self.params = flax.core.pop(program.init(jax.random.key(2), self.x), "params")
            self.compiled = program.step.lower(*program.args).compile()
        self.temp_gib = temp_gib(self.compiled)

    def __call__(self):
        out = self.compiled(self.params, self.state, self.x, self.dy)
        self.state = out[2]
        return out

    def results(self) -> dict[str, Any]:
        """The output and the gradients of a first step."""
        y, dparams, _, dx = self.compiled(self.params, self.state, self.x, self.dy)
        return {"output": self.restored(y), "gradients": (dparams, self.restored(dx))}


def add_layouts(command: argparse.ArgumentParser, devices: int | None = None) -> None:
    """--devices and --layouts. devices: as many by default; None: all."""
    add = command.add_argument
    add("--devices", type=int, default=devices, metavar="N", help=f"how many (default: {devices or 'all'})")
    add("--layouts", choices=list(LAYOUTS), nargs="+", default=list(LAYOUTS))


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_contenders(command)
    add_timing(command)
    add_layouts(command)
    command.add_argument("--axes", choices=list(AXES), default="auto", help="of the mesh: the compiler's, or in types")


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each config, contender and layout: ms, ratios to one device and to the first contender, and errors.

    Raises SystemExit where there is only one device, or fewer than asked for.
    """
    against, axes, layouts = chosen(args.against or DEFAULT, CONTENDERS), args.axes, args.layouts
    asked, devices = args.devices or 2, jax.devices()[: args.devices]
    if len(devices) < max(asked, 2):
        raise SystemExit(
            f"benchmarks: sharded: expected {max(asked, 2)} devices or more, got {len(devices)} "
            f"({devices[0].device_kind}); on a CPU XLA_FLAGS=--xla_force_host_platform_device_count={max(asked, 2)} "
            "emulates them"
        )
    for config in args.config:
        steps: dict[tuple[str, str], Step] = {}
        errors, skipped = {}, {}
        for name in against:
            make = partial(Step, name, SHAPES[config])
            one = steps[name, ONE] = make(Layout(te.MeshResource(), ()), devices[:1], AxisType.Auto)
            expected = one.results()
            for layout in layouts:
                if why := lack(name, layout, axes, SHAPES[config], len(devices)):
                    skipped[name, layout] = why
                    continue
                step = steps[name, layout] = make(LAYOUTS[layout], devices, AXES[axes])
                got = step.results()
                errors[name, layout] = {f"{what}_off": off(got[what], expected[what]) for what in expected}
        timings = interleaved(steps, **timing(args))
        for name, layout in itertools.product(against, [ONE, *layouts]):
            which = name, layout
            row = {"config": config, "contender": name, "devices": 1 if layout == ONE else len(devices)}
            row |= {"layout": layout}
            if which in skipped:
                yield row | {"skipped": skipped[which]}
                continue
            ms, spread = timings[which]
            row |= {"ms": ms, "spread": spread, "speedup": timings[name, ONE].median / ms}
            if (first := (against[0], layout)) in timings:
                row |= {"speedup_over_first": timings[first].median / ms}
            yield row | {"temp_gib": steps[which].temp_gib} | errors.get(which, {})


def lack(name: str, layout: str, axes: str, shape: Shape, devices: int) -> str:
    """Why a contender has no such layout of the shape over so many devices, "" where it has."""
    balanced = "context_parallel_axis" in LAYOUTS[layout].fields
    if name == "flax" and balanced:
        return "Flax and JAX have no attention of sharded sequences"
    if name == "flax" and axes == "explicit":
        return "Flax's modules do not say how products of sharded types lie"
    parts = 2 * devices if balanced else devices
    uneven = [f"{what} {getattr(shape, what)}" for what in LAYOUTS[layout].splits if getattr(shape, what) % parts]
    return f"expected multiples of {parts}, got {', '.join(uneven)}" if uneven else ""


def line(row: dict) -> str:
    off = "".join(f"  {what} off {row[f'{what}_off']:.1e}" for what in ("output", "gradients") if f"{what}_off" in row)
    what = f"{row['config']:>6} {row['contender']:<11} {row['devices']} x {row['layout']:<18}"
    if "skipped" in row:
        return f"{what} skipped: {row['skipped']}"
    speed = f"{row['ms']:8.3f} ms  x{row['speedup']:.2f} of one device"
    if "speedup_over_first" in row:
        speed += f"  x{row['speedup_over_first']:.2f}"
    speed += f"  +-{row['spread']:.1%}"
    return f"{what} {speed}  temp {row['temp_gib']:.2f} GiB{off}"


TITLE = "One Transformer layer over several GPUs"
COLUMNS: Columns = {
    "config": lambda r: r["config"],
    "layer": lambda r: r["contender"],
    "GPUs": lambda r: f"{r['devices']} x {r['layout']}" if r["devices"] > 1 else "1",
    "ms": lambda r: f"{r['ms']:.3g}",
    "of one GPU": lambda r: f"{r['speedup']:.2f}",
    "speed-up": lambda r: f"{r['speedup_over_first']:.2f}" if "speedup_over_first" in r else "",
    "temp GiB": lambda r: f"{r['temp_gib']:.2f}",
}
