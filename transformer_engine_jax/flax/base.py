"""What the modules share: FP8 state in a variable collection, and parameters with logical axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.autocast import current
from transformer_engine_jax.initializers import default_kernel_init, flat_kernel_init, initialiser
from transformer_engine_jax.modules.checks import (
    check_axes,
    check_common,
    check_dtypes,
    check_low_rank,
    is_ours,
    respell,
)
from transformer_engine_jax.ops.low_rank import low_rank
from transformer_engine_jax.ops.main_grad import Accumulating
from transformer_engine_jax.quantized import AttentionState, GemmState, QuantizerStates
from transformer_engine_jax.quantizers import (
    AttentionQuantizers,
    GemmQuantizers,
    attention_quantizers,
    gemm_quantizers,
    needs_attention_state,
)
from transformer_engine_jax.recipe import Recipe
from transformer_engine_jax.sharding import constrain

# The name that Flax's TrainState and others already treat as "replace this with its gradient".
STATE_COLLECTION = "_overwrite_with_gradient"

# Buffers of kernels' gradients, see te_flax.main_grads.
MAIN_GRADS_COLLECTION = "main_grads"

# Whether te_flax.main_grads asks which kernels have buffers. Mutability does not tell: in a transform that names the
# collection a module sees it named whatever the call, and a call that makes a buffer takes the kernel's gradient.
MAKES_MAIN_GRADS: ContextVar[bool] = ContextVar("makes_main_grads", default=False)


class Asked:
    """A call whose shapes alone are asked for, and what it tells; it may make a KV cache, which apply does not."""

    def __init__(self):
        self.recipes: dict[tuple[str, ...], Recipe] = {}  # of each state, by its path


class Marked(NamedTuple):
    """A state of such a call, and an array of sizes that no axis of layers has: it tells where these are stacked."""

    state: QuantizerStates
    marker: jax.Array

    SIZES = (10007, 10009)  # of the tensors and of their histories

    def axes(self) -> tuple[int, int]:
        """Those of the packed state that are the tensors and their histories, from the last: -2 and -1 are usual."""
        return tuple(self.marker.shape.index(size) - len(self.marker.shape) for size in self.SIZES)


# Part of the key by which jitted functions are cached: what is inside of nn.jit is traced for each call anew.
SHAPES_ALONE = jax.make_user_context(None)


def _written(states: QuantizerStates) -> dict[str, Any]:
    """As Flax serializes them: by name, or packed where a scan stacks layers along another axis than the first."""
    leading = states.packed is None or np.shape(states.packed)[-2] == len(states.TENSORS)
    return {name: state._asdict() for name, state in states.states().items()} if leading else {"packed": states.packed}


def _read(states: QuantizerStates, values: Any) -> Any:
    return restored_as(type(states), values) if values else states


def restored_as(kind: type[QuantizerStates], values: Any) -> Any:
    """`kind.of`, which knows leading axes of layers alone, and a packed state with any."""
    alone = isinstance(values, Mapping) and set(values) == {"packed"} and values["packed"] is not None
    return kind(jnp.asarray(values["packed"])) if alone else kind.of(values)


for _type in (AttentionState, GemmState):
    flax.serialization.register_serialization_state(_type, _written, _read, override=True)


class Fp8Module(nn.Module):
    """A module with GEMMs, or attention: keeps a GemmState for each, `<gemm>_state`, and an AttentionState."""

    def __post_init__(self):
        respell(self)
        check_dtypes(self)
        super().__post_init__()

    @nn.nowrap
    def gemm_quantizers(
        self, gemm: str, fp8: bool, checkpoint_name: str | None = None
    ) -> tuple[GemmQuantizers | None, Any]:
        """This step's Quantizers of one GEMM, None where it is not to run in FP8, and the states that go unused.

        What is quantized bears the checkpoint_name, for checkpoint policies.
        """
        recipe = current().recipe
        state, unused = self._state_in_use(f"{gemm}_state", GemmState, recipe is not None and recipe.stateful)
        if recipe is None or not fp8:
            return None, unused if state is None else [state]
        return gemm_quantizers(state, checkpoint_name=checkpoint_name), unused

    @nn.nowrap
    def attention_quantizers(self) -> tuple[AttentionQuantizers | None, Any]:
        """This step's quantizers of attention, None where no recipe with fp8_dpa is on, and the states that go unused.

        The state is `attention_state`.
        """
        state, unused = self._state_in_use("attention_state", AttentionState, needs_attention_state())
        return attention_quantizers(state), unused

    @nn.nowrap
    def _state_in_use(self, name: str, kind: type[QuantizerStates], needed: bool) -> tuple[Any, list[Any]]:
        """(the state `name`, None where it is not needed; in a list, where it is there all the same)."""
        if needed:
            return self.fp8_state(name, kind), []
        there = self.has_variable(STATE_COLLECTION, name)
        return None, [self._state_of(kind, self.get_variable(STATE_COLLECTION, name))] if there else []

    @nn.nowrap
    def fp8_state(self, name: str, kind: type[QuantizerStates]) -> QuantizerStates:
        """The state `name`, made where it is missing and may be; ValueError where it may not."""
        if not self.has_variable(STATE_COLLECTION, name) and not self.is_mutable_collection(STATE_COLLECTION):
            remedy = (
                "variables = te_flax.init_state(model, variables, *args) makes it, and so does init under the same "
                f"fp8_autocast; pass all collections to apply: model.apply({{'params': params, {STATE_COLLECTION!r}: "
                "state}, ...)"
            )
            if self.is_initializing():
                remedy = (
                    "A transform around it, such as nn.scan or nn.vmap, does not let it be made: name its collection "
                    f"there, variable_axes={{'params': 0, {STATE_COLLECTION!r}: 0}}, or where all steps "
                    f"share the parameters, as in nn.RNN, variable_broadcast=['params', {STATE_COLLECTION!r}]"
                )
            where = " ".join([type(self).__name__, "/".join(self.path)]).rstrip()
            raise ValueError(f"{where}: FP8 state {name!r} is not among the variables. {remedy}")
        recipe, asked = current().recipe, SHAPES_ALONE.value
        create = kind.create
        if asked is not None:
            asked.recipes[(*self.scope.path, name)] = recipe
            create = lambda recipe: Marked(kind.create(recipe), jnp.zeros(Marked.SIZES))
        return self._state_of(kind, self.variable(STATE_COLLECTION, name, create, recipe).value)

    @nn.nowrap
    def _state_of(self, kind: type[QuantizerStates], value: Any) -> QuantizerStates:
        return kind.of(value.state if isinstance(value, Marked) else value)

    @nn.nowrap
    def check_absent(self, field: str, *names: str) -> None:
        """ValueError where there are parameters that the module would have with another value of the field.

        Not in a user's class of it, nor in a scope that it shares (nn.share_scope): they may be other ones there.
        """
        given = [name for name in names if jax.tree.leaves(self.get_variable("params", name))]
        own = getattr(self.parent, "scope", None) is not self.scope
        if given and own and is_ours(type(self)):
            where = " ".join([type(self).__name__, "/".join(self.path)]).rstrip()
            raise ValueError(
                f"{where}: expected no parameters {given} with {field}={getattr(self, field)!r}, which does not use "
                "them; set the field, or leave them out"
            )

    @nn.nowrap
    def make_param(self, name: str, init: Callable, axes: Sequence[str | None], shape: Sequence[int], dtype):
        """A parameter that carries its logical axes, where there are any."""
        check_common(self)
        return self.param(name, with_axes(self, name, init, axes, shape), tuple(shape), dtype)

    @nn.nowrap
    def make_bias(self, name: str, axes: Sequence[str | None], shape: Sequence[int], dtype):
        """A parameter, or None without use_bias."""
        if self.use_bias:
            return self.make_param(name, self.bias_init, axes, shape, dtype)
        return self.check_absent("use_bias", name)

    @nn.nowrap
    def make_kernel(self, name: str, init: Callable, axes: Sequence[str | None], shape: Sequence[int], dtype):
        """A parameter as `dense` takes it: with the buffer of its gradient, where there is one."""
        kernel = self.make_param(name, init, axes, shape, dtype)
        made = MAKES_MAIN_GRADS.get() and self.is_mutable_collection(MAIN_GRADS_COLLECTION)
        if not made and not self.has_variable(MAIN_GRADS_COLLECTION, name):
            return kernel
        self.variable(MAIN_GRADS_COLLECTION, name, jnp.zeros, tuple(shape), jnp.float32)
        # As it is in its box, whose constraint would be another array in each call: it is told by its identity.
        (main_grad,) = jax.tree.leaves(self.get_variable(MAIN_GRADS_COLLECTION, name))
        return Accumulating(kernel, main_grad)

    @nn.nowrap
    def make_norm_params(self, features: int, bias_init: Callable, bias_axes: Sequence[str | None], dtype):
        """(scale, ln_bias) of a norm over `features`; ln_bias is None for "rmsnorm"."""
        scale_init = self.scale_init or (nn.initializers.zeros if self.zero_centered_gamma else nn.initializers.ones)
        scale = self.make_param("scale", scale_init, self.scale_axes, (features,), dtype)
        if self.layernorm_type == "rmsnorm":
            return scale, self.check_absent("layernorm_type", "ln_bias")
        return scale, self.make_param("ln_bias", bias_init, bias_axes, (features,), dtype)

    @nn.nowrap
    def make_norm(self, features: int, dtype):
        """make_norm_params of a module with a norm in it; (None, None) without enable_layernorm."""
        if not self.enable_layernorm:
            return None, self.check_absent("enable_layernorm", "scale", "ln_bias")
        return self.make_norm_params(features, self.ln_bias_init, self.ln_bias_axes, dtype)

    @nn.nowrap
    def low_rank(self, x: jax.Array, k_axes: int, features: Sequence[int], dtype, prefix: str = ""):
        """x A B * (alpha / dim) -> [.., features..], the LoRA branch beside a kernel (Hu et al., 2021)."""
        check_low_rank(self)
        *stacked, n = features
        dim, inputs = self.low_rank_adaptation_dim, x.shape[x.ndim - k_axes :]
        init = flat_kernel_init(default_kernel_init, k_axes)
        axes_a, axes_b = (None,) * (k_axes + len(stacked)) + ("lora",), (None,) * len(stacked) + ("lora", None)
        a = self.make_param(f"{prefix}lora_a_kernel", init, axes_a, (*inputs, *stacked, dim), dtype)
        b = self.make_param(f"{prefix}lora_b_kernel", nn.initializers.zeros, axes_b, (*stacked, dim, n), dtype)
        return low_rank(x, a, b, k_axes=k_axes, alpha=self.low_rank_adaptation_alpha)

    @nn.nowrap
    def check_no_low_rank(self, *prefixes: str) -> None:
        """check_absent for the parameters of `low_rank`."""
        names = [f"{prefix}lora_{which}_kernel" for prefix in prefixes or ("",) for which in "ab"]
        self.check_absent("enable_low_rank_adaptation", *names)


class LogicalAxes(nn.LogicallyPartitioned):
    """Flax's box of a parameter with its logical axes, which knows explicit mesh axes and the MeshResource as well.

    On explicit axes Flax asserts that a parameter is sharded as its axes say, which one that was just made is not; and
    where rules are set that do not name its axes, Flax gathers it. An axis of layers that its transform does not name,
    as nn.remat_scan can not, is not sharded; Flax's box raises there.
    """

    def add_axis(self, index: int, params: Mapping[Any, Any]):
        return super().add_axis(index, {nn.PARTITION_NAME: None, **params})

    def remove_axis(self, index: int, params: Mapping[Any, Any]):
        return super().remove_axis(index, {nn.PARTITION_NAME: None, **params})

    def unbox(self, apply_constraint: bool = True):
        mesh = jax.sharding.get_abstract_mesh()
        ours = mesh.explicit_axes or (not mesh.empty and nn.get_logical_axis_rules())
        if ours and isinstance(self.value, jax.ShapeDtypeStruct):
            return self.value
        return constrain(self.value, self.names) if apply_constraint and ours else super().unbox(apply_constraint)

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Of the Variable that Flax's bridge makes: as NNX modules have it, which needs no mesh."""
        shardings = {"out_sharding": self.names, "sharding_rules": self.rules, "mesh": self.mesh}
        return {"value": self.value, **shardings, "eager_sharding": False}


def with_axes(
    module: nn.Module, name: str, init: Callable, axes: Sequence[str | None], shape: Sequence[int]
) -> Callable:
    """init with the logical axes of a parameter, where there are any."""
    check_axes(module, name, axes, shape)
    init = initialiser(init, f"{type(module).__name__}.{name}", boxes=not axes)
    return (lambda *args: LogicalAxes(init(*args), tuple(axes))) if axes else init
