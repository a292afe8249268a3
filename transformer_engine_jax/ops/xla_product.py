"""xla_product: x @ kernel + bias by XLA: on CPUs, over several GPUs, of few tokens, and of what `product` refuses."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from transformer_engine_jax.decisions import few, platform, shards
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.partition import names_of

# Up to here a row alone gets a second one, of zeros: of one row and up to 10 million numbers XLA stores each product of
# two, and then adds them up; and of two it joins products that read one input, such as queries, keys and values.
LARGEST_FOR_TWO_ROWS = 2**25


def xla_product(x, kernel, bias, k_axes: int, dtype) -> jax.Array:
    """x[m.., k..] kernel[k.., n..] + bias[n..] -> `dtype`[m.., n..]; kernel of x's dtype, bias of any or None."""
    sharding = _sharding(x, kernel, k_axes)
    y = _contracted(x, kernel, k_axes, dtype, sharding)
    if bias is None:
        return y
    if sharding is not None:
        columns = PartitionSpec(*sharding.spec[x.ndim - k_axes :])
        bias = jax.sharding.reshard(bias, NamedSharding(sharding.mesh, columns))
    return _with_bias(y, bias.astype(y.dtype))


def _with_bias(y, bias) -> jax.Array:
    """y[m.., n..] + bias[n..], whose gradient is summed in f32: of 16 bits XLA sums it in 16 on CPUs."""
    wide = jnp.float32 if y.dtype.itemsize < 4 else y.dtype
    return (y.astype(wide) + jnp.expand_dims(bias.astype(wide), range(y.ndim - bias.ndim))).astype(y.dtype)


def wants_one_axis(x) -> bool:
    """Whether the tokens of x should be one axis, where they may.

    Of several XLA on CPUs sums a kernel's gradient in bf16, off by 2 % over 4096 tokens, at a 30th of its speed.
    """
    return x.dtype.itemsize == 2 and platform() == "cpu" and shards(x) == 1


@kernel("r k, k n -> r n", whole="k", platforms=())
def rows_times(x, matrix, *, dtype) -> jax.Array:
    """x matrix. A kernel for its vmap alone: examples that share the matrix become more rows, not another axis."""
    return jax.lax.dot(x, matrix, preferred_element_type=dtype)


def _sharding(x, kernel, k_axes: int) -> NamedSharding | None:
    """On a mesh of explicit axes: the rows as x's, the columns as the kernel's, sums over shards done."""
    rows, columns = jax.typeof(x).sharding, jax.typeof(kernel).sharding
    mesh = columns.mesh if rows.mesh.empty else rows.mesh
    if mesh.empty or not mesh.explicit_axes:
        return None
    spec, used = [], set()
    for entry in (*rows.spec[: x.ndim - k_axes], *columns.spec[k_axes:]):
        axes = names_of(entry)
        spec.append(entry if axes and not used.intersection(axes) else None)
        used.update(axes)
    return NamedSharding(mesh, PartitionSpec(*spec))


def _contracted(x, kernel, k_axes: int, dtype, sharding: NamedSharding | None) -> jax.Array:
    """x[m.., k..] kernel[k.., n..] by XLA."""
    rows = x.ndim - k_axes
    single = [axis for axis in range(k_axes, kernel.ndim) if kernel.shape[axis] == 1]
    if single:  # lest XLA transpose the kernel's gradient, and copy what an update has in place
        added = [axis + rows - k_axes for axis in single]
        if sharding is not None:
            spec = [entry for axis, entry in enumerate(sharding.spec) if axis not in added]
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
        y = _contracted(x, jax.lax.squeeze(kernel, single), k_axes, dtype, sharding)
        return jax.lax.expand_dims(y, added)
    fits = isinstance(kernel.size, int) and kernel.size <= LARGEST_FOR_TWO_ROWS
    alone = rows > 0 and few(1) and math.prod(x.shape[:rows]) == 1 and fits
    if alone:
        x = jnp.pad(x, [(0, int(axis == rows - 1)) for axis in range(x.ndim)])
    if sharding is None and wants_one_axis(x):
        shape, k = (*x.shape[:rows], *kernel.shape[k_axes:]), math.prod(kernel.shape[:k_axes])
        x, kernel = x.reshape(math.prod(x.shape[:rows]), k), kernel.reshape(k, math.prod(shape[rows:]))
        return rows_times(x, kernel, dtype=dtype).reshape(shape)
    contract = tuple(range(rows, x.ndim)), tuple(range(k_axes))
    y = jax.lax.dot_general(x, kernel, (contract, ((), ())), preferred_element_type=dtype, out_sharding=sharding)
    return jax.lax.slice_in_dim(y, 0, 1, axis=rows - 1) if alone else y
