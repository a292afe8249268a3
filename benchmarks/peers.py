"""Who is measured: plain Flax in bf16 with cuDNN attention, the same with XLA's FP8, our layer, and NVIDIA's."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
from benchmarks.shapes import Shape
from transformer_engine_jax import recipe
from transformer_engine_jax.decisions import platform
from transformer_engine_jax.ops.rope import rope, rope_frequencies


def segment_ids(shape: Shape) -> jax.Array:
    """The shape's, as a program gets them from its data: nothing is computed of them when it is compiled."""
    return jax.lax.optimization_barrier(jnp.asarray(shape.segment_ids))


def same_document(shape: Shape) -> jax.Array | None:
    """bool[B, 1, S, S], for attention that is told packed documents by a mask; None where a row is one document."""
    if shape.documents == 1:
        return None
    ids = segment_ids(shape)
    return (ids[:, :, None] == ids[:, None, :])[:, None]


class FlaxLayer(nn.Module):
    """A pre-norm Transformer layer as one writes it in Flax: f32 parameters, bf16 computation, logical axes."""

    shape: Shape
    dot_general_cls: Any = None
    enable_sequence_parallel: bool = False

    # Of its kernels. In metadata of its own DenseGeneral can't have them on a mesh: it draws kernels of two axes.
    AXES: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "qkv": ("embed", None, "heads", None),
        "q": ("embed", "heads", None),
        "kv": ("embed", None, "heads", None),
        "out": ("heads", None, "embed"),
        "gate": ("embed", "mlp"),
        "up": ("embed", "mlp"),
        "down": ("mlp", "embed"),
    }

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        s = self.shape
        between = ("batch", "seqlen_tp" if self.enable_sequence_parallel else "seqlen", None)
        constrained = nn.with_logical_constraint

        def norm(x):
            kind = nn.RMSNorm if s.rmsnorm else nn.LayerNorm
            return constrained(
                kind(epsilon=1e-6, dtype=jnp.bfloat16, param_dtype=s.param_dtype)(x), ("batch", "seqlen", None)
            )

        def product(name, x, features, axis=-1):
            extra = {} if self.dot_general_cls is None else {"dot_general_cls": self.dot_general_cls}
            dtypes = {"dtype": jnp.bfloat16, "param_dtype": s.param_dtype}
            return nn.DenseGeneral(features, axis=axis, use_bias=s.biases, name=name, **dtypes, **extra)(x)

        x = constrained(x, between)
        y = norm(x)
        if s.groups == s.heads:
            qkv = product("qkv", y, (3, s.heads, s.head))
            q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        else:
            q = product("q", y, (s.heads, s.head))
            kv = product("kv", y, (2, s.groups, s.head))
            k, v = kv[:, :, 0], kv[:, :, 1]
        if s.rope:
            frequencies = rope_frequencies(s.head)
            q, k = rope(q, frequencies, group="alternate"), rope(k, frequencies, group="alternate")
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, mask=same_document(s))
        drop = nn.Dropout(s.dropout, deterministic=False)
        bias = self._relative_positions(x.shape[1]) if s.relative else None
        y = attend(q, k, v, bias, implementation="cudnn" if platform() == "gpu" else None)
        x = x + drop(constrained(product("out", y, s.hidden, axis=(-2, -1)), between))
        y = norm(x)
        if s.gated:
            y = jax.nn.silu(product("gate", y, s.mlp)) * product("up", y, s.mlp)
        else:
            y = jax.nn.gelu(product("up", y, s.mlp))
        return x + drop(constrained(product("down", y, s.hidden), between))

    def _relative_positions(self, length: int) -> jax.Array:
        """[1, heads, length, length] biases by T5's buckets of distances (Raffel et al., 2020)."""
        s = self.shape
        distance = np.maximum(np.arange(length)[:, None] - np.arange(length)[None, :], 0)
        far = 16 + (16 * np.log(np.maximum(distance, 1) / 16) / np.log(128 / 16)).astype(np.int32)
        buckets = np.where(distance < 16, distance, np.minimum(far, 31))
        table = self.param("relative", nn.initializers.normal(), (s.heads, 32), s.param_dtype).astype(jnp.bfloat16)
        return jnp.einsum("hn,nqk->hqk", table, jax.nn.one_hot(buckets, 32, axis=0, dtype=jnp.bfloat16))[None]

    @classmethod
    def boxed(cls, variables):
        """variables, with the logical axes of parameters."""

        def of(path, x):
            names = cls.AXES.get(path[-2].key, ()) if path[0].key == "params" else ()
            return nn.LogicallyPartitioned(x, names[len(names) - x.ndim :]) if names else x

        return jax.tree_util.tree_map_with_path(of, variables)


def _options(shape: Shape) -> dict[str, Any]:
    """The shape as fields of TransformerLayer, NVIDIA's and ours alike."""
    return dict(
        hidden_size=shape.hidden,
        mlp_hidden_size=shape.mlp,
        num_attention_heads=shape.heads,
        num_gqa_groups=shape.groups,
        layernorm_type="rmsnorm" if shape.rmsnorm else "layernorm",
        hidden_dropout=shape.dropout,
        attention_dropout=0.0,
        intermediate_dropout=0.0,
        mlp_activations=("silu", "linear") if shape.gated else ("gelu",),
        use_bias=shape.biases,
        self_attn_mask_type="causal",
        enable_relative_embedding=shape.relative,
        enable_rotary_pos_emb=shape.rope,
        rotary_pos_emb_group_method="alternate",
        scale_attn_logits=True,
        transpose_batch_sequence=False,
        dtype=jnp.dtype(shape.param_dtype),
    )


class PackedLayer(nn.Module):
    """Our layer of rows that hold several documents each."""

    shape: Shape
    options: Mapping[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        ids, most = segment_ids(self.shape), self.shape.documents
        sequences = te.SequenceDescriptor.from_segment_ids_and_pos(ids, max_segments=most)
        fields = {**_options(self.shape), "self_attn_mask_type": "padding_causal", **self.options}
        return te_flax.TransformerLayer(**fields)(x, sequence_descriptor=sequences)


def our_layer(shape: Shape, **options) -> nn.Module:
    if shape.documents > 1:
        return PackedLayer(shape, options)
    return te_flax.TransformerLayer(**_options(shape), **options)


def nvidias_package() -> ModuleType:
    """NVIDIA's transformer_engine. Its compiled module takes our package's name among those imported: given back."""
    ours = sys.modules[te.__name__]
    try:
        import transformer_engine.jax
    finally:
        sys.modules[te.__name__] = ours
    return transformer_engine


def _nvidia(recipe_name: str | None) -> Callable[[Shape], Contender]:
    def make(shape: Shape) -> Contender:
        if shape.documents > 1:
            raise ImportError("NVIDIA's TransformerLayer takes no packed rows")
        nvidia = nvidias_package()
        fp8 = None if recipe_name is None else getattr(nvidia.common.recipe, recipe_name)()
        return Contender(
            nvidia.jax.flax.TransformerLayer(**_options(shape)),
            lambda: nvidia.jax.autocast(fp8 is not None, fp8, nvidia.jax.MeshResource()),
        )

    return make


class Contender(NamedTuple):
    layer: nn.Module
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext  # what it is traced under


def _ours(fp8: recipe.Recipe | None, **options) -> Callable[[Shape], Contender]:
    return lambda shape: Contender(our_layer(shape), lambda: te.autocast(fp8 is not None, fp8, **options))


FAST, SPLIT = recipe.MMParams(use_split_accumulator=False), recipe.MMParams(use_split_accumulator=True)

# What makes a contender raises ImportError where its package is not installed.
CONTENDERS: dict[str, Callable[[Shape], Contender]] = {
    "flax": lambda shape: Contender(FlaxLayer(shape)),
    "flax-fp8": lambda shape: Contender(FlaxLayer(shape, functools.partial(nn.Fp8DirectDotGeneralOp))),
    "te-bf16": _ours(None),
    "te-bf16-rounded": _ours(None, round_wgrad=True),
    "te-delayed": _ours(recipe.DelayedScaling()),
    "te-delayed-fast": _ours(recipe.DelayedScaling(fp8_gemm_wgrad=FAST)),
    "te-delayed-split": _ours(recipe.DelayedScaling(fp8_gemm_dgrad=SPLIT)),
    "te-delayed-rounded": _ours(recipe.DelayedScaling(), round_wgrad=True),
    "te-delayed-dpa": _ours(recipe.DelayedScaling(fp8_dpa=True)),
    "te-current": _ours(recipe.Float8CurrentScaling()),
    "nvidia-bf16": _nvidia(None),
    "nvidia-delayed": _nvidia("DelayedScaling"),
    "nvidia-current": _nvidia("Float8CurrentScaling"),
}
IN_BF16 = ("flax", "te-bf16", "te-bf16-rounded", "nvidia-bf16")
