"""What the modules share: parameters with logical axes, FP8 state, and fields that NNX can hash."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

import flax.core
import flax.linen as nn
import jax
from flax import nnx

from transformer_engine_jax.autocast import current
from transformer_engine_jax.initializers import default_kernel_init, flat_kernel_init, initialiser
from transformer_engine_jax.modules.checks import (
    check_axes,
    check_common,
    check_dtypes,
    check_low_rank,
    is_rate,
    respell,
)
from transformer_engine_jax.nnx.state import Fp8State, recipe_of_state
from transformer_engine_jax.ops.low_rank import low_rank
from transformer_engine_jax.ops.main_grad import Accumulating
from transformer_engine_jax.quantized import AttentionState, GemmState, QuantizerStates
from transformer_engine_jax.quantizers import GemmQuantizers, gemm_quantizers
from transformer_engine_jax.sharding import constrain

SUFFIX = "_main_grad"  # of the attribute beside a kernel, see te_nnx.main_grads

T = TypeVar("T", bound=nnx.Module)


@dataclass_transform(eq_default=False)
def module(cls: type[T]) -> type[T]:
    """A module as a dataclass whose fields become attributes; compared and shown as NNX does. Calls bear its name, and
    fields are checked before __post_init__."""
    if "__call__" in vars(cls):
        cls.__call__ = _under_its_name(cls.__call__)
    if "__post_init__" in vars(cls) or not hasattr(cls, "__post_init__"):
        cls.__post_init__ = _with_checked_fields(getattr(cls, "__post_init__", lambda self: None))
    return dataclasses.dataclass(eq=False, repr=False)(cls)


def _with_checked_fields(post_init: Callable) -> Callable:
    @wraps(post_init)
    def run(self, *args, **kwargs):
        _check_and_freeze_fields(self)
        post_init(self, *args, **kwargs)

    return run


def _check_and_freeze_fields(module: nnx.Module) -> None:
    """Lists to tuples and dicts to FrozenDicts: static attributes are part of a cache key. See respell too."""
    respell(module)
    check_dtypes(module)
    check_common(module)
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        if isinstance(value, list):
            setattr(module, field.name, tuple(value))
        elif isinstance(value, dict):
            setattr(module, field.name, flax.core.freeze(value))


def _under_its_name(call: Callable) -> Callable:
    """A module's call, in a scope that `explain` and profilers show."""

    @wraps(call)
    def run(self, *args, **kwargs):
        with jax.named_scope(type(self).__name__):
            return call(self, *args, **kwargs)

    return run


class helper:
    """A method that is part of a call: nnx.tabulate compiles all functions of a module as functions of arrays."""

    def __init__(self, method: Callable):
        self.method = method

    def __get__(self, module: nnx.Module | None, cls: type):
        return self if module is None else partial(self.method, module)


class Fp8Module(nnx.Module):
    """A module with parameters and GEMMs: keeps the state of each, `<gemm>_state`, an Fp8State."""

    FP8_STATES: ClassVar[dict[str, type[QuantizerStates]]] = {}  # of a subclass: its states' names and kinds

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Parameters and states get their names at run time."""

    def hand_on(self, *names: str) -> None:
        """Fields that are modules, or have them, become a submodule's alone, as Flax's tree mode wants of variables."""
        for name in names:
            if nnx.has_data(getattr(self, name)):
                setattr(self, name, nnx.data(None))

    def make_param(
        self, name: str, init: Callable, axes: Sequence[str | None], shape: Sequence[int], dtype, rngs: nnx.Rngs
    ) -> None:
        """A parameter that carries its logical axes as `out_sharding`, and has them on a mesh."""
        check_axes(self, name, axes, shape)
        # Logical names: NNX would take them for the mesh's own at once.
        metadata = {"out_sharding": tuple(axes), "eager_sharding": False} if axes else {}
        what = f"{type(self).__name__}.{name}"
        init = initialiser(init, what, boxes=not axes)
        if not callable(getattr(rngs, "params", None)):
            got = f"the streams {', '.join(rngs) or 'none'}" if isinstance(rngs, nnx.Rngs) else repr(rngs)
            raise ValueError(
                f"{what}: rngs: expected nnx.Rngs(seed), or one with a stream 'params' or a default one, got {got}"
            )
        value = init(rngs.params(), tuple(shape), dtype)
        setattr(self, name, nnx.Param(constrain(value, tuple(axes)), **metadata))

    @helper
    def kernel_of_product(self, name: str) -> jax.Array | Accumulating:
        """A kernel as `dense` takes it: with the buffer of its gradient, where there is one."""
        kernel, main_grad = array(getattr(self, name)), array(getattr(self, f"{name}{SUFFIX}", None))
        return kernel if main_grad is None else Accumulating(kernel, main_grad)

    def make_norm_params(self, features: int, scale_init, bias_init, bias_axes, dtype, rngs) -> None:
        """`scale` and, for "layernorm", `ln_bias`, else None."""
        scale_init = scale_init or (nn.initializers.zeros if self.zero_centered_gamma else nn.initializers.ones)
        self.make_param("scale", scale_init, self.scale_axes, (features,), dtype, rngs)
        if self.layernorm_type == "rmsnorm":
            self.ln_bias = nnx.data(None)
        else:
            self.make_param("ln_bias", bias_init, bias_axes, (features,), dtype, rngs)

    def make_low_rank(self, inputs: Sequence[int], features: Sequence[int], dtype, rngs, prefix: str = "") -> None:
        """`lora_a_kernel` [inputs.., stacked.., dim] and `lora_b_kernel` [stacked.., dim, n], which starts at zero."""
        *stacked, n = features
        check_low_rank(self)
        dim, k_axes = self.low_rank_adaptation_dim, len(inputs)
        init = flat_kernel_init(default_kernel_init, k_axes)
        axes_a, axes_b = (None,) * (k_axes + len(stacked)) + ("lora",), (None,) * len(stacked) + ("lora", None)
        self.make_param(f"{prefix}lora_a_kernel", init, axes_a, (*inputs, *stacked, dim), dtype, rngs)
        self.make_param(f"{prefix}lora_b_kernel", nn.initializers.zeros, axes_b, (*stacked, dim, n), dtype, rngs)

    @helper
    def low_rank(self, x: jax.Array, k_axes: int, prefix: str = "") -> jax.Array:
        a, b = (array(getattr(self, f"{prefix}lora_{which}_kernel")) for which in "ab")
        return low_rank(x, a, b, k_axes=k_axes, alpha=self.low_rank_adaptation_alpha)

    def make_fp8_state(self, gemm: str) -> None:
        """The state of one GEMM: always there, so that autocast may be switched on later."""
        setattr(self, f"{gemm}_state", Fp8State.create(GemmState, recipe_of_state()))

    def make_attention_state(self) -> None:
        """The state of attention, where the recipe in force has fp8_dpa; else none, and the model can't have it."""
        wanted = current().recipe is not None and current().recipe.fp8_dpa
        self.attention_state = Fp8State.create(AttentionState, recipe_of_state()) if wanted else nnx.data(None)

    def stacked_axes(self) -> tuple[int, ...] | None:
        """The leading axes of stacked layers, as its kernel has them; None without one."""
        return None

    @helper
    def state_in_use(self, name: str, needed: bool) -> QuantizerStates | None:
        """The state `name`, or None; ValueError where the recipe in force needs it and it does not fit."""
        variable: Fp8State | None = getattr(self, name, None)  # not there after nnx.pop
        state = None if variable is None else variable.states
        if needed:
            expected = [current().recipe.amax_history_len]
            got = None if state is None else [*state.layout[0], state.layout[2]]
            if got != expected:
                raise ValueError(
                    f"{type(self).__name__}: expected an FP8 state {name} with amax_history f32{expected}, the "
                    f"recipe's amax_history_len, got {got or 'none'}; make the model under the autocast it is used "
                    "with, or call te_nnx.init_fp8_state(model, recipe)"
                )
        return state

    @helper
    def gemm_quantizers(
        self, gemm: str, fp8: bool, checkpoint_name: str | None = None
    ) -> tuple[GemmQuantizers | None, Any]:
        """This step's Quantizers of one GEMM, None where it is not to run in FP8, and the states that go unused.

        What is quantized bears the checkpoint_name, for checkpoint policies.
        """
        recipe = current().recipe
        in_fp8 = recipe is not None and fp8
        state = self.state_in_use(f"{gemm}_state", in_fp8 and recipe.stateful)
        if not in_fp8:
            return None, [state]
        return gemm_quantizers(state, checkpoint_name=checkpoint_name), [] if recipe.stateful else [state]


def array(parameter: nnx.Variable | None) -> jax.Array | None:
    """The value of a parameter that may be absent."""
    return None if parameter is None else parameter.get_value()


def make_dropout(rate: float, dims: Sequence[int], name: str, rngs: nnx.Rngs | None) -> nnx.Dropout | None:
    """Dropout with a random stream of its own, the stream `name` of rngs; None where the rate is 0."""
    if not is_rate(rate):
        raise ValueError(f"dropout: expected a rate in [0, 1), got {rate!r}")
    if not rate:
        return nnx.data(None)
    if rngs is None:
        raise ValueError(f"dropout: rngs: expected nnx.Rngs({name}=seed) where the dropout rate is {rate}, got None")
    try:
        return nnx.Dropout(rate, broadcast_dims=tuple(dims), rng_collection=name, rngs=rngs)
    except KeyError:
        raise ValueError(
            f"dropout: rngs: expected a stream {name!r} or a default one, as of nnx.Rngs(seed), where the dropout rate "
            f"is {rate}, got {', '.join(rngs) or 'none'}"
        ) from None


def dropping(dropout: nnx.Dropout | None, deterministic: bool | None) -> bool:
    """Whether a call drops anything; `deterministic` None is what model.train() and model.eval() said."""
    return dropout is not None and not (dropout.deterministic if deterministic is None else deterministic)
