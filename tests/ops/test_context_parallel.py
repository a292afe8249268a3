"""Context parallelism: the same attention, gradients included, with the sequence sharded over a mesh axis."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import F32
from jax.sharding import PartitionSpec as P

from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import (
    Attention,
    ContextParallel,
    SequenceDescriptor,
    backends,
    dot_product_attention,
    inverse_reorder_causal_load_balancing,
    reference,
    reorder_causal_load_balancing,
)
from transformer_engine_jax.ops.attention.sequences import places, runs

B, S, H, G, D, DV = 2, 32, 4, 2, 16, 8
QKV = emulated.normal(0, (B, S, H, D), (B, S, G, D), (B, S, G, DV))
(DY, BIAS, ROW_BIAS, OFFSET) = emulated.normal(1, (B, S, H, DV), (1, H, S, S), (1, 1, 1, S), H)
MASK = np.random.default_rng(0).random((B, 1, S, S)) < 0.3
IDS = np.array([[1] * 20 + [2] * 9 + [0] * 3, [1] * 3 + [0] * 4 + [5] * 25])
POSITIONS = np.array([[*range(20), *range(9), *range(3)], [*range(3), *range(4), *range(25)]])
# Options and arguments of the op
CASES = {
    "all": (dict(), dict()),
    "causal": (dict(causal=True), dict()),
    "window": (dict(causal=True, window=(5, 0)), dict()),
    "packed": (dict(causal=True), dict(sequence_descriptor=SequenceDescriptor.from_segment_ids_and_pos(IDS))),
    "mask": (dict(causal=True), dict(mask=MASK)),
    "bias": (dict(), dict(bias=BIAS)),
    "bias of keys, bottom right": (dict(causal=True, bottom_right=True), dict(bias=ROW_BIAS)),
    "learnable": (dict(causal=True, softmax_type="learnable"), dict(softmax_offset=OFFSET)),
    "off by one": (dict(softmax_type="off_by_one"), dict()),
    "score_mod": (dict(causal=True, score_mod=lambda s, q, k: s + 0.1 * jnp.sin(q - k)), dict()),
}
STRATEGIES = pytest.mark.parametrize("strategy", ["ALL_GATHER", "RING"])


def step(options, parallel, qkv, dy, arguments):
    """Output, and gradients of queries, keys, values, and of the bias or the offset."""
    traced = {name: x for name, x in arguments.items() if name in ("bias", "softmax_offset")}

    @jax.jit
    def run(qkv, dy, traced):
        def op(qkv, traced):
            return dot_product_attention(*qkv, options=options, context_parallel=parallel, **{**arguments, **traced})

        y, vjp = jax.vjp(op, qkv, traced)
        return y, vjp(dy)

    return jax.device_get(run(qkv, dy, traced))


def on_mesh(run, *, explicit=False):
    mesh = testing.mesh_of((2, 4), ("data", "cp"), explicit=explicit)
    *qkv, dy = testing.shard(mesh, [*QKV, DY], [P("data", "cp")] * 4)
    with testing.on_mesh(mesh):
        return run(tuple(qkv), dy)


@STRATEGIES
@pytest.mark.parametrize("case", CASES)
def test_sharded_is_whole(case, strategy):
    fields, arguments = CASES[case]
    options = Attention(0.3, **fields)
    arguments = jax.tree.map(jnp.asarray, arguments)
    parallel = ContextParallel("cp", strategy)
    got = on_mesh(lambda qkv, dy: step(options, parallel, qkv, dy, arguments))
    testing.assert_close(got, step(options, None, tuple(QKV), DY, arguments), F32)


@STRATEGIES
@pytest.mark.parametrize("shape", [(2, 4, 1), (1, 2, 4)])  # four devices for two groups; one
@pytest.mark.parametrize("case", ["causal", "packed", "mask", "bias", "learnable"])
def test_explicit_axes(case, shape, strategy):
    fields, arguments = CASES[case]
    options, arguments = Attention(0.3, **fields), jax.tree.map(jnp.asarray, arguments)
    mesh = testing.mesh_of(shape, ("data", "cp", "model"), explicit=True)
    of_heads, of_groups = P("data", "cp", "model"), P("data", "cp")
    *qkv, dy = testing.shard(mesh, [*QKV, DY], [of_heads, of_groups, of_groups, of_heads])
    with testing.on_mesh(mesh):
        got = step(options, ContextParallel("cp", strategy), tuple(qkv), dy, arguments)
    testing.assert_close(got, step(options, None, tuple(QKV), DY, arguments), F32)


@pytest.mark.parametrize("strategy", [None, "ALL_GATHER", "RING"])
def test_one_example_and_one_group_over_explicit_axes_of_one_device(strategy):
    query, key, value, dy = QKV[0][:1], QKV[1][:1, :, :1], QKV[2][:1, :, :1], DY[:1]
    options, parallel = Attention(0.3, causal=True), strategy and ContextParallel("cp", strategy)
    mesh = testing.mesh_of((1, 2, 1), ("data", "cp", "model"), explicit=True)
    sequence = "cp" if strategy else None
    of_heads, of_groups = P("data", sequence, "model"), P("data", sequence)
    *qkv, cotangent = testing.shard(mesh, [query, key, value, dy], [of_heads, of_groups, of_groups, of_heads])
    with testing.on_mesh(mesh):
        got = step(options, parallel, tuple(qkv), cotangent, {})
    testing.assert_close(got, step(options, None, (query, key, value), dy, {}), F32)


@STRATEGIES
@pytest.mark.parametrize("case", ["all", "bias", "bias of keys, bottom right", "learnable"])
def test_in_16_bits(case, strategy):
    """Gradients too, of which XLA for CPUs can't sum all over some axes of a mesh: such a sum would end the process."""
    narrow = lambda x: jnp.asarray(x, jnp.bfloat16)
    options, arguments = Attention(0.3, **CASES[case][0]), jax.tree.map(narrow, CASES[case][1])
    qkv, dy = [narrow(x) for x in QKV], narrow(DY)
    expected = step(options, None, tuple(qkv), dy, arguments)
    mesh = testing.mesh_of((2, 4), ("data", "cp"))
    *qkv, dy = testing.shard(mesh, [*qkv, dy], [P("data", "cp")] * 4)
    with testing.on_mesh(mesh):
        got = step(options, ContextParallel("cp", strategy), tuple(qkv), dy, arguments)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
    testing.assert_close(got, expected, 2 * testing.epsilon(jnp.bfloat16))


@STRATEGIES
@pytest.mark.parametrize("explicit, check", [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("case", ["causal", "packed", "bias", "learnable"])
def test_among_manual_axes(case, explicit, check, strategy):
    """With gradients taken inside of the shard_map, and outside."""
    fields, arguments = CASES[case]
    options, arguments = Attention(0.3, **fields), jax.tree.map(jnp.asarray, arguments)
    parallel = ContextParallel("cp", strategy)
    (traced, like), mesh = _traced(arguments), testing.mesh_of((2, 4), ("data", "cp"), explicit=explicit)
    rows = jax.tree.map(lambda x: P("data") if x.shape[0] == B else P(), arguments)
    over = dict(axis_names={"data"}, check_vma=check)

    def op(qkv, traced, arguments):
        arguments = {**arguments, **traced}
        return dot_product_attention(*qkv, options=options, context_parallel=parallel, **arguments)

    @jax.jit
    def inside(qkv, dy, traced, arguments):
        def local(qkv, dy, traced, arguments):
            y, vjp = jax.vjp(lambda *args: op(*args, arguments), qkv, traced)
            of_qkv, of_traced = vjp(dy)
            return y, (of_qkv, of_traced if check else jax.lax.psum(of_traced, "data"))

        specs = P("data"), P("data"), like, rows
        return jax.shard_map(local, in_specs=specs, out_specs=(P("data"), (P("data"), like)), **over)(
            qkv, dy, traced, arguments
        )

    @jax.jit
    def outside(qkv, dy, traced, arguments):
        run = jax.shard_map(op, in_specs=(P("data"), like, rows), out_specs=P("data"), **over)
        y, vjp = jax.vjp(lambda *args: run(*args, arguments), qkv, traced)
        return y, vjp(dy)

    *qkv, dy = testing.shard(mesh, [*QKV, DY], [P("data", "cp")] * 4)
    expected = step(options, None, tuple(QKV), DY, arguments)
    arguments = testing.shard(mesh, arguments, rows)
    with testing.on_mesh(mesh):
        for run in (inside, outside):
            testing.assert_close(jax.device_get(run(tuple(qkv), dy, traced, arguments)), expected, F32)


def _traced(arguments):
    traced = {name: x for name, x in arguments.items() if name in ("bias", "softmax_offset")}
    return traced, jax.tree.map(lambda _: P(), traced)


def test_an_axis_of_one_device_is_none():
    mesh = testing.mesh_of((2, 1), ("data", "cp"))
    options, (*qkv, dy) = Attention(0.3, causal=True), testing.shard(mesh, [*QKV, DY], [P("data")] * 4)
    parallel = ContextParallel("cp", load_balanced=True)
    with testing.on_mesh(mesh):
        got = step(options, parallel, tuple(qkv), dy, {})
        parts = str(
            jax.make_jaxpr(lambda *qkv: dot_product_attention(*qkv, options=options, context_parallel=parallel))(*qkv)
        )
    testing.assert_close(got, step(options, None, tuple(QKV), DY, {}), F32)
    assert "shard_map" not in parts


@pytest.mark.parametrize("fields", [dict(causal=True), dict(causal=True, bottom_right=True)])
@pytest.mark.parametrize("positions", [None, POSITIONS])
@pytest.mark.parametrize("shape", [(2, 4), (1, 1)])
def test_ids_may_be_sharded_as_tokens_are(shape, positions, fields):
    """Over explicit axes too, on which a row that is sharded can't be counted in."""
    mesh, options = testing.mesh_of(shape, ("data", "cp"), explicit=True), Attention(0.3, **fields)
    described = SequenceDescriptor.from_segment_ids_and_pos(IDS, positions, max_segments=3)
    arguments = dict(sequence_descriptor=described)
    given = (tuple(QKV), DY, jax.tree.map(jnp.asarray, arguments))
    with testing.on_mesh(mesh):
        qkv, dy, arguments = testing.shard(mesh, given, jax.tree.map(lambda _: P("data", "cp"), given))
        got = step(options, ContextParallel("cp"), qkv, dy, arguments)
    testing.assert_close(got, step(options, None, tuple(QKV), DY, given[2]), F32)


@pytest.mark.parametrize(
    "count", [lambda d: runs(d).kept, lambda d: places(d, S, S, Attention(1.0))], ids=["runs", "places"]
)
def test_sharded_ids_are_counted_in_whole_rows(count):
    """Of shards XLA sends sums on from device to device, and on GPUs counts by a loop over tokens."""
    mesh = testing.mesh_of((4,), ("cp",))
    (ids,) = testing.shard(mesh, [jnp.asarray(IDS)], [P(None, "cp")])
    with testing.on_mesh(mesh):
        described = SequenceDescriptor.from_segment_ids_and_pos(ids, max_segments=3)
        text = jax.jit(count, out_shardings=P()).lower(described).compile().as_text()
    assert "all-gather" in text and "collective-permute" not in text


def test_explicit_axes_are_reordered_outside_a_mesh():
    mesh = testing.mesh_of((2, 4), ("data", "cp"), explicit=True)
    (x,) = testing.shard(mesh, [QKV[0]], [P("data", "cp")])
    ordered = reorder_causal_load_balancing(x, cp_size=4)
    assert ordered.sharding.is_equivalent_to(x.sharding, x.ndim)
    testing.assert_same_bytes(jax.device_get(ordered), jax.device_get(reorder_causal_load_balancing(QKV[0], cp_size=4)))
    testing.assert_same_bytes(*jax.device_get((reorder_causal_load_balancing(x, cp_size=4, seq_dim=-3), ordered)))


LENGTHS = np.array([[20, 9], [32, 0]])
order, back = (partial(f, cp_size=4) for f in (reorder_causal_load_balancing, inverse_reorder_causal_load_balancing))


@STRATEGIES
@pytest.mark.parametrize(
    "fields, descriptor, stored",
    [
        (dict(causal=True), None, None),
        (dict(causal=True, window=(5, 0)), None, None),
        (dict(causal=True), SequenceDescriptor.from_seqlens(LENGTHS), None),
        (dict(causal=True, bottom_right=True), SequenceDescriptor.from_seqlens(LENGTHS[:, 0]), None),
        ({}, SequenceDescriptor.from_seqlens(LENGTHS), None),
        ({}, SequenceDescriptor.from_segment_ids_and_pos(IDS), SequenceDescriptor.from_segment_ids_and_pos(order(IDS))),
        (
            dict(causal=True),
            SequenceDescriptor.from_segment_ids_and_pos(IDS, POSITIONS),
            SequenceDescriptor.from_segment_ids_and_pos(order(IDS), order(POSITIONS)),
        ),
    ],
    ids=["causal", "window", "lengths", "lengths, bottom right", "lengths, all", "ids, all", "ids and positions"],
)
def test_balanced_order(fields, descriptor, stored, strategy):
    """Lengths are given as they are, ids and positions in the order of the tokens."""
    options = Attention(0.3, **fields)
    parallel = ContextParallel("cp", strategy, load_balanced=True)
    mesh = testing.mesh_of((2, 4), ("data", "cp"))
    *qkv, dy = testing.shard(mesh, [order(x) for x in (*QKV, DY)], [P("data", "cp")] * 4)
    with testing.on_mesh(mesh):
        got = step(options, parallel, tuple(qkv), dy, dict(sequence_descriptor=stored or descriptor))
    got = jax.tree.map(lambda x: back(x) if x.ndim == 4 else x, got)
    testing.assert_close(got, step(options, None, tuple(QKV), DY, dict(sequence_descriptor=descriptor)), F32)


@STRATEGIES
def test_bottom_right_counts_from_where_a_mask_ends_in_the_balanced_order(strategy):
    of_queries, of_keys = (np.array(lengths) for lengths in ([20, 32], [11, 25]))
    hidden = [np.arange(32) >= lengths[:, None] for lengths in (of_queries, of_keys)]
    mask = jnp.asarray(hidden[0][:, None, :, None] | hidden[1][:, None, None, :])
    stored, dy = order(order(mask, seq_dim=2), seq_dim=3), jnp.where(hidden[0][:, :, None, None], 0, DY)
    options, parallel = (
        Attention(0.3, causal=True, bottom_right=True),
        ContextParallel("cp", strategy, load_balanced=True),
    )
    with testing.on_mesh(testing.mesh_of((2, 4), ("data", "cp"))):
        got = step(options, parallel, tuple(map(order, QKV)), order(dy), dict(mask=stored))
    got = jax.tree.map(lambda x: back(x) if x.ndim == 4 else x, got)
    lengths = SequenceDescriptor.from_seqlens((of_queries, of_keys))
    testing.assert_close(got, step(options, None, tuple(QKV), dy, dict(sequence_descriptor=lengths)), F32)


def test_the_balanced_order():
    np.testing.assert_array_equal(
        order(jnp.arange(16), seq_dim=0), [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    )


def test_ids_alone_do_not_tell_positions_in_the_balanced_order():
    parallel, ids = ContextParallel("cp", load_balanced=True), SequenceDescriptor.from_segment_ids_and_pos(order(IDS))
    with testing.on_mesh(testing.mesh_of((2, 4), ("data", "cp"))):
        with pytest.raises(ValueError, match="load_balanced: .*expected segment_pos beside segment_ids"):
            step(Attention(0.3, causal=True), parallel, tuple(QKV), DY, dict(sequence_descriptor=ids))


def packed(ids, max_segments=None):
    return dict(sequence_descriptor=SequenceDescriptor.from_segment_ids_and_pos(ids, max_segments=max_segments))


@pytest.mark.parametrize(
    "dtype, fields, arguments, why",
    [
        (jnp.float32, {}, {}, "cuDNN needs bf16 or f16"),
        (jnp.bfloat16, dict(causal=True, window=(5, 0)), {}, "over 'cp' cuDNN has no windows"),
        (jnp.bfloat16, {}, dict(bias=BIAS), "over 'cp' cuDNN has no masks and biases"),
        (jnp.bfloat16, {}, dict(mask=MASK), "over 'cp' cuDNN has no masks and biases"),
        (jnp.bfloat16, {}, packed(IDS), "over 'cp' cuDNN is told of sequences by lengths, or by ids with max_segments"),
        (jnp.bfloat16, {}, dict(bias=BIAS, **packed(IDS, 3)), "over 'cp' cuDNN has no masks and biases"),
        (jnp.bfloat16, dict(causal=True, window=(5, 0)), packed(IDS, 3), "over 'cp' cuDNN has no windows"),
        (jnp.bfloat16, dict(window=(5, 5)), packed(IDS, 3), "over 'cp' cuDNN has no windows"),
        (jnp.bfloat16, dict(causal=True, bottom_right=True), packed(IDS, 3), "over 'cp' cuDNN counts from where"),
        (jnp.bfloat16, dict(causal=True), packed((IDS, IDS.copy()), 3), "over 'cp' cuDNN needs one array of ids"),
        (jnp.bfloat16, dict(dropout=0.1), dict(dropout_key=1), "with dropout, cuDNN is given whole sequences"),
    ],
)
def test_what_cudnn_cannot(monkeypatch, dtype, fields, arguments, why):
    monkeypatch.setattr(backends, "platform", lambda: "gpu")
    monkeypatch.setattr(backends, "packs", lambda: True)
    monkeypatch.setattr(backends, "missing", lambda: "")
    qkv = [x.astype(dtype) for x in (QKV[0], QKV[1], QKV[1])]
    backend = backends.attention_backend(
        Attention(0.3, **fields), *qkv, context_parallel=ContextParallel("cp"), **arguments
    )
    assert backend[0] == "reference" and why in backend[1]


def test_cudnn_needs_as_many_keys_as_queries_for_causality(monkeypatch):
    monkeypatch.setattr(backends, "platform", lambda: "gpu")
    query, key = jnp.zeros((B, S, H, D), jnp.bfloat16), jnp.zeros((B, 2 * S, H, D), jnp.bfloat16)
    for causal in (True, False):
        backend = backends.attention_backend(
            Attention(0.3, causal=causal), query, key, key, context_parallel=ContextParallel("cp")
        )
        assert backend[0] == ("reference" if causal else "cudnn")
        assert ("over 'cp' cuDNN needs as many keys as queries" in backend[1]) == causal


def test_dropout_is_that_of_the_whole():
    options = Attention(0.3, dropout=0.4)
    arguments = dict(dropout_key=jax.random.key(7))
    got = on_mesh(lambda qkv, dy: step(options, ContextParallel("cp"), qkv, dy, arguments))
    testing.assert_close(got, step(options, None, tuple(QKV), DY, arguments), F32)


@STRATEGIES
def test_in_blocks_of_queries(strategy, monkeypatch):
    options, parallel = Attention(0.3, causal=True), ContextParallel("cp", strategy)
    expected = step(options, None, tuple(QKV), DY, {})
    monkeypatch.setattr(reference, "LOGITS_PER_BLOCK", 1)
    monkeypatch.setattr(reference, "LEAST_ROWS", 3)
    testing.assert_close(on_mesh(lambda qkv, dy: step(options, parallel, qkv, dy, {})), expected, F32)


def test_what_crosses_the_devices():
    def text(strategy):
        def run(qkv, dy):
            op = partial(
                dot_product_attention, options=Attention(1.0), context_parallel=ContextParallel("cp", strategy)
            )
            return jax.jit(op).lower(*qkv).compile().as_text()

        return on_mesh(run)

    gathered, ring = text("DEFAULT"), text("RING")
    assert gathered.count("all-gather(") == 2 and "collective-permute(" not in gathered
    assert ring.count("collective-permute(") == 6 and "all-gather(" not in ring


@pytest.mark.parametrize(
    "parallel, fields, length, message",
    [
        (("model",), {}, S, r"expected an axis of the mesh in force .*got 'model'; the mesh has \['data', 'cp'\]"),
        (("cp", "TREE"), {}, S, r"context_parallel_strategy: expected one of .*got 'TREE'"),
        (("cp",), {}, 30, "query: expected a length of a multiple of 4, the size of 'cp', got 30"),
        (("cp", "RING", True), {}, 28, "expected a length of a multiple of 8, twice the devices, got 28"),
        (("cp", "RING"), {"dropout": 0.1}, S, "'RING' has no dropout; take 'ALL_GATHER'"),
    ],
)
def test_misuse(parallel, fields, length, message):
    x = jnp.zeros((2, length, 2, 8))
    call = partial(dot_product_attention, options=Attention(1.0, **fields), context_parallel=ContextParallel(*parallel))
    with testing.on_mesh(testing.mesh_of((2, 4), ("data", "cp"))), pytest.raises(ValueError, match=message):
        call(x, x, x, dropout_key=jax.random.key(0))


def test_each_device_has_as_many_keys():
    parallel, (query, key) = ContextParallel("cp"), (jnp.zeros((2, n, 2, 8)) for n in (S, 30))
    with testing.on_mesh(testing.mesh_of((2, 4), ("data", "cp"))):
        with pytest.raises(ValueError, match="key: expected a length of a multiple of 4, the size of 'cp', got 30"):
            dot_product_attention(query, key, key, options=Attention(1.0), context_parallel=parallel)


def test_an_axis_that_is_manual_shards_no_more():
    def attend(x):
        return dot_product_attention(x, x, x, options=Attention(1.0), context_parallel=ContextParallel("cp"))

    x = jnp.zeros((2, S, 2, 8))
    with testing.on_mesh(testing.mesh_of((2, 4), ("data", "cp"))):
        with pytest.raises(
            ValueError, match="context_parallel_axis: expected an axis .* outside any shard_map over it"
        ):
            jax.eval_shape(jax.shard_map(attend, in_specs=P(None, "cp"), out_specs=P(None, "cp")), x)


def test_a_reordering_over_no_devices_says_so():
    with pytest.raises(ValueError, match="cp_size: expected how many devices share a sequence, 1 or more, got 0"):
        reorder_causal_load_balancing(QKV[0], cp_size=0)
    for f in (reorder_causal_load_balancing, inverse_reorder_causal_load_balancing):
        with pytest.raises(ValueError, match=r"seq_dim: expected an axis of x\[2, 32, .*\], got 9"):
            f(QKV[0], cp_size=2, seq_dim=9)
