"""Attention of each device's part, where the axes of the mesh are known: manual ones, and those made manual here.

On explicit axes shardings are types. So a device attends with its examples and heads, of whole sequences or of its part
of them, and nothing is left to be partitioned, for which JAX's cuDNN call knows the compiler's axes alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Set
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from transformer_engine_jax.differentiable import align, explicit_meshes
from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.partition import names_of


def explicit_axes(x) -> frozenset[str]:
    """The explicit mesh axes that are in force for x."""
    return frozenset(jax.typeof(x).sharding.mesh.explicit_axes)


def of_examples_and_heads(query, key, value, sequence: str | None = None):
    """The three, sharded by examples and heads as queries are over explicit mesh axes.

    Keys and values are repeated where groups do not divide over the devices that share the heads. sequence: the mesh
    axis that shards the tokens.
    """
    spec, mesh = jax.typeof(query).sharding.spec, jax.typeof(query).sharding.mesh
    splits = lambda name: name != sequence and mesh.shape[name] > 1
    batch, heads = (tuple(filter(splits, names_of(spec[i]))) or None for i in (0, 2))
    groups = key.shape[2]
    if groups % math.prod(mesh.shape[name] for name in heads or ()):
        key, value = (_repeated(x, query.shape[2] // groups) for x in (key, value))
    sharded, axes = P(batch, sequence, heads), explicit_axes(query)
    return tuple(placed(x, sharded, axes) for x in (query, key, value))


def _repeated(x, times: int) -> jax.Array:
    """x[B, K, G, D] with each of its heads so often, whole on every device."""
    mesh, spec = jax.typeof(x).sharding.mesh, jax.typeof(x).sharding.spec
    x = jax.sharding.reshard(x, NamedSharding(mesh, P(spec[0])))[:, :, :, None]
    x = jnp.broadcast_to(x, (*x.shape[:3], times, x.shape[4]))
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def placed(x, spec: P, axes: Set[str]) -> jax.Array:
    """x, sharded over these mesh axes where spec is. On explicit axes that must be said; else shard_map sees to it."""
    mesh = jax.typeof(x).sharding.mesh
    explicit = axes.intersection(mesh.explicit_axes)
    if not explicit:
        return x
    entries = []
    for own, wanted in zip(jax.typeof(x).sharding.spec, (*spec, *[None] * x.ndim)):
        kept = [name for name in names_of(own) if name not in axes]
        entries.append((*kept, *[name for name in names_of(wanted) if name in explicit]) or None)
    return jax.sharding.reshard(x, NamedSharding(mesh, P(*entries)))


def on_axes(axes: Set[str], local: Callable, static: tuple, operands, in_specs, out_specs):
    """local(*static, *operands) on each device along these mesh axes, with its part of the operands."""
    leaves, tree = jax.tree.flatten(operands)
    mesh = next(iter(explicit_meshes(*leaves)), None)  # None: that in force
    operands = jax.tree.unflatten(tree, align(*leaves))
    operands = jax.tree.map(partial(placed, axes=axes), operands, in_specs)
    specs, specs_tree = jax.tree.flatten(in_specs, is_leaf=lambda x: isinstance(x, P))
    here = jax.sharding.get_abstract_mesh()
    return _program(local, static, mesh, here, tuple(specs), specs_tree, out_specs, frozenset(axes))(*operands)


@functools.lru_cache(maxsize=256)
def _program(
    local: Callable, static: tuple, mesh, here, specs: tuple, specs_tree, out_specs, axes: Set[str]
) -> Callable:
    """Kept, so that JAX traces and compiles equal calls once; `here` is the mesh that `mesh` None means."""
    del here
    over = dict(in_specs=jax.tree.unflatten(specs_tree, specs), out_specs=out_specs, axis_names=set(axes))
    return jax.jit(jax.shard_map(partial(local, *static), mesh=mesh, check_vma=False, **over))


def on_explicit_axes(
    attend: Callable, options: Attention, query, key, value, *, dropout_key, arguments: dict
) -> jax.Array:
    """attend(options, query, key, value, dropout_key=, **arguments) of each device's examples and heads, [B, Q, H, Dv].

    Query, key and value are sharded as `of_examples_and_heads` gives them.
    arguments: pytrees of arrays whose leading axes are examples, or 1 for all; of mask and bias, also heads; and of
    softmax_offset heads alone.
    """
    batch, _, heads, _ = jax.typeof(query).sharding.spec
    full = {"mask": (batch, heads), "bias": (batch, heads), "softmax_offset": (heads,)}
    sizes = {batch: query.shape[0], heads: query.shape[2]}

    def spec_of(name: str, x) -> P:
        entries = full.get(name, (batch,))
        return P(*[entry if n == sizes[entry] else None for entry, n in zip(entries, x.shape)])

    specs = {name: jax.tree.map(partial(spec_of, name), x) for name, x in arguments.items()}
    over = (*names_of(batch), *names_of(heads))
    sharded, whole = P(batch, None, heads), jax.tree.map(lambda _: P(), dropout_key)
    operands = query, key, value, dropout_key, arguments
    specs = (*[sharded] * 3, whole, specs)
    return on_axes(explicit_axes(query), _of_shard, (attend, options, over), operands, specs, sharded)


def _of_shard(attend: Callable, options: Attention, over, query, key, value, dropout_key, arguments: dict) -> jax.Array:
    if dropout_key is not None and over:
        dropout_key = jax.random.fold_in(dropout_key, jax.lax.axis_index(over))
    return attend(options, query, key, value, dropout_key=dropout_key, **arguments)
