"""Attention by cuDNN on explicit mesh axes is that of one device; of all that cuDNN can be told.

The choices are those of a Hopper GPU: our kernels run by their references, where there is none, and JAX's call of cuDNN
by its plain JAX.
"""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_stand_in import replace_cudnn
from emulated import BF16
from hopper import choose_as_on_hopper
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import (
    Attention,
    SequenceDescriptor,
    attention_backend,
    dot_product_attention,
    flash,
    flash_packed,
)

B, S, H, D = 4, 16, 8, 16
LENGTHS = SequenceDescriptor.from_seqlens(np.array([16, 5, 3, 9]))
IDS = np.array([[1] * 5 + [2] * 7 + [0] * 4, [1] * 16, [3] * 3 + [0] * 9 + [4] * 4, [0] * 16])
PACKED = SequenceDescriptor.from_segment_ids_and_pos(IDS, max_segments=2)
BIAS, ROW_BIAS, OFFSET = emulated.normal(3, (1, H, S, S), (B, 1, 1, S), H)
MASK = np.random.default_rng(0).random((B, 1, S, S)) < 0.3
# Options and arguments of the op
CASES = {
    "causal": (dict(causal=True), dict()),
    "window": (dict(causal=True, window=(5, 0)), dict()),
    "lengths": (dict(causal=True), dict(sequence_descriptor=LENGTHS)),
    "packed": (dict(causal=True), dict(sequence_descriptor=PACKED)),
    "ids": (dict(causal=True), dict(sequence_descriptor=SequenceDescriptor.from_segment_ids_and_pos(IDS))),
    "mask": (dict(), dict(mask=MASK)),
    "bias of heads": (dict(causal=True), dict(bias=BIAS)),
    "bias of examples": (dict(), dict(bias=ROW_BIAS)),
    "off by one": (dict(causal=True, softmax_type="off_by_one"), dict()),
    "learnable": (dict(causal=True, softmax_type="learnable"), dict(softmax_offset=OFFSET)),
    "learnable, packed": (
        dict(causal=True, softmax_type="learnable"),
        dict(softmax_offset=OFFSET, sequence_descriptor=PACKED),
    ),
}
BOUND = 2 * BF16
SHARED = 4 * BF16  # gradients of biases and offsets: sums of devices' own, of which each is rounded
DATA, MODEL = 2, 4


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    choose_as_on_hopper(monkeypatch)
    monkeypatch.setattr(flash_packed, "missing", lambda: "")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    replace_cudnn(monkeypatch)


def inputs(groups: int):
    shapes = (B, S, H, D), (B, S, groups, D), (B, S, groups, D), (B, S, H, D)
    return [jnp.asarray(x, jnp.bfloat16) for x in emulated.normal(5, *shapes)]


def step(options, qkv, dy, arguments):
    """Output, and gradients of queries, keys, values, and of the bias or the offset."""
    traced = {name: x for name, x in arguments.items() if name in ("bias", "softmax_offset")}

    @jax.jit
    def run(qkv, dy, traced):
        def op(qkv, traced):
            return dot_product_attention(*qkv, options=options, **{**arguments, **traced})

        y, vjp = jax.vjp(op, qkv, traced)
        return y, vjp(dy)

    return run(qkv, dy, traced)


def specs_of(groups: int):
    """Of queries, keys, values and results: heads over MODEL devices where they divide."""
    queries, keys = P("data", None, "model"), P("data", None, "model" if groups % MODEL == 0 else None)
    return [queries, keys, keys, queries]


@pytest.mark.parametrize("groups", [8, 4, 2])
@pytest.mark.parametrize("case", CASES)
def test_sharded_is_unsharded(case, groups):
    fields, arguments = CASES[case]
    arguments = jax.tree.map(jnp.asarray, arguments)
    options, (*qkv, dy) = Attention(0.25, **fields), inputs(groups)
    mesh = testing.mesh_of((DATA, MODEL), ("data", "model"), explicit=True)
    with jax.default_device(mesh.devices.flat[0]):
        expected = jax.device_get(step(options, tuple(qkv), dy, arguments))
    *placed, placed_dy = testing.shard(mesh, [*qkv, dy], specs_of(groups))
    with testing.on_mesh(mesh):
        described = {name: x for name, x in arguments.items() if name != "softmax_offset"}
        assert attention_backend(options, *placed, **described)[0] == "cudnn"
        out, (grads, others) = step(options, tuple(placed), placed_dy, arguments)
        for x, spec in zip((*grads, out), specs_of(groups)):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    testing.assert_close(jax.device_get((out, grads)), (expected[0], expected[1][0]), BOUND)
    testing.assert_close(jax.device_get(others), expected[1][1], SHARED)


SPECS = [P("data", "model"), P(("data", "model")), P(None, None, ("model", "data")), P()]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_however_queries_are_sharded(spec):
    """Over tokens too, which attention then gathers; the result is sharded as they are."""
    batch = 8
    *qkv, dy = (jnp.concatenate([x, -x]) for x in inputs(H))
    options = Attention(0.25, causal=True)
    mesh = testing.mesh_of((DATA, MODEL), ("data", "model"), explicit=True)
    with jax.default_device(mesh.devices.flat[0]):
        expected = jax.device_get(step(options, tuple(qkv), dy, {}))
    with testing.on_mesh(mesh):
        *qkv, dy = testing.shard(mesh, [*qkv, dy], [spec, P(), P("data"), spec])
        out, grads = step(options, tuple(qkv), dy, {})
    assert out.shape[0] == batch and out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    testing.assert_close(jax.device_get((out, grads)), expected, BOUND)


OTHERS = {
    "bias of heads": (dict(bias=BIAS), P(None, "model")),
    "bias over the other axis": (dict(bias=BIAS), P(None, "data")),
    "mask": (dict(mask=MASK), P("data")),
    "learnable": (dict(softmax_offset=OFFSET), P("model")),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["plain", "cudnn"])
@pytest.mark.parametrize("spec", [P(), P("data"), P("data", None, "model")], ids=str)
@pytest.mark.parametrize("case", OTHERS)
def test_what_else_is_given_may_be_sharded_otherwise(case, spec, dtype):
    arguments, of_argument = OTHERS[case]
    arguments = jax.tree.map(jnp.asarray, arguments)
    options = Attention(0.25, softmax_type="learnable" if case == "learnable" else "vanilla")
    *qkv, dy = (x.astype(dtype) for x in inputs(H))
    mesh = testing.mesh_of((DATA, MODEL), ("data", "model"), explicit=True)
    with jax.default_device(mesh.devices.flat[0]):
        expected = jax.device_get(step(options, tuple(qkv), dy, arguments))
    with testing.on_mesh(mesh):
        *qkv, dy = testing.shard(mesh, [*qkv, dy], 4 * [spec])
        arguments = {name: testing.shard(mesh, x, of_argument) for name, x in arguments.items()}
        got = jax.device_get(step(options, tuple(qkv), dy, arguments))
    testing.assert_close(got, expected, SHARED if dtype == jnp.bfloat16 else 16 * testing.epsilon(dtype))


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("case", ["causal", "lengths", "packed", "ids", "learnable"])
def test_arrays_know_their_mesh(case, transform):
    """Where none is in force."""
    fields, arguments = CASES[case]
    arguments = jax.tree.map(jnp.asarray, arguments)
    options, (*qkv, _) = Attention(0.25, **fields), inputs(2)
    mesh = testing.mesh_of((DATA, MODEL), ("data", "model"), explicit=True)
    with jax.default_device(mesh.devices.flat[0]):
        run = transform(lambda *qkv: dot_product_attention(*qkv, options=options, **arguments))
        expected = jax.device_get(run(*qkv))
        got = run(*testing.shard(mesh, qkv, specs_of(2)[:3]))
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, specs_of(2)[3]), 4)
    testing.assert_close(jax.device_get(got), expected, BOUND)


def test_one_array_of_queries_keys_and_values():
    query, key, value, dy = inputs(H)
    qkv, options = jnp.stack([query, key, value], axis=2), Attention(0.25, causal=True)
    mesh = testing.mesh_of((DATA, MODEL), ("data", "model"), explicit=True)
    with jax.default_device(mesh.devices.flat[0]):
        expected = jax.device_get(step(options, (qkv,), dy, {}))
    with testing.on_mesh(mesh):
        qkv, dy = testing.shard(mesh, [qkv, dy], [P("data", None, None, "model"), P("data", None, "model")])
        assert "attention_qkv_fwd" in str(jax.make_jaxpr(partial(dot_product_attention, options=options))(qkv))
        got = jax.device_get(step(options, (qkv,), dy, {}))
    testing.assert_close(got, expected, BOUND)


@pytest.mark.parametrize("groups", [8, 2])
def test_shards_draw_their_own_and_the_same_backward(groups):
    """Each by the key with its number; gradients of values are those of one device under that mask."""
    options, key = Attention(0.25, dropout=0.3, causal=True), jax.random.key(7)
    *qkv, dy = inputs(groups)
    mesh = testing.mesh_of((DATA, MODEL), ("data", "model"), explicit=True)
    repeats = H // groups if groups % MODEL else 1
    parts = [[], []]
    for device in range(DATA * MODEL):
        data, model = divmod(device, MODEL)
        heads = slice(model * H // MODEL, (model + 1) * H // MODEL)
        query, *kv, do = (x[data * B // DATA : (data + 1) * B // DATA] for x in (*qkv, dy))
        kv = [jnp.repeat(x, repeats, axis=2) for x in kv]
        n = kv[0].shape[2] // MODEL
        kv = [x[:, :, model * n : (model + 1) * n] for x in kv]
        arguments = dict(dropout_key=jax.random.fold_in(key, device))
        with jax.default_device(mesh.devices.flat[0]):
            out, ((_, _, dvalue), _) = step(options, (query[:, :, heads], *kv), do[:, :, heads], arguments)
        parts[0].append(out)
        parts[1].append(dvalue)
    whole = [jnp.concatenate([jnp.concatenate(p[i : i + MODEL], 2) for i in (0, MODEL)]) for p in parts]
    if repeats > 1:
        whole[1] = whole[1].astype(jnp.float32).reshape(B, S, groups, repeats, D).sum(3)
    *placed, placed_dy = testing.shard(mesh, [*qkv, dy], specs_of(groups))
    with testing.on_mesh(mesh):
        out, ((_, _, dvalue), _) = step(options, tuple(placed), placed_dy, dict(dropout_key=key))
    testing.assert_close(jax.device_get([out, dvalue]), jax.device_get(whole), BOUND)


def test_some_axes_are_the_compilers():
    options, (*qkv, dy) = Attention(0.25, causal=True), inputs(4)
    arguments = dict(sequence_descriptor=jax.tree.map(jnp.asarray, LENGTHS))
    explicit = testing.mesh_of((DATA, MODEL), ("data", "model"), explicit=True)
    mesh = jax.sharding.Mesh(explicit.devices, explicit.axis_names, axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.default_device(mesh.devices.flat[0]):
        expected = jax.device_get(step(options, tuple(qkv), dy, arguments))
    with testing.on_mesh(mesh):
        *qkv, dy = testing.shard(mesh, [*qkv, dy], specs_of(4))
        got = jax.device_get(step(options, tuple(qkv), dy, arguments))
    testing.assert_close(got, expected, BOUND)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("case", ["causal", "lengths", "mask", "bias of heads", "learnable"])
def test_among_manual_axes(case, groups, check_vma):
    """Of a user's shard_map, where the other axes are the compiler's: heads are where the rules say, if they divide."""
    fields, arguments = CASES[case]
    arguments = jax.tree.map(jnp.asarray, arguments)
    options, (*qkv, dy) = Attention(0.25, **fields), inputs(groups)
    mesh = testing.mesh_of((DATA, MODEL), ("data", "model"))
    with jax.default_device(mesh.devices.flat[0]):
        expected = jax.device_get(step(options, tuple(qkv), dy, arguments))[:2]
    rows = jax.tree.map(lambda x: P("data") if x.shape[0] == B else P(), arguments)

    def local(qkv, dy, arguments):
        out, (grads, others) = step(options, qkv, dy, arguments)
        return out, (grads, others if check_vma else jax.lax.psum(others, "data"))

    *qkv, dy = testing.shard(mesh, [*qkv, dy], specs_of(groups))
    with testing.on_mesh(mesh), te.autocast(mesh_resource=te.MeshResource(tp_resource="model")):
        traced = {name: P() for name in ("bias", "softmax_offset") if name in arguments}
        specs = dict(in_specs=(P("data"), P("data"), rows), out_specs=(P("data"), (P("data"), traced)))
        run = jax.jit(jax.shard_map(local, axis_names={"data"}, check_vma=check_vma, **specs))
        compiled = run.lower(tuple(qkv), dy, arguments).compile()
        got = compiled(tuple(qkv), dy, arguments)
    testing.assert_close(jax.device_get(got), expected, SHARED)
    heads = H // MODEL if groups % MODEL == 0 else H
    assert f"bf16[{B // DATA},{S},{heads},{D}]" in compiled.as_text()


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.vmap, "scan"], ids=["remat", "vmap", "scan"])
def test_transforms(wrap):
    options, (*qkv, dy) = Attention(0.25, causal=True), inputs(4)
    mesh = testing.mesh_of((DATA, MODEL), ("data", "model"), explicit=True)
    with jax.default_device(mesh.devices.flat[0]):
        expected = jax.device_get(step(options, tuple(qkv), dy, {}))
    op = lambda *qkv: dot_product_attention(*qkv, options=options)

    @jax.jit
    def run(dy, *qkv):
        if wrap is jax.vmap:
            out, vjp = jax.vjp(jax.vmap(op), *[jnp.stack([x, -x]) for x in qkv])
            return jax.tree.map(lambda x: x[0], (out, vjp(jnp.stack([dy, -dy]))))
        if wrap == "scan":
            scanned = lambda *qkv: jax.lax.scan(lambda c, _: (c, op(*qkv)), 0, None, length=1)[1][0]
            out, vjp = jax.vjp(scanned, *qkv)
            return out, vjp(dy)
        out, vjp = jax.vjp(wrap(op), *qkv)
        return out, vjp(dy)

    with testing.on_mesh(mesh):
        *qkv, dy = testing.shard(mesh, [*qkv, dy], specs_of(4))
        got = jax.device_get(run(dy, *qkv))
    testing.assert_close(got, (expected[0], expected[1][0]), BOUND)


@pytest.mark.parametrize("manual, repeats", [({"data", "model"}, 1), ({"data"}, 2)], ids=["all", "some"])
def test_groups_are_repeated_only_where_the_compiler_may_shard_them(manual, repeats):
    """Two groups of keys do not divide over the four devices along "model", unless that axis is manual."""
    mesh, seen = testing.mesh_of((DATA, MODEL), ("data", "model")), []

    def attend(query, key):
        seen.append(flash.Flash.of(Attention(0.25), query, key).repeats)
        return query

    query, key = jnp.zeros((B, S, 4, D)), jnp.zeros((B, S, 2, D))
    with testing.on_mesh(mesh):
        jax.eval_shape(jax.shard_map(attend, in_specs=P("data"), out_specs=P("data"), axis_names=manual), query, key)
    assert seen == [repeats]
