"""Recipes: how scales follow the data, as frozen dataclasses, and the arithmetic from amax to scale.

A recipe is static and hashable, so it can be part of the jit cache key. Formats after "FP8 Formats for Deep
Learning" (Micikevicius et al., 2022).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# What transformer_engine_jax.common.recipe has, too.
__all__ = ["DelayedScaling", "Float8CurrentScaling", "Format", "FormatDtypes", "MMParams", "Recipe"]


class FormatDtypes(NamedTuple):
    forward: np.dtype  # of activations and weights
    backward: np.dtype  # of gradients

    @property
    def max_fwd(self) -> float:
        """The largest value of the forward pass."""
        return float(jnp.finfo(self.forward).max)

    @property
    def max_bwd(self) -> float:
        """The largest value of the backward pass."""
        return float(jnp.finfo(self.backward).max)


_E4M3, _E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)


class Format(enum.Enum):
    """FP8 formats of the forward and the backward pass; E4M3 reaches 448, E5M2 57344."""

    E4M3 = FormatDtypes(_E4M3, _E4M3)
    E5M2 = FormatDtypes(_E5M2, _E5M2)
    HYBRID = FormatDtypes(_E4M3, _E5M2)


@dataclasses.dataclass(frozen=True)
class MMParams:
    """How one GEMM accumulates: split adds partial sums in f32 (1 to 10 % slower on Hopper, 30 % for K of 1024).

    Without it the tensor cores cut off what is below the last bit of the sum so far: 0.3 % off over 16384 terms of
    random sign, but a quarter too small where they agree in sign (`python -m benchmarks accumulation`). With it they do
    so for 128 terms at a time, or 512 where our kernel is faster than cuBLASLt's: 0.03 % off, 0.4 % too small at most.
    So products with weights (fprop, dgrad) do without by default, and sums over tokens (wgrad) do not.
    """

    use_split_accumulator: bool = True

    def __post_init__(self):
        if not isinstance(self.use_split_accumulator, bool):
            raise ValueError(f"MMParams.use_split_accumulator: expected a bool, got {self.use_split_accumulator!r}")


def _check(recipe, field: str, ok: bool, expected: str) -> None:
    if not ok:
        raise ValueError(f"{type(recipe).__name__}.{field}: expected {expected}, got {getattr(recipe, field)!r}")


def _hashable(value) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


class Recipe:
    """What the ops ask of every recipe: formats, accumulation, and how scales are computed.

    One of your own subclasses this where scales follow the data at hand (stateful = False), and DelayedScaling where
    they follow a history. Of these defaults it makes dataclass fields of its own where they are to be arguments.
    """

    stateful: ClassVar[bool]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    fp8_gemms: str | Callable = "auto"
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    amax_epsilon = 0.0
    use_power_2_scales = False

    def _check_common(self) -> None:
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), np.generic):  # a number of NumPy's counts as Python's
                object.__setattr__(self, field.name, value.item())
            if callable(value):
                _check(self, field.name, _hashable(value), "a function with a hash (give its class a __hash__)")
        gemms = self.fp8_gemms
        _check(self, "fp8_gemms", gemms in ("auto", "all") or callable(gemms), "'auto', 'all' or a function of m, k, n")
        _check(self, "fp8_format", isinstance(self.fp8_format, Format), "a recipe.Format")
        for field in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            _check(self, field, isinstance(getattr(self, field), MMParams), "an MMParams")
        _check(self, "fp8_dpa", isinstance(self.fp8_dpa, bool), "a bool")
        _check(self, "fp8_mha", self.fp8_mha is False, "False (attention alone in FP8 is fp8_dpa=True)")
        if self.fp8_dpa and self.forward_dtype != _E4M3:
            raise ValueError(
                f"{type(self).__name__}.fp8_dpa: expected False with fp8_format={self.fp8_format}, got True: queries, "
                "keys and values of attention are cast to E4M3; take Format.HYBRID or Format.E4M3"
            )

    @property
    def forward_dtype(self) -> np.dtype:
        """Of activations and kernels."""
        return self.fp8_format.value.forward

    @property
    def backward_dtype(self) -> np.dtype:
        """Of gradients."""
        return self.fp8_format.value.backward


@dataclasses.dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Scales from the amaxes of earlier steps: one pass over a tensor, at the price of a state.

    Args:
      margin: the scale is divided by 2**margin; between -64 and 64.
      fp8_format: formats of the forward and the backward pass.
      amax_history_len: steps remembered, 1 to 65536.
      amax_compute_algo: "max" over the history, "most_recent", or a function f32[H] -> f32[] (newest first).
      scaling_factor_compute_algo: None, or a function (amax f32[], scale f32[], fp8_max, recipe) -> f32[].
      reduce_amax: one amax for all shards of a tensor; False raises, as a tensor is one whatever its sharding.
      fp8_dpa: the forward pass of attention takes query, key and value in FP8; its backward is in their own dtype. What
        it has no kernels for, such as mask arrays, biases, dropout, score_mod, another softmax, several sequences in a
        row, or head sizes that are no multiples of 16 up to 128, is in high precision, and a warning says why.
      fp8_mha: the projections around attention in FP8 without casts between; not available, True raises.
      fp8_gemms: which products of modules run in FP8: "auto" leaves those in high precision that would be slower in
        FP8 on the GPU at hand, and on other devices none; "all"; or a function (m, k, n) -> bool of the product of
        x[m, k] and kernel[k, n]. The two products of an MLP are decided together, and so are query, key and value: in
        FP8 where it says so of each kernel. n counts all outputs of a kernel, of queries, keys and values in one
        3 * heads * head_dim, though `te.explain` has a row for each product. Functions are compared by identity, so a
        recipe that is made anew at each step is traced anew.
      fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: accumulation of the three GEMMs.

    Raises:
      ValueError: a field of another kind, or out of its range.
    """

    margin: float = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 16
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    fp8_gemms: str | Callable = "auto"
    fp8_gemm_fprop: MMParams = Recipe.fp8_gemm_fprop
    fp8_gemm_dgrad: MMParams = Recipe.fp8_gemm_dgrad
    fp8_gemm_wgrad: MMParams = Recipe.fp8_gemm_wgrad

    stateful: ClassVar[bool] = True

    def __post_init__(self):
        self._check_common()
        number = isinstance(self.margin, int | float) and not isinstance(self.margin, bool)
        _check(self, "margin", number and abs(self.margin) < 64, "a number of binades between -64 and 64")
        length = self.amax_history_len
        _check(self, "amax_history_len", type(length) is int and 1 <= length <= 65536, "an int from 1 to 65536")
        algo = self.amax_compute_algo
        _check(
            self,
            "amax_compute_algo",
            algo in ("max", "most_recent") or callable(algo),
            "'max', 'most_recent' or a function",
        )
        factor = self.scaling_factor_compute_algo
        _check(self, "scaling_factor_compute_algo", factor is None or callable(factor), "None or a function")
        _check(self, "reduce_amax", self.reduce_amax is True, "True (a sharded tensor has one amax)")
        what = "of a recipe without a history; give a scaling_factor_compute_algo"
        _check(self, "use_power_2_scales", factor or not self.use_power_2_scales, f"False: True is {what}")
        _check(self, "amax_epsilon", factor or not self.amax_epsilon, f"0: others are {what}")


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Scales from the tensor itself: no state, one more pass to find its amax.

    Args:
      fp8_format: formats of the forward and the backward pass.
      use_power_2_scales: round scales down to powers of two.
      amax_epsilon: amaxes below it count as it.
      fp8_dpa: the forward pass of attention takes query, key and value in FP8; its backward is in their own dtype. What
        it has no kernels for, such as mask arrays, biases, dropout, score_mod, another softmax, several sequences in a
        row, or head sizes that are no multiples of 16 up to 128, is in high precision, and a warning says why.
      fp8_mha: the projections around attention in FP8 without casts between; not available, True raises.
      fp8_gemms: which products of modules run in FP8: "auto" leaves those in high precision that would be slower in
        FP8 on the GPU at hand, and on other devices none; "all"; or a function (m, k, n) -> bool of the product of
        x[m, k] and kernel[k, n]. The two products of an MLP are decided together, and so are query, key and value: in
        FP8 where it says so of each kernel. n counts all outputs of a kernel, of queries, keys and values in one
        3 * heads * head_dim, though `te.explain` has a row for each product. Functions are compared by identity, so a
        recipe that is made anew at each step is traced anew.
      fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: accumulation of the three GEMMs.

    Raises:
      ValueError: a field of another kind, or out of its range.
    """

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0
    fp8_dpa: bool = False
    fp8_mha: bool = False
    fp8_gemms: str | Callable = "auto"
    fp8_gemm_fprop: MMParams = Recipe.fp8_gemm_fprop
    fp8_gemm_dgrad: MMParams = Recipe.fp8_gemm_dgrad
    fp8_gemm_wgrad: MMParams = Recipe.fp8_gemm_wgrad

    stateful: ClassVar[bool] = False

    def __post_init__(self):
        self._check_common()
        _check(self, "use_power_2_scales", isinstance(self.use_power_2_scales, bool), "a bool")
        number = isinstance(self.amax_epsilon, int | float) and not isinstance(self.amax_epsilon, bool)
        largest = float(np.finfo(np.float32).max)
        _check(self, "amax_epsilon", number and 0 <= self.amax_epsilon <= largest, "a finite f32 >= 0")


# --- From amax to scale --------------------------------------------------------------------------------------------

# The scale stays a normal f32, and so does its reciprocal, which GEMMs multiply by.
_LARGEST_SCALE = 2.0**126


def scale_from_amax(amax: jax.Array, old_scale: jax.Array, fp8_max: float, two_to_margin: float = 1.0) -> jax.Array:
    """(fp8_max / amax) / 2**margin in f32, kept finite; the old scale where amax is 0 or not finite."""
    usable = (amax > 0) & jnp.isfinite(amax)
    scale = (jnp.float32(fp8_max) / jnp.where(usable, amax, 1.0)) / jnp.float32(two_to_margin)
    scale = jnp.clip(scale, 1 / _LARGEST_SCALE, _LARGEST_SCALE)
    return jnp.where(usable, scale, old_scale)


def _check_scalar(field: str, value) -> None:
    if shape := jnp.shape(value):
        raise ValueError(
            f"DelayedScaling.{field}: expected a function that returns one number, f32[], got one that returns the "
            f"shape {list(shape)}"
        )


def delayed_scale(recipe: DelayedScaling, history: jax.Array, old_scale: jax.Array, dtype) -> jax.Array:
    """The next scale f32[] from the amax history f32[H], this step's amax in slot 0."""
    fp8_max = float(jnp.finfo(dtype).max)
    algo = recipe.amax_compute_algo
    amax = algo(history) if callable(algo) else jnp.max(history) if algo == "max" else history[0]
    _check_scalar("amax_compute_algo", amax)
    if recipe.scaling_factor_compute_algo is None:
        return scale_from_amax(amax, old_scale, fp8_max, 2.0**recipe.margin)
    scale = recipe.scaling_factor_compute_algo(amax, old_scale, jnp.float32(fp8_max), recipe)
    _check_scalar("scaling_factor_compute_algo", scale)
    scale = jnp.asarray(scale, jnp.float32)
    usable = (amax > 0) & jnp.isfinite(amax) & (scale > 0) & jnp.isfinite(scale)
    return jnp.where(usable, jnp.clip(scale, 1 / _LARGEST_SCALE, _LARGEST_SCALE), old_scale)


def __getattr__(name: str):
    if name in ("Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "CustomRecipe"):
        raise AttributeError(f"recipe.{name}: not there yet; expected DelayedScaling or Float8CurrentScaling")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
