"""The one context a user sees: which recipe is on, and how the mesh axes are used.

A jax.make_user_context, so its value is part of the jit cache key: a function traced outside the context is
traced again inside it, and the other way round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from transformer_engine_jax.recipe import DelayedScaling, Recipe


@dataclasses.dataclass(frozen=True)
class MeshResource:
    """Names of the mesh axes used for each kind of parallelism; None where it is not used.

    dp and fsdp may both be set, to two axes, over both of which the batch then is sharded, or to one. tp and tpsp may
    too, but one of two axes must have one device: the other splits kernels and, between products, sequences.
    pp and ep are for NVIDIA's signature, and not read: stages and experts are sharded by the user's own shard_map.

    Raises:
      ValueError: not a name; or one axis is to shard two of the batch, the features and the sequence.
    """

    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"MeshResource.{field.name}: expected a mesh axis name or None, got {value!r}")
        batch, features = {self.dp_resource, self.fsdp_resource}, {self.tp_resource, self.tpsp_resource}
        for one, other in ((batch, features), (batch, {self.cp_resource}), (features, {self.cp_resource})):
            if twice := (one & other) - {None}:
                raise ValueError(
                    "MeshResource: expected different mesh axes for the batch (dp, fsdp), the features (tp, tpsp) and "
                    f"the sequence (cp), got {min(twice)!r} for two of them in {self}"
                )


@dataclasses.dataclass(frozen=True)
class Autocast:
    """The context's value. `recipe` is None where autocast is off."""

    recipe: Recipe | None = None
    calibrating: bool = False
    amax_axes: tuple[str, ...] = ()
    round_wgrad: bool = False
    mesh_resource: MeshResource = MeshResource()


_context = jax.make_user_context(Autocast())


def current() -> Autocast:
    """The Autocast in force here, at trace time."""
    return _context.value


class _Opening(contextlib.ContextDecorator):
    """Has `value` of the context around it in force while it is open; may be opened again, and inside of itself."""

    def __init__(self, value: Callable[[Autocast], Autocast]):
        self._value, self._of_thread = value, threading.local()

    def __enter__(self) -> None:
        opened = _context(self._value(current()))
        opened.__enter__()
        self._of_thread.__dict__.setdefault("opened", []).append(opened)

    def __exit__(self, *error) -> None:
        self._of_thread.opened.pop().__exit__(*error)


def autocast(
    enabled: bool = False,
    recipe: Recipe | None = None,
    mesh_resource: MeshResource | None = None,
    *,
    calibrating: bool = False,
    amax_axes: str | Sequence[str] | None = None,
    round_wgrad: bool | None = None,
) -> _Opening:
    """Computes the GEMMs of this library's modules in FP8 while it is open: a context, which may be opened again.

    It is that of the thread that opens it, as JAX's own contexts are.

    Args:
      enabled: False computes in the modules' own precision.
      recipe: how scales follow the data; None means DelayedScaling().
      mesh_resource: names of mesh axes; None keeps what an enclosing context said.
      calibrating: compute in high precision but record amaxes and scales as if in FP8.
      amax_axes: inside a manual shard_map, the mesh axes over which amax is reduced; None keeps what an enclosing
        context said, () reduces over none. A state that is the same on all shards has the amax of all where shard_map's
        check_vma, on by default, has JAX sum its gradient; the scales of current scaling depend on this alone.
      round_wgrad: round kernels' gradients to the dtype of the modules' inputs, as Flax does, before they are summed
        over devices and converted to the kernels' own; None keeps what an enclosing context said, at first False. A
        training step of unrolled layers then moves and keeps less; one of scanned layers, or one that returns
        gradients in f32, takes longer. In high precision too. Sums in buffers (main_grads) stay f32.

    Raises:
      TypeError: for an argument of another kind.
    """
    for name, value in (("enabled", enabled), ("calibrating", calibrating)):
        if not isinstance(value, int | np.bool_):
            raise TypeError(f"autocast: {name}: expected a bool, got {value!r}; the recipe is the second argument")
    if not (round_wgrad is None or isinstance(round_wgrad, int | np.bool_)):
        raise TypeError(f"autocast: round_wgrad: expected a bool or None, got {round_wgrad!r}")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"autocast: recipe: expected an instance of a recipe such as DelayedScaling(), got {recipe!r}")
    if mesh_resource is not None and not isinstance(mesh_resource, MeshResource):
        raise TypeError(f"autocast: mesh_resource: expected a MeshResource, got {mesh_resource!r}")
    said = {} if mesh_resource is None else {"mesh_resource": mesh_resource}
    if amax_axes is not None:
        one = isinstance(amax_axes, str) or not isinstance(amax_axes, Iterable)
        said["amax_axes"] = (amax_axes,) if one else tuple(amax_axes)
        if not all(isinstance(a, str) for a in said["amax_axes"]):
            raise TypeError(f"autocast: amax_axes: expected mesh axis names, got {amax_axes!r}")
    said |= {} if round_wgrad is None else {"round_wgrad": bool(round_wgrad)}
    said["recipe"] = (recipe or DelayedScaling()) if enabled or calibrating else None
    said["calibrating"] = bool(calibrating) and not enabled
    return _Opening(lambda around: dataclasses.replace(around, **said))


def fp8_autocast(
    enabled: bool = False,
    fp8_recipe: Recipe | None = None,
    mesh_resource: MeshResource | None = None,
    *,
    calibrating: bool = False,
    amax_axes: str | Sequence[str] | None = None,
    round_wgrad: bool | None = None,
) -> _Opening:
    """`autocast` under the name and with the argument names of NVIDIA's extension."""
    options = dict(calibrating=calibrating, amax_axes=amax_axes, round_wgrad=round_wgrad)
    return autocast(enabled, fp8_recipe, mesh_resource, **options)


def global_shard_guard(resource: MeshResource) -> _Opening:
    """Sets how the mesh axes are used, leaving recipe and mode alone; TypeError where that is no MeshResource."""
    if not isinstance(resource, MeshResource):
        raise TypeError(f"global_shard_guard: expected a MeshResource, got {resource!r}")
    return _Opening(lambda around: dataclasses.replace(around, mesh_resource=resource))
