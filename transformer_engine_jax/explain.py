"""explain: which kernels, products and collectives a function runs, in which precision and why.

All is read off the function's jaxpr, where a kernel's primitive carries its declaration and attributes; so a new kernel
shows up here by itself. What only the compiler knows (collectives it inserts, memory) is read off the compiled program.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.interpreters import partial_eval

from transformer_engine_jax.decisions import is_decision, platform
from transformer_engine_jax.explanation import Buffer, Collective, Compiled, Explanation, Product, Row
from transformer_engine_jax.handlers import HANDLERS, gemm_algorithm
from transformer_engine_jax.primitive import kernel_p
from transformer_engine_jax.tracing import trace_of

COLLECTIVES = (
    "psum", "psum_invariant", "pmax", "pmin", "unreduced_psum", "all_gather", "all_gather_invariant",
    "all_gather_reduced", "all_to_all", "ragged_all_to_all", "ppermute", "reduce_scatter", "unreduced_reduce_scatter",
)  # fmt: skip
_PACKAGE = f"{pathlib.Path(__file__).parent}/"


# --- Walking the jaxpr -----------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where the walk is: how often this jaxpr runs, under which condition, inside which scopes."""

    platform: str
    count: int
    condition: str
    scopes: source_info_util.NameStack
    source: str  # of the call that it is in

    def under(self, condition: str) -> _Place:
        """The place inside of this one that has a condition more."""
        return self._replace(condition=", ".join(filter(None, (self.condition, condition))))


def _walk(jaxpr: Jaxpr, place: _Place) -> Iterator[Row]:
    for eqn in jaxpr.eqns:
        here = place._replace(scopes=place.scopes + eqn.source_info.name_stack)
        describe = _DESCRIBED.get(eqn.primitive.name)
        if describe is not None:
            yield from describe(eqn, here)
            continue
        name = eqn.primitive.name
        of_platforms = eqn.params.get("branches_platforms")
        for i, inner in enumerate(jaxprs_in_params(eqn.params)):
            inside = here._replace(source=_source(eqn) or here.source)
            if name == "scan":
                inside = inside._replace(count=here.count * eqn.params["length"])
            elif name == "while":
                inside = inside.under("in each turn of a while loop")
            elif name == "pallas_call":
                turns = prod(n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
                inside = inside._replace(count=here.count * turns).under("in a Pallas kernel")
            elif of_platforms is not None:
                if i != _branch(of_platforms, here.platform):
                    continue
            elif name == "cond":
                inside = inside.under(f"in branch {i} of a cond")
            yield from _walk(inner, inside)


def _branch(of_platforms: tuple, platform: str) -> int:
    """Which branch of a lax.platform_dependent is a platform's: its own, or the one of all others, which names none."""
    names = ("gpu", "cuda") if platform == "gpu" else (platform,)
    fits = [i for i, of in enumerate(of_platforms) if of is None or any(name in of for name in names)]
    return fits[0] if fits else len(of_platforms) - 1


def _row(eqn: JaxprEqn, place: _Place, *, operands=None, results=None, why="", **fields) -> Row:
    names = operands or [f"x{i}" for i in range(len(eqn.invars))]
    result_names = results or [f"y{i}" for i in range(len(eqn.outvars))]
    scopes = _scopes(place.scopes)
    decisions = [name for name in scopes if is_decision(name)]
    places = [name for name in scopes if not (name in decisions or _NO_PLACE.search(name))]
    return Row(
        count=place.count,
        operands=_buffers(names, eqn.invars),
        results=_buffers(result_names, eqn.outvars),
        why=", ".join(filter(None, (why, *decisions, place.condition))),
        phase=_phase(place.scopes),
        where="/".join(name for name, _ in itertools.groupby(places)),
        source=_source(eqn) or place.source or "unknown",
        **fields,
    )


def _buffers(names, variables) -> tuple[Buffer, ...]:
    shaped = [(name, v.aval) for name, v in zip(names, variables) if 0 not in getattr(v.aval, "shape", (0,))]
    return tuple(Buffer(name, tuple(aval.shape), np.dtype(aval.dtype)) for name, aval in shaped)


# Scopes that are no place in a model: marks of rematerialised blocks, a module's private methods, and einsums.
_NO_PLACE = re.compile(r"^(checkpoint|rematted_computation)$|\._|->")


def _scopes(stack: source_info_util.NameStack) -> list[str]:
    return [part.name for part in stack.stack if type(part).__name__ == "Scope"]


def _phase(stack: source_info_util.NameStack) -> str:
    if "rematted_computation" in _scopes(stack):
        return "recomputed"
    transforms = [part.name for part in stack.stack if type(part).__name__ == "Transform"]
    return "backward" if "transpose" in transforms else "forward"


def _source(eqn: JaxprEqn) -> str:
    """The innermost line outside this package; "" where none is known, as of what JAX traced by itself."""
    frames = reversed(source_info_util.summarize(eqn.source_info, num_frames=1000).splitlines())
    outside = [frame for frame in frames if not frame.startswith(_PACKAGE)]
    return re.sub(r"^(.*?:\d+).*", r"\1", outside[0]) if outside else ""


# --- What is described: kernels, products, attention of cuDNN, collectives -------------------------------------------


def _kernel(eqn: JaxprEqn, place: _Place) -> Iterator[Row]:
    call = eqn.params["call"]
    operands = [v.aval for v in eqn.invars]
    if not call.kernel.platforms:  # nowhere a handler: what it computes is told
        source = _source(eqn) or place.source
        traced = jax.make_jaxpr(call.run_reference)(*operands)
        yield from (dataclasses.replace(row, source=source) for row in _walk(traced.jaxpr, place))
        return
    given = [name for name, gone in zip(call.kernel.operand_names, call.absent) if not gone]
    shapes = call.result_shapes(operands)
    yield _row(
        eqn,
        place,
        name=call.kernel.name,
        sizes=_axis_sizes(given, call.axes(operands), operands),
        operands=given,
        results=[name for name, shape in zip(call.kernel.result_names, shapes) if shape is not None],
        options=_options(call),
        runs=_handler(call, place.platform),
        why=_note(call, operands) if place.platform == "gpu" else "",
    )


def _note(call, operands) -> str:
    """What the kernel itself says of a call on CUDA."""
    note = call.kernel.note
    return "" if note is None or call.reference else note(*call.fill(operands), **dict(call.attributes))


def _options(call) -> dict[str, Any]:
    """What does not show in the results' buffers already."""
    defaults, seen = call.kernel.attribute_defaults, (*call.kernel.result_names, "dtype")
    switch = lambda k, v: isinstance(v, bool) and k != "in_place"
    options = {k: v for k, v in call.attributes if k not in seen and (switch(k, v) or v != defaults[k])}
    for name, value in list(options.items()):
        if hasattr(value, "_asdict"):  # what of it is not the default
            del options[name]
            options |= {k: v for k, v in value._asdict().items() if v != getattr(defaults[name], k)}
    return options


def _axis_sizes(given, axes, operands) -> dict[str, int]:
    """The sizes of a rule's axes, the axes of a group multiplied; `...` is tokens.

    Those of a scale, or of a state in its place, say nothing of the call.
    """
    by_name: dict[str, int] = {}
    for name, names, operand in zip(given, [n for n in axes.operands if n is not None], operands):
        by_name |= dict(zip(names, operand.shape)) if name != "scale" else {}
    groups: dict[str, int] = {}
    for name, size in by_name.items():
        group = "tokens" if name.startswith("...") else name[0]
        groups[group] = groups.get(group, 1) * size
    return groups


def _handler(call, platform: str) -> str:
    """What runs a kernel on a platform."""
    target, language = f"te_{call.kernel.name}", {"cpu": "C++", "gpu": "CUDA"}.get(platform)
    if call.reference:
        return f"plain JAX: {call.reference}"
    if language is None:
        return f"plain JAX: no handlers for {platform}"
    if {"gpu": "cuda"}.get(platform, platform) not in call.kernel.platforms:
        return f"plain JAX: {target} has no {language} handler"
    registered = HANDLERS.get("cpu" if platform == "cpu" else "CUDA", {})
    return language if target in registered else f"nothing: {target} has no {language} handler here"


def _product(eqn: JaxprEqn, place: _Place) -> Iterator[Row]:
    a, b = (v.aval.shape for v in eqn.invars)
    (a_k, b_k), (a_batch, b_batch) = eqn.params["dimension_numbers"]
    free = lambda shape, *used: prod(n for i, n in enumerate(shape) if i not in {*used[0], *used[1]})
    sizes = {"m": free(a, a_k, a_batch), "n": free(b, b_k, b_batch), "k": prod(a[i] for i in a_k)}
    if a_batch:
        sizes["batch"] = prod(a[i] for i in a_batch)
    precision = eqn.params["precision"]
    precisions = precision if isinstance(precision, tuple) else (precision,)
    options = {} if precision is None else {"precision": "/".join(dict.fromkeys(map(str, precisions)))}
    yield _row(eqn, place, name="dot_general", sizes=sizes, operands="ab", results="d", options=options, runs="XLA")


def _other_product(eqn: JaxprEqn, place: _Place) -> Iterator[Row]:
    """A product of another kind, such as a convolution, whose operations are not counted."""
    names = ["a", "b", *[f"x{i}" for i in range(2, len(eqn.invars))]]
    yield _row(eqn, place, name=eqn.primitive.name, sizes={}, operands=names, results="d", options={}, runs="XLA")


def _cudnn(eqn: JaxprEqn, place: _Place) -> Iterator[Row]:
    (batch, queries, heads, size), (_, keys, groups, _) = (v.aval.shape for v in eqn.invars[:2])
    sizes = {"batch": batch, "queries": queries, "keys": keys, "heads": heads, "groups": groups, "size": size}
    names = ["query", "key", "value", *[f"x{i}" for i in range(3, len(eqn.invars))]]
    shown = "scale", "dropout_rate", "mask_type", "sliding_window_length"
    options = {k: v for k, v in eqn.params.items() if k in shown and v is not None}
    name = eqn.primitive.name.removesuffix("_wrapper")
    yield _row(eqn, place, name=name, sizes=sizes, operands=names, options=options, runs="cuDNN")


def _collective(eqn: JaxprEqn, place: _Place) -> Iterator[Row]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    named = [str(axis) for axis in (axes if isinstance(axes, tuple) else (axes,)) if not isinstance(axis, int)]
    if named:  # else over an axis of vmap, by one device alone
        options = {"over": ",".join(named)}
        yield _row(eqn, place, name=eqn.primitive.name, sizes={}, options=options, runs="XLA")


_DESCRIBED: dict[str, Callable[[JaxprEqn, _Place], Iterator[Row]]] = {
    kernel_p.name: _kernel,
    "dot_general": _product,
    **dict.fromkeys(("ragged_dot_general", "conv_general_dilated"), _other_product),
    **dict.fromkeys((f"dot_product_attention_{kind}_wrapper" for kind in ("fwd", "bwd", "fp8_fwd", "fp8_bwd")), _cudnn),
    **dict.fromkeys(COLLECTIVES, _collective),
}


# --- The compiled program --------------------------------------------------------------------------------------------

_HLO_COLLECTIVE = re.compile(
    r" = (?P<result>.*?) (?P<name>all-reduce|all-gather|reduce-scatter|(ragged-)?all-to-all"
    r"|collective-(permute|broadcast))(-done)?\("
)
_HLO_SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")


def _hlo_bytes(shapes: str) -> int:
    total = 0
    for dtype, sizes in _HLO_SHAPE.findall(shapes):
        bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])  # f8e4m3fn has 8
        total += prod(int(n) for n in sizes.split(",") if n) * bits // 8
    return total


# Of a call of te_gemm on a GPU, whose attributes XLA prints in the order of their names.
_HLO_GEMM = re.compile(
    r'"te_gemm".*\bbuffers = dense<\[(?P<buffers>[-\d, ]+)\]>.*\bk_axes = (?P<k_axes>\d+)'
    r'.*\bk_first = \\?"(?P<k_first>\w*)\\?".*\bsplit_accumulator = (?P<split>true|false)'
)


def _products(text: str) -> tuple[Product, ...]:
    found = collections.Counter(_HLO_GEMM.findall(text))
    answers = [
        (gemm_algorithm([int(n) for n in buffers.split(",")], int(k_axes), split == "true", k_first), count)
        for (buffers, k_axes, k_first, split), count in found.items()
    ]
    parts = [(answer.partition(": "), count) for answer, count in answers]
    return tuple(Product(name, count, algorithm) for (name, _, algorithm), count in parts if name)


def _compiled(program) -> Compiled:
    found: dict[str, list[int]] = collections.defaultdict(list)
    text = program.as_text()
    for match in _HLO_COLLECTIVE.finditer(text):
        found[match["name"]].append(_hlo_bytes(match["result"]))
    memory = program.memory_analysis()
    return Compiled(
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        tuple(Collective(name, len(sizes), sum(sizes)) for name, sizes in found.items()),
        _products(text),
    )


# --- The public function ---------------------------------------------------------------------------------------------


def explain(fn: Callable, /, *args, compile: bool = False, **kwargs) -> Explanation:
    """What `fn(*args, **kwargs)` runs: a row for each kernel, product and collective that its results depend on.

    Args:
      fn: a function of arrays or NNX models, jitted or not, such as a Linen model's `apply`; or an NNX model. It is
        traced in the contexts (autocast, mesh) in force here. For the backward pass, give one that takes gradients.
      args, kwargs: its arguments, or jax.ShapeDtypeStructs like them; nothing is computed. Of a function that is not
        jitted, keywords that hold Python's bools or strings are static.
      compile: also compile it, for the collectives that the compiler inserts, the bytes of memory, and on a GPU the
        algorithm of each product.

    Returns:
      An Explanation: `print` it for a table, or read `rows` and `compiled`.

    Raises:
      TypeError: fn is a Linen model that has variables, but not here.
    """
    traced = trace_of(fn, args, kwargs)
    jaxpr = traced.jaxpr.jaxpr
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    start = _Place(platform(), 1, "", source_info_util.new_name_stack(), "")
    program = _compiled(traced.lower().compile()) if compile else None
    return Explanation(start.platform, tuple(_walk(live, start)), program)
