"""One training step of a module, the same for every test; and where its parameters go on a mesh."""

from __future__ import annotations

from functools import partial

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import transformer_engine_jax as te
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.flax import STATE_COLLECTION
from transformer_engine_jax.sharding import logical_axis_rules

DELAYED = recipe.DelayedScaling(amax_history_len=4)
CURRENT = recipe.Float8CurrentScaling()


def autocast(rec=None, **options):
    """Autocast under a recipe, off where it is None."""
    return te.autocast(rec is not None, rec, **options)


def init(module: nn.Module, *args, rec=None, unbox: bool = True, **kwargs):
    """The module's variables, without the boxes that carry logical axes.

    Drawn one by one: XLA takes longer to compile all that a layer draws in one program than a step of the layer.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with autocast(rec):
        variables = module.lazy_init(jax.random.key(0), *shapes, **kwargs)
    return nn.unbox(variables) if unbox else variables


def randomized(variables):
    """Variables whose zeros and ones are not: parameters get noise, so that biases and gammas count.

    Kernels get little, lest attention become a choice of one key, where each rounding counts many times.
    """
    rng = np.random.default_rng(0)

    def noisy(path, p):
        size = 0.2 / np.sqrt(p.shape[0]) if "kernel" in path[-1].key else 0.2
        return p + jnp.asarray((size * rng.standard_normal(p.shape)).astype(p.dtype))

    return {**variables, "params": jax.tree_util.tree_map_with_path(noisy, variables["params"])}


def weights(i: int, shape) -> np.ndarray:
    """The cotangent of the i-th output of a step."""
    return np.random.default_rng(i).standard_normal(shape, np.float32)


def loss(out):
    """All outputs times fixed random weights, summed: their cotangents are those weights."""
    return sum(jnp.sum(o.astype(jnp.float32) * weights(i, o.shape)) for i, o in enumerate(jax.tree.leaves(out)))


@partial(jax.jit, static_argnums=0)
def step(f, *args):
    """f(*args), and the gradients of its loss for all args."""

    def scored(*args):
        out = f(*args)
        return loss(out), out

    (_, out), grads = jax.value_and_grad(scored, argnums=tuple(range(len(args))), has_aux=True)(*args)
    return out, grads


def settle(f, variables, *args, steps: int = 3):
    """Variables whose FP8 states have seen some steps; parameters stay."""
    for _ in range(steps):
        _, (grads, *_) = step(f, variables, *args)
        variables = {**variables, STATE_COLLECTION: grads[STATE_COLLECTION]}
    return variables


def layout(variables) -> dict[str, tuple]:
    """Parameter path -> (shape, dtype, logical axes or None)."""
    leaves = jax.tree.leaves_with_path(variables["params"], is_leaf=lambda x: isinstance(x, nn.meta.AxisMetadata))
    out = {}
    for path, p in leaves:
        boxed = isinstance(p, nn.meta.AxisMetadata)
        value = p.unbox() if boxed else p
        name = "/".join(str(k.key) for k in path)
        out[name] = (value.shape, str(value.dtype), tuple(p.names) if boxed else None)
    return out


def place(mesh, variables, resource: te.MeshResource):
    """Boxed variables on a mesh as their logical axes say, without their boxes."""
    specs = nn.logical_to_mesh(nn.get_partition_spec(variables), logical_axis_rules(resource))
    plain = nn.unbox(variables)
    specs = jax.tree.unflatten(
        jax.tree.structure(plain), jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    )
    return testing.shard(mesh, plain, specs)


def gemm_roundings(variables):
    """Those of a dense module's GEMM under DELAYED, whose scales are those in its state."""
    states = variables[STATE_COLLECTION]["gemm_state"].states()
    return emulated.roundings(DELAYED, [float(one.scale) for one in states.values()])
