"""Flax NNX modules: `import transformer_engine_jax.nnx as te_nnx`.

The modules of transformer_engine_jax.flax with their fields, parameters and numerics, as native NNX modules: sizes are
given at construction, parameters are attributes, and every GEMM has its FP8 state in variables of type `Fp8State`. The
state's "gradient" is its next value, so a training step differentiates with respect to both and hands it back:

    model = te_nnx.TransformerLayer(hidden_size=128, mlp_hidden_size=512, num_attention_heads=4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x, target):
        def loss_fn(model):
            return jnp.mean((model(x) - target) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, te_nnx.TRAINED))(model)
        grads = te_nnx.update_state(model, grads)
        optimizer.update(model, grads)
        return loss

    with te.fp8_autocast(enabled=True):
        loss = train_step(model, optimizer, x, target)

A gradient with respect to nnx.Param alone, as nnx.grad takes it, leaves the state as it is. Stacked layers (nnx.vmap
and nnx.scan) have stacked states. A single module that a loop's body uses again and again is best closed over: passed
with in_axes=None its amaxes of one step add up, and its scales are as much smaller than they could be.
"""

from transformer_engine_jax.flax.softmax import SoftmaxFusionType
from transformer_engine_jax.modules.transformer import TransformerLayerType
from transformer_engine_jax.nnx.attention import MultiHeadAttention
from transformer_engine_jax.nnx.convert import from_linen, to_linen
from transformer_engine_jax.nnx.dense import DenseGeneral, LayerNormDenseGeneral
from transformer_engine_jax.nnx.dot_general import DotGeneral, Einsum
from transformer_engine_jax.nnx.dot_product_attention import DotProductAttention
from transformer_engine_jax.nnx.layernorm import LayerNorm, RMSNorm
from transformer_engine_jax.nnx.main_grads import main_grads, take_main_grads
from transformer_engine_jax.nnx.mlp import LayerNormMLP
from transformer_engine_jax.nnx.relative_positions import RelativePositionBiases
from transformer_engine_jax.nnx.softmax import Softmax
from transformer_engine_jax.nnx.state import TRAINED, Fp8State, MainGrad, init_fp8_state, update_state
from transformer_engine_jax.nnx.transformer import TransformerLayer
from transformer_engine_jax.sharding import extend_logical_axis_rules

__all__ = [
    "TRAINED",
    "DenseGeneral",
    "DotGeneral",
    "DotProductAttention",
    "Einsum",
    "Fp8State",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "MainGrad",
    "MultiHeadAttention",
    "RMSNorm",
    "RelativePositionBiases",
    "Softmax",
    "SoftmaxFusionType",
    "TransformerLayer",
    "TransformerLayerType",
    "extend_logical_axis_rules",
    "from_linen",
    "init_fp8_state",
    "main_grads",
    "take_main_grads",
    "to_linen",
    "update_state",
]
