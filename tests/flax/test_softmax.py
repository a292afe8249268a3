"""The Softmax module against jax.nn.softmax."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from emulated import BF16, F32

from transformer_engine_jax import testing
from transformer_engine_jax.flax import Softmax, SoftmaxFusionType

B, H, Q, K = 2, 3, 8, 16
X, BIAS, OFFSET = (jnp.asarray(2 * t) for t in emulated.normal(0, (B, H, Q, K), (1, H, Q, K), (H,)))
MASK = np.random.default_rng(0).random((B, 1, Q, K)) < 0.3
MASK[..., 0] = False
CAUSAL = ~np.tri(Q, K, dtype=bool)
HIDDEN = {"SCALED": None, "SCALED_MASKED": MASK, "SCALED_UPPER_TRIANG_MASKED": CAUSAL}


def plain(x, bias, offset, *, hidden, softmax_type, scale=0.25):
    v = scale * (x.astype(jnp.float32) + bias)
    v = v if hidden is None else jnp.where(hidden, -1e30, v)
    if softmax_type == "vanilla":
        return jax.nn.softmax(v)
    offset = offset if softmax_type == "learnable" else 0 * offset
    column = jnp.broadcast_to(offset[:, None, None], (*v.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([v, column], -1))[..., :-1]


@pytest.mark.parametrize("softmax_type", ["vanilla", "off_by_one", "learnable"])
@pytest.mark.parametrize("kind", list(HIDDEN))
def test_is_a_softmax(kind, softmax_type):
    module = Softmax(scale_factor=0.25, softmax_fusion_type=SoftmaxFusionType[kind], softmax_type=softmax_type)
    mask = MASK if kind == "SCALED_MASKED" else None
    assert not steps.init(module, X, mask, BIAS, OFFSET if softmax_type == "learnable" else None)

    def ours(x, bias, offset):
        return module.apply({}, x, mask, bias, offset if softmax_type == "learnable" else None)

    def theirs(x, bias, offset):
        return plain(x, bias, offset, hidden=HIDDEN[kind], softmax_type=softmax_type)

    testing.assert_close(steps.step(ours, X, BIAS, OFFSET), steps.step(theirs, X, BIAS, OFFSET), F32)


def test_causal_and_masked():
    module = Softmax(softmax_fusion_type=SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED)
    got = module.apply({}, X, MASK)
    testing.assert_close(got, plain(X, 0, OFFSET, hidden=CAUSAL | MASK, softmax_type="vanilla", scale=1), F32)


@pytest.mark.parametrize("name", ["SCALED_MASKED", "scaled_masked"])
def test_a_kind_by_its_name(name):
    got, expected = (
        Softmax(softmax_fusion_type=kind).apply({}, X, MASK) for kind in (name, SoftmaxFusionType.SCALED_MASKED)
    )
    testing.assert_same_bytes(got, expected)


def test_bf16_in_bf16_out():
    x = X.astype(jnp.bfloat16)
    y = Softmax(softmax_type="off_by_one").apply({}, x)
    assert y.dtype == jnp.bfloat16
    testing.assert_close(y, plain(x, 0, OFFSET, hidden=None, softmax_type="off_by_one", scale=1), BF16)
    assert Softmax().apply({}, x, bias=BIAS).dtype == jnp.bfloat16


def test_scores_without_heads():
    y = Softmax(softmax_type="off_by_one").apply({}, X[0, 0])
    testing.assert_close(y, jax.nn.softmax(jnp.pad(X[0, 0], ((0, 0), (0, 1))))[:, :-1], F32)


@pytest.mark.parametrize(
    "message, options, arguments",
    [
        (r"softmax_fusion_type: expected one of \['SCALED', .*got 'plain'", {"softmax_fusion_type": "plain"}, {}),
        ("mask: expected none with SCALED, got one", {}, {"mask": MASK}),
        ("mask: expected one with SCALED_MASKED", {"softmax_fusion_type": SoftmaxFusionType.SCALED_MASKED}, {}),
        ("softmax_type: expected one of .* got 'sigmoid'", {"softmax_type": "sigmoid"}, {}),
        ("softmax_offset: expected none with 'vanilla', got one", {}, {"softmax_offset": OFFSET}),
        ("softmax_offset: expected one with 'learnable', got none", {"softmax_type": "learnable"}, {}),
        (r"bias: expected a shape that broadcasts to .*, got \[2, 3, 8, 7\]", {}, {"bias": X[..., :7]}),
        (
            r"bias: expected a shape that broadcasts to \[2, 3, 8, 16\], got \[2, 2, 3, 8, 16\]",
            {},
            {"bias": jnp.stack([X, X])},
        ),
    ],
)
def test_mistakes(message, options, arguments):
    with pytest.raises(ValueError, match=f"Softmax: {message}"):
        Softmax(**options).apply({}, X, **arguments)
