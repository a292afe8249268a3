"""RelativePositionBiases against T5's buckets in integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps

from transformer_engine_jax.flax import RelativePositionBiases


def t5_bucket(distance: int, bidirectional: bool, buckets: int, furthest: int) -> int:
    """The bucket of key - query in integers: past `exact`, the largest j with (n / exact)^width >= (far / exact)^j."""
    first = 0
    if bidirectional:
        buckets //= 2
        first, distance = (buckets, distance) if distance > 0 else (0, -distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    width = buckets - exact
    j = max(j for j in range(width) if j == 0 or distance**width * exact**j >= furthest**j * exact**width)
    return first + exact + j


@pytest.mark.parametrize(
    "fields, q_seqlen, message",
    [
        ((2, 128, 2), 3, "num_buckets: expected 4 or more with bidirectional=True, got 2"),
        ((32, 8, 2), 3, "max_distance: expected 9 or more with bidirectional=True, got 8"),
        ((32, 128, 2), -1, "q_seqlen: expected 0 or more"),
        ((8, 20, 0), 3, "num_attention_heads: expected a positive integer, got 0"),
    ],
)
def test_relative_positions_that_do_not_fit_are_named(fields, q_seqlen, message):
    with pytest.raises(ValueError, match=f"RelativePositionBiases.*{message}"):
        RelativePositionBiases(*fields).init(jax.random.key(0), q_seqlen, 3)


def test_fewer_than_no_keys_are_named():
    with pytest.raises(ValueError, match="RelativePositionBiases: k_seqlen: expected 0 or more"):
        RelativePositionBiases(32, 128, 2).init(jax.random.key(0), 3, -1)


def test_axes_of_a_wrong_number_are_named():
    with pytest.raises(
        ValueError, match=r"RelativePositionBiases.rel_embedding: expected 2 logical axes .*got \('a',\)"
    ):
        RelativePositionBiases(8, 20, 2, embedding_axes=("a",)).init(jax.random.key(0), 3, 3)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_position_biases_are_t5s(bidirectional):
    module = RelativePositionBiases(num_buckets=32, max_distance=128, num_attention_heads=2)
    q, k = 140, 150
    variables = steps.init(module, q_seqlen=q, k_seqlen=k, bidirectional=bidirectional, unbox=False)
    assert steps.layout(variables) == {"rel_embedding": ((2, 32), "float32", ("heads", "relpos_buckets"))}
    table = {"params": {"rel_embedding": jnp.arange(64.0).reshape(2, 32)}}
    got = np.asarray(module.apply(table, q, k, bidirectional))
    buckets = {d: t5_bucket(d, bidirectional, 32, 128) for d in range(-q, k)}
    expected = np.array([[buckets[j - i] for j in range(k)] for i in range(q)])
    assert got.shape == (1, 2, q, k)
    np.testing.assert_array_equal(got[0, 0], expected)
    np.testing.assert_array_equal(got[0, 1], expected + 32)


def test_no_queries():
    biases = RelativePositionBiases(32, 128, 2).init_with_output(jax.random.key(0), 0, 3)[0]
    assert biases.shape == (1, 2, 0, 3)
