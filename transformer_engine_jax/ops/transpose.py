"""transposed: FP8 codes turned, where no cast could write both ways: of shards that other devices have."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.quantize import transpose as turned
from transformer_engine_jax.quantized import QuantizedTensor


@kernel("m* k* -> k* m*", platforms=("cuda",))
def transpose(x, *, k_axes=1) -> Any:
    """x[m.., k..], FP8, with its last `k_axes` axes in front: [k.., m..]."""
    return turned(x, k_axes)


def transposed(x: QuantizedTensor, k_axes: int) -> QuantizedTensor:
    """[k.., m..] of x[m.., k..], with its scale."""
    return dataclasses.replace(x, data=transpose(x.data, k_axes=k_axes))
