"""GPT-2 (Radford et al., 2019): LayerNorm before each block, learned positions, biases everywhere, gelu's tanh form."""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import published

import transformer_engine_jax.flax as te_flax

VOCABULARY, POSITIONS, HIDDEN, HEADS, LAYERS, EPSILON = 50, 16, 32, 4, 2, 1e-5
TOKENS = published.tokens(VOCABULARY, 2, 12)


def checkpoint():
    """Its products are "Conv1D"s, whose weights are [in, out]; q, k and v come in one."""
    shapes = {"wte.weight": (VOCABULARY, HIDDEN), "wpe.weight": (POSITIONS, HIDDEN)}
    for i in range(LAYERS):
        for name, inputs, outputs in (
            ("attn.c_attn", HIDDEN, 3 * HIDDEN), ("attn.c_proj", HIDDEN, HIDDEN),
            ("mlp.c_fc", HIDDEN, 4 * HIDDEN), ("mlp.c_proj", 4 * HIDDEN, HIDDEN),
        ):  # fmt: skip
            shapes |= {f"h.{i}.{name}.weight": (inputs, outputs), f"h.{i}.{name}.bias": (outputs,)}
    for name in (*(f"h.{i}.ln_{j}" for i in range(LAYERS) for j in (1, 2)), "ln_f"):
        shapes |= {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}
    return published.checkpoint(shapes)


def plain(weights, ids):
    """The original, in plain JAX."""
    norm = partial(published.layer_norm, weights, epsilon=EPSILON)

    def product(name, x):
        return jnp.matmul(x, weights[f"{name}.weight"], precision="highest") + weights[f"{name}.bias"]

    def gelu(x):
        return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = weights["wte.weight"][ids] + weights["wpe.weight"][: ids.shape[1]]
    for i in range(LAYERS):
        at = f"h.{i}"
        projected = jnp.split(product(f"{at}.attn.c_attn", norm(f"{at}.ln_1", x)), 3, axis=-1)
        q, k, v = (published.split_heads(t, HIDDEN // HEADS) for t in projected)
        visible = published.causal(ids.shape[1])
        context = published.attention(q, k, v, scale=(HIDDEN // HEADS) ** -0.5, visible=visible)
        x = x + product(f"{at}.attn.c_proj", published.merge_heads(context))
        x = x + product(f"{at}.mlp.c_proj", gelu(product(f"{at}.mlp.c_fc", norm(f"{at}.ln_2", x))))
    return jnp.matmul(norm("ln_f", x), weights["wte.weight"].T, precision="highest")


class GPT2(nn.Module):
    """The port; NVIDIA's options suffice."""

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(VOCABULARY, HIDDEN, name="wte")
        x = embed(ids) + nn.Embed(POSITIONS, HIDDEN, name="wpe")(jnp.arange(ids.shape[1]))
        for i in range(LAYERS):
            x = te_flax.TransformerLayer(
                hidden_size=HIDDEN,
                mlp_hidden_size=4 * HIDDEN,
                num_attention_heads=HEADS,
                layernorm_epsilon=EPSILON,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                use_bias=True,
                enable_relative_embedding=False,
                scale_attn_logits=True,
                name=f"h_{i}",
            )(x)
        return embed.attend(te_flax.LayerNorm(epsilon=EPSILON, name="ln_f")(x))


def convert(weights):
    norm = partial(published.norm, weights)

    def product(name, outputs=()):
        kernel, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return {"kernel": kernel.reshape(kernel.shape[0], *outputs, HIDDEN), "bias": bias.reshape(*outputs, HIDDEN)}

    def layer(at):
        wi, wo = f"{at}.mlp.c_fc", f"{at}.mlp.c_proj"
        return {
            "attention": {
                "qkv": {**norm(f"{at}.ln_1"), **product(f"{at}.attn.c_attn", (3,))},
                "out": product(f"{at}.attn.c_proj"),
            },
            "mlp": {
                **norm(f"{at}.ln_2"),
                "wi_kernel": weights[f"{wi}.weight"][:, None],
                "wi_bias": weights[f"{wi}.bias"][None],
                "wo_kernel": weights[f"{wo}.weight"],
                "wo_bias": weights[f"{wo}.bias"],
            },
        }

    return {
        **{name: {"embedding": weights[f"{name}.weight"]} for name in ("wte", "wpe")},
        **{f"h_{i}": layer(f"h.{i}") for i in range(LAYERS)},
        "ln_f": norm("ln_f"),
    }


def test_is_the_original():
    published.assert_same_model(GPT2(), convert, plain, checkpoint(), TOKENS)
