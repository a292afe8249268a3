"""Context parallelism: attention where a mesh axis shards the sequence.

ALL_GATHER (and DEFAULT): each device gathers all keys and values. RING: they go round from device to device, and each
query keeps a running softmax (Liu et al., 2023), so that no device ever holds more than two parts of them. But where a
gradient is taken in plain JAX, each keeps all that came round, and for each part the running sums, f32: more than
ALL_GATHER does.

Under causality the first queries see little and the last ones all. In the balanced order device i of n holds the parts
i and 2 n - 1 - i of 2 n; `reorder_causal_load_balancing` brings a sequence into it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from transformer_engine_jax.ops.attention.cudnn_parts import Mask, Parts, attention_of_parts
from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.ops.attention.reference import attention_reference, running_attention
from transformer_engine_jax.ops.attention.sequences import Places, SequenceDescriptor, counted_back, places
from transformer_engine_jax.ops.attention.shards import examples_and_heads, on_axes

STRATEGIES = ("DEFAULT", "ALL_GATHER", "RING")


class ContextParallel(NamedTuple):
    """How the sequence is sharded: over which mesh axis, who sends what, and whether in the balanced order.

    strategy: "ALL_GATHER", which "DEFAULT" is, gathers keys and values; "RING" hands them on from device to device.
    load_balanced: tokens are in the order of `reorder_causal_load_balancing`.
    """

    axis: str
    strategy: str = "DEFAULT"
    load_balanced: bool = False

    def size(self) -> int:
        """The number of devices along the axis; ValueError where there is no such axis in force, or it is manual."""
        mesh = jax.sharding.get_abstract_mesh()
        if self.strategy not in STRATEGIES:
            raise ValueError(f"context_parallel_strategy: expected one of {list(STRATEGIES)}, got {self.strategy!r}")
        if self.axis not in mesh.axis_names or self.axis in mesh.manual_axes:
            raise ValueError(
                f"context_parallel_axis: expected an axis of the mesh in force (jax.set_mesh), outside any shard_map "
                f"over it, got {self.axis!r}; the mesh has {list(mesh.axis_names)}"
            )
        return mesh.shape[self.axis]

    def check_lengths(self, **lengths: int) -> None:
        """Raises ValueError for lengths that do not divide over the axis."""
        for name, length in lengths.items():
            if length % self.size():
                raise ValueError(
                    f"context_parallel_axis: {name}: expected a length of a multiple of {self.size()}, the size of "
                    f"{self.axis!r}, got {length}"
                )


def balanced_order(length: int, size: int) -> np.ndarray:
    """i32[length]: the token of the sequence that is stored at each place of the balanced order over `size` devices."""
    if size < 1:
        raise ValueError(f"cp_size: expected how many devices share a sequence, 1 or more, got {size}")
    if length % (2 * size):
        raise ValueError(
            f"context_parallel_causal_load_balanced: expected a length of a multiple of {2 * size}, twice the devices, "
            f"got {length}"
        )
    parts = np.arange(length, dtype=np.int32).reshape(2 * size, -1)
    return np.stack([parts[:size], parts[: size - 1 : -1]], axis=1).reshape(-1)


def reorder_causal_load_balancing(x, *, cp_size: int, seq_dim: int = 1) -> jax.Array:
    """x [.., S, ..], of any dtype, with the tokens along seq_dim in the balanced order over cp_size devices.

    Each device then has a part from the front of the sequence and one from its end, and causal attention gives all as
    much to do.

    Raises:
      ValueError: S is not a multiple of 2 * cp_size, or x has no axis seq_dim.
    """
    return _reordered(x, balanced_order(_length(x, seq_dim), cp_size), seq_dim)


def inverse_reorder_causal_load_balancing(x, *, cp_size: int, seq_dim: int = 1) -> jax.Array:
    """x [.., S, ..] with the tokens along seq_dim back from the order of reorder_causal_load_balancing."""
    return _reordered(x, np.argsort(balanced_order(_length(x, seq_dim), cp_size)), seq_dim)


def _length(x, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"seq_dim: expected an axis of x{list(x.shape)}, got {axis}")
    return x.shape[axis]


def _reordered(x, order: np.ndarray, axis: int) -> jax.Array:
    own = jax.typeof(x).sharding
    if all(entry is None for entry in own.spec):
        return jnp.take(x, order, axis=axis)
    # Where its sharding is its type, what is to move between devices must be said.
    tokens = (*[slice(None)] * (axis % x.ndim), order)
    whole = own.update(spec=P(*[None if i == axis % x.ndim else entry for i, entry in enumerate(own.spec)]))
    return jax.sharding.reshard(jax.sharding.reshard(x, whole).at[tokens].get(out_sharding=whole), own)


def places_in_order(
    parallel: ContextParallel | None,
    sequences: SequenceDescriptor | None,
    q_len: int,
    k_len: int,
    options: Attention,
    mask=None,
) -> tuple[Places, Places]:
    """`places` of tokens as they are stored, which may be the balanced order.

    Lengths are those of sequences as they are read; ids, positions and the mask those of the stored tokens. ValueError
    for ids alone where positions matter: those of tokens that were reordered can't be counted.
    """
    found = places(sequences, q_len, k_len, options)
    balanced = parallel is not None and parallel.load_balanced and parallel.size() > 1
    if sequences is None or sequences.segment_ids is None:
        if balanced:
            found = jax.tree.map(partial(reorder_causal_load_balancing, cp_size=parallel.size()), found)
        return found if mask is None or not options.bottom_right else counted_back(*found, mask)
    if balanced and sequences.segment_pos is None and (options.reach != (-1, -1) or options.score_mod is not None):
        raise ValueError(
            "context_parallel_causal_load_balanced: sequence_descriptor: expected segment_pos beside segment_ids, as "
            "the balanced order does not tell where tokens stand in their sequence, got none; reorder both alike: "
            "from_segment_ids_and_pos(reorder(ids), reorder(positions))"
        )
    return found


def as_read(parallel: ContextParallel | None, sequences: SequenceDescriptor) -> SequenceDescriptor:
    """The descriptor of segment ids, with ids and positions in the order of the sequence."""
    if parallel is None or not parallel.load_balanced:
        return sequences
    return jax.tree.map(partial(inverse_reorder_causal_load_balancing, cp_size=parallel.size()), sequences)


def context_parallel_attention(
    parallel: ContextParallel, options: Attention, query, key, value, *, queries: Places, keys: Places, **others
) -> jax.Array:
    """As `attention_reference`, of arrays whose axis 1 is sharded over parallel.axis.

    Raises:
      ValueError: dropout with RING, whose parts would draw alike.
    """
    size, ring = parallel.size(), parallel.strategy == "RING"
    if ring and others["dropout_key"] is not None:
        raise ValueError("context_parallel_strategy: 'RING' has no dropout; take 'ALL_GATHER'")
    sharded, whole = P(None, parallel.axis), P()
    of_keys = sharded if ring else whole
    of_rows = lambda x: P(None, None, parallel.axis) if x is not None and x.shape[2] > 1 else whole
    like = lambda tree, spec: jax.tree.map(lambda _: spec, tree)
    of_others = {name: of_rows(x) if name in ("mask", "bias") else whole for name, x in others.items()}

    def summed(x, spec):
        """x, in f32 where its gradient is a sum over the devices: in bf16 XLA (of jaxlib 0.12) aborts on CPUs."""
        return x.astype(jnp.float32) if spec is whole and x is not None and jnp.issubdtype(x.dtype, jnp.floating) else x

    dtypes = key.dtype, value.dtype
    key, value = (summed(x, of_keys) for x in (key, value))
    others = {name: summed(x, of_others[name]) for name, x in others.items()}
    operands = (query, key, value, queries, keys, others)
    specs = (sharded, of_keys, of_keys, like(queries, sharded), like(keys, whole))
    specs += ({name: like(x, of_others[name]) for name, x in others.items()},)
    local, static = (_ring, size) if ring else (_of_all_keys, dtypes)
    return on_axes({parallel.axis}, local, (parallel.axis, static, options), operands, specs, sharded)


def context_parallel_cudnn(
    parallel: ContextParallel,
    options: Attention,
    query,
    key,
    value,
    *,
    sequences: SequenceDescriptor | None,
    queries: Places,
    keys: Places,
    softmax_offset,
) -> jax.Array:
    """As `context_parallel_attention`, by cuDNN: rows of one sequence or of several, causal or not."""
    over = dict(size=parallel.size(), ring=parallel.strategy == "RING", balanced=parallel.load_balanced)
    over |= dict(sequences=0 if sequences is None else sequences.most())
    parts = Parts(options.scale, Mask(options.causal), parallel.axis, **over)
    axes, batch, heads = examples_and_heads(query, key.shape[2], parallel.axis)
    if options.softmax_type != "vanilla" and softmax_offset is None:
        softmax_offset = jnp.zeros(query.shape[2], jnp.float32)
    operands = query, key, value, softmax_offset, (queries.segment, keys.segment)
    sharded, ids = P(batch, parallel.axis, heads), None if sequences is None else P(batch, parallel.axis)
    specs = (*[sharded] * 3, None if softmax_offset is None else P(heads), (ids, ids))
    return on_axes({parallel.axis, *axes}, attention_of_parts, (parts,), operands, specs, sharded)


def _of_all_keys(axis: str, dtypes, options: Attention, query, key, value, queries, keys, others) -> jax.Array:
    first = jax.lax.axis_index(axis) * query.shape[1]
    key, value = (x.astype(dtype) for x, dtype in zip((key, value), dtypes))
    return attention_reference(options, query, key, value, queries=queries, keys=keys, first_row=first, **others)


def _ring(axis: str, size: int, options: Attention, query, key, value, queries, keys, others) -> jax.Array:
    me, part = jax.lax.axis_index(axis), key.shape[1]
    following = [(i, (i + 1) % size) for i in range(size)]
    running = running_attention(options, query, value.shape[-1], others["softmax_offset"])
    for step in range(size):
        first = (me - step) % size * part  # of the keys that are here now

        def of_part(x, axis, first=first):
            """What belongs to these keys, of what belongs to all."""
            return x if x is None or x.shape[axis] == 1 else jax.lax.dynamic_slice_in_dim(x, first, part, axis)

        here = Places(*[of_part(x, 1) for x in keys])
        mask, bias = (of_part(others[name], 3) for name in ("mask", "bias"))
        running = running.over(key, value, queries=queries, keys=here, mask=mask, bias=bias)
        if step + 1 < size:
            key, value = (jax.lax.ppermute(x, axis, following) for x in (key, value))
    return running.result()
