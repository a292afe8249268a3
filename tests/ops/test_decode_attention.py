"""Attention over a KV cache: by lengths, which our cuDNN handlers are told, against numpy; and where by a mask."""

import dataclasses

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import numpy_attention
import pytest
from emulated import BF16, F32
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import Attention, SequenceDescriptor, backends, decode, flash, reference
from transformer_engine_jax.ops.attention.decode import KVCache, decode_attention
from transformer_engine_jax.ops.attention.flash_cached import attention_cached, cached_attention

GPU = jax.default_backend() == "gpu"
B, S, H, G, D = 3, 32, 4, 2, 64
CASES = {
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(6, 0)),
    "all so far": dict(),
    "off by one": dict(causal=True, softmax_type="off_by_one"),
    "offsets": dict(causal=True, softmax_type="learnable"),
    "window ahead": dict(window=(6, 2)),
}


def step(fields, q_len: int, index: int, dtype):
    """(operands with a cotangent, the op, numpy's results)."""
    options = Attention(0.2, **fields)
    end = min(index + q_len, S)
    query, key, value, dy, offset = emulated.normal(
        q_len, *((B, n, h, D) for n, h in ((q_len, H), (S, G), (S, G), (q_len, H))), (H,)
    )
    key[:, end:] = value[:, end:] = dy[:, S - index :] = 0
    offset = offset if options.softmax_type == "learnable" else None
    operands = [jnp.asarray(x, dtype) for x in (query, key, value)]

    def op(query, key, value):
        there = None if offset is None else jnp.asarray(offset)
        return decode_attention(query, key, value, index=jnp.int32(index), options=options, softmax_offset=there)

    rows = [[(0, q_len, 0, index + q_len)]] * B
    seen = numpy_attention.seen_keys(options._replace(bottom_right=True), B, q_len, S, rows)
    rounded = [np.asarray(x, np.float32) for x in (*operands, jnp.asarray(dy, dtype))]
    out, grads = numpy_attention.attention(options, seen, *rounded, offset=offset)
    out[:, S - index :] = np.nan
    return (*operands, jnp.asarray(dy, dtype)), op, (out, grads[:3])


@pytest.mark.parametrize("q_len, index", [(1, 0), (1, 9), (1, S - 1), (1, S + 2), (6, 0), (7, 11), (6, S - 2), (S, 0)])
@pytest.mark.parametrize("case", CASES)
def test_is_numpys(case, q_len, index):
    (*operands, dy), op, (out, grads) = step(CASES[case], q_len, index, jnp.bfloat16 if GPU else jnp.float32)
    got, vjp = jax.vjp(jax.jit(op), *operands)
    bound = 5 * BF16 if GPU else F32
    there = slice(0, max(S - index, 0))
    assert np.isnan(np.asarray(got, np.float32)[:, there.stop :]).all()
    testing.assert_close(np.asarray(got, np.float32)[:, there], out[:, there], bound)
    if there.stop:
        testing.assert_close(jax.device_get(vjp(dy)), tuple(grads), bound)
    by_lengths = case in ("causal", "window", "all so far") and q_len < S
    told = GPU and by_lengths and G % jax.device_count() == 0
    assert ("attention_cached" in str(jax.make_jaxpr(op)(*operands))) == told


# What is missing of the handlers, head size, options, more of the call, whether it is by lengths on one device.
TOLD = {
    "plain": ("", 64, {}, {}, True),
    "window": ("", 64, dict(window=(2, 0)), {}, True),
    "off by one": ("", 64, dict(softmax_type="off_by_one"), {}, False),
    "mask": ("", 64, {}, dict(mask=np.zeros((1, 1, 1, S), bool)), False),
    "bias": ("", 64, {}, dict(bias=np.zeros((1, 1, 1, S), np.float32)), False),
    "score_mod": ("", 64, dict(score_mod=lambda scores, q, k: scores), {}, False),
    "wide heads": ("", 256, {}, {}, False),
    "no headers": ("no headers", 64, {}, {}, False),
}


@pytest.mark.parametrize("rows", [S, 1])
def test_a_chunk_as_long_as_the_cache(rows):
    """Of what is told of all tokens it takes the rows of its own places, and what is past the end is NaN."""
    key, query, bias = (jnp.asarray(x) for x in emulated.normal(6, (B, S, G, D), (B, S, H, D), (1, H, rows, S)))
    options = Attention(0.2, causal=True)
    whole = te.dot_product_attention(query, key, key, options=options, bias=bias)
    late = jnp.concatenate([query[:, 5:], query[:, :5]], axis=1)
    got = decode_attention(late, key, key, index=jnp.int32(5), options=options, bias=bias)
    testing.assert_close(got[:, : S - 5], whole[:, 5:], F32)
    assert np.isnan(got[:, S - 5 :]).all()


PADDING = np.arange(S) < np.array([0, 4, 9])[:, None]
LONG = {
    "causal": (dict(causal=True), {}),
    "window, off by one": (dict(causal=True, window=(6, 0), softmax_type="off_by_one"), {}),
    "padding": (dict(causal=True), dict(mask=PADDING[:, None, None])),
    "a mask of all tokens": (dict(causal=True), dict(mask=np.random.default_rng(0).random((1, 1, S, S)) < 0.3)),
    "bias": (dict(window=(6, 2)), dict(bias=emulated.normal(7, (1, H, S, S))[0])),
    "dropout": (dict(causal=True, dropout=0.5), dict(dropout_key=jax.random.key(0))),
    "score_mod": (dict(causal=True, score_mod=lambda scores, q, k: scores + 0.1 * q * k), {}),
}


@pytest.mark.parametrize("q_len, index", [(9, 7), (9, S - 5), (S, 0)])
@pytest.mark.parametrize("case", LONG)
def test_a_long_prompt_in_blocks(case, q_len, index, monkeypatch):
    fields, call = LONG[case]
    query, key, value = (jnp.asarray(x) for x in emulated.normal(8, (B, q_len, H, D), (B, S, G, D), (B, S, G, D)))
    run = lambda: decode_attention(query, key, value, index=jnp.int32(index), options=Attention(0.2, **fields), **call)
    whole = run()
    monkeypatch.setattr(reference, "LOGITS_PER_BLOCK", B * H * S * 4)
    monkeypatch.setattr(reference, "LEAST_ROWS", 4)
    blocks, there = run(), slice(0, S - index)
    testing.assert_close(blocks[:, there], whole[:, there], F32)
    assert np.isnan(blocks[:, S - index :]).all()


@pytest.mark.parametrize("padded", [False, True])
def test_memory_of_a_long_prompt_grows_with_its_length_and_not_its_square(padded):
    """Compiled only: prompts of 16 k and 32 k tokens, as long as their caches. A mask [Q, S] has as many bytes as
    4 and 16 blocks have logits."""

    def prompt(query, key, index):
        mask = jnp.zeros((1, 1, 1, key.shape[1]), bool) if padded else None
        options = Attention(0.2, causal=True, softmax_type="off_by_one")
        return decode_attention(query, key, key, index=index, options=options, mask=mask)

    def bytes_for(tokens: int) -> int:
        x, index = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
        with jax.default_device(jax.devices("cpu")[0]):
            return jax.jit(prompt).lower(x, x, index).compile().memory_analysis().temp_size_in_bytes

    assert bytes_for(2**15) < 1.2 * bytes_for(2**14)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("case", TOLD)
@pytest.mark.parametrize("q_len", [1, 5])
def test_where_cudnn_is_told_lengths(case, devices, q_len, monkeypatch):
    """Not over devices that share the heads of one group: each would have a copy of the cache."""
    missing, size, fields, call, ours = TOLD[case]
    ours = ours and G % devices == 0
    for module in (backends, decode):
        monkeypatch.setattr(module, "platform", lambda: "gpu")  # nothing is compiled
    monkeypatch.setattr(backends, "missing", lambda: missing)
    monkeypatch.setattr(backends, "on_hopper", lambda: True)
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda query, *_, **__: query)
    query, key = (jax.ShapeDtypeStruct((B, n, h, size), jnp.bfloat16) for n, h in ((q_len, H), (S, G)))
    attend = lambda query, key, value: decode_attention(
        query, key, value, index=3, options=Attention(0.2, causal=True, **fields), **call
    )
    jaxpr = jax.make_jaxpr(attend)(query, key, key)
    assert ("attention_cached" in str(jaxpr)) == ours
    if ours:  # the cache is read where it lies
        assert not [e for e in jaxpr.eqns if e.outvars[0].aval.shape == key.shape]


@pytest.fixture(params=[1, 8])
def devices(request, monkeypatch):
    """Over how many a cache may be sharded: a token is written another way where it is not."""
    monkeypatch.setattr(decode, "shards", lambda x: request.param)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("index", [0, 5, S - 2, S - 1, S, S + 4])
def test_what_is_past_the_end_is_dropped(index, tokens, devices):
    shapes = [(B, n, G, d) for n in (S, tokens) for d in (D, 8)]
    key, value, *new = (jnp.asarray(x) for x in emulated.normal(4, *shapes))
    got = jax.jit(KVCache.append)(KVCache(key, value, jnp.int32(index)), *new)
    kept = max(min(tokens, S - index), 0)
    for cached, before, added in zip(got, (key, value), new):
        testing.assert_same_bytes(
            cached, np.concatenate([before[:, :index], added[:, :kept], before[:, index + kept :]], 1)
        )
    assert got.index == index + tokens


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_negative_index_is_past_the_end(tokens, devices):
    key, query = (jnp.asarray(x) for x in emulated.normal(5, (B, S, G, D), (B, tokens, H, D)))
    kept = KVCache(key, key, jnp.int32(-1)).append(*2 * [key[:, :tokens] + 1])
    testing.assert_same_bytes(kept.key, key)
    got = decode_attention(query, key, key, index=jnp.int32(-1), options=Attention(0.2, causal=True))
    assert np.isnan(got).all()


def test_places_of_rows_are_refused():
    cache = KVCache(*2 * [jnp.zeros((2, 8, 1, 8))], jnp.arange(2))
    with pytest.raises(
        ValueError, match=r"KV cache: index: expected i32\[\], one place for all rows, got \[2\]; jax.vmap"
    ):
        cache.append(*2 * [jnp.zeros((2, 2, 1, 8))])
    with pytest.raises(ValueError, match="one place for all rows"):
        decode_attention(*3 * [jnp.zeros((2, 8, 1, 8))], index=jnp.arange(2), options=Attention(0.2, causal=True))


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_cache_of_numpy(tokens):
    cache, new = np.zeros((2, 8, 1, 8), np.float32), jnp.ones((2, tokens, 1, 8))
    got = KVCache(cache, cache, np.int32(2)).append(new, new)
    assert got.key.sum() == new.size and got.key[:, 2].all()


@pytest.mark.parametrize("explicit", [False, True])
def test_a_cache_sharded_by_tokens_is_not_gathered(explicit):
    mesh = testing.mesh_of((2, 4), ("data", "model"), explicit=explicit)
    tokens = P("data", None if explicit else "model", "model" if explicit else None)
    cache, new = jnp.zeros((4, S, 4, 8), jnp.bfloat16), jnp.ones((4, 1, 4, 8), jnp.bfloat16)
    with testing.on_mesh(mesh):
        cache, new = testing.shard(mesh, (cache, new), (tokens, P("data", None, tokens[2])))
        append = jax.jit(lambda cache, new, index: KVCache(cache, cache, index).append(new, new).key)
        assert "all-gather" not in append.lower(cache, new, jnp.int32(S - 1)).compile().as_text()
        got = jax.device_get(append(cache, new, jnp.int32(S - 1)))
    assert got[:, -1].all() and not got[:, :-1].any()


def test_a_promise_of_descriptors_needs_their_alignment():
    options, ones = Attention(0.2, causal=True), jnp.ones(B, jnp.int32)
    cached = dataclasses.replace(SequenceDescriptor.from_seqlens(ones), cached=True)
    assert backends.visibility_form(options, 1, S, cached, None) == "lengths"
    assert backends.visibility_form(options._replace(bottom_right=True), 1, S, cached, None) == "cache"


@pytest.mark.parametrize("sizes", ["b, 1, s", "b, q, 16"])
def test_lengths_that_are_known_at_run_time_only(sizes):
    b, q_len, k_len = jax.export.symbolic_shape(sizes, constraints=["q<=16"] if "q" in sizes else [])
    shapes = [jax.ShapeDtypeStruct((b, n, h, 8), jnp.float32) for n, h in ((q_len, H), (k_len, G), (k_len, G))]
    attend = lambda *qkv: decode_attention(*qkv, index=3, options=Attention(0.2, causal=True))
    read = jax.export.export(jax.jit(attend), disabled_checks=te.export_checks())(*shapes)
    qkv = [jnp.asarray(x) for x in emulated.normal(0, (B, 1, H, 8), (B, 16, G, 8), (B, 16, G, 8))]
    testing.assert_close(read.call(*qkv), attend(*qkv), F32)


# --- The kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [dict(), dict(causal=True), dict(causal=True, left=7)], ids=str)
@pytest.mark.parametrize("queries", [1, 16])
def test_kernel_is_its_reference(fields, queries):
    if GPU and flash.missing():
        pytest.skip(flash.missing())
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in emulated.normal(5, (8, queries, 2, 2, D), *[(8, 48, 2, D)] * 2))
    lengths = [jnp.full(8, queries, jnp.int32), jnp.asarray([48, 16, 17, 33, 48, 32, 20, 47], jnp.int32)]
    heads = P("data", None, "model")
    compare = lambda got, expected: testing.assert_close(got, expected, 2e-2)
    specs = [heads, heads, heads, P("data"), P("data")]
    testing.check_kernel(attention_cached, [q, k, v, *lengths], dict(scale=0.2, **fields), compare, specs=specs)


def test_lowered_for_cuda_needs_no_gpu():
    query, key = (jax.ShapeDtypeStruct((B, n, 2, D), jnp.bfloat16) for n in (1, S))
    attend = lambda query, key, at: cached_attention(Attention(0.2, causal=True), query, key, key, at, at)
    text = jax.jit(attend).trace(query, key, jnp.ones(B, jnp.int32)).lower(lowering_platforms=("cuda",)).as_text()
    assert "te_attention_cached" in text and "causal = false" in text  # one query sees all that is there


MALFORMED = {
    "dtype": (
        dict(q=jnp.zeros((B, 1, 1, H, D))),
        {},
        r"te_attention_cached: q: expected bf16 or f16, got f32\[3,1,1,4",
    ),
    "shape": (dict(v=jnp.zeros((B, 9, 1, D), jnp.bfloat16)), {}, r"v: expected \[3,32,1,64\], got bf16\[3,9,1,64\]"),
    "no lengths": (dict(q_len=jnp.zeros(0), k_len=jnp.zeros(0)), {}, r"te_attention_cached: q_len: expected s32\[B\]"),
    "lengths": (dict(k_len=jnp.ones(2, jnp.int32)), {}, r"te_attention_cached: k_len: expected \[3\]"),
    "window": ({}, dict(left=np.int64(3)), r"te_attention_cached: left: expected a window only where causal"),
}


if GPU:  # elsewhere there is no handler

    @pytest.mark.parametrize("case", MALFORMED)
    def test_malformed_calls_raise(case):
        replaced, attributes, message = MALFORMED[case]
        ones, cache = jnp.ones(B, jnp.int32), jnp.zeros((B, S, 1, D), jnp.bfloat16)
        q = jnp.zeros((B, 1, 1, H, D), jnp.bfloat16)
        operands = dict(q=q, k=cache, v=cache, q_len=ones, k_len=ones) | replaced
        options = dict(scale=np.float32(1), causal=False, left=np.int64(-1), buffers=np.zeros(0, np.int64))
        results = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((1 << 20,), jnp.uint8)]
        with pytest.raises(Exception, match=message):
            call = jax.ffi.ffi_call("te_attention_cached", results)
            jax.block_until_ready(call(*operands.values(), **(options | attributes)))
