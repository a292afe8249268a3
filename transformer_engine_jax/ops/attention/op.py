"""The op: checks what comes in, and hands it to the backend that fits."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from transformer_engine_jax.decisions import decided
from transformer_engine_jax.ops.arrays import arrays, as_mask
from transformer_engine_jax.ops.attention.backends import (
    as_packed,
    attention_backend,
    warn_of_fallback,
    warn_of_high_precision,
)
from transformer_engine_jax.ops.attention.context_parallel import (
    ContextParallel,
    as_read,
    context_parallel_attention,
    context_parallel_cudnn,
    places_in_order,
)
from transformer_engine_jax.ops.attention.cudnn import cudnn_attention, reads_qkv
from transformer_engine_jax.ops.attention.flash_qkv import parts, qkv_attention
from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.ops.attention.reference import attention_reference
from transformer_engine_jax.ops.attention.sequences import SequenceDescriptor, only, runs
from transformer_engine_jax.ops.attention.shards import explicit_axes, of_examples_and_heads
from transformer_engine_jax.ops.quantize import FLOATS, watch
from transformer_engine_jax.quantizers import AttentionQuantizers, keep
from transformer_engine_jax.sharding import sharded_over, with_whole_heads


def dot_product_attention(
    query,
    key=None,
    value=None,
    *,
    options: Attention,
    sequence_descriptor: SequenceDescriptor | None = None,
    mask=None,
    bias=None,
    softmax_offset=None,
    dropout_key=None,
    context_parallel: ContextParallel | None = None,
    quantizers: AttentionQuantizers | None = None,
) -> jax.Array:
    """softmax(query key^T * scale + bias) value, by head.

    Args:
      query: [B, Q, H, D] f32, f16 or bf16; or [B, S, 3, H, D], query, key and value in one array.
      key: [B, K, G, D] with G groups dividing H (GQA, MQA).
      value: [B, K, G, Dv].
      options: scale, causality, window, dropout rate, kind of softmax, score_mod.
      sequence_descriptor: which tokens belong to which sequence, of rows that are padded or hold several sequences.
        Tokens see only their own sequence; padding gets zeros. None: each row is one sequence.
      mask: bool, int8 or uint8, of four axes that broadcast to [B, H, Q, K]; True is masked out.
        Not together with a descriptor. With bottom_right, one of one row or column has no ends but the arrays'.
      bias: likewise, added to the scaled logits, with options.bias_before_scale to those before.
      softmax_offset: [H] or [1, H, 1, 1] the extra logit of each head, of softmax_type "learnable".
      dropout_key: of jax.random; None is no dropout.
      context_parallel: the mesh axis that shards the sequences of query, key and value, and how; a mesh must be in
        force. In the balanced order, ids and positions of a descriptor, and mask and bias, are those of the stored
        tokens; its lengths are those of sequences as they are read.
      quantizers: of attention_quantizers; query, key, value and the weights are then E4M3 in the forward pass, and in
        their own dtype in the backward. Where that cannot be, all is, states are kept, and a warning says why.

    Returns:
      [B, Q, H, Dv] in query's dtype; zeros for a query that sees no key.

    Raises:
      ValueError: shapes or dtypes do not fit, both mask and descriptor, or a softmax_offset where none is used.
      TypeError: sequence_descriptor is another thing, mask or bias is a descriptor, or query is None.
    """
    qkv = None
    if key is None or value is None:
        qkv = _checked_qkv(*arrays("dot_product_attention", {"query": query}), key, value)
        query, key, value = parts(qkv)
    query, key, value = arrays("dot_product_attention", dict(query=query, key=key, value=value))
    if not isinstance(options, Attention):
        raise TypeError(
            f"dot_product_attention: options: expected te.Attention(scale, ...), got {type(options).__name__}"
        )
    options.check()
    _check_shapes(query, key, value)
    query, key, value = (with_whole_heads(x, 2) for x in (query, key, value))
    mask, bias = (check_broadcast(name, x, query, key) for name, x in (("mask", mask), ("bias", bias)))
    softmax_offset = _check_offset(options, softmax_offset, query.shape[2])
    if sequence_descriptor is not None:
        if mask is not None:
            raise ValueError(
                "dot_product_attention: got both mask and sequence_descriptor; a descriptor says all about sequences "
                "and padding, so give one of them, or what else is to be hidden as a bias"
            )
        if not isinstance(sequence_descriptor, SequenceDescriptor):
            raise TypeError(
                "dot_product_attention: sequence_descriptor: expected a SequenceDescriptor, such as "
                f"SequenceDescriptor.from_seqlens(lengths), got {type(sequence_descriptor).__name__}; a mask is mask="
            )
        sequence_descriptor.check(query.shape[0], query.shape[1], key.shape[1])
    if context_parallel is not None and context_parallel.size() == 1:
        context_parallel = None  # in any order that is the sequence
    if context_parallel is not None:
        context_parallel.check_lengths(query=query.shape[1], key=key.shape[1])
    lengths = query.shape[1], key.shape[1]
    queries, keys = places_in_order(context_parallel, sequence_descriptor, *lengths, options, mask)
    alone = all(x is None for x in (sequence_descriptor, mask, bias, context_parallel, quantizers))
    dropout_key = dropout_key if options.dropout > 0 else None
    others = dict(mask=mask, bias=bias, softmax_offset=softmax_offset, dropout_key=dropout_key)
    described = dict(sequence_descriptor=sequence_descriptor, mask=mask, bias=bias, dropout_key=dropout_key)
    choose = partial(attention_backend, options, query, key, value, context_parallel=context_parallel, **described)
    backend, why = choose(fp8=quantizers is not None)
    packed = backend == "cudnn" and context_parallel is None and as_packed(options, query, key, value, **described)
    explicit, own = explicit_axes(query), jax.typeof(query).sharding.spec
    if explicit:
        sequence = context_parallel and context_parallel.axis
        (query, key, value), others = of_examples_and_heads(query, key, value, others, sequence)
    cached = sequence_descriptor is not None and sequence_descriptor.cached and options.bottom_right
    if queries.segment is not None and not (packed or cached):
        query, key, value = only(queries.segment != 0, query), *(only(keys.segment != 0, x) for x in (key, value))
    attached = unused = None
    if backend == "fp8":
        attached = quantizers.attached()
    elif quantizers is not None:
        unused = quantizers.state
        warn_of_high_precision(why)
    if backend == "fp8" and quantizers.spec.calibrating:
        query, key, value = map(watch, (query, key, value), attached)
        attached, (backend, why) = None, choose()
    with decided("attention", backend, why):
        if context_parallel is not None and backend == "cudnn":
            at = dict(sequences=sequence_descriptor, queries=queries, keys=keys)
            offset = others["softmax_offset"]
            out = context_parallel_cudnn(context_parallel, options, query, key, value, softmax_offset=offset, **at)
        elif context_parallel is not None:
            warn_of_fallback(why)
            out = context_parallel_attention(
                context_parallel, options, query, key, value, queries=queries, keys=keys, **others
            )
        elif backend == "reference":
            warn_of_fallback(why)
            out = attention_reference(options, query, key, value, queries=queries, keys=keys, **others)
        elif qkv is not None and alone and reads_qkv(options, query):
            out = qkv_attention(options, qkv, dropout_key)
        else:
            at = dict(sequence_descriptor=sequence_descriptor, queries=queries, keys=keys)
            out = cudnn_attention(options, query, key, value, quantizers=attached, **at, **others)
        promised = sequence_descriptor is not None and sequence_descriptor.max_segments is not None
        if promised and not packed:
            kept = runs(as_read(context_parallel, sequence_descriptor)).kept[:, None, None, None]
            out = jnp.where(kept, out, jnp.nan)
        return keep(sharded_over(out, own, explicit), unused)


def _checked_qkv(qkv, *others) -> jax.Array:
    if qkv.ndim != 5 or qkv.shape[2] != 3 or any(x is not None for x in others):
        given = ", ".join("none" if x is None else str(list(jnp.shape(x))) for x in (qkv, *others))
        raise ValueError(
            "dot_product_attention: expected query, key and value, or the three in one array [B, S, 3, heads, D], "
            f"got {given}"
        )
    return qkv


def _check_shapes(query, key, value) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"dot_product_attention: {name}: expected [B, S, heads, D], got {list(x.shape)}")
        if x.dtype not in (*FLOATS, jnp.float64):
            raise ValueError(f"dot_product_attention: {name}: expected f32, f16 or bf16, got {x.dtype}")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"dot_product_attention: query{list(query.shape)}, key{list(key.shape)} and value{list(value.shape)} "
            "must agree in batch, key length, groups, and the head size of query and key"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"dot_product_attention: {query.shape[2]} heads do not divide into {key.shape[2]} groups")


def check_broadcast(name: str, x, query, key):
    """The mask as bool, or the bias, of rank 4; None if absent."""
    if x is None:
        return None
    if isinstance(x, SequenceDescriptor):
        raise TypeError(
            f"dot_product_attention: {name}: expected an array, got a SequenceDescriptor; it is sequence_descriptor="
        )
    x = jnp.asarray(x)
    full = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if x.ndim != 4 or any(n not in (1, m) for n, m in zip(x.shape, full)):
        got = x.shape if x.ndim == 4 else f"{x.shape}, not of 4 axes"
        raise ValueError(f"dot_product_attention: {name}: expected a shape that broadcasts to {full}, got {got}")
    if name == "bias" and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"dot_product_attention: bias: expected f32, f16 or bf16, got {x.dtype}")
    return as_mask("dot_product_attention", x) if name == "mask" else x


def _check_offset(options: Attention, softmax_offset, heads: int):
    if (softmax_offset is not None) != (options.softmax_type == "learnable"):
        raise ValueError(
            "dot_product_attention: softmax_offset: expected [H] with softmax_type='learnable' and only with it, got "
            f"{'none' if softmax_offset is None else 'one'} with softmax_type={options.softmax_type!r}"
        )
    if softmax_offset is None:
        return None
    softmax_offset = jnp.asarray(softmax_offset)
    if jnp.shape(softmax_offset) not in ((heads,), (1, heads, 1, 1)):
        raise ValueError(
            f"dot_product_attention: softmax_offset: expected [{heads}] or [1, {heads}, 1, 1], one for each head, "
            f"got {list(jnp.shape(softmax_offset))}"
        )
    return jnp.reshape(softmax_offset, heads)
