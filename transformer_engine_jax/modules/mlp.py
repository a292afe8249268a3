"""LayerNormMLP: norm, dense, activation, dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from transformer_engine_jax.modules.checks import canonical_tuple
from transformer_engine_jax.modules.dense import Kernel
from transformer_engine_jax.ops.activation import activation
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.dropout import Residual
from transformer_engine_jax.ops.layernorm import Norm, norm_and_input
from transformer_engine_jax.ops.layernorm_mlp import layernorm_mlp
from transformer_engine_jax.precision import in_fp8, mlp_products
from transformer_engine_jax.quantizers import GemmQuantizers, keep
from transformer_engine_jax.sharding import FREE, constrain, sharded_as


class MlpParameters(NamedTuple):
    """Parameters of a LayerNormMLP; None for what it has not."""

    gamma: jax.Array | None
    beta: jax.Array | None
    kernels: tuple[Kernel, Kernel]
    biases: tuple[jax.Array | None, jax.Array | None]


def run_mlp(
    module: Any,
    x: jax.Array,
    parameters: MlpParameters,
    residual: Residual,
    drop: Callable[[jax.Array], jax.Array] | None,
    adapt: Callable[[int, jax.Array], jax.Array] | None,
) -> tuple[jax.Array | None, ...]:
    """What a LayerNormMLP returns for x[.., h].

    drop: the dropout between its products. adapt: the LoRA branch of product 0 or 1 for its input.
    """
    activations, (gamma, beta, kernels, (bias_1, bias)) = canonical_tuple(module.activations), parameters
    biases = (bias_1, None if module.return_bias else bias)
    options = Norm(module.epsilon, module.zero_centered_gamma) if module.enable_layernorm else None
    sizes = x, len(activations), module.intermediate_dim
    fp8, scope = in_fp8(*mlp_products(*sizes, module.dtype, norm=module.enable_layernorm))
    first, unused_1 = module.gemm_quantizers("gemm_1", fp8, module.quantization_checkpoint_name)
    second, unused_2 = module.gemm_quantizers("gemm_2", fp8, module.quantization_checkpoint_name)
    normed = None
    with scope:
        if drop is None and adapt is None and not module.return_layernorm_output:
            y = layernorm_mlp(
                x,
                gamma,
                beta,
                kernels,
                biases,
                activations=activations,
                activation_params=module.activation_params,
                norm_options=options,
                quantizers=(first, second) if fp8 else None,
                names=(module.ffn1_ckpt_name, module.ffn2_ckpt_name),
                residual=residual is True,
                return_input=callable(residual),
                norm_input_axes=module.layernorm_input_axes,
                dot_1_input_axes=module.dot_1_input_axes,
                dot_2_input_axes=module.dot_2_input_axes,
                kernel_axes=(module.kernel_axes_1, module.kernel_axes_2),
            )
            y, past = y if callable(residual) else (y, None)
        else:
            x = constrain(x, module.layernorm_input_axes)
            normed, past = norm_and_input(options, x, gamma, beta, bool(residual))
            added = past if residual is True else None
            y = _stage_by_stage(module, normed, kernels, biases, (first, second), added, drop, adapt)
    y, returned = keep(y, [unused_1, unused_2]), normed if module.return_layernorm_output else None
    y = residual(y, past) if callable(residual) else y
    return (y, bias, returned) if module.return_bias else (y, returned)


def _stage_by_stage(
    module, x, kernels, biases, quantizers: tuple[GemmQuantizers | None, GemmQuantizers | None], residual, drop, adapt
) -> jax.Array:
    def product(i: int, x, axes, name: str, residual=None, output_axes=()):
        y = dense(
            x, kernels[i], biases[i], quantizers=quantizers[i], residual=residual, input_axes=axes,
            output_axes=output_axes, kernel_axes=(module.kernel_axes_1, module.kernel_axes_2)[i],
        )  # fmt: skip
        y = checkpoint_name(y, name)
        return y if adapt is None else y + sharded_as(adapt(i, x), y)

    z = product(0, x, module.dot_1_input_axes, module.ffn1_ckpt_name)
    a = activation(z, canonical_tuple(module.activations), module.activation_params)
    a = a if drop is None else drop(a)
    # The result's tokens are sharded as those of x, to which it may be added.
    between = module.layernorm_input_axes and (*module.layernorm_input_axes[:-1], FREE)
    return product(1, a, module.dot_2_input_axes, module.ffn2_ckpt_name, residual, between)
