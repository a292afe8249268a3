"""Logical axes of parameters and activations, and the mesh axes that a MeshResource maps them to."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec

from transformer_engine_jax.autocast import MeshResource, current
from transformer_engine_jax.partition import names_of

# Logical axes that the modules use: of activations batch, seqlen, seqlen_tp (between the products, under sequence
# parallelism), embed_activations, heads, mlp; of parameters embed (of the residual stream), mlp and heads (what tensor
# parallelism splits), act and qkv (the stacked products), lora.

Rules = Sequence[tuple[str, str | tuple[str, ...] | None]]


def logical_axis_rules(resource: MeshResource) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """Logical axis -> mesh axes under a MeshResource."""
    batch = tuple(dict.fromkeys(a for a in (resource.dp_resource, resource.fsdp_resource) if a))
    tensor = resource.tp_resource or resource.tpsp_resource
    return (
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


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """x, sharded over the mesh as its logical axes say; x itself where no mesh or no rule is in force.

    Rules are those of flax.linen.logical_axis_rules where set, and else those of the MeshResource.

    Raises:
      ValueError: axes are given, but not one for each axis of x.
    """
    if not axes:
        return x
    if len(axes) != x.ndim:
        raise ValueError(f"constrain: expected {x.ndim} logical axes for x{list(x.shape)}, got {tuple(axes)}")
    rules = tuple(nn.get_logical_axis_rules()) or logical_axis_rules(current().mesh_resource)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.are_all_axes_manual:
        return nn.with_logical_constraint(x, tuple(axes)) if mesh.empty else x
    with nn.logical_axis_rules(rules):
        spec = nn.logical_to_mesh_axes(tuple(axes))
    # To be whole along the sequence says something where it may be sharded between the products.
    gathers = "seqlen" in axes and any(name == "seqlen_tp" and to for name, to in rules)
    if all(entry is None for entry in spec) and not gathers:
        return x
    free = [name == "batch" and entry is None for name, entry in zip(axes, spec)]  # its owner has it as it is
    if mesh.explicit_axes:
        own = jax.typeof(x).sharding.spec
        given = [o if f else _among(s, mesh.explicit_axes) for f, o, s in zip(free, own, spec)]
        x = jax.sharding.reshard(x, PartitionSpec(*given))
    if mesh.auto_axes:
        given = [PartitionSpec.UNCONSTRAINED if f else _among(s, mesh.auto_axes) for f, s in zip(free, spec)]
        x = jax.lax.with_sharding_constraint(x, PartitionSpec(*given))
    return x


def _among(entry: str | tuple[str, ...] | None, axes: Sequence[str]) -> tuple[str, ...] | None:
    """An entry of a partition spec, of these mesh axes alone."""
    return tuple(name for name in names_of(entry) if name in axes) or None
