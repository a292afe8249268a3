"""The order in which a step is computed, as dependencies in the traced step: it bounds its memory."""

import sys

import emulated
import jax
import jax.numpy as jnp
import pytest
from emulated import DELAYED, F32
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
from transformer_engine_jax import recipe as recipes
from transformer_engine_jax import testing
from transformer_engine_jax.ops.after import in_turn
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.dropout import drop
from transformer_engine_jax.ops.layernorm_dense import layernorm_dense
from transformer_engine_jax.ops.layernorm_mlp import layernorm_mlp
from transformer_engine_jax.ops.layernorm_projections import layernorm_projections
from transformer_engine_jax.primitive import kernel_p

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


def mlp_step(tokens: int, activations=("gelu",), kernel_dtype=jnp.float32):
    """A step of layernorm_mlp, kernels [64, A, 64] and [64, 64], and its arguments, of which the last is dy."""
    shapes = (tokens, WIDTH), WIDTH, (WIDTH, len(activations), WIDTH), (WIDTH, WIDTH), (tokens, WIDTH)
    x, gamma, k1, k2, dy = (jnp.asarray(a, jnp.float32) for a in emulated.normal(0, *shapes))

    def mlp(x, gamma, *kernels):
        return layernorm_mlp(x, gamma, None, kernels, activations=activations, quantizers=quantizers(2))

    def step(*args):
        *arrays, dy = args
        return jax.vjp(mlp, *arrays)[1](dy)

    return step, (x, gamma, k1.astype(kernel_dtype), k2.astype(kernel_dtype), dy)


@pytest.mark.parametrize(
    "tokens, kernel_dtype, last",
    [(112, jnp.float32, True), (128, jnp.float32, False), (48, jnp.bfloat16, True), (72, jnp.bfloat16, False)],
)
def test_a_kernel_s_gradient_comes_last_where_its_operands_are_smaller(tokens, kernel_dtype, last, devices):
    """Its buffer has room until then; else it comes first, and lets go of its operands."""
    devices(1)
    step, args = mlp_step(tokens, kernel_dtype=kernel_dtype)
    found = runs(step, *args)
    first, second = ("gemm", (WIDTH, 1, WIDTH)), ("gemm", (WIDTH, WIDTH))
    activation = next(name for name in found if name[0] == "activation_bwd")
    norm = ("rmsnorm_bwd", (tokens, WIDTH))
    assert (activation in found[second]) == last
    assert activation in found[first] and activation in found[norm]
    for later in (activation, first, norm):
        assert (second in found[later]) != last
    assert (first in found[norm]) != last


@pytest.mark.parametrize("count", [1, 8])
def test_an_activation_s_gradient_comes_after_its_value(count, devices):
    """It is written where the input was, of which XLA would keep a copy were the value computed later."""
    devices(count)
    x = jnp.asarray(emulated.normal(0, (48, 2, WIDTH))[0], jnp.bfloat16)

    def step(x, dy):
        return jax.vjp(lambda x: te.activation(x, ("silu", "linear")), x)[1](dy)

    assert ("activation_fwd", (48, WIDTH)) in runs(step, x, x[:, 0])["activation_bwd", (48, 2, WIDTH)]


@pytest.mark.parametrize("recipe", [DELAYED, recipes.Float8CurrentScaling()])
@pytest.mark.parametrize("op", ["layernorm_mlp", "layernorm_dense", "layernorm_projections"])
def test_what_a_norm_is_given_is_quantized_again_for_the_kernel_s_gradient(op, recipe, devices, monkeypatch):
    """Where kernels have 16 bits: its transposed copy is not kept, and the same.

    On a GPU but for the statistics, which a norm sums in another order where it writes both ways.
    """
    tokens = 48
    x, gamma, k1, k2 = (
        jnp.asarray(a, jnp.bfloat16) for a in emulated.normal(0, (tokens, 64), 64, (64, 1, 80), (80, 64))
    )
    of = lambda n: tuple(emulated.quantizers(emulated.states((1.0, 1.0, 1.0)), recipe) for _ in range(n))
    run = {
        "layernorm_mlp": lambda x, g, *k: layernorm_mlp(x, g, None, k, quantizers=of(2)),
        "layernorm_dense": lambda x, g, k, _: layernorm_dense(x, g, None, k[:, 0], quantizers=of(1)[0]),
        "layernorm_projections": lambda x, g, k, _: layernorm_projections(
            x, g, None, [k[:, 0], 2 * k[:, 0]], [None, None], quantizers=of(2)
        )[0],
    }[op]  # fmt: skip

    def step(*args):
        y, vjp = jax.vjp(run, *args)
        return y, vjp(jax.tree.map(jnp.ones_like, y))

    made = ("rmsnorm_fwd", (WIDTH, tokens))
    for count in (1, 8):
        devices(count)
        found = runs(step, x, gamma, k1, k2)
        by_kernel = {name: before for name, before in found.items() if name[0] == "gemm" and name[1][0] == WIDTH}
        assert made in found and any(made in before for before in by_kernel.values())
        gradient = "activation_bwd" if op == "layernorm_mlp" else "quantize"
        assert gradient in {name for name, _ in found[made]}, "not before there is a gradient"
    again = jax.jit(step)(x, gamma, k1, k2)
    for module in ("layernorm_mlp", "layernorm_dense", "layernorm_projections"):
        path = f"transformer_engine_jax.ops.{module}.transposes_later"
        monkeypatch.setattr(path, lambda *_: False)
    jax.clear_caches()
    assert made not in runs(step, x, gamma, k1, k2)
    before = jax.jit(step)(x, gamma, k1, k2)
    if jax.default_backend() == "gpu":
        testing.assert_close(again, before, testing.epsilon(jnp.bfloat16))
    else:
        testing.assert_same_bytes(again, before)


def test_what_a_checkpoint_policy_may_save_is_not_made_again(devices):
    """A name for what is quantized promises that it can be saved."""
    devices(1)
    x, kernel = jnp.ones((48, WIDTH), jnp.bfloat16), jnp.ones((WIDTH, 32), jnp.bfloat16)

    def gradient(name):
        state = te.GemmState.create(DELAYED)
        quantizers = te.gemm_quantizers(state, DELAYED, checkpoint_name=name)
        loss = lambda k: layernorm_dense(x, jnp.ones(WIDTH), None, k, quantizers=quantizers).astype(jnp.float32).sum()
        return runs(jax.grad(loss), kernel)

    made = ("rmsnorm_fwd", (WIDTH, 48))
    assert made in gradient(None) and made not in gradient("quantized")


GATED = ("silu", "linear")


@pytest.mark.parametrize(
    "tokens, activations, kernel_dtype, later",
    [
        (48, GATED, jnp.bfloat16, True),
        (48, ("gelu",), jnp.bfloat16, False),
        (4 * WIDTH, GATED, jnp.float32, False),
        (4 * WIDTH + 16, GATED, jnp.float32, True),
    ],
    ids=["16-bit kernels", "one activation", "few tokens", "many tokens"],
)
def test_a_gated_gradient_is_transposed_later_where_memory_is_short(tokens, activations, kernel_dtype, later, devices):
    """Later: when the activation has let go of what it reads."""
    devices(1)
    step, args = mlp_step(tokens, activations, kernel_dtype)
    found = runs(step, *args)
    transposed = [name for name in found if name[0] == "transpose"]
    assert transposed == [("transpose", (len(activations), WIDTH, tokens))] * later
    for name in transposed:
        assert ("activation_bwd", (tokens, len(activations), WIDTH)) in found[name]
        assert name in found["gemm", (WIDTH, len(activations), WIDTH)]
        assert name not in found["gemm", (tokens, WIDTH)], "the gradient of x reads the copy that is there"


def test_a_copy_that_is_transposed_later_is_the_same(devices, monkeypatch):
    devices(1)
    step, args = mlp_step(48, GATED)
    expected = jax.jit(step)(*args)
    monkeypatch.setattr(sys.modules[layernorm_mlp.__module__], "_transposed_later", lambda *_: True)
    jax.clear_caches()
    assert "transpose:" in str(jax.make_jaxpr(step)(*args))
    testing.assert_same_bytes(jax.jit(step)(*args), expected)


@pytest.mark.parametrize("tokens", [48, 160])
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


def test_dropout_draws_again_when_its_forward_has_drawn(devices):
    (x,) = (jnp.asarray(a) for a in emulated.normal(0, (32, WIDTH)))

    def step(x):
        y, vjp = jax.vjp(lambda x: drop(x, jax.random.key(0), 0.5), x)
        return y, vjp(x)

    drawn = "dropout", x.shape
    for count, waits in ((8, False), (1, True)):
        devices(count)
        assert (drawn in runs(step, x)[drawn]) == waits, count


def test_over_several_devices_a_gradient_waits_for_the_sum_of_the_kernels_gradient_before(devices):
    """And no more than that: its own kernel's is summed while what follows is computed."""
    x, k1, k2, k3, dy = (
        jnp.asarray(a, jnp.float32) for a in emulated.normal(0, (48, 64), (64, 80), (80, 96), (96, 112), (48, 112))
    )

    def step(x, *kernels):
        def layers(x, kernels):
            for kernel in kernels:
                x = dense(x, kernel, quantizers=quantizers(1)[0])
            return x

        return jax.vjp(layers, x, kernels)[1](dy)

    of_kernel = [("gemm", k.shape) for k in (k1, k2, k3)]
    of_input = [("gemm", (48, k.shape[0])) for k in (k1, k2, k3)]
    for count in (8, 1):
        devices(count)
        found = runs(step, x, k1, k2, k3)
        assert {of_kernel[2], of_input[1], of_input[2]} <= found[of_input[0]]
        assert (of_kernel[1] in found[of_input[0]]) == (count == 1)
        assert (of_kernel[2] in found[of_input[1]]) == (count == 1)

    with te.autocast(mesh_resource=te.MeshResource(tpsp_resource="model")):
        devices(8)
        assert not set(of_kernel) & runs(step, x, k1, k2, k3)[of_input[0]]


def test_waiting_is_of_one_traced_step_and_passes_every_transformation():
    x, other = jnp.ones((4, 8)), jnp.ones((3, 8))
    waits = lambda f, *args: str(jax.make_jaxpr(f)(*args)).count("te_after")

    def turns(x, other):
        return in_turn(in_turn(x, other)[0], 2 * other)[0]

    assert waits(turns, x, other) == waits(lambda *a: jax.jit(turns)(*a), x, other) == 1
    for f in (turns, jax.jit(turns), jax.vmap(turns, (None, 0)), jax.vmap(turns, (0, None))):
        testing.assert_same_bytes(f(x, other).reshape(-1, 8)[:4], x)
    assert waits(jax.grad(lambda x: dense(x, other.T, quantizers=quantizers(1)[0]).sum()), x) == 0, "of the step before"


def test_waiting_is_not_for_another_trace_that_lives_on():
    x, other, kept = jnp.ones((4, 8)), jnp.ones((3, 8)), []
    for _ in range(2):
        turn = lambda x, other: kept.append(in_turn(x, other)) or kept[-1]
        assert "te_after" not in str(jax.make_jaxpr(turn)(x, other))


def test_waiting_copies_where_the_compiler_gives_another_buffer():
    x, other = jnp.arange(48.0).reshape(6, 8), jnp.ones(3)
    call = jax.ffi.ffi_call("te_after", jax.ShapeDtypeStruct(x.shape, x.dtype))
    testing.assert_same_bytes(jax.jit(lambda x: call(2 * x, other))(x), 2 * x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_compiler_sees_what_is_waited_for(kind):
    """Sharded as both are: no collective for it."""
    mesh = testing.mesh_of((4,), ("data",))
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,))
    rows, whole = (jax.NamedSharding(mesh, spec) for spec in (P("data"), P()))
    turns = lambda x, a, b: in_turn(in_turn(x, a)[0], b)[0]
    step = jax.jit(turns, in_shardings=(rows, rows, whole), out_shardings=rows)
    args = [jax.device_put(jnp.ones(n), at) for n, at in [((8, 4), rows), ((4, 6), rows), (3, whole)]]
    with jax.set_mesh(mesh):
        lowered = lambda platform: step.trace(*args).lower(lowering_platforms=(platform,)).as_text()
        by_whom = "CustomSPMDPartitioning" if kind == AxisType.Auto else "te_after"
        assert by_whom in lowered("cuda") and "custom_call" not in lowered("tpu")
        compiled = step.lower(*args).compile()
        text = compiled.as_text()
        collectives = ("all-gather", "all-reduce", "collective-permute")
        assert "te_after" in text and not any(name in text for name in collectives)
        assert "output_to_operand_aliasing={{}: (0, {})}" in text, "nothing is copied"
        assert compiled(*args).sharding.is_equivalent_to(rows, 2)


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


def test_what_a_scan_stacks_waits_for_nothing(devices):
    devices(8)
    x = jnp.ones((32, 1, WIDTH))
    layer = lambda x, _: (te.activation(x, ("gelu",))[:, None], None)
    step = jax.grad(lambda x: jax.lax.scan(layer, x, None, length=2)[0].sum())
    assert "te_after" not in str(jax.make_jaxpr(step)(x))
    assert "te_after" in str(jax.make_jaxpr(jax.grad(lambda x: layer(x, None)[0].sum()))(x))
