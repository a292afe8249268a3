"""Attention of more than 2^31 entries, whose gradients cuDNN gets wrong: on a GPU, where each case takes 25 GiB."""

import jax
import jax.numpy as jnp
import pytest
from emulated import normal
from hopper import choose_as_on_hopper

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import (
    Attention,
    SequenceDescriptor,
    backends,
    cudnn,
    dot_product_attention,
    flash,
)
from transformer_engine_jax.ops.attention.flash_qkv import qkv_attention
from transformer_engine_jax.recipe import DelayedScaling

OF_ALL = 2**31 + 2**27 if jax.default_backend() == "gpu" else 2**17  # entries
SEQ, HEADS, SIZE = (1024, 16, 128) if jax.default_backend() == "gpu" else (32, 2, 16)
CAUSAL = Attention(SIZE**-0.5, causal=True)


def tiled(i: int, heads: int, count: int, *axes: int) -> jax.Array:
    """[count, SEQ, *axes, heads, SIZE]: of 7 examples, so that what is 2^31 entries further on is not the same."""
    (few,) = normal(i, (7, SEQ, *axes, heads, SIZE))
    return jax.jit(lambda x: jnp.tile(x, (-(-count // 7), *[1] * (x.ndim - 1)))[:count])(jnp.asarray(few, jnp.bfloat16))


def plain(query, key, value):
    return dot_product_attention(query, key, value, options=CAUSAL)


def packed(query, key, value):
    ids = 1 + jnp.arange(SEQ)[None] // (SEQ // 2) + jnp.zeros((query.shape[0], 1), jnp.int32)
    described = SequenceDescriptor.from_segment_ids_and_pos(ids, max_segments=2)
    return dot_product_attention(query, key, value, options=CAUSAL, sequence_descriptor=described)


def of_lengths(query, key, value):
    """With values of another head size, without which they would be packed rows too."""
    described = SequenceDescriptor.from_seqlens(jnp.full(query.shape[0], SEQ - 3, jnp.int32))
    out = dot_product_attention(query, key, value[..., :-8], options=CAUSAL, sequence_descriptor=described)
    return jnp.pad(out, [(0, 0)] * 3 + [(0, 8)])


def in_fp8(query, key, value):
    one = te.QuantizerState(jnp.float32(64), jnp.zeros(16))
    state = te.AttentionState.pack(**dict.fromkeys(te.AttentionState.TENSORS, one))
    quantizers = te.attention_quantizers(state, DelayedScaling(fp8_dpa=True))
    return dot_product_attention(query, key, value, options=CAUSAL, quantizers=quantizers)


def check_each_is_as_alone(op, operands) -> None:
    @jax.jit
    def step(*operands):
        out, vjp = jax.vjp(op, *operands[:-1])
        return out, vjp(operands[-1])

    whole, count = step(*operands), len(operands[0])
    for example in (0, count // 2, count - 1):
        at = slice(example, example + 1)
        alone = step(*(x[at] for x in operands))
        for got, expected in zip(jax.tree.leaves(whole), jax.tree.leaves(alone), strict=True):
            assert testing.relative_error(got[at].astype(jnp.float32), expected.astype(jnp.float32)) < 2**-6  # of bf16


@pytest.mark.parametrize("op", [plain, packed, of_lengths, in_fp8])
def test_every_example_is_as_alone(op):
    count = OF_ALL // (SEQ * HEADS * SIZE)
    check_each_is_as_alone(op, [tiled(i, heads, count) for i, heads in enumerate((HEADS, 1, 1, HEADS))])


def test_every_example_of_one_array_is_as_alone():
    count = OF_ALL // (3 * SEQ * HEADS * SIZE)
    operands = tiled(0, HEADS, count, 3), tiled(1, HEADS, count)
    check_each_is_as_alone(lambda qkv: qkv_attention(CAUSAL, qkv), operands)


# --- The choice ------------------------------------------------------------------------------------------------------

COUNTED = "cuDNN counts in 32 bits"
BATCH, TOKENS = (2**12, 1024), (2, 2**20)  # of 16 heads of 128 entries


@pytest.fixture
def on_hopper(monkeypatch):
    choose_as_on_hopper(monkeypatch)
    for module in (backends, cudnn):
        monkeypatch.setattr(module, "on_hopper", lambda: True)
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.mark.parametrize(
    "sizes, call, backend",
    [
        (BATCH, {}, "cudnn"),  # in parts
        (BATCH, {"bias": jax.ShapeDtypeStruct((1, 1, 1024, 1024), jnp.float32)}, "reference"),
        (BATCH, {"mask": jax.ShapeDtypeStruct((1, 1, 1, 1024), jnp.bool_)}, "reference"),
        (BATCH, {"dropout_key": jax.random.key(0)}, "reference"),
        (TOKENS, {}, "reference"),
        (TOKENS, {"fp8": True}, "reference"),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_what_cudnn_counts(sizes, call, backend, monkeypatch):
    query = jax.ShapeDtypeStruct((*sizes, 16, 128), jnp.bfloat16)
    got, why = backends.attention_backend(CAUSAL, query, query, query, **call)
    assert (got, COUNTED in why) == (backend, backend == "reference")
    monkeypatch.setattr(jax, "device_count", lambda: 8)  # whose shards are small enough
    assert backends.attention_backend(CAUSAL, query, query, query, **call)[0] != "reference"


@pytest.mark.usefixtures("on_hopper")
def test_explicit_axes_tell_what_is_on_a_device():
    query, key = jax.ShapeDtypeStruct((2**11, 1024, 16, 128), jnp.bfloat16), jax.random.key(0)
    mesh = testing.mesh_of((2, 2), ("data", "tensor"), explicit=True)
    for spec, backend in ((jax.P("data", None, "tensor"), "cudnn"), (jax.P(), "reference")):
        placed = jax.ShapeDtypeStruct(query.shape, query.dtype, sharding=jax.NamedSharding(mesh, spec))
        with testing.on_mesh(mesh):
            assert backends.attention_backend(CAUSAL, placed, placed, placed, dropout_key=key)[0] == backend


@pytest.mark.usefixtures("on_hopper")
def test_jaxs_call_takes_no_parts(monkeypatch):
    """Which is what computes heads that groups do not divide over."""
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    for groups, backend in ((8, "cudnn"), (4, "reference")):
        query, key = (jax.ShapeDtypeStruct((2**14, 1024, heads, 128), jnp.bfloat16) for heads in (16, groups))
        assert cudnn._has_handlers(CAUSAL, query, key) == (backend == "cudnn")
        assert backends.attention_backend(CAUSAL, query, key, key)[0] == backend


@pytest.mark.usefixtures("on_hopper")
def test_heads_are_counted_as_wide_as_kernels_have_them():
    for size, backend in ((112, "cudnn"), (120, "reference")):
        query = jax.ShapeDtypeStruct((1, 2**20, 16, size), jnp.bfloat16)
        assert backends.attention_backend(CAUSAL, query, query, query)[0] == backend


@pytest.mark.usefixtures("on_hopper")
def test_where_one_array_is_too_large_its_parts_may_not_be():
    for tokens, reads in ((2**18, True), (2**19, False)):  # 2^31 of 16 heads of 128 are 2^20 tokens
        assert cudnn.reads_qkv(CAUSAL, jax.ShapeDtypeStruct((8, tokens, 16, 128), jnp.bfloat16)) == reads
    for dropout, reads in ((0.0, True), (0.1, False)):  # whose masks can't be drawn in parts
        options = CAUSAL._replace(dropout=dropout)
        assert cudnn.reads_qkv(options, jax.ShapeDtypeStruct((800, 1024, 16, 128), jnp.bfloat16)) == reads


def test_examples_go_together_as_the_handlers_take_them():
    """In the fewest parts, as even as can be; of sizes that are known at run time only, all."""
    tokens, counts = 2**20, (0, 1, 2047, 2048, 4094, 4095)
    assert [flash.examples_at_once(n, tokens, 5) for n in counts] == [0, 1, 2047, 1024, 2047, 1365]
    (batch,) = jax.export.symbolic_shape("b")
    assert flash.examples_at_once(batch, tokens) is batch
