"""@kernel: one declaration turns a pure-JAX reference into an FFI call with shapes, sharding and batching.

The only module that touches the kernels' primitive, and with ops/after.py ffi_call and custom_partitioning;
partition.py plans meshes for it.

A rule such as ``"... k, k, - -> ... k, -"`` names every axis of every operand and result:

- a letter is one axis; ``-`` is a scalar (no axes);
- ``...`` (or ``m*``) is a group of any number of axes. The number is read off the operands; where an operand
  holds two groups, the attribute ``k_axes`` gives the number of axes of group ``k*``;
- the same name is the same axis: it may be sharded, and every buffer that has it is sharded alike;
- axes in ``whole`` must not be sharded; a result that lost a sharded axis is combined as ``reduce`` says.

Positional parameters of the reference are buffers, and may be None where optional, or left off where that is their
default; keyword-only parameters are static attributes, and a NamedTuple is as many as it has fields. The reference
returns an array or a NamedTuple, with None for what was not asked for: an attribute with a result's name
(``q_t: bool = False``) asks for it, and ``in_place: bool`` for a result in an operand's buffer. Such attributes and
dtypes show in the results' buffers, so the handlers are passed only the others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import NamedSharding, PartitionSpec

from transformer_engine_jax import partition
from transformer_engine_jax.differentiable import align
from transformer_engine_jax.handlers import HANDLERS, cuda_import_error

# True: compile the references instead of the handlers (testing.reference_kernels). Part of the jit cache key.
use_references = jax.make_user_context(False)

_NO_MESH = jax.sharding.AbstractMesh((), ())


# --- Rules -------------------------------------------------------------------------------------------------------


class Axes(NamedTuple):
    """The names of the axes of one call's buffers; None for a buffer that is absent."""

    operands: tuple[tuple[str, ...] | None, ...]
    results: tuple[tuple[str, ...] | None, ...]


def _parse(rule: str) -> tuple[list[list[str]], list[list[str]]]:
    def side(text: str) -> list[list[str]]:
        return [[t for t in buffer.split() if t != "-"] for buffer in text.split(",")]

    operands, results = rule.split("->")
    return side(operands), side(results)


def _is_group(token: str) -> bool:
    return token == "..." or token.endswith("*")


def _name_axes(kernel: Kernel, attributes: Mapping[str, Any], ranks: Sequence[int | None], result_ranks) -> Axes:
    """Names every axis of a call from the ranks of its buffers; ValueError where a rank contradicts the rule."""
    groups = {name[0] + "*": value for name, value in attributes.items() if name.endswith("_axes")}
    for (name, tokens), rank in zip(zip(kernel.operand_names, kernel.operands), ranks):
        if rank is None:
            continue
        unknown = [t for t in tokens if _is_group(t) and t not in groups]
        rest = rank - sum(groups[t] if t in groups else 1 for t in tokens if t not in unknown)
        if len(unknown) == 1:
            groups[unknown[0]] = rest
            rest = 0 if rest >= 0 else rest
        if rest != 0 or len(unknown) > 1:
            raise ValueError(
                f"{kernel.name}: {name} has {rank} axes, which does not fit `{' '.join(tokens) or 'a scalar'}` "
                f"of the rule `{kernel.rule}`"
            )

    def names(tokens: list[str]) -> tuple[str, ...]:
        out: list[str] = []
        for t in tokens:
            stem = t.rstrip("*").replace("...", "t")
            out.extend([f"{stem}{i}" for i in range(groups[t])] if _is_group(t) else [t])
        return tuple(out)

    return Axes(
        tuple(None if r is None else names(t) for t, r in zip(kernel.operands, ranks)),
        tuple(None if r is None else names(t) for t, r in zip(kernel.results, result_ranks)),
    )


# --- A declared kernel -------------------------------------------------------------------------------------------


class Kernel:
    """A declared kernel: called like its reference, it runs the platform's FFI handler ``te_<name>``."""

    def __init__(
        self,
        reference: Callable,
        rule: str,
        whole,
        reduce,
        once,
        by_shard,
        platforms,
        workspace,
        note,
        aliases,
        prepared,
        layouts,
        optional,
    ):
        functools.update_wrapper(self, reference)
        self.reference, self.rule, self.name = reference, rule, reference.__name__
        self.operands, self.results = _parse(rule)
        self._whole, self.reduce, self.once, self.workspace = whole, dict(reduce), frozenset(once), workspace
        self.by_shard, self.platforms, self.note = dict(by_shard), frozenset(platforms), note
        self.aliases, self.prepared, self.layouts, self.optional = dict(aliases), prepared, layouts, frozenset(optional)
        parameters = inspect.signature(reference).parameters.values()
        operands = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self.operand_names = [p.name for p in operands]
        self.least_operands = sum(p.default is p.empty for p in operands)
        self.attribute_defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        returns = inspect.get_annotations(reference, eval_str=True).get("return")
        self.result_type = returns if hasattr(returns, "_fields") else None
        self.result_names = list(self.result_type._fields) if self.result_type else ["result"]
        if (len(self.operand_names), len(self.result_names)) != (len(self.operands), len(self.results)):
            raise TypeError(f"{self.name}: the rule `{rule}` does not name {self.operand_names} -> {self.result_names}")
        operands, results = set(self.operand_names), set(self.result_names)
        unknown = {*self.reduce, *self.aliases.values(), *self.optional} - results
        unknown |= {*self.once, *self.by_shard, *self.aliases} - operands
        unknown |= {*self.by_shard.values()} - operands - results
        if unknown:
            raise TypeError(
                f"{self.name}: reduce/once/by_shard/aliases/optional name unknown buffers {sorted(unknown)}"
            )

    def __call__(self, *operands, **attributes):
        if not self.least_operands <= len(operands) <= len(self.operand_names):
            raise TypeError(f"{self.name} takes {self.operand_names}, got {len(operands)} operands")
        operands += (None,) * (len(self.operand_names) - len(operands))
        unknown = set(attributes) - set(self.attribute_defaults)
        if unknown:
            raise TypeError(f"{self.name} has no attribute {sorted(unknown)}; it has {list(self.attribute_defaults)}")
        attributes = {**self.attribute_defaults, **attributes}
        for name, value in attributes.items():
            if value is inspect.Parameter.empty:
                raise TypeError(f"{self.name} needs the attribute {name}")
        if attributes.get("dtype") is not None:
            attributes["dtype"] = np.dtype(attributes["dtype"])
        call = _Call(self, tuple(attributes.items()), tuple(x is None for x in operands), bool(use_references.value))
        given = [x for x in operands if x is not None]
        # Python's numbers are f32, whatever jax_enable_x64 says.
        present = align(*[jnp.asarray(x, jnp.float32 if isinstance(x, int | float) else None) for x in given])
        call.check(present)
        results = iter(kernel_p.bind(*present, call=call))
        full = [None if r is None else next(results) for r in call.result_shapes(present)]
        return self.result_type(*full) if self.result_type else full[0]

    def __repr__(self):
        return f"<kernel {self.name}: {self.rule}>"


def kernel(
    rule: str,
    *,
    whole: str | Callable[[dict], str] = "",
    reduce: Mapping[str, str] | None = None,
    once: Sequence[str] = (),
    by_shard: Mapping[str, str] | None = None,
    platforms: Sequence[str] = ("cpu", "cuda"),
    workspace: Callable[..., int] | None = None,
    note: Callable[..., str] | None = None,
    aliases: Mapping[str, str] | None = None,
    prepared: bool = False,
    layouts: Callable[..., Mapping[str, Sequence[int]]] | None = None,
    optional: Sequence[str] = (),
) -> Callable[[Callable], Kernel]:
    """Declares a kernel by its reference.

    Args:
      rule: the axes of operands and results, see the module's docstring.
      whole: letters of axes that must not be sharded; or a function of the attributes that says so.
      reduce: result name -> "max", "sum" or "same" (on every shard), how shards of a result that lost a sharded axis
        are combined; or (another result, a function): that is asked for in its place, combined, and made into it.
      once: operands that a sum over shards must count once (a bias); all but one shard see zeros.
      by_shard: seed -> buffer. A seed is an operand, a vector of integers, to whose first entry each shard adds its
        number, so that no two draw the same. The buffer's sharding alone says how the call is sharded: as a result of
        the forward and an operand of the backward pass it makes both draw the same.
      platforms: where there is a handler; elsewhere the reference is compiled.
      workspace: bytes of scratch memory the CUDA handler takes as its last result, from the operands
        (objects with shape and dtype, or None) and the attributes.
      note: what `explain` says of a call on CUDA, from the same; "" where there is nothing to say.
      aliases: operand -> the result that takes its buffer, where the attribute `in_place` asks for it and they are of
        one shape and dtype. Handlers then read each element before they write it.
      prepared: the CUDA handler has work to do once for calls like this one, before the first: when the program is
        compiled it is told their dtypes and shapes by the attribute `buffers`.
      layouts: operand -> its axes from major to minor, where the CUDA handler reads them in another order than the
        last fastest; from the operands and the attributes, as for `workspace`.
      optional: results that an attribute of their name asks for, and that a call does without where nobody uses them.
    """
    return lambda reference: Kernel(
        reference, rule, whole, reduce or {}, once, by_shard or {}, platforms, workspace, note, aliases or {}, prepared,
        layouts, optional,
    )  # fmt: skip


class _Call(NamedTuple):
    """The static part of one call of a kernel: hashable, the parameter of the primitive."""

    kernel: Kernel
    attributes: tuple[tuple[str, Any], ...]
    absent: tuple[bool, ...]
    reference: bool

    def fill(self, present: Sequence[Any]) -> list[Any]:
        """All operands in order, None for the absent ones."""
        it = iter(present)
        return [None if gone else next(it) for gone in self.absent]

    def run_reference(self, *present) -> tuple:
        out = self.kernel.reference(*self.fill(present), **dict(self.attributes))
        return tuple(out) if self.kernel.result_type else (out,)

    def result_shapes(self, present: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        return _result_shapes(self, tuple((tuple(x.shape), np.dtype(x.dtype)) for x in present))

    def axes(self, present: Sequence[Any]) -> Axes:
        operand_ranks = [None if x is None else len(x.shape) for x in self.fill(present)]
        result_ranks = [None if r is None else len(r.shape) for r in self.result_shapes(present)]
        return _name_axes(self.kernel, dict(self.attributes), operand_ranks, result_ranks)

    def check(self, present: Sequence[Any]) -> None:
        """ValueError where ranks contradict the rule, or the reference has no result for these operands."""
        kernel, attributes = self.kernel, dict(self.attributes)
        for name, value in attributes.items():
            if name.endswith("_axes") and value < 0:
                raise ValueError(f"{kernel.name}: {name}: expected 0 or more, got {value}")
        _name_axes(kernel, attributes, [None if x is None else len(x.shape) for x in self.fill(present)], ())
        try:
            self.axes(present)
        except (TypeError, ValueError) as error:
            if str(error).startswith(f"{kernel.name}:"):
                raise
            given = zip(kernel.operand_names, self.fill(present))
            given = [f"{name} {x.dtype}{list(x.shape)}" for name, x in given if x is not None]
            given += [f"{name}={value}" for name, value in attributes.items() if value is not None]
            raise ValueError(
                f"{kernel.name}: expected operands that fit together, got {', '.join(given)}: {error}"
            ) from error

    @property
    def whole_letters(self) -> str:
        whole = self.kernel._whole
        return whole(dict(self.attributes)) if callable(whole) else whole

    def whole(self, axes: Axes) -> set[str]:
        return {n for names in axes.operands if names for n in names if n[0] in self.whole_letters}


@functools.lru_cache(maxsize=4096)
def _result_shapes(call: _Call, operands) -> tuple[jax.ShapeDtypeStruct | None, ...]:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        return jax.eval_shape(call.run_reference, *shapes)


# --- The FFI call ------------------------------------------------------------------------------------------------

_ABSENT = jax.ShapeDtypeStruct((0,), jnp.float32)


def _ffi_attributes(call: _Call) -> dict[str, Any]:
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
    return out


def _aliases(call: _Call, operands: Sequence[Any], results: Sequence[Any]) -> dict[int, int]:
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


def _ffi_call(call: _Call, platform: str, *present) -> tuple:
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
    run = jax.ffi.ffi_call(target, results, input_output_aliases=aliases, input_layouts=layouts)
    out = run(*operands, **attributes)
    return tuple(o for o, s in zip(out, shapes) if s is not None)


def _check_cuda_handlers(call: _Call) -> None:
    # Exporting for CUDA from a machine without it is fine; running there is not.
    if "CUDA" not in HANDLERS and jax.default_backend() == "gpu":
        raise RuntimeError(
            f"{call.kernel.name}: JAX runs on a GPU but transformer_engine_jax was built without its CUDA module. "
            "Rebuild with `pip install . --config-settings=cmake.define.TE_CUDA=ON` where nvcc is on PATH "
            f"({cuda_import_error()}); "
            "or run on the CPU with JAX_PLATFORMS=cpu."
        )


# --- The primitive -----------------------------------------------------------------------------------------------

kernel_p = Primitive("te_kernel")
kernel_p.multiple_results = True
# custom_partitioning, which our lowering calls, needs to know the devices; JAX has no public name for asking.
prim_requires_devices_during_lowering.add(kernel_p)


@kernel_p.def_impl
def _impl(*present, call: _Call):
    return _jitted(call)(*present)


@functools.lru_cache(maxsize=4096)
def _jitted(call: _Call):
    return jax.jit(lambda *present: kernel_p.bind(*present, call=call))


def _abstract_eval(*present, call: _Call):
    results = [r for r in call.result_shapes(present) if r is not None]
    avals = [jax.core.ShapedArray(r.shape, r.dtype) for r in results]
    varying = present[0].manual_axis_type  # align() made them equal
    meshes = [x.sharding.mesh for x in present if not x.sharding.mesh.empty]
    if meshes:
        axes = call.axes(present)
        assigned = partition.assign(call, axes, [x.sharding.spec for x in present])
        names = [n for n in axes.results if n is not None]
        avals = [
            a.update(sharding=NamedSharding(meshes[0], partition.spec_of(n, assigned))) for a, n in zip(avals, names)
        ]
    return [a.update(manual_axis_type=varying) for a in avals]


kernel_p.def_abstract_eval(_abstract_eval)


def _run(platform: str, call: _Call, *present) -> tuple:
    if call.reference or platform not in call.kernel.platforms:
        return tuple(r for r in call.run_reference(*present) if r is not None)
    return _ffi_call(call, platform, *present)


def _lower(ctx, *operands, call: _Call, platform: str):
    if platform == "cuda" and platform in call.kernel.platforms and not call.reference:
        _check_cuda_handlers(call)
    explicit = [a.sharding.mesh for a in ctx.avals_in if a.sharding.mesh.explicit_axes]
    if explicit:
        return mlir.lower_fun(_on_explicit_axes(call, platform, explicit[0], ctx.avals_in))(ctx, *operands)

    # The handlers see plain local buffers, whatever manual axes they vary over.
    plain = [[jax.core.ShapedArray(a.shape, a.dtype) for a in avals] for avals in (ctx.avals_in, ctx.avals_out)]
    run = custom_partitioning(functools.partial(_run, platform, call))
    run.def_partition(
        partition=functools.partial(_partition, call, platform),
        sharding_rule=lambda mesh, operand_types, result_types: partition.sharding_rule(call, plain[0]),
    )
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        return mlir.lower_fun(run)(ctx.replace(avals_in=plain[0], avals_out=plain[1]), *operands)


def _partition(call: _Call, platform: str, mesh, operands, results):
    """custom_partitioning's callback, for meshes whose axes the compiler shards over."""

    def run(call: _Call, *present):
        # The mesh's explicit axes are manual here, where it can have some; a reference would be told they are not.
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            return _run(platform, call, *present)

    if mesh.empty:  # several devices, but no mesh whose axes could be named: every device computes it all
        given = operands[0].sharding
        same = type(given).get_replicated(given._device_assignment)
        return mesh, functools.partial(run, call), tuple(same for _ in results), tuple(same for _ in operands)
    plan = partition.plan(call, run, operands, *[[x.sharding.spec for x in side] for side in (operands, results)])
    shardings = [tuple(NamedSharding(mesh, spec) for spec in side) for side in (plan.results, plan.operands)]
    return mesh, plan.local, *shardings


def _on_explicit_axes(call: _Call, platform: str, mesh, avals) -> Callable:
    """The call where shardings are part of the types: they are known, so the plan is simply carried out."""
    local = functools.partial(_run, platform)
    plan = partition.plan(call, local, avals, [a.sharding.spec for a in avals])

    def run(*present):
        present = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(present, plan.operands)]
        return jax.shard_map(plan.local, mesh=mesh, in_specs=plan.operands, out_specs=plan.results, check_vma=False)(
            *present
        )

    return run


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(kernel_p, functools.partial(_lower, platform=_platform), platform=_platform)
mlir.register_lowering(kernel_p, functools.partial(_lower, platform="reference"))  # any other: plain JAX


def _batch(present, dims, *, call: _Call):
    """vmap, where the rule allows: one more leading axis of the leading group, or more of the leading axis.

    Elsewhere one call an example. An axis that may be sharded is one of independent examples, unless it has seeds.
    """
    size = next(x.shape[d] for x, d in zip(present, dims) if d is not None)
    group = call.kernel.operands[0][0] if call.kernel.operands[0] else ""
    names = [t for t, gone in zip(call.kernel.operands, call.absent) if not gone]
    unbatched = [
        jax.ShapeDtypeStruct(np.delete(x.shape, d) if d is not None else x.shape, x.dtype)
        for x, d in zip(present, dims)
    ]
    results = [t for t, r in zip(call.kernel.results, call.result_shapes(unbatched)) if r is not None]
    fits = all((t[:1] == [group]) if group in t else d is None for t, d in zip(names, dims))
    one_call = fits and _is_group(group) and all(group in t for t in results)
    folded = fits and all(t[:1] == [group] for t in results) and _may_fold(call, group, present)
    front = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(present, dims)]
    if not (one_call or folded):
        fixed = [d is None for d in dims]

        def one(batched):
            it = iter(batched)
            return kernel_p.bind(*[x if f else next(it) for x, f in zip(front, fixed)], call=call)

        out = jax.lax.map(one, [_with_leading_axis_whole(x) for x, f in zip(front, fixed) if not f])
        return out, [0] * len(out)
    front = [
        jnp.broadcast_to(x, (size, *x.shape)) if group in t and d is None else x for x, t, d in zip(front, names, dims)
    ]
    if folded:
        merged = [x.reshape(size * x.shape[1], *x.shape[2:]) if group in t else x for x, t in zip(front, names)]
        out = kernel_p.bind(*merged, call=call)
        return [y.reshape(size, y.shape[0] // size, *y.shape[1:]) for y in out], [0] * len(out)
    axes = call.axes(front)
    stem = group.rstrip("*").replace("...", "t") + "0"
    return kernel_p.bind(*front, call=call), [n.index(stem) for n in axes.results if n is not None]


batching.primitive_batchers[kernel_p] = _batch


def _may_fold(call: _Call, axis: str, present: Sequence[Any]) -> bool:
    """Whether more examples may join those of this axis: it may be sharded, and nothing is drawn at random for them."""
    operands = zip(call.kernel.operand_names, call.fill(present))
    seeded = any(x is not None and name in call.kernel.by_shard for name, x in operands)
    explicit = any(jax.typeof(x).sharding.mesh.explicit_axes for x in present)
    return not (axis in ("", *call.whole_letters) or _is_group(axis) or seeded or explicit)


def _with_leading_axis_whole(x: jax.Array) -> jax.Array:
    """x for a loop over its leading axis, which explicit mesh axes may not shard."""
    sharding = jax.typeof(x).sharding
    if not sharding.mesh.explicit_axes or sharding.spec[0] is None:
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:])))


def _no_second_derivative(primals, tangents, *, call: _Call):
    raise NotImplementedError(
        f"{call.kernel.name}: expected at most one derivative, in reverse mode: kernels of transformer_engine_jax have "
        "gradients (jax.grad, jax.vjp) but neither tangents nor second derivatives"
    )


ad.primitive_jvps[kernel_p] = _no_second_derivative


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
