"""Long sequences: the reference in blocks of queries equals the reference at once, in little memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import F32, normal

from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import (
    Attention,
    SequenceDescriptor,
    backends,
    dot_product_attention,
    reference,
)

B, Q, K, H, G, D = 2, 50, 40, 4, 2, 8
QUERY, KEY, VALUE, DY = normal(3, (B, Q, H, D), (B, K, G, D), (B, K, G, D), (B, Q, H, D))
BIAS, OFFSET = normal(4, (1, H, Q, K), (H,))
MASK = np.random.default_rng(0).random((B, 1, Q, K)) < 0.3
LENGTHS = SequenceDescriptor.from_seqlens((np.array([Q, 7]), np.array([30, 0])))


def soft_cap(scores, q, k):
    return 4 * jnp.tanh(scores / 4) + 0.1 * (k - q)


CASES = {
    "causal": (dict(causal=True), {}),
    "bias": (dict(), dict(bias=BIAS)),
    "bias and mask of keys": (dict(), dict(bias=BIAS[:, :, :1], mask=MASK[:, :, :1])),
    "mask, learnable": (dict(softmax_type="learnable"), dict(mask=MASK, softmax_offset=OFFSET)),
    "lengths, window": (dict(window=(9, 3), bottom_right=True), dict(sequence_descriptor=LENGTHS)),
    "score_mod": (dict(causal=True, score_mod=soft_cap), {}),
    "dropout": (dict(dropout=0.5), dict(dropout_key=jax.random.key(0))),
    "dropout by rbg": (dict(dropout=0.5), dict(dropout_key=jax.random.key(0, impl="rbg"))),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_the_whole(case, monkeypatch):
    fields, call = CASES[case]
    differentiated = {name: x for name, x in call.items() if name in ("bias", "softmax_offset")}
    fixed = {name: x for name, x in call.items() if name not in differentiated}

    def op(query, key, value, more):
        return dot_product_attention(query, key, value, options=Attention(0.3, **fields), **fixed, **more)

    def step(dy, *args):
        out, vjp = jax.vjp(op, *args)
        return out, vjp(dy)

    args = (DY, QUERY, KEY, VALUE, differentiated)
    whole = jax.jit(partial(step))(*args)
    monkeypatch.setattr(reference, "LOGITS_PER_BLOCK", B * H * K * 20)
    assert reference.rows_per_block(B, H, Q, K) == 17  # three blocks, the last of 16 queries
    blocks = jax.jit(partial(step))(*args)
    testing.assert_close(blocks, whole, F32)


def test_gradients_of_what_blocks_share_are_added_up_in_f32(monkeypatch):
    """Of many blocks in bf16, of which each adds little to the gradients of keys, values and a bias of keys."""
    monkeypatch.setattr(backends, "platform", lambda: "cpu")  # cuDNN is the choice in 16 bits
    monkeypatch.setattr(reference, "LOGITS_PER_BLOCK", 1)
    query, key, value, bias = normal(5, (1, 4096, 1, D), (1, 8, 1, D), (1, 8, 1, D), (1, 1, 1, 8))
    dy = np.abs(query) + 1  # of one sign
    operands = [jnp.asarray(x, jnp.bfloat16) for x in (query, key, value, bias, dy)]

    @jax.jit
    def gradients(query, key, value, bias, dy):
        op = partial(dot_product_attention, options=Attention(0.3))
        _, vjp = jax.vjp(lambda key, value, bias: op(query, key, value, bias=bias), key, value, bias)
        return vjp(dy)

    expected = gradients(*(x.astype(jnp.float32) for x in operands))
    for got, exact in zip(gradients(*operands), expected):
        assert testing.relative_error(got.astype(jnp.float32), exact) < 2**-8


def test_second_derivatives_in_16_bits_are_those_of_the_whole(monkeypatch):
    """Of what blocks share, whose gradients have a way of their own."""
    monkeypatch.setattr(backends, "platform", lambda: "cpu")
    operands = [jnp.asarray(x, jnp.bfloat16) for x in (QUERY, KEY, VALUE, BIAS[:, :, :1])]

    def loss(query, key, value, bias):
        out = dot_product_attention(query, key, value, bias=bias, options=Attention(0.3))
        return jnp.sum(out.astype(jnp.float32) ** 2)

    def second():
        gradients = jax.grad(loss, argnums=range(4))
        of_gradients = lambda *args: sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in gradients(*args))
        reverse = lambda *args: jax.grad(of_gradients, argnums=range(4))(*args)
        forward = lambda *args: jax.jvp(gradients, args, args)[1]
        return jax.jit(reverse)(*operands), jax.jit(forward)(*operands)

    whole = jax.tree.leaves(second())
    monkeypatch.setattr(reference, "LOGITS_PER_BLOCK", B * H * K * 20)
    for got, expected in zip(jax.tree.leaves(second()), whole, strict=True):
        assert testing.relative_error(*(x.astype(jnp.float32) for x in (got, expected))) < 2**-5  # of gradients in bf16


def test_rows_per_block():
    assert reference.rows_per_block(1, 1, 4096, 4096) == 4096  # 2^24 logits
    assert reference.rows_per_block(1, 1, 8192, 8192) == 2048
    assert reference.rows_per_block(4, 16, 4096, 4096) == 64
    assert reference.rows_per_block(64, 64, 4096, 2**20) == reference.LEAST_ROWS
    assert reference.rows_per_block(2, 2, 0, 0) == 0


@pytest.mark.parametrize("packed", [False, True])
def test_memory_grows_with_the_length_and_not_its_square(packed):
    """Compiled only: the buffers of a forward and backward pass over 16 k and 32 k tokens."""

    def step(query, key, value, dy, ids):
        sequences = SequenceDescriptor.from_segment_ids_and_pos(ids) if packed else None
        options = Attention(0.3, causal=True, bottom_right=packed)
        out, vjp = jax.vjp(
            partial(dot_product_attention, options=options, sequence_descriptor=sequences), query, key, value
        )
        return out, vjp(dy)

    def bytes_for(tokens: int) -> int:
        x = jax.ShapeDtypeStruct((1, tokens, 1, D), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        with jax.default_device(jax.devices("cpu")[0]):
            return jax.jit(step).lower(x, x, x, x, ids).compile().memory_analysis().temp_size_in_bytes

    small, large = bytes_for(2**14), bytes_for(2**15)
    logits = 4 * reference.LOGITS_PER_BLOCK
    # All logits are 64 times those of a block, and a mask of all 16 times. XLA keeps 4 to 7, by its version.
    assert large < 10 * logits, f"{large / logits:.1f} times the logits of a block"
    assert large < 1.2 * small
