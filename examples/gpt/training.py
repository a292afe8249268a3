"""The training state and the training step: FP8 state in, FP8 state out, and everything sharded over a mesh.

`_overwrite_with_gradient` is the collection that holds the FP8 scales. Its "gradient" is its next value: parameters
go through the optimizer, this collection is replaced.
"""

from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from transformer_engine_jax import recipe

from .model import GPT, LOGICAL_AXIS_RULES

FP8_RECIPES = {"delayed": recipe.DelayedScaling(), "current": recipe.Float8CurrentScaling()}
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0


@flax.struct.dataclass
class TrainState:
    variables: dict  # params, and with FP8 _overwrite_with_gradient
    optimizer: optax.OptState


def make_mesh(data: int, model: int) -> Mesh:
    """The first data * model devices, as a mesh whose axes XLA's partitioner shards over."""
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def adamw(lr: float, warmup: int, steps: int) -> optax.GradientTransformation:
    """AdamW: linear warm-up, cosine to nothing, clipped gradients; vectors aren't decayed."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, warmup, max(steps, warmup + 1), end_value=0.0)
    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.adamw(
            schedule, b2=0.95, weight_decay=WEIGHT_DECAY, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
        ),
    )


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean nats per byte, f32[], of logits f32[B, S, V] for targets i32[B, S]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@dataclass(frozen=True)
class Training:
    """One model in one precision on one mesh: how its state is made, stepped and evaluated."""

    model: GPT
    optimizer: optax.GradientTransformation
    mesh: Mesh
    batch_shape: tuple[int, int]  # (B, S + 1): a window holds each byte's successor too
    fp8_recipe: recipe.Recipe | None  # None: no FP8
    seed: int

    @contextmanager
    def context(self):
        """What tracing depends on: recipe, mesh axes, and the rules from logical axes to them."""
        resource = te.MeshResource(dp_resource="data", tp_resource="model")
        with (
            jax.set_mesh(self.mesh),
            te.fp8_autocast(enabled=self.fp8_recipe is not None, fp8_recipe=self.fp8_recipe, mesh_resource=resource),
            nn.logical_axis_rules(te_flax.extend_logical_axis_rules(LOGICAL_AXIS_RULES)),
        ):
            yield

    def create(self, key: jax.Array) -> TrainState:
        """A fresh state; parameters are boxed with the names of their logical axes."""
        variables = self.model.init(key, jnp.zeros((self.batch_shape[0], self.batch_shape[1] - 1), jnp.int32))
        return TrainState(variables, self.optimizer.init(variables["params"]))

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shape, dtype and sharding of each array of the state; optimizer moments are sharded like their parameter."""
        with self.context():
            boxed = jax.eval_shape(self.create, jax.random.key(self.seed))
            rules = nn.get_logical_axis_rules()
            unboxed = jax.eval_shape(nn.unbox, boxed)
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), self.mesh, rules)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), unboxed, shardings)

    @property
    def _state_sharding(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @property
    def _batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec("data"))

    def init(self) -> TrainState:
        with self.context():
            create = jax.jit(lambda key: nn.unbox(self.create(key)), out_shardings=self._state_sharding)
            return create(jax.random.key(self.seed))

    def loss(self, variables: dict, windows: jax.Array) -> jax.Array:
        tokens = windows.astype(jnp.int32)
        return cross_entropy(self.model.apply(variables, tokens[:, :-1]), tokens[:, 1:])

    def step(self, state: TrainState, windows: jax.Array) -> tuple[TrainState, jax.Array]:
        """(next state, loss) of windows u8[B, S + 1]."""
        loss, grads = jax.value_and_grad(self.loss)(state.variables, windows)
        params = state.variables["params"]
        updates, optimizer = self.optimizer.update(grads["params"], state.optimizer, params)
        variables = {**grads, "params": optax.apply_updates(params, updates)}
        return TrainState(variables, optimizer), loss

    @cached_property
    def compiled_step(self):
        """`step`, compiled for the mesh. It takes the state's memory over: the old state is gone after the call."""
        sharding = (self._state_sharding, NamedSharding(self.mesh, PartitionSpec()))
        windows = jax.ShapeDtypeStruct(self.batch_shape, jnp.uint8, sharding=self._batch_sharding)
        with self.context():
            step = jax.jit(self.step, donate_argnums=0, out_shardings=sharding)
            return step.lower(self.abstract_state, windows).compile()

    @cached_property
    def compiled_loss(self):
        windows = jax.ShapeDtypeStruct(self.batch_shape, jnp.uint8, sharding=self._batch_sharding)
        with self.context():
            return jax.jit(self.loss).lower(self.abstract_state.variables, windows).compile()

    def put(self, windows: np.ndarray) -> jax.Array:
        return jax.device_put(windows, self._batch_sharding)

    def evaluate(self, state: TrainState, batches: Iterable[np.ndarray]) -> float:
        """Mean loss over the batches."""
        return float(np.mean([self.compiled_loss(state.variables, self.put(windows)) for windows in batches]))
