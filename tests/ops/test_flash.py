"""The kernels of attention in FP8 and of the backward without dropout: handlers, references, shards, malformed calls.

On a GPU the handlers are cuDNN's; elsewhere the kernels are their references. test_cudnn_dropout has those of dropout.
"""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import numpy_attention
import pytest
from hopper import of_handlers
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
from transformer_engine_jax import recipe, testing
from transformer_engine_jax.ops.attention import Attention, flash, reference
from transformer_engine_jax.ops.attention.cudnn_flash import flash_attention
from transformer_engine_jax.ops.attention.flash import attention_bwd, attention_fp8_fwd
from transformer_engine_jax.ops.quantize import E4M3, cast

GPU = jax.default_backend() == "gpu"
# Weights and output are rounded to E4M3 by both sides, cuDNN's weights at another scale.
SAME = emulated.fp8_bound(*4 * [E4M3]) if GPU else emulated.FLIP
BACKWARD = {"bfloat16": 2e-2, "float16": 4e-3}


@pytest.fixture(autouse=True)
def handlers():
    if GPU and flash.missing():
        pytest.skip(flash.missing())


def kernel_operands(groups, repeats, q_len, k_len, size, dtype, lengths=False):
    shapes = [(8, q_len, groups, repeats, size), *[(8, k_len, groups, size)] * 2, (8, q_len, groups, repeats, size)]
    q, k, v, do = (jnp.asarray(x, dtype) for x in emulated.normal(6, *shapes))
    lens = [jnp.asarray([n, n // 2, 1, n, n, n // 3, n, n], jnp.int32) if lengths else None for n in (q_len, k_len)]
    return q, k, v, do, lens


def compare_fp8(got, expected):
    wide = lambda out: np.asarray(out.o, np.float32)
    testing.assert_close(wide(got), wide(expected), SAME)
    testing.assert_close(got.stats, expected.stats, 1e-3 if GPU else 1e-5)


@pytest.mark.parametrize("size", of_handlers(64, 128))
@pytest.mark.parametrize("fields", [dict(), dict(causal=True), dict(causal=True, left=7)], ids=str)
def test_fp8_kernel_is_its_reference(size, fields):
    q, k, v, _, _ = kernel_operands(2, 2, 32, 48, size, jnp.float32)
    codes = [cast(64 * x, E4M3) for x in (q, k, v)]
    scales = [*3 * [jnp.float32(1 / 64)], jnp.float32(256), jnp.float32(1 / 256), jnp.float32(64)]
    specs = [P("data", None, "model"), *2 * [P("data", None, "model")], *6 * [P()], None, None]
    operands = [*codes, *scales, None, None]
    testing.check_kernel(attention_fp8_fwd, operands, dict(scale=size**-0.5, **fields), compare_fp8, specs=specs)


@pytest.mark.parametrize("dtype, size", of_handlers(("bfloat16", 64), ("bfloat16", 128), ("float16", 64)))
@pytest.mark.parametrize("heads", ["groups", "repeats"])  # those that the mesh splits
def test_backward_without_dropout_is_its_reference(dtype, size, heads):
    q, k, v, do, _ = kernel_operands(2, 2, 32, 48, size, dtype)
    out = flash.attention_fwd.reference(q, k, v, None, None, None, scale=size**-0.5, dropout=0.0, causal=True)
    operands = [out.stats, q, k, v, out.o, do, None, None, None]
    split = dict(zip("gr", ("model", None) if heads == "groups" else (None, "model")))
    of_queries, of_keys = P("data", None, split["g"], split["r"]), P("data", None, split["g"])
    specs = [P("data", split["g"], split["r"]), of_queries, *2 * [of_keys], *2 * [of_queries], None, None, None]
    compare = lambda got, expected: testing.assert_close(got, expected, BACKWARD[dtype])
    attributes = dict(scale=size**-0.5, dropout=0.0, causal=True)
    testing.check_kernel(attention_bwd, operands, attributes, compare, specs=specs)


@pytest.mark.parametrize("fields", [dict(), dict(causal=True, window=(9, 0))], ids=str)
@pytest.mark.parametrize("heads, devices", [((4, 4), 1), ((4, 2), 1), ((4, 2), 4)], ids=str)
def test_one_more_logit(heads, devices, fields, monkeypatch):
    monkeypatch.setattr(flash, "shards", lambda _: devices)
    dtype = "bfloat16" if GPU else "float32"
    x = [
        jnp.asarray(x, dtype)
        for x in emulated.normal(5, *[(3, 48, n, 32) for n in (heads[0], *2 * heads[1:], heads[0])])
    ]
    options, offset = Attention(0.2, softmax_type="learnable", **fields), jnp.asarray([0.5, -2.0, 3.0, 0.0])
    run = jax.jit(lambda q, k, v, offset: flash_attention(options, q, k, v, softmax_offset=offset))
    with jax.numpy_rank_promotion("raise"):
        out, vjp = jax.vjp(run, *x[:3], offset)
    seen = numpy_attention.seen_keys(options, 3, 48, 48, None, None)
    exact = (np.asarray(a, np.float32) for a in x)
    expected = numpy_attention.attention(options, seen, *exact, None, np.asarray(offset))
    testing.assert_close((out, list(vjp(x[3]))), expected, BACKWARD.get(dtype, 1e-5))


def test_vmap_is_one_call():
    """Of a larger batch: the axis of the batch may be sharded, so its examples are independent."""
    q, k, v, do, lens = kernel_operands(2, 2, 32, 48, 64, "bfloat16", lengths=True)

    def run(q, do):
        out = flash.attention_fwd(q, k, v, None, *lens, scale=0.125, dropout=0.0)
        return out, attention_bwd(out.stats, q, k, v, out.o, do, None, *lens, scale=0.125, dropout=0.0)

    twice = jnp.stack([q, 2 * q], axis=1), jnp.stack([do, 3 * do])
    batched = jax.vmap(run, in_axes=(1, 0))
    assert "scan" not in str(jax.make_jaxpr(batched)(*twice))
    out, grads = batched(*twice)
    for i in range(2):
        one, one_grads = run(twice[0][:, i], twice[1][i])
        seen = jnp.arange(32)[None] < lens[0][:, None]  # on a GPU nothing is written past the lengths
        only = lambda x: jnp.where(seen[..., *[None] * (x.ndim - 2)], x, 0)
        testing.assert_close(only(out.o[i]), only(one.o), BACKWARD["bfloat16"])
        testing.assert_close(only(grads.dq[i]), only(one_grads.dq), BACKWARD["bfloat16"])


@pytest.mark.parametrize("fields", [dict(), dict(causal=True, left=5)], ids=str)
def test_references_in_blocks_are_those_at_once(fields, monkeypatch):
    q, k, v, do, lens = kernel_operands(2, 2, 40, 24, 16, jnp.float32, lengths=True)
    scales = [*3 * [jnp.float32(1)], jnp.float32(256), jnp.float32(1 / 256), jnp.float32(32)]
    attributes = dict(scale=0.25, **fields)
    codes = [cast(x, E4M3) for x in (q, k, v)]
    got = {}
    for logits in (2**24, 8 * 4 * 24 * 16):
        monkeypatch.setattr(reference, "LOGITS_PER_BLOCK", logits)
        out = jax.jit(partial(attention_fp8_fwd.reference, **attributes))(*codes, *scales, *lens)
        wide = out.o.astype(jnp.float32)
        backward = partial(attention_bwd.reference, dropout=0.0, **attributes)
        got[logits] = wide, out.stats, *jax.jit(backward)(out.stats, q, k, v, wide, do, None, *lens)
    testing.assert_close(*got.values(), 1e-5)


# --- The handlers ----------------------------------------------------------------------------------------------------


def test_lowered_for_cuda_needs_no_gpu():
    def loss(query, key, value):
        quantizers = te.attention_quantizers(recipe=recipe.Float8CurrentScaling(fp8_dpa=True))
        out = te.dot_product_attention(query, key, value, options=Attention(0.125), quantizers=quantizers)
        return jnp.sum(out.astype(jnp.float32))

    x = jnp.ones((2, 64, 4, 64), jnp.bfloat16)
    text = jax.jit(jax.grad(loss)).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "te_attention_fp8_fwd" in text and "te_attention_bwd" in text


@pytest.mark.parametrize(
    "flags, on",
    [
        ("", False),
        ("--xla_gpu_deterministic_ops=true", True),
        ("--xla_gpu_deterministic_ops --xla_gpu_autotune_level=0", True),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_exclude_nondeterministic_ops=1", True),
    ],
)
def test_deterministic_gradients_store_those_of_scores(monkeypatch, flags, on):
    """As cuDNN's frontend asks for on Hopper: 2 bytes a score, sequences in tiles."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    q, k = (
        jax.ShapeDtypeStruct((4, 4000, 8, 4, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 4096, 8, 128), jnp.bfloat16),
    )
    monkeypatch.setattr(flash, "on_hopper", lambda: True)
    dq, dkv, scores = 4 * 4096 * 130, 2 * 4096 * 128, 2 * 4096 * 4096 if on else 0
    assert attention_bwd.workspace(None, q, k) == (1 << 20) + 4 * 32 * (dq + 2 * dkv + scores)
    monkeypatch.setattr(flash, "on_hopper", lambda: False)  # not measured: more
    assert attention_bwd.workspace(None, q, k) == (32 << 20) + 4 * 32 * (dq + 4 * dkv + scores)


B, S, G, D = 2, 64, 4, 64
FORWARD = dict(scale=np.float32(1.0), causal=False, left=np.int64(-1), buffers=np.zeros(0, np.int64))
MALFORMED = {
    "dtype": (
        dict(q=jnp.zeros((B, S, G, 1, D), jnp.bfloat16)),
        {},
        "te_attention_fp8_fwd: q: expected f8_e4m3fn, got bf16",
    ),
    "head size": (dict(q=jnp.zeros((B, S, G, 1, 24), E4M3)), {}, "q: expected a head size in multiples of 16"),
    "scale": (dict(v_descale=jnp.zeros(3)), {}, r"te_attention_fp8_fwd: v_descale: expected f32\[\], got f32\[3\]"),
    "lengths": (dict(q_len=jnp.ones(B, jnp.int32)), {}, "te_attention_fp8_fwd: k_len: expected given where q_len is"),
    "window": ({}, dict(left=np.int64(3)), "te_attention_fp8_fwd: left: expected a window only where causal"),
}


if GPU:  # elsewhere there is no handler

    @pytest.mark.parametrize("case", MALFORMED)
    def test_malformed_calls_raise(case):
        replaced, attributes, message = MALFORMED[case]
        q, kv, one, absent = jnp.zeros((B, S, G, 1, D), E4M3), jnp.zeros((B, S, G, D), E4M3), jnp.ones(()), jnp.zeros(0)
        names = "q_descale", "k_descale", "v_descale", "weight_scale", "weight_descale", "o_scale"
        operands = dict(q=q, k=kv, v=kv) | dict.fromkeys(names, one) | dict(q_len=absent, k_len=absent) | replaced
        results = [
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B, G, 1, S), jnp.float32),
            jax.ShapeDtypeStruct((64 << 20,), jnp.uint8),
        ]
        with pytest.raises(Exception, match=message):
            call = jax.ffi.ffi_call("te_attention_fp8_fwd", results)
            jax.block_until_ready(call(*operands.values(), **(FORWARD | attributes)))
