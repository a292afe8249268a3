"""What norms say of arguments that do not fit, and their handlers of calls that no op makes."""

import jax.numpy as jnp
import numpy as np
import pytest
from stored import ABSENT, E4M3, FROM_SCALE, call_handler

from transformer_engine_jax.ops.layernorm import layernorm, layernorm_fwd, rmsnorm, rmsnorm_fwd

F32 = jnp.float32


@pytest.mark.parametrize(
    "message, call",
    {
        r"layernorm: gamma: expected \[8\].*got \[7\]": lambda x, g: layernorm(x, g[:7], g),
        r"layernorm: beta: expected \[8\].*got \[1, 8\]": lambda x, g: layernorm(x, g, g[None]),
        r"layernorm: x: expected f32, f16 or bf16, got int32": lambda x, g: layernorm(x.astype(int), g, g),
        r"layernorm: beta: expected \[K\], got None; rmsnorm has none": lambda x, g: layernorm(x, g, None),
        r"rmsnorm: gamma: expected f32, f16 or bf16, got int32": lambda x, g: rmsnorm(x, g.astype(int)),
        "rmsnorm: epsilon: expected 0 or more, got -1": lambda x, g: rmsnorm(x, g, epsilon=-1),
        "layernorm: epsilon: expected 0 or more, got nan": lambda x, g: layernorm(x, g, g, epsilon=np.nan),
        r"rmsnorm: x: expected at least one axis": lambda x, g: rmsnorm(jnp.float32(1), g),
        r"rmsnorm_fwd: dtype: expected FP8 with a scale": lambda x, g: rmsnorm_fwd(x, g, jnp.float32(1), epsilon=0.0),
        r"layernorm_fwd: scale: .*transposed copy": lambda x, g: layernorm_fwd(x, g, g, None, epsilon=0.0, y_t=True),
    }.items(),
)
def test_mistakes(message, call):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones((3, 8)), jnp.ones(8))


FWD = {"x": ((3, 8), F32), "gamma": ((8,), F32), "beta": ((8,), F32), "scale": ABSENT}
FWD |= {"known_mean": ABSENT, "known_rstd": ABSENT}
FWD_OUT = {"y": ((3, 8), F32), "y_t": ABSENT, "mean": ((3,), F32), "rstd": ((3,), F32), "amax": ABSENT}
FWD_OUT |= {"report": ABSENT, "scale_inv": ABSENT}
FWD_ATTRIBUTES = {"epsilon": np.float32(0), "zero_centered_gamma": False, **FROM_SCALE}
BWD = {"dy": ((3, 8), F32), "x": ((3, 8), F32), "gamma": ((8,), F32), "mean": ((3,), F32), "rstd": ((3,), F32)}
BWD["residual"] = ABSENT
BWD_OUT = {"dx": ((3, 8), F32), "dgamma": ((8,), F32), "dbeta": ((8,), F32)}


@pytest.mark.parametrize(
    "argument, wrong",
    [
        ("x", ((), F32)),
        ("x", ((3, 8), jnp.int32)),
        ("gamma", ((9,), F32)),
        ("gamma", ((8,), E4M3)),
        ("beta", ((7,), F32)),
        ("scale", ((1,), F32)),
        ("scale", ((), F32)),  # then y has to be FP8
        ("known_mean", ((3,), F32)),  # then there are no results of the kind
        ("known_rstd", ((3,), F32)),
        ("y", ((3, 9), F32)),
        ("y", ((3, 8), E4M3)),
        ("y_t", ((8, 3), E4M3)),
        ("mean", ((2,), F32)),
        ("rstd", ((3,), jnp.bfloat16)),
        ("amax", ((1,), F32)),
        ("report", ((1, 512), F32)),
        ("scale_inv", ((), F32)),  # of no scale
        ("dy", ((3, 7), F32)),
        ("residual", ((3, 8), jnp.bfloat16)),
        ("residual", ((2, 8), F32)),
        ("dx", ((3, 8), jnp.bfloat16)),
        ("dgamma", ((9,), F32)),
        ("dbeta", ((8,), jnp.bfloat16)),
    ],
)
def test_malformed_calls_raise(argument, wrong):
    ran = False
    for name, operands, results, attributes in (
        ("layernorm_fwd", FWD, FWD_OUT, FWD_ATTRIBUTES),
        ("layernorm_bwd", BWD, BWD_OUT, {"zero_centered_gamma": False}),
    ):
        for norm in ("layernorm", "rmsnorm"):
            gone = ("mean", "known_mean", "beta", "dbeta") if norm == "rmsnorm" else ()
            ins = {k: v for k, v in operands.items() if k not in gone}
            outs = {k: v for k, v in results.items() if k not in gone}
            if argument not in {**ins, **outs}:
                continue
            side = ins if argument in ins else outs
            side[argument] = wrong
            with pytest.raises(Exception, match=f"te_{name.replace('layernorm', norm)}: "):
                call_handler(name.replace("layernorm", norm), ins, outs, attributes)
            ran = True
    assert ran


def test_wrong_attributes_or_operands_raise():
    with pytest.raises(Exception, match="attributes"):
        call_handler("layernorm_fwd", FWD, FWD_OUT, {"epsilon": np.float32(0), **FROM_SCALE})
    with pytest.raises(Exception, match="data type"):
        call_handler("layernorm_fwd", FWD, FWD_OUT, {**FWD_ATTRIBUTES, "epsilon": 0})
    with pytest.raises(Exception, match=r"[Ww]rong number of"):
        call_handler("layernorm_fwd", {"x": FWD["x"]}, FWD_OUT, FWD_ATTRIBUTES)


def test_a_call_without_y_has_a_transposed_copy_of_fp8_or_no_scale():
    scaled, y_t = {**FWD, "scale": ((), F32)}, ((8, 3), E4M3)
    for operands, wrong, message in (
        (scaled, {}, "y: expected a result to scale"),
        (scaled, {"y_t": ((8, 3), F32)}, "y_t: expected"),
        (scaled, {"y_t": ((8, 4), E4M3)}, "y_t: expected"),
        (FWD, {"y_t": y_t}, "y_t: expected no transposed copy without a scale"),
    ):
        with pytest.raises(Exception, match=f"te_layernorm_fwd: {message}"):
            call_handler("layernorm_fwd", operands, {**FWD_OUT, "y": ABSENT, **wrong}, FWD_ATTRIBUTES)
