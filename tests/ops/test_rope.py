"""rope: against multiplication by complex numbers, and what makes it a position embedding."""

import re
from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import BF16, F32
from jax.sharding import PartitionSpec as P
from stored import call_handler

from transformer_engine_jax import testing
from transformer_engine_jax.ops.rope import rope, rope_frequencies, rope_qkv, rope_rotate, rope_rotate_qkv, rope_table

B, S, H, D = 2, 16, 3, 8
GROUPS = pytest.mark.parametrize("group", ["consecutive", "alternate"])
(X,) = emulated.normal(5, (B, S, H, D))
# cos and sin are off by 3e-7 at most, and two products are rounded.
TURN = 4e-7


def wavelengths(dim, windows=(1, 10000)):
    return windows[0] * (windows[1] / windows[0]) ** (np.arange(0, dim, 2) / dim)


def complex_rope(x, frequencies=None, positions=None, group="consecutive"):
    """In f64: each pair of features is one complex number, turned by position * frequency."""
    x = np.asarray(x, np.float64)
    frequencies = 1 / wavelengths(x.shape[-1]) if frequencies is None else np.asarray(frequencies, np.float64)
    pairs = frequencies.size
    positions = np.broadcast_to(np.arange(x.shape[1]) if positions is None else positions, x.shape[:2])
    turn = np.exp(1j * positions[:, :, None, None] * frequencies)
    if group == "consecutive":
        z = (x[..., 0 : 2 * pairs : 2] + 1j * x[..., 1 : 2 * pairs : 2]) * turn
        turned = np.stack([z.real, z.imag], -1).reshape(*x.shape[:-1], 2 * pairs)
    else:
        z = (x[..., :pairs] + 1j * x[..., pairs : 2 * pairs]) * turn
        turned = np.concatenate([z.real, z.imag], -1)
    return np.concatenate([turned, x[..., 2 * pairs :]], -1)


@pytest.mark.parametrize("dim, windows", [(D, (1, 10000)), (128, (2, 500))])
def test_frequencies_are_rounded_once(dim, windows):
    np.testing.assert_array_equal(rope_frequencies(dim, windows), (1 / wavelengths(dim, windows)).astype(np.float32))


@GROUPS
def test_turns_pairs_by_angles(implementation, group):
    got = rope(jnp.asarray(X), rope_frequencies(D), group=group)
    testing.assert_close(got, complex_rope(X, group=group), F32)


@GROUPS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    "shape, pairs",
    [((2, 3, 2, 128), 64), ((1, 70, 4, 64), 16), ((3, 2, 1, 7), 3), ((1, 5, 9, 24), 4), ((2, 2, 1, 2), 1)],
)
def test_shapes_and_partial_rotation(implementation, group, dtype, shape, pairs):
    x, frequencies = emulated.normal(1, shape, (pairs,))
    x = jnp.asarray(x, dtype)
    got = rope(x, frequencies, group=group)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got[..., 2 * pairs :], x[..., 2 * pairs :])
    bound = TURN + (0 if dtype == jnp.float32 else testing.epsilon(dtype))
    testing.assert_close(got, complex_rope(x, frequencies, group=group), bound)


@GROUPS
def test_positions(implementation, group):
    one = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3])
    for positions in (one, np.stack([one, one[::-1]])):
        got = rope(jnp.asarray(X), rope_frequencies(D), positions=jnp.asarray(positions), group=group)
        testing.assert_close(got, complex_rope(X, positions=positions, group=group), F32)


@pytest.mark.parametrize("largest", [1000, 100_000, 2**24])
def test_angles_lose_nothing_however_large(implementation, largest):
    """The f32 product alone is off by up to 4e-3 radians at position 100000."""
    frequencies = rope_frequencies(128)
    positions = np.append(np.random.default_rng(0).integers(-largest, largest, 500), [largest, -largest])
    x = np.zeros((1, positions.size, 1, 128), np.float32)
    x[..., 0::2] = 1
    got = np.asarray(rope(x, frequencies, positions=positions), np.float64)
    assert np.abs(got - complex_rope(x, frequencies, positions)).max() < 3e-7


@GROUPS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_op(group, dtype):
    x, frequencies = emulated.normal(2, (B, 5, H, 24), (9,))

    def plain(x, frequencies):
        angles = jnp.arange(5.0)[:, None, None] * frequencies
        c, s = jnp.cos(angles), jnp.sin(angles)
        a, b = (x[..., 0:18:2], x[..., 1:18:2]) if group == "consecutive" else (x[..., :9], x[..., 9:18])
        turned = jnp.stack([a * c - b * s, a * s + b * c], axis=-1 if group == "consecutive" else -2)
        return jnp.concatenate([turned.reshape(*x.shape[:-1], 18), x[..., 18:]], -1)

    # The gradient of a frequency is a sum over tokens and heads of products with y, which is rounded.
    bound = max(F32, 2 * testing.epsilon(dtype))
    testing.check_op(
        partial(rope, group=group), plain, (jnp.asarray(x, dtype), jnp.asarray(frequencies)),
        value_bound=bound, gradient_bound=bound, key=jax.random.key(0),
    )  # fmt: skip


@GROUPS
def test_gradient_turns_back_and_has_a_gradient(group):
    run = jax.jit(partial(rope, frequencies=rope_frequencies(D), group=group))
    y, vjp = jax.vjp(run, jnp.asarray(X))
    testing.assert_close(vjp(y)[0], X, F32)
    # d/dy of <z, vjp(y)> = rope(z)
    _, again = jax.vjp(lambda y: vjp(y)[0], y)
    testing.assert_close(again(jnp.asarray(X))[0], y, F32)


def test_frequencies_and_angles_of_16_bits_are_taken_as_f32():
    frequencies = rope_frequencies(D).astype(jnp.bfloat16)
    testing.assert_same_bytes(rope(X, frequencies), rope(X, frequencies.astype(jnp.float32)))
    table = jnp.outer(jnp.arange(S), frequencies).astype(jnp.bfloat16)
    testing.assert_same_bytes(rope_table(X, table), rope_table(X, table.astype(jnp.float32)))


@GROUPS
@pytest.mark.parametrize("inverse", [False, True])
def test_kernel_agrees_with_its_reference(group, inverse):
    x, frequencies = emulated.normal(3, (8, 6, 4, 16), (8,))
    positions = np.random.default_rng(0).integers(0, 1000, (8, 6)).astype(np.int32)
    testing.check_kernel(
        rope_rotate, [x, frequencies, positions], {"group": group, "inverse": inverse},
        lambda got, expected: testing.assert_close(got, expected, 2 * TURN),
        specs=[P("data", None, "model"), P(), P(None, "model")],
    )  # fmt: skip


# --- Queries and keys in the array of the three ----------------------------------------------------------------------


@GROUPS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size, pairs", [(24, 9), (128, 64)])
def test_of_one_array_turns_queries_and_keys(implementation, group, dtype, size, pairs):
    qkv, frequencies = emulated.normal(8, (B, 5, 3, H, size), (pairs,))

    def parts(qkv, frequencies):
        turned = [rope(qkv[:, :, i], frequencies, group=group) for i in range(2)]
        return jnp.stack([*turned, qkv[:, :, 2]], axis=2)

    args = jnp.asarray(qkv, dtype), jnp.asarray(frequencies)
    got, expected = (testing.gradients(f, args, jax.random.key(1)) for f in (partial(rope_qkv, group=group), parts))
    testing.assert_same_bytes((got[0], got[1][0]), (expected[0], expected[1][0]))
    np.testing.assert_array_equal(got[0][:, :, 2], args[0][:, :, 2])
    testing.assert_close(got[1][1], expected[1][1], 4 * F32)


@GROUPS
@pytest.mark.parametrize("inverse", [False, True])
def test_kernel_of_one_array_agrees_with_its_reference(group, inverse):
    x, frequencies = emulated.normal(9, (8, 6, 3, 4, 16), (8,))
    positions = np.random.default_rng(0).integers(0, 1000, (8, 6)).astype(np.int32)
    testing.check_kernel(
        rope_rotate_qkv, [x, frequencies, positions], {"group": group, "inverse": inverse},
        lambda got, expected: testing.assert_close(got, expected, 2 * TURN),
        specs=[P("data", None, None, "model"), P(), P(None, "model")],
    )  # fmt: skip


def test_what_is_turned_in_place_is_copied_where_it_is_still_needed():
    qkv, frequencies = jnp.asarray(emulated.normal(10, (B, 5, 3, H, D))[0]), rope_frequencies(D)
    kept, turned = jax.jit(lambda x: (2 * x, rope_qkv(2 * x, frequencies)))(qkv)
    np.testing.assert_array_equal(kept, 2 * qkv)
    testing.assert_close(turned[:, :, 0], complex_rope(2 * qkv[:, :, 0]), F32)


def test_slices_of_a_loop_are_turned_where_the_result_lies():
    """On a GPU XLA makes no copy of a slice, whatever buffer the result should take: values must be copied."""
    x, frequencies = jnp.asarray(emulated.normal(11, (4, B, 5, 3, H, D))[0]), rope_frequencies(D)
    got = jax.jit(lambda x: jax.lax.map(lambda one: rope_qkv(one, frequencies), x))(x)
    testing.assert_same_bytes(got, jnp.stack([rope_qkv(one, frequencies) for one in x]))
    np.testing.assert_array_equal(got[:, :, :, 2], x[:, :, :, 2])


def test_a_sharded_sequence_keeps_its_positions():
    x, frequencies = jnp.asarray(X), rope_frequencies(D)
    mesh = testing.mesh_of((2, 4), ("data", "context"))
    with testing.on_mesh(mesh):
        got = jax.jit(rope)(*testing.shard(mesh, (x, frequencies), (P("data", "context"), P())))
    testing.assert_close(jax.device_get(got), complex_rope(X), F32)


@GROUPS
def test_a_table_of_angles_is_a_rotation_by_them(group):
    frequencies = np.random.default_rng(0).uniform(0, 1, D // 2 - 1).astype(np.float32)
    table = jnp.asarray(np.arange(S + 3)[:, None] * frequencies, jnp.float32)
    positions = jnp.asarray(np.random.default_rng(1).integers(0, S + 3, (B, S)))
    for where in (None, positions, positions[0]):
        plain = lambda x, f, where=where: rope(x, f, positions=where, group=group)
        got = testing.gradients(lambda x: rope_table(x, table, positions=where, group=group), [X], jax.random.key(0))
        expected = testing.gradients(lambda x: plain(x, jnp.asarray(frequencies)), [X], jax.random.key(0))
        testing.assert_close(got, expected, 4 * F32)
    past = rope_table(X, table, positions=jnp.arange(S) + 4, group=group)
    assert np.isfinite(past[:, : S - 1]).all() and np.isnan(past[:, S - 1, :, : D - 2]).all()
    before = rope_table(X, table, positions=jnp.arange(S) - 1, group=group)
    assert np.isfinite(before[:, 1:]).all() and np.isnan(before[:, 0, :, : D - 2]).all()
    half = rope_table(X.astype(jnp.bfloat16), table, group=group)
    assert half.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "message, angles",
    [
        ("angles: expected f32.T, F., got float32.16.", jnp.ones(S)),
        ("angles: expected f32.T, F., got int32.16, 4.", jnp.ones((S, D // 2), jnp.int32)),
        ("angles: expected 16 positions or more, got 15", jnp.ones((S - 1, D // 2))),
        ("expected x.B, S, H, D. with D >= 2 x 5", jnp.ones((S, D // 2 + 1))),
    ],
)
def test_misuse_of_a_table_is_named(message, angles):
    with pytest.raises(ValueError, match=message):
        rope_table(X, angles)


@GROUPS
def test_products_depend_on_relative_positions_only(group):
    run = jax.jit(partial(rope, frequencies=rope_frequencies(D), group=group))
    q, k = emulated.normal(6, (1, 1, 1, D), (1, 1, 1, D))
    q, k = (run(np.broadcast_to(t, (1, S, 1, D)))[0, :, 0] for t in (q, k))
    products = np.asarray(q @ k.T)
    for offset in range(-S + 1, S):
        diagonal = np.diagonal(products, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5 * np.abs(products).max())


def test_keeps_the_dtype_and_computes_in_f32(implementation):
    x = jnp.asarray(X, jnp.bfloat16)
    got = rope(x, rope_frequencies(D), positions=1000 + jnp.arange(S))
    assert got.dtype == jnp.bfloat16
    testing.assert_close(got, complex_rope(x, positions=1000 + np.arange(S)), BF16)


@pytest.mark.parametrize("shape", [(0, S, H, D), (B, 0, H, D), (B, S, 0, D)])
def test_nothing(implementation, shape):
    y, vjp = jax.vjp(rope, jnp.zeros(shape), rope_frequencies(D))
    dx, dfrequencies = vjp(y)
    assert y.shape == dx.shape == shape and not dfrequencies.any()


@pytest.mark.parametrize(
    "message, call",
    {
        r"expected x\[B, S, H, D\].*got \[2, 16, 8\]": lambda x, f: rope(x[:, :, 0], f),
        r".*D >= 2 x 4, got \[2, 16, 3, 7\]": lambda x, f: rope(x[..., :7], f),
        "x: expected f32, f16 or bf16, got int32": lambda x, f: rope(x.astype(int), f),
        r"frequencies: expected f32\[F\], got float32\[1, 4\]": lambda x, f: rope(x, f[None]),
        "frequencies: .*got int32": lambda x, f: rope(x, f.astype(int)),
        "group: expected 'consecutive' or 'alternate', got 'neighbours'": lambda x, f: rope(x, f, group="neighbours"),
        r"positions: expected integers \[16\] or \[2, 16\], got int32\[15\]": lambda x, f: rope(
            x, f, positions=jnp.arange(15)
        ),
        "positions: .*got float32": lambda x, f: rope(x, f, positions=jnp.arange(16.0)),
    }.items(),
)
def test_misuse_is_named(message, call):
    with pytest.raises(ValueError, match=f"rope: {message}"):
        call(jnp.asarray(X), rope_frequencies(D))


@pytest.mark.parametrize("windows", [(1, 2, 3), (1, 0), "ab", ("a", "b"), 5, None], ids=str)
def test_misuse_of_windows_is_named(windows):
    with pytest.raises(ValueError, match=f"windows: expected two positive numbers, got {re.escape(repr(windows))}"):
        rope_frequencies(D, windows)


OPERANDS = {"x": ((6, 2, 8), jnp.float32), "frequencies": ((4,), jnp.float32), "positions": ((6,), jnp.int32)}


@pytest.mark.parametrize(
    "argument, wrong",
    [
        ("x", ((8,), jnp.float32)),
        ("x", ((6, 2, 8), jnp.int32)),
        ("frequencies", ((5,), jnp.float32)),
        ("frequencies", ((4,), jnp.float16)),
        ("positions", ((5,), jnp.int32)),
        ("positions", ((6,), jnp.float32)),
        ("y", ((6, 2, 7), jnp.float32)),
        ("y", ((6, 2, 8), jnp.bfloat16)),
        ("group", "neighbours"),
    ],
)
def test_malformed_calls_raise(argument, wrong):
    operands, results, group = dict(OPERANDS), {"y": OPERANDS["x"]}, "alternate"
    if argument == "group":
        group = wrong
    else:
        (operands if argument in operands else results)[argument] = wrong
    with pytest.raises(Exception, match="te_rope_rotate: "):
        call_handler("rope_rotate", operands, results, {"group": group, "inverse": False})


def test_malformed_calls_of_one_array_raise():
    operands, results = OPERANDS | {"x": ((6, 2, 2, 8), jnp.float32)}, {"y": ((6, 2, 2, 8), jnp.float32)}
    with pytest.raises(Exception, match=r"te_rope_rotate_qkv: x: expected \[tokens.., 3, H, D\]"):
        call_handler("rope_rotate_qkv", operands, results, {"group": "alternate", "inverse": False})
