"""Initial values of kernels, as the modules of flax/ and nnx/ draw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

_lecun_normal = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def default_kernel_init(key, shape, dtype=None, *args, **kwargs) -> jax.Array:
    """LeCun's truncated normal of variance 1 / fan_in, drawn in f32 where `dtype` is narrower.

    JAX draws 128 values in 16 bits, with a mean of 2 % of their deviation. A product of 4096 terms adds that up to more
    than all else that it does to inputs of one sign, and FP8 rounds so few values all one way.
    """
    narrow = dtype is not None and jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    value = _lecun_normal(key, shape, jnp.float32 if narrow else dtype, *args, **kwargs)
    return value.astype(dtype) if narrow else value


def flat_kernel_init(init: Callable, k_axes: int, scales: Sequence[float] | None = None) -> Callable:
    """`init` for a kernel [k.., n..] as for the matrix it stands for, so that fans are those of the product.

    With `scales`, the kernel stacks that many products, [k.., len(scales), n..]: each is drawn by itself and
    multiplied by its scale.
    """

    init = initialiser(init, "kernel_init")

    def run(key, shape, dtype=jnp.float32):
        k = int(np.prod(shape[:k_axes]))
        if scales is None:
            return init(key, (k, int(np.prod(shape[k_axes:]))), dtype).reshape(shape)
        n = int(np.prod(shape[k_axes:])) // len(scales)
        keys = jax.random.split(key, len(scales))
        parts = [init(each, (k, n), dtype) * jnp.asarray(scale, dtype) for each, scale in zip(keys, scales)]
        return jnp.stack(parts, axis=1).reshape(shape)

    return run


def initialiser(init: Callable, what: str, boxes: bool = False) -> Callable:
    """init of a parameter; ValueError where it is no function, or boxes what it returns and may not.

    It may not where the module names the logical axes.
    """
    if not callable(init):
        raise ValueError(
            f"{what}: expected an initialiser, such as jax.nn.initializers.zeros, a function of key, shape and dtype, "
            f"got {init!r}"
        )
    if boxes:
        return init

    def run(*args):
        value = init(*args)
        if not isinstance(value, jax.Array | np.ndarray):
            raise ValueError(
                f"{what}: expected an initialiser that returns an array, got one that returns {type(value).__name__}; "
                "the module itself names the logical axes of its parameters, in fields such as kernel_axes"
            )
        return value

    return run
