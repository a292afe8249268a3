"""How a kernel's call runs over a mesh: the shardings that its rule allows, and the collectives that these imply.

Of shapes and partition specs alone; primitive.py gives the plan to the compiler, or carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

if TYPE_CHECKING:
    from transformer_engine_jax.kernel import Call
    from transformer_engine_jax.rules import Axes


class _UntilCompiled:
    """Keeps alive what the compiler calls back; a serialized executable goes without it, which can't be pickled."""

    def __init__(self, kept: Any):
        self.kept = kept

    def __reduce__(self):
        return type(None), ()


def lowered(lower: Callable, ctx, *operands):
    """lower(ctx, *operands) of a function under custom_partitioning, whose program jax.experimental's
    serialize_executable can take once it is compiled: for callbacks JAX keeps functions of ours with the executable."""
    kept = ctx.module_context.keepalives
    before = len(kept)
    results = lower(ctx, *operands)
    kept[before:] = map(_UntilCompiled, kept[before:])
    return results


def names_of(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """The mesh axes of an entry of a partition spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def decoded(x: jax.ShapeDtypeStruct, mesh: Mapping[str, int]) -> PartitionSpec:
    """The mesh axes that shard each dimension of x, as the compiler has it; none of an axis that shards two.

    As of features over 4 devices that were reshaped to 2 heads. Partition specs have no name for it.
    """
    sharding = x.sharding._hlo_sharding
    if not sharding.is_tiled():
        return PartitionSpec()
    tiles, devices = sharding.tile_assignment_dimensions(), np.asarray(sharding.tile_assignment_devices())
    place_of = np.unravel_index(np.argsort(devices), tiles)[: len(x.shape)]  # of each device, its shard's in x
    places = np.stack(place_of).reshape(len(x.shape), *mesh.values())
    entries: list[list[tuple[int, str]]] = [[] for _ in x.shape]
    for i, (name, size) in enumerate(mesh.items(), 1):
        steps = np.diff(places, axis=i).reshape(len(x.shape), -1)
        (sharded,) = np.nonzero(steps.any(axis=1))
        if size > 1 and len(sharded) == 1 and np.ptp(steps[sharded[0]]) == 0:
            entries[sharded[0]].append((steps[sharded[0], 0], name))
    return PartitionSpec(*[tuple(name for _, name in sorted(entry, reverse=True)) or None for entry in entries])


def sharding_rule(call: Call, present) -> tuple[str, dict]:
    """The kernel's rule in Shardy's notation."""
    axes = call.axes(present)
    sides = [[n for n in side if n is not None] for side in axes]
    names = {n: f"x{i}" for i, n in enumerate(dict.fromkeys(n for side in sides for b in side for n in b))}
    text = " -> ".join(", ".join(" ".join(names[n] for n in b) for b in side) for side in sides)
    in_results = {n for b in sides[1] for n in b}
    whole = call.whole(axes)
    factors = {}
    if reduced := [names[n] for n in names if n not in in_results and n not in whole]:
        factors["reduction_factors"] = tuple(reduced)
    if whole:
        factors["need_replication_factors"] = tuple(names[n] for n in names if n in whole)
    return text, factors


def assign(call: Call, axes: Axes, mesh: Mapping[str, int], present, *specs: Sequence[Sequence]):
    """Mesh axes of every named axis that is sharded, from buffers' partition specs; a mesh axis is used once.

    An axis is sharded evenly, in multiples of its unit, or not at all: the compiler fills up the last shard with
    anything, which a sum or a maximum would take in.

    mesh: the size of each mesh axis. specs: of the operands, and of the results where they are known.
    """
    kernel, whole = call.kernel, call.whole(axes)
    shapes = [x.shape for x in (*present, *call.result_shapes(present)) if x is not None]
    buffers = [*zip(kernel.operand_names, axes.operands), *zip(kernel.result_names, axes.results)]
    found = list(zip([b for b in buffers if b[1] is not None], shapes, [spec for side in specs for spec in side]))
    deciding = [x for x in found if x[0][0] in kernel.by_shard.values()]
    assigned: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for (_, names), shape, spec in deciding or found[: len(specs[0])]:
        for name, size, entry in zip(names, shape, spec):
            entry = dividing(size, kernel.units.get(name, 1), names_of(entry), mesh)
            if entry and name not in assigned and name not in whole and not used.intersection(entry):
                assigned[name] = entry
                used.update(entry)
    return assigned


def dividing(size: int, unit: int, names: Sequence[str], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The first of these mesh axes, as many as an axis of this size divides over in multiples of the unit."""
    count, kept = unit, ()
    for name in names:
        count *= mesh[name]
        if size % count:
            break
        kept += (name,)
    return kept


def spec_of(names: Sequence[str], assigned: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*[assigned.get(n) for n in names])


class Plan(NamedTuple):
    """How one call runs on a mesh: partition specs, and what each device does with its shards."""

    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]
    local: Callable


def plan(call: Call, run: Callable, mesh: Mapping[str, int], operands, *specs: Sequence[Sequence]) -> Plan:
    """The shardings that the rule allows, nearest to the operands' own, and the collectives it implies.

    run: a call on one device's buffers. mesh, specs: as in `assign`.
    """
    axes = call.axes(operands)
    assigned = assign(call, axes, mesh, operands, *specs)
    results = [(name, n) for name, n in zip(call.kernel.result_names, axes.results) if n is not None]
    names = [name for name, gone in zip(call.kernel.operand_names, call.absent) if not gone]
    lost = {r: [a for n, axs in assigned.items() if n not in kept for a in axs] for r, kept in results}
    summed = [a for r, op in call.kernel.reduce.items() if op == "sum" for a in lost.get(r, ())]
    sharded = sorted(a for axs in assigned.values() for a in axs)
    # What shards give in the place of a result that can't be combined, and what makes that of it.
    instead = {r: how for r, how in call.kernel.reduce.items() if lost.get(r) and not isinstance(how, str)}
    attributes = dict(call.attributes) | {r: False for r in instead} | {by: True for by, _ in instead.values()}
    given = [instead[r][0] if r in instead else r for r, _ in results]
    order = [r for r in call.kernel.result_names if r in given]

    def local(*args):
        args, of_each = list(args), dict(attributes)
        for i, name in enumerate(names):
            if name in call.kernel.parts and summed:
                of_each[call.kernel.parts[name]] /= jax.lax.axis_size(tuple(summed))
            if name in call.kernel.once and summed:
                first = sum(jax.lax.axis_index(a) for a in summed) == 0
                args[i] = jnp.where(first, args[i], jnp.zeros_like(args[i]))
            if name in call.kernel.by_shard and sharded:
                args[i] = args[i].at[0].add(jax.lax.axis_index(tuple(sharded)).astype(args[i].dtype))
        of_shard = dict(zip(order, run(call._replace(attributes=tuple(of_each.items())), *args)))
        out = [_combine(call, name, of_shard[name], lost[r]) for name, (r, _) in zip(given, results)]
        return tuple(instead[r][1](x) if r in instead else x for x, (r, _) in zip(out, results))

    operand_specs = tuple(spec_of(n, assigned) for n in axes.operands if n is not None)
    return Plan(operand_specs, tuple(spec_of(n, assigned) for _, n in results), local)


def _combine(call: Call, result: str, x, mesh_axes: list[str]):
    how = call.kernel.reduce.get(result)
    if not mesh_axes or how == "same":
        return x
    if how == "max":
        return pmax(x, tuple(mesh_axes))
    if how == "sum":
        return jax.lax.psum(x, tuple(mesh_axes))
    raise AssertionError(f"{call.kernel.name}: {result} lost the mesh axes {mesh_axes} and has no `reduce`")


def pmax(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Maximum of f32 amaxes over mesh axes, NaN where any shard has one (collectives may drop it)."""
    # For non-negative floats the order of the bits is the order of the values, with NaN above all.
    return jax.lax.bitcast_convert_type(jax.lax.pmax(jax.lax.bitcast_convert_type(x, jnp.int32), axes), jnp.float32)
