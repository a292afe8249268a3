"""Attention in plain JAX, written independently of the library: what its modules must equal."""

from __future__ import annotations

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine_jax.flax import RelativePositionBiases


def plain_attention(query, key, value, *, scale, causal=False, mask=None, bias=None, window=None):
    """Softmax attention in f32 on [B, S, heads, D]."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") * scale
    logits = logits if bias is None else logits + bias
    offset = np.arange(key.shape[1])[None, :] - np.arange(query.shape[1])[:, None]
    hidden = np.zeros(offset.shape, bool) | (causal & (offset > 0))
    if window is not None:
        hidden = hidden | (offset < -window[0])
    hidden = jnp.asarray(hidden)[None, None] | (False if mask is None else mask)
    weights = jax.nn.softmax(jnp.where(hidden, -jnp.inf, logits), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value, precision="highest")


def turned(x, *, group, angle=None):
    """x[B, S, heads, D], its pairs of features rotated by matrices; angle [S, F] of the first 2 F features."""
    d = x.shape[-1]
    if angle is None:
        angle = np.arange(x.shape[1])[:, None] / 10000 ** (np.arange(0, d, 2) / d)
    matrix = np.tile(np.eye(d), (x.shape[1], 1, 1))
    for i in range(angle.shape[1]):
        a, b = (2 * i, 2 * i + 1) if group == "consecutive" else (i, i + angle.shape[1])
        matrix[:, a, a] = matrix[:, b, b] = np.cos(angle[:, i])
        matrix[:, b, a], matrix[:, a, b] = np.sin(angle[:, i]), -np.sin(angle[:, i])
    return jnp.einsum("sde,bshe->bshd", jnp.asarray(matrix, jnp.float32), x, precision="highest")


def plain_mha(
    variables,
    x,
    source=None,
    *,
    heads=4,
    groups=4,
    rope=None,
    scale=1.0,
    zero_centered=False,
    roundings=None,
    before_rope=lambda name, x: x,
    after_rope=lambda name, x: x,
    angle=None,
    **attention,
):
    """(out, normed x), whichever way the projections are stored."""
    p = variables["params"]
    rounding = roundings or {}
    first = p["qkv"] if "qkv" in p else p["query"]
    normed = x
    if "scale" in first:
        normed = emulated.norm(x, first["scale"], first.get("ln_bias"), zero_centered_gamma=zero_centered)
    source = normed if source is None else source

    def product(name, x):
        return emulated.dense(x, p[name]["kernel"], p[name].get("bias"), roundings=rounding.get(name))

    if "qkv" in p:
        q, k, v = jnp.unstack(product("qkv", normed), axis=-2)
    elif "kv" in p:
        kv = product("kv", source)
        q, k, v = product("query", normed), kv[..., 0, :], kv[..., 1, :]
    else:
        q, k, v = product("query", normed), product("key", source), product("value", source)
    q, k, v = (t.reshape(*t.shape[:2], n, -1) for t, n in ((q, heads), (k, groups), (v, groups)))
    q, k = before_rope("query_norm", q), before_rope("key_norm", k)
    if rope:
        q, k = turned(q, group=rope, angle=angle), turned(k, group=rope, angle=angle)
    q, k = after_rope("query_norm", q), after_rope("key_norm", k)
    context = plain_attention(q, k, v, scale=scale, **attention)
    return product("out", context.reshape(*x.shape[:2], -1)), normed


def plain_layer(
    variables,
    x,
    encoded=None,
    *,
    post_residual=False,
    parallel=False,
    activations=("gelu",),
    zero_centered=False,
    relpos=True,
    core_bias=0.0,
    cross_mask=None,
    heads=4,
    **attention,
):
    """A TransformerLayer; whether norms exist is read from the parameters. With `encoded`, a decoder's."""
    p = variables["params"]
    attend = partial(plain_mha, zero_centered=zero_centered, heads=heads)
    if relpos:
        biases = RelativePositionBiases(num_buckets=32, max_distance=128, num_attention_heads=heads)
        bidirectional = encoded is None
        core_bias = core_bias + biases.apply({"params": p["relpos_bias"]}, x.shape[1], x.shape[1], bidirectional)
    first = p["attention" if encoded is None else "self_attention"]
    inputs = x
    attended, normed = attend({"params": first}, x, bias=core_bias, **attention)
    x = attended + (normed if post_residual else x)
    if encoded is not None:
        same = {name: attention[name] for name in ("groups", "rope", "scale") if name in attention}
        cross = {"params": p["encoder_decoder_attention"]}
        attended, normed = attend(cross, x, encoded, mask=cross_mask, **same)
        x = attended + (normed if post_residual else x)
    mlp = p["mlp"]
    normed = inputs if parallel else x
    normed = emulated.norm(normed, mlp["scale"], mlp.get("ln_bias"), zero_centered_gamma=zero_centered)
    kernels, biases = (mlp["wi_kernel"], mlp["wo_kernel"]), (mlp.get("wi_bias"), mlp.get("wo_bias"))
    x = emulated.mlp(normed, kernels, biases, activations=activations) + (normed if post_residual else x)
    if "output_layernorm" in p:
        last = p["output_layernorm"]
        x = emulated.norm(x, last["scale"], last.get("ln_bias"), zero_centered_gamma=zero_centered)
    return x
