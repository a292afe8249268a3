"""Logical axes of parameters and activations, and the mesh axes that a MeshResource maps them to."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Sequence, Set
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax._src.mesh import thread_resources
from jax.sharding import NamedSharding, PartitionSpec

from transformer_engine_jax.autocast import MeshResource, current
from transformer_engine_jax.autocast import global_shard_guard as global_shard_guard  # NVIDIA's place of it
from transformer_engine_jax.partition import dividing, names_of
from transformer_engine_jax.tracing import level_of_user

# Logical axes that the modules use: of activations batch, seqlen, seqlen_tp (between the products, under sequence
# parallelism), embed_activations, heads, mlp; of parameters embed (of the residual stream), mlp and heads (what tensor
# parallelism splits), act and qkv (the stacked products), lora.

Rules = Sequence[tuple[str, str | tuple[str, ...] | None]]

# In place of a logical axis: sharded as it is.
FREE = PartitionSpec.UNCONSTRAINED
# Of each axis of an array its logical axis; a tuple is the mesh axes themselves, None is not sharded.
Axes = tuple[str | tuple[str, ...] | None, ...]


# What NVIDIA's modules call our logical axes.
NVIDIAS = {
    "nvte_batch": "batch", "nvte_seqlen": "seqlen", "nvte_seqlen_tp": "seqlen_tp", "nvte_head": "heads",
    "nvte_hidden": "act", "nvte_hidden_tp": "mlp", "nvte_joined": "act", "nvte_w_no_shard": "act",
    "nvte_w_fsdp": "embed", "nvte_w_tp": "mlp", "nvte_w_joined": "act",
}  # fmt: skip


def logical_axis_rules(resource: MeshResource) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """Logical axis -> mesh axes under a MeshResource, by our names and by NVIDIA's."""
    batch = tuple(dict.fromkeys(a for a in (resource.dp_resource, resource.fsdp_resource) if a))
    tensor = _tensor_axis(resource)
    rules = (
        ("batch", batch or None),
        ("seqlen", resource.cp_resource),
        ("seqlen_tp", tuple(a for a in (resource.cp_resource, tensor) if a) or None),
        ("embed", resource.fsdp_resource),
        ("mlp", tensor),
        ("heads", tensor),
        ("act", None),
        ("qkv", None),
        ("lora", None),
        ("relpos_buckets", None),
    )
    return rules + tuple((theirs, dict(rules)[ours]) for theirs, ours in NVIDIAS.items())


def tensor_parallel() -> bool:
    """Whether the MeshResource in force splits kernels over several devices."""
    return _size(_tensor_axis(current().mesh_resource)) > 1


def _tensor_axis(resource: MeshResource) -> str | None:
    """The mesh axis that splits kernels: tp or, where that has one device, tpsp; ValueError where both have several."""
    tp, tpsp = resource.tp_resource, resource.tpsp_resource
    if tp is None or tpsp is None or tp == tpsp:
        return tp or tpsp
    if _size(tp) > 1 and _size(tpsp) > 1:
        raise ValueError(
            f"MeshResource: expected tp_resource={tp!r} or tpsp_resource={tpsp!r} to have one device in the mesh in "
            f"force, as one axis splits kernels, got {_size(tp)} and {_size(tpsp)}"
        )
    return tpsp if _size(tpsp) > 1 else tp


def gathered_axis(axes: Axes, shape: Sequence[int]) -> int | None:
    """Which axis of a parameter with these logical axes is sharded as the batch is, by FSDP; None where none is.

    Products gather it.

    Raises:
      ValueError: axes are given, but not one for each axis of the parameter.
    """
    if not axes:
        return None
    if len(axes) != len(shape):
        raise ValueError(f"kernel_axes: expected {len(shape)} logical axes for {list(shape)}, got {tuple(axes)}")
    name, mesh = current().mesh_resource.fsdp_resource, jax.sharding.get_abstract_mesh()
    size = 1 if name in mesh.manual_axes else _size(name)
    found = [i for i, entry in enumerate(_spec(axes)) if entry is not FREE and name in names_of(entry)]
    return found[0] if size > 1 and len(found) == 1 and shape[found[0]] % size == 0 else None


def _size(name: str | None) -> int:
    """Of a mesh axis that the MeshResource names; 1 where it names none, or no mesh is in force."""
    mesh = jax.sharding.get_abstract_mesh()
    if name is None or mesh.empty:
        return 1
    if name not in mesh.shape:
        raise ValueError(
            f"MeshResource: expected axes of the mesh in force, {list(mesh.axis_names)}, got {name!r} in "
            f"{current().mesh_resource}"
        )
    return mesh.shape[name]


def extend_logical_axis_rules(rules: Rules) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """`rules` and, for logical axes they do not name, those of the MeshResource in force.

    Args:
      rules: (logical axis, mesh axis or axes or None), as flax.linen.logical_axis_rules takes them.

    Raises:
      ValueError: an entry is not such a pair.
    """
    rules = tuple(rules)
    for rule in rules:
        if not (isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)):
            raise ValueError(f"extend_logical_axis_rules: expected (logical axis, mesh axes) pairs, got {rule!r}")
    named = {name for name, _ in rules}
    return rules + tuple(r for r in logical_axis_rules(current().mesh_resource) if r[0] not in named)


def activation_axes(
    features: str = "embed_activations", *, transposed: bool, sequence_parallel: bool = False
) -> tuple[str, str, str]:
    """Logical axes of activations [B, S, features] or, transposed, [S, B, features]."""
    seqlen = "seqlen_tp" if sequence_parallel else "seqlen"
    return (seqlen, "batch", features) if transposed else ("batch", seqlen, features)


def constrain(x: jax.Array, axes: Axes, *, whole: bool = False) -> jax.Array:
    """x, sharded over the mesh as its logical axes say; x itself where no mesh or no rule is in force.

    Rules are those of flax.linen.logical_axis_rules, and of the MeshResource for what they leave out. Where no axis is
    sharded, nothing is said, unless `whole` x is asked for.

    Raises:
      ValueError: axes are given, but not one for each axis of x, or one twice; or the mesh has not what a rule, or the
        MeshResource, names.
    """
    mesh, said = jax.sharding.get_abstract_mesh(), current().mesh_resource
    if not mesh.are_all_axes_manual:  # as of a shard_map, whose mesh may be another
        for name in (said.dp_resource, said.tp_resource, said.tpsp_resource, said.fsdp_resource, said.cp_resource):
            _size(name)
    if not axes:
        return x
    if len(axes) != x.ndim:
        raise ValueError(f"constrain: expected {x.ndim} logical axes for x{list(x.shape)}, got {tuple(axes)}")
    names = [name for name in axes if isinstance(name, str)]
    if len(set(names)) < len(names):
        raise ValueError(f"constrain: expected each logical axis once, got {tuple(axes)}")
    if mesh.empty:
        _check_no_other_mesh()
        return _flax().with_logical_constraint(x, tuple(axes)) if _flax() else x
    if mesh.are_all_axes_manual:
        return x
    spec = _spec(axes)
    asked = {name for entry in spec if entry is not FREE for name in names_of(entry)}
    if unknown := sorted(asked.difference(mesh.axis_names)):
        raise ValueError(
            f"constrain: expected axes of the mesh in force, {list(mesh.axis_names)}, for {tuple(axes)}, got {unknown} "
            f"by flax.linen.logical_axis_rules or {current().mesh_resource}"
        )
    # To be whole along the sequence says something where it may be sharded between the products.
    ours = [NVIDIAS.get(name, name) for name in axes]
    gathers = "seqlen" in ours and any(name == "seqlen_tp" and to for name, to in _rules())
    if all(entry in (None, FREE) for entry in spec) and not (gathers or whole):
        return x
    # A batch's owner has it as it is.
    free = [name is FREE or (name == "batch" and entry is None) for name, entry in zip(ours, spec)]
    if mesh.explicit_axes:
        own = jax.typeof(x).sharding.spec
        given = [o if f else _among(s, mesh.explicit_axes, n) for f, o, s, n in zip(free, own, spec, x.shape)]
        x = jax.sharding.reshard(x, PartitionSpec(*given))
    if mesh.auto_axes:
        given = [FREE if f else _among(s, mesh.auto_axes, n) for f, s, n in zip(free, spec, x.shape)]
        x = _constrained(x, PartitionSpec(*given))
    return x


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _constrained(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """x, sharded so by the compiler; outside of a program by one of its own, which puts on the mesh what is not."""
    return jax.lax.with_sharding_constraint(x, spec)


def with_whole_parts(x: jax.Array, parts: int) -> jax.Array:
    """x[.., n], sharded over no more explicit mesh axes than divide its parts, so that it can be cut into these."""
    sharding = jax.typeof(x).sharding
    names = names_of(sharding.spec[-1]) if sharding.mesh.explicit_axes else ()
    kept = dividing(parts, 1, names, sharding.mesh.shape)
    if kept == names:
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1], kept or None)))


def with_whole_heads(x: jax.Array, axis: int) -> jax.Array:
    """x, on the compiler's mesh axes sharded along its axis of heads over no more of them than divide it.

    Of features split over more, reshaped to heads, the compiler would leave a part of a mesh axis on each of the two,
    for which the partitioning of calls, ours or JAX's, has no name.
    """
    mesh = jax.sharding.get_abstract_mesh()
    (entry,) = _spec(("heads",)) if mesh.auto_axes else (None,)
    names = tuple(name for name in names_of(entry) if name in mesh.auto_axes)
    kept = dividing(x.shape[axis], 1, names, mesh.shape)
    if kept == names:
        return x
    return _constrained(x, PartitionSpec(*[FREE] * axis, kept or None, *[None] * (x.ndim - axis - 1)))


def with_whole_rows(x: jax.Array) -> jax.Array:
    """x[B, S], whole along S on each device: of shards XLA counts, as in a cumulative sum, by a loop over tokens."""
    own = jax.typeof(x).sharding
    x = sharded_over(x, PartitionSpec(own.spec[0]), frozenset(own.mesh.explicit_axes))
    return _constrained(x, PartitionSpec(FREE, None)) if jax.sharding.get_abstract_mesh().auto_axes else x


def sharded_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """x, of as many axes as `like`, on explicit mesh axes sharded as that is."""
    sharding = jax.typeof(like).sharding
    return jax.sharding.reshard(x, sharding) if sharding.mesh.explicit_axes else x


def sharded_over(x: jax.Array, spec: PartitionSpec, axes: Set[str]) -> jax.Array:
    """x, sharded over these mesh axes where spec is. On explicit axes that must be said; else shard_map sees to it."""
    mesh = jax.typeof(x).sharding.mesh
    explicit = axes.intersection(mesh.explicit_axes)
    if not explicit:
        return x
    entries = []
    for own, wanted in zip(jax.typeof(x).sharding.spec, (*spec, *[None] * x.ndim)):
        kept = [name for name in names_of(own) if name not in axes]
        entries.append((*kept, *[name for name in names_of(wanted) if name in explicit]) or None)
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*entries)))


def _flax():
    """flax.linen, whose rules hold where it is imported; None elsewhere, for ops need no Flax."""
    return sys.modules.get("flax.linen")


def _check_no_other_mesh() -> None:
    """A warning where a MeshResource names axes of a mesh that JAX does not tell of: one entered by `with mesh:`."""
    if current().mesh_resource != MeshResource() and not thread_resources.env.physical_mesh.empty:
        warnings.warn(
            "MeshResource: the mesh of `with mesh:` is not seen while a function is traced, so activations are sharded "
            "as the compiler likes; enter it by `with jax.set_mesh(mesh):`",
            RuntimeWarning,
            stacklevel=level_of_user(),
        )


def _rules() -> Rules:
    return extend_logical_axis_rules(_flax().get_logical_axis_rules() if _flax() else ())


def _spec(axes: Axes) -> PartitionSpec:
    """By the first rule of each logical axis whose mesh axes are free, as flax.linen.logical_to_mesh_axes has it."""
    found = {name: name for name in axes if not isinstance(name, str)}
    used = {name for entry in axes if isinstance(entry, tuple) for name in entry}
    for name, to in _rules():
        if name in axes and name not in found and not used.intersection(names_of(to)):
            found[name] = to
            used.update(names_of(to))
    return PartitionSpec(*[found.get(name) for name in axes])


def of_rules(*logical: str) -> list[tuple[str, ...]]:
    """The mesh axes that the rules in force give logical axes."""
    return [names_of(entry) for entry in _spec(logical)]


def _among(entry: str | tuple[str, ...] | None, axes: Sequence[str], size: int) -> tuple[str, ...] | None:
    """An entry of a partition spec, of these mesh axes alone, and of those that divide the size, where it is known.

    A program may have shards of other sizes, but not as a result; and kernels take none.
    """
    names = tuple(name for name in names_of(entry) if name in axes)
    mesh = jax.sharding.get_abstract_mesh()
    return (dividing(size, 1, names, mesh.shape) if isinstance(size, int) else names) or None


def _reshaped(x: jax.Array, shape: Sequence[int], spec: Sequence) -> jax.Array:
    """x in another shape, on explicit mesh axes sharded so, where JAX can't tell by itself."""
    sharding = jax.typeof(x).sharding
    if not sharding.mesh.explicit_axes:
        return x.reshape(shape)
    return jnp.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, PartitionSpec(*spec)))


class SequenceShards(NamedTuple):
    """A sharded sequence [B, S, ..] as [n, B, S / n, ..], for products that gather it and scatter their results.

    All-gather and reduce-scatter then move contiguous blocks; in [B, S, ..] XLA would transpose what they exchange.
    """

    axis: int = 0  # of the sequence
    names: tuple[str, ...] = ()  # mesh axes over which it is gathered and scattered; none: it stays where it is
    count: int = 1  # of the shards
    others: tuple[str, ...] = ()  # mesh axes over which it is sharded throughout
    outside: int = 1  # of such shards

    @classmethod
    def of(cls, x, between: Axes, whole: Axes) -> SequenceShards:
        """Of x[.., S, ..]; between, whole: the logical axes of its tokens before or behind products, and in them."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or len(between) != len(whole):
            return cls()
        sizes = {name: mesh.shape[name] for name in mesh.axis_names if name not in mesh.manual_axes}
        found = []
        for axis, entries in enumerate(zip(_spec(whole), _spec(between))):
            outer, inner = (
                [n for n in names_of(entry) if n in sizes] if entry is not FREE else [] for entry in entries
            )
            if len(inner) > len(outer) and inner[: len(outer)] == outer:
                gathered = inner[len(outer) :]
                count, outside = (math.prod(sizes[name] for name in of) for of in (gathered, outer))
                found.append(cls(axis, tuple(gathered), count, tuple(outer), outside))
        if len(found) != 1:
            return cls()
        (shards,) = found
        divides = x.shape[shards.axis] % (shards.count * shards.outside) == 0
        return shards if shards.gathered and divides else cls()

    @property
    def gathered(self) -> bool:
        """Whether products see more of it than there is between them."""
        return self.count > 1

    @property
    def _behind(self) -> bool:
        """Whether shards are to be put in front, or are there."""
        return self.gathered and (self.axis > 0 or self.outside > 1)

    def split(self, x: jax.Array) -> jax.Array:
        """[n, B, S / n, ..] of [B, S, ..]. Where S is sharded, nothing moves."""
        if not self._behind:
            return x
        before, (size, *after) = x.shape[: self.axis], x.shape[self.axis :]
        spec = jax.typeof(x).sharding.spec
        specs, of_sequence, others = spec[: self.axis], names_of(spec[self.axis]), spec[self.axis + 1 :]
        outer, inner = (tuple(n for n in of_sequence if n in names) or None for names in (self.others, self.names))
        parts = self.outside, self.count, size // (self.count * self.outside)
        x = _reshaped(x, (*before, *parts, *after), (*specs, outer, inner, None, *others))
        x = jnp.moveaxis(x, self.axis + 1, 0)
        return _reshaped(x, (self.count, *before, size // self.count, *after), (inner, *specs, outer, *others))

    def join(self, x: jax.Array) -> jax.Array:
        """[B, S, ..] of [n, B, S / n, ..]."""
        if not self._behind:
            return x
        before, (size, *after) = x.shape[1 : self.axis + 1], x.shape[self.axis + 1 :]
        inner, *spec = jax.typeof(x).sharding.spec
        specs, outer, others = spec[: self.axis], spec[self.axis], spec[self.axis + 1 :]
        parts = self.outside, size // self.outside
        x = _reshaped(x, (self.count, *before, *parts, *after), (inner, *specs, outer, None, *others))
        x = jnp.moveaxis(x, 0, self.axis + 1)
        of_sequence = (*names_of(outer), *names_of(inner)) or None
        return _reshaped(x, (*before, size * self.count, *after), (*specs, of_sequence, *others))

    def axes(self, axes: Axes, *, between: bool = False) -> Axes:
        """The logical axes of what is split, from those it has."""
        if not (self._behind and axes):
            return tuple(axes)
        if not between:
            return (None, *axes)
        return (self.names, *axes[: self.axis], self.others, *axes[self.axis + 1 :])
