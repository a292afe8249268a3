"""Causal attention, forward and with its backward: ours with the backend it chooses or in FP8, our reference, jax.nn's.

How far a result is off is said of the output or gradient that is furthest off from the reference's.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp

import transformer_engine_jax as te
from benchmarks.command import OFF, RATE, Columns, add_contenders, add_timing, chosen, timing
from benchmarks.compare import leaf_most_off, within
from benchmarks.peers import same_document, segment_ids
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import Repeated, interleaved, operand_sets, without_failures
from transformer_engine_jax.ops.attention import Attention, dot_product_attention
from transformer_engine_jax.ops.attention.backends import attention_backend
from transformer_engine_jax.ops.attention.reference import attention_reference
from transformer_engine_jax.ops.attention.sequences import places
from transformer_engine_jax.recipe import DelayedScaling

MOST_OFF = 2e-2  # bf16 outputs and gradients, of weights that were rounded to bf16
# query, key, value, weights and output are rounded to E4M3: by 2^-4 at most, by 2^-4 / sqrt(3) in the mean of squares.
MOST_OFF_FP8 = (5 / 3) ** 0.5 * 2**-4
# As of earlier steps: of this many normal numbers none is larger than 7.
FP8_SCALE = 448 / 7
BOTH = 3.5  # times the forward's operations: its two products and the backward's five, the scores anew among them


def _options(query, sinks=None) -> Attention:
    softmax = "vanilla" if sinks is None else "learnable"
    return Attention(scale=query.shape[-1] ** -0.5, causal=True, softmax_type=softmax)


def _described(shape: Shape, promised: bool = True) -> te.SequenceDescriptor | None:
    most = shape.documents if promised else None
    make = te.SequenceDescriptor.from_segment_ids_and_pos
    return make(segment_ids(shape), max_segments=most) if shape.documents > 1 else None


def _ours(shape: Shape, query, key, value, sinks=None, promised: bool = True):
    return dot_product_attention(
        query, key, value,
        options=_options(query, sinks), sequence_descriptor=_described(shape, promised), softmax_offset=sinks,
    )  # fmt: skip


def _ours_in_fp8(shape: Shape, query, key, value):
    """With the casts, of fixed scales, as DelayedScaling has them."""
    one = te.QuantizerState(jnp.float32(FP8_SCALE), jnp.zeros(16))
    state = te.AttentionState.pack(**dict.fromkeys(te.AttentionState.TENSORS, one))
    quantizers = te.attention_quantizers(state, DelayedScaling(fp8_dpa=True))
    described = dict(options=_options(query), sequence_descriptor=_described(shape))
    return dot_product_attention(query, key, value, quantizers=quantizers, **described)


def _reference(shape: Shape, query, key, value, sinks=None):
    options = _options(query, sinks)
    queries, keys = places(_described(shape), query.shape[1], key.shape[1], options)
    return attention_reference(
        options, query, key, value,
        queries=queries, keys=keys, mask=None, bias=None, softmax_offset=sinks, dropout_key=None,
    )  # fmt: skip


def _jax_nn(implementation: str) -> Callable:
    def attend(shape: Shape, query, key, value):
        call = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
        return call(query, key, value, mask=same_document(shape))

    return attend


# Of (shape, query, key, value), and with SINKS of a logit of each head besides, which draws attention to no token.
# te-mask: packed rows whose segment ids come without max_segments.
SINKS = ("te-sinks", "reference-sinks")
CONTENDERS = {
    "te": _ours,
    "te-fp8": _ours_in_fp8,
    "te-sinks": _ours,
    "te-mask": functools.partial(_ours, promised=False),
    "reference": _reference,
    "reference-sinks": _reference,
    "jax-cudnn": _jax_nn("cudnn"),
    "jax-xla": _jax_nn("xla"),
}


def _operands(shape: Shape, sinks: bool = False) -> list[jax.Array]:
    """query, key, value, bf16, sinks, f32, and the cotangent of the output."""
    sizes = [shape.heads, shape.groups, shape.groups, shape.heads]
    *keys, key_of_sinks = jax.random.split(jax.random.key(0), 5)
    *inputs, d_out = [
        jax.random.normal(key, (shape.batch, shape.seq, heads, shape.head), jnp.bfloat16)
        for key, heads in zip(keys, sizes)
    ]
    return [*inputs, *([jax.random.normal(key_of_sinks, (shape.heads,))] if sinks else []), d_out]


def _forward(attend: Callable) -> Callable:
    return lambda *operands: attend(*operands[:-1])


def _both(attend: Callable) -> Callable:
    def call(*operands):
        *inputs, d_out = operands
        out, vjp = jax.vjp(attend, *inputs)
        return out, vjp(d_out)

    return call


PASSES = {"forward": (_forward, 1.0), "forward+backward": (_both, BOTH)}


def programs(shape: Shape, passes: str, against: list[str]) -> tuple[dict[str, Repeated], dict[str, str]]:
    """(what is to be timed, why others can't be)."""
    wrap, _ = PASSES[passes]

    @functools.cache
    def sets(sinks: bool):
        operands = _operands(shape, sinks)
        return operand_sets(operands, 3 * sum(x.nbytes for x in operands), most=4)

    def make(name: str) -> Repeated:
        return Repeated(wrap(functools.partial(CONTENDERS[name], shape)), sets(name in SINKS))

    makers = {name: functools.partial(make, name) for name in against}
    return without_failures(makers, peer=lambda name: name.startswith("jax-"))


def errors(shape: Shape, passes: str, against: Iterable[str]) -> dict[str, float]:
    """How far each contender is off from the reference."""
    wrap, _ = PASSES[passes]
    found = {}

    @functools.cache
    def operands_and_expected(sinks: bool):
        operands = _operands(shape, sinks)
        return operands, jax.jit(wrap(functools.partial(_reference, shape)))(*operands)

    for name in against:
        operands, expected = operands_and_expected(name in SINKS)
        got = jax.jit(wrap(functools.partial(CONTENDERS[name], shape)))(*operands)
        most = MOST_OFF_FP8 if name == "te-fp8" else MOST_OFF
        found[name] = within(most, leaf_most_off(got, expected), f"{name}, {passes} of {shape}")
    return found


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_contenders(command)
    add_timing(command)


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each config, pass and contender."""
    against = chosen(args.against or CONTENDERS, CONTENDERS)
    for config in args.config:
        shape = SHAPES[config]
        query, key, value, _ = jax.eval_shape(lambda: _operands(shape))
        sequences = _described(shape)
        choice = lambda fp8=False, sinks=None: attention_backend(
            _options(query, sinks), query, key, value, sequence_descriptor=sequences, fp8=fp8
        )[0]
        backends = {"te": choice(), "te-fp8": choice(fp8=True), "te-mask": choice(), "te-sinks": choice(sinks=query)}
        for passes, (_, factor) in PASSES.items():
            ready, failed = programs(shape, passes, against)
            times = interleaved(ready, **timing(args))
            ready.clear()  # its memory goes to what is compared
            far = errors(shape, passes, times)
            for name in against:
                row = {"config": config, "pass": passes, "contender": name}
                row |= {"backend": backends[name]} if name in backends else {}
                if name in failed:
                    yield row | {"skipped": failed[name]}
                    continue
                ms, spread = times[name]
                best = min(t.median for t in times.values())
                tflop = factor * shape.attention_flop / ms / 1e9
                yield row | {"ms": ms, "spread": spread, "tflop_per_s": tflop, "of_best": best / ms, "off": far[name]}


def line(row: dict) -> str:
    name = f"{row['contender']} ({row['backend']})" if "backend" in row else row["contender"]
    what = f"{row['config']:>6} {row['pass']:<17} {name:<15}"
    if "skipped" in row:
        return f"{what} skipped: {row['skipped']}"
    return (
        f"{what} {row['ms']:9.4f} ms  +-{row['spread']:.1%}  {row['tflop_per_s']:7.1f} TFLOP/s  "
        f"{row['of_best']:.2f} of the best  off {row['off']:.1e}"
    )


TITLE = "Causal attention"
COLUMNS: Columns = {
    "config": lambda r: r["config"],
    "pass": lambda r: r["pass"],
    "by": lambda r: f"{r['contender']} ({r['backend']})" if "backend" in r else r["contender"],
    **RATE,
    **OFF,
}
