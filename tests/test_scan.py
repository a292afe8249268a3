"""Layers in a scan: no kernel runs once for its place in a stacked array and once more for what reads its result."""

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import steps
from steps import CURRENT, DELAYED

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import policies, recipe, testing
from transformer_engine_jax.flax import STATE_COLLECTION, TransformerLayer
from transformer_engine_jax.ops.attention.cudnn_flash import flash_attention
from transformer_engine_jax.ops.attention.flash_qkv import qkv_attention
from transformer_engine_jax.ops.attention.reference import Attention
from transformer_engine_jax.ops.dense import Dense
from transformer_engine_jax.ops.product import product
from transformer_engine_jax.primitive import kernel_p

LENGTH = 2
(X,) = (jnp.asarray(a) for a in emulated.normal(0, (2, 8, 32)))
# What XLA looks through, from a kernel to its place in a stacked array.
VIEWS = {"reshape", "squeeze", "bitcast_convert_type", "name", "reduce_precision"}


def run_twice(jaxpr) -> set[str]:
    """Kernels in the scans of a program of which a result is both stacked and used, no barrier between.

    Not for a scalar, as a scale, whose places in a stack no kernel can write: they must lie at multiples of 128 bytes.
    """
    found = set()
    for eqn in jaxpr.eqns:
        for inner in inside(eqn):
            found |= run_twice(inner)
        if eqn.primitive.name == "scan":
            used, made = set(), {}
            carried, stacked = results_of(eqn, used, made)
            used |= set(carried)
            found |= {made[r] for r in stacked if r in used and r is not None and r.aval.ndim}
    return found


def results_of(scan, used: set, made: dict) -> tuple[list, list]:
    """As `visit`, of what a scan carries and of what it stacks."""
    body = scan.params["jaxpr"].jaxpr
    results = visit(body, [None] * len(body.invars), used, made)
    is_carried = [a.aval.shape == b.aval.shape for a, b in zip(body.outvars, scan.outvars, strict=True)]
    return tuple([r for r, c in zip(results, is_carried) if c == wanted] for wanted in (True, False))


def inside(eqn) -> list:
    of = [
        getattr(p, "jaxpr", p) for p in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns"))
    ]
    return [jaxpr for jaxpr in of if hasattr(jaxpr, "eqns")]


def visit(jaxpr, given: list, used: set, made: dict) -> list:
    """Of each result the kernel's result that it is, or None; adds what is used, and the names of kernels' results."""
    values = dict(zip(jaxpr.invars, given))
    value = lambda v: None if isinstance(v, jax.extend.core.Literal) else values.get(v)
    for eqn in jaxpr.eqns:
        operands = [value(v) for v in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name in VIEWS:
            values[eqn.outvars[0]] = operands[0]
        elif inner is not None and eqn.primitive.name != "scan":
            values.update(zip(eqn.outvars, visit(getattr(inner, "jaxpr", inner), operands, used, made)))
        else:
            used.update(operands)
            if eqn.primitive is kernel_p:
                values.update((v, v) for v in eqn.outvars)
                made.update((v, eqn.params["call"].kernel.name) for v in eqn.outvars)
    return [value(v) for v in jaxpr.outvars]


def scanned(body):
    return lambda x, layers: jax.lax.scan(lambda x, layer: (body(x, layer), None), x, layers)[0]


def gradient(f, *args):
    return jax.make_jaxpr(jax.grad(lambda *args: f(*args).astype(jnp.float32).sum(), argnums=(0, 1)))(*args).jaxpr


class Stack(nn.Module):
    policy: object
    fields: tuple

    @nn.compact
    def __call__(self, x):
        layer = TransformerLayer
        if self.policy != "none":
            layer = nn.remat(layer, policy=self.policy, prevent_cse=False)
        scan = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": 0, STATE_COLLECTION: 0},
            split_rngs={"params": True},
            length=LENGTH,
            metadata_params={nn.PARTITION_NAME: None},
        )
        return scan(layer(32, 64, 4, **dict(self.fields), name="layer"), x, None)[0]


GPT = dict(hidden_dropout=0.0, attention_dropout=0.0)
LLAMA = GPT | dict(
    layernorm_type="rmsnorm",
    mlp_activations=("silu", "linear"),
    use_bias=False,
    num_gqa_groups=2,
    enable_rotary_pos_emb=True,
    rotary_pos_emb_group_method="consecutive",
)
BOTH = jax.checkpoint_policies.save_from_both_policies(policies.quantized_saveable, policies.gemms_saveable)


@pytest.mark.parametrize("fields", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(
    "policy",
    ["none", None, policies.gemms_saveable, policies.quantized_saveable, BOTH,
     jax.checkpoint_policies.everything_saveable],
    ids=["no remat", "nothing", "gemms", "quantized", "both", "everything"],
)  # fmt: skip
@pytest.mark.parametrize(
    "rec", [DELAYED, CURRENT, recipe.DelayedScaling(fp8_dpa=True)], ids=["delayed", "current", "dpa"]
)
@pytest.mark.parametrize("devices", [1, 8])
def test_of_a_layer_nothing_runs_twice(rec, policy, fields, devices, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    model = Stack(policy, tuple(fields.items()))
    with steps.autocast(rec):
        variables = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), X))
        found = gradient(lambda v, x: model.apply(v, x), variables, X)
        assert run_twice(found) == set()


def attention(x, _):
    return flash_attention(OPTIONS, x, x, x)


def attention_in_one_array(x, _):
    return qkv_attention(OPTIONS, jnp.stack([x] * 3, axis=2))


OPTIONS = Attention(0.25, causal=True)


@pytest.mark.parametrize("op", [attention, attention_in_one_array])
def test_of_attention_nothing_runs_twice(op):
    x = jnp.zeros((2, 8, 4, 16), jnp.bfloat16)
    assert run_twice(gradient(scanned(op), x, jnp.zeros(LENGTH))) == set()


def test_of_products_in_16_bits_nothing_runs_twice():
    x, kernels = jnp.zeros((8, 32), jnp.bfloat16), jnp.zeros((LENGTH, 32, 32))

    def body(x, kernel):
        for _ in range(2):  # the second keeps what the first gives
            x = product(Dense.of(x, kernel, None, 1), x, kernel, None, None, None)
        return x

    found = gradient(scanned(body), x, kernels)
    assert run_twice(found) == set()
    stacked = next(eqn for eqn in found.eqns if eqn.primitive.name == "scan").outvars[1:]
    assert {v.aval.shape for v in stacked} == {(LENGTH, 8, 32)}, "kernels are those of the scan, not stacked again"


def test_what_is_only_stacked_has_no_barrier_before_it():
    """A kernel writes it in its place."""
    with steps.autocast(DELAYED):
        model = Stack("none", tuple(GPT.items()))
        variables = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), X))
        found = gradient(lambda v, x: model.apply(v, x), variables, X)
    (forward,) = [e for e in found.eqns if e.primitive.name == "scan" and not e.params["reverse"]]
    _, stacked = results_of(forward, set(), made := {})
    names = [made[r] for r in stacked if r is not None and r.aval.size >= X.size and r.aval.dtype.itemsize == 1]
    assert {"layernorm_fwd", "activation_fwd", "quantize"} <= set(names)


def test_layers_computed_again_keep_nothing_for_the_backward_pass():
    """The forward pass of a rematerialised layer quantizes for its own products alone, and measures nothing."""
    with steps.autocast(DELAYED):
        model = Stack(None, tuple(GPT.items()))
        variables = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), X))
        found = gradient(lambda v, x: model.apply(v, x), variables, X)
    forward, backward = (
        [dict(call.attributes) for call in kernels(eqn) if {"q_t", "y_t"} & set(dict(call.attributes))]
        for eqn in sorted((e for e in found.eqns if e.primitive.name == "scan"), key=lambda e: e.params["reverse"])
    )
    both = lambda calls: [c for c in calls if c.get("q_t", c.get("y_t")) and c.get("q", True)]
    assert forward and not both(forward) and not any(c["report"] for c in forward)
    assert len(both(backward)) >= len(forward) - 1  # but the second kernel's, whose product nobody needs again


def kernels(eqn) -> list:
    of_one = [eqn.params["call"]] if eqn.primitive is kernel_p else []
    return of_one + [call for jaxpr in inside(eqn) for inner in jaxpr.eqns for call in kernels(inner)]


@pytest.mark.parametrize("axis", [0, 1])
def test_init_state_stacks_along_the_axis_of_the_scan(axis):
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"params": 0, STATE_COLLECTION: axis}
            run = nn.scan(lambda layer, x, _: (layer(x), None), axes, split_rngs={"params": True}, length=LENGTH)
            return run(te_flax.DenseGeneral(32), x, None)[0]

    with te.autocast(True, DELAYED):
        expected = Stack().init(jax.random.key(0), X)
        made = te_flax.init_state(Stack(), {"params": expected["params"]}, X)
        for got, wanted in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
            testing.assert_same_bytes(got, wanted)
        testing.assert_same_bytes(Stack().apply(made, X), Stack().apply(expected, X))
