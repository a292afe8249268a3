"""Checkpoint policies: which kernels a rematerialised gradient runs again, and that the gradient stays the same."""

import re
from collections import Counter
from functools import partial

import emulated
import jax
import jax.numpy as jnp
import pytest
import steps
from flax import linen as nn
from steps import CURRENT, DELAYED

from transformer_engine_jax import policies, testing
from transformer_engine_jax.flax import DenseGeneral, LayerNormDenseGeneral, LayerNormMLP
from transformer_engine_jax.ops.quantize import E4M3, quantize
from transformer_engine_jax.order import computed_once_p

named = jax.checkpoint_policies.save_only_these_names
both = jax.checkpoint_policies.save_from_both_policies
QUANTIZING = ("quantize", "layernorm_fwd", "activation_fwd")

(X,) = (jnp.asarray(a) for a in emulated.normal(0, (4, 8, 16)))
NAME = dict(quantization_checkpoint_name="quantized")
MODULES = {
    "dense": DenseGeneral(features=16, **NAME),
    "layernorm dense": LayerNormDenseGeneral(features=16, **NAME),
    "mlp": LayerNormMLP(intermediate_dim=32, **NAME),
}


def kernels(f, variables) -> Counter:
    """How often the gradient of f's loss runs each kernel."""
    jaxpr = jax.make_jaxpr(jax.grad(lambda v: steps.loss(f(v, X))))(variables)
    return Counter(re.findall(r"<kernel (\w+):", str(jaxpr)))


def rerun(module, variables, policy) -> dict[str, int]:
    """Kernels that run once more under a policy, and how often; those of the state left out."""
    extra = kernels(jax.checkpoint(module.apply, policy=policy), variables) - kernels(module.apply, variables)
    return {name: count for name, count in extra.items() if name in (*QUANTIZING, "gemm")}


@pytest.fixture(params=[1, 8], ids=["one device", "several"])
def devices(request, monkeypatch):
    """Gradients are held together on one device alone; a barrier there must not run anything twice."""
    monkeypatch.setattr(jax, "device_count", lambda: request.param)


@pytest.mark.parametrize("rec", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_what_runs_twice(rec, devices):
    def twice(name, policy):
        with steps.autocast(rec):
            return rerun(MODULES[name], steps.init(MODULES[name], X, rec=rec), policy)

    assert twice("dense", None) == {"quantize": 2}, "without a policy both operands are quantized again"
    for name in ("dense", "layernorm dense"):
        assert twice(name, policies.quantized_saveable) == twice(name, named("quantized")) == {}
    nothing = twice("mlp", None)
    runs = 1 if rec is DELAYED else 2  # one that measures, before the one that quantizes
    assert nothing["gemm"] == 1 and nothing["layernorm_fwd"] == nothing["activation_fwd"] == runs
    assert twice("mlp", jax.checkpoint_policies.dots_saveable) == nothing, "JAX's own does not see our products"
    assert twice("mlp", policies.gemms_saveable) == {k: n for k, n in nothing.items() if k != "gemm"}
    assert twice("mlp", policies.gemms_with_no_batch_dims_saveable) == twice("mlp", policies.gemms_saveable)
    assert twice("mlp", policies.quantized_saveable) == {"gemm": 1}
    assert twice("mlp", both(policies.gemms_saveable, policies.quantized_saveable)) == {}
    assert twice("mlp", named("quantized", "ffn1")) == {}


def test_what_passes_a_barrier_is_saved_behind_it():
    saves = lambda policy: [of for of in ("product", "quantized", None) if policy(computed_once_p, X, of=of)]
    assert saves(policies.gemms_saveable) == saves(policies.gemms_with_no_batch_dims_saveable) == ["product"]
    assert saves(policies.quantized_saveable) == ["quantized"]


def test_products_of_jax_are_seen_too():
    def scores(q, k, w):
        return jnp.tanh(jnp.einsum("bqd,bkd->bqk", q @ w, k))

    w = jnp.ones((16, 16))

    def dots(policy):
        f = jax.checkpoint(lambda w: scores(X, X, w).sum(), policy=policy)
        return str(jax.make_jaxpr(jax.grad(f))(w)).count("dot_general[")

    everything, nothing = dots(jax.checkpoint_policies.everything_saveable), dots(None)
    assert dots(policies.gemms_saveable) == everything < nothing
    assert everything <= dots(policies.gemms_with_no_batch_dims_saveable) < nothing
    assert dots(policies.quantized_saveable) == nothing


class Stack(nn.Module):
    """Two layers in a scan, rematerialised."""

    policy: object = None

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "_overwrite_with_gradient": 0}
        mlp = nn.remat(LayerNormMLP, policy=self.policy, prevent_cse=False)
        layer = nn.scan(
            lambda m, x, _: (x + m(x)[0], None),
            variable_axes=axes,
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layer(mlp(intermediate_dim=32, name="mlp", **NAME), x, None)[0]


def test_gradients_and_states_are_those_without_a_policy():
    variables = steps.randomized(steps.init(Stack(), X, rec=DELAYED))
    with steps.autocast(DELAYED):
        variables = steps.settle(Stack().apply, variables, X)  # now each tensor reaches its format's largest value
        expected = steps.step(Stack().apply, variables, X)
        everything = jax.checkpoint_policies.everything_saveable
        for policy in (policies.gemms_saveable, policies.quantized_saveable, named("quantized", "ffn1"), everything):
            testing.assert_close(steps.step(Stack(policy).apply, variables, X), expected, emulated.F32)
        count = partial(kernels, variables=variables)
        assert count(Stack(policies.quantized_saveable).apply)["quantize"] < count(Stack().apply)["quantize"]


def carried_and_stacked(jaxpr) -> set[str]:
    """The dtypes of all that goes into and out of the loops of a program."""
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            found |= {str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)}
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found |= carried_and_stacked(inner) if hasattr(inner, "eqns") else set()
    return found


@pytest.mark.parametrize(
    "policy",
    [None, policies.quantized_saveable, named("quantized", "ffn1"), jax.checkpoint_policies.everything_saveable],
    ids=["nothing", "quantized", "named", "everything"],
)
def test_a_scan_stacks_bytes(policy):
    """XLA on the CPU takes 80 times as long to stack an array of FP8 as one of bytes."""
    model = Stack(policy)
    variables = steps.init(model, X, rec=DELAYED)
    with steps.autocast(DELAYED):
        step = jax.make_jaxpr(jax.grad(lambda v: model.apply(v, X).sum(), allow_int=True))(variables)
    dtypes = carried_and_stacked(step.jaxpr)
    assert ("uint8" in dtypes) == (policy is not None)
    assert not any(dtype.startswith("float8") for dtype in dtypes), dtypes


def test_what_is_saved_in_fp8_is_saved_as_it_is():
    """JAX rounds what it saves to its own precision, which for FP8 would be IEEE's: no value above 240."""
    x = jnp.linspace(200.0, 448.0, 8)[None]

    def forward(x):
        q = quantize(x, jnp.float32(1), dtype=E4M3).q
        return q.astype(jnp.float32).sum(), q

    op = jax.custom_vjp(lambda x: forward(x)[0])
    op.defvjp(forward, lambda q, dy: (q.astype(jnp.float32) * dy,))
    plain = lambda x: op(x * 1.0)
    saved = jax.checkpoint(plain, policy=jax.checkpoint_policies.everything_saveable)
    testing.assert_same_bytes(jax.jit(jax.grad(saved))(x), jax.jit(jax.grad(plain))(x))
