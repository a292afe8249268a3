"""Attention and its gradients in f64 numpy, by the formulas: what the op must equal."""

from __future__ import annotations

import numpy as np

from transformer_engine_jax.ops.attention import Attention


def seen_keys(options: Attention, batch: int, q_len: int, k_len: int, sequences=None, mask=None) -> np.ndarray:
    """bool[B, 1 or H, Q, K], one comparison at a time.

    sequences: for each row a list of (first query, queries, first key, keys) of one sequence; None: the row is one.
    """
    left, right = options.window or (-1, -1)
    seen = np.zeros((batch, 1, q_len, k_len), bool)
    for row in range(batch):
        for q0, q_size, k0, k_size in [(0, q_len, 0, k_len)] if sequences is None else sequences[row]:
            shift = k_size - q_size if options.bottom_right else 0
            for i in range(q_size):
                for j in range(k_size):
                    ahead = j - (i + shift)
                    hidden = (options.causal and ahead > 0) or (left >= 0 and ahead < -left) or 0 <= right < ahead
                    if q0 + i < q_len and k0 + j < k_len:
                        seen[row, 0, q0 + i, k0 + j] = not hidden
    return seen if mask is None else seen & ~mask


def reduced(x, shape):
    """x summed to a shape that broadcasts to its own."""
    return x.sum(tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] > 1), keepdims=True)


def attention(options: Attention, seen, query, key, value, dy, bias=None, offset=None):
    """(out, [dquery, dkey, dvalue, then dbias and doffset where given]) in f64."""
    query, key, value, dy = (x.astype(np.float64) for x in (query, key, value, dy))
    heads, groups = query.shape[2], key.shape[2]
    wide_k, wide_v = (np.repeat(x, heads // groups, axis=2) for x in (key, value))
    added = 0.0 if bias is None else bias.astype(np.float64)
    logits = np.einsum("bqhd,bkhd->bhqk", query, wide_k)
    before = options.bias_before_scale
    logits = (logits + added) * options.scale if before else logits * options.scale + added
    seen = np.broadcast_to(seen, logits.shape)
    powers = np.where(seen, np.exp(logits), 0.0)
    sink = {"vanilla": 0.0, "off_by_one": 1.0, "learnable": None}[options.softmax_type]
    sink = np.exp(offset.astype(np.float64))[:, None, None] if sink is None else sink
    total = powers.sum(-1, keepdims=True) + sink
    total = np.where(total > 0, total, 1.0)
    weights = powers / total
    out = np.einsum("bhqk,bkhd->bqhd", weights, wide_v)

    dweights = np.einsum("bqhd,bkhd->bhqk", dy, wide_v)
    mean = (dweights * weights).sum(-1, keepdims=True)
    dlogits = weights * (dweights - mean)
    per_group = lambda x: x.reshape(*x.shape[:2], groups, heads // groups, -1).sum(3)
    grads = [
        np.einsum("bhqk,bkhd->bqhd", dlogits, wide_k) * options.scale,
        per_group(np.einsum("bhqk,bqhd->bkhd", dlogits, query)) * options.scale,
        per_group(np.einsum("bhqk,bqhd->bkhd", weights, dy)),
    ]
    if bias is not None:
        grads.append(reduced(dlogits * (options.scale if before else 1.0), bias.shape))
    if offset is not None:
        grads.append((-(sink / total) * mean).sum((0, 2, 3)))
    return out, grads
