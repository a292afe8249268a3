"""What activations say of arguments that do not fit, and their handlers of calls that no op makes."""

import jax.numpy as jnp
import numpy as np
import pytest
from stored import ABSENT, E4M3, FROM_SCALE, call_handler

from transformer_engine_jax.ops.activation import Clamp, activation, activation_bwd, activation_fwd

F32 = jnp.float32


@pytest.mark.parametrize(
    "message, call",
    {
        "activation: activations: expected some of .* got 'swish'": lambda z: activation(z, "swish"),
        r"got 'swiglu'; write \('silu', 'linear'\) for it": lambda z: activation(z, "swiglu"),
        r"got 'gelu_new'; write \('gelu',\) for it": lambda z: activation(z, "gelu_new"),
        r"got 'gelu_pytorch_tanh'; write \('gelu',\) for it": lambda z: activation(z, "gelu_pytorch_tanh"),
        r"got 'gelu_python'; write functools.partial\(jax.nn.gelu, app": lambda z: activation(z, "gelu_python"),
        r"got 'gelu_exact'; write functools.partial\(jax.nn.gelu, app": lambda z: activation(z, "gelu_exact"),
        "activation: activations: expected some of .* got 3": lambda z: activation(z, (3,)),
        "activation: activations: expected some of .* got 4": lambda z: activation(z, 4),
        "activation: activations: expected at least one": lambda z: activation(z, ()),
        "activation: params: expected none for": lambda z: activation(z, "silu", {"limit": 7.0}),
        "activation: params: expected some of .* got 'beta'": lambda z: activation(z, "clamped_silu", {"beta": 7.0}),
        "activation: params: limit: expected a finite": lambda z: activation(z, "clamped_silu", {"limit": -1}),
        r"activation: z: expected \[.., 2, N\]": lambda z: activation(z, ("silu", "linear")),
        "activation: z: expected f32, f16 or bf16, got int32": lambda z: activation(z.astype(int), "silu"),
        "activation_fwd: activation: expected one of": lambda z: activation_fwd(z, None, activation="linear"),
        r"activation_fwd: z: expected \[.., 2, N\]": lambda z: activation_fwd(z, None, activation="silu_linear"),
        r"activation: bias: expected .*\[1, 8\], got float32\[8\]": lambda z: activation(z, "silu", bias=z[0, 0]),
        r"activation: bias: expected .*, got int32": lambda z: activation(z, "silu", bias=z[0].astype(int)),
        r"activation_fwd: bias: expected \[1, 8\], got \[1, 1\]": lambda z: activation_fwd(
            z, None, z[0, :, :1], activation="silu"
        ),
        "activation_bwd: dtype: expected FP8 with a scale": lambda z: activation_bwd(
            z[:, 0], z, None, activation="silu", dtype=E4M3
        ),
    }.items(),
)
def test_mistakes(message, call):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones((3, 1, 8)))


CLAMP = {name: np.float32(value) for name, value in Clamp()._asdict().items()}
FWD = (
    {"z": ((3, 2, 8), F32), "scale": ABSENT, "bias": ABSENT},
    {"y": ((3, 8), F32), **dict.fromkeys(["y_t", "amax", "report", "scale_inv"], ABSENT)},
)
BWD = (
    {"dy": ((3, 8), F32), "z": ((3, 2, 8), F32), "scale": ABSENT, "bias": ABSENT},
    {"dz": ((3, 2, 8), F32), **dict.fromkeys(["dz_t", "amax", "dbias", "report", "scale_inv"], ABSENT)},
)


@pytest.mark.parametrize(
    "argument, wrong",
    [
        ("z", ((8,), F32)),
        ("z", ((3, 1, 8), F32)),
        ("z", ((3, 2, 8), jnp.int32)),
        ("z", ((3, 2, 8), E4M3)),
        ("scale", ((), F32)),  # then the result has to be FP8
        ("scale", ((1,), F32)),
        ("bias", ((8,), F32)),
        ("bias", ((3, 2, 8), F32)),
        ("bias", ((2, 8), jnp.int32)),
        ("bias", ((2, 8), E4M3)),
        ("y", ((3, 7), F32)),
        ("y", ((3, 8), E4M3)),
        ("y_t", ((8, 3), E4M3)),
        ("amax", ((1,), F32)),
        ("report", ((1, 512), F32)),
        ("scale_inv", ((), F32)),  # of no scale
        ("dy", ((3, 7), F32)),
        ("dz", ((3, 8), F32)),
        ("dz_t", ((2, 8, 3), E4M3)),
        ("dbias", ((2, 7), F32)),
        ("dbias", ((2, 8), jnp.bfloat16)),
    ],
)
def test_malformed_calls_raise(argument, wrong):
    for name, (operands, results) in (("activation_fwd", FWD), ("activation_bwd", BWD)):
        if argument in operands or argument in results:
            operands, results = dict(operands), dict(results)
            (operands if argument in operands else results)[argument] = wrong
            with pytest.raises(Exception, match=f"te_{name}: "):
                call_handler(name, operands, results, {"activation": "silu_linear", **CLAMP, **FROM_SCALE})


@pytest.mark.parametrize("name", ["", "swish", "linear", "_linear", "gelu_", "gelu_linear_linear"])
def test_unknown_activations_raise(name):
    with pytest.raises(Exception, match="te_activation_fwd: activation: expected gelu"):
        call_handler("activation_fwd", *FWD, {"activation": name, **CLAMP, **FROM_SCALE})


def test_a_call_without_y_has_a_transposed_copy_of_fp8_or_no_scale():
    attributes = {"activation": "silu_linear", **CLAMP, **FROM_SCALE}
    for name, (operands, results), y, y_t in (
        ("activation_fwd", FWD, "y", ((3, 8), E4M3)),
        ("activation_bwd", BWD, "dz", ((3, 2, 8), E4M3)),
    ):
        scaled = {**operands, "scale": ((), F32)}
        for given, wrong, message in (
            (scaled, {}, f"{y}: expected a result to scale"),
            (scaled, {f"{y}_t": (y_t[0][::-1], F32)}, f"{y}_t: expected"),
            (operands, {f"{y}_t": y_t}, f"{y}_t: expected no transposed copy without a scale"),
        ):
            with pytest.raises(Exception, match=f"te_{name}: {message}"):
                call_handler(name, given, {**results, y: ABSENT, "amax": ((), F32), **wrong}, attributes)
