"""FP8 training in plain JAX: operands rounded to FP8 and back, f32 products. What ops and modules must equal.

`Rounding` says how one tensor is rounded. Everything here is differentiated by JAX itself; only the roundings have a
gradient of their own: the identity, or the rounding of the cotangent.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax import recipe
from transformer_engine_jax.autocast import autocast
from transformer_engine_jax.ops.quantize import cast, flush
from transformer_engine_jax.quantized import GemmState, QuantizerState
from transformer_engine_jax.quantizers import GemmQuantizers, attach, quantizer_spec

# --- Bounds ----------------------------------------------------------------------------------------------------------

# Sums of up to 256 products in f32, in another order; Hopper's FP8 tensor cores keep 13 bits of an addend.
F32 = 1e-5 if jax.default_backend() == "cpu" else 2.0**-12
# The same, rounded once to bf16.
BF16 = 2.0**-8
# An emulation whose f32 values differ in the last bits may round one element of a tensor to the neighbouring code. One
# such flip in 500 elements or more is 2^-3 / sqrt(500) / sqrt(3) = 3e-3. Tensor cores' values differ in more bits, and
# one element of E5M2 in 40 may flip (2^-2 / sqrt(40) / sqrt(3) = 0.023). The mistakes looked for are larger: an operand
# not rounded, rounded to the other format or with another scale, is off by MISTAKE to 0.07.
MISTAKE = 0.025
FLIP = 4e-3 if jax.default_backend() == "cpu" else 0.023


def fp8_bound(*dtypes) -> float:
    """Relative L2 error of a product whose factors were rounded to these formats.

    A rounding to m bits of mantissa is off by at most u = 2^-(m + 1), in the mean of squares by less than u / sqrt(3).
    Roundings of independent factors add up in squares, and a sum of many such products has the error of one.
    """
    return float(np.sqrt(sum((float(jnp.finfo(d).eps) / 2) ** 2 for d in dtypes) / 3))


def normal(seed: int, *shapes) -> list[np.ndarray]:
    """Standard normal f32 arrays; from numpy, since eager JAX would compile a program for each shape."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


# --- Roundings -------------------------------------------------------------------------------------------------------


class Rounding(NamedTuple):
    """To `dtype` and back; scale None means that of the tensor's own amax, rounded down to a power of two or not."""

    dtype: np.dtype
    scale: float | None = None
    power_of_2: bool = False

    def __call__(self, x):
        scale = jnp.float32(1.0) if self.scale is None else jnp.float32(self.scale)
        if self.scale is None:
            amax = jnp.max(jnp.abs(x.astype(jnp.float32)))
            scale = jnp.where(amax > 0, jnp.float32(jnp.finfo(self.dtype).max) / amax, 1.0)
            scale = jnp.exp2(jnp.floor(jnp.log2(scale))) if self.power_of_2 else scale
        return cast(flush(x) * scale, self.dtype).astype(jnp.float32) / scale


class Roundings(NamedTuple):
    """Of a GEMM's operands: the input, the kernel, and the gradient of the output."""

    x: Rounding
    kernel: Rounding
    grad: Rounding


@jax.custom_vjp
def _replace(x, rounded):
    return rounded


_replace.defvjp(lambda x, rounded: (rounded, None), lambda _, ct: (ct, None))


def straight_through(x, rounding: Rounding):
    """x rounded; the gradient passes."""
    return _replace(x, rounding(jax.lax.stop_gradient(x)))


def round_gradient(y, rounding: Rounding):
    """y; its gradient is rounded."""

    @jax.custom_vjp
    def identity(y):
        return y

    identity.defvjp(lambda y: (y, None), lambda _, ct: (rounding(ct),))
    return identity(y)


# --- Layers ----------------------------------------------------------------------------------------------------------


def dense(x, kernel, bias=None, *, k_axes: int = 1, roundings: Roundings | None = None):
    """x[m.., k..] kernel[k.., n..] + bias[n..] in f32."""
    x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
    m, k, n = x.shape[: x.ndim - k_axes], kernel.shape[:k_axes], kernel.shape[k_axes:]
    x, kernel = x.reshape(*m, int(np.prod(k))), kernel.reshape(int(np.prod(k)), -1)
    if roundings is not None:
        x, kernel = straight_through(x, roundings.x), straight_through(kernel, roundings.kernel)
    y = jnp.matmul(x, kernel, precision="highest")
    if roundings is not None:
        y = round_gradient(y, roundings.grad)
    y = y.reshape(*m, *n)
    return y if bias is None else y + bias.astype(jnp.float32)


def norm(x, gamma, beta=None, *, epsilon=1e-6, zero_centered_gamma=False):
    """LayerNorm, or RMSNorm where beta is None, from its definition."""
    x = x.astype(jnp.float32)
    g = gamma.astype(jnp.float32) + (1.0 if zero_centered_gamma else 0.0)
    if beta is None:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * g
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + epsilon) * g + beta.astype(jnp.float32)


PLAIN = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "linear": lambda x: x,
    "clamped_silu": lambda x, limit: jnp.minimum(x, limit) * jax.nn.sigmoid(1.702 * jnp.minimum(x, limit)),
    "clamped_linear": lambda x, limit: jnp.clip(x, -limit, limit) + 1,
}


def activation(z, activations, params=None):
    """The product of the activations of z[.., A, N]."""
    out = 1.0
    for i, a in enumerate(activations):
        out = out * (PLAIN[a] if isinstance(a, str) else a)(z[..., i, :], **(params or {}))
    return out


def mlp(x, kernels, biases=(None, None), *, activations=("gelu",), params=None, roundings=(None, None)):
    """dense, activation, dense in f32."""
    z = dense(x, kernels[0], biases[0], roundings=roundings[0])
    return dense(activation(z, activations, params), kernels[1], biases[1], roundings=roundings[1])


# --- The library's side ----------------------------------------------------------------------------------------------

# Not powers of two, and all different, so that a scale in the wrong place shows; none makes standard normal inputs,
# kernels of 1 / sqrt(K) or gradients saturate.
SCALES = (37.0, 413.0, 1234.5)

DELAYED = recipe.DelayedScaling(amax_history_len=4)
RECIPES = {
    "delayed": DELAYED,
    "delayed-e4m3": recipe.DelayedScaling(amax_history_len=4, fp8_format=recipe.Format.E4M3),
    "current": recipe.Float8CurrentScaling(),
    "current-e5m2": recipe.Float8CurrentScaling(fp8_format=recipe.Format.E5M2),
    "current-power-of-2": recipe.Float8CurrentScaling(use_power_2_scales=True),
}


def state(scale: float = 1.0, history_len: int = 4) -> QuantizerState:
    return QuantizerState(jnp.float32(scale), jnp.zeros(history_len, jnp.float32), jnp.float32(1))


def states(scales=SCALES) -> GemmState:
    """The state of one GEMM."""
    return GemmState.pack(**dict(zip(GemmState.TENSORS, map(state, scales))))


def quantizers(gemm_states: GemmState, rec: recipe.Recipe, **context) -> GemmQuantizers:
    """What ops take; the states' gradients will be their next values. A recipe without a state ignores them."""
    with autocast(not context.get("calibrating"), rec, **context):
        forward = quantizer_spec()
        return GemmQuantizers(*attach(gemm_states, (forward, forward, quantizer_spec(backward=True))))


def roundings(rec: recipe.Recipe, scales=SCALES) -> Roundings:
    """What `quantizers(states(scales), rec)` must mean."""
    dtypes = (rec.forward_dtype, rec.forward_dtype, rec.backward_dtype)
    if rec.stateful:
        return Roundings(*[Rounding(d, float(s)) for d, s in zip(dtypes, scales)])
    return Roundings(*[Rounding(d, None, rec.use_power_2_scales) for d in dtypes])


def next_state(scale: float, tensor, dtype) -> QuantizerState:
    """The state after a first step that saw this tensor: its amax in the history, and the scale that it gives."""
    amax = np.abs(np.asarray(tensor, np.float32)).max()
    history = np.asarray([0, amax, 0, 0], np.float32)
    new = np.float32(np.float32(jnp.finfo(dtype).max) / amax) if amax > 0 else np.float32(scale)
    return state(new)._replace(amax_history=jnp.asarray(history))
