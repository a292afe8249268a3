"""The mechanism: one declaration holds under every transformation, on every kind of mesh, and on bad input."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.sharding_impls import GSPMDSharding
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
from transformer_engine_jax import partition, testing
from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.handlers import HANDLERS
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.activation import activation_fwd
from transformer_engine_jax.ops.layernorm import layernorm_fwd, rmsnorm_fwd
from transformer_engine_jax.ops.quantize import E4M3, amax, dequantize, quantize
from transformer_engine_jax.ops.state import Scaling
from transformer_engine_jax.primitive import kernel_p

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (8, 4, 64))
SCALE = jnp.float32(37.0)
G = jnp.linspace(0.5, 1.5, 64)


def quantized(x):
    return quantize(x, SCALE, dtype=E4M3, q_t=True)


# --- Declarations ----------------------------------------------------------------------------------------------------


def test_a_rule_that_does_not_fit_the_signature_is_refused():
    with pytest.raises(TypeError, match=r"does not name \['x', 'y'\]"):

        @kernel("... -> ...")
        def wrong(x, y) -> Any:
            return x


def test_aliases_of_an_unknown_result_are_refused():
    with pytest.raises(TypeError, match=r"unknown buffers \['y'\]"):

        @kernel("... -> ...", aliases={"x": "y"})
        def wrong(x, *, in_place=False) -> Any:
            return x


def test_reduce_of_an_unknown_result_is_refused():
    with pytest.raises(TypeError, match=r"unknown buffers \['y'\]"):

        @kernel("... -> ...", reduce={"y": "max"})
        def wrong(x) -> Any:
            return x


@pytest.mark.parametrize(
    "call",
    [
        lambda: quantize(X, SCALE, dtype=E4M3, k_axes=2, q_t=True, colsum=True),
        lambda: quantize(X, SCALE, dtype=E4M3, amax=False, report=True),
        lambda: rmsnorm_fwd(X, G, SCALE, epsilon=1e-6, dtype=E4M3, y_t=True, amax=True, scale_inv=True),
        lambda: layernorm_fwd(X, G, G, SCALE, epsilon=1e-6, dtype=E4M3, y_t=True, amax=True),
        lambda: activation_fwd(X[:, :2], SCALE, activation="silu_linear", dtype=E4M3, y_t=True, report=True),
    ],
    ids=["quantize", "report", "rmsnorm", "layernorm", "activation"],
)
def test_optional_results_that_nobody_uses_are_not_made(call):
    """As in the forward pass of rematerialised layers, which keeps nothing for the backward pass."""
    traced, shapes = jax.make_jaxpr(call, return_shape=True)()
    names = [name for name, r in shapes._asdict().items() if r is not None]
    expected = [r for r in call() if r is not None]
    for used in itertools.product([True, False], repeat=len(names)):
        if not any(used):
            continue
        less, _ = partial_eval.dce_jaxpr(traced.jaxpr, list(used), instantiate=True)
        (eqn,) = [e for e in less.eqns if e.primitive is kernel_p]
        made = eqn.params["call"].result_shapes([v.aval for v in eqn.invars])
        unused = {name for name, use in zip(names, used) if not use} & eqn.params["call"].kernel.optional
        assert len(eqn.outvars) == sum(r is not None for r in made) == len(names) - len(unused)
        got = jax.core.eval_jaxpr(less, traced.consts)
        for one, other in zip(got, itertools.compress(expected, used), strict=True):
            testing.assert_same_bytes(one, other)


def test_unknown_and_missing_attributes_are_named():
    with pytest.raises(TypeError, match=r"quantize has no attribute \['colour'\]"):
        quantize(X, SCALE, dtype=E4M3, colour=1)
    with pytest.raises(TypeError, match="quantize needs the attribute dtype"):
        quantize(X, SCALE)
    with pytest.raises(TypeError, match="got 1 operands"):
        quantize(X, dtype=E4M3)


def test_a_rank_that_contradicts_the_rule_is_a_value_error():
    with pytest.raises(ValueError, match=r"quantize: .*scale: expected f32\[\], got float32\[64\]"):
        jax.jit(lambda s: quantize(X, s, dtype=E4M3))(jnp.ones((64,)))


# --- Transformations -------------------------------------------------------------------------------------------------


def test_every_transformation_gives_the_same_bytes():
    expected = quantized(X)
    testing.assert_same_bytes(jax.jit(quantized)(X), expected, "jit")
    testing.assert_same_bytes(jax.jit(jax.checkpoint(quantized))(X), expected, "remat")
    scanned = jax.lax.scan(lambda c, x: (c, quantized(x)), 0, jnp.stack([X, -X]))[1]
    testing.assert_same_bytes(jax.tree.map(lambda x: x[0], scanned), expected, "scan")
    testing.assert_same_bytes(jax.tree.map(lambda x: x[1], scanned), quantized(-X), "scan")


def test_vmap_keeps_one_amax_for_each_example():
    batch = jnp.stack([X, 2 * X, -3 * X])
    for axis in (0, 1, 3):
        out = jax.jit(jax.vmap(quantized, in_axes=axis))(jnp.moveaxis(batch, 0, axis))
        for i in range(3):
            testing.assert_same_bytes(jax.tree.map(lambda x: x[i], out), quantized(batch[i]), f"axis {axis}, {i}")


def test_vmap_without_a_reduction_is_one_call():
    q = quantized(X).q
    text = str(jax.make_jaxpr(jax.vmap(lambda q: dequantize(q, SCALE, dtype=jnp.float32)))(q))
    assert text.count("te_kernel") == 1 and "scan" not in text
    text = str(jax.make_jaxpr(jax.vmap(quantized))(X))
    assert "scan" in text  # an amax for each example: one call each


def test_vmap_of_a_vmap_and_of_an_unbatched_operand():
    both = jax.vmap(jax.vmap(lambda q: dequantize(q, SCALE, dtype=jnp.float32)))(quantized(X).q)
    testing.assert_same_bytes(both, dequantize(quantized(X).q, SCALE, dtype=jnp.float32))
    scales = jnp.arange(1.0, 4.0)
    out = jax.vmap(lambda s: quantize(X, s, dtype=E4M3).q)(scales)
    testing.assert_same_bytes(out[2], quantize(X, scales[2], dtype=E4M3).q)


def test_a_kernel_is_not_differentiable_by_itself():
    with pytest.raises(NotImplementedError, match="measure: expected to be differentiated inside an op"):
        jax.grad(lambda x: amax(x))(X)


def test_names_of_dtypes_and_numbers_of_python():
    expected = quantize(X, SCALE, dtype=E4M3)
    with jax.enable_x64(True):
        testing.assert_same_bytes(quantize(X, 37.0, dtype="float8_e4m3fn"), expected)
    with pytest.raises(ValueError, match="dtype: expected float8_e4m3fn or float8_e5m2, got bfloat16"):
        quantize(X, SCALE, dtype=jnp.bfloat16)


# --- Meshes ----------------------------------------------------------------------------------------------------------


def test_vmap_over_an_axis_that_explicit_mesh_axes_shard():
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=True)
    # Neither has a rule that takes one more axis for all calls: an amax of each, and parameters of all.
    with testing.on_mesh(mesh):
        x = testing.shard(mesh, X, P("data"))
        per_example = jax.jit(jax.vmap(lambda x: amax(x)))(x)
        grads = jax.jit(jax.vmap(jax.grad(lambda g, x: (te.rmsnorm(x, g) ** 2).sum()), in_axes=(None, 0)))(G, x)
    testing.assert_same_bytes(jax.device_get(per_example), np.abs(np.asarray(X)).max((1, 2)))
    expected = [jax.grad(lambda g, x=x: (te.rmsnorm(x, g) ** 2).sum())(G) for x in X]
    testing.assert_close(jax.device_get(grads), np.stack(expected), 1e-6)


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_explicit_arrays_know_their_mesh_where_none_is_in_force(transform):
    """Constants are put there, too."""
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=True)
    run = transform(lambda x: quantize(x, jnp.float32(16.0), dtype=E4M3).q)
    with jax.default_device(mesh.devices.flat[0]):
        (x,) = testing.shard(mesh, [X], [P("data")])
        testing.assert_same_bytes(jax.device_get(run(x)), jax.device_get(run(X)))


SPECS = {
    "rows": P("data", None, None),
    "columns": P(None, None, "model"),
    "rows and columns": P("data", None, "model"),
    "two mesh axes on one": P(("data", "model"), None, None),
    "not at all": P(),
}


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_sharded_equals_unsharded_without_resharding(spec, explicit):
    expected = quantize(X, SCALE, dtype=E4M3, q_t=True, colsum=True)
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    with testing.on_mesh(mesh):
        x = testing.shard(mesh, X, spec)
        run = jax.jit(lambda x: quantize(x, SCALE, dtype=E4M3, q_t=True, colsum=True))
        got, text = run(x), run.lower(x).compile().as_text()
    testing.assert_same_bytes(jax.device_get(got)[:3], jax.device_get(expected)[:3])
    testing.assert_close(got.colsum, expected.colsum, 1e-5)  # f32 sums in another order
    assert "all-gather" not in text and "all-to-all" not in text
    assert got.q.sharding.is_equivalent_to(x.sharding, 3)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_compilers_shardings_are_decoded(order):
    mesh = testing.mesh_of((2, 1, 4), ("data", "one", "model"))
    mesh = jax.sharding.Mesh(mesh.devices.ravel()[[0, 3, 2, 1, 7, 6, 5, 4]].reshape(2, 1, 4), mesh.axis_names)
    x = jax.ShapeDtypeStruct((8, 16, 32), jnp.float32)
    for entries in (("data", "model", None), (("data", "model"), None, None), (("model", "data"), None, None)):
        spec = P(*[entries[i] for i in order])
        of_compiler = NamedSharding(mesh, spec)._to_xla_hlo_sharding(3)
        sharding = GSPMDSharding(list(mesh.devices.flat), of_compiler)
        got = partition.decoded(x.update(sharding=sharding), mesh.shape)
        assert NamedSharding(mesh, got).is_equivalent_to(NamedSharding(mesh, spec), 3)


REWRITTEN = {
    "layernorm": lambda x: te.layernorm(x, G[:32], G[32:]),
    "softmax": te.softmax,
    "activation": lambda x: te.activation(x, ("silu", "linear")),
    "quantize": lambda x: quantized(x).q.astype(jnp.float32),
}


@pytest.mark.parametrize("op", REWRITTEN)
def test_a_mesh_axis_that_a_reshape_leaves_on_two_axes(op):
    """Features over 4 devices become two rows of features over 2 each, which no partition spec says."""

    def run(x, dy):
        op_of_rows = lambda x: REWRITTEN[op](x.reshape(*x.shape[:2], 2, 32)).reshape(*dy.shape)
        if op == "quantize":
            return op_of_rows(x)
        y, vjp = jax.vjp(op_of_rows, x)
        return y, vjp(dy)

    dy = jax.random.normal(jax.random.key(1), X.shape if op != "activation" else (8, 4, 32))
    expected = jax.device_get(jax.jit(run)(X, dy))
    mesh = testing.mesh_of((2, 4), ("data", "model"))
    with testing.on_mesh(mesh):
        got = jax.jit(run)(*testing.shard(mesh, (X, dy), (P("data", None, "model"), P("data", None, "model"))))
    testing.assert_close(jax.device_get(got), expected, 1e-6)


def test_a_nan_on_one_shard_reaches_the_amax_of_all():
    mesh = testing.mesh_of((8,), ("data",))
    with testing.on_mesh(mesh):
        x = testing.shard(mesh, X.at[3, 0, 0].set(jnp.nan), P("data"))
        assert np.isnan(jax.jit(amax)(x))


def test_inside_a_manual_shard_map():
    mesh = testing.mesh_of((4, 2), ("data", "model"))
    spec = P("data", None, "model")
    for check in (True, False):
        run = jax.shard_map(
            lambda x: quantize(x, SCALE, dtype=E4M3).q, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check
        )
        with testing.on_mesh(mesh):
            testing.assert_same_bytes(jax.device_get(jax.jit(run)(testing.shard(mesh, X, spec))), quantized(X).q)


@pytest.mark.parametrize("manual", [("data",), ("data", "rows")])
@pytest.mark.parametrize("names", [("data", "model", "rows"), ("model", "rows", "data"), ("model", "data", "rows")])
def test_inside_a_shard_map_over_some_axes(names, manual):
    """The others are the compiler's: shards of one stay where they are, and collectives are of its devices alone."""
    x = X * jnp.arange(1.0, 9.0)[:, None, None]  # so that amaxes differ
    each = lambda x: quantize(x, SCALE, dtype=E4M3, q_t=True, amax=True, colsum=True)
    rows, whole = 2 if "rows" in manual else 1, each(x)
    expected = [each(part) for half in jnp.split(x, 2) for part in jnp.split(half, rows, axis=1)]
    mesh = testing.mesh_of((2, 2, 2), names)
    mesh = jax.sharding.Mesh(mesh.devices.ravel()[[0, 3, 5, 1, 2, 7, 6, 4]].reshape(2, 2, 2), names)

    def local(x):
        out = each(jax.lax.with_sharding_constraint(x, P(None, None if rows > 1 else "rows", "model")))
        return out.q, out.q_t, out.amax[None], out.colsum[None]

    specs = dict(in_specs=P(*manual), out_specs=(P(*manual), P(None, *manual), P(manual), P(manual)))
    with testing.on_mesh(mesh):
        x = testing.shard(mesh, x, P("data", "rows", "model"))
        compiled = jax.jit(jax.shard_map(local, axis_names=set(manual), **specs)).lower(x).compile()
        q, q_t, amaxes, colsums = jax.device_get(compiled(x))
    testing.assert_same_bytes((q, q_t), jax.device_get((whole.q, whole.q_t)))
    testing.assert_same_bytes(amaxes, jnp.stack([e.amax for e in expected]))
    testing.assert_close(colsums, jnp.stack([e.colsum for e in expected]), 1e-5)  # f32 sums in another order
    assert rows == 1 or "all-gather" not in compiled.as_text()


class Doubled(NamedTuple):
    y: jax.Array


def test_gradients_of_replicated_arguments_are_summed_in_a_manual_shard_map():
    def forward(_, x, w):
        return x * w, (x, w)

    def backward(_, residuals, dy):
        x, w = residuals
        return dy * w, jnp.sum(dy * x)

    product = differentiable(forward, backward)
    mesh = testing.mesh_of((8,), ("data",))
    loss = jax.shard_map(
        lambda x, w: jax.lax.psum(jnp.sum(product(None, x, w)), "data"),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P(),
    )
    with testing.on_mesh(mesh):
        gradient = jax.jit(jax.grad(loss, argnums=1))(testing.shard(mesh, X, P("data")), jnp.float32(3.0))
    testing.assert_close(gradient, jnp.sum(X), 1e-5)


ABSENT = ((0,), jnp.float32)
FROM_SCALE = {k: np.float32(v) if isinstance(v, float) else v for k, v in Scaling()._asdict().items()}


# --- Malformed calls -------------------------------------------------------------------------------------------------


def call(target, results, *operands, **attributes):
    shapes = [jax.ShapeDtypeStruct(*r) for r in results]
    return jax.ffi.ffi_call(target, shapes)(*operands, **attributes)


Q = ((8, 4, 64), jnp.float8_e4m3fn)
QUANTIZE = {
    "columns beyond the rank": (
        [Q, ((64, 32), E4M3), ((), jnp.float32), ((64,), jnp.float32)],
        (X, SCALE),
        9,
        "at least 9 axes",
    ),
    "a negative split": ([Q, ((64, 32), E4M3), ((), jnp.float32), ((64,), jnp.float32)], (X, SCALE), -1, "axes"),
    "integers": (
        [Q, ((64, 32), E4M3), ((), jnp.float32), ((64,), jnp.float32)],
        (X.astype(jnp.int32), SCALE),
        1,
        "x: expected f32, f16 or bf16",
    ),
    "a vector of scales": (
        [Q, ((64, 32), E4M3), ((), jnp.float32), ((64,), jnp.float32)],
        (X, jnp.ones(3)),
        1,
        r"scale: expected f32\[\], got f32\[3\]",
    ),
    "a result that is too small": (
        [((8, 4, 63), E4M3), ((64, 32), E4M3), ((), jnp.float32), ((64,), jnp.float32)],
        (X, SCALE),
        1,
        "q: expected 32 x 64 elements",
    ),
    "two formats": (
        [Q, ((64, 32), jnp.float8_e5m2), ((), jnp.float32), ((64,), jnp.float32)],
        (X, SCALE),
        1,
        "q_t: expected f8_e4m3fn",
    ),
    "column sums in bf16": (
        [Q, ((64, 32), E4M3), ((), jnp.float32), ((64,), jnp.bfloat16)],
        (X, SCALE),
        1,
        "colsum: expected f32",
    ),
    "amax of rank 1": (
        [Q, ((64, 32), E4M3), ((2,), jnp.float32), ((64,), jnp.float32)],
        (X, SCALE),
        1,
        "amax: expected",
    ),
}


@pytest.mark.parametrize("results, operands, k_axes, message", QUANTIZE.values(), ids=QUANTIZE)
def test_malformed_calls_raise(results, operands, k_axes, message):
    for platform in testing.platforms():
        with jax.default_device(jax.devices(platform)[0]), pytest.raises(Exception, match=message):
            scratch = [((1 << 16,), jnp.uint8)] if platform == "gpu" else []
            attributes = {"k_axes": np.int64(k_axes), **FROM_SCALE}
            jax.block_until_ready(call("te_quantize", [*results, *2 * [ABSENT], *scratch], *operands, **attributes))


def test_wrong_numbers_of_buffers_and_attributes_raise():
    for target in sorted(HANDLERS["cpu"]):
        with pytest.raises(Exception, match="(?i)operand|argument|attribute|result"):
            jax.block_until_ready(call(target, [((1,), jnp.float32)] * 9, X))


def test_every_target_has_a_handler_on_every_platform():
    names = "fwd", "bwd", "fp8_fwd", "qkv_fwd", "qkv_bwd", "packed_fwd", "packed_bwd", "blank"
    of_cudnn = {f"te_attention_{name}" for name in names}  # else references
    for platform, targets in HANDLERS.items():
        on_gpus_alone = of_cudnn | {"te_transpose"}  # XLA's own will do on a CPU
        assert set(targets) - on_gpus_alone == set(HANDLERS["cpu"]), platform
        assert not set(targets) & of_cudnn or set(targets) >= of_cudnn, platform


def test_empty_tensors():
    out = quantize(jnp.zeros((0, 16)), SCALE, dtype=E4M3, q_t=True, colsum=True)
    assert out.q.shape == (0, 16) and out.q_t.shape == (16, 0)
    assert out.amax == 0 and not out.colsum.any()


def test_lowering_for_cuda_needs_no_gpu():
    text = jax.jit(quantized).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert "te_quantize" in text and kernel_p.name == "te_kernel"


# --- Static attributes ------------------------------------------------------------------------------------------------


def test_numbers_of_numpy_are_those_of_python():
    expected = quantize(X, SCALE, dtype=E4M3, k_axes=2, q_t=True)
    got = quantize(X, SCALE, dtype=E4M3, k_axes=np.int64(2), q_t=np.bool_(True))
    testing.assert_same_bytes(got, expected)
    testing.assert_same_bytes(quantize(X, SCALE, dtype=E4M3, k_axes=2, q_t=True), expected)


def test_other_attributes_are_refused():
    @kernel("... -> ...")
    def scaled(x, *, factor=1.0) -> Any:
        return x

    with pytest.raises(TypeError, match=r"scaled: factor: expected a static number, name or switch, got \(1, 2\)"):
        scaled(X, factor=(1, 2))


# --- JAX's switches ---------------------------------------------------------------------------------------------------


def test_without_jit():
    expected = quantized(X)
    with jax.disable_jit():
        testing.assert_same_bytes(quantized(X), expected)
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(te.rmsnorm(x, G))))(X)
    testing.assert_close(gradient, jax.grad(lambda x: jnp.sum(jnp.sin(te.rmsnorm(x, G))))(X), 1e-6)


def test_where_ranks_must_agree():
    with jax.numpy_rank_promotion("raise"):
        te.layernorm(X[:3, :3], G, G)
        te.dense(X[:3, :3], jnp.ones((64, 16)), jnp.ones(16))
