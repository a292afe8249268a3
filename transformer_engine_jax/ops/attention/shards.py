"""Attention of each device's part, where the axes of the mesh are known: manual ones, and those made manual here.

On explicit axes shardings are types. So a device attends with its examples and heads, of whole sequences or of its part
of them, and nothing is left to be partitioned, for which JAX's cuDNN call knows the compiler's axes alone, and these
only where no other is manual; there devices' parts are those that the rules in force say.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Set
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from transformer_engine_jax.alignment import align, explicit_meshes
from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.partition import dividing, names_of
from transformer_engine_jax.sharding import of_rules, sharded_over


def explicit_axes(x) -> frozenset[str]:
    """The explicit mesh axes that are in force for x."""
    return frozenset(jax.typeof(x).sharding.mesh.explicit_axes)


def among_the_compilers() -> bool:
    """Whether some mesh axes are manual and others the compiler's, over which JAX can't partition its cuDNN call."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.manual_axes and mesh.auto_axes)


def examples_and_heads(query, groups: int, sequence: str | None = None):
    """(Mesh axes that are not manual; those of them that shard the examples; and the heads).

    On explicit axes as queries are sharded, on the compiler's as the rules in force say. sequence: the mesh axis that
    shards the tokens.
    """
    explicit, (batch, _, heads, _) = explicit_axes(query), jax.typeof(query).sharding.spec
    mesh = jax.typeof(query).sharding.mesh if explicit else jax.sharding.get_abstract_mesh()
    entries = []
    for own, by_rule, size in zip((batch, heads), of_rules("batch", "heads"), (query.shape[0], groups)):
        own = tuple(name for name in names_of(own) if name != sequence)
        free = tuple(name for name in by_rule if name in mesh.auto_axes and name != sequence)
        entries.append((*own, *dividing(size // math.prod(mesh.shape[n] for n in own), 1, free, mesh.shape)) or None)
    return explicit | frozenset(mesh.auto_axes), *entries


def of_examples_and_heads(query, key, value, others: dict[str, Any], sequence: str | None = None):
    """(The three, the others), sharded by examples and heads as queries are over explicit mesh axes.

    Keys and values are repeated where groups do not divide over the devices that share the heads. others: mask, bias,
    softmax_offset and more. sequence: the mesh axis that shards the tokens.
    """
    spec, mesh, axes = jax.typeof(query).sharding.spec, jax.typeof(query).sharding.mesh, explicit_axes(query)
    # An axis of one device shards nothing, and goes where a dimension of one is reshaped.
    shards = lambda name: name != sequence and mesh.shape[name] > 1
    batch, heads = (tuple(filter(shards, names_of(spec[i]))) or None for i in (0, 2))
    groups = key.shape[2]
    if groups % math.prod(mesh.shape[name] for name in heads or ()):
        key, value = (_repeated(x, query.shape[2] // groups) for x in (key, value))

    def placed(x, *entries):
        if x is None:
            return None
        spec = P(*[entry if size > 1 else None for entry, size in zip(entries, x.shape)])
        return sharded_over(x, spec, axes - {sequence})

    of_logits = {name: placed(others[name], batch, heads) for name in ("mask", "bias")}
    of_heads = {"softmax_offset": placed(others["softmax_offset"], heads)}
    three = (sharded_over(x, P(batch, sequence, heads), axes) for x in (query, key, value))
    return tuple(three), {**others, **of_logits, **of_heads}


def _repeated(x, times: int) -> jax.Array:
    """x[B, K, G, D] with each of its heads so often, whole on every device."""
    mesh, spec = jax.typeof(x).sharding.mesh, jax.typeof(x).sharding.spec
    x = jax.sharding.reshard(x, NamedSharding(mesh, P(spec[0])))[:, :, :, None]
    x = jnp.broadcast_to(x, (*x.shape[:3], times, x.shape[4]))
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def on_axes(axes: Set[str], local: Callable, static: tuple, operands, in_specs, out_specs: P):
    """local(*static, *operands), an array, on each device along these mesh axes, with its part of the operands."""
    leaves, tree = jax.tree.flatten(operands)
    specs = jax.tree.leaves(in_specs, is_leaf=lambda x: isinstance(x, P))
    mesh = next(iter(explicit_meshes(*leaves)), None)  # None: that in force
    leaves = [sharded_over(x, spec, axes) for x, spec in zip(align(*leaves), specs)]
    here = jax.sharding.get_abstract_mesh()
    on = _OnAxes(local, static, tree, mesh, here, tuple(specs), out_specs, frozenset(axes))
    varying = any(jax.typeof(x).manual_axis_type.varying for x in leaves)
    return _within_manual_axes(on, *leaves) if varying else _program(on)(*leaves)


class _OnAxes(NamedTuple):
    """What `on_axes` does, of flat operands."""

    local: Callable
    static: tuple
    tree: jax.tree_util.PyTreeDef
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None
    here: jax.sharding.AbstractMesh  # what a mesh of None means
    specs: tuple[P, ...]
    out_specs: P
    axes: frozenset[str]

    def of_shard(self, *leaves) -> jax.Array:
        return self.local(*self.static, *jax.tree.unflatten(self.tree, leaves))

    def gradients_of_shard(self, dy, *leaves) -> list[jax.Array]:
        """Of the leaves that have some. Each device adds to those of what several have."""
        dy, *leaves = map(_untyped, (dy, *leaves))
        of_floats = lambda *floats: self.of_shard(*_with_floats(leaves, floats))
        mentioned = lambda spec: {name for entry in spec for name in names_of(entry)}
        sums = [tuple(sorted(mentioned(self.out_specs) - mentioned(s))) for s, x in zip(self.specs, leaves) if _real(x)]
        gradients = jax.vjp(of_floats, *filter(_real, leaves))[1](dy)
        return [jax.lax.psum(x, names) if names else x for x, names in zip(gradients, sums)]

    def mapped(self, of_shard: Callable, in_specs, out_specs) -> Callable:
        over = dict(in_specs=in_specs, out_specs=out_specs, axis_names=set(self.axes))
        return jax.jit(jax.shard_map(of_shard, mesh=self.mesh, check_vma=False, **over))


def _real(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _untyped(x) -> jax.Array:
    """x for jax.vjp inside of a shard_map that checks nothing: there results of operations vary over no axes."""
    return jnp.squeeze(x[None], 0)


def _with_floats(leaves, floats) -> list:
    floats = iter(floats)
    return [next(floats) if _real(x) else x for x in leaves]


def _kept(make: Callable) -> Callable:
    """make(on, ..), kept, so that JAX traces and compiles equal calls once.

    Not with a score_mod: what that reads, as the parameters of an nnx.Module, may be other numbers in the next call.
    """
    kept = functools.lru_cache(maxsize=256)(make)
    modifies = lambda on: any(isinstance(x, Attention) and x.score_mod is not None for x in on.static)

    @functools.wraps(make)
    def made(on: _OnAxes, *args) -> Callable:
        return (make if modifies(on) else kept)(on, *args)

    made.cache_info = kept.cache_info
    return made


@_kept
def _program(on: _OnAxes) -> Callable:
    return on.mapped(on.of_shard, on.specs, on.out_specs)


@_kept
def _gradients(on: _OnAxes, real: tuple[bool, ...]) -> Callable:
    specs = [spec for spec, has_one in zip(on.specs, real) if has_one]
    return on.mapped(on.gradients_of_shard, (on.out_specs, *on.specs), specs)


def _forward(on: _OnAxes, *leaves):
    return align(_program(on)(*leaves), *leaves)[0], leaves


def _backward(on: _OnAxes, leaves, dy):
    gradients = _gradients(on, tuple(map(_real, leaves)))(dy, *leaves)
    gradients = iter(align(*gradients, *leaves)[: len(gradients)])
    return [next(gradients) if _real(x) else None for x in leaves]


# Among manual axes that arrays vary over: JAX's shard_map inside of another forgets these, so that it has no gradient
# there. Its own are computed from the operands, with the forward pass once more.
_within_manual_axes = differentiable(_forward, _backward)


def by_examples_and_heads(
    attend: Callable, options: Attention, query, key, value, *, dropout_key, arguments: dict
) -> jax.Array:
    """attend(options, query, key, value, dropout_key=, **arguments) of each device's examples and heads, [B, Q, H, Dv].

    Query, key and value are sharded as `of_examples_and_heads` gives them; on the compiler's axes, as the rules say.
    arguments: pytrees of arrays whose leading axes are examples, or 1 for all; of mask and bias, also heads; and of
    softmax_offset heads alone.
    """
    axes, batch, heads = examples_and_heads(query, key.shape[2])
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
    return on_axes(axes, _of_shard, (attend, options, over), operands, specs, sharded)


def _of_shard(attend: Callable, options: Attention, over, query, key, value, dropout_key, arguments: dict) -> jax.Array:
    if dropout_key is not None and over:
        dropout_key = jax.random.fold_in(dropout_key, jax.lax.axis_index(over))
    return attend(options, query, key, value, dropout_key=dropout_key, **arguments)
