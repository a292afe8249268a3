"""@kernel: one declaration turns a pure-JAX reference into an FFI call with shapes, sharding and batching.

rules.py reads the rule, primitive.py runs the calls, derivatives.py differentiates them, and partition.py plans meshes.

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

from transformer_engine_jax.alignment import align
from transformer_engine_jax.decisions import few
from transformer_engine_jax.primitive import NO_MESH, kernel_p
from transformer_engine_jax.rules import Axes, name_axes, parse

# True: compile the references instead of the handlers (testing.reference_kernels). Part of the jit cache key.
use_references = jax.make_user_context(False)


class Kernel:
    """A declared kernel: called like its reference, it runs the platform's FFI handler ``te_<name>``.

    Args:
      rule: the axes of operands and results, see the module's docstring.
      whole: letters of axes that must not be sharded; or a function of the attributes that says so.
      reduce: result name -> "max", "sum" or "same" (on every shard), how shards of a result that lost a sharded axis
        are combined; or (another result, a function): that is asked for in its place, combined, and made into it.
      once: operands that a sum over shards must count once (a bias); all but one shard see zeros.
      parts: operand -> the attribute it is multiplied by: likewise, but each of n shards counts 1 / n of it.
      by_shard: seed -> buffer. A seed is an operand, a vector of integers; each shard adds its number to the first, so
        that shards draw different bits. The sharding of that buffer decides how the call is split: it is a result of
        the forward pass and an operand of the backward pass, so that both draw the same.
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
      units: letter -> what the size of a shard of this axis must be a multiple of.
    """

    def __init__(
        self,
        reference: Callable,
        rule: str,
        *,
        whole: str | Callable[[dict], str] = "",
        reduce: Mapping[str, str | tuple[str, Callable]] | None = None,
        once: Sequence[str] = (),
        parts: Mapping[str, str] | None = None,
        by_shard: Mapping[str, str] | None = None,
        platforms: Sequence[str] = ("cpu", "cuda"),
        workspace: Callable[..., int] | None = None,
        note: Callable[..., str] | None = None,
        aliases: Mapping[str, str] | None = None,
        prepared: bool = False,
        layouts: Callable[..., Mapping[str, Sequence[int]]] | None = None,
        optional: Sequence[str] = (),
        units: Mapping[str, int] | None = None,
    ):
        functools.update_wrapper(self, reference)
        self.reference, self.rule, self.name = reference, rule, reference.__name__
        self.operands, self.results = parse(rule)
        self._whole, self.workspace, self.note, self.prepared, self.layouts = whole, workspace, note, prepared, layouts
        self.once, self.platforms, self.optional = map(frozenset, (once, platforms, optional))
        mappings = (reduce, parts, by_shard, aliases, units)
        self.reduce, self.parts, self.by_shard, self.aliases, self.units = (dict(m or {}) for m in mappings)
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
        unknown |= {*self.once, *self.parts, *self.by_shard, *self.aliases} - operands
        unknown |= {*self.by_shard.values()} - operands - results
        if unknown:
            raise TypeError(
                f"{self.name}: reduce/once/parts/by_shard/aliases/optional name unknown buffers {sorted(unknown)}"
            )
        letters = {t[0] for tokens in (*self.operands, *self.results) for t in tokens}
        unknown = {
            "whole": set() if callable(whole) else {*whole} - letters - {" "},
            "units": self.units.keys() - letters,
            "platforms": self.platforms - {"cpu", "cuda"},
            "optional": self.optional - self.attribute_defaults.keys(),
            "parts": {*self.parts.values()} - self.attribute_defaults.keys(),
        }
        if found := {option: sorted(names) for option, names in unknown.items() if names}:
            raise TypeError(f"{self.name}: names that are not of the rule `{self.rule}` or its attributes: {found}")
        if not callable(whole):  # else it is known with a call's attributes
            self._check_lost_axes(whole)

    def _check_lost_axes(self, whole: str) -> None:
        sharded = {t for tokens in self.operands for t in tokens if t[0] not in whole}
        for name, tokens in zip(self.result_names, self.results):
            if name not in self.reduce and (lost := sharded - set(tokens)):
                raise TypeError(
                    f"{self.name}: {name} has no axis {sorted(lost)} of the rule `{self.rule}`: expected `reduce` to "
                    "say how its shards are combined, or `whole`, that the axis is not sharded"
                )

    def for_tokens(self, tokens) -> Callable:
        """The kernel; for so few tokens that a GPU's time is that of launches, its reference, which XLA fuses."""
        return functools.partial(self._bind, "of few tokens XLA fuses references" if few(tokens) else "")

    def __call__(self, *operands, **attributes):
        return self._bind("", *operands, **attributes)

    def _bind(self, why_reference: str, /, *operands, **attributes):
        reference = "references are asked for" if use_references.value else why_reference
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
        # One cache key for what is equal: numpy's 1 equals Python's, and hashes alike.
        attributes = {name: v.item() if isinstance(v, np.generic) else v for name, v in attributes.items()}
        call = Call(self, tuple(attributes.items()), tuple(x is None for x in operands), reference)
        given = [x for x in operands if x is not None]
        # Python's numbers are f32, whatever jax_enable_x64 says.
        present = align(*[jnp.asarray(x, jnp.float32 if isinstance(x, int | float) else None) for x in given])
        call.check(present)
        results = iter(kernel_p.bind(*present, call=call))
        full = [None if r is None else next(results) for r in call.result_shapes(present)]
        return self.result_type(*full) if self.result_type else full[0]

    def __repr__(self):
        return f"<kernel {self.name}: {self.rule}>"


def kernel(rule: str, **options) -> Callable[[Callable], Kernel]:
    """Declares a kernel by its reference; the options are those of `Kernel`."""
    return lambda reference: Kernel(reference, rule, **options)


class Call(NamedTuple):
    """The static part of one call of a kernel: hashable, the parameter of the primitive."""

    kernel: Kernel
    attributes: tuple[tuple[str, Any], ...]
    absent: tuple[bool, ...]
    reference: str  # why it is compiled in the kernel's place; "" where it is not

    def fill(self, present: Sequence[Any]) -> list[Any]:
        """All operands in order, None for the absent ones."""
        it = iter(present)
        return [None if gone else next(it) for gone in self.absent]

    def run_reference(self, *present) -> tuple:
        out = self.kernel.reference(*self.fill(present), **dict(self.attributes))
        return tuple(out) if self.kernel.result_type else (out,)

    def run_given(self, *present) -> list[jax.Array]:
        """The reference's results, less those that were not asked for."""
        return [r for r in self.run_reference(*present) if r is not None]

    def result_shapes(self, present: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        return _result_shapes(self, tuple((tuple(x.shape), np.dtype(x.dtype)) for x in present))

    def axes(self, present: Sequence[Any]) -> Axes:
        operand_ranks = [None if x is None else len(x.shape) for x in self.fill(present)]
        result_ranks = [None if r is None else len(r.shape) for r in self.result_shapes(present)]
        return name_axes(self.kernel, dict(self.attributes), operand_ranks, result_ranks)

    def check(self, present: Sequence[Any]) -> None:
        """ValueError where ranks contradict the rule, or the reference has no result for these operands."""
        kernel, attributes = self.kernel, dict(self.attributes)
        for name, value in attributes.items():
            if name.endswith("_axes") and value < 0:
                raise ValueError(f"{kernel.name}: {name}: expected 0 or more, got {value}")
        name_axes(kernel, attributes, [None if x is None else len(x.shape) for x in self.fill(present)], ())
        try:
            self._check_sizes(present)
        except (TypeError, ValueError) as error:
            if str(error).startswith(f"{kernel.name}:"):
                raise
            given = zip(kernel.operand_names, self.fill(present))
            given = [f"{name} {x.dtype}{list(x.shape)}" for name, x in given if x is not None]
            given += [f"{name}={value}" for name, value in attributes.items() if value is not None]
            raise ValueError(
                f"{kernel.name}: expected operands that fit together, got {', '.join(given)}: {error}"
            ) from error

    def _check_sizes(self, present: Sequence[Any]) -> None:
        """ValueError where an axis has two sizes, or a result another rank than the rule says."""
        kernel, axes, sizes = self.kernel, self.axes(present), {}
        buffers = zip(kernel.operand_names, axes.operands, self.fill(present))
        for name, axis_names, x in (*buffers, *zip(kernel.result_names, axes.results, self.result_shapes(present))):
            if axis_names is None:
                continue
            if len(axis_names) != len(x.shape):
                raise ValueError(f"{kernel.name}: {name}: expected the axes {axis_names}, got {list(x.shape)}")
            for axis, size in zip(axis_names, x.shape):
                if sizes.setdefault(axis, size) is not size and sizes[axis] != size:
                    raise ValueError(f"the axis {axis} of {name} is {size} long, and {sizes[axis]} elsewhere")

    @property
    def whole_letters(self) -> str:
        whole = self.kernel._whole
        return whole(dict(self.attributes)) if callable(whole) else whole

    def whole(self, axes: Axes) -> set[str]:
        return {n for names in axes.operands if names for n in names if n[0] in self.whole_letters}


@functools.lru_cache(maxsize=4096)
def _result_shapes(call: Call, operands) -> tuple[jax.ShapeDtypeStruct | None, ...]:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
    with jax.sharding.use_abstract_mesh(NO_MESH), jax.numpy_rank_promotion("allow"):
        return jax.eval_shape(call.run_reference, *shapes)
