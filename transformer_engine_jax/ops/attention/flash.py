"""Flash attention by handlers of our own, on cuDNN: the kernels, in 16 bits and in FP8, and their references.

JAX's own cuDNN call leaves memsets in CUDA graphs, and knows no seed but a static one, no scales that its caller keeps,
and no backward pass of another precision than the forward's. References compute in the blocks of attention_reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_engine_jax.decisions import compute_capabilities, deterministic, shards
from transformer_engine_jax.handlers import HANDLERS
from transformer_engine_jax.kernel import kernel
from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.ops.attention.reference import (
    by_blocks,
    dropped,
    powers,
    rows_and_shared,
    scores_of,
    weighted,
)
from transformer_engine_jax.ops.attention.sequences import Places
from transformer_engine_jax.ops.quantize import E4M3, scaled_cast

MOST_HEAD_SIZE = 128
# cuDNN's backward pass counts in 32 bits (9.19): gradients of more are wrong. Our handlers take examples in parts.
MOST_ENTRIES = 2**31 - 1


def missing() -> str:
    """Why the handlers are not here; "" where they are."""
    if "CUDA" not in HANDLERS:
        return "the extension was built without its CUDA module"
    if "te_attention_fwd" not in HANDLERS["CUDA"]:
        return (
            "the extension was built without cuDNN's headers: `pip install --no-deps nvidia-cudnn-cu13 "
            "nvidia-cudnn-frontend nvidia-cuda-nvrtc` into the Python that builds, and build again (by pip with "
            "--no-build-isolation)"
        )
    return ""


def sees_past_keys(causal: bool, k_len: int) -> bool:
    """Whether cuDNN's backward pass (9.19, on Hopper) must be told where the keys end, by lengths.

    It takes 128 at a time, and where 64 of them are past the end does not hide those; with causality it does, also from
    queries that are further on. They are zeros, and so are their scores: they weigh exp(-stats), which overflows where
    all scores of a query are below -88, or -11 in f16. Then the query's gradient is NaN.
    """
    return not causal and not (isinstance(k_len, int) and k_len % 128 != 64)


class AttentionFwd(NamedTuple):
    o: jax.Array  # [B, Q, G, R, D] in q's dtype, or as the kernel says
    stats: jax.Array  # f32[B, G, R, Q] the logarithm of each softmax's sum


class AttentionBwd(NamedTuple):
    dq: jax.Array  # [B, Q, G, R, D]
    dk: jax.Array  # [B, K, G, D]
    dv: jax.Array  # [B, K, G, D]


# --- Scratch memory --------------------------------------------------------------------------------------------------


def on_hopper() -> bool:
    """Whether all GPUs here are Hopper's, where these handlers were measured; True where there are none to ask."""
    return all(9 <= capability < 10 for capability in compute_capabilities())


def _cudnn_scratch() -> int:
    """On Hopper cuDNN 9.19 asks for 256 bytes and what follows; more for what was not measured."""
    return 1 << 20 if on_hopper() else 32 << 20


def examples_at_once(batch: int, *entries: int) -> int:
    """Of a backward pass whose arrays have so many entries an example; cpp/ops/attention.h is the same rule."""
    if not all(isinstance(n, int) for n in (batch, *entries)):
        return batch
    parts = -(-batch // max(MOST_ENTRIES // max(*entries, 1), 1))
    return -(-batch // max(parts, 1))


def forward_scratch(q, *_, **attributes) -> int:
    return _cudnn_scratch()


def _fp8_forward_scratch(q, k, v, *_, **attributes) -> int:
    """Values once more: FP8 tensor cores read them transposed. Sequences in tiles."""
    batch, k_len, groups, size = v.shape
    return _cudnn_scratch() + batch * groups * size * (-(-k_len // 128) * 128)


def backward_scratch(stats, q, k, *_, **attributes) -> int:
    """dq in f32, two numbers a row of it, and dk and dv of every head where several share one, in 16 bits on Hopper; in
    deterministic mode the gradient of the scores in 16 bits, too. Sequences in tiles."""
    batch, q_len, groups, repeats, size = q.shape
    batch = examples_at_once(batch, *(n * groups * repeats * size for n in (q_len, k.shape[1])))
    q_len, k_len = (-(-n // 128) * 128 for n in (q_len, k.shape[1]))
    heads = batch * groups * repeats
    shared = 2 * k_len * size * (2 if on_hopper() else 4) if repeats > 1 else 0
    scores = 2 * q_len * k_len if deterministic() else 0
    return _cudnn_scratch() + heads * (4 * q_len * (size + 2) + shared + scores)


# --- References ------------------------------------------------------------------------------------------------------


def of_length(size: int, length) -> Places:
    """Of one sequence a row, of so many tokens; None: of all."""
    position = jnp.arange(size, dtype=jnp.int32)[None]
    return Places(position, None if length is None else (position < length[:, None]).astype(jnp.int32))


def _blocked(attend, q, k, v, q_places: Places, k_places: Places, *, scale, causal, left, **of_rows):
    """attend(options, rows, shared), [B, Q, ..] each, block by block; of_rows: more that rows have."""
    batch, queries, groups, repeats, size = q.shape
    options = Attention(scale, causal=causal, window=(left, 0) if left >= 0 else None)
    query = q.reshape(batch, queries, groups * repeats, size)
    given = dict(mask=None, bias=None, softmax_offset=None, dropout_key=None)
    rows, shared = rows_and_shared(query, k, v, queries=q_places, keys=k_places, **given)
    return by_blocks(partial(attend, options), rows._replace(**of_rows), shared)


def forward_reference(q, k, v, q_places: Places, k_places: Places, *, key=None, dropout=0.0, **fields) -> AttentionFwd:
    """The forward pass of attention in q's dtype, of tokens at these places; its mask of dropout comes from the key."""

    def attend(options, rows, shared):
        weights, top, total = powers(*scores_of(options, rows, shared))
        weights = dropped(weights / jnp.where(total > 0, total, 1.0), key, dropout, rows.index)
        return weighted(weights, shared.value).astype(q.dtype), _log_of_sum(top, total)

    return _by_group(q, *_blocked(attend, q, k, v, q_places, k_places, **fields))


def backward_reference(
    stats, q, k, v, o, do, q_places: Places, k_places: Places, *, key=None, dropout=0.0, **fields
) -> AttentionBwd:
    """Its gradients, of an o and stats that are taken as they are."""
    by_row = lambda x: x.reshape(*x.shape[:2], -1, x.shape[-1])

    def attend(options, rows, shared):
        """What has these gradients, where o and stats are constants."""
        scores, seen = scores_of(options, rows, shared)
        exponents = scores - jnp.moveaxis(rows.stats, 2, 1)[..., None]
        weights = jnp.exp(exponents if seen is None else jnp.where(seen, exponents, jnp.finfo(jnp.float32).min))
        sums = jnp.moveaxis(jnp.sum(weights, axis=-1, keepdims=True), 1, 2)
        return weighted(dropped(weights, key, dropout, rows.index), shared.value) - sums * rows.o.astype(jnp.float32)

    def surrogate(q, k, v):
        of_rows = dict(o=by_row(o), stats=jnp.moveaxis(stats.reshape(q.shape[0], -1, q.shape[1]), 1, 2))
        return _blocked(attend, q, k, v, q_places, k_places, **fields, **of_rows)

    _, vjp = jax.vjp(surrogate, q, k, v)
    return AttentionBwd(*vjp(by_row(do).astype(jnp.float32)))


def _log_of_sum(top, total) -> jax.Array:
    """f32[B, Q, H] of what `powers` returns."""
    return jnp.moveaxis((top + jnp.log(jnp.where(total > 0, total, 1.0)))[..., 0], 1, 2)


def _by_group(q, o, stats) -> AttentionFwd:
    """o [B, Q, H, D] and stats f32[B, Q, H] as kernels have them."""
    return AttentionFwd(o.reshape(q.shape), jnp.moveaxis(stats, 1, 2).reshape(q.shape[0], *q.shape[2:4], q.shape[1]))


def _mask_key(seed, dropout: float) -> jax.Array | None:
    return jax.random.wrap_key_data(seed[:2], impl="threefry2x32") if dropout else None


# --- Kernels ---------------------------------------------------------------------------------------------------------


@kernel(
    "b q g r d, b k g d, b k g d, s, b, b -> b q g r d, b g r q",
    whole="qkds",
    by_shard={"seed": "stats"},
    platforms=("cuda",),
    workspace=forward_scratch,
    prepared=True,
)
def attention_fwd(
    q, k, v, seed, q_len, k_len, *, scale: float, dropout: float, causal: bool = False, left: int = -1
) -> AttentionFwd:
    """softmax(q k^T * scale) v with weights dropped at a rate of `dropout`, the others divided by 1 - dropout.

    Args:
      q: [B, Q, G, R, D] bf16 or f16: R query heads share each of G heads of keys and values.
      k, v: [B, K, G, D]; D a multiple of 8.
      seed: u32[4] of Philox: a seed and an offset, each of 64 bits, low word first; None without dropout.
      q_len, k_len: i32[B] tokens of each sequence, or None; on CUDA nothing is written past them.
      left: how many keys before its own place a query sees, -1 for all; only where causal.
    """
    places = of_length(q.shape[1], q_len), of_length(k.shape[1], k_len)
    options = dict(scale=scale, dropout=dropout, causal=causal, left=left)
    return forward_reference(q, k, v, *places, key=_mask_key(seed, dropout), **options)


@kernel(
    "b q g r d, b k g d, b k g d, -, -, -, -, -, -, b, b -> b q g r d, b g r q",
    whole="qkd",
    platforms=("cuda",),
    workspace=_fp8_forward_scratch,
    prepared=True,
)
def attention_fp8_fwd(
    q, k, v, q_descale, k_descale, v_descale, weight_scale, weight_descale, o_scale, q_len, k_len,
    *, scale: float, causal: bool = False, left: int = -1,
) -> AttentionFwd:  # fmt: skip
    """attention_fwd without dropout, of E4M3 codes; products are added up in f32, and the softmax is f32.

    Args:
      q, k, v: as of attention_fwd, E4M3; D a multiple of 16.
      q_descale, k_descale, v_descale: f32[] what a code stands for: value = code * descale.
      weight_scale, weight_descale: f32[] what weights, exp(score - the row's largest) in [0, 1], are multiplied by
        before their cast to E4M3, and its reciprocal. They are divided by their sum afterwards.
      o_scale: f32[] what o is multiplied by before its cast to E4M3, the one dtype of o that Hopper knows.
    """
    query, key, value = (x.astype(jnp.float32) * s for x, s in ((q, q_descale), (k, k_descale), (v, v_descale)))

    def attend(options, rows, shared):
        weights, top, total = powers(*scores_of(options, rows, shared))
        weights = scaled_cast(weights, weight_scale, E4M3).astype(jnp.float32) * weight_descale
        o = weighted(weights, shared.value) / jnp.moveaxis(jnp.where(total > 0, total, 1.0), 1, 2)
        return scaled_cast(o, o_scale, E4M3), _log_of_sum(top, total)

    places = of_length(q.shape[1], q_len), of_length(k.shape[1], k_len)
    return _by_group(q, *_blocked(attend, query, key, value, *places, scale=scale, causal=causal, left=left))


@kernel(
    "b g r q, b q g r d, b k g d, b k g d, b q g r d, b q g r d, s, b, b -> b q g r d, b k g d, b k g d",
    whole="qkds",
    reduce={"dk": "sum", "dv": "sum"},
    by_shard={"seed": "stats"},
    platforms=("cuda",),
    workspace=backward_scratch,
    prepared=True,
)
def attention_bwd(
    stats, q, k, v, o, do, seed, q_len, k_len, *, scale: float, dropout: float, causal: bool = False, left: int = -1
) -> AttentionBwd:
    """Gradients of q, k and v from `do`, under the mask of the same seed, of a forward pass with these o and stats.

    Those are taken as they are: weights are exp(score - stats), and a score's gradient is weight * (do v - do o)
    (Dao et al., 2022). They may come from a forward pass of lower precision.
    """
    places = of_length(q.shape[1], q_len), of_length(k.shape[1], k_len)
    options = dict(scale=scale, dropout=dropout, causal=causal, left=left)
    return backward_reference(stats, q, k, v, o, do, *places, key=_mask_key(seed, dropout), **options)


# --- What the ops share ----------------------------------------------------------------------------------------------


class Flash(NamedTuple):
    """What an op needs to know at trace time; all but `repeats` are the kernels' attributes."""

    scale: float
    dropout: float
    causal: bool
    left: int
    repeats: int  # how often each head of keys and values is given to cuDNN

    @classmethod
    def of(cls, options: Attention, query, key) -> Flash:
        # Heads may be sharded, also over more devices than there are groups. Split into groups, such an axis would be
        # sharded by parts of a mesh axis, which JAX's custom partitioning has no words for.
        repeats = 1 if key.shape[2] % shards(query) == 0 else query.shape[2] // key.shape[2]
        return cls(float(options.scale), 0.0, bool(options.causal), int(options.reach[0]), repeats)

    @property
    def attributes(self) -> dict:
        return dict(scale=self.scale, causal=self.causal, left=self.left)

    def by_group(self, x, key) -> jax.Array:
        """x [B, Q, H, D] as [B, Q, G, R, D]."""
        return by_group(x, key.shape[2] * self.repeats)

    def repeated(self, *kv) -> list[jax.Array]:
        return [jnp.repeat(x, self.repeats, axis=2) if self.repeats > 1 else x for x in kv]

    def summed(self, key, *dkv) -> Sequence[jax.Array]:
        """Gradients of `repeated` arrays like key as those of the arrays."""
        of_group = lambda x: x.reshape(*key.shape[:3], self.repeats, -1).sum(3, dtype=jnp.float32).astype(key.dtype)
        return [of_group(x) for x in dkv] if self.repeats > 1 else dkv

    def gradients(self, stats, query, key, value, o, do, seed, q_len, k_len) -> tuple[jax.Array, ...]:
        """Of query [B, Q, H, D], key and value."""
        dq, *dkv = attention_bwd(
            stats, self.by_group(query, key), *self.repeated(key, value), self.by_group(o, key), self.by_group(do, key),
            seed, q_len, k_len, dropout=self.dropout, **self.attributes,
        )  # fmt: skip
        return dq.reshape(query.shape), *self.summed(key, *dkv)


def by_group(x, groups: int) -> jax.Array:
    """x [B, Q, H, D] as [B, Q, groups, R, D]."""
    return x.reshape(*x.shape[:2], groups, x.shape[2] // groups, x.shape[3])


# --- One more logit, of no value -------------------------------------------------------------------------------------


def sunk(o, stats, offset) -> tuple[jax.Array, jax.Array]:
    """(o, stats) of softmaxes with one more logit each, of o [B, Q, H, D], stats f32[B, Q, H] and offset [H].

    The kernels of the backward pass take them as they are, and need know nothing of the offset.
    """
    total = jnp.logaddexp(stats, offset.astype(jnp.float32)[None, None])
    return (o.astype(jnp.float32) * jnp.exp(stats - total)[..., None]).astype(o.dtype), total


def offset_gradient(offset, total, o, do) -> jax.Array:
    """That of the offset, from what `sunk` gave and the gradient of o."""
    along = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1)  # [B, Q, H]
    return -jnp.sum(jnp.exp(offset.astype(jnp.float32)[None, None] - total) * along, axis=(0, 1)).astype(offset.dtype)
