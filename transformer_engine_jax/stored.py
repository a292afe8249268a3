"""What a backward needs, stored: FP8 as bytes.

A scan stacks it, and XLA on the CPU moves values of FP8 one by one, hundreds of times as slowly as bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class _Fp8Codes:
    """An FP8 array as its bytes."""

    codes: jax.Array  # u8
    dtype: np.dtype


def stored(values: Any) -> Any:
    """The values with FP8 arrays as bytes, for `restored`."""

    def store(x):
        is_fp8 = is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1
        return _Fp8Codes(jax.lax.bitcast_convert_type(x, jnp.uint8), np.dtype(x.dtype)) if is_fp8 else x

    return jax.tree.map(store, values)


def restored(values: Any) -> Any:
    """What `stored` was given."""
    is_fp8 = lambda x: isinstance(x, _Fp8Codes)
    restore = lambda x: jax.lax.bitcast_convert_type(x.codes, x.dtype) if is_fp8(x) else x
    return jax.tree.map(restore, values, is_leaf=is_fp8)


def is_array(x) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")
