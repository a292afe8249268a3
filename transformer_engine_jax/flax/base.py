"""What the modules share: FP8 state in a variable collection, and parameters with logical axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.autocast import current
from transformer_engine_jax.quantized import GemmQuantizers, QuantizerState, attach, quantizer_spec

# The name that Flax's TrainState and others already treat as "replace this with its gradient".
STATE_COLLECTION = "_overwrite_with_gradient"

flax.serialization.register_serialization_state(
    QuantizerState,
    lambda state: {"scale": state.scale, "amax_history": state.amax_history, "uses": state.uses},
    lambda _, values: QuantizerState(values["scale"], values["amax_history"], values["uses"]),
    override=True,
)

default_kernel_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


class Fp8Module(nn.Module):
    """A module with GEMMs: keeps one QuantizerState for each operand of each of them."""

    def gemm_quantizers(self, gemm: str) -> tuple[GemmQuantizers | None, Any]:
        """This step's Quantizers of one GEMM, None where autocast is off, and the states that go unused."""
        recipe = current().recipe
        names = {operand: f"{gemm}_{operand}" for operand in GemmQuantizers._fields}
        if recipe is None or not recipe.stateful:
            states = [
                self.get_variable(STATE_COLLECTION, name)
                for name in names.values()
                if self.has_variable(STATE_COLLECTION, name)
            ]
            if recipe is None:
                return None, states
            forward, backward = quantizer_spec(), quantizer_spec(backward=True)
            return GemmQuantizers(attach(None, forward), attach(None, forward), attach(None, backward)), states

        def state(name: str) -> QuantizerState:
            if not self.has_variable(STATE_COLLECTION, name) and not self.is_mutable_collection(STATE_COLLECTION):
                raise ValueError(
                    f"{type(self).__name__} {'/'.join(self.path)}: FP8 state {name!r} is not among the variables. "
                    f"Call init under the same fp8_autocast, and pass all its collections to apply: "
                    f"model.apply({{'params': params, {STATE_COLLECTION!r}: state}}, ...)"
                )
            return self.variable(STATE_COLLECTION, name, QuantizerState.create, recipe).value

        return GemmQuantizers(
            attach(state(names["x"]), quantizer_spec()),
            attach(state(names["kernel"]), quantizer_spec()),
            attach(state(names["grad"]), quantizer_spec(backward=True)),
        ), []

    def make_param(self, name: str, init: Callable, axes: Sequence[str | None], shape: Sequence[int], dtype):
        """A parameter that carries its logical axes, where there are any."""
        if axes and len(axes) != len(shape):
            raise ValueError(f"{type(self).__name__}.{name}: expected {len(shape)} logical axes for the shape {tuple(shape)}, got {tuple(axes)}")  # fmt: skip
        init = nn.with_logical_partitioning(init, tuple(axes)) if axes else init
        return self.param(name, init, tuple(shape), dtype)

    def make_norm_params(self, features: int, kind: str, scale_init, scale_axes, bias_init, bias_axes, zero_centered: bool, dtype):  # fmt: skip
        """(scale, ln_bias) of a norm over `features`; ln_bias is None for "rmsnorm"."""
        if kind not in ("layernorm", "rmsnorm"):
            raise ValueError(f"{type(self).__name__}.layernorm_type: expected 'layernorm' or 'rmsnorm', got {kind!r}")
        scale_init = scale_init or (nn.initializers.zeros if zero_centered else nn.initializers.ones)
        scale = self.make_param("scale", scale_init, scale_axes, (features,), dtype)
        bias = None if kind == "rmsnorm" else self.make_param("ln_bias", bias_init, bias_axes, (features,), dtype)
        return scale, bias

    def low_rank(self, x: jax.Array, k_axes: int, features: Sequence[int], dim: int, alpha: float | None, dtype, prefix: str = ""):  # fmt: skip
        """x A B * (alpha / dim) -> [.., features..], the LoRA branch beside a kernel (Hu et al., 2021)."""
        inputs = x.shape[x.ndim - k_axes :]
        a_init = flat_kernel_init(default_kernel_init, k_axes)
        axes_a, axes_b = (None,) * (k_axes + len(features) - 1) + ("lora",), (None,) * (len(features) - 1) + ("lora", None)
        stacked = tuple(features[:-1])
        a = self.make_param(f"{prefix}lora_a_kernel", a_init, axes_a, (*inputs, *stacked, dim), dtype)
        b = self.make_param(f"{prefix}lora_b_kernel", nn.initializers.zeros, axes_b, (*stacked, dim, features[-1]), dtype)
        contract = tuple(range(x.ndim - k_axes, x.ndim)), tuple(range(k_axes))
        down = jax.lax.dot_general(x, a.astype(x.dtype), (contract, ((), ())))
        up = jnp.einsum("...sr,srn->...sn", down.reshape(*down.shape[: x.ndim - k_axes], -1, dim),
                        b.astype(x.dtype).reshape(-1, dim, features[-1]))  # fmt: skip
        scale = 1.0 if alpha is None else alpha / dim
        return (up * scale).reshape(*x.shape[: x.ndim - k_axes], *features)


def flat_kernel_init(init: Callable, k_axes: int, scales: Sequence[float] | None = None) -> Callable:
    """`init` for a kernel [k.., n..] as for the matrix it stands for, so that fans are those of the product.

    With `scales`, the kernel stacks that many products, [k.., len(scales), n..]: each is drawn by itself and
    multiplied by its scale.
    """

    def run(key, shape, dtype=jnp.float32):
        k = int(np.prod(shape[:k_axes]))
        if scales is None:
            return init(key, (k, int(np.prod(shape[k_axes:]))), dtype).reshape(shape)
        n = int(np.prod(shape[k_axes:])) // len(scales)
        keys = jax.random.split(key, len(scales))
        parts = [init(each, (k, n), dtype) * jnp.asarray(scale, dtype) for each, scale in zip(keys, scales)]
        return jnp.stack(parts, axis=1).reshape(shape)

    return run


def canonical_tuple(value) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
