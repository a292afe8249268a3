"""The mechanism on every kind of mesh: what rules of kernels let be sharded, and the collectives that they imply."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
from transformer_engine_jax import partition, testing
from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.ops.quantize import E4M3, amax, quantize

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (8, 4, 64))
SCALE = jnp.float32(37.0)
G = jnp.linspace(0.5, 1.5, 64)


def quantized(x):
    return quantize(x, SCALE, dtype=E4M3, q_t=True)


def test_vmap_over_an_axis_that_explicit_mesh_axes_shard():
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=True)
    # Neither has a rule that takes one more axis for all calls: an amax of each, and parameters of all.
    with testing.on_mesh(mesh):
        x = testing.shard(mesh, X, P("data"))
        per_example = jax.jit(jax.vmap(lambda x: amax(x)))(x)
        grads = jax.jit(jax.vmap(jax.grad(lambda g, x: (te.rmsnorm(x, g) ** 2).sum()), in_axes=(None, 0)))(G, x)
        cast = lambda x: (lambda out: (out.q, out.scale_inv))(quantize(x, SCALE, dtype=E4M3, scale_inv=True))
        q, scale_inv = jax.jit(jax.vmap(cast, out_axes=(0, None)))(x)
    testing.assert_same_bytes(jax.device_get(per_example), np.abs(np.asarray(X)).max((1, 2)))
    with jax.default_device(mesh.devices.flat[0]):
        expected = quantize(X, SCALE, dtype=E4M3, scale_inv=True)
        testing.assert_same_bytes(jax.device_get((q, scale_inv)), jax.device_get((expected.q, expected.scale_inv)))
    expected = [jax.grad(lambda g, x=x: (te.rmsnorm(x, g) ** 2).sum())(G) for x in X]
    testing.assert_close(jax.device_get(grads), np.stack(expected), 1e-6)


@pytest.mark.parametrize("inner", ["model", None, "none"])
@pytest.mark.parametrize("outer", ["data", None])
@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_vmaps_that_name_axes_of_the_compiler_s(transform, outer, inner):
    """Each of another one; and a name that the mesh lacks is none."""
    mesh, x = testing.mesh_of((4, 2), ("data", "model")), X.reshape(4, 2, 4, 64)
    of_row = jax.vmap(jax.grad(lambda g, x: (te.rmsnorm(x, g) ** 2).sum()), (None, 0), spmd_axis_name=inner)
    with testing.on_mesh(mesh):
        shards = testing.shard(mesh, x, P(outer, inner if inner != "none" else None))
        got = transform(jax.vmap(of_row, (None, 0), spmd_axis_name=outer))(G, shards)
    with jax.default_device(mesh.devices.flat[0]):
        expected = [[jax.grad(lambda g, x=x: (te.rmsnorm(x, g) ** 2).sum())(G) for x in row] for row in x]
    testing.assert_close(jax.device_get(got), np.stack(expected), 1e-6)


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
