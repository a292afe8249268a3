"""GPT-J (Wang and Komatsuzaki, 2021) and GPT-NeoX (Black et al., 2022): attention and MLP side by side.

Both rotate a part of each head. GPT-J, in pairs of neighbours, has one norm for both blocks and no biases in its
attention; GPT-NeoX (and Pythia), in halves, a norm for each, and query, key and value of each head side by side.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import published

import transformer_engine_jax.flax as te_flax

VOCABULARY, HIDDEN, HEADS, HEAD_DIM, ROTARY_DIM, LAYERS, EPSILON = 50, 32, 2, 16, 8, 2, 1e-5
TOKENS = published.tokens(VOCABULARY, 2, 12)
FREQUENCIES = published.rope_frequencies(ROTARY_DIM, 10000.0)


def drawn(products, norms, embedding: str):
    """Weights of [out, in], and their biases where `products` says so."""
    shapes = {embedding: (VOCABULARY, HIDDEN)}
    for name, outputs, inputs, biased in products:
        shapes |= {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if biased else {})
    for name in norms:
        shapes |= {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}
    return published.checkpoint(shapes)


class Parallel(nn.Module):
    """The port of both. parallel_attention_mlp and rotary_pos_emb, here of a part of each head, are ours."""

    rotates: str
    activation: object
    head_bias: bool

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCABULARY, HIDDEN, name="embed")(ids)
        for i in range(LAYERS):
            x = te_flax.TransformerLayer(
                hidden_size=HIDDEN,
                mlp_hidden_size=4 * HIDDEN,
                num_attention_heads=HEADS,
                layernorm_epsilon=EPSILON,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                mlp_activations=(self.activation,),
                use_bias=True,
                parallel_attention_mlp=True,
                enable_relative_embedding=False,
                rotary_pos_emb_group_method=self.rotates,
                scale_attn_logits=True,
                name=f"layer_{i}",
            )(x, rotary_pos_emb=FREQUENCIES)
        x = te_flax.LayerNorm(epsilon=EPSILON, name="norm")(x)
        return te_flax.DenseGeneral(VOCABULARY, use_bias=self.head_bias, name="head")(x)


# --- GPT-J -----------------------------------------------------------------------------------------------------------


def gpt_j_checkpoint():
    products, norms = [("lm_head", VOCABULARY, HIDDEN, True)], ["transformer.ln_f"]
    for i in range(LAYERS):
        at = f"transformer.h.{i}"
        products += [(f"{at}.attn.{name}_proj", HIDDEN, HIDDEN, False) for name in ("q", "k", "v", "out")]
        products += [(f"{at}.mlp.fc_in", 4 * HIDDEN, HIDDEN, True), (f"{at}.mlp.fc_out", HIDDEN, 4 * HIDDEN, True)]
        norms += [f"{at}.ln_1"]
    return drawn(products, norms, "transformer.wte.weight")


def rotate_neighbours(x):
    """RoPE of the pairs (2 i, 2 i + 1) of the first ROTARY_DIM features of [B, heads, S, size], as complex numbers."""
    turns = jnp.asarray(np.exp(1j * np.arange(x.shape[2])[:, None] * FREQUENCIES), jnp.complex64)
    pairs = jax.lax.complex(x[..., :ROTARY_DIM:2], x[..., 1:ROTARY_DIM:2]) * turns
    rotated = jnp.stack([pairs.real, pairs.imag], axis=-1).reshape(*x.shape[:-1], ROTARY_DIM)
    return jnp.concatenate([rotated, x[..., ROTARY_DIM:]], axis=-1)


def gpt_j(weights, ids):
    """The original, in plain JAX."""
    linear = partial(published.linear, weights)
    norm = partial(published.layer_norm, weights, epsilon=EPSILON)
    x = weights["transformer.wte.weight"][ids]
    for i in range(LAYERS):
        at = f"transformer.h.{i}"
        normed = norm(f"{at}.ln_1", x)
        q, k, v = (published.split_heads(linear(f"{at}.attn.{n}_proj", normed), HEAD_DIM) for n in "qkv")
        q, k = rotate_neighbours(q), rotate_neighbours(k)
        context = published.attention(q, k, v, scale=HEAD_DIM**-0.5, visible=published.causal(ids.shape[1]))
        attended = linear(f"{at}.attn.out_proj", published.merge_heads(context))
        fed = linear(f"{at}.mlp.fc_out", jax.nn.gelu(linear(f"{at}.mlp.fc_in", normed), approximate=True))
        x = attended + fed + x
    return linear("lm_head", norm("transformer.ln_f", x))


def from_gpt_j(weights):
    dense, stacked, norm = (partial(f, weights) for f in (published.dense, published.stacked, published.norm))

    def layer(at: str):
        """The one norm serves both blocks; use_bias is of both too, so the attention's biases are zeros."""
        qkv = stacked(*(f"{at}.attn.{n}_proj" for n in "qkv"))
        mlp = published.mlp(weights, first=(f"{at}.mlp.fc_in",), second=f"{at}.mlp.fc_out", normed=f"{at}.ln_1")
        return {
            "attention": {
                "qkv": {**norm(f"{at}.ln_1"), **qkv, "bias": jnp.zeros((3, HIDDEN))},
                "out": {**dense(f"{at}.attn.out_proj"), "bias": jnp.zeros(HIDDEN)},
            },
            "mlp": mlp,
        }

    return {
        "embed": {"embedding": weights["transformer.wte.weight"]},
        **{f"layer_{i}": layer(f"transformer.h.{i}") for i in range(LAYERS)},
        "norm": norm("transformer.ln_f"),
        "head": dense("lm_head"),
    }


def test_gpt_j_is_the_original():
    port = Parallel("consecutive", "gelu", head_bias=True)
    published.assert_same_model(port, from_gpt_j, gpt_j, gpt_j_checkpoint(), TOKENS)


# --- GPT-NeoX --------------------------------------------------------------------------------------------------------


def gpt_neox_checkpoint():
    products, norms = [("embed_out", VOCABULARY, HIDDEN, False)], ["gpt_neox.final_layer_norm"]
    for i in range(LAYERS):
        at = f"gpt_neox.layers.{i}"
        products += [
            (f"{at}.attention.query_key_value", 3 * HIDDEN, HIDDEN, True),
            (f"{at}.attention.dense", HIDDEN, HIDDEN, True),
            (f"{at}.mlp.dense_h_to_4h", 4 * HIDDEN, HIDDEN, True),
            (f"{at}.mlp.dense_4h_to_h", HIDDEN, 4 * HIDDEN, True),
        ]
        norms += [f"{at}.input_layernorm", f"{at}.post_attention_layernorm"]
    return drawn(products, norms, "gpt_neox.embed_in.weight")


def gpt_neox(weights, ids):
    """The original, in plain JAX."""
    linear = partial(published.linear, weights)
    norm = partial(published.layer_norm, weights, epsilon=EPSILON)
    x = weights["gpt_neox.embed_in.weight"][ids]
    for i in range(LAYERS):
        at = f"gpt_neox.layers.{i}"
        projected = linear(f"{at}.attention.query_key_value", norm(f"{at}.input_layernorm", x))
        q, k, v = jnp.split(published.split_heads(projected, 3 * HEAD_DIM), 3, axis=-1)
        q, k = (
            jnp.concatenate([published.rotate_halves(t[..., :ROTARY_DIM], FREQUENCIES), t[..., ROTARY_DIM:]], axis=-1)
            for t in (q, k)
        )
        context = published.attention(q, k, v, scale=HEAD_DIM**-0.5, visible=published.causal(ids.shape[1]))
        attended = linear(f"{at}.attention.dense", published.merge_heads(context))
        inner = linear(f"{at}.mlp.dense_h_to_4h", norm(f"{at}.post_attention_layernorm", x))
        fed = linear(f"{at}.mlp.dense_4h_to_h", inner * 0.5 * (1 + jax.lax.erf(inner / np.sqrt(2))))
        x = fed + attended + x
    return linear("embed_out", norm("gpt_neox.final_layer_norm", x))


def from_gpt_neox(weights):
    dense, norm = (partial(f, weights) for f in (published.dense, published.norm))

    def layer(at: str):
        fused = dense(f"{at}.attention.query_key_value")  # outputs [heads, 3, head_dim]
        by_kind = lambda p: jnp.moveaxis(p.reshape(*p.shape[:-1], HEADS, 3, HEAD_DIM), -2, -3)
        qkv = {name: by_kind(p).reshape(*p.shape[:-1], 3, HIDDEN) for name, p in fused.items()}
        return {
            "attention": {"qkv": {**norm(f"{at}.input_layernorm"), **qkv}, "out": dense(f"{at}.attention.dense")},
            "mlp": published.mlp(
                weights,
                first=(f"{at}.mlp.dense_h_to_4h",),
                second=f"{at}.mlp.dense_4h_to_h",
                normed=f"{at}.post_attention_layernorm",
            ),
        }

    return {
        "embed": {"embedding": weights["gpt_neox.embed_in.weight"]},
        **{f"layer_{i}": layer(f"gpt_neox.layers.{i}") for i in range(LAYERS)},
        "norm": norm("gpt_neox.final_layer_norm"),
        "head": dense("embed_out"),
    }


def test_gpt_neox_is_the_original():
    port = Parallel("alternate", partial(jax.nn.gelu, approximate=False), head_bias=False)
    published.assert_same_model(port, from_gpt_neox, gpt_neox, gpt_neox_checkpoint(), TOKENS)
