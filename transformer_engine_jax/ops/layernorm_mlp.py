"""layernorm_mlp: norm, dense, activation, dense; in FP8 norm and activation write their results quantized."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from transformer_engine_jax.decisions import devices
from transformer_engine_jax.differentiable import differentiable
from transformer_engine_jax.ops.activation import (
    Activations,
    Clamp,
    Fused,
    activation,
    activation_bwd,
    activation_fwd,
    as_added,
    as_tuple,
    fused_activation,
)
from transformer_engine_jax.ops.arrays import arrays
from transformer_engine_jax.ops.dense import (
    Dense,
    Saved,
    dense,
    dense_backward,
    dense_forward,
    quantize_gradient,
)
from transformer_engine_jax.ops.dense_checks import check_dense, check_quantizers, check_residual
from transformer_engine_jax.ops.layernorm import Norm, check_options, checked_norm, norm_and_input, norm_backward
from transformer_engine_jax.ops.layernorm_dense import norm_forward, transposed_now, transposes_later
from transformer_engine_jax.ops.main_grad import Accumulating, claimed, unpacked
from transformer_engine_jax.ops.quantize import Cast, Casting
from transformer_engine_jax.order import computed_once
from transformer_engine_jax.quantizers import GemmQuantizers, Quantizer
from transformer_engine_jax.sharding import FREE, Axes, SequenceShards, constrain


def activation_forward(fused: Fused, z, bias, quantizer: Quantizer) -> Cast:
    """The activation of z[.., A, N] + bias[A, N], quantized both ways in the pass that computes it.

    A recipe that needs its amax first computes it twice: that moves fewer bytes than to store it in between.
    """

    def run(scale, **results):
        return activation_fwd(z, scale, bias, **fused._asdict(), **results)

    casting = Casting.of(quantizer, lambda: run(None, y=False, amax=True).amax)
    out = run(casting.scale, y_t=True, **casting.options)
    return casting.result(out.y, out.y_t, out)


def activation_backward(fused: Fused, dy, z, bias, quantizer: Quantizer, q_t: bool = True) -> Cast:
    """The gradient of z[.., A, N], quantized likewise, with its sum over tokens where there is a bias.

    q_t: False leaves the transposed copy to the product that reads it.
    """

    def run(scale, **results):
        return activation_bwd(dy, z, scale, bias, **fused._asdict(), **results)

    casting = Casting.of(quantizer, lambda: run(None, dz=False, amax=True).amax)
    out = run(casting.scale, dz_t=q_t, dbias=bias is not None, **casting.options)
    return casting.result(out.dz, out.dz_t, out, out.dbias)


class _Static(NamedTuple):
    norm: Norm | None
    activation: Fused
    dense_1: Dense
    dense_2: Dense
    name: str  # of the first product, for checkpoint policies
    x_axes: Axes
    return_input: bool


def _forward(static: _Static, x, gamma, beta, kernel_1, bias_1, main_grad_1, kernel_2, bias_2, main_grad_2, quantizers):
    quantizers_1, quantizers_2 = quantizers
    cast_x, normed = norm_forward(static.norm, static.dense_1, x, gamma, beta, quantizers_1.x)
    # The activation adds the bias for next to nothing, a product for 7 % of its time at gpt's size on an H200.
    z, saved_1 = dense_forward(static.dense_1, cast_x, kernel_1, None, main_grad_1, quantizers_1)
    z = checkpoint_name(computed_once(z, of="product"), static.name)
    bias_1 = as_added(bias_1)
    cast_a = activation_forward(static.activation, z, bias_1, quantizers_2.x)
    y, saved_2 = dense_forward(
        static.dense_2, cast_a, kernel_2, bias_2, main_grad_2, quantizers_2, x if static.dense_2.residual else None
    )
    return (y, x if static.return_input else None), (normed, saved_1, z, bias_1, saved_2)


def _transposed_later(static: _Static, z, saved: Saved) -> bool:
    """Whether a gated activation's gradient is transposed once the activation has let go of its operands.

    Most memory is in use there, of which the transposed copy is a fifth. To read the gradient again takes 0 to 2 % of a
    layer's time, so this is only where a layer would need more memory than Flax's in bf16: where kernels have 16 bits,
    of which that holds no copies, and where tokens are many for the size of kernels, in whose gradients, before they
    are computed, XLA places what it holds meanwhile.
    """
    gated, most = z.shape[-2] == 2, 4 * saved.kernel.data.size * devices()
    many = isinstance(z.size, int) and z.size > most  # no int: known at run time only, of what is exported
    return gated and (static.dense_1.kernel_dtype.itemsize == 2 or many)


def _backward(static: _Static, residuals, cotangents):
    normed, saved_1, z, bias_1, saved_2 = residuals
    dy, past = cotangents
    past = dy if static.dense_2.residual else past
    cast_dy = quantize_gradient(static.dense_2, saved_2, dy)

    def through_activation(da):
        q_t = not _transposed_later(static, z, saved_1)
        return activation_backward(static.activation, da, z, bias_1, saved_1.quantizers.grad, q_t)

    # With fewer tokens, a gated MLP needs more memory so: llama's layer of 2048 takes 0.30 GiB for 0.27.
    last_up_to = 4.0 if z.shape[-2] == 2 else math.inf
    cast_dz, parameters_2, reports_2 = dense_backward(
        static.dense_2, saved_2, cast_dy, then=through_activation, last_up_to=last_up_to
    )
    x_t = transposed_now(static.norm, static.dense_1, normed, saved_1.quantizers.x, cast_dz)
    dx, parameters_1, reports_1 = dense_backward(static.dense_1, saved_1, cast_dz, x_t=x_t, last_up_to=last_up_to)
    dx, dgamma, dbeta = norm_backward(static.norm, normed.of_norm, constrain(dx, static.x_axes), past)
    return dx, dgamma, dbeta, *parameters_1, *parameters_2, (reports_1, reports_2)


_fp8_layernorm_mlp = differentiable(_forward, _backward, gives="product")


def layernorm_mlp(
    x,
    gamma,
    beta,
    kernels: tuple[jax.Array | Accumulating, jax.Array | Accumulating],
    biases: tuple[jax.Array | None, jax.Array | None] = (None, None),
    *,
    activations: Activations = ("gelu",),
    activation_params: Mapping[str, float] | Clamp | None = None,
    norm_options: Norm | None = Norm(),
    quantizers: tuple[GemmQuantizers, GemmQuantizers] | None = None,
    names: tuple[str, str] = ("ffn1", "ffn2"),
    residual: bool = False,
    return_input: bool = False,
    norm_input_axes: Axes = (),
    dot_1_input_axes: Axes = (),
    dot_2_input_axes: Axes = (),
    kernel_axes: tuple[Axes, Axes] = ((), ()),
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """activation(norm(x[.., K]) @ kernels[0][K, A, N] + biases[0][A, N]) @ kernels[1][N, n..] + biases[1][n..].

    Args:
      x: f32, f16 or bf16; the result [.., n..] has its dtype.
      gamma, beta: [K]; beta None makes it an RMSNorm; both None where norm_options is None (no norm).
      kernels, biases: of the two products, as in `dense`; A is len(activations).
      activations, activation_params: as in `activation`.
      norm_options: epsilon and zero_centered_gamma, or None for no norm.
      quantizers: of the two products; None computes in x's precision.
      names: checkpoint names of the two products' results.
      residual: add x to the result; in FP8 inside the second product, and to the gradient inside the norm's backward.
      return_input: return (that, x), as `layernorm_dense` does: for a residual that is added later.
      norm_input_axes, dot_1_input_axes, dot_2_input_axes: logical axes of x, as `layernorm_dense` has them, and of what
        the products read. Where tokens are gathered for the first product, they are scattered by the second.
      kernel_axes: those of the kernels, as `dense` has them.

    Raises:
      ValueError: the shapes or dtypes do not fit, kernels are not two, gamma or beta without a norm, or both residual
        and return_input.
      TypeError: `quantizers` are not of gemm_quantizers, or norm_options is no Norm.
    """
    biases, kernel_axes = (None, None) if biases is None else biases, kernel_axes or ((), ())
    for name, given in dict(kernels=kernels, biases=biases, names=names, kernel_axes=kernel_axes).items():
        if not (isinstance(given, tuple | list) and len(given) == 2):
            raise ValueError(f"layernorm_mlp: {name}: expected two, of the two products, got {_counted(given)}")
    x, gamma, beta, bias_1, bias_2 = arrays("layernorm_mlp", {"x": x}, gamma, beta, *biases)
    if norm_options is None and not (gamma is None and beta is None):
        raise ValueError("layernorm_mlp: gamma, beta: expected None where norm_options is None (no norm), got an array")
    if not (quantizers is None or (isinstance(quantizers, tuple | list) and len(quantizers) == 2)):
        raise ValueError(f"layernorm_mlp: quantizers: expected None or those of two, got {_counted(quantizers)}")
    kernel_1, kernel_2 = [unpacked("layernorm_mlp", kernel)[0] for kernel in kernels]
    activations = as_tuple(activations)
    if kernel_1.ndim != 3 or kernel_1.shape[1] != len(activations):
        raise ValueError(
            f"layernorm_mlp: kernels[0]: expected [K, {len(activations)}, N] for {activations}, "
            f"got {list(kernel_1.shape)}"
        )
    first, second = quantizers or (None, None)
    check_quantizers("layernorm_mlp", first, second)
    if first is None and second is None:
        quantizers = None
    elif first is None or second is None:
        raise ValueError(
            "layernorm_mlp: quantizers: expected those of both products, or None, got those of one; compute an MLP of "
            "which one product is in FP8 by te.layernorm_dense, te.activation and te.dense"
        )
    check_dense("layernorm_mlp", x, kernel_1, bias_1, 1, first)
    activated = jax.ShapeDtypeStruct((*x.shape[:-1], kernel_1.shape[2]), x.dtype)
    check_dense("layernorm_mlp, second product", activated, kernel_2, bias_2, 1, second)
    if norm_options is not None:
        check_options("layernorm_mlp", norm_options)
        norm_options, x, gamma, beta = checked_norm("layernorm_mlp", norm_options, x, gamma, beta)
    if residual and return_input:
        raise ValueError("layernorm_mlp: return_input: expected False where the residual is added, got True")
    if residual:
        check_residual("layernorm_mlp", x, (*x.shape[:-1], *kernel_2.shape[1:]), x.dtype)
    norm_input_axes, dot_1_input_axes, dot_2_input_axes = (
        axes or () for axes in (norm_input_axes, dot_1_input_axes, dot_2_input_axes)
    )
    x = constrain(x, norm_input_axes)
    shards = SequenceShards.of(x, norm_input_axes[:-1], dot_1_input_axes[:-1])
    x_axes = shards.axes(norm_input_axes, between=True)
    y, past = _layernorm_mlp(
        shards.split(x), gamma, beta, kernels, (bias_1, bias_2), activations, activation_params, norm_options,
        quantizers, names, residual, return_input,
        (x_axes, shards.axes(dot_1_input_axes), shards.axes(dot_2_input_axes)), shards.gathered, kernel_axes,
    )  # fmt: skip
    if shards.gathered:
        y = constrain(y, (*x_axes[:-1], *(FREE,) * (kernel_2.ndim - 1)))
    y = shards.join(y)
    return (y, shards.join(past)) if return_input else y


def _counted(given) -> str:
    return str(len(given)) if isinstance(given, tuple | list) else type(given).__name__


def _layernorm_mlp(
    x, gamma, beta, kernels, biases, activations, activation_params, norm_options: Norm | None, quantizers,
    names: tuple[str, str], residual: bool, return_input: bool, axes: tuple[Axes, Axes, Axes],
    gathers: bool, kernel_axes: tuple[Axes, Axes],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """`layernorm_mlp`, of arrays and of x as the first logical axes say."""
    (kernel_1, main_grad_1), (kernel_2, main_grad_2) = [unpacked("layernorm_mlp", kernel) for kernel in kernels]
    (bias_1, bias_2), (x_axes, axes_1, axes_2) = biases, axes
    fused = fused_activation(activations, activation_params)
    if quantizers is None or quantizers[0].x.spec.calibrating or fused is None:
        first, second = quantizers or (None, None)
        normed, past = norm_and_input(norm_options, x, gamma, beta, residual or return_input)
        normed = constrain(normed, axes_1)
        # XLA can't fuse the first bias and its gradient into the activation's kernels: each would be a pass of its own
        # over z. So the kernels add the one and sum the other, and the z that names[0] names is without its bias.
        in_product, in_activation = (bias_1, None) if fused is None else (None, bias_1)
        by_kernels = fused is not None
        z = checkpoint_name(dense(normed, kernels[0], in_product, quantizers=first, by_kernels=by_kernels), names[0])
        a = activation(z, activations, activation_params, in_activation)
        added = past if residual else None
        y = dense(a, kernels[1], bias_2, quantizers=second, residual=added, by_kernels=by_kernels, input_axes=axes_2)
        return checkpoint_name(y, names[1]), past
    main_grad_1, adds_1 = claimed(main_grad_1, x, kernel_1)
    main_grad_2, adds_2 = claimed(main_grad_2, x, kernel_2)
    later = transposes_later(norm_options, kernel_1, gathers, quantizers[0].x)
    fields = dict(adds=adds_1, x_axes=axes_1, gathers_x=gathers, x_t_later=later)
    dense_1 = Dense.of(x, kernel_1, bias_1, 1, kernel_axes[0], **fields)
    fields = dict(residual=residual, adds=adds_2, x_axes=axes_2, gathers_dy=gathers and bool(axes_2))
    dense_2 = Dense.of(x, kernel_2, bias_2, 1, kernel_axes[1], **fields)
    static = _Static(norm_options, fused, dense_1, dense_2, names[0], x_axes, return_input)
    parameters = kernel_1, bias_1, main_grad_1, kernel_2, bias_2, main_grad_2
    y, past = _fp8_layernorm_mlp(static, x, gamma, beta, *parameters, quantizers)
    return checkpoint_name(y, names[1]), past
