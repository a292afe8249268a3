"""Accumulating kernels: a buffer's gradient is the buffer plus the kernel's, however often and wherever it is used."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import DELAYED, F32
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.layernorm_dense import layernorm_dense
from transformer_engine_jax.ops.layernorm_mlp import layernorm_mlp
from transformer_engine_jax.ops.layernorm_projections import layernorm_projections

ROWS, K, N = 96, 64, 48  # so many rows that a GPU computes all gradients of kernels in f32 at once
GAMMA = jnp.asarray(1 + 0.1 * emulated.normal(9, (K,))[0])
CURRENT = recipe.Float8CurrentScaling()

# name -> (shapes of the kernels, op of x, the kernels and their quantizers)
OPS = {
    "dense": ([(K, N)], lambda x, k, q: dense(x, k[0], quantizers=q[0])),
    "dense, stacked": ([(K, 3, 16)], lambda x, k, q: dense(x, k[0], jnp.ones((3, 16)), quantizers=q[0])),
    "layernorm_dense": ([(K, N)], lambda x, k, q: layernorm_dense(x, GAMMA, None, k[0], quantizers=q[0])),
    "layernorm_mlp": (
        [(K, 2, 32), (32, K)],
        lambda x, k, q: layernorm_mlp(
            x, GAMMA, None, k, activations=("silu", "linear"), quantizers=None if q[0] is None else q, residual=True
        ),
    ),
    "layernorm_projections": (
        [(K, N), (K, 2, 16)],
        lambda x, k, q: layernorm_projections(
            x, GAMMA, None, k, [None, None], quantizers=None if q[0] is None else q, return_input=True
        ),
    ),
}
MODES = {"delayed": DELAYED, "current": CURRENT, "off": None, "calibrating": DELAYED}


def inputs(op: str, dtype=jnp.float32, count: int = 3):
    """(inputs of some microbatches [count, rows, K], kernels, buffers that hold something already)."""
    shapes = OPS[op][0]
    (x,) = emulated.normal(0, (count, ROWS, K))
    kernels = [jnp.asarray(k / np.sqrt(k.shape[0])).astype(dtype) for k in emulated.normal(1, *shapes)]
    return jnp.asarray(x).astype(dtype), kernels, [3 * jnp.asarray(b) for b in emulated.normal(2, *shapes)]


def run(op: str, mode: str, x, kernels, states):
    context = {"calibrating": True} if mode == "calibrating" else {}
    rec = MODES[mode]
    quantizers = tuple(rec and emulated.quantizers(s, rec, **context) for s in states)
    return OPS[op][1](x, tuple(kernels), quantizers)


def paired(kernels, main_grads):
    return [te.Accumulating(k, b) for k, b in zip(kernels, main_grads)]


def weighted(ys, seed: int = 0):
    """A scalar of the outputs whose cotangents are random."""
    leaves = jax.tree.leaves(ys)
    weights = emulated.normal(100 + seed, *[y.shape for y in leaves])
    return sum(jnp.sum(y.astype(jnp.float32) * w) for y, w in zip(leaves, weights))


@partial(jax.jit, static_argnames=("op", "mode", "seed"))
def step(x, kernels, main_grads, states, *, op, mode, seed=0):
    """Gradients of x, the kernels, the buffers and the states; main_grads None: plain kernels."""

    def loss(x, kernels, main_grads, states):
        given = kernels if main_grads is None else paired(kernels, main_grads)
        return weighted(run(op, mode, x, given, states), seed)

    return jax.grad(loss, argnums=(0, 1, 2, 3))(x, kernels, main_grads, states)


def states_of(op: str):
    return [emulated.states() for _ in OPS[op][0]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", OPS)
def test_microbatches_add_up(op, mode, dtype):
    xs, kernels, buffers = inputs(op, dtype)
    wide = [k.astype(jnp.float32) for k in kernels]
    states, expected_states, expected = states_of(op), states_of(op), list(buffers)
    for i, x in enumerate(xs):
        dx, dkernels, buffers, states = step(x, kernels, buffers, states, op=op, mode=mode, seed=i)
        dx_, products, _, expected_states = step(x, wide, None, expected_states, op=op, mode=mode, seed=i)
        expected = [b + p for b, p in zip(expected, products)]
        assert not any(np.asarray(dk).any() for dk in dkernels) and dkernels[0].dtype == dtype
        testing.assert_close(dx, dx_, F32 if dtype == jnp.float32 else emulated.BF16)
    assert all(b.dtype == jnp.float32 for b in buffers)
    testing.assert_close(buffers, expected, F32)
    testing.assert_close(states, expected_states, 2.0**-20)


def test_a_lost_buffer_or_a_wrong_sign_would_show():
    (x, *_), kernels, buffers = inputs("dense")
    _, _, (got,), _ = step(x, kernels, buffers, states_of("dense"), op="dense", mode="delayed")
    _, (product,), _, _ = step(x, kernels, None, states_of("dense"), op="dense", mode="delayed")
    for wrong in (product, buffers[0], buffers[0] - product, 2 * buffers[0] + product):
        assert testing.relative_error(got, wrong) > 0.2


# --- In the product, in place ----------------------------------------------------------------------------------------


def accumulated(op: str, mode: str, fused: bool):
    """(kernels, buffers, states, xs) -> the buffers after a scan over microbatches."""

    def microbatch(kernels, states, buffers, x):
        if fused:
            return step.__wrapped__(x, kernels, buffers, states, op=op, mode=mode)[2], None
        products = step.__wrapped__(x, kernels, None, states, op=op, mode=mode)[1]
        return [b + p for b, p in zip(buffers, products)], None

    return jax.jit(lambda k, b, s, xs: jax.lax.scan(partial(microbatch, k, s), b, xs)[0], donate_argnums=1)


@pytest.mark.parametrize("op", OPS)
def test_a_scan_over_microbatches_updates_its_carry_in_place(op):
    xs, kernels, buffers = inputs(op)
    xs = xs[:, :8]  # few rows, lest the peak be elsewhere
    compiled, results = {}, {}
    for fused in (True, False):
        f = accumulated(op, "delayed", fused)
        compiled[fused] = f.lower(kernels, buffers, states_of(op), xs).compile()
        results[fused] = compiled[fused](kernels, [jnp.array(b) for b in buffers], states_of(op), xs)
    testing.assert_close(results[True], results[False], F32)
    text = compiled[True].as_text()
    for kernel in kernels:
        shape = f"f32[{','.join(map(str, kernel.shape))}]"
        assert not [line for line in text.splitlines() if f"= {shape}" in line and " copy(" in line]
    assert text.count("output_to_operand_aliasing={{0}: (5, {})}") == len(kernels)
    temp = {fused: c.memory_analysis().temp_size_in_bytes for fused, c in compiled.items()}
    # On GPUs cuBLASLt's scratch of 32 MiB may be the peak of both.
    assert temp[True] < temp[False] or (testing.platforms() != ["cpu"] and temp[True] == temp[False]), temp


def test_explain_shows_the_sum_in_the_product():
    (x, *_), kernels, buffers = inputs("dense")

    def loss(buffers):
        return weighted(run("dense", "delayed", x, paired(kernels, buffers), states_of("dense")))

    rows = [row for row in te.explain(jax.grad(loss), buffers).rows if row.name == "gemm" and row.phase == "backward"]
    assert [row.options.get("in_place", False) for row in rows].count(True) == 1, rows


# --- Used several times: the buffer counts once ----------------------------------------------------------------------


def once(f, xs):
    return f(xs[0])


def twice(f, xs):
    return f(xs[0]), f(xs[1])


def in_a_scan(f, xs):
    return jax.lax.scan(lambda c, x: (c, f(x)), 0, xs)[1]


def in_a_scan_and_outside(f, xs):
    return f(xs[0]), in_a_scan(f, xs[1:])


def outside_and_in_a_vmap(f, xs):
    return jax.vmap(f)(xs[:2]), f(xs[2])


def rematerialised(f, xs):
    return jax.checkpoint(f)(xs[0]), jax.checkpoint(f)(xs[1])


def in_a_branch(f, xs):
    return jax.lax.cond(xs[0, 0, 0] > 1e6, lambda x: 0.0 * f(x), lambda x: 2.0 * f(x), xs[0])


def in_a_branch_not_taken(f, xs):
    return jax.lax.cond(xs[0, 0, 0] > 1e6, f, lambda x: x[:, :N], xs[0])


def first_without_a_gradient(f, xs):
    """As of a target that the model gives itself, or of a call whose result goes unused."""
    f(xs[2])
    return jax.lax.stop_gradient(f(xs[0])) * f(xs[1])


def first_without_a_gradient_in_a_scan(f, xs):
    return jax.lax.scan(lambda c, x: (c, jax.lax.stop_gradient(f(x)) * f(2 * x)), 0, xs)[1]


def first_without_a_gradient_rematerialised(f, xs):
    return jax.checkpoint(partial(first_without_a_gradient, f))(xs)


USES = [once, twice, in_a_scan, in_a_scan_and_outside, outside_and_in_a_vmap, rematerialised, in_a_branch]
USES += [first_without_a_gradient, first_without_a_gradient_in_a_scan, first_without_a_gradient_rematerialised]


@pytest.mark.parametrize("mode", ["delayed", "off"])
@pytest.mark.parametrize("how", [*USES, in_a_branch_not_taken])
def test_a_buffer_counts_once_however_often_it_is_used(how, mode):
    xs, (kernel,), (buffer,) = inputs("dense")

    @partial(jax.jit, static_argnums=2)
    def gradient(kernel, buffer, accumulates):
        def loss(kernel, buffer):
            given = te.Accumulating(kernel, buffer) if accumulates else kernel
            states = [emulated.states()]
            return weighted(how(lambda x: run("dense", mode, x, [given], states), xs))

        return jax.grad(loss, argnums=(0, 1))(kernel, buffer)

    product, _ = gradient(kernel, buffer, False)
    dkernel, total = gradient(kernel, buffer, True)
    assert not np.asarray(dkernel).any()
    testing.assert_close(total, buffer + product, F32)


def test_calls_that_are_jitted_by_themselves_each_count_the_buffer():
    """What `Accumulating` warns of: nothing tells one such call of the other."""
    xs, (kernel,), (buffer,) = inputs("dense")
    call = jax.jit(lambda x, given: dense(x, given))
    total = lambda given: weighted([call(xs[0], given), call(xs[1], given)])
    got = jax.grad(lambda b: total(te.Accumulating(kernel, b)))(buffer)
    testing.assert_close(got, 2 * buffer + jax.grad(total)(kernel), F32)


@pytest.mark.parametrize("outer", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("inner", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jitted", "rematerialised"])
def test_two_uses_count_the_buffer_once(inner, outer):
    xs, (kernel,), (buffer,) = inputs("dense")
    total = lambda given: weighted([dense(xs[0], given), dense(xs[1], given)])
    got = outer(jax.grad(inner(lambda b: total(te.Accumulating(kernel, b)))))(buffer)
    testing.assert_close(got, buffer + jax.grad(total)(kernel), F32)


def test_two_uses_in_a_scan_jitted_by_itself_count_the_buffer_once():
    xs, (kernel,), (buffer,) = inputs("dense")

    def total(given):
        return weighted([jax.lax.scan(lambda _, x: (None, dense(x, given) + dense(x * x, given)), None, xs)[1]])

    got = jax.grad(jax.jit(lambda b: total(te.Accumulating(kernel, b))))(buffer)
    testing.assert_close(got, buffer + jax.grad(total)(kernel), F32)


@pytest.mark.parametrize("mode", ["delayed", "off"])
def test_vmap_of_grad(mode):
    xs, kernels, buffers = inputs("layernorm_mlp")
    f = lambda x, b: step.__wrapped__(x, kernels, b, states_of("layernorm_mlp"), op="layernorm_mlp", mode=mode)[2]
    shared = jax.jit(jax.vmap(f, (0, None)))(xs, buffers)
    own = jax.jit(jax.vmap(f))(xs, [jnp.stack([b, -b, 2 * b]) for b in buffers])
    for i, sign in enumerate((1, -1, 2)):
        testing.assert_close([b[i] for b in shared], f(xs[i], buffers), F32)
        testing.assert_close([b[i] for b in own], f(xs[i], [sign * b for b in buffers]), F32)


# --- On a mesh -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("mode", ["delayed", "off"])
def test_sharded_is_unsharded(mode, explicit):
    op = "layernorm_mlp"
    (x, *_), kernels, buffers = inputs(op)
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    with jax.default_device(mesh.devices.flat[0]):
        expected = jax.device_get(step(x, kernels, buffers, states_of(op), op=op, mode=mode))
    specs = [P(None, None, "model"), P("model", None)]
    with testing.on_mesh(mesh):
        placed = testing.shard(mesh, (x, kernels, buffers), (P("data", None), specs, specs))
        got = jax.device_get(step(*placed, states_of(op), op=op, mode=mode))
    testing.assert_close(got[0], expected[0], F32)
    testing.assert_close(got[2], expected[2], F32)


@pytest.mark.parametrize("mode", ["delayed", "off"])
def test_in_a_manual_shard_map(mode):
    """Buffers that are the same on every shard get the sum over shards, once."""
    (x, *_), kernels, buffers = inputs("dense")
    context = {"amax_axes": ("data",)} if mode == "delayed" else {}

    def gradient(x, kernels, buffers):
        def loss(buffers):
            quantizers = MODES[mode] and emulated.quantizers(emulated.states(), MODES[mode], **context)
            y = dense(x, te.Accumulating(kernels[0], buffers[0]), quantizers=quantizers)
            return jax.lax.psum(jnp.sum(jnp.sin(y)), "data")

        return jax.grad(loss)(buffers)

    with testing.on_mesh(mesh := testing.mesh_of((4,), ("data",))):
        sharded = jax.shard_map(gradient, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P())
        (got,) = jax.jit(sharded)(*testing.shard(mesh, (x, kernels, buffers), (P("data"), [P()], [P()])))

    def whole(kernel):
        quantizers = MODES[mode] and emulated.quantizers(emulated.states(), MODES[mode])
        return jnp.sum(jnp.sin(dense(x, kernel, quantizers=quantizers)))

    with jax.default_device(mesh.devices.flat[0]):
        expected = buffers[0] + jax.grad(whole)(kernels[0])
    testing.assert_close(jax.device_get(got), jax.device_get(expected), F32)


# --- Mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", ["delayed", "off"])
def test_a_buffer_that_does_not_fit(op, mode):
    (x, *_), kernels, buffers = inputs(op)
    states = states_of(op)
    for wrong, got in ((buffers[0][:-1], r"float32\[63"), (buffers[0].astype(jnp.bfloat16), r"bfloat16\[64")):
        with pytest.raises(ValueError, match=rf"main_grad: expected float32\[64.*got {got}.*start from jnp.zeros_like"):
            run(op, mode, x, paired(kernels, [wrong, *buffers[1:]]), states)
