"""Published models in plain JAX and f32, as their papers and configurations say, on weights named as Hugging Face does.

`checkpoint` draws such weights; the blocks take them by name. `dense`, `stacked` and `norm` say where they go in this
library's parameters. `assert_same_model` compares the two, outputs and gradients.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from emulated import F32

from transformer_engine_jax import testing

# --- Checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint(shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    """Random weights: matrices keep the size of what they multiply, norms are near 1, biases near 0."""
    rng = np.random.default_rng(0)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape)
        if len(shape) == 2:
            return noise / np.sqrt(shape[-1])
        return 0.2 * noise + name.endswith("weight")

    return {name: jnp.asarray(draw(name, shape), jnp.float32) for name, shape in shapes.items()}


def tokens(vocabulary: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, vocabulary, shape)


# --- Their blocks ----------------------------------------------------------------------------------------------------


def linear(weights, name: str, x):
    """torch.nn.Linear: its weight is [out, in]."""
    y = jnp.einsum("...k,nk->...n", x, weights[f"{name}.weight"], precision="highest")
    return y + weights.get(f"{name}.bias", 0.0)


def layer_norm(weights, name: str, x, epsilon: float):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    normed = centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + epsilon)
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def rms_norm(weights, name: str, x, epsilon: float, *, offset: float = 0.0):
    normed = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + epsilon)
    return normed * (offset + weights[f"{name}.weight"])


def split_heads(x, size: int):
    """[B, S, heads * size] -> [B, heads, S, size]."""
    return x.reshape(*x.shape[:2], -1, size).transpose(0, 2, 1, 3)


def merge_heads(x):
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def attention(query, key, value, *, scale: float = 1.0, visible=None, bias=0.0):
    """Of [B, heads, S, size], fewer heads in key and value being shared; visible: what each query sees."""
    shared = query.shape[1] // key.shape[1]
    key, value = jnp.repeat(key, shared, axis=1), jnp.repeat(value, shared, axis=1)
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key, precision="highest") * scale + bias
    scores = scores if visible is None else jnp.where(visible, scores, -1e30)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1), value, precision="highest")


def causal(length: int, window: int | None = None) -> np.ndarray:
    """bool[length, length]: each position sees itself and the `window` - 1 positions before it, or all of them."""
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    return (distance >= 0) & (distance < (window or length))


def rope_frequencies(size: int, theta: float) -> np.ndarray:
    """[size / 2], in radians per position."""
    return theta ** (-np.arange(0, size, 2) / size)


def rotate_halves(x, frequencies):
    """RoPE of [B, heads, S, size] as Llama's code has it: feature i turns with feature i + size / 2."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[2])[:, None] * frequencies
    cos, sin = (jnp.asarray(np.concatenate([f(angles)] * 2, axis=-1), jnp.float32) for f in (np.cos, np.sin))
    return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin


# --- Their weights as this library's parameters ----------------------------------------------------------------------


def dense(weights, name: str) -> dict[str, jax.Array]:
    """Of a DenseGeneral."""
    params = {"kernel": weights[f"{name}.weight"].T}
    return {**params, "bias": weights[f"{name}.bias"]} if f"{name}.bias" in weights else params


def stacked(weights, *names: str) -> dict[str, jax.Array]:
    """Of one DenseGeneral for several products of one input: kernel [in, count, out]."""
    parts = [dense(weights, name) for name in names]
    axes = {"kernel": 1, "bias": 0}
    return {name: jnp.stack([part[name] for part in parts], axis=axes[name]) for name in parts[0]}


def norm(weights, name: str) -> dict[str, jax.Array]:
    """Of a LayerNorm or RMSNorm."""
    params = {"scale": weights[f"{name}.weight"]}
    return {**params, "ln_bias": weights[f"{name}.bias"]} if f"{name}.bias" in weights else params


def mlp(weights, *, first: tuple[str, ...], second: str, normed: str) -> dict[str, jax.Array]:
    """Of a LayerNormMLP; `first` are the products whose activations are multiplied."""
    wi, wo = stacked(weights, *first), dense(weights, second)
    params = {f"{prefix}_{name}": p for prefix, part in (("wi", wi), ("wo", wo)) for name, p in part.items()}
    return {**norm(weights, normed), **params}


# --- The comparison --------------------------------------------------------------------------------------------------


def assert_same_model(model, convert, plain, weights, *inputs) -> None:
    """The converted parameters are all of the port's; its outputs and gradients are those of the original.

    Args:
      model: the port, a Linen module.
      convert: weights -> its parameters.
      plain: (weights, *inputs) -> the original's outputs.
    """
    layout = lambda tree: jax.tree.map(jnp.shape, tree)
    own = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"])
    assert layout(convert(weights)) == layout(own)

    def scored(run):
        def loss(weights):
            out = run(weights)
            cotangent = np.random.default_rng(2).standard_normal(out.shape, np.float32)
            return jnp.sum(out * cotangent), out

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    (_, got), dgot = scored(lambda w: model.apply({"params": convert(w)}, *inputs))(weights)
    (_, expected), dexpected = scored(lambda w: plain(w, *inputs))(weights)
    testing.assert_close(got, expected, F32, "outputs")
    total = np.linalg.norm([np.linalg.norm(d) for d in dexpected.values()])
    for name, d in dexpected.items():
        # A key's bias shifts all scores of a query alike: its exact gradient is 0, and what is computed is rounding.
        error, bound = np.linalg.norm(dgot[name] - d), F32 * (2 * np.linalg.norm(d) + 0.01 * total)
        assert error <= bound, f"gradient of {name}: error {error:.3g} > {bound:.3g}"
