"""Arrays of one op on one mesh: the manual axes they vary over, and the explicit ones they are sharded over."""

from __future__ import annotations

import functools

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


def align(*args: jax.Array) -> tuple[jax.Array, ...]:
    """Makes arrays vary over the same manual mesh axes, so that AD sums the cotangents of replicated ones.

    Constants among arrays on explicit mesh axes are put on that mesh, where their cotangents will be.
    """
    types = [jax.typeof(x) for x in args]
    meshes = explicit_meshes(*args)
    varying = frozenset().union(*[t.manual_axis_type.varying for t in types])

    def aligned(x, t):
        if meshes and t.sharding.mesh.empty:
            x = _put(x, NamedSharding(meshes[0], PartitionSpec(*[None] * t.ndim)))
        missing = tuple(sorted(varying - t.manual_axis_type.varying))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return tuple(aligned(x, t) for x, t in zip(args, types))


def explicit_meshes(*args: jax.Array) -> list[Mesh | AbstractMesh]:
    """Those of arrays whose shardings are types; with their devices, where arrays are no tracers but have some."""
    explicit = [x for x in args if jax.typeof(x).sharding.mesh.explicit_axes]
    return [(jax.typeof(x) if isinstance(x, jax.core.Tracer) else x).sharding.mesh for x in explicit]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _put(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """x on a mesh, where its cotangent stays: JAX would put that where x was, which vmap over the mesh can't."""
    return jax.sharding.reshard(x, sharding)


_put.defvjp(lambda x, sharding: (_put(x, sharding), None), lambda sharding, _, cotangent: (cotangent,))
