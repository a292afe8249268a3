"""Checks of the modules' fields."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from transformer_engine_jax.ops.attention.context_parallel import STRATEGIES
from transformer_engine_jax.ops.attention.layouts import BIAS_TYPES, LAYOUTS, MASK_TYPES, respelled
from transformer_engine_jax.ops.attention.options import SOFTMAX_TYPES
from transformer_engine_jax.ops.layernorm import check_epsilon
from transformer_engine_jax.ops.quantize import FLOATS
from transformer_engine_jax.ops.rope import GROUPS


def canonical_tuple(value) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def one_of(module: Any, field: str, allowed: Sequence) -> None:
    """Raises ValueError where a field of a module is not among those allowed."""
    value = getattr(module, field)
    if value not in allowed:
        raise ValueError(f"{type(module).__name__}.{field}: expected one of {list(allowed)}, got {value!r}")


# Of which projections a low_rank_adaptation_scope speaks.
SCOPES = ("none", "all", *(f"{how}{what}" for how in ("", "exclude_") for what in ("qkv_proj", "output_proj", "mlp")))

# Fields of several modules, and what they may be.
CHOICES = {
    "layernorm_type": ("layernorm", "rmsnorm"),
    "rotary_pos_emb_group_method": GROUPS,
    "qk_norm_type": (None, "layernorm", "rmsnorm", "l2norm"),
    "attn_mask_type": MASK_TYPES,
    "self_attn_mask_type": MASK_TYPES,
    "attn_bias_type": (None, *BIAS_TYPES),
    "self_attn_bias_type": (None, *BIAS_TYPES),
    "qkv_layout": tuple(LAYOUTS),
    "softmax_type": SOFTMAX_TYPES,
    "context_parallel_strategy": STRATEGIES,
    "low_rank_adaptation_scope": SCOPES,
}


def is_ours(cls: type) -> bool:
    """Whether a class is this package's, not a user's class of one."""
    return cls.__module__.split(".")[0] == __name__.split(".")[0]


@functools.cache
def _fields(cls: type) -> dict[str, Any]:
    """The fields of a class that this package declares, not a user's class of it, and their annotations."""
    declaring = [base for base in cls.__mro__ if is_ours(base)]
    ours = {name for base in declaring for name in inspect.get_annotations(base)}
    return {field.name: field.type for field in dataclasses.fields(cls) if field.name in ours}


def respell(module: Any) -> None:
    """Fields as they are spelled here: names of CHOICES, activations in lower case, and numbers of NumPy's and JAX's as
    Python's.

    They have dtypes of their own, to which results of 16 bits would be widened.
    """
    for field in _fields(type(module)):
        value = getattr(module, field, None)
        if hasattr(value, "dtype") and isinstance(value, np.generic | np.ndarray | jax.Array) and value.size == 1:
            if not isinstance(value, jax.core.Tracer):
                setattr(module, field, value.item())
    for field, allowed in CHOICES.items():
        if hasattr(module, field):
            setattr(module, field, respelled(getattr(module, field), allowed))
    for field in ("activations", "mlp_activations"):
        if hasattr(module, field):
            names = canonical_tuple(getattr(module, field))
            setattr(module, field, tuple(name.lower() if isinstance(name, str) else name for name in names))


def check_dtypes(module: Any) -> None:
    """Raises ValueError where a module's dtype is of no float that its products and norms take."""
    for field in ("dtype", "param_dtype"):
        value = getattr(module, field, None)
        try:
            fits = value is None or np.dtype(value) in (*FLOATS, np.float64)
        except TypeError:
            fits = False
        if not fits:
            raise ValueError(f"{type(module).__name__}.{field}: expected f32, f16, bf16 or f64, got {value!r}")


def check_common(module: Any) -> None:
    """Raises ValueError where a field that several modules have is wrong, whether it is in use or not."""
    for field, allowed in CHOICES.items():
        if hasattr(module, field):
            one_of(module, field, allowed)
    for field, annotation in _fields(type(module)).items():
        if annotation in (bool, "bool"):
            check_bool(module, field, getattr(module, field))
    for field in ("epsilon", "layernorm_epsilon", "qk_norm_epsilon"):
        check_epsilon(f"{type(module).__name__}.{field}", getattr(module, field, 0))
    if getattr(module, "depth_scaling", None) == 0:
        raise ValueError(f"{type(module).__name__}.depth_scaling: expected a divisor or None, got 0")


def check_bool(module: Any, field: str, value: Any) -> None:
    """Raises ValueError where the value of a module's field is neither True nor False."""
    if not (isinstance(value, bool) or (getattr(value, "dtype", None) == np.bool_ and value.ndim == 0)):
        scaled = field == "scale_attn_logits"
        hint = "; to scale by another number multiply the query's kernel, and bias, by it" if scaled else ""
        raise ValueError(f"{type(module).__name__}.{field}: expected True or False, got {value!r}{hint}")


# Sizes that follow from others where they are None.
OPTIONAL = ("num_gqa_groups", "kv_channels", "max_segments_per_seq")


def check_positive(module: Any, *fields: str) -> None:
    """Raises ValueError where a field of a module is not an integer from 1 on, nor None where that is allowed."""
    for field in fields:
        value = getattr(module, field)
        absent = value is None and field in OPTIONAL
        if not absent and not (isinstance(value, int | np.integer) and value >= 1):
            raise ValueError(f"{type(module).__name__}.{field}: expected a positive integer, got {value!r}")


def sizes_of(module: Any, field: str) -> tuple[int, ...]:
    """A field of sizes as a tuple; ValueError where they are not positive integers."""
    sizes = canonical_tuple(value := getattr(module, field))
    if not sizes or not all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
        raise ValueError(f"{type(module).__name__}.{field}: expected positive sizes, got {value!r}")
    return sizes


def check_axes(module: Any, name: str, axes: Sequence[str | None], shape: Sequence[int]) -> None:
    """Raises ValueError where the logical axes of a parameter, if it has any, are not as many as its own."""
    if axes and len(axes) != len(shape):
        raise ValueError(
            f"{type(module).__name__}.{name}: expected {len(shape)} logical axes for the shape {tuple(shape)}, got "
            f"{tuple(axes)}"
        )


def is_number(value: Any) -> bool:
    """Whether a field, respelled, is one real number, which may be traced."""
    traced = isinstance(value, jax.core.Tracer) and value.ndim == 0 and value.dtype.kind in "iuf"
    return traced or isinstance(value, int | float)


def is_rate(value: Any) -> bool:
    """Whether a field, respelled, is a dropout rate, on which it depends what is compiled."""
    return isinstance(value, int | float) and 0.0 <= value < 1.0


def check_rate(module: Any, field: str) -> None:
    """Raises ValueError where a field of a module is no dropout rate."""
    if not is_rate(rate := getattr(module, field)):
        raise ValueError(f"{type(module).__name__}.{field}: expected a rate in [0, 1), got {rate!r}")


def check_low_rank(module: Any) -> None:
    """Raises ValueError where a module's fields of low-rank adaptation, which is in use, are wrong."""
    check_positive(module, "low_rank_adaptation_dim")
    alpha = module.low_rank_adaptation_alpha
    if not (alpha is None or is_number(alpha)):
        raise ValueError(
            f"{type(module).__name__}.low_rank_adaptation_alpha: expected a number or None, which scales by 1, got "
            f"{alpha!r}"
        )


def check_dims(module: Any, field: str, rank: int = 3) -> None:
    """Raises ValueError where a field of a module does not hold axes of an array."""
    axes = getattr(module, field)
    if not (isinstance(axes, tuple | list) and all(-rank <= axis < rank for axis in axes)):
        raise ValueError(f"{type(module).__name__}.{field}: expected axes of {rank}, got {axes}")


def last_size(module: Any, x) -> int:
    """The size of x's last axis; ValueError where it has none."""
    if not np.shape(x):
        raise ValueError(f"{type(module).__name__}: x: expected at least one axis, got a scalar")
    return np.shape(x)[-1]
