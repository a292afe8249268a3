"""Batches of documents of 1, 0, some and all of a row's tokens: padded or packed, each document is as if alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from emulated import F32, normal

from transformer_engine_jax import testing
from transformer_engine_jax.flax import SequenceDescriptor, TransformerLayer

LENGTHS = np.array([1, 7, 0, 4, 12])
ROW, HIDDEN = 12, 32
DOCUMENTS = normal(5, (len(LENGTHS), ROW, HIDDEN))[0]
INSIDE = np.arange(ROW) < LENGTHS[:, None]

Layer = partial(
    TransformerLayer,
    hidden_size=HIDDEN,
    mlp_hidden_size=48,
    num_attention_heads=4,
    num_gqa_groups=2,
    layernorm_type="rmsnorm",
    mlp_activations=("silu", "linear"),
    hidden_dropout=0.0,
    attention_dropout=0.0,
    enable_relative_embedding=False,
    enable_rotary_pos_emb=True,
)

# Where documents 0 to 4 start: (row, first token).
PADDED = [(i, 0) for i in range(len(LENGTHS))]
PACKED = [(0, 0), (0, 1), (0, 8), (0, 8), (1, 0)]
APART = [(0, 1), (0, 4), (2, 0), (1, 5), (3, 0)]


def ids_and_positions(starts):
    """segment_ids, segment_pos i32[rows, ROW] of documents that start there."""
    ids, positions = np.zeros((2, 1 + max(row for row, _ in starts), ROW), np.int32)
    for i, ((row, first), n) in enumerate(zip(starts, LENGTHS)):
        ids[row, first : first + n], positions[row, first : first + n] = i + 1, np.arange(n)
    return ids, positions


CASES = {
    "padded, lengths": (PADDED, SequenceDescriptor.from_seqlens(LENGTHS)),
    "packed, lengths": (PACKED, SequenceDescriptor.from_seqlens(np.array([[1, 7, 0, 4], [12, 0, 0, 0]]))),
    "packed, segments": (PACKED, SequenceDescriptor.from_segment_ids_and_pos(*ids_and_positions(PACKED))),
    "apart, offsets": (
        APART,
        SequenceDescriptor.from_seqlens_and_offsets(
            np.array([[1, 7], [4, -1], [0, 0], [12, 0]]), np.array([[1, 4, 11], [5, -1, -1], [0, 0, 0], [0, 12, 12]])
        ),
    ),
}


def scored(run, variables):
    """(outputs by document, 0 outside; gradients) of a function of (variables, documents)."""

    def loss(variables, documents):
        out = jnp.where(INSIDE[..., None], run(variables, documents), 0.0)
        return jnp.sum(out * steps.weights(0, out.shape)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(variables, DOCUMENTS)
    return out, grads


@pytest.fixture(scope="module")
def variables():
    return steps.randomized(steps.init(Layer(), DOCUMENTS))


@pytest.fixture(scope="module")
def alone(variables):
    """No causal query sees the padding behind its document."""
    return scored(Layer().apply, variables)


@pytest.mark.parametrize("case", CASES)
def test_documents_are_as_if_alone(case, variables, alone):
    starts, sequences = CASES[case]
    rows = 1 + max(row for row, _ in starts)
    # Token t of document d lies at row row_of[d, t], token token_of[d, t]; what is outside goes to and comes from 0.
    row_of = np.where(INSIDE, np.array([row for row, _ in starts])[:, None], 0)
    token_of = np.where(INSIDE, np.array([first for _, first in starts])[:, None] + np.arange(ROW), 0)

    def run(variables, documents):
        packed = jnp.zeros((rows, ROW, HIDDEN)).at[row_of, token_of].add(documents * INSIDE[..., None])
        out = Layer(self_attn_mask_type="padding_causal").apply(variables, packed, sequence_descriptor=sequences)
        return out[row_of, token_of]

    testing.assert_close(scored(run, variables), alone, 5 * F32)
