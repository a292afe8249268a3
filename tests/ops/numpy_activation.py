"""Activations and their gradients in f64 NumPy, by the textbook's formulas, and in plain JAX: what ours must equal."""

import jax
import jax.numpy as jnp
import numpy as np
from stored import wide

EXACT = {
    # x/2 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), written so that its tail does not cancel.
    "gelu": lambda x: x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "squared_relu": lambda x: np.square(np.maximum(x, 0)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
PLAIN = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
}
# GPT-OSS's, of z[0] and of z[1]; the first as its name says without the last "_linear".
CLAMPED = "clamped_silu_clamped_linear"
CURVES = EXACT | {"clamped_silu_clamped": lambda x: np.minimum(x, 7) / (1 + np.exp(-1.702 * np.minimum(x, 7)))}


def exact_gate(name, x):
    return np.clip(x, -7, 7) + 1 if name == CLAMPED else x


def exact_forward(name, z):
    """y, and the magnitude that its rounding error is relative to, in f64."""
    z = wide(z)
    gate = exact_gate(name, z[..., 1, :]) if name.endswith("_linear") else np.ones_like(z[..., 0, :])
    y = CURVES[name.removesuffix("_linear")](z[..., 0, :])
    # The exponential magnifies the relative error of its argument, at most about 3 |x| + x^3 / 5 here, where y is tiny.
    x = np.abs(z[..., 0, :])
    return y * gate, np.abs(y * gate) * (1 + x + x**3 / 10)


def exact_backward(name, dy, z):
    z, dy, step = wide(z), wide(dy), 1e-6
    curve, x = CURVES[name.removesuffix("_linear")], z[..., 0, :]
    slope = (curve(x + step) - curve(x - step)) / (2 * step)  # to 1e-9
    if not name.endswith("_linear"):
        return (dy * slope)[..., None, :]
    gate = lambda step: exact_gate(name, z[..., 1, :] + step)
    return np.stack([dy * slope * gate(0), dy * curve(x) * (gate(step) - gate(-step)) / (2 * step)], axis=-2)


def plain(name, z):
    if name == CLAMPED:
        c = jnp.minimum(z[..., 0, :], 7.0)
        return c * jax.nn.sigmoid(1.702 * c) * (jnp.clip(z[..., 1, :], -7.0, 7.0) + 1)
    y = PLAIN[name.removesuffix("_linear")](z[..., 0, :])
    return y * z[..., 1, :] if name.endswith("_linear") else y
