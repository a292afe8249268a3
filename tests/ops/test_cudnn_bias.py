"""JAX's call of cuDNN with a bias or a mask, also under vmap, where JAX itself takes only one of each example and head.

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
from transformer_engine_jax.ops.attention import Attention, attention_backend, dot_product_attention

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
