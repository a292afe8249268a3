"""The primitive of all kernels' calls: what it lowers to on each platform and mesh, and how it is batched.

The only module that defines it, and with ops/after.py the only one that touches ffi_call and custom_partitioning;
partition.py plans meshes for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.config import eager_constant_folding
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_engine_jax import derivatives, partition
from transformer_engine_jax.alignment import align, explicit_meshes
from transformer_engine_jax.decisions import compute_capabilities
from transformer_engine_jax.handlers import CUDA_IMPORT_ERROR, HANDLERS, SIGNATURES
from transformer_engine_jax.rules import is_group
from transformer_engine_jax.sharding import sharded_over

if TYPE_CHECKING:
    from transformer_engine_jax.kernel import Call

NO_MESH = jax.sharding.AbstractMesh((), ())

OLDEST_GPU = 8.9  # compute capability of Ada

# --- The FFI call ------------------------------------------------------------------------------------------------

_ABSENT = jax.ShapeDtypeStruct((0,), jnp.float32)


def _ffi_attributes(call: Call) -> dict[str, Any]:
    """Static attributes as the handlers decode them, less what shows in the results' buffers."""
    out, attributes = {}, []
    for name, value in call.attributes:
        attributes += value._asdict().items() if hasattr(value, "_asdict") else [(name, value)]
    for name, value in attributes:
        if name in call.kernel.result_names or name == "in_place":
            continue
        if isinstance(value, str | bool):
            out[name] = value
        elif isinstance(value, int):
            out[name] = np.int64(value)
        elif isinstance(value, float):
            out[name] = np.float32(value)
        elif not isinstance(value, np.dtype | None):
            raise TypeError(f"{call.kernel.name}: {name}: expected a static number, name or switch, got {value!r}")
    return out


def _aliases(call: Call, operands: Sequence[Any], results: Sequence[Any]) -> dict[int, int]:
    """The numbers of the operands whose buffers become results', and of these."""
    if not dict(call.attributes).get("in_place"):
        return {}
    kernel = call.kernel
    pairs = [(kernel.operand_names.index(o), kernel.result_names.index(r)) for o, r in kernel.aliases.items()]
    layout = lambda x: (tuple(x.shape), np.dtype(x.dtype))
    return {o: r for o, r in pairs if layout(operands[o]) == layout(results[r])}


# XLA's numbers of dtypes (PrimitiveType in xla_data.proto), as the handlers have them.
_DTYPE_NUMBERS = {
    "bool": 1, "int32": 4, "uint8": 6, "uint32": 8, "float16": 10, "float32": 11, "bfloat16": 16, "float8_e5m2": 19,
    "float8_e4m3fn": 20,
}  # fmt: skip


def _described(buffers: Sequence[Any]) -> np.ndarray:
    """i64[..] of each buffer its dtype, its rank and its dimensions; empty where some are not known yet."""
    numbers = [[_DTYPE_NUMBERS[np.dtype(x.dtype).name], len(x.shape), *x.shape] for x in buffers]
    known = all(isinstance(n, int) for of_one in numbers for n in of_one)
    return np.array([n for of_one in numbers for n in of_one] if known else [], np.int64)


def _ffi_call(call: Call, platform: str, *present) -> tuple:
    operands = [jnp.zeros((0,), jnp.float32) if x is None else x for x in call.fill(present)]
    shapes = call.result_shapes(present)
    results = [_ABSENT if s is None else s for s in shapes]
    if call.kernel.workspace and platform == "cuda":
        size = call.kernel.workspace(*call.fill(present), **dict(call.attributes))
        results.append(jax.ShapeDtypeStruct((size,), jnp.uint8))
    attributes = _ffi_attributes(call)
    if call.kernel.prepared and platform == "cuda":
        attributes["buffers"] = _described([*operands, *results])
    layouts = None
    if call.kernel.layouts and platform == "cuda":
        given = call.kernel.layouts(*call.fill(present), **dict(call.attributes))
        layouts = [given.get(name) for name in call.kernel.operand_names] if given else None
    target, aliases = f"te_{call.kernel.name}", _aliases(call, operands, results)
    registered = "cpu" if platform == "cpu" else "CUDA"
    if registered in HANDLERS and target not in HANDLERS[registered]:
        raise RuntimeError(
            f"{call.kernel.name}: expected {target} among the handlers for {registered}, got none: build the modules "
            f"again, as a new kernel's C++ wants it, or declare the kernel without {platform!r} among its platforms"
        )
    *expected, names = SIGNATURES.get(registered, {}).get(target, (len(operands), len(results), list(attributes)))
    if (expected, {*names}) != ([len(operands), len(results)], {*attributes}):
        raise RuntimeError(
            f"{call.kernel.name}: its handler for {registered} takes {expected[0]} operands, {expected[1]} results and "
            f"the attributes {sorted(names)}, its declaration gives {len(operands)}, {len(results)} and "
            f"{sorted(attributes)}: one of the two lacks some, or the modules were built before"
        )
    run = jax.ffi.ffi_call(target, results, input_output_aliases=aliases, input_layouts=layouts)
    out = run(*operands, **attributes)
    return tuple(o for o, s in zip(out, shapes) if s is not None)


def _check_cuda_handlers(call: Call) -> None:
    # Exporting for CUDA from a machine without it is fine; running there is not.
    if "CUDA" not in HANDLERS and jax.default_backend() == "gpu":
        raise RuntimeError(
            f"{call.kernel.name}: JAX runs on a GPU but transformer_engine_jax was built without its CUDA module. "
            "Rebuild with `pip install . --config-settings=cmake.define.TE_CUDA=ON` where nvcc is on PATH "
            f"({CUDA_IMPORT_ERROR}); "
            "or run on the CPU with JAX_PLATFORMS=cpu."
        )
    if jax.default_backend() == "gpu" and (old := [c for c in compute_capabilities() if c < OLDEST_GPU]):
        raise RuntimeError(
            f"{call.kernel.name}: expected GPUs of compute capability {OLDEST_GPU} (Ada) or newer, for which the "
            f"kernels of transformer_engine_jax are compiled, got {old[0]}; hide it with CUDA_VISIBLE_DEVICES, or run "
            "on the CPU with JAX_PLATFORMS=cpu."
        )


# --- The primitive -----------------------------------------------------------------------------------------------

kernel_p = Primitive("te_kernel")
kernel_p.multiple_results = True
# custom_partitioning, which our lowering calls, needs to know the devices; JAX has no public name for asking.
prim_requires_devices_during_lowering.add(kernel_p)


@kernel_p.def_impl
def _impl(*present, call: Call):
    with jax.disable_jit(False):  # without jit this is what runs
        return _jitted(call)(*present)


@functools.lru_cache(maxsize=4096)
def _jitted(call: Call):
    return jax.jit(lambda *present: kernel_p.bind(*present, call=call))


def _abstract_eval(*present, call: Call):
    results = [r for r in call.result_shapes(present) if r is not None]
    avals = [jax.core.ShapedArray(r.shape, r.dtype) for r in results]
    varying = present[0].manual_axis_type  # align() made them equal
    meshes = [x.sharding.mesh for x in present if not x.sharding.mesh.empty]
    if meshes:
        axes = call.axes(present)
        assigned = partition.assign(call, axes, meshes[0].shape, present, [x.sharding.spec for x in present])
        names = [n for n in axes.results if n is not None]
        avals = [
            a.update(sharding=NamedSharding(meshes[0], partition.spec_of(n, assigned))) for a, n in zip(avals, names)
        ]
    return [a.update(manual_axis_type=varying) for a in avals]


kernel_p.def_abstract_eval(_abstract_eval)


def _run(platform: str, call: Call, *present) -> tuple:
    if call.reference or platform not in call.kernel.platforms:
        with jax.numpy_rank_promotion("allow"):  # whatever the user's own code is held to
            return tuple(call.run_given(*present))
    return _ffi_call(call, platform, *present)


def _lower(ctx, *operands, call: Call, platform: str):
    with eager_constant_folding(False):  # also inside of jax.ensure_compile_time_eval, which is about the trace outside
        return _lowered(ctx, *operands, call=call, platform=platform)


def _lowered(ctx, *operands, call: Call, platform: str):
    if platform == "cuda" and platform in call.kernel.platforms and not call.reference:
        _check_cuda_handlers(call)
    explicit = [a.sharding.mesh for a in ctx.avals_in if a.sharding.mesh.explicit_axes]
    if explicit:
        return mlir.lower_fun(_on_explicit_axes(call, platform, explicit[0], ctx.avals_in))(ctx, *operands)

    # The handlers see plain local buffers, whatever manual axes they vary over.
    plain = [[jax.core.ShapedArray(a.shape, a.dtype) for a in avals] for avals in (ctx.avals_in, ctx.avals_out)]
    run, context = functools.partial(_run, platform, call), ctx.module_context.axis_context
    if _shards(context) > 1:
        run = custom_partitioning(run)
        run.def_partition(
            partition=functools.partial(_partition, call, platform, context),
            sharding_rule=lambda mesh, operand_types, result_types: partition.sharding_rule(call, plain[0]),
            decode_shardings=False,  # JAX's way knows none that has a mesh axis on two dimensions
        )
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return partition.lowered(mlir.lower_fun(run), ctx.replace(avals_in=plain[0], avals_out=plain[1]), *operands)


def _shards(context) -> float:
    """Over how many devices the compiler may shard a call; for one it has no shardings that JAX could read."""
    manual = getattr(context, "manual_axes", None)
    if not manual:
        return math.inf  # custom_partitioning sees to it
    return math.prod(size for name, size in context.mesh.shape.items() if name not in manual)


def _partition(call: Call, platform: str, context, mesh, operands, results):
    """custom_partitioning's callback, for meshes whose axes the compiler shards over: those that are not manual."""

    def run(call: Call, *present):
        # The mesh's explicit axes are manual here, where it can have some; a reference would be told they are not.
        with jax.sharding.use_abstract_mesh(NO_MESH):
            return _run(platform, call, *present)

    over = mesh
    if manual := getattr(context, "manual_axes", None):
        # Collectives are of the whole mesh, shardings of the devices that have the same part along its manual axes. The
        # compiler does not tell how it numbers these: of one axis it must be in order, of several nobody knows.
        mesh, names = context.mesh, [name for name in context.mesh.axis_names if name not in manual]
        over = Mesh(mesh.devices[tuple(slice(None) if n in names else 0 for n in mesh.axis_names)], names)
    if mesh.empty or (manual and sum(n > 1 for n in over.shape.values()) > 1):  # every device computes it all
        given = operands[0].sharding
        same = type(given).get_replicated(given._device_assignment)
        return mesh, functools.partial(run, call), tuple(same for _ in results), tuple(same for _ in operands)
    specs = [[partition.decoded(x, over.shape) for x in side] for side in (operands, results)]
    plan = partition.plan(call, run, over.shape, operands, *specs)
    shardings = [tuple(NamedSharding(over, spec) for spec in side) for side in (plan.results, plan.operands)]
    return mesh, plan.local, *shardings


def _on_explicit_axes(call: Call, platform: str, mesh, avals) -> Callable:
    """The call where shardings are part of the types: they are known, so the plan is simply carried out."""
    run_here = functools.partial(_run, platform)
    plan = partition.plan(call, run_here, mesh.shape, avals, [a.sharding.spec for a in avals])
    shardings = [NamedSharding(mesh, spec) for spec in plan.operands]
    # Arrays without elements are made inside: before 0.12 jaxlib crashes over what enters and goes unused.
    empty = [0 in a.shape for a in avals]

    def local(*entered):
        it, shards = iter(entered), zip(empty, shardings, avals)
        return plan.local(*[jnp.zeros(s.shard_shape(a.shape), a.dtype) if e else next(it) for e, s, a in shards])

    def run(*present):
        present = [jax.sharding.reshard(x, s) for x, s, e in zip(present, shardings, empty) if not e]
        specs = tuple(spec for spec, e in zip(plan.operands, empty) if not e)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=plan.results, check_vma=False)(*present)

    return run


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(kernel_p, functools.partial(_lower, platform=_platform), platform=_platform)
mlir.register_lowering(kernel_p, functools.partial(_lower, platform="reference"))  # any other: plain JAX


def _batch(axis, present, dims, *, call: Call):
    """vmap, where the rule allows: one more leading axis of the leading group, or more of the leading axis.

    Elsewhere one call an example; of what has nowhere a handler, JAX's own of the reference. An axis that may be
    sharded is one of independent examples, unless it has seeds.
    """
    if all(d is None for d in dims):
        out = kernel_p.bind(*present, call=call)
        return out, [None] * len(out)
    size = next(x.shape[d] for x, d in zip(present, dims) if d is not None)
    group = call.kernel.operands[0][0] if call.kernel.operands[0] else ""
    names = [t for t, gone in zip(call.kernel.operands, call.absent) if not gone]
    unbatched = [
        jax.ShapeDtypeStruct(np.delete(x.shape, d) if d is not None else x.shape, x.dtype)
        for x, d in zip(present, dims)
    ]
    kernel, shapes = call.kernel, call.result_shapes(unbatched)
    results = [(t, name) for t, name, r in zip(kernel.results, kernel.result_names, shapes) if r is not None]
    fits = all((t[:1] == [group]) if group in t else d is None for t, d in zip(names, dims))
    # What is the same on all shards is the same for all examples: the inverse of a scale that they share.
    shared = [fits and group not in t and kernel.reduce.get(name) == "same" for t, name in results]
    batched = [t for (t, _), same in zip(results, shared) if not same]
    one_call = fits and is_group(group) and all(group in t for t in batched)
    folded = size and fits and all(t[:1] == [group] for t in batched) and _may_fold(call, group, present)
    front = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(present, dims)]
    if not (one_call or folded or kernel.platforms):
        with jax.numpy_rank_promotion("allow"):
            out = jax.vmap(call.run_given, [None if d is None else 0 for d in dims])(*front)
        return out, [0] * len(out)
    if not (one_call or folded):
        out = _one_by_one(call, front, [d is None for d in dims], partition.names_of(axis.spmd_name))
        # All are equal. Not y[0]: examples may be sharded, or there may be none.
        one = lambda y: jnp.max(y, axis=0, initial=-jnp.inf if size else 0.0)
        return [one(y) if same else y for y, same in zip(out, shared)], [None if same else 0 for same in shared]
    front = [
        jnp.broadcast_to(x, (size, *x.shape)) if group in t and d is None else x for x, t, d in zip(front, names, dims)
    ]
    if folded:
        merged = [x.reshape(size * x.shape[1], *x.shape[2:]) if group in t else x for x, t in zip(front, names)]
        out = kernel_p.bind(*merged, call=call)
        split = [y if same else y.reshape(size, y.shape[0] // size, *y.shape[1:]) for y, same in zip(out, shared)]
        return split, [None if same else 0 for same in shared]
    axes = [n for n in call.axes(front).results if n is not None]
    return kernel_p.bind(*front, call=call), [None if same else n.index(f"{group}0") for n, same in zip(axes, shared)]


batching.fancy_primitive_batchers[kernel_p] = _batch


def _may_fold(call: Call, axis: str, present: Sequence[Any]) -> bool:
    """Whether more examples may join those of this axis: it may be sharded, and nothing is drawn at random for them."""
    operands = zip(call.kernel.operand_names, call.fill(present))
    seeded = any(x is not None and name in call.kernel.by_shard for name, x in operands)
    explicit = any(jax.typeof(x).sharding.mesh.explicit_axes for x in present)
    return not (axis in ("", *call.whole_letters) or is_group(axis) or seeded or explicit)


def _one_by_one(
    call: Call, front: Sequence[jax.Array], fixed: Sequence[bool], over: tuple[str, ...]
) -> list[jax.Array]:
    """A call for each example, of arrays that have one of each in front, but for fixed ones.

    Where explicit mesh axes shard the examples, or vmap's spmd_axis_name says that others do, `over`, each device has
    calls for its own.
    """

    def each(*front):
        def one(batched):
            it = iter(batched)
            return kernel_p.bind(*[x if f else next(it) for x, f in zip(front, fixed)], call=call)

        batched = [x for x, f in zip(front, fixed) if not f]
        return [y[None] for y in one([x[0] for x in batched])] if len(batched[0]) == 1 else jax.lax.map(one, batched)

    mesh, names, named = _axes_of_examples([x for x, f in zip(front, fixed) if not f], over)
    if not names:
        return each(*front)
    specs = tuple(PartitionSpec() if f else PartitionSpec(names) for f in fixed)
    front = [sharded_over(x, spec, frozenset(names)) for x, spec in zip(front, specs)]
    options = dict(in_specs=specs, out_specs=PartitionSpec(names), axis_names={*names}, check_vma=False)
    run = jax.jit(jax.shard_map(each, mesh=mesh, **options))
    out = (_in_one_vmap(run, each) if named else run)(*front)
    return list(align(*out, *front)[: len(out)])


def _axes_of_examples(batched: Sequence[jax.Array], over: tuple[str, ...]) -> tuple[Any, tuple[str, ...], bool]:
    """(mesh, those of its axes that shard the examples in front, whether it is `over` that says so)."""
    shardings = [jax.typeof(x).sharding for x in batched]
    explicit = [partition.names_of(s.spec[0]) for s in shardings if s.mesh.explicit_axes]
    if names := next(filter(None, explicit), ()):
        return explicit_meshes(*batched)[0], names, False
    mesh, size = jax.sharding.get_abstract_mesh(), len(batched[0])
    traced = any(isinstance(x, jax.core.Tracer) for x in batched)  # else that mesh may have no devices
    fits = traced and size and {*over} <= {*mesh.auto_axes} and size % math.prod(mesh.shape[n] for n in over) == 0
    return mesh, over if fits else (), True


def _in_one_vmap(run: Callable, otherwise: Callable) -> Callable:
    """run, but `otherwise` under one more vmap: that may name a mesh axis as well, which JAX does not add to run's."""
    wrapped = custom_vmap(run)

    @wrapped.def_vmap
    def _(size, batched, *args):
        out = jax.vmap(otherwise, in_axes=[0 if b else None for b in batched], axis_size=size)(*args)
        return out, [True] * len(out)

    return wrapped


ad.primitive_jvps[kernel_p] = derivatives.derivative
ad.primitive_transposes[kernel_p] = derivatives.transpose


def _without_unused(used: Sequence[bool], *others):
    """A call that makes no optional result which nobody uses, as of layers that their backward pass computes again."""
    *_, eqn = others  # from JAX 0.12 on, which inputs live on comes before it
    if not any(used):
        return [False] * len(eqn.invars), None
    call, operands = eqn.params["call"], [v.aval for v in eqn.invars]
    names = [name for name, r in zip(call.kernel.result_names, call.result_shapes(operands)) if r is not None]
    unused = call.kernel.optional.intersection(name for name, use in zip(names, used) if not use)
    attributes = tuple((name, False if name in unused else value) for name, value in call.attributes)
    outvars = [v for v, name in zip(eqn.outvars, names) if name not in unused]
    return [True] * len(eqn.invars), eqn.replace(outvars=outvars, params={"call": call._replace(attributes=attributes)})


partial_eval.dce_rules[kernel_p] = _without_unused
