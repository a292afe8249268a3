"""Which backend computes a case of attention: a function of platform, shapes, dtypes and options."""

from __future__ import annotations

import functools
import math
import warnings

import jax

from transformer_engine_jax.decisions import compute_capabilities, platform, shards
from transformer_engine_jax.ops.attention.flash import MOST_ENTRIES, MOST_HEAD_SIZE, Flash, missing, on_hopper
from transformer_engine_jax.ops.attention.flash_packed import PACKED_SIZES, packs
from transformer_engine_jax.ops.attention.options import Attention
from transformer_engine_jax.ops.attention.sequences import SequenceDescriptor
from transformer_engine_jax.partition import names_of
from transformer_engine_jax.tracing import level_of_user

# A mask reaches cuDNN as a bias [B or 1, H or 1, Q, K]. Beyond this many bytes the blocks of the reference are the
# better choice.
MOST_BYTES = 2**30
TOO_LARGE = "cuDNN counts in 32 bits: of an example fewer than 2^31 entries on a device"
TOO_MANY = "cuDNN counts in 32 bits: this way of all examples fewer than 2^31 entries on a device"


def attention_backend(
    options: Attention,
    query,
    key,
    value,
    *,
    sequence_descriptor=None,
    mask=None,
    bias=None,
    dropout_key=None,
    context_parallel=None,
    fp8: bool = False,
) -> tuple[str, str]:
    """("fp8", "cudnn" or "reference", why): a function of platform, shapes, dtypes and options alone.

    Arguments are dot_product_attention's; only the shapes and dtypes of arrays are looked at. fp8: whether FP8 is asked
    for; where it can't be had, the reason says so too.
    """
    given = options, query, key, value, sequence_descriptor, mask, bias, dropout_key, context_parallel
    instead = ""
    if fp8:
        cannot = next((why for cannot, why in _limits_of_fp8(*given) if cannot), None)
        if cannot is None:
            return "fp8", "the recipe's fp8_dpa, which has all that is asked for"
        if platform() != "gpu":  # FP8 would be emulated: that there is no cuDNN is not why it can't be
            return "reference", f"fp8_dpa: {cannot}"
        instead = f"; fp8_dpa: {cannot}"
    for cannot, why in _limits_of_cudnn(*given):
        if cannot:
            return "reference", why + instead
    why = "cuDNN's flash attention has all that is asked for"
    ids = None if sequence_descriptor is None else sequence_descriptor.segment_ids
    if ids is not None and sequence_descriptor.max_segments is None:
        why += ", but is told segment ids as a mask, and computes what that hides: give their descriptor max_segments"
    return "cudnn", why + instead


def from_hopper_on() -> bool:
    """Whether the GPUs here are Hopper's or newer; True where there are none to ask."""
    return all(capability >= 9 for capability in compute_capabilities())


def most_head_size() -> int:
    """Of cuDNN's attention on the GPUs here."""
    return 256 if from_hopper_on() else 128


@functools.lru_cache(maxsize=1024)
def _warn(what: str, why: str) -> None:
    warnings.warn(f"dot_product_attention: computed {what}: {why}", stacklevel=level_of_user())


def warn_of_fallback(why: str) -> None:
    """Warns once for each reason, on a GPU only: elsewhere nothing better is to be had."""
    if platform() == "gpu":
        _warn("in plain JAX, not by cuDNN", why)


def warn_of_high_precision(why: str) -> None:
    """Warns once for each reason why attention is not in FP8, though the recipe asks for it."""
    _warn("in high precision, not in FP8", why)


def _limits_of_cudnn(options: Attention, query, key, value, sequences, mask, bias, dropout_key, context_parallel):
    """(whether it is past the limit, the limit), most general first."""
    batch, q_len, heads, dim = query.shape
    k_len, size = key.shape[1], max(dim, value.shape[-1])
    dtypes = {str(x.dtype) for x in (query, key, value)}
    form = visibility_form(options, q_len, k_len, sequences, mask)
    yield platform() != "gpu", "cuDNN needs an NVIDIA GPU"
    yield len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16"}, f"cuDNN needs bf16 or f16, not {sorted(dtypes)}"
    most = most_head_size()
    yield size > most, f"cuDNN needs head sizes up to {most}, not {size}"
    yield 0 in (q_len, k_len) or q_len == k_len == 1, "cuDNN needs more than one query or key"
    offset, whole = options.softmax_type != "vanilla", form == "plain" and bias is None
    given = dict(sequence_descriptor=sequences, mask=mask, bias=bias, dropout_key=dropout_key)
    sinks = whole or (bias is None and as_packed(options, query, key, value, **given))
    yield offset and not sinks, f"cuDNN's {options.softmax_type} softmax has no masks, biases or sequences like these"
    yield options.score_mod is not None, "JAX's cuDNN call has no score_mod"
    wide = -(-size // PACKED_SIZES) * PACKED_SIZES
    large = too_large(query, *(n * heads * wide for n in (q_len, k_len)))
    yield "example" in large, TOO_LARGE
    able = size <= MOST_HEAD_SIZE and not missing() and on_hopper()
    ours = form != "mask" and bias is None and able and Flash.of(options, query, key).repeats == 1
    packed = as_packed(options, query, key, value, **given)
    in_parts = (packed or ours) and dropout_key is None and context_parallel is None
    yield "batch" in large and not in_parts, TOO_MANY
    if dropout_key is not None:
        described = form not in ("plain", "lengths") or bias is not None or offset
        yield described, "with dropout, cuDNN is given no masks, biases, packed sequences or softmax offsets"
        yield context_parallel is not None, "with dropout, cuDNN is given whole sequences"
        yield size > MOST_HEAD_SIZE, f"with dropout, cuDNN needs head sizes up to {MOST_HEAD_SIZE}, not {size}"
        yield missing() != "", missing()
    if context_parallel:
        over = f"over {context_parallel.axis!r} cuDNN"
        told = form == "packed" or (form == "lengths" and packs())
        ways = "is told of sequences by lengths, or by ids with max_segments, on GPUs that have packed rows"
        yield options.reach != (-1, 0 if options.causal else -1), f"{over} has no windows"
        yield options.causal and q_len != k_len, f"{over} needs as many keys as queries"
        yield options.bottom_right and sequences is not None, f"{over} counts from where sequences begin, not end"
        yield sequences is not None and not told, missing() or f"{over} {ways}"
        yield not (whole or told) or bias is not None, f"{over} has no masks and biases"
        unlike = options.causal and told and not sequences.alike
        yield unlike, f"{over} needs one array of ids or lengths for both, queries and keys"
        return
    by_jax = not (packed or ours or form == "cache" or dropout_key is not None)
    known = all(isinstance(n, int) for n in (batch, q_len, k_len))
    yield by_jax and not known, "JAX's cuDNN call needs sizes that are known at trace time"
    yield by_jax and batch == 0, "JAX's cuDNN call needs an example"
    if form == "mask":
        shared = sequences is None and (mask is None or mask.shape[0] == 1)
        entries = (1 if shared else batch) * (1 if mask is None else mask.shape[1]) * q_len * k_len
        what = "padding, window and alignment this way only as a mask"
        yield 2 * entries > MOST_BYTES, f"cuDNN takes {what}, of {2 * entries / 2**30:.1f} GiB"
    yield form in ("packed", "cache") and bias is not None, "cuDNN has no bias for packed sequences and caches"
    if form == "cache":
        yield size > MOST_HEAD_SIZE, f"over a cache, cuDNN needs head sizes up to {MOST_HEAD_SIZE}, not {size}"
        yield not on_hopper(), "over a cache, cuDNN's attention was measured on Hopper alone"
        split = Flash.of(options, query, key).repeats > 1
        yield split, "over a cache, cuDNN is given whole groups of heads on a device"
        yield missing() != "", missing()


def too_large(query, *entries: int) -> set[str]:
    """Which of "example" and "batch" is more on a device than cuDNN's backward pass can count, as far as shapes tell.

    entries: of an example of query [B, ..] or of other arrays like it.
    """
    batch, sharding = query.shape[0], jax.typeof(query).sharding
    if not all(isinstance(n, int) for n in (batch, *entries)):
        return set()
    if sharding.mesh.empty or sharding.mesh.auto_axes:
        devices = of_batch = shards(query)
    else:  # explicit axes tell
        of_axes = [math.prod(sharding.mesh.shape[name] for name in names_of(entry)) for entry in sharding.spec]
        devices, of_batch = math.prod(of_axes), of_axes[0]
    on_device = batch * max(entries) // devices
    sizes = {"batch": on_device, "example": on_device // max(batch // of_batch, 1)}
    return {what for what, n in sizes.items() if n > MOST_ENTRIES}


def _limits_of_fp8(options: Attention, query, key, value, sequences, mask, bias, dropout_key, context_parallel):
    """Likewise of attention in FP8: the same everywhere, but for what GPUs need."""
    q_len, k_len, sizes = query.shape[1], key.shape[1], {query.shape[-1], value.shape[-1]}
    dtypes = {str(x.dtype) for x in (query, key, value)}
    form = visibility_form(options, q_len, k_len, sequences, mask)
    yield context_parallel is not None, "FP8 attention needs whole sequences on a device"
    yield dropout_key is not None, "FP8 attention has no dropout"
    yield bias is not None, "FP8 attention has no bias"
    yield options.softmax_type != "vanilla", f"FP8 attention has no {options.softmax_type} softmax"
    yield options.score_mod is not None, "FP8 attention has no score_mod"
    yield form not in ("plain", "lengths"), f"FP8 attention is told no {form}: lengths, causality and its window alone"
    yield q_len == 1 or 0 in (q_len, k_len), "FP8 attention needs more than one query, and a key"
    wrong = any(size % 16 or not 0 < size <= MOST_HEAD_SIZE for size in sizes)
    yield wrong, f"FP8 attention needs head sizes in multiples of 16 up to {MOST_HEAD_SIZE}, not {sorted(sizes)}"
    allowed = {"bfloat16", "float16"} if platform() == "gpu" else {"bfloat16", "float16", "float32"}
    other = len(dtypes) > 1 or not dtypes <= allowed
    yield other, f"FP8 attention casts one of {sorted(allowed)}, not {sorted(dtypes)}"
    if platform() == "gpu":
        yield not from_hopper_on(), "FP8 attention needs Hopper or newer"
        large = too_large(query, *(n * query.shape[2] * max(sizes) for n in (q_len, k_len)))
        yield "example" in large, TOO_LARGE
        yield missing() != "", missing()


def visibility_form(options: Attention, q_len: int, k_len: int, sequences: SequenceDescriptor | None, mask) -> str:
    """How visibility is told to cuDNN: "plain", by "lengths", by lengths and offsets ("packed"), or by a "mask"; or by
    lengths that end together, of a "cache"."""
    left, _ = options.reach
    if mask is not None or (options.reach != (-1, -1) and not options.causal):
        return "mask"
    if sequences is not None and sequences.cached and options.bottom_right:
        return "cache"
    if options.bottom_right and (sequences is not None or q_len != k_len):
        return "mask"
    if sequences is None:
        return "mask" if left >= 0 and q_len > k_len else "plain"  # cuDNN's windows need as many keys as queries
    if sequences.segment_ids is not None:
        return "packed" if sequences.max_segments is not None and packs() else "mask"
    counts = {math.prod(n.shape[1:]) for n in sequences.seqlens}
    if counts == {1} and sequences.seq_offsets is None:
        return "lengths"
    return "packed" if len(counts) == 1 and 0 not in counts and packs() else "mask"


def as_packed(
    options: Attention, query, key, value, *, sequence_descriptor, mask, bias, dropout_key, quantizers=None
) -> bool:
    """Whether cuDNN is given packed rows, of which nothing need be hidden first.

    Rows of one sequence are too, where heads need not be widened for it.
    """
    form = visibility_form(options, query.shape[1], key.shape[1], sequence_descriptor, mask)
    if form == "packed":
        return True
    plain = all(x is None for x in (bias, dropout_key, quantizers))
    fits = all(x.shape[-1] == query.shape[-1] and x.shape[-1] % PACKED_SIZES == 0 for x in (query, key, value))
    return form == "lengths" and plain and fits and packs()
