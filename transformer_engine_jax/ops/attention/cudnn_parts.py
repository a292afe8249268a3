"""cuDNN's attention over some of the keys, and how such parts become attention over all.

Attention over a part comes with the logarithm of its softmax's sum, by which parts are merged. Backward, each part is
given the output and the logarithm of all, which makes its gradients parts of the whole's: flash attention (Dao, 2023),
ring attention (Liu et al., 2023). Here a part is

- the keys of another device, where a mesh axis shards the sequence. What causality hides from a device is not computed;
  in the balanced order every device then has as much to do as the others. Of rows that hold several sequences, each is
  attended to as far as it has tokens among both, queries and keys;
- one more logit that has no value: the offset of the softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.ops.attention import cudnn_call
from transformer_engine_jax.ops.attention.cudnn_call import Operands, Told
from transformer_engine_jax.ops.attention.flash import by_group, offset_gradient, sees_past_keys
from transformer_engine_jax.ops.attention.flash_packed import (
    PACKED_SIZES,
    attention_packed_bwd,
    attention_packed_fwd,
)
from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.ops.attention.sequences import Runs, SequenceDescriptor, attending, only, places_of, runs

ALL, FIRST, SECOND = (0, 2), (0, 1), (1, 2)  # from and to which half of a device's tokens


class Mask(NamedTuple):
    """What a query sees of the keys given: all, those up to its own place, or of these the nearest."""

    causal: bool = False
    left: int = -1  # how many before its own place, -1 for all; only where causal


class Parts(NamedTuple):
    """What the op needs to know at trace time; with several devices, inside a shard_map that makes `axis` manual."""

    scale: float
    mask: Mask
    axis: str = ""
    size: int = 1  # devices along the axis
    ring: bool = True  # keys go round from device to device; else all are gathered
    balanced: bool = False  # the order of the tokens
    sequences: int = 0  # at most so many in a row; 0: rows are sequences


def attention_of_parts(parts: Parts, query, key, value, offset=None, ids=(None, None)) -> jax.Array:
    """[B, Q, H, Dv] of this device's query [B, Q, H, D], key [B, K, G, D] and value [B, K, G, Dv], bf16 or f16.

    offset: [H] one more logit of each head, or None.
    ids: i32[B, Q] and i32[B, K] the sequence of each token, 0 where there is none, if rows hold several; those of one
      lie side by side, and what is between them is finite.
    """
    v_size, step = value.shape[-1], PACKED_SIZES if parts.sequences else 8
    size = -(-max(query.shape[-1], v_size) // step) * step
    return _attention(parts, *(widened(x, size) for x in (query, key, value)), offset, *ids)[..., :v_size]


def widened(x, size: int) -> jax.Array:
    """x with zeros up to a head size of `size`, which change neither logits nor sums."""
    return filled(x, {3: size - x.shape[-1]})


def filled(x, more: dict[int, int]) -> jax.Array:
    """x with so many more zeros at the ends of these axes."""
    return jnp.pad(x, [(0, more.get(axis, 0)) for axis in range(x.ndim)]) if any(more.values()) else x


def _forward(parts: Parts, query, key, value, offset, q_ids, k_ids):
    out = jnp.zeros(query.shape, jnp.float32)
    total = jnp.full((query.shape[0], query.shape[2], query.shape[1]), -jnp.inf, jnp.float32)

    def over(rows, columns, mask=Mask()):
        def merged(out, total, key, value, *k_ids):
            at, keys = _span(rows, query), _span(columns, key)
            operands = query[:, at], key[:, keys], value[:, keys]
            part, logs = _part(parts, mask, *operands, _among(parts, at, keys, q_ids, *k_ids))
            old = total[:, :, at]
            new = jnp.logaddexp(old, logs)
            sums = out[:, at] * _weight(old, new) + part.astype(jnp.float32) * _weight(logs, new)
            return _replaced(out, at, sums, axis=1), _replaced(total, at, new, axis=2)

        return merged

    nothing = lambda out, total, *here: (out, total)
    for step, here in enumerate(_rounds(parts, *_present(key, value, k_ids))):
        out, total = _of_step(parts, step, over, nothing)(out, total, *here)
    if offset is not None:
        new = jnp.logaddexp(total, offset.astype(jnp.float32)[:, None])
        out, total = out * _weight(total, new), new
    out = out.astype(query.dtype)
    return out, (query, key, value, offset, q_ids, k_ids, out, total)


def _weight(logs, total) -> jax.Array:
    """What a part with these logarithms f32[B, H, Q] is worth of all, as [B, Q, H, 1]; 0 where nobody has seen any."""
    return jnp.moveaxis(jnp.where(logs == -jnp.inf, 0.0, jnp.exp(logs - total)), 1, 2)[..., None]


def _present(*arrays) -> list:
    return [x for x in arrays if x is not None]


def _backward(parts: Parts, residuals, dout):
    query, key, value, offset, q_ids, k_ids, out, total = residuals
    dout = dout.astype(out.dtype)
    if q_ids is not None:  # of padding it may be anything
        dout = only(q_ids != 0, dout)
    dquery = jnp.zeros(query.shape, jnp.float32)

    def over(rows, columns, mask=Mask()):
        def added(dquery, dkey, dvalue, key, value, *k_ids):
            at, keys = _span(rows, query), _span(columns, key)
            operands = query[:, at], key[:, keys], value[:, keys], total[:, :, at], out[:, at], dout[:, at]
            grads = _gradients(parts, mask, *operands, _among(parts, at, keys, q_ids, *k_ids))
            places = ((dquery, at), (dkey, keys), (dvalue, keys))
            return tuple(_replaced(x, i, x[:, i] + g.astype(jnp.float32), axis=1) for (x, i), g in zip(places, grads))

        return added

    nothing = lambda dquery, dkey, dvalue, *here: (dquery, dkey, dvalue)
    dkeys = _Gathered(parts, key, value)
    for step, here in enumerate(_rounds(parts, *_present(key, value, k_ids))):
        of_step = _of_step(parts, step, over, nothing)
        dquery = dkeys.add(step, lambda dk, dv: of_step(dquery, dk, dv, *here))
    dkey, dvalue = dkeys.home()
    grads = dquery.astype(query.dtype), dkey.astype(key.dtype), dvalue.astype(value.dtype)
    doffset = None if offset is None else offset_gradient(offset, jnp.moveaxis(total, 1, 2), out, dout)
    return *grads, doffset, None, None


_attention = differentiable(_forward, _backward)


# --- Who meets whom --------------------------------------------------------------------------------------------------


def _span(halves: tuple[int, int], x) -> slice:
    return slice(*(half * x.shape[1] // 2 for half in halves))


def _replaced(x, at: slice, part, axis: int):
    """x with part at a slice of an axis. (A scatter here crashes jax 0.11's compiler for CPUs.)"""
    before, after = jnp.split(x, [at.start], axis)[0], jnp.split(x, [at.stop], axis)[1]
    return jnp.concatenate([before, part, after], axis)


def _of_step(parts: Parts, step: int, over: Callable, nothing: Callable) -> Callable:
    """What a device computes of the keys that are `step` devices before it, going round."""
    if step == 0 or not parts.mask.causal:
        return over(ALL, ALL, parts.mask)
    earlier = jax.lax.axis_index(parts.axis) >= step  # else these keys are those of a device further on
    if parts.balanced:
        cases = over(ALL, FIRST), over(SECOND, ALL)
    else:
        cases = over(ALL, ALL), nothing
    return lambda *args: jax.lax.cond(earlier, *cases, *args)


def _following(parts: Parts) -> list[tuple[int, int]]:
    return [(i, (i + 1) % parts.size) for i in range(parts.size)]


def _rounds(parts: Parts, *arrays):
    """The arrays of this device, then of the one before it, and so on."""
    if parts.ring:
        for step in range(parts.size):
            yield arrays
            if step + 1 < parts.size:
                arrays = [jax.lax.ppermute(x, parts.axis, _following(parts)) for x in arrays]
        return
    yield arrays
    gathered = [jax.lax.all_gather(x, parts.axis) for x in arrays]
    for step in range(1, parts.size):
        yield [x[_owner(parts, step)] for x in gathered]


def _owner(parts: Parts, step: int):
    return (jax.lax.axis_index(parts.axis) - step) % parts.size


class _Gathered:
    """Sums in f32 of the gradients of keys and values, which belong to another device at every step."""

    def __init__(self, parts: Parts, *like):
        lead = () if parts.ring else (parts.size,)
        self.parts, self.sums = parts, [jnp.zeros((*lead, *x.shape), jnp.float32) for x in like]

    def add(self, step: int, of_step: Callable):
        """of_step(sums of the owner) -> (something, *new sums); returns the something."""
        if self.parts.ring:
            out, *self.sums = of_step(*self.sums)
            if self.parts.size > 1:
                self.sums = [jax.lax.ppermute(x, self.parts.axis, _following(self.parts)) for x in self.sums]
        else:
            owner = _owner(self.parts, step)
            out, *new = of_step(*(x[owner] for x in self.sums))
            self.sums = [jax.lax.dynamic_update_index_in_dim(x, n, owner, 0) for x, n in zip(self.sums, new)]
        return out

    def home(self) -> list[jax.Array]:
        if self.parts.ring:  # they went all the way round
            return self.sums
        return [jax.lax.psum_scatter(x, self.parts.axis) for x in self.sums]


# --- A part ----------------------------------------------------------------------------------------------------------


def _among(parts: Parts, at: slice, keys: slice, q_ids=None, k_ids=None) -> Runs | None:
    """Where the sequences lie that have tokens among both, these queries and these keys; None: rows are sequences.

    A sequence that goes on in the other half of a device's tokens is one there too: nothing of it is between.
    """
    if not parts.sequences:
        return None
    ids = q_ids[:, at], k_ids[:, keys]
    described = SequenceDescriptor.from_segment_ids_and_pos(ids, max_segments=parts.sequences)
    return attending(Attention(parts.scale), runs(described), *(x.shape[1] for x in ids))


def _part(parts: Parts, mask: Mask, query, key, value, at: Runs | None) -> tuple[jax.Array, jax.Array]:
    """(output [B, Q, H, D], logarithms of sums f32[B, H, Q], -inf of a query that sees none of these keys)."""
    if at is None:
        return cudnn_forward(parts.scale, mask, query, key, value)
    attributes = dict(scale=parts.scale, causal=mask.causal)
    o, stats = attention_packed_fwd(by_group(query, key.shape[2]), key, value, *at[:4], None, **attributes)
    seeing = places_of(at.q_start, at.q_len, query.shape[1])[0].segment > 0
    stats = jnp.where(seeing[..., None], stats.reshape(query.shape[:3]), -jnp.inf)
    return o.reshape(query.shape), jnp.moveaxis(stats, 2, 1)


def _gradients(parts: Parts, mask: Mask, query, key, value, logs, out, dout, at: Runs | None):
    """(dquery, dkey, dvalue) where out and logs are those of these keys or of more."""
    if at is None:
        return cudnn_backward(parts.scale, mask, query, key, value, logs, out, dout)
    stats = jnp.moveaxis(jnp.where(logs == -jnp.inf, 0.0, logs), 1, 2)
    query, out, dout = (by_group(x, key.shape[2]) for x in (query, out, dout))
    attributes = dict(scale=parts.scale, causal=mask.causal)
    stats = stats.reshape(query.shape[:4])
    dquery, *others = attention_packed_bwd(stats, query, key, value, out, dout, *at[:4], **attributes)
    return dquery.reshape(*dquery.shape[:2], -1, dquery.shape[-1]), *others


# --- cuDNN -----------------------------------------------------------------------------------------------------------


def cudnn_forward(scale: float, mask: Mask, query, key, value) -> tuple[jax.Array, jax.Array]:
    """(output [B, Q, H, D], logarithms of the softmax's sums f32[B, H, Q])."""
    return cudnn_call.forward(Told(scale, *mask), _operands(mask, query, key, value))


def cudnn_backward(scale: float, mask: Mask, query, key, value, logs, out, dout) -> tuple[jax.Array, ...]:
    """(dquery, dkey, dvalue) where out and logs are those of these keys or of more."""
    return cudnn_call.backward(Told(scale, *mask), _operands(mask, query, key, value), logs, out, dout)


def _operands(mask: Mask, query, key, value) -> Operands:
    if not sees_past_keys(mask.causal, key.shape[1]):
        return Operands(query, key, value)
    # Of the query, as under vmap jax 0.10's call needs lengths for each of its examples.
    of_rows = lambda n: jnp.where(query[:, 0, 0, 0] > 0, n, n).astype(jnp.int32)
    return Operands(query, key, value, of_rows(query.shape[1]), of_rows(key.shape[1]))
