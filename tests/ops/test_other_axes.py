"""Buffers of the right number of elements but other axes: read and written as the first operand says, never past it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stored import FROM_SCALE

M, K = 6, 32
NORM = {"epsilon": np.float32(1e-6), "zero_centered_gamma": False, **FROM_SCALE}
ACTIVATION = {"activation": "gelu", **FROM_SCALE}
ACTIVATION |= {name: np.float32(1) for name in ("limit", "alpha", "glu_linear_offset")}
SOFTMAX = {"scale_factor": np.float32(1), "causal": False}
X, GAMMA, ROWS, ABSENT = (M, K), (K,), (M,), (0,)
# target, operands, results, attributes, and which buffer comes with other axes
CALLS = {
    "rmsnorm_fwd y": ("rmsnorm_fwd", [X, GAMMA, ABSENT, ABSENT], [X, ABSENT, ROWS, *[ABSENT] * 3], NORM, 4),
    "layernorm_fwd y": (
        "layernorm_fwd",
        [X, GAMMA, GAMMA, *[ABSENT] * 3],
        [X, ABSENT, ROWS, ROWS, *[ABSENT] * 3],
        NORM,
        6,
    ),
    "layernorm_bwd dy": ("layernorm_bwd", [X, X, GAMMA, ROWS, ROWS, X], [X, GAMMA, GAMMA], "backward", 0),
    "layernorm_bwd residual": ("layernorm_bwd", [X, X, GAMMA, ROWS, ROWS, X], [X, GAMMA, GAMMA], "backward", 5),
    "layernorm_bwd dx": ("layernorm_bwd", [X, X, GAMMA, ROWS, ROWS, X], [X, GAMMA, GAMMA], "backward", 6),
    "rmsnorm_bwd residual": ("rmsnorm_bwd", [X, X, GAMMA, ROWS, X], [X, GAMMA], "backward", 4),
    "softmax_fwd y": ("softmax_fwd", [(1, 1, M, K), ABSENT, ABSENT], [(1, 1, M, K), ABSENT], SOFTMAX, 3),
    "softmax_bwd dy": ("softmax_bwd", [(1, 1, M, K)] * 2, [(1, 1, M, K), ABSENT], SOFTMAX, 0),
    "softmax_bwd dx": ("softmax_bwd", [(1, 1, M, K)] * 2, [(1, 1, M, K), ABSENT], SOFTMAX, 2),
    "activation_fwd y": ("activation_fwd", [(M, 1, K), ABSENT, (1, K)], [X, *[ABSENT] * 4], ACTIVATION, 3),
    "activation_bwd dy": ("activation_bwd", [X, (M, 1, K), ABSENT, (1, K)], [(M, 1, K), *[ABSENT] * 5], ACTIVATION, 0),
    "activation_bwd dz": ("activation_bwd", [X, (M, 1, K), ABSENT, (1, K)], [(M, 1, K), *[ABSENT] * 5], ACTIVATION, 4),
    "rope y": ("rope_rotate", [(M, 1, K), (K // 2,), M], [(M, 1, K)], {"group": "alternate", "inverse": False}, 3),
}


def run(target, operands, results, attributes, other=None):
    """Results by a handler of the CPU, of operands that are the same whatever their axes."""
    attributes = {"zero_centered_gamma": False} if attributes == "backward" else attributes
    shapes = [*operands, *results]
    if other is not None:
        shapes[other] = (*shapes[other][:-2], shapes[other][-1] // 4, shapes[other][-2] * 4)
    rng = np.random.default_rng(0)
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = [
            jnp.arange(shape) if isinstance(shape, int) else jnp.asarray(rng.random(shape, np.float32))
            for shape in shapes[: len(operands)]
        ]
        of_results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes[len(operands) :]]
        return [np.ravel(x) for x in jax.ffi.ffi_call(f"te_{target}", of_results)(*arrays, **attributes)]


@pytest.mark.parametrize("call", CALLS)
def test_is_the_same(call):
    *what, other = CALLS[call]
    for got, expected in zip(run(*what, other), run(*what), strict=True):
        np.testing.assert_array_equal(got, expected)
