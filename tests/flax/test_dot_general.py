"""make_dot_general_cls, make_einsum_cls, wrap_function_in_te_state_module: FP8 inside Flax's own layers."""

import pickle
from functools import partial

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import steps
from emulated import F32
from jax.sharding import PartitionSpec as P
from steps import CURRENT, DELAYED

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.flax import STATE_COLLECTION

(X,) = (jnp.asarray(a) for a in emulated.normal(0, (4, 8, 32)))
DENSE, BATCH = (((2,), (0,)), ((), ())), (((2,), (1,)), ((0,), (0,)))

# name -> (Flax's layer, dimension numbers)
LAYERS = {
    "dense": (lambda **f: nn.Dense(16, **f), DENSE),
    "dense_general": (lambda **f: nn.DenseGeneral((3, 16), **f), DENSE),
    "batch": (lambda **f: nn.DenseGeneral(16, batch_dims=(0,), **f), BATCH),
}


def emulate(dims, roundings):
    """A dot_general for Flax's layer that rounds as the states say."""

    def dot_general(x, kernel, given, precision=None, **_):
        assert tuple(tuple(map(tuple, pair)) for pair in given) == dims
        x, kernel = emulated.straight_through(x, roundings.x), emulated.straight_through(kernel, roundings.kernel)
        return emulated.round_gradient(jax.lax.dot_general(x, kernel, given, precision="highest"), roundings.grad)

    return dot_general


# In a batch of current scaling each product has a scale of its own: tests/ops/test_dot_general.py.
@pytest.mark.parametrize("name, rec", [("dense", CURRENT), *[(name, DELAYED) for name in LAYERS]])
def test_inside_flax_layers(name, rec):
    layer, dims = LAYERS[name]
    module = layer(dot_general_cls=te_flax.make_dot_general_cls(rec))
    variables = steps.randomized(steps.init(module, X))
    assert set(variables["params"]) == {"kernel", "bias"}
    if rec.stateful:
        assert set(variables[STATE_COLLECTION]["Fp8_dot_general_0"]) == {"gemm_state"}
        variables = steps.settle(module.apply, variables, X, steps=2)
        state = variables[STATE_COLLECTION]["Fp8_dot_general_0"]
        roundings = emulated.roundings(rec, [float(one.scale) for one in state["gemm_state"].states().values()])
    else:
        assert set(variables) == {"params"}
        roundings = emulated.roundings(rec)
    y, (grads, dx) = steps.step(module.apply, variables, X)
    plain = layer(dot_general=emulate(dims, roundings))
    y_, (grads_, dx_) = steps.step(plain.apply, {"params": variables["params"]}, X)
    testing.assert_close((y, dx, grads["params"]), (y_, dx_, grads_["params"]), F32)


def test_the_recipe_may_come_from_the_context():
    module = nn.Dense(16, dot_general_cls=te_flax.make_dot_general_cls())
    plain = nn.Dense(16)
    variables = steps.init(module, X)
    assert set(variables) == {"params"}
    testing.assert_close(module.apply(variables, X), plain.apply(variables, X), F32)
    with steps.autocast(DELAYED):
        variables = te_flax.init_state(module, variables, X)
        y, (grads, _) = steps.step(module.apply, variables, X)
    assert 0.005 < testing.relative_error(y, plain.apply({"params": variables["params"]}, X)) < 0.1
    state = grads[STATE_COLLECTION]["Fp8_dot_general_0"]["gemm_state"]
    assert float(state.x.amax_history[1]) == float(jnp.abs(X).max())
    # A state that the context does not want leaves the step as it came.
    _, (grads, _) = steps.step(module.apply, variables, X)
    testing.assert_same_bytes(grads[STATE_COLLECTION], variables[STATE_COLLECTION])


class Heads(nn.Module):
    """Two einsums as models write them, one of them of activations alone."""

    recipe: te.recipe.Recipe | None

    @nn.compact
    def __call__(self, x):
        einsum = te_flax.make_einsum_cls(self.recipe)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (32, 4, 8))
        heads = einsum(name="projection")("bsd,dhk->bhsk", x, kernel, precision="highest")
        scores = einsum(name="scores")("bhqk,bhsk->bhqs", heads, heads, preferred_element_type=jnp.float32)
        return scores


def test_einsum():
    variables = steps.init(Heads(DELAYED), X)
    assert set(variables[STATE_COLLECTION]) == {"projection", "scores"}
    y, (grads, dx) = steps.step(Heads(DELAYED).apply, variables, X)

    def plain(variables, x):
        heads = jnp.einsum("bsd,dhk->bhsk", x, variables["params"]["kernel"], precision="highest")
        return jnp.einsum("bhqk,bhsk->bhqs", heads, heads, precision="highest")

    y_, (grads_, dx_) = steps.step(plain, variables, X)
    # Of the scores' error each factor has two roundings of E4M3, and one of the product before.
    bound = emulated.fp8_bound(*[jnp.float8_e4m3fn] * 6)
    testing.assert_close(y, y_, bound)
    gradient_bound = emulated.fp8_bound(*[jnp.float8_e4m3fn] * 4, *[jnp.float8_e5m2] * 2)
    testing.assert_close((dx, grads["params"]), (dx_, grads_["params"]), gradient_bound)
    assert testing.relative_error(y, y_) > 0.01
    testing.assert_close(Heads(None).apply({"params": variables["params"]}, X), plain(variables, X), emulated.F32)


def test_a_function_of_two_products():
    def gated(generate_quantizer_set, x, kernels):
        gate = te.dense(x, kernels[0], quantizers=generate_quantizer_set("gate"))
        up = te.dense(x, kernels[1], quantizers=generate_quantizer_set("up"))
        return jax.nn.silu(gate) * up, gate

    kernels = [jnp.asarray(a) / 6 for a in emulated.normal(1, (32, 16), (32, 16))]
    module = te_flax.wrap_function_in_te_state_module(gated, DELAYED, "gated")()
    variables = module.init(jax.random.key(0), X, kernels)
    assert type(module).__name__ == "Fp8_gated"
    assert set(variables[STATE_COLLECTION]) == {"gate_state", "up_state"}
    (y, _), (grads, *_) = steps.step(module.apply, variables, X, kernels)
    exact, _ = gated(lambda name: None, X, kernels)
    assert 0.01 < testing.relative_error(y, exact) < 3 * emulated.fp8_bound(jnp.float8_e4m3fn, jnp.float8_e4m3fn)
    state = grads[STATE_COLLECTION]
    assert float(state["up_state"].kernel.amax_history[1]) == float(jnp.abs(kernels[1]).max())


def test_a_state_goes_on_whichever_result_is_used():
    """With FP8 off, beside a result that has no gradient."""

    def chosen(generate_quantizer_set, x, kernel):
        y = te.dense(x, kernel, quantizers=generate_quantizer_set("only"))
        return jnp.argmax(y, -1), y

    module = te_flax.wrap_function_in_te_state_module(chosen, None, "chosen")()
    kernel = jnp.asarray(emulated.normal(1, (32, 16))[0])
    with te.autocast(True, DELAYED):
        variables = module.init(jax.random.key(0), X, kernel)
    with te.autocast(False):
        state = jax.grad(lambda v: module.apply(v, X, kernel)[1].sum())(variables)[STATE_COLLECTION]
    testing.assert_same_bytes(state, variables[STATE_COLLECTION])


@pytest.mark.parametrize("name", ["dense", "batch"])
def test_sharded_is_unsharded(name):
    module = LAYERS[name][0](dot_general_cls=te_flax.make_dot_general_cls(DELAYED))
    variables = steps.randomized(steps.init(module, X))
    expected = jax.device_get(steps.step(module.apply, variables, X))
    mesh = testing.mesh_of((4, 2), ("data", "model"))
    with testing.on_mesh(mesh):
        column = P(None, "model") if name == "dense" else P("data", None, "model")
        placed = {
            "params": testing.shard(mesh, variables["params"], {"kernel": column, "bias": P()}),
            STATE_COLLECTION: testing.shard(
                mesh, variables[STATE_COLLECTION], jax.tree.map(lambda _: P(), variables[STATE_COLLECTION])
            ),
        }
        got = jax.device_get(steps.step(module.apply, placed, testing.shard(mesh, X, P("data"))))
    testing.assert_close(got, expected, emulated.FLIP)


def test_names_for_checkpoint_policies():
    cls = te_flax.make_dot_general_cls(DELAYED, quantization_checkpoint_name="mine")
    module = nn.Dense(16, use_bias=False, dot_general_cls=cls)
    variables = steps.init(module, X)
    assert "name=mine" in str(jax.make_jaxpr(jax.grad(lambda v: module.apply(v, X).sum()))(variables))


def test_without_fp8_it_is_jaxs_own():
    x, kernel = X.astype(jnp.bfloat16), jnp.ones((X.shape[-1], 3), jnp.bfloat16) / 3
    numbers, options = (((x.ndim - 1,), (0,)), ((), ())), dict(precision="highest", preferred_element_type=jnp.float32)
    got = te_flax.make_dot_general_cls()().apply({}, x, kernel, numbers, **options)
    testing.assert_same_bytes(got, jax.lax.dot_general(x, kernel, numbers, **options))
    got = te_flax.make_einsum_cls()().apply({}, "...k,kn->...n", x, kernel, **options)
    testing.assert_same_bytes(got, jnp.einsum("...k,kn->...n", x, kernel, **options))


@pytest.mark.parametrize("explicit", [False, True])
def test_in_fp8_the_result_is_as_asked(explicit):
    x, kernel = X.astype(jnp.bfloat16), jnp.ones((X.shape[-1], 4), jnp.bfloat16)
    options = dict(preferred_element_type=jnp.float32)
    mesh = testing.mesh_of((2, 2), ("data", "model"), explicit=explicit)
    with testing.on_mesh(mesh):
        if explicit:
            options |= dict(out_sharding=P("data", None, "model"))
            x, kernel = testing.shard(mesh, (x, kernel), (P("data"), P()))
        run = te_flax.make_dot_general_cls(CURRENT)().apply
        y = jax.jit(lambda x, kernel: run({}, x, kernel, (((2,), (0,)), ((), ())), **options))(x, kernel)
        z = jax.jit(
            lambda x, kernel: te_flax.make_einsum_cls(CURRENT)().apply({}, "bsk,kn->bsn", x, kernel, **options)
        )(x, kernel)
    assert y.dtype == z.dtype == jnp.float32
    if explicit:
        assert y.sharding.spec == z.sharding.spec == P("data", None, "model")


def test_sums_of_16_bits_are_not_rounded_where_f32_is_asked_for():
    x, kernel = X.astype(jnp.bfloat16), jnp.ones((X.shape[-1], 4), jnp.bfloat16) / 3
    numbers = (((2,), (0,)), ((), ()))
    run = te_flax.make_dot_general_cls(CURRENT)().apply
    product = lambda dtype: lambda x, kernel: run({}, x, kernel, numbers, preferred_element_type=dtype)
    y, vjp = jax.vjp(product(jnp.float32), x, kernel)
    assert y.dtype == jnp.float32 and (y != y.astype(jnp.bfloat16)).any()
    y_, vjp_ = jax.vjp(product(jnp.bfloat16), x, kernel)
    testing.assert_same_bytes(y.astype(jnp.bfloat16), y_)
    testing.assert_same_bytes(vjp(y_.astype(jnp.float32)), vjp_(y_))
    assert product(jnp.int32)(x, kernel).dtype == jnp.int32


def test_one_recipe_is_one_class():
    assert te_flax.make_dot_general_cls(DELAYED) is te_flax.make_dot_general_cls(
        te.recipe.DelayedScaling(amax_history_len=4)
    )
    assert te_flax.make_dot_general_cls() is te_flax.make_dot_general_cls(quantization_recipe=None)
    assert te_flax.make_einsum_cls(DELAYED) is not te_flax.make_einsum_cls(CURRENT)


@pytest.mark.parametrize("make", [te_flax.make_dot_general_cls, te_flax.make_einsum_cls])
def test_classes_and_models_that_hold_them_are_pickled(make):
    cls = make(DELAYED, quantization_checkpoint_name="mine")
    assert pickle.loads(pickle.dumps(cls)) is cls and type(pickle.loads(pickle.dumps(cls()))) is cls
    model = nn.Dense(16, kernel_init=nn.initializers.ones, dot_general_cls=cls)  # the default is not pickled
    assert pickle.loads(pickle.dumps(model)) == model
    with pytest.raises(pickle.PicklingError):  # a class derived from it is another
        pickle.dumps(nn.vmap(cls))


def test_misuse():
    twice = te_flax.wrap_function_in_te_state_module(lambda q: (q(), q()), DELAYED, "twice")()
    with pytest.raises(ValueError, match="expected a new name for each product"):
        twice.init(jax.random.key(0))
    module = nn.Dense(16, dot_general_cls=te_flax.make_dot_general_cls(DELAYED))
    variables = steps.init(module, X)
    with pytest.raises(ValueError, match="te_flax.init_state"):
        jax.eval_shape(partial(module.apply, {"params": variables["params"]}), X)


@pytest.mark.parametrize("name", LAYERS)
def test_the_recipe_says_which_products_run_in_fp8(name):
    layer, _ = LAYERS[name]
    seen = []

    def asked(m, k, n):
        seen.append((m, k, n))
        return False

    module = layer(dot_general_cls=te_flax.make_dot_general_cls())
    with te.autocast(True, recipe.DelayedScaling(fp8_gemms=asked)):
        variables = module.init(jax.random.key(0), X)
        y, vjp = jax.vjp(module.apply, variables, X)
        grads, _ = vjp(jnp.ones_like(y))
        (row,) = te.explain(module.apply, variables, X).rows
    assert set(seen) == {{"dense": (32, 32, 16), "dense_general": (32, 32, 48), "batch": (8, 32, 16)}[name]}
    assert row.name == "dot_general" and "precision: high (as the recipe's fp8_gemms says)" in row.why
    testing.assert_same_bytes(y, layer().apply({"params": variables["params"]}, X))
    testing.assert_same_bytes(grads[STATE_COLLECTION], variables[STATE_COLLECTION])


def test_the_recipe_says_it_of_einsum_too():
    module = te_flax.make_einsum_cls()()
    kernel = jnp.ones((32, 16))
    for fp8 in (True, False):
        with te.autocast(True, recipe.Float8CurrentScaling(fp8_gemms=lambda m, k, n, fp8=fp8: fp8)):
            rows = te.explain(lambda x, kernel: module.apply({}, "bsk,kn->bns", x, kernel), X, kernel).rows
            names = {row.name for row in rows}
            assert ("gemm" in names) is fp8
