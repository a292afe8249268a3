"""rope: against multiplication by complex numbers, and what makes it a position embedding."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import BF16, F32

from transformer_engine_jax import testing
from transformer_engine_jax.ops.rope import rope, rope_frequencies

B, S, H, D = 2, 16, 3, 8
GROUPS = pytest.mark.parametrize("group", ["consecutive", "alternate"])
(X,) = emulated.normal(5, (B, S, H, D))


def complex_rope(x, windows=(1, 10000), positions=None, group="consecutive"):
    """In f64: each pair of features is one complex number, turned by position / (min * (max / min) ** (2i / D))."""
    x = np.asarray(x, np.float64)
    positions = np.broadcast_to(np.arange(x.shape[1]) if positions is None else positions, x.shape[:2])
    wavelength = windows[0] * (windows[1] / windows[0]) ** (np.arange(0, x.shape[-1], 2) / x.shape[-1])
    turn = np.exp(1j * positions[:, :, None, None] / wavelength)
    if group == "consecutive":
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([z.real, z.imag], -1).reshape(x.shape)
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], -1)


@GROUPS
@pytest.mark.parametrize("windows", [(1, 10000), (2, 500)])
def test_turns_pairs_by_angles(group, windows):
    got = rope(jnp.asarray(X), rope_frequencies(D, windows), group=group)
    testing.assert_close(got, complex_rope(X, windows, group=group), F32)


@GROUPS
def test_positions(group):
    frequencies = rope_frequencies(D)
    one = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3])
    for positions in (one, np.stack([one, one[::-1]])):
        got = rope(jnp.asarray(X), frequencies, positions=jnp.asarray(positions), group=group)
        testing.assert_close(got, complex_rope(X, positions=positions, group=group), F32)


@GROUPS
def test_gradient_turns_back(group):
    run = jax.jit(partial(rope, frequencies=rope_frequencies(D), group=group))
    y, vjp = jax.vjp(run, jnp.asarray(X))
    testing.assert_close(vjp(y)[0], X, F32)


@GROUPS
def test_products_depend_on_relative_positions_only(group):
    run = jax.jit(partial(rope, frequencies=rope_frequencies(D), group=group))
    q, k = emulated.normal(6, (1, 1, 1, D), (1, 1, 1, D))
    q, k = (run(np.broadcast_to(t, (1, S, 1, D)))[0, :, 0] for t in (q, k))
    products = np.asarray(q @ k.T)
    for offset in range(-S + 1, S):
        diagonal = np.diagonal(products, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5 * np.abs(products).max())


def test_keeps_the_dtype_and_computes_in_f32():
    x = jnp.asarray(X, jnp.bfloat16)
    got = rope(x, rope_frequencies(D), positions=1000 + jnp.arange(S))
    assert got.dtype == jnp.bfloat16
    testing.assert_close(got, complex_rope(x, positions=1000 + np.arange(S)), BF16)


@pytest.mark.parametrize(
    "shape, dim, group, message",
    [
        ((B, S, D), D, "consecutive", r"rope: expected x\[B, S, H, D\].*got \[2, 16, 8\]"),
        ((B, S, H, 7), 8, "consecutive", r"D = 2 x 4, got \[2, 16, 3, 7\]"),
        ((B, S, H, D), D, "neighbours", "group: expected 'consecutive' or 'alternate', got 'neighbours'"),
    ],
)
def test_misuse_is_named(shape, dim, group, message):
    with pytest.raises(ValueError, match=message):
        rope(jnp.ones(shape), rope_frequencies(dim), group=group)
