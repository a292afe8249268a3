"""Attention with dropout by handlers of our own: cuDNN on a GPU, elsewhere their references, through the same op.

Values that are the identity show the mask that was drawn; under that mask results must equal the formulas.
"""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import numpy_attention
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from transformer_engine_jax import support, testing
from transformer_engine_jax.handlers import HANDLERS
from transformer_engine_jax.ops.attention import (
    Attention,
    SequenceDescriptor,
    attention_backend,
    backends,
    cudnn_flash,
    dot_product_attention,
    flash,
)

B, S, H, D = 2, 64, 4, 64
RATE = 0.25
BOUND = 2e-2
LENGTHS = np.array([S, 40]), np.array([33, S])
ROWS = [[(0, q, 0, k)] for q, k in zip(*LENGTHS)]
SHORT = [[(0, 1, 0, 50)], [(0, S, 0, 0)]]

# heads, groups, queries, keys, head size; options; (lengths, their rows)
CASES = {
    "all": ((H, H, S, S, D), dict(), None),
    "causal": ((H, H, S, S, D), dict(causal=True), None),
    "head size 128": ((H, H, 200, 128, 128), dict(causal=True), None),
    "head size 20": ((H, H, S, 16, 20), dict(), None),
    "odd lengths": ((3, 3, 33, 57, D), dict(), None),
    "one query": ((H, H, 1, S, D), dict(), None),
    "more keys": ((H, H, 40, S, D), dict(causal=True), None),
    "more queries": ((H, H, S, 40, D), dict(causal=True), None),
    "groups": ((H, 2, S, S, D), dict(causal=True), None),
    "one group": ((H, 1, S, 48, D), dict(), None),
    "window": ((H, 2, S, S, D), dict(causal=True, window=(9, 0)), None),
    "lengths": ((H, H, S, S, D), dict(), (LENGTHS, ROWS)),
    "causal lengths": ((H, 2, S, S, D), dict(causal=True), (LENGTHS, ROWS)),
    "window of lengths": ((H, H, S, S, D), dict(causal=True, window=(9, 0)), (LENGTHS, ROWS)),
    "nothing to see": ((H, H, S, S, D), dict(), ((np.array([1, S]), np.array([50, 0])), SHORT)),
}


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    """The choice that a GPU makes."""
    if jax.default_backend() != "gpu":
        monkeypatch.setattr(backends, "platform", lambda: "gpu")
        monkeypatch.setattr(backends, "missing", lambda: "")
    elif flash.missing():
        pytest.skip(flash.missing())


def inputs(sizes, dtype=jnp.bfloat16, batch=B):
    heads, groups, q_len, k_len, size = sizes
    shapes = [(batch, q_len, heads, size), *[(batch, k_len, groups, size)] * 2, (batch, q_len, heads, size)]
    return [jnp.asarray(x, dtype) for x in emulated.normal(5, *shapes)]


def the_op(size, fields, lengths=None, key=None):
    options = Attention(size**-0.5, dropout=RATE, **fields)
    sequences = None if lengths is None else SequenceDescriptor.from_seqlens(lengths)
    key = jax.random.key(0) if key is None else key
    return partial(dot_product_attention, options=options, sequence_descriptor=sequences, dropout_key=key)


def kept_by(op, query, key):
    """bool[B, H, Q, K] what is seen and kept."""
    k_len, size = key.shape[1], key.shape[3]
    identity = jnp.broadcast_to(jnp.eye(k_len, size, dtype=key.dtype)[None, :, None], key.shape)
    return np.moveaxis(np.asarray(jax.jit(op)(query, key, identity)[..., :k_len]) != 0, 1, 2)


def under_mask(options, seen, kept, query, key, value, dy):
    """(out, gradients) in f64, by the formulas; kept: of the weights, the others divided by 1 - RATE."""
    query, key, value, dy = (np.asarray(x, np.float64) for x in (query, key, value, dy))
    groups, repeats = key.shape[2], query.shape[2] // key.shape[2]
    key, value = (np.repeat(x, repeats, axis=2) for x in (key, value))
    powers = np.where(seen, np.exp(np.einsum("bqhd,bkhd->bhqk", query, key) * options.scale), 0.0)
    total = powers.sum(-1, keepdims=True)
    weights = powers / np.where(total > 0, total, 1.0)
    dropped = weights * kept / (1 - RATE)
    dweights = np.einsum("bqhd,bkhd->bhqk", dy, value) * kept / (1 - RATE)
    dlogits = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) * options.scale
    of_groups = lambda x: x.reshape(*x.shape[:2], groups, repeats, -1).sum(3)
    dkey, dvalue = (np.einsum("bhqk,bqhd->bkhd", a, x) for a, x in ((dlogits, query), (dropped, dy)))
    grads = [np.einsum("bhqk,bkhd->bqhd", dlogits, key), of_groups(dkey), of_groups(dvalue)]
    return np.einsum("bhqk,bkhd->bqhd", dropped, value), grads


def step(op, *arrays):
    @jax.jit
    def run(query, key, value, dy):
        out, vjp = jax.vjp(op, query, key, value)
        return out, list(vjp(dy))

    return run(*arrays)


# --- Values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case, dtype", [*((case, "bfloat16") for case in CASES), ("causal", "float16")])
def test_under_the_mask_that_was_drawn(case, dtype):
    sizes, fields, lengths = CASES[case]
    arrays = inputs(sizes, dtype)
    lengths, rows = lengths or (None, None)
    op = the_op(sizes[-1], fields, lengths)
    options, sequences, key = (op.keywords[k] for k in ("options", "sequence_descriptor", "dropout_key"))
    backend, why = attention_backend(options, *arrays[:3], sequence_descriptor=sequences, dropout_key=key)
    assert backend == "cudnn", why
    heads, _, q_len, k_len, _ = sizes
    seen = numpy_attention.seen_keys(options, B, q_len, k_len, rows)
    seen = np.broadcast_to(seen, (B, heads, q_len, k_len))
    kept = kept_by(op, *arrays[:2])
    assert not (kept & ~seen).any()
    # A quarter of them is dropped; five standard errors.
    assert abs(kept[seen].mean() - (1 - RATE)) < 5 * np.sqrt(RATE * (1 - RATE) / seen.sum())
    testing.assert_close(step(op, *arrays), under_mask(options, seen, kept, *arrays), BOUND)


def test_masks_differ_by_key_head_row_and_query():
    query, key, _, _ = inputs((H, H, S, S, D))
    draw = lambda seed: kept_by(the_op(D, {}, key=jax.random.key(seed)), query, key)
    first = draw(0)
    np.testing.assert_array_equal(draw(0), first)
    # Of two independent masks 2 * 0.25 * 0.75 differ.
    assert 0.3 < (draw(1) != first).mean() < 0.45
    # cuDNN 9.19 draws the same for four queries of eight, on a GPU; they are not neighbours.
    assert len({row.tobytes() for row in first.reshape(-1, S)}) >= B * H * S // 4
    for axis in (0, 1, 2):
        assert 0.3 < (np.roll(first, 1, axis) != first).mean() < 0.45


def test_raw_keys_and_keys_of_other_kinds():
    query, key, _, _ = inputs((H, H, S, S, D))
    raw = kept_by(the_op(D, {}, key=jax.random.PRNGKey(0)), query, key)
    np.testing.assert_array_equal(raw, kept_by(the_op(D, {}, key=jax.random.key(0)), query, key))
    assert kept_by(the_op(D, {}, key=jax.random.key(0, impl="rbg")), query, key).any()


@pytest.mark.parametrize("sizes", [(H, H, S, S, D), (H, 2, S, S, D)], ids=["heads", "groups"])
def test_keys_are_repeated_over_several_devices(sizes, monkeypatch):
    arrays = inputs(sizes)
    got = {}
    for devices in (1, 8):
        with monkeypatch.context() as patch:
            patch.setattr(jax, "device_count", lambda devices=devices: devices)
            got[devices] = kept_by(the_op(D, {}), *arrays[:2]), step(the_op(D, dict(causal=True)), *arrays)
    if jax.default_backend() == "gpu":  # the mask of the reference depends on how heads are grouped
        np.testing.assert_array_equal(got[1][0], got[8][0])
        testing.assert_close(got[1][1], got[8][1], BOUND)
    assert jax.tree.map(jnp.shape, got[1][1]) == jax.tree.map(jnp.shape, got[8][1])


# --- Transforms ------------------------------------------------------------------------------------------------------


def loss(key, query, keys, value, dy):
    out = the_op(D, dict(causal=True), key=key)(query, keys, value)
    return jnp.vdot(out.astype(jnp.float32), dy.astype(jnp.float32))


def test_vmap_over_keys_and_over_examples():
    arrays = [x.reshape(3, 2, *x.shape[1:]) for x in inputs((H, 2, S, S, D), batch=6)]
    grad = jax.grad(loss, argnums=(1, 2, 3))
    keys = jax.random.split(jax.random.key(2), 3)
    for in_axes, key in ((0, keys), (None, keys[0])):
        got = jax.jit(jax.vmap(grad, in_axes=(in_axes, 0, 0, 0, 0)))(key, *arrays)
        for i in range(3):
            one = jax.jit(grad)(keys[0] if in_axes is None else keys[i], *(x[i] for x in arrays))
            testing.assert_close([x[i] for x in got], list(one), BOUND)


def test_vmap_over_cotangents_alone():
    """The forward pass drew one mask; it must be that of every example."""
    query, key, value, dy = inputs((H, H, S, S, D))
    _, vjp = jax.vjp(the_op(D, dict(causal=True)), query, key, value)
    many = jnp.stack([dy, 2 * dy, -dy])
    got = jax.jit(jax.vmap(vjp))(many)
    for i, factor in enumerate((1, 2, -1)):
        testing.assert_close([x[i].astype(jnp.float32) / factor for x in got], list(vjp(dy)), BOUND)


@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda f: jax.checkpoint(jax.jit(f))], ids=["remat", "jit in remat"])
def test_inside_scan_and_remat(wrap):
    query, key, value, dy = inputs((H, H, S, S, D))
    keys = jax.random.split(jax.random.key(3), 2)

    def layers(query, value, looped):
        body = wrap(lambda x, k: the_op(D, dict(causal=True), key=k)(x, key, value))
        if looped:
            return jax.lax.scan(lambda x, k: (body(x, k), None), query, keys)[0]
        return body(body(query, keys[0]), keys[1])

    got, expected = (
        jax.jit(lambda q, v, looped=looped: jax.vjp(partial(layers, looped=looped), q, v)[1](dy))(query, value)
        for looped in (True, False)
    )
    testing.assert_close(list(got), list(expected), BOUND)


# Neither two groups of heads nor one can be split over four devices.
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("constrained", [P("data", None, "model"), P(), P(("data", "model"))], ids=str)
def test_shards_draw_their_own_and_the_same_backward(groups, constrained, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)  # of the mesh, which has CPUs where there are few GPUs
    mesh = testing.mesh_of((2, 4), ("data", "model"))
    query, key, value, dy = inputs((4, groups, S, S, D), batch=8)
    specs = [P("data", None, "model"), P("data"), P("data")]
    options = Attention(D**-0.5, dropout=RATE, causal=True)

    def op(query, key, value):
        out = cudnn_flash.flash_attention(options, query, key, value, jax.random.key(0))
        return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, constrained))

    query, key, value = testing.shard(mesh, [query, key, value], specs)
    dy = testing.shard(mesh, [dy], [constrained])[0]
    with testing.on_mesh(mesh):
        out, grads = step(op, query, key, value, dy)
        kept = kept_by(op, query, key)
    seen = np.broadcast_to(np.tri(S, dtype=bool), kept.shape)
    drawn = kept.reshape(2, 4, 4, S, S)[..., S // 2 :, : S // 2]  # [data, a part of the batch, model, ..]
    for a, b in ((drawn[0], drawn[1]), (drawn[:, :, 0], drawn[:, :, 1])):
        assert 0.3 < (a != b).mean() < 0.45
    testing.assert_close((out, grads), under_mask(options, seen, kept, query, key, value, dy), BOUND)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["kept", "remat"])
@pytest.mark.parametrize("specs", [("data", "model"), ("data",), (("data", "model"),)], ids=str)
def test_both_passes_are_sharded_alike(specs, wrap, monkeypatch):
    """Whatever queries and results are sharded over. The output is linear in values: <out, dy> = <value, dvalue>."""
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    mesh = testing.mesh_of((2, 4), ("data", "model"))
    options = Attention(D**-0.5, dropout=RATE, causal=True)
    query, key, value, dy = (x.astype(jnp.float32) for x in inputs((4, 4, 16, 16, 16), batch=8))
    result = P("data", None, "model")

    @wrap
    def op(query, key, value):
        out = cudnn_flash.flash_attention(options, query, key, value, jax.random.key(0))
        return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, result))

    if mesh.devices.flat[0].platform == "gpu":
        query, key, value, dy = (x.astype(jnp.bfloat16) for x in (query, key, value, dy))
    sharded = testing.shard(mesh, [query, key, value, dy], [P(*specs), P("data"), P("data"), result])
    with testing.on_mesh(mesh):
        out, (_, _, dvalue) = step(op, *sharded)
    dot = lambda a, b: np.vdot(np.asarray(a, np.float64), np.asarray(b, np.float64))
    np.testing.assert_allclose(dot(out, dy), dot(value, dvalue), rtol=BOUND)


# --- The choice, and the handlers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, fields, call, why",
    [
        ((H, H, S, S, 136), {}, {}, "with dropout, cuDNN needs head sizes up to 128, not 136"),
        ((H, H, 1, 1, D), {}, {}, "cuDNN needs more than one query or key"),
        ((H, H, S, S, D), {"bottom_right": True, "causal": True}, {}, "has all that is asked for"),
        ((H, H, S, S, D), {"window": (3, 3)}, {}, "with dropout, cuDNN is given no masks"),
        ((H, H, S, S, D), {"softmax_type": "off_by_one"}, {}, "with dropout, cuDNN is given no masks"),
        ((H, H, S, S, D), {}, {"bias": jnp.zeros((1, 1, S, S))}, "with dropout, cuDNN is given no masks"),
    ],
)  # fmt: skip
def test_the_choice_names_its_reason(sizes, fields, call, why, monkeypatch):
    monkeypatch.setattr(backends, "most_head_size", lambda: 256)
    options = Attention(1.0, dropout=RATE, **fields)
    backend, reason = attention_backend(options, *inputs(sizes)[:3], dropout_key=jax.random.key(0), **call)
    assert why in reason and backend == ("cudnn" if why.startswith("has") else "reference")


def test_a_build_without_cudnn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(HANDLERS, "CUDA", {"te_gemm": {}})
    monkeypatch.setattr(backends, "missing", flash.missing)
    options = Attention(1.0, dropout=RATE)
    backend, why = attention_backend(options, *inputs((H, H, S, S, D))[:3], dropout_key=jax.random.key(0))
    assert backend == "reference" and "pip install --no-deps nvidia-cudnn-cu13 nvidia-cudnn-frontend" in why
    if jax.default_backend() != "gpu":
        monkeypatch.delitem(HANDLERS, "CUDA")
        assert "without its CUDA module" in support.report()


def test_lowered_for_cuda_needs_no_gpu():
    query, key, value, dy = inputs((H, 2, S, S, D))
    text = jax.jit(partial(step, the_op(D, {}))).trace(query, key, value, dy).lower(lowering_platforms=("cuda",))
    assert "te_attention_fwd" in text.as_text() and "te_attention_bwd" in text.as_text()


FORWARD = dict(
    scale=np.float32(1.0), dropout=np.float32(0.5), causal=False, left=np.int64(-1), buffers=np.zeros(0, np.int64)
)
MALFORMED = {
    "dtype": (dict(q=jnp.zeros((B, S, 1, H, D))), {}, r"te_attention_fwd: q: expected bf16 or f16, got f32\[2,64,1,4"),
    "rank": (dict(k=jnp.zeros((B, S, D), jnp.bfloat16)), {}, r"te_attention_fwd: k: expected \[B, K, G, D\]"),
    "shape": (dict(v=jnp.zeros((B, 9, 1, D), jnp.bfloat16)), {}, r"v: expected \[2,64,1,64\], got bf16\[2,9,1,64\]"),
    "seed": (dict(seed=jnp.zeros(4)), {}, r"te_attention_fwd: seed: expected u32\[4\], got f32\[4\]"),
    "lengths": (dict(q_len=jnp.ones(B, jnp.int32)), {}, r"te_attention_fwd: k_len: expected given where q_len is"),
    "rate": ({}, dict(dropout=np.float32(1.0)), r"te_attention_fwd: dropout: expected a rate in \[0, 1\), got 1"),
    "window": ({}, dict(left=np.int64(3)), r"te_attention_fwd: left: expected a window only where causal"),
}


if jax.default_backend() == "gpu":  # elsewhere there is no handler

    @pytest.mark.parametrize("case", MALFORMED)
    def test_malformed_calls_raise(case):
        replaced, attributes, message = MALFORMED[case]
        kv, absent = jnp.zeros((B, S, 1, D), jnp.bfloat16), jnp.zeros(0)
        q = jnp.zeros((B, S, 1, H, D), jnp.bfloat16)
        operands = dict(q=q, k=kv, v=kv, seed=jnp.zeros(4, jnp.uint32), q_len=absent, k_len=absent) | replaced
        results = [
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B, 1, H, S), jnp.float32),
            jax.ShapeDtypeStruct((32 << 20,), jnp.uint8),
        ]
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(
                jax.ffi.ffi_call("te_attention_fwd", results)(*operands.values(), **(FORWARD | attributes))
            )
