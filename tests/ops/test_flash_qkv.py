"""Attention of queries, keys and values in one array: the kernels, the op, and when it is chosen.

On a GPU the handlers are cuDNN's; elsewhere the kernels are their references.
"""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import choose_as_on_hopper_or_be_there, of_handlers
from jax.sharding import PartitionSpec as P

from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import (
    Attention,
    SequenceDescriptor,
    cudnn,
    dot_product_attention,
)
from transformer_engine_jax.ops.attention.flash_qkv import (
    attention_qkv_bwd,
    attention_qkv_fwd,
    parts,
    qkv_attention,
)

GPU = jax.default_backend() == "gpu"
B, S, H, D = 8, 48, 4, 64
BOUND = {"bfloat16": 2e-2, "float16": 4e-3}
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    choose_as_on_hopper_or_be_there(monkeypatch)


def inputs(dtype="bfloat16", size=D, tokens=S):
    qkv, do = emulated.normal(7, (B, tokens, 3, H, size), (B, tokens, H, size))
    return jnp.asarray(qkv, dtype), jnp.asarray(do, dtype)


FIELDS = [dict(), dict(causal=True), dict(causal=True, left=7)]


@pytest.mark.parametrize("dtype, size", of_handlers(("bfloat16", 64), ("bfloat16", 128), ("float16", 24)))
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_kernels_are_their_references(fields, dtype, size):
    qkv, do = inputs(dtype, size)
    attributes = dict(scale=size**-0.5, dropout=0.0, **fields)
    compare = lambda got, expected: testing.assert_close(got, expected, BOUND[dtype])
    sharded = P("data", None, None, "model")
    testing.check_kernel(attention_qkv_fwd, [qkv, None], attributes, compare, specs=[sharded, None])
    o, stats = attention_qkv_fwd.reference(qkv, None, **attributes)
    specs = [P("data", "model"), sharded, *2 * [P("data", None, "model")], None]
    testing.check_kernel(attention_qkv_bwd, [stats, qkv, o, do, None], attributes, compare, specs=specs)


def taken_apart(options, qkv, key=None):
    return dot_product_attention(*parts(qkv), options=options, dropout_key=key)


def step(op, qkv, do):
    out, vjp = jax.vjp(op, qkv)
    return out, vjp(do)[0]


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("fields", [dict(), dict(causal=True), dict(causal=True, window=(7, 0))], ids=str)
def test_is_attention_of_its_parts(fields, dropout):
    """Under the same mask: both draw it from the key alone."""
    qkv, do = inputs()
    options = Attention(D**-0.5, dropout=dropout, **fields)
    key = KEY if dropout else None
    op = partial(dot_product_attention, options=options, dropout_key=key)
    assert "attention_qkv_fwd" in str(jax.make_jaxpr(op)(qkv))
    got, expected = (jax.jit(partial(step, f))(qkv, do) for f in (op, lambda qkv: taken_apart(options, qkv, key)))
    testing.assert_close(got, expected, BOUND["bfloat16"])


def test_gradients_of_each_part_are_their_own():
    """Against the formulas, so that parts of one array that took each other's places would show."""
    qkv, do = inputs(tokens=16)
    query, key, value, dy = (np.asarray(x, np.float64) for x in (*parts(qkv), do))
    powers = np.exp(np.einsum("bqhd,bkhd->bhqk", query, key) * 0.125) * np.tri(16)
    weights = powers / powers.sum(-1, keepdims=True)
    dweights = np.einsum("bqhd,bkhd->bhqk", dy, value)
    dlogits = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) * 0.125
    out, grad = jax.jit(partial(step, partial(qkv_attention, Attention(0.125, causal=True))))(qkv, do)
    expected = [
        np.einsum("bhqk,bkhd->bqhd", dlogits, key),
        np.einsum("bhqk,bqhd->bkhd", dlogits, query),
        np.einsum("bhqk,bqhd->bkhd", weights, dy),
    ]
    testing.assert_close(out, np.einsum("bhqk,bkhd->bqhd", weights, value), BOUND["bfloat16"])
    testing.assert_close(parts(grad), expected, BOUND["bfloat16"])


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.vmap], ids=["remat", "vmap"])
def test_transforms(wrap):
    qkv, do = (jnp.stack([x, -2 * x]) for x in inputs())
    op = wrap(partial(qkv_attention, Attention(D**-0.5, causal=True)))
    run = lambda qkv, do: step(op, qkv, do)
    if wrap is jax.vmap:
        assert "scan" not in str(jax.make_jaxpr(run)(qkv, do))
        got = jax.jit(run)(qkv, do)
    else:
        got = jax.tree.map(lambda *x: jnp.stack(x), *[jax.jit(run)(qkv[i], do[i]) for i in range(2)])
    plain = partial(step, partial(taken_apart, Attention(D**-0.5, causal=True)))
    expected = jax.tree.map(lambda *x: jnp.stack(x), *[jax.jit(plain)(qkv[i], do[i]) for i in range(2)])
    testing.assert_close(got, expected, BOUND["bfloat16"])


# --- The choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, dtype, options",
    [
        ((B, S, H, 136), "bfloat16", Attention(1.0)),
        ((B, S, H, 20), "bfloat16", Attention(1.0)),
        ((B, S, H, D), "float32", Attention(1.0)),
        ((B, 1, H, D), "bfloat16", Attention(1.0)),
        ((B, S, H, D), "bfloat16", Attention(1.0, softmax_type="off_by_one")),
        ((B, S, H, D), "bfloat16", Attention(1.0, window=(3, 3))),
        ((B, S, H, D), "bfloat16", Attention(1.0, score_mod=lambda scores, *_: scores)),
    ],
    ids=["large heads", "odd heads", "f32", "one token", "softmax", "window", "score_mod"],
)
def test_others_are_taken_apart(shape, dtype, options):
    assert cudnn.reads_qkv(Attention(1.0, causal=True), jax.ShapeDtypeStruct((B, S, H, D), jnp.bfloat16))
    assert not cudnn.reads_qkv(options, jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))


def test_lengths_take_them_apart():
    """What lies past them is zeros to attention, which is done to each part."""
    qkv, _ = inputs()
    lengths = np.full(B, S // 2)
    sequences = SequenceDescriptor.from_seqlens((lengths, lengths))
    op = partial(dot_product_attention, options=Attention(0.125, causal=True), sequence_descriptor=sequences)
    assert "attention_qkv_fwd" not in str(jax.make_jaxpr(op)(qkv))
    testing.assert_same_bytes(jax.jit(op)(qkv), jax.jit(op)(*parts(qkv)))
    assert not np.any(np.asarray(jax.jit(op)(qkv))[:, S // 2 :])


def test_arrays_that_do_not_fit_are_named():
    qkv, _ = inputs()
    with pytest.raises(ValueError, match=r"in one array \[B, S, 3, heads, D\], got \[8, 48, 4, 64\], none, none"):
        dot_product_attention(qkv[:, :, 0], options=Attention(1.0))
    with pytest.raises(ValueError, match=r"expected query, key and value, .* none, \[8, 48, 4, 64\]"):
        dot_product_attention(qkv[:, :, 0], None, qkv[:, :, 1], options=Attention(1.0))


# --- The handlers ----------------------------------------------------------------------------------------------------


def test_lowered_for_cuda_needs_no_gpu():
    run = jax.jit(partial(step, partial(dot_product_attention, options=Attention(0.125))))
    text = run.trace(*inputs()).lower(lowering_platforms=("cuda",)).as_text()
    assert "te_attention_qkv_fwd" in text and "te_attention_qkv_bwd" in text


ATTRIBUTES = dict(
    scale=np.float32(1.0), dropout=np.float32(0.0), causal=False, left=np.int64(-1), buffers=np.zeros(0, np.int64)
)
MALFORMED = {
    "dtype": (dict(qkv=jnp.zeros((B, S, 3, H, D))), {}, r"te_attention_qkv_fwd: qkv: expected bf16 or f16, got f32"),
    "rank": (dict(qkv=jnp.zeros((B, S, H, D), jnp.bfloat16)), {}, r"qkv: expected \[B, S, 3, G, D\]"),
    "head size": (dict(qkv=jnp.zeros((B, S, 3, H, 20), jnp.bfloat16)), {}, "a head size in multiples of 8"),
    "seed": (dict(seed=jnp.zeros(4, jnp.uint32)), {}, "te_attention_qkv_fwd: seed: expected none without dropout"),
    "rate": ({}, dict(dropout=np.float32(1.0)), r"te_attention_qkv_fwd: dropout: expected a rate in \[0, 1\), got 1"),
    "window": ({}, dict(left=np.int64(3)), "te_attention_qkv_fwd: left: expected a window only where causal"),
    "result": (dict(qkv=jnp.zeros((B, S, 3, 2, D), jnp.bfloat16)), {}, r"o: expected \[8,48,2,64\], got bf16\[8,48,4"),
}


if GPU:  # elsewhere there is no handler

    @pytest.mark.parametrize("case", MALFORMED)
    def test_malformed_calls_raise(case):
        replaced, attributes, message = MALFORMED[case]
        operands = dict(qkv=jnp.zeros((B, S, 3, H, D), jnp.bfloat16), seed=jnp.zeros(0)) | replaced
        results = [
            jax.ShapeDtypeStruct((B, S, H, D), jnp.bfloat16),
            jax.ShapeDtypeStruct((B, H, S), jnp.float32),
            jax.ShapeDtypeStruct((32 << 20,), jnp.uint8),
        ]
        with pytest.raises(Exception, match=message):
            call = jax.ffi.ffi_call("te_attention_qkv_fwd", results)
            jax.block_until_ready(call(*operands.values(), **(ATTRIBUTES | attributes)))
