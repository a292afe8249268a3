"""Which backend computes a case of attention, and cuDNN's: flash attention through JAX's own bindings."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp

from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.ops.attention.sequences import Places, SequenceDescriptor, starts_and_lengths, visible

# A mask reaches cuDNN as a bias [B or 1, H or 1, Q, K]; and it keeps statistics [B, N, H, Q] in f32 for N packed
# sequences. Beyond this many bytes of either, the blocks of the reference are the better choice.
MOST_BYTES = 2**30


def attention_backend(
    options: Attention, query, key, value, *, sequence_descriptor=None, mask=None, bias=None, dropout_key=None
) -> tuple[str, str]:
    """("cudnn" or "reference", why): a function of platform, shapes, dtypes and options alone.

    Args:
      as dot_product_attention's; only the shapes and dtypes of arrays are looked at.
    """
    for cannot, why in _limits_of_cudnn(options, query, key, value, sequence_descriptor, mask, bias, dropout_key):
        if cannot:
            return "reference", why
    return "cudnn", "cuDNN's flash attention has all that is asked for"


def platform() -> str:
    """ "cpu", "gpu", ...: where JAX computes here, at trace time."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


@functools.lru_cache(maxsize=1024)
def _warn(why: str) -> None:
    warnings.warn(f"dot_product_attention: computed in plain JAX, not by cuDNN: {why}", stacklevel=4)


def warn_of_fallback(why: str) -> None:
    """Warns once for each reason, on a GPU only: elsewhere nothing better is to be had."""
    if platform() == "gpu":
        _warn(why)


def _limits_of_cudnn(options: Attention, query, key, value, sequences, mask, bias, dropout_key):
    """(whether it is past the limit, the limit), most general first."""
    batch, q_len, heads, dim = query.shape
    k_len, size = key.shape[1], max(dim, value.shape[-1])
    dtypes = {str(x.dtype) for x in (query, key, value)}
    form = _form(options, q_len, k_len, sequences, mask)
    yield platform() != "gpu", "cuDNN needs an NVIDIA GPU"
    yield len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16"}, f"cuDNN needs bf16 or f16, not {sorted(dtypes)}"
    yield size > 128, f"cuDNN needs head sizes up to 128, not {size}"
    yield 0 in (q_len, k_len), "cuDNN needs at least one query and one key"
    yield options.softmax_type != "vanilla", f"JAX's cuDNN call has no {options.softmax_type} softmax"
    yield options.score_mod is not None, "JAX's cuDNN call has no score_mod"
    yield dropout_key is not None, "JAX's cuDNN call has no dropout key"
    yield bool(jax.typeof(query).sharding.mesh.explicit_axes), "JAX's cuDNN call knows no explicit mesh axes"
    masked = form == "mask"
    if masked or bias is not None:
        yield bool(q_len % 2 or k_len % 2), f"cuDNN's masks and biases need even lengths, not {q_len} and {k_len}"
    if masked:
        shared = sequences is None and (mask is None or mask.shape[0] == 1)
        entries = (1 if shared else batch) * (1 if mask is None else mask.shape[1]) * q_len * k_len
        what = "padding, window and alignment this way only as a mask"
        yield 2 * entries > MOST_BYTES, f"cuDNN takes {what}, of {2 * entries / 2**30:.1f} GiB"
    if form == "packed":
        yield bias is not None, "cuDNN has no bias for packed sequences"
        statistics = 4 * batch * sequences.seqlens[0].shape[1] * heads * q_len
        yield statistics > MOST_BYTES, f"cuDNN's statistics of packed sequences take {statistics / 2**30:.1f} GiB"


def _form(options: Attention, q_len: int, k_len: int, sequences: SequenceDescriptor | None, mask) -> str:
    """How visibility is told to cuDNN: "plain", by "lengths", by lengths and offsets ("packed"), or by a "mask"."""
    left, right = options.reach
    if mask is not None or (right >= 0 and not options.causal) or (left >= 0 and not options.causal):
        return "mask"
    if options.bottom_right and (sequences is not None or q_len != k_len):
        return "mask"
    if sequences is None:
        return "mask" if left >= 0 and q_len > k_len + left else "plain"  # the last queries would see nothing
    if sequences.segment_ids is not None:
        return "mask"
    several = any(n.ndim == 2 and n.shape[1] > 1 for n in sequences.seqlens)
    same = sequences.seqlens[0].shape == sequences.seqlens[1].shape
    if not several and sequences.seq_offsets is None:
        return "lengths"
    return "packed" if several and same else "mask"


def cudnn_attention(
    options: Attention, query, key, value, *, sequence_descriptor, queries: Places, keys: Places, mask, bias
) -> jax.Array:
    """[B, Q, H, Dv] by cuDNN; arguments as in `attention_reference`, for which attention_backend says "cudnn"."""
    form = _form(options, query.shape[1], key.shape[1], sequence_descriptor, mask)
    size = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    v_size, batch = value.shape[-1], query.shape[0]
    query, key, value = (_widened(x, size) for x in (query, key, value))  # zeros change neither logits nor sums
    left, _ = options.reach
    known = dict(scale=options.scale, is_causal=options.causal, local_window_size=None if left < 0 else (left, 0))
    call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    if bias is not None:
        bias = _bias(options, bias, query, key)
    if form == "plain":
        return call(query, key, value, bias, **known)[..., :v_size]
    if form == "mask":
        seen = jnp.broadcast_to(visible(options, queries, keys, mask), _masked_shape(queries, mask, query, key))
        out = call(query, key, value, bias, seen, scale=options.scale)
        some = jnp.moveaxis(jnp.any(seen, axis=-1), 1, 2)[..., None]  # [B or 1, Q, H or 1, 1]
        return jnp.where(some, out, jnp.zeros((), out.dtype))[..., :v_size]
    offsets = sequence_descriptor.seq_offsets or (None, None)
    (q_starts, q_lens), (k_starts, k_lens) = map(starts_and_lengths, sequence_descriptor.seqlens, offsets)
    q_lens, k_lens = _attending(q_lens, k_lens, left)
    if form == "lengths":
        # cuDNN gets at least one token of each; those of empty sequences are hidden below.
        lengths = [jnp.maximum(n[:, 0], 1) for n in (q_lens, k_lens)]
        out = call(query, key, value, bias, query_seq_lengths=lengths[0], key_value_seq_lengths=lengths[1], **known)
        computed = jnp.arange(query.shape[1]) < q_lens[:, :1]
    else:
        out = _packed(options, query, key, value, q_starts, q_lens, k_starts, k_lens)
        token = jnp.arange(query.shape[1])[None, :, None]
        ends = (q_starts + q_lens)[:, None]
        computed = jnp.any((token >= q_starts[:, None]) & (token < ends), axis=-1)
    assert computed.shape == (batch, query.shape[1])
    return jnp.where(computed[..., None, None], out, jnp.zeros((), out.dtype))[..., :v_size]


def _widened(x, size: int):
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, size - x.shape[-1])))


def _masked_shape(queries: Places, mask, query, key) -> tuple[int, ...]:
    """[B or 1, H or 1, Q, K], the shape in which cuDNN takes a mask."""
    batch, heads = (1, 1) if mask is None else mask.shape[:2]
    return max(batch, queries.position.shape[0]), heads, query.shape[1], key.shape[1]


def _bias(options: Attention, bias, query, key):
    """[B or 1, H or 1, Q, K] in query's dtype, scaled; finite, since cuDNN subtracts it from its maximum."""
    bias = bias.astype(jnp.float32) * (options.scale if options.bias_before_scale else 1.0)
    largest = 2.0**15 if query.dtype == jnp.float16 else 2.0**41
    bias = jnp.clip(bias, -largest, largest).astype(query.dtype)
    return jnp.broadcast_to(bias, (*bias.shape[:2], query.shape[1], key.shape[1]))


def _attending(q_lens, k_lens, left: int):
    """Lengths [B, N] without the queries that see nothing: those of empty keys, and those past keys and window."""
    if left >= 0:
        q_lens = jnp.minimum(q_lens, k_lens + left)
    some = (q_lens > 0) & (k_lens > 0)
    return jnp.where(some, q_lens, 0), jnp.where(some, k_lens, 0)


def _packed(options: Attention, query, key, value, q_starts, q_lens, k_starts, k_lens):
    """Several sequences a row: cuDNN takes lengths [B, N] and starts [B, N + 1], -1 for what is not there."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # the public call has no offsets

    def given(x):
        return jnp.where(q_lens > 0, x, -1).astype(jnp.int32)

    repeats = query.shape[2] // key.shape[2]  # JAX counts the offsets of keys in the strides of queries
    key, value = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (key, value))
    starts = [jnp.pad(given(x), ((0, 0), (0, 1)), constant_values=-1) for x in (q_starts, k_starts)]
    left, _ = options.reach
    return cudnn.dot_product_attention(
        query, key, value,
        q_seqlen=given(q_lens), kv_seqlen=given(k_lens), q_offsets=starts[0], kv_offsets=starts[1],
        scale=options.scale,
        mask_type=cudnn.MaskType.PADDING_CAUSAL if options.causal else cudnn.MaskType.PADDING,
        sliding_window_length=None if left < 0 else left + 1,
    )  # fmt: skip
