"""Four layers, 200 steps: NNX, scanned and rematerialised or unrolled, reaches the loss of Linen in each recipe."""

import jax.numpy as jnp
import pytest
import trainings
import twins
from flax import nnx
from steps import CURRENT, DELAYED, autocast
from trainings import FIELDS, LAYERS, OPTIMIZER, STEPS, TARGET, K, X

import transformer_engine_jax.nnx as te_nnx


class Block(nnx.Module):
    def __init__(self, rngs):
        self.layer = te_nnx.TransformerLayer(**FIELDS, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class Scanned(nnx.Module):
    """Layers stacked on a leading axis, as nn.scan's, and rematerialised."""

    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))(rngs)
        self.out = te_nnx.DenseGeneral(K, K, rngs=rngs)

    def __call__(self, x):
        run = nnx.scan(nnx.remat(Block.__call__), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.out(run(self.layers, x))


class Unrolled(nnx.Module):
    def __init__(self, rngs):
        for i in range(LAYERS):
            setattr(self, f"layers_{i}", Block(rngs))
        self.out = te_nnx.DenseGeneral(K, K, rngs=rngs)

    def __call__(self, x):
        for i in range(LAYERS):
            x = getattr(self, f"layers_{i}")(x)
        return self.out(x)


@nnx.jit
def train_step(model, optimizer):
    def loss_fn(model):
        return jnp.mean((model(X) - TARGET) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn, argnums=twins.WITH_STATE)(model)
    optimizer.update(model, te_nnx.update_state(model, grads))
    return loss


def losses(make, variables) -> list[float]:
    model = twins.make(make)
    te_nnx.from_linen(model, variables)
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    step = nnx.cached_partial(train_step, model, optimizer)
    return [float(step()) for _ in range(STEPS)]


@pytest.mark.parametrize("rec", [None, DELAYED, CURRENT], ids=["off", "delayed", "current"])
def test_reaches_the_loss_of_linen(rec):
    expected = trainings.losses(rec, scanned=True, remat=False)
    models = {Scanned: trainings.scanned_variables(), Unrolled: trainings.unrolled_variables()}
    with autocast(rec):
        for make, variables in models.items():
            trainings.assert_same_training(losses(make, variables), expected)
