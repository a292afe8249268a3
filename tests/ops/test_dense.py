"""dense: against x @ kernel + bias, against FP8 emulated in plain JAX, the state it reports, shards and misuse."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import BF16, DELAYED, F32, RECIPES, fp8_bound
from jax.sharding import PartitionSpec as P

from transformer_engine_jax import recipe, testing
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.quantize import E4M3, E5M2

# x's shape, kernel's shape, contracted axes
SHAPES = {
    "matrix": ((32, 64), (64, 48), 1),
    "batch": ((4, 8, 64), (64, 48), 1),
    "stacked": ((4, 8, 64), (64, 3, 16), 1),
    "two contracted": ((4, 8, 4, 16), (4, 16, 48), 2),
    "odd": ((3, 5, 33), (33, 7), 1),
}


def inputs(shape="stacked", dtype=jnp.float32, kernel_dtype=None):
    """(x, kernel, bias, cotangent of the output), k_axes."""
    x, kernel, k_axes = SHAPES[shape]
    bias, dy = kernel[k_axes:], (*x[: len(x) - k_axes], *kernel[k_axes:])
    x, kernel, bias, dy = emulated.normal(0, x, kernel, bias, dy)
    kernel /= np.sqrt(np.prod(kernel.shape[:k_axes], dtype=np.float32))
    dtypes = (dtype, kernel_dtype or dtype, kernel_dtype or dtype, dtype)
    return tuple(jnp.asarray(a.astype(d)) for a, d in zip((x, kernel, bias, dy), dtypes)), k_axes


@partial(jax.jit, static_argnames=("k_axes", "rec", "context"))
def step(x, kernel, bias, dy, states, *, k_axes, rec, context=()):
    """The output, the gradients of x, kernel and bias, and the next states."""

    def f(x, kernel, bias, states):
        return dense(x, kernel, bias, k_axes=k_axes, quantizers=emulated.quantizers(states, rec, **dict(context)))

    y, vjp = jax.vjp(f, x, kernel, bias, states)
    *grads, next_states = vjp(dy)
    return y, grads, next_states


@partial(jax.jit, static_argnames=("k_axes", "roundings"))
def plain_step(x, kernel, bias, dy, *, k_axes, roundings=None):
    y, vjp = jax.vjp(partial(emulated.dense, k_axes=k_axes, roundings=roundings), x, kernel, bias)
    return y, list(vjp(dy.astype(jnp.float32)))


# --- High precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_f32_is_the_product(shape):
    (x, kernel, bias, dy), k_axes = inputs(shape)

    @jax.jit
    def run(*args):
        y, vjp = jax.vjp(partial(dense, k_axes=k_axes), *args)
        return y, list(vjp(dy))

    testing.assert_close(run(x, kernel, bias), plain_step(x, kernel, bias, dy, k_axes=k_axes), F32)


def test_under_every_transformation():
    (x, kernel, bias, _), _ = inputs("batch")
    key = jax.random.key(0)
    testing.check_op(dense, emulated.dense, (x, kernel, bias), value_bound=F32, gradient_bound=F32, key=key)


def test_bf16():
    (x, kernel, bias, dy), _ = inputs("batch", jnp.bfloat16)
    y, vjp = jax.vjp(jax.jit(dense), x, kernel, bias)
    y_, expected = plain_step(x, kernel, bias, dy, k_axes=1)
    assert y.dtype == jnp.bfloat16
    testing.assert_close(y, y_, BF16)
    *products, dbias = vjp(dy)
    testing.assert_close(products, expected[:2], 2 * BF16)  # newer XLA rounds partial sums to bf16 too
    # Plain AD may sum dbias in bf16: up to sqrt(32) roundings.
    testing.assert_close(dbias, expected[2], 6 * BF16)


def test_without_bias():
    (x, kernel, _, _), _ = inputs()
    testing.assert_close(dense(x, kernel), emulated.dense(x, kernel), F32)


# --- FP8 against its emulation: right scales, right formats, everything rounded once ---------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", RECIPES)
def test_fp8_is_the_product_of_rounded_operands(name, shape):
    if shape != "stacked" and name not in ("delayed", "current"):
        shape = "matrix"
    (x, kernel, bias, dy), k_axes = inputs(shape)
    rec = RECIPES[name]
    y, grads, _ = step(x, kernel, bias, dy, emulated.states(), k_axes=k_axes, rec=rec)
    expected = plain_step(x, kernel, bias, dy, k_axes=k_axes, roundings=emulated.roundings(rec))
    testing.assert_close((y, grads), expected, F32)


def test_the_emulation_would_show_a_wrong_format_scale_or_an_operand_left_out():
    (x, kernel, bias, dy), k_axes = inputs("batch")
    right = emulated.roundings(DELAYED)
    expected = plain_step(x, kernel, bias, dy, k_axes=k_axes, roundings=right)
    wrong = [
        right._replace(grad=right.grad._replace(dtype=E4M3)),
        right._replace(kernel=right.kernel._replace(scale=right.x.scale)),
        right._replace(x=right.x._replace(dtype=E5M2)),
        None,
    ]
    for roundings in wrong:
        got = plain_step(x, kernel, bias, dy, k_axes=k_axes, roundings=roundings)
        errors = [testing.relative_error(g, e) for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected))]
        assert max(errors) > emulated.MISTAKE > emulated.FLIP, errors


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_fp8_of_bf16_with_f32_parameters(name):
    (x, kernel, bias, dy), k_axes = inputs("stacked", jnp.bfloat16, jnp.float32)
    y, (dx, dkernel, dbias), _ = step(x, kernel, bias, dy, emulated.states(), k_axes=k_axes, rec=RECIPES[name])
    assert (y.dtype, dx.dtype, dkernel.dtype, dbias.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32)
    y_, (dx_, dkernel_, dbias_) = plain_step(
        x, kernel, bias, dy, k_axes=k_axes, roundings=emulated.roundings(RECIPES[name])
    )
    testing.assert_close((y, dx), (y_, dx_), BF16)
    testing.assert_close((dkernel, dbias), (dkernel_, dbias_), F32)


def test_reference_kernels_give_the_same():
    (x, kernel, bias, dy), k_axes = inputs("stacked")
    got = step(x, kernel, bias, dy, emulated.states(), k_axes=k_axes, rec=DELAYED)
    with testing.reference_kernels():
        expected = step(x, kernel, bias, dy, emulated.states(), k_axes=k_axes, rec=DELAYED)
    testing.assert_close(got[:2], expected[:2], F32)
    testing.assert_close(got[2], expected[2], 2.0**-20)  # XLA divides less exactly than the handlers


# --- FP8 against the exact product -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_fp8_is_near_the_product(name):
    (x, kernel, bias, dy), k_axes = inputs("two contracted")
    states = emulated.states((1.0, 1.0, 1.0))
    for _ in range(3):
        y, grads, states = step(x, kernel, bias, dy, states, k_axes=k_axes, rec=RECIPES[name])
        if name == "current":
            break
    y_, (dx, dkernel, dbias) = plain_step(x, kernel, bias, dy, k_axes=k_axes)
    testing.assert_close(y, y_, fp8_bound(E4M3, E4M3), "y")
    testing.assert_close(grads[:2], [dx, dkernel], fp8_bound(E5M2, E4M3), "gradient")
    testing.assert_close(grads[2], dbias, F32, "dbias, which is not rounded")


# --- State -----------------------------------------------------------------------------------------------------------


def expected_states(x, kernel, dy, dtypes=(E4M3, E4M3, E5M2)):
    return [emulated.next_state(s, t, d) for s, t, d in zip(emulated.SCALES, (x, kernel, dy), dtypes)]


@pytest.mark.parametrize("name", ["delayed", "delayed-e4m3"])
def test_next_states_hold_the_amax_of_each_operand(name):
    (x, kernel, bias, dy), k_axes = inputs()
    rec = RECIPES[name]
    *_, states = step(x, kernel, bias, dy, emulated.states(), k_axes=k_axes, rec=rec)
    expected = expected_states(x, kernel, dy, (E4M3, E4M3, rec.backward_dtype))
    testing.assert_same_bytes(list(states.states().values()), expected)


def test_the_step_uses_the_scale_from_before_and_the_history_rolls():
    (x, kernel, bias, dy), k_axes = inputs()
    states = emulated.states()
    amaxes = []
    for factor in (1.0, 3.0, 0.5, 0.25, 0.125, 0.0625):
        *_, states = step(factor * x, kernel, bias, dy, states, k_axes=k_axes, rec=DELAYED)
        amaxes.append(float(jnp.max(jnp.abs(factor * x))))
        assert float(states.x.scale) == np.float32(448.0) / np.float32(max(amaxes[-4:]))
    # The oldest is in slot 0, which the next step overwrites.
    np.testing.assert_array_equal(states.x.amax_history, np.float32([amaxes[-4], *amaxes[:-4:-1]]))


def test_calibrating_computes_in_high_precision_and_records():
    (x, kernel, bias, dy), k_axes = inputs()
    y, grads, states = step(
        x, kernel, bias, dy, emulated.states(), k_axes=k_axes, rec=DELAYED, context=(("calibrating", True),)
    )
    testing.assert_close((y, grads), plain_step(x, kernel, bias, dy, k_axes=k_axes), F32)
    testing.assert_same_bytes(list(states.states().values()), expected_states(x, kernel, dy))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_batch_leaves_the_state_finite(bad):
    (x, kernel, bias, dy), k_axes = inputs()
    run = partial(step, k_axes=k_axes, rec=DELAYED)
    y, _, states = run(x.at[0, 0, 0].set(bad), kernel, bias, dy.at[0, 0, 0, 0].set(bad), emulated.states())
    assert np.isnan(bad) == bool(jnp.isnan(y).any()), "NaN passes through, Inf saturates"
    for old, new in zip(emulated.SCALES, (states.x, states.grad)):
        assert float(new.scale) in emulated.SCALES and not np.asarray(new.amax_history).any(), old
    got = run(x, kernel, bias, dy, states)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(got))
    testing.assert_same_bytes(got[2].x, expected_states(x, kernel, dy)[0])


def test_vmap_of_grad_has_a_state_for_each_example():
    (x, kernel, bias, dy), k_axes = inputs()
    run = partial(step, k_axes=k_axes, rec=DELAYED)
    batch = jnp.stack([x, 2 * x, -0.25 * x])
    got = jax.jit(jax.vmap(lambda x: run(x, kernel, bias, dy, emulated.states())))(batch)
    for i in range(3):
        expected = run(batch[i], kernel, bias, dy, emulated.states())
        testing.assert_close(jax.tree.map(lambda a, i=i: a[i], got), expected, F32, f"example {i}")


def test_scan_and_remat():
    (x, kernel, bias, dy), k_axes = inputs()
    expected = step(x, kernel, bias, dy, emulated.states(), k_axes=k_axes, rec=DELAYED)

    @jax.jit
    def scanned(x, kernel, bias, states):
        def layer(carry, args):
            kernel, bias, states = args
            op = jax.checkpoint(lambda *a: dense(*a, quantizers=emulated.quantizers(states, DELAYED)))
            return carry, op(carry, kernel, bias)

        def f(x, kernel, bias, states):
            return jax.lax.scan(layer, x, jax.tree.map(lambda a: a[None], (kernel, bias, states)))[1][0]

        y, vjp = jax.vjp(f, x, kernel, bias, states)
        *grads, states = vjp(dy)
        return y, grads, states

    testing.assert_close(scanned(x, kernel, bias, emulated.states()), expected, F32)


# --- Shards ----------------------------------------------------------------------------------------------------------

# Specs of x [4, 8, 64], kernel [64, 48], bias [48], dy [4, 8, 48] on a mesh of 4 "data" x 2 "model".
PARALLEL = {
    "data": (P("data"), P(), P(), P("data")),
    "column": (P("data"), P(None, "model"), P("model"), P("data", None, "model")),
    "row": (P("data", None, "model"), P("model"), P(), P("data")),
    "sequence": (P("data", "model"), P(), P(), P("data", "model")),
    "fsdp": (P("data"), P("data"), P(), P("data")),
}


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_sharded_is_unsharded(parallel, explicit):
    arrays, k_axes = inputs("batch")
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=explicit)
    names = ["delayed", "current"] if parallel in ("column", "row") else ["delayed"]
    for name in names:
        run = partial(step, k_axes=k_axes, rec=RECIPES[name])
        expected = run(*arrays, emulated.states())
        with testing.on_mesh(mesh):
            local = testing.shard(mesh, list(arrays), list(PARALLEL[parallel]))
            states = testing.shard(mesh, emulated.states(), jax.tree.map(lambda _: P(), emulated.states()))
            got = jax.device_get(run(*local, states))
        testing.assert_close(got[:2], jax.device_get(expected[:2]), F32, name)
        testing.assert_same_bytes(got[2], jax.device_get(expected[2]), name)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_in_a_manual_shard_map(name, check_vma):
    (x, kernel, bias, dy), k_axes = inputs("batch")
    rec = RECIPES[name]
    mesh = testing.mesh_of((4, 2), ("data", "model"))
    expected = step(x, kernel, bias, dy, emulated.states(), k_axes=k_axes, rec=rec)
    context = (("amax_axes", ("data", "model")),)  # along "model" all is the same

    def local(x, kernel, bias, dy, states):
        y, grads, states = step(x, kernel, bias, dy, states, k_axes=k_axes, rec=rec, context=context)
        if not check_vma:  # JAX does not know then that kernel and bias are replicated, and leaves the sum to us
            grads = [grads[0], *(jax.lax.psum(g, "data") for g in grads[1:])]
        return y, grads, states

    specs = (P("data"), P(), P(), P("data"), P())
    out = (P("data"), [P("data"), P(), P()], P())
    manual = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
    got = jax.device_get(jax.jit(manual)(x, kernel, bias, dy, emulated.states()))
    testing.assert_close(got[:2], jax.device_get(expected[:2]), F32)
    testing.assert_same_bytes(got[2], jax.device_get(expected[2]))


def test_in_a_manual_shard_map_that_checks_what_varies_no_axes_need_be_named():
    x, kernel, dy = map(jnp.asarray, emulated.normal(0, (16, 64), (64, 48), (16, 48)))
    mesh = testing.mesh_of((4,), ("data",))

    def states(x, kernel, dy, states):
        _, vjp = jax.vjp(lambda s: dense(x, kernel, quantizers=emulated.quantizers(s, DELAYED)), states)
        return vjp(dy)[0]

    manual = jax.shard_map(states, mesh=mesh, in_specs=(P("data"), P(), P("data"), P()), out_specs=P())
    expected = jax.jit(states)(x, kernel, dy, emulated.states())
    testing.assert_same_bytes(
        jax.device_get(jax.jit(manual)(x, kernel, dy, emulated.states())), jax.device_get(expected)
    )


def test_states_that_each_shard_has_of_its_own_see_what_all_see():
    x, kernel, dy = map(jnp.asarray, emulated.normal(0, (16, 64), (64, 48), (16, 48)))
    mesh = testing.mesh_of((4,), ("data",))

    def states(x, kernel, dy, states):
        quantizers = partial(emulated.quantizers, rec=DELAYED, amax_axes=("data",) if x.shape[0] < 16 else ())
        of_each = lambda s: dense(x, kernel, quantizers=quantizers(jax.tree.map(lambda a: a[0], s)))
        return jax.vjp(of_each, states)[1](dy)[0]

    stacked = lambda count: jax.tree.map(lambda a: jnp.stack(count * [a]), emulated.states())
    manual = jax.shard_map(states, mesh=mesh, in_specs=(P("data"), P(), P("data"), P("data")), out_specs=P("data"))
    got, expected = jax.jit(manual)(x, kernel, dy, stacked(4)), jax.jit(states)(x, kernel, dy, stacked(1))
    for i in range(4):
        testing.assert_same_bytes(jax.device_get(got.packed)[i], jax.device_get(expected.packed)[0])


@pytest.mark.parametrize("how", ["auto", "explicit", "manual"])
def test_a_nan_on_one_shard_is_one_of_the_tensor(how):
    """It keeps its scale, and no shard's own amax enters the history."""
    (x, kernel, bias, dy), k_axes = inputs("batch")
    x = jnp.asarray(x).at[0].set(jnp.nan)
    run = partial(step, k_axes=k_axes, rec=DELAYED)
    expected = jax.device_get(run(x, kernel, bias, dy, emulated.states())[2])
    assert not expected.x.amax_history.any() and expected.grad.amax_history.any()
    mesh = testing.mesh_of((4, 2), ("data", "model"), explicit=how == "explicit")
    specs = (P("data"), P(), P(), P("data"), jax.tree.map(lambda _: P(), emulated.states()))
    if how == "manual":
        run = jax.shard_map(
            lambda *args: step(*args, k_axes=k_axes, rec=DELAYED, context=(("amax_axes", ("data",)),))[2],
            mesh=mesh, in_specs=specs, out_specs=P(),
        )  # fmt: skip
        got = jax.jit(run)(x, kernel, bias, dy, emulated.states())
    else:
        with testing.on_mesh(mesh):
            got = run(*testing.shard(mesh, [x, kernel, bias, dy, emulated.states()], list(specs)))[2]
    testing.assert_same_bytes(jax.device_get(got), expected)


def test_amax_axes_that_do_not_exist_are_named():
    (x, kernel, bias, dy), k_axes = inputs("batch")
    with pytest.raises(ValueError, match=r"amax_axes=\('tokens',\) must name mesh axes"):
        step(x, kernel, bias, dy, emulated.states(), k_axes=k_axes, rec=DELAYED, context=(("amax_axes", ("tokens",)),))


# --- Misuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "x, kernel, bias, k_axes, message",
    [
        ((4, 32), (64, 48), None, 1, r"dense: kernel has K=\[64\] but x has K=\[32\]"),
        ((4, 64), (64, 48), (47,), 1, r"dense: bias: expected the shape \(48,\).*got \(47,\)"),
        ((4, 64), (64,), None, 1, r"dense: expected x.*kernel with more than 1 axes.*kernel\[64\]"),
        ((64,), (8, 8, 48), None, 2, r"dense: expected x\[.., 2 contracted axes\].*x\[64\]"),
        ((4, 64), (64, 48), None, 0, "dense: k_axes: expected .*1 or more, got 0"),
    ],
)
def test_shapes_that_do_not_fit_are_named(fp8, x, kernel, bias, k_axes, message):
    quantizers = emulated.quantizers(emulated.states(), DELAYED) if fp8 else None
    bias = None if bias is None else jnp.ones(bias)
    with pytest.raises(ValueError, match=message):
        dense(jnp.ones(x), jnp.ones(kernel), bias, k_axes=k_axes, quantizers=quantizers)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("wrong", [jnp.int32, bool, E4M3])
@pytest.mark.parametrize("index, name", [(0, "x"), (1, "kernel"), (2, "bias")])
def test_dtypes_without_a_product_are_named(fp8, index, name, wrong):
    quantizers = emulated.quantizers(emulated.states(), DELAYED) if fp8 else None
    arrays = [jnp.ones((4, 64)), jnp.ones((64, 48)), jnp.ones(48)]
    arrays[index] = arrays[index].astype(wrong)
    with pytest.raises(ValueError, match=f"dense: {name}: expected f32, f16 or bf16, got"):
        dense(*arrays, quantizers=quantizers)


def test_x64_changes_nothing():
    x, kernel = jnp.ones((4, 64)), jnp.ones((64, 48))

    def step(states):
        return dense(x, kernel, quantizers=emulated.quantizers(states, DELAYED)).sum()

    expected = jax.grad(step)(emulated.states())
    with jax.enable_x64(True):
        testing.assert_same_bytes(jax.grad(step)(emulated.states()), expected)


def test_a_state_of_another_history_length_is_named():
    states = emulated.states()
    with pytest.raises(ValueError, match=r"amax_history f32\[16\].*got 3 of f32\[\] and f32\[4\]"):
        emulated.quantizers(states, recipe.DelayedScaling())
