"""T5 (Raffel et al., 2020): RMSNorm, relative position biases shared by the layers, scores not scaled, two stacks."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest

import transformer_engine_jax.flax as te_flax

BUCKETS, MAX_DISTANCE = 32, 128
IDS, TARGETS = published.tokens(50, 2, 20), published.tokens(50, 2, 24)
ATTENTION_MASK = np.arange(20)[None] < np.array([20, 13])[:, None]  # its own: True is to be seen


@dataclasses.dataclass(frozen=True)
class Config:
    """The fields of its config.json."""

    vocab_size: int = 50
    d_model: int = 32
    d_kv: int = 8
    d_ff: int = 64
    num_layers: int = 2
    num_heads: int = 4
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True

    @property
    def gated(self) -> bool:
        return self.feed_forward_proj == "gated-gelu"


V1_0 = Config()
V1_1 = Config(d_kv=12, num_layers=1, feed_forward_proj="gated-gelu", tie_word_embeddings=False)


def blocks(config: Config):
    """(stack, path of a block) of all blocks."""
    return [(stack, f"{stack}.block.{i}") for stack in ("encoder", "decoder") for i in range(config.num_layers)]


def checkpoint(config: Config):
    width = config.num_heads * config.d_kv
    shapes = {"shared.weight": (config.vocab_size, config.d_model)}
    for stack, at in blocks(config):
        attentions = ("SelfAttention", "EncDecAttention") if stack == "decoder" else ("SelfAttention",)
        for i, name in enumerate(attentions):
            shapes |= {f"{at}.layer.{i}.{name}.{t}.weight": (width, config.d_model) for t in "qkv"}
            shapes |= {f"{at}.layer.{i}.{name}.o.weight": (config.d_model, width)}
        ffn = f"{at}.layer.{len(attentions)}.DenseReluDense"
        shapes |= {f"{ffn}.{t}.weight": (config.d_ff, config.d_model) for t in first_of(config)}
        shapes |= {f"{ffn}.wo.weight": (config.d_model, config.d_ff)}
        shapes |= {f"{at}.layer.{i}.layer_norm.weight": (config.d_model,) for i in range(len(attentions) + 1)}
    for stack in ("encoder", "decoder"):
        first = f"{stack}.block.0.layer.0.SelfAttention"
        shapes |= {f"{first}.relative_attention_bias.weight": (BUCKETS, config.num_heads)}
        shapes |= {f"{stack}.final_layer_norm.weight": (config.d_model,)}
    if not config.tie_word_embeddings:
        shapes |= {"lm_head.weight": (config.vocab_size, config.d_model)}
    return published.checkpoint(shapes)


def first_of(config: Config) -> tuple[str, ...]:
    return ("wi_0", "wi_1") if config.gated else ("wi",)


def bucket(distance: int, bidirectional: bool) -> int:
    """Of a key `distance` positions after its query, in integers: no logarithm that may round."""
    count = BUCKETS // 2 if bidirectional else BUCKETS
    first = count if bidirectional and distance > 0 else 0
    distance = abs(distance) if bidirectional else max(-distance, 0)
    exact = count // 2
    steps = count - exact
    if distance < exact:
        return first + distance
    # The largest k with distance / exact >= (MAX_DISTANCE / exact) ** (k / steps).
    passed = [k for k in range(steps) if distance**steps * exact**k >= MAX_DISTANCE**k * exact**steps]
    return first + exact + passed[-1]


def position_bias(weights, stack: str, length: int):
    """[1, heads, length, length]."""
    buckets = [[bucket(k - q, stack == "encoder") for k in range(length)] for q in range(length)]
    table = weights[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    return table[np.array(buckets)].transpose(2, 0, 1)[None]


def plain(config: Config, weights, ids, attention_mask, targets):
    """The original, in plain JAX."""
    linear = partial(published.linear, weights)
    norm = partial(published.rms_norm, weights, epsilon=config.layer_norm_epsilon)

    def attend(at, x, source, **options):
        q, k, v = (
            published.split_heads(linear(f"{at}.{t}", s), config.d_kv) for t, s in zip("qkv", (x, source, source))
        )
        return linear(f"{at}.o", published.merge_heads(published.attention(q, k, v, **options)))

    def feed_forward(at, x):
        if config.gated:
            inner = jax.nn.gelu(linear(f"{at}.wi_0", x), approximate=True) * linear(f"{at}.wi_1", x)
        else:
            inner = jax.nn.relu(linear(f"{at}.wi", x))
        return linear(f"{at}.wo", inner)

    seen = attention_mask[:, None, None, :]
    x = {"encoder": weights["shared.weight"][ids], "decoder": weights["shared.weight"][targets]}
    biases = {stack: position_bias(weights, stack, x[stack].shape[1]) for stack in x}
    visible = {"encoder": seen, "decoder": published.causal(targets.shape[1])}
    for stack, at in blocks(config):
        y = x[stack]
        normed = norm(f"{at}.layer.0.layer_norm", y)
        y = y + attend(f"{at}.layer.0.SelfAttention", normed, normed, visible=visible[stack], bias=biases[stack])
        if stack == "decoder":
            encoded = norm("encoder.final_layer_norm", x["encoder"])
            normed = norm(f"{at}.layer.1.layer_norm", y)
            y = y + attend(f"{at}.layer.1.EncDecAttention", normed, encoded, visible=seen)
        last = f"{at}.layer.{2 if stack == 'decoder' else 1}"
        x[stack] = y + feed_forward(f"{last}.DenseReluDense", norm(f"{last}.layer_norm", y))
    y = norm("decoder.final_layer_norm", x["decoder"])
    if config.tie_word_embeddings:
        return jnp.matmul(y * config.d_model**-0.5, weights["shared.weight"].T, precision="highest")
    return linear("lm_head", y)


class T5(nn.Module):
    """The port; NVIDIA's options suffice where num_heads * d_kv is d_model, else kv_channels, which is ours."""

    config: Config

    @nn.compact
    def __call__(self, ids, attention_mask, targets):
        c = self.config
        shared = nn.Embed(c.vocab_size, c.d_model, name="shared")
        hidden = ~attention_mask[:, None, None, :]
        encoded = self._stack("encoder", shared(ids), attention_mask=hidden)
        y = self._stack("decoder", shared(targets), encoded=encoded, encoder_decoder_mask=hidden)
        if c.tie_word_embeddings:
            return shared.attend(y * c.d_model**-0.5)
        return te_flax.DenseGeneral(c.vocab_size, use_bias=False, name="head")(y)

    def _stack(self, name: str, x, **call):
        c, encoder = self.config, name == "encoder"
        biases = te_flax.RelativePositionBiases(BUCKETS, MAX_DISTANCE, c.num_heads, name=f"{name}_biases")
        for i in range(c.num_layers):
            x = te_flax.TransformerLayer(
                hidden_size=c.d_model,
                mlp_hidden_size=c.d_ff,
                num_attention_heads=c.num_heads,
                kv_channels=c.d_kv,
                layernorm_type="rmsnorm",
                layernorm_epsilon=c.layer_norm_epsilon,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                mlp_activations=("gelu", "linear") if c.gated else ("relu",),
                layer_type=te_flax.TransformerLayerType.ENCODER if encoder else te_flax.TransformerLayerType.DECODER,
                self_attn_mask_type="padding" if encoder else "causal",
                relative_embedding=biases,
                name=f"{name}_{i}",
            )(x, **call)
        return te_flax.RMSNorm(epsilon=c.layer_norm_epsilon, name=f"{name}_norm")(x)


def convert(config: Config, weights):
    dense, stacked, norm = (partial(f, weights) for f in (published.dense, published.stacked, published.norm))

    def layer(stack: str, at: str):
        own, cross = f"{at}.layer.0", f"{at}.layer.1"
        self_attention = {
            "qkv": {**norm(f"{own}.layer_norm"), **stacked(*(f"{own}.SelfAttention.{t}" for t in "qkv"))},
            "out": dense(f"{own}.SelfAttention.o"),
        }
        last = cross if stack == "encoder" else f"{at}.layer.2"
        mlp = published.mlp(
            weights,
            first=tuple(f"{last}.DenseReluDense.{t}" for t in first_of(config)),
            second=f"{last}.DenseReluDense.wo",
            normed=f"{last}.layer_norm",
        )
        if stack == "encoder":
            return {"attention": self_attention, "mlp": mlp}
        cross_attention = {
            "query": {**norm(f"{cross}.layer_norm"), **dense(f"{cross}.EncDecAttention.q")},
            "kv": stacked(f"{cross}.EncDecAttention.k", f"{cross}.EncDecAttention.v"),
            "out": dense(f"{cross}.EncDecAttention.o"),
        }
        return {"self_attention": self_attention, "encoder_decoder_attention": cross_attention, "mlp": mlp}

    params = {"shared": {"embedding": weights["shared.weight"]}}
    params |= {at.replace(".block.", "_"): layer(stack, at) for stack, at in blocks(config)}
    for stack in ("encoder", "decoder"):
        table = weights[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        params |= {f"{stack}_biases": {"rel_embedding": table.T}, f"{stack}_norm": norm(f"{stack}.final_layer_norm")}
    return params if config.tie_word_embeddings else {**params, "head": dense("lm_head")}


@pytest.mark.parametrize("config", [V1_0, V1_1], ids=["1.0", "1.1"])
def test_is_the_original(config):
    model, weights = T5(config), checkpoint(config)
    convert_, plain_ = partial(convert, config), partial(plain, config)
    published.assert_same_model(model, convert_, plain_, weights, IDS, ATTENTION_MASK, TARGETS)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_buckets_of_long_rows(stack):
    length = 300
    table = np.arange(BUCKETS, dtype=np.float32)[:, None]
    weights = {f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight": table}
    got = te_flax.RelativePositionBiases(BUCKETS, MAX_DISTANCE, 1).apply(
        {"params": {"rel_embedding": table.T}}, length, length, stack == "encoder"
    )
    np.testing.assert_array_equal(got, position_bias(weights, stack, length))
