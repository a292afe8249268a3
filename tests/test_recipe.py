"""Recipes are static, hashable and strict, and turn amaxes into scales."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_engine_jax as te
import transformer_engine_jax.common.recipe
from transformer_engine_jax import recipe
from transformer_engine_jax.recipe import DelayedScaling, Float8CurrentScaling, Format, MMParams


def test_defaults():
    r = DelayedScaling()
    assert (r.margin, r.fp8_format, r.amax_history_len, r.amax_compute_algo) == (0, Format.HYBRID, 16, "max")
    assert r.forward_dtype == jnp.float8_e4m3fn and r.backward_dtype == jnp.float8_e5m2
    assert Format.E4M3.value.backward == jnp.float8_e4m3fn and Format.E5M2.value.forward == jnp.float8_e5m2


@dataclasses.dataclass(frozen=True)
class OfOnesOwn(recipe.Recipe):
    """What Recipe has by default."""

    stateful = False


@dataclasses.dataclass(frozen=True)
class DelayedPowersOf2(DelayedScaling):
    """What only recipes without a history read."""

    use_power_2_scales: bool = True


def test_a_field_that_delayed_scaling_does_not_read_raises():
    with pytest.raises(
        ValueError, match="DelayedPowersOf2.use_power_2_scales: expected False: .*scaling_factor_compute_algo"
    ):
        DelayedPowersOf2()


def test_a_function_of_the_scale_before_is_asked_once_a_step():
    """Of a state that comes back scaled, as a loss scale over all variables has it, as of one that does not."""
    doubling = DelayedScaling(
        scaling_factor_compute_algo=lambda amax, scale, largest, _: jnp.minimum(largest, 2 * scale)
    )
    x, kernel = jnp.linspace(-2.0, 3.0, 64).reshape(4, 16), jnp.linspace(-1.0, 1.0, 128).reshape(16, 8)

    @jax.jit
    def step(state):
        return jax.grad(lambda s: jnp.sum(te.dense(x, kernel, quantizers=te.gemm_quantizers(s, doubling))))(state)

    state = te.GemmState.create(doubling)
    for n in (2, 4, 8):
        state = step(state)
        assert state.x.scale / state.x.uses == n
        state = jax.tree.map(lambda p: p / 1024, state)


def test_a_recipe_of_ones_own():
    x, kernel = jnp.linspace(-2.0, 3.0, 64).reshape(4, 16), jnp.linspace(-1.0, 1.0, 128).reshape(16, 8)
    runs = [
        te.dense(x, kernel, quantizers=te.gemm_quantizers(recipe=each))
        for each in (OfOnesOwn(), Float8CurrentScaling())
    ]
    np.testing.assert_array_equal(*runs)


@pytest.mark.parametrize("make", [DelayedScaling, Float8CurrentScaling])
def test_equal_recipes_are_equal_keys_and_frozen(make):
    assert make() == make() and hash(make()) == hash(make()) and make() != make(fp8_format=Format.E4M3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().fp8_format = Format.E4M3


class Unhashable:
    """A function of sizes that are to run in FP8, which can be no part of a cache key."""

    __hash__ = None

    def __repr__(self):
        return "Unhashable()"

    def __call__(self, m, k, n):
        return True


WRONG = [
    (DelayedScaling, "margin", "1"),
    (DelayedScaling, "margin", 64),
    (DelayedScaling, "margin", True),
    (DelayedScaling, "fp8_format", "HYBRID"),
    (DelayedScaling, "amax_history_len", 0),
    (DelayedScaling, "amax_history_len", 2.5),
    (DelayedScaling, "amax_history_len", True),
    (DelayedScaling, "amax_history_len", 65537),
    (DelayedScaling, "amax_compute_algo", "mean"),
    (DelayedScaling, "scaling_factor_compute_algo", 3),
    (DelayedScaling, "fp8_gemms", Unhashable()),
    (Float8CurrentScaling, "fp8_gemms", Unhashable()),
    (DelayedScaling, "reduce_amax", False),
    (DelayedScaling, "fp8_dpa", 1),
    (DelayedScaling, "fp8_mha", True),
    (DelayedScaling, "fp8_gemm_fprop", True),
    (Float8CurrentScaling, "amax_epsilon", -1.0),
    (Float8CurrentScaling, "amax_epsilon", float("inf")),
    (Float8CurrentScaling, "amax_epsilon", 1e300),
    (Float8CurrentScaling, "amax_epsilon", True),
    (Float8CurrentScaling, "use_power_2_scales", 1),
    (Float8CurrentScaling, "fp8_gemm_wgrad", None),
    (MMParams, "use_split_accumulator", "yes"),
]


@pytest.mark.parametrize("make, field, value", WRONG, ids=[f"{m.__name__}.{f}={v}" for m, f, v in WRONG])
def test_a_wrong_value_names_field_and_value(make, field, value):
    with pytest.raises(ValueError, match=f"{make.__name__}.{field}: expected .*, got"):
        make(**{field: value})


@pytest.mark.parametrize("make", [DelayedScaling, Float8CurrentScaling])
def test_fp8_attention_is_off_by_default_and_needs_e4m3(make):
    assert not make().fp8_dpa and make(fp8_dpa=True, fp8_format=Format.E4M3).fp8_dpa
    with pytest.raises(
        ValueError, match=f"{make.__name__}.fp8_dpa: expected False with fp8_format=Format.E5M2.*HYBRID"
    ):
        make(fp8_dpa=True, fp8_format=Format.E5M2)


def test_fp8_mha_points_to_fp8_dpa():
    with pytest.raises(ValueError, match="fp8_mha: expected False .*fp8_dpa=True"):
        DelayedScaling(fp8_mha=True)
    with pytest.raises(ValueError, match="fp8_mha: expected False .*fp8_dpa=True"):
        Float8CurrentScaling(fp8_mha=True)


def test_numbers_of_numpys_count_as_pythons():
    made = DelayedScaling(amax_history_len=np.int64(8), margin=np.float32(1), fp8_dpa=np.bool_(True))
    assert made == DelayedScaling(amax_history_len=8, margin=1.0, fp8_dpa=True)
    assert [type(made.amax_history_len), type(made.margin), type(made.fp8_dpa)] == [int, float, bool]
    assert Float8CurrentScaling(amax_epsilon=np.float64(0.5)) == Float8CurrentScaling(amax_epsilon=0.5)


def test_an_unknown_field_raises():
    with pytest.raises(TypeError, match="amax_history"):
        DelayedScaling(amax_history=16)


def test_the_path_of_nvidias_package():
    assert transformer_engine_jax.common.recipe.DelayedScaling is recipe.DelayedScaling


@pytest.mark.parametrize("module", [recipe, transformer_engine_jax.common.recipe])
def test_recipes_that_are_not_there_yet_are_told(module):
    with pytest.raises(AttributeError, match="recipe.MXFP8BlockScaling: not there yet; expected DelayedScaling or"):
        module.MXFP8BlockScaling  # noqa: B018
    assert not hasattr(module, "anything")


def test_formats_reach_as_far_as_their_types():
    reach = {f.name: (f.value.max_fwd, f.value.max_bwd) for f in recipe.Format}
    assert reach == {"E4M3": (448, 448), "E5M2": (57344, 57344), "HYBRID": (448, 57344)}
