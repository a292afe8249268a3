"""JAX's call of cuDNN with a bias or a mask, also under vmap, where JAX itself raises for most.

On a GPU it is cuDNN itself, elsewhere a stand-in.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_stand_in import replace_cudnn
from emulated import BF16, normal
from hopper import choose_as_on_hopper

from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import (
    Attention,
    SequenceDescriptor,
    attention_backend,
    cudnn_call,
    dot_product_attention,
)

N, B, Q, K, H, G, D = 2, 3, 16, 34, 4, 2, 16  # N examples under vmap
OPTIONS = Attention(0.3)
SHAPES = {"none": None, "one": (1, 1), "of rows": (B, 1), "of heads": (1, H), "of each": (B, H)}


@pytest.fixture(autouse=True)
def cudnn(monkeypatch):
    if jax.default_backend() != "gpu":
        choose_as_on_hopper(monkeypatch)
        replace_cudnn(monkeypatch)


@pytest.mark.parametrize("mapped", ["", "qkv", "bias", "mask", "qkv, bias", "qkv, mask", "qkv, bias, mask"])
@pytest.mark.parametrize(
    "bias, mask",
    [("one", "none"), ("of heads", "none"), ("of rows", "none"), ("of each", "none"), ("none", "one"),
     ("none", "of rows"), ("of heads", "of rows")],
)  # fmt: skip
def test_values_and_gradients(bias, mask, mapped):
    arrays = normal(5, (N, B, Q, H, D), *2 * [(N, B, K, G, D)], (N, *(SHAPES[bias] or (1, 1)), Q, K), (N, B, Q, H, D))
    hidden = np.random.default_rng(0).random((N, *(SHAPES[mask] or (1, 1)), 1, K)) < 0.5
    hidden[..., 0] = False  # no query sees nothing
    axes = [0 if name in mapped else None for name in (*["qkv"] * 3, "bias", "mask")]
    *qkv, of_bias, hidden = (x if axis == 0 else x[0] for x, axis in zip((*arrays[:4], hidden), axes))

    def step(query, key, value, of_bias, hidden, dout):
        given = {"bias": of_bias if bias != "none" else None, "mask": hidden if mask != "none" else None}
        if query.dtype == jnp.bfloat16:
            assert attention_backend(OPTIONS, query, key, value, **given)[0] == "cudnn"

        def attend(query, key, value, of_bias):
            now = given | ({"bias": of_bias} if bias != "none" else {})
            return dot_product_attention(query, key, value, options=OPTIONS, **now)

        out, vjp = jax.vjp(attend, query, key, value, of_bias)
        return out, vjp(dout)

    def run(dtype):
        given = [jnp.asarray(x, jnp.bfloat16).astype(dtype) for x in (*qkv, of_bias, arrays[4])]
        if not mapped:
            return jax.jit(step)(*given[:4], hidden, given[4][0])
        return jax.jit(jax.vmap(step, (*axes, 0)))(*given[:4], hidden, given[4])

    testing.assert_close(run(jnp.bfloat16), run(jnp.float32), 3 * BF16)


def test_examples_share_one_mask(monkeypatch):
    """It is not repeated for the rows of all: a mask of 4096 x 4096 would be GiB."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    given, masks = {name: getattr(cudnn_call, name) for name in ("forward", "backward")}, []
    for name, run in given.items():

        def seen(told, operands, *others, bias=None, run=run):
            *others, bias = (*others, bias) if bias is not None else others
            masks.append((operands.query.shape[0], bias.shape))
            return run(told, operands, *others, bias=bias)

        monkeypatch.setattr(cudnn_call, name, seen)
    attend = lambda *qkv: dot_product_attention(*qkv, options=OPTIONS, mask=jnp.zeros((1, 1, 1, K), bool))
    qkv = (jnp.ones(shape, jnp.bfloat16) for shape in ((N, B, Q, H, D), *2 * [(N, B, K, G, D)]))
    jax.make_jaxpr(jax.grad(lambda *qkv: jax.vmap(attend)(*qkv).sum().astype(jnp.float32)))(*qkv)
    assert masks.count((N * B, (1, 1, Q, K))) == 2 and {shape for _, shape in masks} == {(1, 1, Q, K)}


def test_an_empty_batch_with_a_bias():
    q, k = (jnp.ones((0, n, heads, D), jnp.bfloat16) for n, heads in ((Q, H), (K, G)))
    loss = lambda bias: dot_product_attention(q, k, k, options=OPTIONS, bias=bias).sum().astype(jnp.float32)
    testing.assert_same_bytes(jax.grad(loss)(jnp.ones((1, H, Q, K))), jnp.zeros((1, H, Q, K)))


@pytest.mark.parametrize("mapped", [False, True], ids=["", "vmap"])
@pytest.mark.parametrize("rows", [1, B])
def test_a_bias_has_no_gradient_where_rows_have_ended(rows, mapped):
    """On a GPU: in memory that held NaN."""
    shapes = [(N, B, Q, H, D), *2 * [(N, B, K, G, D)], (N, rows, H, Q, K), (N, B, Q, H, D)]
    arrays = normal(6, *shapes)
    lengths = SequenceDescriptor.from_seqlens((np.array([7, Q, 3]), np.array([K, 20, 9])))

    def step(query, key, value, bias, dout):
        attend = lambda *of: dot_product_attention(*of[:3], options=OPTIONS, bias=of[3], sequence_descriptor=lengths)
        out, vjp = jax.vjp(attend, query, key, value, bias)
        return out, vjp(dout)

    def run(dtype):
        given = [jnp.asarray(x, jnp.bfloat16).astype(dtype) for x in arrays]
        call = jax.jit(jax.vmap(step) if mapped else step)
        given = given if mapped else [x[0] for x in given]
        jax.block_until_ready([jnp.full(x.shape, jnp.nan, x.dtype) for x in given for _ in range(8)])
        return call(*given)

    testing.assert_close(run(jnp.bfloat16), run(jnp.float32), 3 * BF16)
