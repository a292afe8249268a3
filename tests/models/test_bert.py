"""BERT (Devlin et al., 2019): an encoder with norms after the residuals, padded batches, gelu by the error function."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import published

import transformer_engine_jax.flax as te_flax

VOCABULARY, POSITIONS, HIDDEN, INNER, HEADS, LAYERS, EPSILON = 50, 16, 32, 64, 4, 2, 1e-12
TOKENS = published.tokens(VOCABULARY, 3, 12)
SEGMENTS = (np.arange(12) > 6).astype(int)[None].repeat(3, axis=0)
ATTENTION_MASK = np.arange(12)[None] < np.array([12, 7, 1])[:, None]  # its own: True is to be seen
EMBEDDINGS = {"word": VOCABULARY, "position": POSITIONS, "token_type": 2}


def checkpoint():
    shapes = {f"embeddings.{name}_embeddings.weight": (size, HIDDEN) for name, size in EMBEDDINGS.items()}
    norms = ["embeddings.LayerNorm"]
    for i in range(LAYERS):
        at = f"encoder.layer.{i}"
        for name, inputs, outputs in (
            *((f"attention.self.{t}", HIDDEN, HIDDEN) for t in ("query", "key", "value")),
            ("attention.output.dense", HIDDEN, HIDDEN),
            ("intermediate.dense", HIDDEN, INNER),
            ("output.dense", INNER, HIDDEN),
        ):
            shapes |= {f"{at}.{name}.weight": (outputs, inputs), f"{at}.{name}.bias": (outputs,)}
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
    for name in norms:
        shapes |= {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}
    return published.checkpoint(shapes)


def plain(weights, ids, segments, attention_mask):
    """The original, in plain JAX."""
    linear = partial(published.linear, weights)
    norm = partial(published.layer_norm, weights, epsilon=EPSILON)
    word, position, kind = (weights[f"embeddings.{name}_embeddings.weight"] for name in EMBEDDINGS)
    x = norm("embeddings.LayerNorm", word[ids] + position[: ids.shape[1]] + kind[segments])
    for i in range(LAYERS):
        at = f"encoder.layer.{i}"
        names = (f"{at}.attention.self.{t}" for t in ("query", "key", "value"))
        q, k, v = (published.split_heads(linear(name, x), HIDDEN // HEADS) for name in names)
        visible = attention_mask[:, None, None, :]
        context = published.attention(q, k, v, scale=(HIDDEN // HEADS) ** -0.5, visible=visible)
        attended = linear(f"{at}.attention.output.dense", published.merge_heads(context))
        x = norm(f"{at}.attention.output.LayerNorm", attended + x)
        inner = linear(f"{at}.intermediate.dense", x)
        inner = inner * 0.5 * (1 + jax.lax.erf(inner / np.sqrt(2)))
        x = norm(f"{at}.output.LayerNorm", linear(f"{at}.output.dense", inner) + x)
    return x


class Bert(nn.Module):
    """The port. NVIDIA's "gelu" is the tanh form; the exact one is given as a function, which is ours."""

    @nn.compact
    def __call__(self, ids, segments, attention_mask):
        embed = {name: nn.Embed(size, HIDDEN, name=name) for name, size in EMBEDDINGS.items()}
        x = embed["word"](ids) + embed["position"](jnp.arange(ids.shape[1])) + embed["token_type"](segments)
        x = te_flax.LayerNorm(epsilon=EPSILON, name="norm")(x)
        for i in range(LAYERS):
            x = te_flax.TransformerLayer(
                hidden_size=HIDDEN,
                mlp_hidden_size=INNER,
                num_attention_heads=HEADS,
                layernorm_epsilon=EPSILON,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                mlp_activations=(partial(jax.nn.gelu, approximate=False),),
                use_bias=True,
                apply_residual_connection_post_layernorm=True,
                output_layernorm=True,
                self_attn_mask_type="padding",
                enable_relative_embedding=False,
                scale_attn_logits=True,
                name=f"layer_{i}",
            )(x, attention_mask=~attention_mask[:, None, None, :])
        return x


def convert(weights):
    dense, stacked, norm = (partial(f, weights) for f in (published.dense, published.stacked, published.norm))

    def layer(at):
        return {
            "attention": {
                "qkv": stacked(*(f"{at}.attention.self.{t}" for t in ("query", "key", "value"))),
                "out": dense(f"{at}.attention.output.dense"),
            },
            "mlp": published.mlp(
                weights,
                first=(f"{at}.intermediate.dense",),
                second=f"{at}.output.dense",
                normed=f"{at}.attention.output.LayerNorm",
            ),
            "output_layernorm": norm(f"{at}.output.LayerNorm"),
        }

    return {
        **{name: {"embedding": weights[f"embeddings.{name}_embeddings.weight"]} for name in EMBEDDINGS},
        "norm": norm("embeddings.LayerNorm"),
        **{f"layer_{i}": layer(f"encoder.layer.{i}") for i in range(LAYERS)},
    }


def test_is_the_original():
    """With lengths of all, some and one of the row's tokens."""
    published.assert_same_model(Bert(), convert, plain, checkpoint(), TOKENS, SEGMENTS, ATTENTION_MASK)
