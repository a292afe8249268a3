"""The order in which gradients are computed on one device, as dependencies in the traced step: it bounds its memory."""

import emulated
import jax
import jax.numpy as jnp
import pytest
from emulated import DELAYED, F32

from transformer_engine_jax import testing
from transformer_engine_jax.kernel import kernel_p
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.layernorm_mlp import layernorm_mlp

WIDTH = 64


def runs(step, *args) -> dict[tuple[str, tuple[int, ...]], set]:
    """Of each kernel that a step runs, as (name, shape of its first result): those that must run before it."""
    before, found = {}, {}

    def visit(jaxpr, given):
        before.update(zip(jaxpr.invars, given))
        of = lambda v: before.get(v, frozenset()) if not isinstance(v, jax.extend.core.Literal) else frozenset()
        for eqn in jaxpr.eqns:
            past = frozenset().union(*map(of, eqn.invars))
            inner = eqn.params.get("jaxpr")
            if inner is not None:
                inner = getattr(inner, "jaxpr", inner)
                visit(inner, [of(v) for v in eqn.invars])
                before.update(zip(eqn.outvars, map(of, inner.outvars)))
                continue
            if eqn.primitive is kernel_p:
                name = eqn.params["call"].kernel.name, eqn.outvars[0].aval.shape
                found[name] = found.get(name, set()) | past
                past |= {name}
            before.update((v, past) for v in eqn.outvars)

    visit(jax.make_jaxpr(step)(*args).jaxpr, [])
    return found


@pytest.fixture
def devices(monkeypatch):
    """Says how many there are: over several, as tests have, the order is left to XLA. JAX keeps what it traced."""

    def are(count: int):
        monkeypatch.setattr(jax, "device_count", lambda: count)
        jax.clear_caches()

    yield are
    jax.clear_caches()


def quantizers(n: int):
    return tuple(emulated.quantizers(emulated.states((1.0, 1.0, 1.0)), DELAYED) for _ in range(n))


def mlp_step(tokens: int):
    """A step of layernorm_mlp, kernels [64, 1, 64] and [64, 64], and its arguments, of which the last is dy."""
    x, gamma, k1, k2, dy = (
        jnp.asarray(a, jnp.float32)
        for a in emulated.normal(0, (tokens, WIDTH), WIDTH, (WIDTH, 1, WIDTH), (WIDTH, WIDTH), (tokens, WIDTH))
    )

    def step(*args):
        *arrays, dy = args
        return jax.vjp(lambda *a: layernorm_mlp(*a[:2], None, a[2:], quantizers=quantizers(2)), *arrays)[1](dy)

    return step, (x, gamma, k1, k2, dy)


@pytest.mark.parametrize(
    "tokens, last",
    [(48, False), (56, True), (80, True), (96, False)],
    ids=["2.7 times", "2.3 times", "1.6 times", "1.3 times"],
)
def test_second_kernel_s_gradient_waits_for_the_activation_where_its_operands_are_smaller(tokens, last, devices):
    devices(1)
    step, args = mlp_step(tokens)
    found = runs(step, *args)
    gradient = ("gemm", (WIDTH, WIDTH))  # the first kernel's is [64, 1, 64]
    activation = next(name for name in found if name[0] == "activation_bwd")
    assert (activation in found[gradient]) == last
    assert (gradient in found[activation]) != last
    assert {gradient, activation} <= found["gemm", (WIDTH, 1, WIDTH)], "the first kernel's gradient is last of all"


@pytest.mark.parametrize("tokens", [48, 56])
def test_the_order_changes_no_value(tokens, devices):
    step, args = mlp_step(tokens)
    devices(8)
    expected = jax.jit(step)(*args)
    devices(1)
    testing.assert_close(jax.jit(step)(*args), expected, F32)


def test_a_backward_pass_waits_for_its_forward(devices):
    x, kernel, dy = (jnp.asarray(a, jnp.float32) for a in emulated.normal(0, (32, WIDTH), (WIDTH, 48), (32, 48)))

    def step(x, kernel, dy):
        y, vjp = jax.vjp(lambda *a: dense(*a, quantizers=quantizers(1)[0]), x, kernel)
        return y, vjp(dy)

    output, gradient = ("gemm", (32, 48)), ("gemm", (32, WIDTH))
    for count, waits in ((8, False), (1, True)):
        devices(count)
        assert (output in runs(step, x, kernel, dy)[gradient]) == waits, count


def test_the_layers_of_a_scan_have_none(devices):
    """A barrier between a kernel and its place in a stacked array would cost a copy; microbatches stack nothing."""
    devices(1)
    x, *kernels = (jnp.asarray(a, jnp.float32) for a in emulated.normal(0, (32, WIDTH), *[(WIDTH, WIDTH)] * 2))
    layer = lambda x, k: dense(x, k, quantizers=quantizers(1)[0])
    rematerialised = jax.checkpoint(layer, prevent_cse=False)

    def scanned(layer):
        return lambda x, kernels: jax.lax.scan(lambda x, k: (layer(x, k), None), x, jnp.stack(kernels))[0].sum()

    def unrolled(x, kernels):
        for kernel in kernels:
            x = layer(x, kernel)
        return x.sum()

    def over_microbatches(loss):
        step = lambda sums, x: (jax.tree.map(jnp.add, sums, jax.grad(loss, argnums=1)(x, kernels)), None)
        return lambda x, _: jax.lax.scan(step, jax.tree.map(jnp.zeros_like, kernels), jnp.stack([x, x]))[0]

    def barriers(step):
        return str(jax.make_jaxpr(step)(x, kernels)).count("te_all_at_once")

    in_order = barriers(jax.grad(unrolled, argnums=1))
    assert in_order > 0
    expected = (scanned(layer), 0), (scanned(rematerialised), 0), (unrolled, in_order)
    for stack, count in expected:
        assert barriers(jax.grad(stack, argnums=1)) == barriers(over_microbatches(stack)) == count
