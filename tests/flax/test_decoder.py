"""TransformerLayer with layer_type=DECODER: against its stages written out; parameters, dropout, packing, scopes."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from emulated import F32
from plain import plain_layer
from steps import CURRENT

from transformer_engine_jax import testing
from transformer_engine_jax.flax import SequenceDescriptor, TransformerLayer, TransformerLayerType

B, S, SOURCE, HIDDEN, HEADS, INNER = 4, 12, 10, 32, 4, 48
X, ENCODED = (jnp.asarray(a) for a in emulated.normal(3, (B, S, HIDDEN), (B, SOURCE, HIDDEN)))
LENGTHS = np.array([SOURCE, 7, 5, 1])
MASK = jnp.asarray(np.arange(SOURCE)[None, None, None, :] >= LENGTHS[:, None, None, None])

Layer = partial(
    TransformerLayer,
    hidden_size=HIDDEN,
    mlp_hidden_size=INNER,
    num_attention_heads=HEADS,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    layer_type=TransformerLayerType.DECODER,
)

CASES = {
    "T5": (dict(layernorm_type="rmsnorm", mlp_activations=("relu",)), dict(activations=("relu",))),
    "post-norm": (
        dict(output_layernorm=True, apply_residual_connection_post_layernorm=True, enable_relative_embedding=False),
        dict(post_residual=True, relpos=False),
    ),
    "GQA, unfused, RoPE": (
        dict(num_gqa_groups=2, fuse_qkv_params=False, enable_rotary_pos_emb=True, scale_attn_logits=True,
             rotary_pos_emb_group_method="alternate", zero_centered_gamma=True),
        dict(groups=2, rope="alternate", scale=HIDDEN**-0.5 * 2, zero_centered=True),
    ),
    "window of the self-attention alone": (dict(window_size=(2, 0)), dict(window=(2, 0))),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_is_its_stages(case):
    fields, options = CASES[case]
    layer = Layer(**fields)
    variables = steps.randomized(steps.init(layer, X, ENCODED))
    got = steps.step(lambda v, x, y: layer.apply(v, x, y, None, MASK), variables, X, ENCODED)
    plain = partial(plain_layer, causal=True, cross_mask=MASK, **options)
    testing.assert_close(got, steps.step(plain, variables, X, ENCODED), 5 * F32)


def test_without_a_mask_all_of_the_source_is_seen():
    layer = Layer(use_bias=True)
    variables = steps.randomized(steps.init(layer, X, ENCODED))
    expected = jax.jit(partial(plain_layer, causal=True))(variables, X, ENCODED)
    testing.assert_close(jax.jit(layer.apply)(variables, X, ENCODED), expected, 5 * F32)


def test_descriptors_are_masks():
    layer = Layer(self_attn_mask_type="padding_causal", enable_relative_embedding=False)
    own = np.array([S, S, 5, 1])
    mask = jnp.asarray(np.arange(S)[None, None, None, :] >= own[:, None, None, None])
    variables = steps.randomized(steps.init(layer, X, ENCODED, attention_mask=mask))
    expected = jax.jit(layer.apply)(variables, X, ENCODED, mask, MASK)
    descriptors = dict(
        sequence_descriptor=SequenceDescriptor.from_seqlens(jnp.asarray(own)),
        encoder_decoder_sequence_descriptor=SequenceDescriptor.from_seqlens((jnp.asarray(own), jnp.asarray(LENGTHS))),
    )
    got = jax.jit(layer.apply)(variables, X, ENCODED, **descriptors)
    for row, n in enumerate(own):
        testing.assert_close(got[row, :n], expected[row, :n], 5 * F32)


def test_transposed_inputs_are_the_same():
    fields = dict(enable_rotary_pos_emb=True, num_gqa_groups=2)
    variables = steps.randomized(steps.init(Layer(**fields), X, ENCODED))
    expected = jax.jit(Layer(**fields).apply)(variables, X, ENCODED, None, MASK)
    x, y = (jnp.swapaxes(t, 0, 1) for t in (X, ENCODED))
    got = jax.jit(Layer(transpose_batch_sequence=True, **fields).apply)(variables, x, y, None, MASK)
    testing.assert_close(jnp.swapaxes(got, 0, 1), expected, 2 * F32)


def test_fp8_is_near():
    layer = Layer(layernorm_type="rmsnorm")
    variables = steps.randomized(steps.init(layer, X, ENCODED))
    exact = steps.step(layer.apply, variables, X, ENCODED)
    with steps.autocast(CURRENT):
        got = steps.step(layer.apply, variables, X, ENCODED)
    # As in test_transformer.test_fp8_is_near, with one block more: sqrt(12) * 0.051, and on gradients.
    testing.assert_close(got[0], exact[0], 0.12, "y")
    assert testing.relative_error(got[1], exact[1]) < 0.25


def test_parameters():
    shapes = jax.eval_shape(partial(Layer(output_layernorm=True).init, jax.random.key(0)), X, ENCODED)
    found = set(steps.layout(shapes))
    # The cross-attention keeps its norm where that of the self-attention is moved to the end.
    assert found == {
        "self_attention/qkv/kernel", "self_attention/out/kernel", "encoder_decoder_attention/query/scale",
        "encoder_decoder_attention/query/ln_bias", "encoder_decoder_attention/query/kernel",
        "encoder_decoder_attention/kv/kernel", "encoder_decoder_attention/out/kernel", "mlp/scale", "mlp/ln_bias",
        "mlp/wi_kernel", "mlp/wo_kernel", "relpos_bias/rel_embedding", "output_layernorm/scale",
        "output_layernorm/ln_bias",
    }  # fmt: skip


@pytest.mark.parametrize(
    "scope, adapted",
    [("mlp", {"mlp"}), ("exclude_output_proj", {"self_attention/qkv", "encoder_decoder_attention/query",
                                                "encoder_decoder_attention/kv", "mlp"})],
)  # fmt: skip
def test_low_rank_adaptation_scopes(scope, adapted):
    shapes = jax.eval_shape(partial(Layer(low_rank_adaptation_scope=scope).init, jax.random.key(0)), X, ENCODED)
    assert {path.rsplit("/", 1)[0] for path in steps.layout(shapes) if "lora" in path} == adapted


def test_drop_path_drops_each_branch():
    variables = steps.randomized(steps.init(Layer(), X, ENCODED))
    alone = []
    for kept in ("self_attention", "encoder_decoder_attention"):
        params = jax.tree.map(lambda p: p, variables["params"])
        for name in ("self_attention", "encoder_decoder_attention"):
            if name != kept:
                params[name]["out"]["kernel"] *= 0
        params["mlp"]["wo_kernel"] *= 0
        layer = Layer(drop_path=0.5)
        run = jax.jit(lambda p, key, layer=layer: layer.apply({"params": p}, X, ENCODED, rngs={"dropout": key}))
        exact = Layer().apply({"params": params}, X, ENCODED) - X
        draws = [run(params, jax.random.key(i)) - X for i in range(4)]
        ratio = np.asarray([jnp.sum(d * exact, (1, 2)) / jnp.sum(exact**2, (1, 2)) for d in draws])
        np.testing.assert_allclose(ratio, np.where(ratio > 1, 2.0, 0.0), atol=1e-4)
        alone.append(ratio > 1)
        assert 0 < alone[-1].sum() < alone[-1].size
    assert (alone[0] != alone[1]).any()
