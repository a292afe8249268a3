"""jax.export: forward and training step stored for CPU and CUDA, read back, and run here."""

import emulated
import jax
import jax.numpy as jnp
import optax
import pytest
import steps
from jax import export
from jax.experimental import serialize_executable
from jax.sharding import PartitionSpec as P
from steps import CURRENT, DELAYED

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.flax import STATE_COLLECTION, LayerNormMLP, TransformerLayer
from transformer_engine_jax.ops import product

pytest.importorskip("flatbuffers", reason="what jax.export writes with")

(X,) = (jnp.asarray(a) for a in emulated.normal(0, (4, 8, 16)))
MODULE = LayerNormMLP(intermediate_dim=32, use_bias=True, activations=("silu", "linear"))


def forward(variables, x):
    return MODULE.apply(variables, x)[0]


def train(variables, x):
    """A step of SGD: the loss, and the variables after it, FP8 states among them."""
    loss, grads = jax.value_and_grad(lambda v: jnp.mean((forward(v, x) - jnp.sin(x)) ** 2))(variables)
    params = optax.apply_updates(variables["params"], jax.tree.map(lambda g: -0.1 * g, grads["params"]))
    return loss, {**variables, **{k: g for k, g in grads.items() if k == STATE_COLLECTION}, "params": params}


def stored(f, platforms, *args) -> export.Exported:
    made = export.export(jax.jit(f), platforms=platforms, disabled_checks=te.export_checks())(*args)
    return export.deserialize(made.serialize())


@pytest.mark.parametrize("f", [forward, train])
@pytest.mark.parametrize("rec", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_is_stored_for_cpu_and_cuda_and_runs_here(f, rec):
    variables = steps.randomized(steps.init(MODULE, X, rec=rec))
    with steps.autocast(rec):
        read = stored(f, ["cpu", "cuda"], variables, X)
        expected = jax.jit(f)(variables, X)
    assert read.platforms == ("cpu", "cuda") and "te_gemm" in read.mlir_module()
    # What was stored is the step in FP8: the context is not needed any more.
    testing.assert_close(jax.jit(read.call)(variables, X), expected, emulated.FLIP)
    assert read.mlir_module().count("@te_gemm") % (2 if f is forward else 6) == 0


def test_is_stored_for_a_machine_that_is_not_here():
    variables = steps.init(MODULE, X, rec=DELAYED)
    with steps.autocast(DELAYED):
        read = stored(train, ["cuda"], variables, X)
    assert read.platforms == ("cuda",) and read.mlir_module().count("@te_gemm") == 6
    if testing.platforms() == ["cpu"]:
        with pytest.raises(ValueError, match="cuda"):
            read.call(variables, X)


def test_explicit_state():
    state = te.GemmState.create(DELAYED)
    kernel = jnp.ones((16, 32))

    def step(x, state):
        f = lambda s: te.fp8_dot_general(x, kernel, (((1,), (0,)), ((), ())), s, recipe=DELAYED).sum()
        return jax.value_and_grad(f)(state)

    here = ["cuda" if platform == "gpu" else platform for platform in testing.platforms()]
    read = stored(step, here, X[0], state)
    testing.assert_close(read.call(X[0], state), jax.jit(step)(X[0], state), emulated.F32)


TYPES = [
    te.AttentionState.create(DELAYED),
    te.GemmState.create(DELAYED).x,
    te.SequenceDescriptor.from_seqlens(jnp.array([3, 8])),
    te.SequenceDescriptor.from_segment_ids_and_pos(jnp.ones((2, 8), jnp.int32), max_segments=2),
    te.Accumulating(jnp.ones((2, 4)), jnp.zeros((2, 4))),
    te.Quantized(jnp.ones((2, 4)), None, jnp.float32(1)),
]


@pytest.mark.parametrize("value", TYPES, ids=type)
def test_types_that_functions_take_and_return_are_stored(value):
    got = stored(lambda x: x, [jax.default_backend().replace("gpu", "cuda")], value).call(value)
    assert jax.tree.structure(got) == jax.tree.structure(value)
    testing.assert_same_bytes(got, value)


def test_without_the_checks_jax_says_which_handlers():
    variables = steps.init(MODULE, X, rec=DELAYED)
    with steps.autocast(DELAYED), pytest.raises(ValueError, match="te_"):
        export.export(jax.jit(forward), platforms=["cpu"])(variables, X)


@pytest.mark.parametrize("rec", [None, DELAYED, CURRENT], ids=["f32", "delayed", "current"])
def test_any_batch(rec):
    """A batch that only the caller knows."""
    layer = TransformerLayer(hidden_size=16, mlp_hidden_size=32, num_attention_heads=2)
    variables = steps.init(layer, X, rec=rec)
    (batch,) = export.symbolic_shape("b")
    with steps.autocast(rec):
        run = jax.jit(lambda v, x: layer.apply(v, x, deterministic=True))
        read = stored(run, ["cpu", "cuda"], variables, jax.ShapeDtypeStruct((batch, *X.shape[1:]), X.dtype))
        expected = run(variables, X[:3])
    testing.assert_close(read.call(variables, X[:3]), expected, emulated.FLIP)


@pytest.mark.parametrize("axis", ["batch", "length"])
@pytest.mark.parametrize("rec", [None, DELAYED, CURRENT], ids=["f32", "delayed", "current"])
def test_a_training_step_of_any_size(rec, axis, monkeypatch):
    """On one device, where the order of gradients depends on sizes that are known."""
    monkeypatch.setattr(product, "devices", lambda: 1)
    variables = steps.randomized(steps.init(MODULE, X, rec=rec))
    (n,) = export.symbolic_shape("n")
    shape = (n, *X.shape[1:]) if axis == "batch" else (X.shape[0], n, X.shape[2])
    with steps.autocast(rec):
        read = stored(train, ["cpu", "cuda"], variables, jax.ShapeDtypeStruct(shape, X.dtype))
        x = X[:3] if axis == "batch" else X[:, :3]
        expected = jax.jit(train)(variables, x)
    testing.assert_close(read.call(variables, x), expected, emulated.FLIP)


def test_any_length():
    """Of sequences, whose relative positions are a bias of the attention."""
    layer = TransformerLayer(hidden_size=16, mlp_hidden_size=32, num_attention_heads=2, enable_rotary_pos_emb=True)
    variables = steps.randomized(steps.init(layer, X))
    (length,) = export.symbolic_shape("t")
    run = jax.jit(lambda v, x: layer.apply(v, x, deterministic=True))
    read = stored(run, ["cpu", "cuda"], variables, jax.ShapeDtypeStruct((len(X), length, X.shape[2]), X.dtype))
    for n in (1, 3, X.shape[1]):
        testing.assert_close(read.call(variables, X[:, :n]), run(variables, X[:, :n]), emulated.F32)


@pytest.mark.parametrize("explicit", [False, True])
def test_compiled_steps_of_a_mesh_are_serialized(explicit):
    """As a program is that was compiled ahead of the run, on other machines."""
    mesh = testing.mesh_of((2, 2), ("data", "model"), explicit=explicit)
    resource = te.MeshResource(dp_resource="data", tp_resource="model")
    with testing.on_mesh(mesh), te.autocast(True, DELAYED, resource):
        variables = steps.place(mesh, MODULE.init(jax.random.key(0), X), resource)
        x = testing.shard(mesh, X, P("data"))
        compiled = jax.jit(train).lower(variables, x).compile()
        read = serialize_executable.deserialize_and_load(
            *serialize_executable.serialize(compiled),
            backend=mesh.devices.flat[0].platform,
            execution_devices=list(mesh.devices.flat),
        )
        testing.assert_same_bytes(read(variables, x), compiled(variables, x))
