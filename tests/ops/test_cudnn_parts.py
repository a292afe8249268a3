"""Attention merged from parts by cuDNN: with a stand-in for cuDNN, and cuDNN itself where there is a GPU."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import BF16, F32
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import (
    Attention,
    ContextParallel,
    SequenceDescriptor,
    backends,
    cudnn,
    cudnn_parts,
    dot_product_attention,
    inverse_reorder_causal_load_balancing,
    op,
    reorder_causal_load_balancing,
)

B, S, H, G, D, DV = 2, 32, 4, 2, 16, 8
QKV = emulated.normal(0, (B, S, H, D), (B, S, G, D), (B, S, G, DV))
DY, OFFSET = emulated.normal(1, (B, S, H, DV), (H,))
STRATEGIES = pytest.mark.parametrize("strategy", ["ALL_GATHER", "RING"])


def forward(scale, mask, query, key, value):
    """cudnn_forward in plain JAX."""
    scores, value = scores_of(scale, mask, query, key), jnp.repeat(value, H // G, axis=2)
    logs = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - logs[..., None]), value), logs


def backward(scale, mask, query, key, value, logs, out, dout):
    """cudnn_backward in plain JAX."""
    weights = jnp.exp(scores_of(scale, mask, query, key) - logs[..., None])
    key, value = (jnp.repeat(x, H // G, axis=2) for x in (key, value))
    along = jnp.einsum("bqhd,bqhd->bhq", dout, out)[..., None]
    dscores = scale * weights * (jnp.einsum("bqhd,bkhd->bhqk", dout, value) - along)
    of_groups = lambda x: x.reshape(*x.shape[:2], G, H // G, -1).sum(axis=3)
    dkey, dvalue = (jnp.einsum("bhqk,bqhd->bkhd", w, x) for w, x in ((dscores, query), (weights, dout)))
    return jnp.einsum("bhqk,bkhd->bqhd", dscores, key), of_groups(dkey), of_groups(dvalue)


def scores_of(scale, mask, query, key):
    ahead = jnp.arange(key.shape[1]) - jnp.arange(query.shape[1])[:, None]
    seen = ((ahead <= 0) | (not mask.causal)) & ((ahead >= -mask.left) | (mask.left < 0))
    scores = scale * jnp.einsum("bqhd,bkhd->bhqk", query, jnp.repeat(key, H // G, axis=2))
    return jnp.where(seen, scores, -jnp.inf)


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(op, "attention_backend", lambda *_, **__: ("cudnn", "to be tried"))
    monkeypatch.setattr(cudnn, "_has_handlers", lambda *_: False)  # which take an offset themselves
    monkeypatch.setattr(cudnn_parts, "cudnn_forward", forward)
    monkeypatch.setattr(cudnn_parts, "cudnn_backward", backward)
    return monkeypatch


def step(options, parallel, qkv, dy, offset=None, described=None):
    """Output, and gradients of queries, keys, values and the offset."""

    @jax.jit
    def run(qkv, offset, dy, described):
        def attend(qkv, offset):
            given = dict(softmax_offset=offset, sequence_descriptor=described)
            return dot_product_attention(*qkv, options=options, context_parallel=parallel, **given)

        y, vjp = jax.vjp(attend, qkv, offset)
        return y, vjp(dy)

    return jax.device_get(run(tuple(qkv), offset, dy, described))


def on_axis(
    options, strategy, offset=None, *, balanced=False, explicit=False, dtype=jnp.float32, size=4, described=None
):
    """A step with the sequence sharded, and where there are devices, examples and heads."""
    order, back = (
        partial(f, cp_size=size) if balanced else lambda x: x
        for f in (reorder_causal_load_balancing, inverse_reorder_causal_load_balancing)
    )
    alone = size < 4
    mesh = testing.mesh_of(*(((size,), ("cp",)) if alone else ((2, size), ("data", "cp"))), explicit=explicit)
    placed = testing.shard(mesh, [order(x).astype(dtype) for x in (*QKV, DY)], [P(None if alone else "data", "cp")] * 4)
    if described is not None and described.segment_ids is not None:
        described = jax.tree.map(order, described)
    with testing.on_mesh(mesh):
        got = step(options, ContextParallel("cp", strategy, balanced), placed[:3], placed[3], offset, described)
    return jax.tree.map(lambda x: back(x) if x.ndim == 4 else x, got)


@STRATEGIES
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("causal, balanced", [(False, False), (True, False), (True, True)])
def test_of_keys(stand_in, causal, balanced, explicit, strategy):
    options = Attention(0.3, causal=causal)
    got = on_axis(options, strategy, balanced=balanced, explicit=explicit)
    stand_in.undo()
    testing.assert_close(got, step(options, None, QKV, DY), F32)


# Rows of sequences that end within a device's tokens, between two, and go on over several.
IDS = np.array([[1] * 9 + [2] * 3 + [0] * 4 + [3] * 8 + [7] * 8, [5] * 1 + [4] * 31])
POSITIONS = np.array([[*range(9), *range(3), *range(4), *range(8), *range(8)], [0, *range(31)]])
LENGTHS, STARTS = np.array([[9, 3, 16], [32, 0, 0]]), np.array([[0, 9, 16, 32], [0, -1, -1, -1]])
DESCRIBED = {
    "ids": SequenceDescriptor.from_segment_ids_and_pos(IDS, POSITIONS, max_segments=5),
    "lengths": SequenceDescriptor.from_seqlens(LENGTHS),
    "a length": SequenceDescriptor.from_seqlens(LENGTHS[:, 2] + 5),
    "offsets": SequenceDescriptor.from_seqlens_and_offsets(LENGTHS, STARTS),
}


@pytest.mark.parametrize(
    "how, causal, balanced, explicit, strategy",
    [
        ("ids", False, False, False, "RING"),
        ("ids", True, False, False, "ALL_GATHER"),
        ("ids", True, True, False, "RING"),
        ("ids", True, True, True, "ALL_GATHER"),
        ("lengths", True, True, False, "ALL_GATHER"),
        ("a length", True, True, False, "RING"),
        ("offsets", True, True, False, "RING"),
    ],
)
def test_of_keys_of_packed_rows(stand_in, how, causal, balanced, explicit, strategy):
    options = Attention(0.3, causal=causal, softmax_type="learnable")
    given = dict(offset=OFFSET, described=DESCRIBED[how])
    got = on_axis(options, strategy, balanced=balanced, explicit=explicit, **given)
    stand_in.undo()
    testing.assert_close(got, step(options, None, QKV, DY, **given), F32)


def test_keys_may_be_of_other_sequences_where_all_is_seen(stand_in):
    """One of keys alone, one of queries alone, and one that they have at other places."""
    of_keys = np.array([[2] * 30 + [0, 9], [4] * 5 + [5] * 27])
    described = SequenceDescriptor.from_segment_ids_and_pos((IDS, of_keys), max_segments=5)
    got = on_axis(Attention(0.3), "RING", described=described)
    stand_in.undo()
    testing.assert_close(got, step(Attention(0.3), None, QKV, DY, described=described), F32)


def test_gradients_of_padding_may_be_anything(stand_in):
    """As on one device, where cuDNN is given none of them."""
    options = Attention(0.3, causal=True, softmax_type="learnable")
    given = dict(offset=OFFSET, described=DESCRIBED["ids"])
    expected = on_axis(options, "RING", **given)
    stand_in.setitem(globals(), "DY", np.where((IDS != 0)[..., None, None], DY, np.nan))
    testing.assert_close(on_axis(options, "RING", **given), expected, F32)


@pytest.mark.parametrize("strategy, balanced", [("RING", True), ("ALL_GATHER", False)])
@pytest.mark.parametrize("by_cudnn", [False, True])
def test_rows_that_break_their_promise_are_nan(stand_in, by_cudnn, balanced, strategy):
    if not by_cudnn:
        stand_in.undo()
    ids = np.array([[1] * 20 + [2] * 12, [1] * 10 + [2] * 12 + [1] * 10])
    described = SequenceDescriptor.from_segment_ids_and_pos(ids, max_segments=2)
    y, _ = on_axis(Attention(0.3), strategy, balanced=balanced, described=described)
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()


@pytest.mark.parametrize("how", DESCRIBED)
def test_packed_rows_are_cudnn_s(monkeypatch, how):
    monkeypatch.setattr(backends, "platform", lambda: "gpu")
    monkeypatch.setattr(backends, "packs", lambda: True)
    qkv = [jnp.asarray(x, jnp.bfloat16) for x in QKV]
    given = dict(sequence_descriptor=DESCRIBED[how], context_parallel=ContextParallel("cp"))
    assert backends.attention_backend(Attention(0.3, causal=True), *qkv, **given)[0] == "cudnn"


# An offset, and a window: what attention of one device takes apart.
OFFSETS = {
    "off by one": (dict(softmax_type="off_by_one"), None),
    "learnable": (dict(softmax_type="learnable", causal=True), OFFSET),
    "learnable, window": (dict(softmax_type="learnable", causal=True, window=(5, 0)), OFFSET),
}


@pytest.mark.parametrize("case", OFFSETS)
def test_of_an_offset(stand_in, case):
    fields, offset = OFFSETS[case]
    options = Attention(0.3, **fields)
    got = step(options, None, QKV, DY, offset)
    sharded = None if options.window else on_axis(options, "RING", offset)
    stand_in.undo()
    expected = step(options, None, QKV, DY, offset)
    testing.assert_close(got, expected, F32)
    if sharded is not None:
        testing.assert_close(sharded, expected, F32)


def bf16(fields, offset, run, described=None):
    """`run` in bf16 against plain JAX in f32 from the same rounded numbers."""
    exact = [np.asarray(x.astype(jnp.bfloat16), np.float32) for x in (*QKV, DY)]
    expected = step(Attention(0.3, **fields), None, exact[:3], exact[3], offset, described)
    # Roundings of weights, of their gradients, of the results; and of gradients of groups, twice.
    testing.assert_close(run(), expected, 5 * BF16)


@pytest.mark.parametrize("case", OFFSETS)
def test_cudnn_itself_with_an_offset(case):
    """On a GPU; elsewhere plain JAX."""
    fields, offset = OFFSETS[case]
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (*QKV, DY)]
    backend, _ = backends.attention_backend(Attention(0.3, **fields), *rounded[:3])
    assert backend == ("cudnn" if jax.default_backend() == "gpu" else "reference")
    bf16(fields, offset, lambda: step(Attention(0.3, **fields), None, rounded[:3], rounded[3], offset))


@STRATEGIES
@pytest.mark.parametrize("how", [None, *DESCRIBED])
def test_cudnn_itself_on_an_axis(how, strategy):
    """Where there are two GPUs; elsewhere plain JAX."""
    fields, described = dict(causal=True), DESCRIBED.get(how)
    given = dict(balanced=True, dtype=jnp.bfloat16, size=2, described=described)
    bf16(fields, None, partial(on_axis, Attention(0.3, **fields), strategy, **given), described)


@pytest.mark.parametrize("size", [160, 256])
def test_cudnn_itself_with_large_heads(size):
    """On a GPU from Hopper on; elsewhere plain JAX."""
    x = emulated.normal(4, *((B, S, heads, size) for heads in (H, G, G, H)))
    x = [jnp.asarray(a, jnp.bfloat16) for a in x]
    options = Attention(size**-0.5, causal=True)
    got = step(options, None, x[:3], x[3])
    exact = [np.asarray(a, np.float32) for a in x]
    testing.assert_close(got, step(options, None, exact[:3], exact[3]), 5 * BF16)


@STRATEGIES
@pytest.mark.parametrize("resource", [te.MeshResource(), te.MeshResource(dp_resource="data")])
def test_lowered_for_cuda(monkeypatch, resource, strategy):
    """As many calls of cuDNN as there are parts, and none that is to be partitioned: JAX can't among manual axes."""
    monkeypatch.setattr(backends, "platform", lambda: "gpu")
    attend = partial(
        dot_product_attention, options=Attention(0.3, causal=True), context_parallel=ContextParallel("cp", strategy)
    )

    def both(query, key, value):
        return jax.vjp(attend, query, key, value)[1](query)

    mesh = testing.mesh_of((2, 4), ("data", "cp"))
    qkv = testing.shard(mesh, [x.astype(jnp.bfloat16) for x in (QKV[0], QKV[1], QKV[1])], [P("data", "cp")] * 3)
    with testing.on_mesh(mesh), te.autocast(mesh_resource=resource):
        traced = jax.jit(both).trace(*qkv)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "__cudnn$fmha" in text and "CustomSPMDPartitioning" not in text
        assert "cudnn" in str(te.explain(both, *qkv))
    for call in ("fwd", "bwd"):
        assert str(traced.jaxpr).count(f"= dot_product_attention_{call}_wrapper[") == 4
