"""dropout: its bits against Philox in numpy, and that forward, backward and shards draw the same."""

import re
from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from stored import ABSENT, call_handler

from transformer_engine_jax import testing
from transformer_engine_jax.ops.dropout import drop, drop_and_add, dropout, philox

RATE = 0.3
KEY = jax.random.key(5)
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])


def numpy_philox(key, counter):
    """Philox-4x32-10 in numpy's 64 bits."""
    c, k = [np.asarray(x, np.uint64) for x in counter], [int(x) for x in key]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [b >> np.uint64(32) ^ c[1] ^ np.uint64(k[0]), b & low, a >> np.uint64(32) ^ c[3] ^ np.uint64(k[1]), a & low]
        c = [np.asarray(x) for x in c]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return [x.astype(np.uint32) for x in np.broadcast_arrays(*c)]


def numpy_bits(seed, rows, columns):
    """u16[rows, columns] of each value: 8 neighbours share a counter."""
    units = np.arange(max(columns) // 8 + 1)
    words = numpy_philox(seed, (units[None], np.asarray(rows)[:, None], 0, 0))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return np.stack(halves, axis=-1).reshape(len(rows), -1)[:, columns]


def numpy_dropout(x, residual, seed, rows, columns, threshold, scale):
    wide = np.asarray(x, np.float32) * np.float32(scale)
    wide = np.where(numpy_bits(seed, rows, columns) < threshold, np.float32(0), wide)
    return wide if residual is None else wide + np.asarray(residual, np.float32)


# Of Random123's file of known answers.
@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ([0] * 4, [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, expected):
    got = philox(jnp.array(key, jnp.uint32), [jnp.uint32(c) for c in counter])
    assert [int(x) for x in got] == expected
    assert [int(x) for x in numpy_philox(key, counter)] == expected


@pytest.mark.parametrize(
    "dtype, adds", [(jnp.float32, False), (jnp.float16, True), (jnp.bfloat16, False), (jnp.bfloat16, True)]
)
@pytest.mark.parametrize(
    "rows, cols, first_row, first_col",
    [(3, 64, 0, 0), (130, 24, 7, 16), (5, 1000, 2**30, 3), (2, 1, 0, 7), (4, 1543, 1, 2041), (1, 8, 0, 5)],
)
def test_bits_and_values_are_those_of_the_definition(implementation, dtype, adds, rows, cols, first_row, first_col):
    x, residual = (jnp.asarray(a, dtype) for a in emulated.normal(1, (rows, cols), (rows, cols)))
    x = x.at[0, 0].set(jnp.nan)
    residual = residual if adds else None
    seed, threshold, scale = jnp.array([3, 2**31 + 1], jnp.uint32), 20000, 1.4389
    row, column = jnp.arange(first_row, first_row + rows), jnp.arange(first_col, first_col + cols)
    got = dropout(x, residual, seed, row, column, threshold=threshold, scale=scale)
    exact = numpy_dropout(x, residual, seed, np.asarray(row), np.asarray(column), threshold, scale)
    assert got.dtype == dtype and got.shape == x.shape
    if implementation == "handler" or not adds:
        np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (got, exact.astype(got.dtype))))
    else:  # XLA may make one operation of the product and the sum
        np.testing.assert_allclose(np.asarray(got, np.float32), exact, rtol=float(jnp.finfo(dtype).eps), atol=1e-6)


def test_an_empty_array(implementation):
    assert drop(jnp.zeros((0, 8)), KEY, RATE).shape == (0, 8)
    assert drop(jnp.zeros((3, 0)), KEY, RATE).shape == (3, 0)


def test_it_keeps_as_many_as_it_says_and_their_mean():
    for rate in (0.1, RATE, 0.9, 1e-4):
        y = np.asarray(drop(jnp.ones((512, 1024)), KEY, rate))
        kept = y > 0
        deviation = np.sqrt(rate * (1 - rate) / y.size)
        assert abs(kept.mean() - (1 - rate)) < 5 * deviation + 2.0**-17
        np.testing.assert_allclose(y[kept], 1 / (1 - rate), rtol=2.0**-16 / (1 - rate))
        # The factor is that of the rate in 16 bits: the mean stays, to the deviation that drawing has.
        assert abs(y.mean() - 1) < 5 * deviation / (1 - rate)
    np.testing.assert_array_equal(drop(jnp.ones((8, 8)), KEY, 0.0), np.ones((8, 8)))


def test_rows_columns_and_keys_draw_apart():
    kept = lambda key: np.asarray(drop(jnp.ones((64, 2048)), key, 0.5)) > 0
    first, second = kept(KEY), kept(jax.random.key(6))
    independent = lambda a, b: abs((a == b).mean() - 0.5) < 5 * 0.5 / np.sqrt(a.size)
    assert independent(first, second)
    assert independent(first[1:], first[:-1])
    for apart in (1, 2, 8, 16):
        assert independent(first[:, apart:], first[:, :-apart])


@DTYPES
def test_gradients(implementation, dtype):
    x, residual, dy = (jnp.asarray(a, dtype) for a in emulated.normal(2, *[(4, 6, 40)] * 3))
    y, vjp = jax.vjp(lambda x, r: drop(x, KEY, RATE, residual=r), x, residual)
    dx, dresidual = vjp(dy)
    ones = drop(jnp.ones_like(x, jnp.float32), KEY, RATE)
    assert 0.5 < float(jnp.mean(ones > 0)) < 0.9
    np.testing.assert_array_equal(dx, (dy.astype(jnp.float32) * ones).astype(dtype))
    np.testing.assert_array_equal(dresidual, dy)
    expected = x.astype(jnp.float32) * ones + residual.astype(jnp.float32)
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (y, expected)), rtol=float(jnp.finfo(dtype).eps))


def test_the_backward_pass_keeps_no_mask():
    x = jnp.ones((64, 256))
    _, vjp = jax.vjp(lambda x: drop(x, KEY, RATE, residual=x), x)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(vjp)) < 64


def test_remat_scan_and_jit_draw_the_same():
    x = jnp.asarray(emulated.normal(3, (8, 32))[0])
    layer = lambda x, key: (jnp.sin(drop(x, key, RATE, residual=x)), None)
    keys = jax.random.split(KEY, 3)

    def plain(x):
        for key in keys:
            x = layer(x, key)[0]
        return jnp.sum(x**2)

    scanned = lambda x: jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, keys)[0] ** 2)
    for got, expected in zip(jax.jit(jax.value_and_grad(scanned))(x), jax.value_and_grad(plain)(x)):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_vmap(implementation):
    x, keys = jnp.ones((3, 8, 16)), jax.random.split(KEY, 3)
    one_by_one = jnp.stack([drop(a, key, RATE) for a, key in zip(x, keys)])
    np.testing.assert_array_equal(jax.vmap(lambda a, key: drop(a, key, RATE))(x, keys), one_by_one)
    same = jax.vmap(lambda a: drop(a, KEY, RATE))(x)
    np.testing.assert_array_equal(same, jnp.stack([drop(a, KEY, RATE) for a in x]))


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("spec", [P("a", "b", "c"), P(("a", "b"), None, None), P(None, "c", ("a", "b"))])
def test_sharded_draws_what_one_device_draws(implementation, explicit, spec):
    mesh = testing.mesh_of((2, 2, 2), ("a", "b", "c"), explicit=explicit)
    x, residual, dy = emulated.normal(4, *[(4, 6, 40)] * 3)  # 10 or 20 columns a device: not whole groups of 8

    def both(x, residual, dy):
        key = jax.random.key(5)
        y, vjp = jax.vjp(lambda x, r: drop(x, key, RATE, residual=r), x, residual)
        return y, *vjp(dy)

    expected = jax.jit(both)(x, residual, dy)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    operands = testing.shard(mesh, (x, residual, dy), (spec,) * 3)
    with testing.on_mesh(mesh):
        compiled = jax.jit(both).lower(*operands).compile()
        got = compiled(*operands)
    assert got[0].sharding.is_equivalent_to(sharding, 3)
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    moves = re.compile(r"= f32\[.*(all-gather|all-reduce|collective-permute|all-to-all)")
    assert not moves.search(compiled.as_text())


def test_the_last_of_several_dropouts_adds():
    x, residual = (jnp.asarray(a) for a in emulated.normal(6, (3, 4, 16), (3, 4, 16)))
    of_samples = (jax.random.key(7), 0.5, (1, 2))
    np.testing.assert_array_equal(drop_and_add(x, residual, []), x + residual)
    one = drop_and_add(x, residual, [(KEY, RATE, ())])
    np.testing.assert_allclose(one, drop(x, KEY, RATE) + residual, rtol=1e-6, atol=1e-6)
    two = drop_and_add(x, residual, [(KEY, RATE, ()), of_samples])
    np.testing.assert_allclose(two, drop(drop(x, KEY, RATE), *of_samples) + residual, rtol=1e-6, atol=1e-6)
    dropped = np.asarray(two == residual).all(axis=(1, 2))
    assert dropped.any() and not dropped.all()


GOOD = dict(
    x=((2, 3, 8), jnp.float32),
    residual=ABSENT,
    seed=((2,), jnp.uint32),
    row=((2, 3), jnp.int32),
    column=((8,), jnp.int32),
)


@pytest.mark.parametrize(
    "wrong, attributes, message",
    [
        (dict(x=((2, 3, 8), jnp.int32)), {}, "x: expected f32, f16 or bf16"),
        (dict(residual=((2, 3, 7), jnp.float32)), {}, "residual: expected 6 x 8 elements"),
        (dict(residual=((2, 3, 8), jnp.bfloat16)), {}, "residual: expected f32"),
        (dict(seed=((4,), jnp.uint32)), {}, "seed: expected 2 x 1 elements"),
        (dict(seed=((2,), jnp.int32)), {}, "seed: expected u32"),
        (dict(row=((5,), jnp.int32)), {}, "row: expected 6 x 1 elements"),
        (dict(column=((9,), jnp.int32)), {}, "column: expected 8 x 1 elements"),
        ({}, dict(threshold=np.int64(65536)), "threshold: expected 0 to 65535, got 65536"),
    ],
)
def test_malformed_calls(wrong, attributes, message):
    attributes = dict(threshold=np.int64(100), scale=np.float32(1.5)) | attributes
    with pytest.raises(Exception, match=message):
        call_handler("dropout", GOOD | wrong, dict(y=((2, 3, 8), jnp.float32)), attributes)


def test_a_layer_draws_in_one_pass_for_each_branch():
    import transformer_engine_jax.flax as te_flax

    layer = te_flax.TransformerLayer(hidden_size=32, mlp_hidden_size=64, num_attention_heads=4, attention_dropout=0.0)
    x = jnp.ones((2, 8, 32))
    variables = layer.init(jax.random.key(0), x, deterministic=True)
    run = partial(layer.apply, variables, rngs={"dropout": KEY})
    text = str(jax.make_jaxpr(lambda x: jax.vjp(run, x)[1](x))(x))
    assert text.count("kernel dropout") == 4  # of two branches, forward and backward
    assert "random_bits[bit_width=32 shape=(2,)]" in text.replace("\n", "")


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.9, 1e-4])
def test_what_is_kept_is_divided_by_the_share_that_16_bits_keep(rate):
    y = np.asarray(drop(jnp.ones((64, 64)), KEY, rate))
    np.testing.assert_array_equal(y[y > 0], np.float32(2**16 / (2**16 - round(rate * 2**16))))
