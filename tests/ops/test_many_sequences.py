"""Rows of many sequences, or of no tokens: what is told of them takes little memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import Attention, SequenceDescriptor, dot_product_attention, sequences
from transformer_engine_jax.ops.attention.sequences import places, runs

LENGTHS = np.random.default_rng(0).integers(0, 5, (3, 13))
IDS = np.stack(
    [np.repeat(np.arange(1, 14), row)[np.arange(40) % row.sum()] * (np.arange(40) < row.sum()) for row in LENGTHS]
)


@pytest.mark.parametrize("most", [1, 100, 200])
def test_in_parts_they_are_as_at_once(most, monkeypatch):
    def told():
        by_lengths, by_ids = (
            SequenceDescriptor.from_seqlens(LENGTHS),
            SequenceDescriptor.from_segment_ids_and_pos(IDS, max_segments=13),
        )
        options = Attention(1.0, causal=True, bottom_right=True)
        return [places(by_lengths, 40, 40, options), runs(by_ids)]

    at_once = told()
    monkeypatch.setattr(sequences, "MOST_COMPARED", most)
    testing.assert_same_bytes(told(), at_once)


@pytest.mark.parametrize("how", ["lengths", "ids"])
def test_memory_does_not_grow_with_their_number(how):
    """Compiled only: 2^16 tokens, of which all were compared with each of 2^8 and 2^11 sequences."""

    def told(given, most):
        if how == "ids":
            return runs(SequenceDescriptor.from_segment_ids_and_pos(given, max_segments=most))
        return places(SequenceDescriptor.from_seqlens(given), 2**16, 2**16, Attention(1.0, causal=True))

    def bytes_for(most: int) -> int:
        given = jax.ShapeDtypeStruct((1, most if how == "lengths" else 2**16), jnp.int32)
        with jax.default_device(jax.devices("cpu")[0]):
            compiled = jax.jit(partial(told, most=most)).lower(given).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_for(2**11) < 1.5 * bytes_for(2**8)


@pytest.mark.parametrize("q_len, k_len", [(0, 4), (4, 0), (0, 0)])
def test_of_no_tokens_a_promise_is_kept(q_len, k_len):
    ids = tuple(np.ones((2, n), int) for n in (q_len, k_len))
    described = SequenceDescriptor.from_segment_ids_and_pos(ids, max_segments=2)
    query, key = (jnp.ones((2, n, 1, 8)) for n in (q_len, k_len))
    out = dot_product_attention(query, key, key, options=Attention(1.0), sequence_descriptor=described)
    assert out.shape == (2, q_len, 1, 8) and not np.asarray(out).any()


def test_ids_of_64_bits_are_refused_where_32_do_not_hold_them():
    """Cut to 32 bits, hashes might be equal, or 0, which is padding."""
    ids = np.array([[1, 1, 2]])
    for wide in (ids << 32, ids.astype(np.uint64) << np.uint64(32), -ids << 32):
        with pytest.raises(
            ValueError, match="segment_ids: expected numbers of 32 bits, .*, got u?int64 from -?[0-9]+ to"
        ):
            SequenceDescriptor.from_segment_ids_and_pos(wide)
    same = SequenceDescriptor.from_segment_ids_and_pos(ids.astype(np.uint64))
    testing.assert_same_bytes(same.segment_ids[0], jnp.asarray(ids, jnp.int32))


@pytest.mark.parametrize("make", [jnp.asarray, np.ndarray.tolist])
def test_so_are_those_that_jax_keeps(make):
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match="seqlens: expected numbers of 32 bits, .*, got int64 from 0 to 42949"):
            SequenceDescriptor.from_seqlens(make(np.array([[0, 2**32]])))
        traced = jax.eval_shape(SequenceDescriptor.from_seqlens, jax.ShapeDtypeStruct((1, 2), jnp.int64))
    assert traced.seqlens[0].dtype == jnp.int32
