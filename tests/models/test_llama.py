"""Llama (Touvron et al., 2023) and those that follow it: RMSNorm, SwiGLU, grouped queries, RoPE of halves.

Llama 3.1 stretches the slow rotations, Mistral (Jiang et al., 2023) has a sliding window, Qwen3 (2025) norms of queries
and keys and a head size of its own; Gemma (2024) centres its norms' weights at 0, scales and ties its embeddings.
"""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
from emulated import F32
from flax import nnx

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import recipe, testing

TOKENS = published.tokens(50, 2, 12)


@dataclasses.dataclass(frozen=True)
class Config:
    """The fields of its config.json."""

    model_type: str = "llama"
    vocab_size: int = 50
    hidden_size: int = 32
    intermediate_size: int = 80
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: tuple[float, float, float, int] | None = None  # factor, low_freq_.., high_freq_.., original_max_..
    sliding_window: int | None = None
    tie_word_embeddings: bool = False


LLAMA = Config(rope_theta=500000.0)
CONFIGS = {
    "llama": LLAMA,
    "llama 3.1": Config(rope_scaling=(8.0, 1.0, 4.0, 64), num_hidden_layers=1),
    "mistral": Config("mistral", sliding_window=5, num_hidden_layers=1),
    "qwen3": Config("qwen3", head_dim=12, rope_theta=1e6, num_hidden_layers=1),
    "gemma": Config("gemma", head_dim=16, num_key_value_heads=1, tie_word_embeddings=True, num_hidden_layers=1),
}


def checkpoint(config: Config):
    hidden, inner = config.hidden_size, config.intermediate_size
    width, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.q_proj.weight": (width, hidden), f"{at}.self_attn.o_proj.weight": (hidden, width)}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (kv, hidden) for name in "kv"}
        if config.model_type == "qwen3":
            shapes |= {f"{at}.self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (hidden, inner)}
    shapes |= {"model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes |= {"lm_head.weight": (config.vocab_size, hidden)}
    return published.checkpoint(shapes)


def frequencies(config: Config) -> np.ndarray:
    """Of the rotations; Llama 3.1 slows those down whose wavelength its first context hardly held."""
    base = published.rope_frequencies(config.head_dim, config.rope_theta)
    if config.rope_scaling is None:
        return base
    factor, low, high, length = config.rope_scaling
    turns = length * base / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * base + (1 - kept) * base / factor


def plain(config: Config, weights, ids):
    """The original, in plain JAX."""
    gemma = config.model_type == "gemma"
    linear = partial(published.linear, weights)
    norm = partial(published.rms_norm, weights, epsilon=config.rms_norm_eps, offset=1.0 if gemma else 0.0)
    x = weights["model.embed_tokens.weight"][ids] * (config.hidden_size**0.5 if gemma else 1.0)
    for i in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        normed = norm(f"model.layers.{i}.input_layernorm", x)
        q, k, v = (published.split_heads(linear(f"{attention}.{n}_proj", normed), config.head_dim) for n in "qkv")
        if config.model_type == "qwen3":
            q, k = norm(f"{attention}.q_norm", q), norm(f"{attention}.k_norm", k)
        q, k = (published.rotate_halves(t, frequencies(config)) for t in (q, k))
        visible = published.causal(ids.shape[1], config.sliding_window)
        context = published.attention(q, k, v, scale=config.head_dim**-0.5, visible=visible)
        x = x + linear(f"{attention}.o_proj", published.merge_heads(context))
        normed = norm(f"model.layers.{i}.post_attention_layernorm", x)
        gate = (jax.nn.gelu if gemma else jax.nn.silu)(linear(f"{mlp}.gate_proj", normed))
        x = x + linear(f"{mlp}.down_proj", gate * linear(f"{mlp}.up_proj", normed))
    x = norm("model.norm", x)
    if config.tie_word_embeddings:
        return jnp.matmul(x, weights["model.embed_tokens.weight"].T, precision="highest")
    return linear("lm_head", x)


def layer_fields(config: Config) -> dict:
    """Of a TransformerLayer. NVIDIA's has no kv_channels and qk_norm_*, and its call no rotary_pos_emb."""
    gemma, window = config.model_type == "gemma", config.sliding_window
    return dict(
        hidden_size=config.hidden_size,
        mlp_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_gqa_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        layernorm_type="rmsnorm",
        layernorm_epsilon=config.rms_norm_eps,
        zero_centered_gamma=gemma,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mlp_activations=("gelu" if gemma else "silu", "linear"),
        enable_relative_embedding=False,
        enable_rotary_pos_emb=True,
        rotary_pos_emb_windows=(1, config.rope_theta),
        rotary_pos_emb_group_method="alternate",
        scale_attn_logits=True,
        window_size=None if window is None else (window - 1, 0),
        qk_norm_type="rmsnorm" if config.model_type == "qwen3" else None,
        qk_norm_epsilon=config.rms_norm_eps,
        qk_norm_before_rope=True,
    )


class Llama(nn.Module):
    """The port."""

    config: Config

    @nn.compact
    def __call__(self, ids, decode=False):
        c = self.config
        gemma = c.model_type == "gemma"
        embed = nn.Embed(c.vocab_size, c.hidden_size, name="embed")
        x = embed(ids) * (c.hidden_size**0.5 if gemma else 1.0)
        rotary = None if c.rope_scaling is None else frequencies(c)
        for i in range(c.num_hidden_layers):
            x = te_flax.TransformerLayer(**layer_fields(c), name=f"layer_{i}")(x, decode=decode, rotary_pos_emb=rotary)
        x = te_flax.RMSNorm(epsilon=c.rms_norm_eps, zero_centered_gamma=gemma, name="norm")(x)
        if c.tie_word_embeddings:
            return embed.attend(x)
        return te_flax.DenseGeneral(c.vocab_size, use_bias=False, name="head")(x)


class NnxLlama(nnx.Module):
    """The port for NNX, of Llama itself; its attributes are named as the submodules above."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.layers = range(config.num_hidden_layers)
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        for i in self.layers:
            setattr(self, f"layer_{i}", te_nnx.TransformerLayer(**layer_fields(config), rngs=rngs))
        self.norm = te_nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        self.head = te_nnx.DenseGeneral(config.hidden_size, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        for i in self.layers:
            x = getattr(self, f"layer_{i}")(x)
        return self.head(self.norm(x))


def convert(config: Config, weights):
    dense, stacked, norm = (partial(f, weights) for f in (published.dense, published.stacked, published.norm))

    def layer(at: str):
        attention = {
            "query": {**norm(f"{at}.input_layernorm"), **dense(f"{at}.self_attn.q_proj")},
            "kv": stacked(f"{at}.self_attn.k_proj", f"{at}.self_attn.v_proj"),
            "out": dense(f"{at}.self_attn.o_proj"),
        }
        if config.model_type == "qwen3":
            attention |= {f"{name}_norm": norm(f"{at}.self_attn.{name[0]}_norm") for name in ("query", "key")}
        mlp = published.mlp(
            weights,
            first=(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"),
            second=f"{at}.mlp.down_proj",
            normed=f"{at}.post_attention_layernorm",
        )
        return {"attention": attention, "mlp": mlp}

    params = {
        "embed": {"embedding": weights["model.embed_tokens.weight"]},
        **{f"layer_{i}": layer(f"model.layers.{i}") for i in range(config.num_hidden_layers)},
        "norm": norm("model.norm"),
    }
    return params if config.tie_word_embeddings else {**params, "head": dense("lm_head")}


@pytest.mark.parametrize("name", CONFIGS)
def test_is_the_original(name):
    config = CONFIGS[name]
    weights = checkpoint(config)
    published.assert_same_model(Llama(config), partial(convert, config), partial(plain, config), weights, TOKENS)


def test_nnx_is_the_original():
    weights = checkpoint(LLAMA)
    model = NnxLlama(LLAMA, nnx.Rngs(0))
    te_nnx.from_linen(model, {"params": convert(LLAMA, weights)})
    got = nnx.jit(lambda model: model(TOKENS))(model)
    testing.assert_close(got, jax.jit(partial(plain, LLAMA))(weights, TOKENS), F32)


def test_a_prompt_then_token_by_token():
    config = CONFIGS["mistral"]
    weights = checkpoint(config)
    model, params = Llama(config), convert(config, weights)
    cache = jax.jit(partial(model.init, decode=True))(jax.random.key(0), TOKENS)["cache"]

    @jax.jit
    def step(cache, ids):
        logits, variables = model.apply({"params": params, "cache": cache}, ids, decode=True, mutable=["cache"])
        return variables["cache"], logits

    got = []
    for ids in np.split(TOKENS, range(5, 12), axis=1):
        cache, logits = step(cache, ids)
        got.append(logits)
    testing.assert_close(np.concatenate(got, axis=1), jax.jit(partial(plain, config))(weights, TOKENS), F32)


@pytest.mark.parametrize("rec", [recipe.DelayedScaling(), recipe.Float8CurrentScaling()], ids=["delayed", "current"])
def test_fp8_is_near(rec):
    """Weights from elsewhere, with a new state, whose scales one step settles."""
    weights = checkpoint(LLAMA)
    model, params = Llama(LLAMA), convert(LLAMA, weights)
    with te.fp8_autocast(True, fp8_recipe=rec):
        state = {k: v for k, v in te_flax.init_state(model, {"params": params}, TOKENS).items() if k != "params"}
        run = jax.jit(lambda state: model.apply({"params": params, **state}, TOKENS))
        if rec.stateful:
            state = jax.jit(jax.grad(lambda state: run(state).sum()))(state)
        got = run(state)
    # Nine products in a row of two E4M3 factors each, emulated.fp8_bound's 0.026 * sqrt(2): 0.11 if all errors arrived.
    # Residuals carry much of the signal around them.
    error = testing.relative_error(got, jax.jit(partial(plain, LLAMA))(weights, TOKENS))
    assert 1e-3 < error < 0.11
