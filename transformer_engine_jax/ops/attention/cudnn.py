"""cuDNN's flash attention for what `attention_backend` says it can, by handlers of ours, or by JAX's own call.

Ours are for dropout, FP8 and packed rows, and on Hopper for what is plain or told by lengths; JAX's for all else, and
where ours were not built.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_engine_jax.decisions import shards
from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.attention.backends import as_packed, attention_backend, too_large, visibility_form
from transformer_engine_jax.ops.attention.cudnn_call import Operands, Told, biased_attention, hides
from transformer_engine_jax.ops.attention.cudnn_flash import flash_attention
from transformer_engine_jax.ops.attention.cudnn_parts import Mask, Parts, attention_of_parts, filled, widened
from transformer_engine_jax.ops.attention.flash import MOST_HEAD_SIZE, Flash, missing, on_hopper, sees_past_keys
from transformer_engine_jax.ops.attention.flash_cached import cached_attention
from transformer_engine_jax.ops.attention.flash_packed import PACKED_SIZES, packed_attention
from transformer_engine_jax.ops.attention.fp8 import fp8_attention
from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.ops.attention.sequences import (
    Places,
    SequenceDescriptor,
    attending,
    only,
    runs,
    visible,
)
from transformer_engine_jax.ops.attention.shards import among_the_compilers, by_examples_and_heads, explicit_axes
from transformer_engine_jax.sharding import of_rules


def cudnn_attention(
    options: Attention, query, key, value, *,
    sequence_descriptor, queries: Places, keys: Places, mask, bias, softmax_offset=None, dropout_key=None,
    quantizers=None,
) -> jax.Array:  # fmt: skip
    """[B, Q, H, Dv] by cuDNN; arguments as in `attention_reference`, with the descriptor that places come from.

    quantizers: those of query, key and value, for what `attention_backend` computes in FP8; that runs anywhere.
    """
    # With quantizers, amaxes are those of all devices, which kernels see to.
    if (explicit_axes(query) or among_the_compilers()) and quantizers is None:
        described = dict(sequence_descriptor=sequence_descriptor, queries=queries, keys=keys, mask=mask, bias=bias)
        arguments = dict(described, softmax_offset=softmax_offset)
        given = dict(dropout_key=dropout_key, arguments=arguments)
        return by_examples_and_heads(cudnn_attention, options, query, key, value, **given)
    if options.softmax_type == "off_by_one":
        softmax_offset = jnp.zeros(query.shape[2], jnp.float32)
    form = visibility_form(options, query.shape[1], key.shape[1], sequence_descriptor, mask)
    given = dict(mask=mask, bias=bias, dropout_key=dropout_key, quantizers=quantizers)
    packed = as_packed(options, query, key, value, sequence_descriptor=sequence_descriptor, **given)
    v_size, step = value.shape[-1], PACKED_SIZES if packed else 8
    size = -(-max(query.shape[-1], v_size) // step) * step
    query, key, value = (widened(x, size) for x in (query, key, value))
    if packed:
        at = attending(options, runs(sequence_descriptor), query.shape[1], key.shape[1])
        return packed_attention(options, query, key, value, at, softmax_offset)[..., :v_size]
    if form == "cache":
        return cached_attention(options, query, key, value, *sequence_descriptor.seqlens)[..., :v_size]
    if softmax_offset is not None:
        return _with_offset(options, query, key, value, softmax_offset)[..., :v_size]
    if bias is not None:
        bias = _placed(None, query, _bias(options, bias, query, key))
    if form == "plain":
        out = _call(options, query, key, value, bias, dropout_key, quantizers)
    elif form == "mask":
        out = _masked(options, query, key, value, bias, queries, keys, mask)
    else:
        out = _by_lengths(options, query, key, value, bias, dropout_key, quantizers, sequence_descriptor)
    return out[..., :v_size]


def _with_offset(options: Attention, query, key, value, softmax_offset) -> jax.Array:
    if _has_handlers(options, query, key):
        lengths = _ends(options.causal, query, key)
        return flash_attention(options, query, key, value, softmax_offset=softmax_offset, **lengths)
    query, key, value = _sharded_alike(query, key, value)
    parts = Parts(options.scale, Mask(options.causal, options.reach[0]))
    return attention_of_parts(parts, query, key, value, softmax_offset)


def _call(options: Attention, query, key, value, bias, dropout_key, quantizers, **lengths) -> jax.Array:
    lengths = lengths or _ends(options.causal, query, key)
    if quantizers is not None:
        return fp8_attention(options, query, key, value, quantizers, **lengths)
    if dropout_key is not None or (bias is None and _has_handlers(options, query, key)):
        return flash_attention(options, query, key, value, dropout_key, **lengths)
    told = Told(options.scale, options.causal, options.reach[0])
    return _by_jax(told, *_sharded_alike(query, key, value), bias, **lengths)


def _by_jax(told: Told, query, key, value, bias=None, mask=None, **lengths) -> jax.Array:
    """By JAX's call, whose gradients need even lengths: odd ones get one more query or key, that none sees."""
    q_len, k_len = query.shape[1], key.shape[1]
    more = {n for n in (q_len, k_len) if n % 2}
    lengths = lengths or (_lengths_of(query, key) if more else {})
    query, key, value = (filled(x, {1: int(x.shape[1] in more)}) for x in (query, key, value))
    of_both = {2: int(q_len in more), 3: int(k_len in more)}
    bias, mask = (None if x is None else filled(x, of_both) for x in (bias, mask))
    if bias is None and mask is None:
        window = None if told.left < 0 else (told.left, 0)
        options = dict(scale=told.scale, is_causal=told.causal, local_window_size=window, **lengths)
        out = jax.nn.dot_product_attention(query, key, value, implementation="cudnn", **options)
    else:
        of_both = (lengths.get(f"{name}_seq_lengths") for name in ("query", "key_value"))
        out = biased_attention(told, Operands(query, key, value, *of_both), bias, mask)
    return out[:, :q_len]


def _ends(causal: bool, query, key) -> dict[str, jax.Array]:
    """Lengths for calls without, where cuDNN must be told them."""
    return _lengths_of(query, key) if sees_past_keys(causal, key.shape[1]) else {}


def _lengths_of(query, key) -> dict[str, jax.Array]:
    lengths = (_lengths_as_query(query, jnp.full((x.shape[0], 1), x.shape[1], jnp.int32)) for x in (query, key))
    return dict(zip(("query_seq_lengths", "key_value_seq_lengths"), lengths))


def reads_qkv(options: Attention, query) -> bool:
    """Whether queries, keys and values of such self-attention are best left in one array [B, S, 3, H, D].

    Of as many heads of each, without masks, biases and lengths, in 16 bits; of query, [B, S, H, D], shape and dtype
    alone are looked at.
    """
    options.check()
    plain = options.softmax_type == "vanilla" and visibility_form(options, *2 * query.shape[1:2], None, None) == "plain"
    fits = plain and query.shape[-1] % 8 == 0 and _has_handlers(options, query, query)
    whole = {"example", "batch"} if options.dropout else {"example"}  # its masks can't be drawn in parts
    if not fits or whole & too_large(query, 3 * math.prod(query.shape[1:])):
        return False
    if sees_past_keys(options.causal, query.shape[1]):  # that takes no lengths
        return False
    return attention_backend(options, query, query, query)[0] == "cudnn"


def _has_handlers(options: Attention, query, key) -> bool:
    """Whether our handlers do what JAX's call does, with no more work (repeated keys and values), as on Hopper."""
    fits = query.shape[-1] <= MOST_HEAD_SIZE and Flash.of(options, query, key).repeats == 1
    return fits and not missing() and on_hopper()


def _masked(options: Attention, query, key, value, bias, queries: Places, keys: Places, mask) -> jax.Array:
    query, key, value = _sharded_alike(query, key, value)
    q_len, k_len = query.shape[1], key.shape[1]
    seen = visible(options, queries, keys, mask)
    seen = _as_query(query, jnp.broadcast_to(seen, (*seen.shape[:2], q_len, k_len)))
    # To cuDNN a mask is a large negative bias: where nothing is seen, all is seen alike.
    some = jnp.moveaxis(jnp.any(seen, axis=-1), 1, 2)[..., None]  # [B or 1, Q, H or 1, 1]
    out = _by_jax(Told(options.scale), query, key, value, bias, seen, **_ends(False, query, key))
    return jnp.where(some, out, jnp.zeros((), out.dtype))


def _by_lengths(
    options: Attention, query, key, value, bias, dropout_key, quantizers, sequences: SequenceDescriptor
) -> jax.Array:
    at = attending(options, runs(sequences), query.shape[1], key.shape[1])
    # What lies past the lengths is never written, not in the gradients either, and may be anything.
    covered, read = (_within(at.q_start, at.q_len, query.shape[1]), _within(at.k_start, at.k_len, key.shape[1]))
    query, key, value = only(covered, query), only(read, key), only(read, value)
    # JAX's call: lengths are sharded as queries are; and at least one token of each, as statistics of no token are not
    # finite. What is too much is hidden below.
    q_len, k_len = (_lengths_as_query(query, jnp.maximum(x, 1)) for x in (at.q_len, at.k_len))
    lengths = dict(query_seq_lengths=q_len, key_value_seq_lengths=k_len)
    return only(covered, _call(options, query, key, value, bias, dropout_key, quantizers, **lengths))


def _within(starts, lengths, size: int) -> jax.Array:
    """bool[B, size]: whether the token is of a sequence, of those that start and end so."""
    token = jnp.arange(size)[None, :, None]
    return jnp.any((token >= starts[:, None]) & (token < (starts + lengths)[:, None]), axis=-1)


def _bias(options: Attention, bias, query, key):
    """[B or 1, H or 1, Q, K] in query's dtype, scaled; finite, since cuDNN subtracts it from its maximum."""
    bias = bias.astype(jnp.float32) * (options.scale if options.bias_before_scale else 1.0)
    largest = hides(query.dtype) / 2
    bias = jnp.clip(bias, -largest, largest).astype(query.dtype)
    return jnp.broadcast_to(bias, (*bias.shape[:2], query.shape[1], key.shape[1]))


# --- Sharding --------------------------------------------------------------------------------------------------------


@kernel("... h, ... h q k -> ... h q k", whole="qk", platforms=())
def placed_like(like, x) -> jax.Array:
    return x


class Alike(NamedTuple):
    query: jax.Array  # [B, Q, G, R, D]
    key: jax.Array  # [B, K, G, D]
    value: jax.Array  # likewise


@kernel("b q g r d, b k g d, b k g d -> b q g r d, b k g d, b k g d", whole="qkrd", platforms=())
def placed_alike(query, key, value) -> Alike:
    """The three as they are, examples and groups of each on the same devices."""
    return Alike(query, key, value)


def _alike_forward(_, query, key, value):
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
    grouped, key, value = placed_alike(grouped, key, value)
    return (grouped.reshape(query.shape), key, value), None


_alike = differentiable(_alike_forward, lambda _, residuals, gradients: gradients)


def _sharded_alike(query, key, value) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three, their batch and heads sharded alike over the compiler's mesh axes, which JAX's call insists on.

    Where the rules in force shard heads over more devices than groups divide over, each device has keys and values of
    its own queries' groups: they are repeated.
    """
    if shards(query) == 1:
        return query, key, value
    mesh = jax.sharding.get_abstract_mesh()
    parts = math.prod(mesh.shape[name] for name in of_rules("heads")[0] if name in mesh.auto_axes)
    if key.shape[2] % parts:
        key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    return _alike(None, query, key, value)


def _as_query(query, x, of_each: bool = False) -> jax.Array:
    """x[B or 1, H or 1, m, n], its batch and heads sharded as the query's.

    JAX's partitioning of the cuDNN call shards along with queries, keys and values nothing else: lengths that are
    replicated while the batch is not would be those of the first shard everywhere. On explicit axes our kernels alone
    are called, which see to it. On one device x is left as it is, lest vmap make one of each example of what all share,
    unless that is wanted, `of_each`.
    """
    if explicit_axes(query) or (shards(query) == 1 and not of_each):
        return x
    like = jax.lax.stop_gradient(query[: x.shape[0], 0, : x.shape[1], 0])
    return placed_like(like, x)


def _lengths_as_query(query, lengths) -> jax.Array:
    """[B, 1] -> [B], likewise; of each example under vmap, as jax 0.10's call needs them."""
    return _as_query(query, lengths[:, None, None], of_each=True)[:, 0, 0, 0]


def _place_forward(_, query, x):
    return _as_query(query, x), None


def _place_backward(_, residuals, dx):
    return None, dx


_placed = differentiable(_place_forward, _place_backward)
