"""The mechanism: one declaration holds under every transformation, and on bad input; meshes: test_kernel_meshes.py."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

import transformer_engine_jax as te
from transformer_engine_jax import decisions, testing
from transformer_engine_jax.handlers import HANDLERS
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.activation import activation_fwd
from transformer_engine_jax.ops.attention.flash_packed import attention_blank
from transformer_engine_jax.ops.layernorm import layernorm_fwd, rmsnorm_fwd
from transformer_engine_jax.ops.quantize import E4M3, dequantize, quantize
from transformer_engine_jax.ops.state import Scaling
from transformer_engine_jax.primitive import kernel_p

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (8, 4, 64))
SCALE = jnp.float32(37.0)
G = jnp.linspace(0.5, 1.5, 64)


def quantized(x):
    return quantize(x, SCALE, dtype=E4M3, q_t=True)


@pytest.mark.parametrize("tokens, few", [(1, True), (63, True), (64, False), (None, False)])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_of_few_tokens_a_gpu_compiles_the_reference(platform, tokens, few, monkeypatch):
    monkeypatch.setattr(decisions, "platform", lambda: platform)
    monkeypatch.setattr(decisions, "FEW_TOKENS", 64)
    run = lambda x: rmsnorm_fwd.for_tokens(tokens)(x, G, None, epsilon=1e-6).y
    (call,) = [eqn.params["call"] for eqn in jax.make_jaxpr(run)(X).eqns if eqn.primitive is kernel_p]
    assert bool(call.reference) == (few and platform == "gpu")
    testing.assert_close(run(X), rmsnorm_fwd(X, G, None, epsilon=1e-6).y, 1e-6)


# --- Declarations ----------------------------------------------------------------------------------------------------


def test_a_rule_that_does_not_fit_the_signature_is_refused():
    with pytest.raises(TypeError, match=r"does not name \['x', 'y'\]"):

        @kernel("... -> ...")
        def wrong(x, y) -> Any:
            return x


UNKNOWN = {
    "aliases": (dict(aliases={"x": "y"}), r"unknown buffers \['y'\]"),
    "reduce": (dict(reduce={"y": "max"}), r"unknown buffers \['y'\]"),
    "whole": (dict(whole="K"), r"wrong: names that are not of .* {'whole': \['K'\]}"),
    "units": (dict(units={"K": 16}), r"{'units': \['K'\]}"),
    "platforms": (dict(platforms=("gpu",)), r"{'platforms': \['gpu'\]}"),
    "optional": (dict(optional=("result",)), r"{'optional': \['result'\]}"),
    "parts": (dict(parts={"x": "beta"}), r"{'parts': \['beta'\]}"),
}


@pytest.mark.parametrize("option", UNKNOWN)
def test_options_that_name_what_is_not_there_are_refused(option):
    options, message = UNKNOWN[option]
    with pytest.raises(TypeError, match=message):

        @kernel("... k -> ... k", **options)
        def wrong(x, *, in_place=False) -> Any:
            return x


def test_an_axis_of_two_sizes_is_refused():
    add = kernel("... k, k -> ... k")(lambda x, y: x + y)
    with testing.reference_kernels(), pytest.raises(ValueError, match=r"axis k of y is 1 long, and 64 elsewhere"):
        add(X, G[:1])
    with pytest.raises(ValueError, match=r"result: expected the axes \('k',\), got \[\]"):
        kernel("k -> k")(lambda x: jnp.sum(x))(G)


def test_a_declaration_that_its_handler_does_not_fit_is_refused():
    with pytest.raises(
        RuntimeError,
        match=r"takes 2 operands, 1 results and the attributes \[\], its declaration gives 1, 1 and \['flag'\]",
    ):

        @kernel("... -> ...")
        def dequantize(x, *, flag=False) -> Any:
            return x

        jax.jit(dequantize)(X)


def test_a_result_that_loses_an_axis_says_what_becomes_of_its_shards():
    with pytest.raises(TypeError, match=r"wrong: total has no axis \['k'\] of the rule `m k -> m k, m`: expected `red"):

        class Results(NamedTuple):
            y: jax.Array
            total: jax.Array

        @kernel("m k -> m k, m")
        def wrong(x) -> Results:
            return Results(x, x.sum(1))


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


def test_a_kernel_without_its_handler_says_what_to_do():
    @kernel("... k -> ... k", platforms=("cpu",))
    def not_built(x) -> jax.Array:
        return x

    with pytest.raises(RuntimeError, match="not_built: expected te_not_built among the handlers for cpu, got"):
        jax.jit(not_built).trace(X).lower(lowering_platforms=("cpu",))


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
    with pytest.raises(ValueError, match=r"quantize: x has 3 axes, which does not fit `m\* k\*`"):
        quantize(X, SCALE, dtype=E4M3, k_axes=4)


# --- Transformations -------------------------------------------------------------------------------------------------


def test_same_bytes_are_those_of_all():
    x = jnp.ones(3)
    testing.assert_same_bytes({"a": x, "b": (x, None)}, {"a": x, "b": (x, None)})
    for got in ({"a": x}, {"a": x, "b": (x, x)}, {}, {"a": x, "c": (x, None)}):
        with pytest.raises(AssertionError, match="expected the same leaves"):
            testing.assert_same_bytes(got, {"a": x, "b": (x, None)})


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


@pytest.mark.parametrize("each", [False, True], ids=["one call", "an amax each"])
def test_vmap_of_a_cast_has_the_one_scale_of_all_examples(each):
    def cast(x):
        out = quantize(x, SCALE, dtype=E4M3, amax=each, scale_inv=True)
        return out.q, out.scale_inv

    run = jax.vmap(cast, out_axes=(0, None))  # None: an error where it depends on the example
    q, scale_inv = run(X)
    testing.assert_same_bytes((q, scale_inv), (jnp.stack([cast(x)[0] for x in X]), cast(X[0])[1]))
    text = str(jax.make_jaxpr(run)(X))
    assert text.count("te_kernel") == 1 and ("scan" in text) == each
    of_none = run(X[:0])
    assert of_none[0].shape == (0, *X.shape[1:]) and np.isfinite(of_none[1])


def test_vmap_over_no_examples():
    x, at = jnp.ones((0, 2, 6, 16), jnp.bfloat16), jnp.zeros((0, 2, 1), jnp.int32)
    assert jax.vmap(attention_blank)(x, at, at).shape == x.shape  # whose examples join those of the leading axis


def test_vmap_of_a_vmap_and_of_an_unbatched_operand():
    both = jax.vmap(jax.vmap(lambda q: dequantize(q, SCALE, dtype=jnp.float32)))(quantized(X).q)
    testing.assert_same_bytes(both, dequantize(quantized(X).q, SCALE, dtype=jnp.float32))
    scales = jnp.arange(1.0, 4.0)
    out = jax.vmap(lambda s: quantize(X, s, dtype=E4M3).q)(scales)
    testing.assert_same_bytes(out[2], quantize(X, scales[2], dtype=E4M3).q)


def test_casts_are_not_differentiable_by_themselves():
    with pytest.raises(NotImplementedError, match=r"quantize: expected .* \(te.quantize has none, train with te"):
        jax.grad(lambda x: te.quantize(x, SCALE, dtype=E4M3).amax)(X)


def test_names_of_dtypes_and_numbers_of_python():
    expected = quantize(X, SCALE, dtype=E4M3)
    with jax.enable_x64(True):
        testing.assert_same_bytes(quantize(X, 37.0, dtype="float8_e4m3fn"), expected)
    with pytest.raises(ValueError, match="dtype: expected float8_e4m3fn or float8_e5m2, got bfloat16"):
        quantize(X, SCALE, dtype=jnp.bfloat16)


# --- Malformed calls -------------------------------------------------------------------------------------------------

ABSENT = ((0,), jnp.float32)
FROM_SCALE = {k: np.float32(v) if isinstance(v, float) else v for k, v in Scaling()._asdict().items()}


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


def test_empty_tensors():
    out = quantize(jnp.zeros((0, 16)), SCALE, dtype=E4M3, q_t=True, colsum=True)
    assert out.q.shape == (0, 16) and out.q_t.shape == (16, 0)
    assert out.amax == 0 and not out.colsum.any()


def test_lowering_for_cuda_needs_no_gpu():
    text = jax.jit(quantized).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert "te_quantize" in text and kernel_p.name == "te_kernel"


# --- Static attributes ------------------------------------------------------------------------------------------------


def test_numbers_of_numpy_are_those_of_python():
    got = quantize(X, SCALE, dtype=E4M3, k_axes=np.int64(3), q_t=np.bool_(True))  # calls are kept: no other is equal
    testing.assert_same_bytes(got, quantize(X, SCALE, dtype=E4M3, k_axes=3, q_t=True))


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


@pytest.mark.parametrize("few", [False, True])
def test_where_ranks_must_agree(few, monkeypatch):
    monkeypatch.setattr(decisions, "platform", lambda: "gpu" if few else "cpu")
    monkeypatch.setattr(decisions, "FEW_TOKENS", 64)
    with jax.numpy_rank_promotion("raise"):
        te.layernorm(X[:3, :3], G, G)
        te.dense(X[:3, :3], jnp.ones((64, 16)), jnp.ones(16))


def test_where_dtypes_must_agree_in_64_bits():
    x, kernel = jnp.ones((7, 24)), jnp.ones((24, 8))  # of no other test, whose results are kept
    state, rec = te.GemmState.create(), te.recipe.DelayedScaling()
    ids = te.SequenceDescriptor.from_segment_ids_and_pos(jnp.ones((1, 7), jnp.int32), max_segments=2)
    qkv = jnp.ones((1, 7, 2, 8), jnp.float32)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        jax.grad(lambda s: te.dense(x, kernel, quantizers=te.gemm_quantizers(s, rec)).sum())(state)
        te.dense(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), jnp.ones(8, jnp.bfloat16))
        te.dot_product_attention(qkv, qkv, qkv, options=te.Attention(1.0), sequence_descriptor=ids)
