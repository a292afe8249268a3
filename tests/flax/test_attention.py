"""MultiHeadAttention against plain forms of it."""

from functools import partial

import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from emulated import BF16, F32, FLIP
from plain import plain_mha
from steps import CURRENT, DELAYED

from transformer_engine_jax import testing
from transformer_engine_jax.flax import (
    STATE_COLLECTION,
    MultiHeadAttention,
    SequenceDescriptor,
    TransformerLayer,
)

B, S, H, D = 2, 16, 4, 16
HIDDEN = H * D
(BIAS,) = (jnp.asarray(a) for a in emulated.normal(0, (1, H, S, S)))
X, Y = (jnp.asarray(a) for a in emulated.normal(1, (B, S, HIDDEN), (B, S, HIDDEN)))
PADDING = jnp.asarray(np.arange(S)[None, None, None, :] >= np.array([S, 10])[:, None, None, None])  # True: masked out


MHA = partial(MultiHeadAttention, head_dim=D, num_attention_heads=H)


MHA_CASES = {
    "fused": ({}, dict(causal=True)),
    "with biases, rmsnorm": (
        dict(use_bias=True, layernorm_type="rmsnorm", zero_centered_gamma=True), dict(causal=True, zero_centered=True),
    ),
    "GQA": (dict(num_gqa_groups=2, attn_mask_type="no_mask"), dict(groups=2)),
    "separate kernels, scaled logits": (
        dict(fuse_qkv_params=False, scale_attn_logits=True), dict(scale=0.25, causal=True),
    ),
    "consecutive RoPE": (dict(enable_rotary_pos_emb=True), dict(rope="consecutive", causal=True)),
    "alternate RoPE": (
        dict(enable_rotary_pos_emb=True, rotary_pos_emb_group_method="alternate", num_gqa_groups=1),
        dict(rope="alternate", groups=1, causal=True),
    ),
    "odd head size": (dict(head_dim=7, use_bias=True, scale_attn_logits=True), dict(causal=True, scale=7**-0.5)),
    "no norm": (dict(input_layernorm=False, window_size=(4, 0)), dict(causal=True, window=(4, 0))),
}  # fmt: skip


@pytest.mark.parametrize("case", MHA_CASES)
def test_self_attention_is_its_stages(case):
    fields, options = MHA_CASES[case]
    module = MHA(return_layernorm_output=True, **fields)
    variables = steps.randomized(steps.init(module, X))
    got = steps.step(lambda v, x: module.apply(v, x, x), variables, X)
    testing.assert_close(got, steps.step(partial(plain_mha, **options), variables, X), 2 * F32)


# --- Norms of queries and keys, given RoPE, packed sequences ---------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm", "l2norm"])
def test_norms_of_queries_and_keys(kind, before):
    fields = dict(qk_norm_epsilon=1e-3, qk_norm_before_rope=before, num_gqa_groups=2, enable_rotary_pos_emb=True)
    module = MHA(qk_norm_type=kind, scale_attn_logits=True, zero_centered_gamma=True, **fields)
    variables = steps.randomized(steps.init(module, X))
    found = {name: set(p) for name, p in variables["params"].items() if name.endswith("_norm")}
    weights = {"rmsnorm": {"scale"}, "layernorm": {"scale", "ln_bias"}}
    assert found == ({} if kind == "l2norm" else dict.fromkeys(("query_norm", "key_norm"), weights[kind]))

    def plain(v, x):
        def normed(name, x):
            if kind == "l2norm":
                return x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-3)
            p = v["params"][name]
            return emulated.norm(x, p["scale"], p.get("ln_bias"), epsilon=1e-3, zero_centered_gamma=True)

        where = {"before_rope" if before else "after_rope": normed}
        return plain_mha(v, x, groups=2, rope="consecutive", causal=True, scale=0.25, zero_centered=True, **where)[0]

    got, expected = (steps.step(f, variables, X) for f in (lambda v, x: module.apply(v, x)[0], plain))
    if kind == "layernorm" and not before:  # shifts all logits of a query alike: its exact gradient is 0
        for _, (grads, _) in (got, expected):
            grads["params"]["key_norm"].pop("ln_bias")
    testing.assert_close(got, expected, 5 * F32)


@pytest.mark.parametrize("group", ["consecutive", "alternate"])
def test_given_rope(group):
    module = MHA(rotary_pos_emb_group_method=group)
    variables = steps.randomized(steps.init(module, X))
    frequencies = np.random.default_rng(0).uniform(0, 1, D // 2 - 2).astype(np.float32)  # the last 4 features stay
    angle = np.arange(S + 2)[:, None] * frequencies
    plain = partial(plain_mha, rope=group, angle=angle[:S], causal=True)
    expected = steps.step(lambda v, x: plain(v, x)[0], variables, X)
    table = jnp.asarray(angle, jnp.float32)
    for given in (jnp.asarray(frequencies), table, (jnp.asarray(frequencies), table)):
        got = steps.step(lambda v, x, given=given: module.apply(v, x, rotary_pos_emb=given)[0], variables, X)
        testing.assert_close(got, expected, 5 * F32)
    # In place of the fields' own, and with a gradient.
    enabled = MHA(rotary_pos_emb_group_method=group, enable_rotary_pos_emb=True)
    run = lambda given: steps.loss(enabled.apply(variables, X, rotary_pos_emb=given)[0])
    got, slope = jax.jit(jax.value_and_grad(run))(table)
    testing.assert_close(got, steps.loss(expected[0]), 1e-4)
    assert np.asarray(slope[:S]).any(axis=1)[1:].all() and not np.asarray(slope[S:]).any()


def test_packed_sequences_are_sequences_of_their_own():
    module = MHA(attn_mask_type="padding_causal", enable_rotary_pos_emb=True, num_gqa_groups=2)
    variables = steps.randomized(steps.init(module, X, X, jnp.zeros((B, 1, 1, S), bool)))
    packed = SequenceDescriptor.from_seqlens(jnp.asarray([[7, 1, 4], [0, 16, -1]]))
    run = lambda v, x, d: module.apply(v, x, sequence_descriptor=d)[0]
    got = steps.step(lambda v, x: run(v, x, packed), variables, X)
    plain = lambda v, x: plain_mha(v, x, groups=2, rope="consecutive", causal=True)[0]

    def apart(v, x):
        parts = [plain(v, x[:1, :7]), plain(v, x[:1, 7:8]), plain(v, x[:1, 8:12]), jnp.zeros_like(x[:1, 12:])]
        return jnp.concatenate([jnp.concatenate(parts, axis=1), plain(v, x[1:])])

    testing.assert_close(got, steps.step(apart, variables, X), 5 * F32)
    # Positions that the descriptor gives are RoPE's.
    spread = SequenceDescriptor.from_segment_ids_and_pos(jnp.ones((B, S), int), jnp.tile(3 * jnp.arange(S), (B, 1)))
    angle = 3 * np.arange(S)[:, None] / 10000 ** (np.arange(0, D, 2) / D)
    expected = plain_mha(variables, X, groups=2, rope="consecutive", angle=angle, causal=True)[0]
    testing.assert_close(jax.jit(run)(variables, X, spread), expected, 5 * F32)


def test_a_descriptor_that_the_mask_type_ignores_moves_no_token():
    module = MHA(enable_rotary_pos_emb=True)
    variables = steps.randomized(steps.init(module, X))
    spread = SequenceDescriptor.from_segment_ids_and_pos(jnp.ones((B, S), int), jnp.tile(3 * jnp.arange(S), (B, 1)))
    with pytest.warns(UserWarning, match="sequence_descriptor= is ignored"):
        got = module.apply(variables, X, sequence_descriptor=spread)[0]
    testing.assert_same_bytes(got, module.apply(variables, X)[0])


def test_checkpointed_attention_keeps_nothing_of_it():
    kept = []
    for checkpoint in (False, True):
        module = MHA(checkpoint_core_attention=checkpoint, use_bias=True)
        variables = steps.randomized(steps.init(module, X))
        run = lambda v, x, b, module=module: module.apply(v, x, bias=b)[0]
        _, backward = jax.vjp(run, variables, X, BIAS)
        squares = [a for a in jax.tree.leaves(backward) if a.shape[-2:] == (S, S) and a.shape[:2] == (B, H)]
        kept.append((bool(squares), steps.step(run, variables, X, BIAS)))
    assert [squares for squares, _ in kept] == [True, False]
    testing.assert_close(kept[1][1][0], kept[0][1][0], F32)
    grads = [[g["params"]["qkv"]["kernel"], dx, dbias] for _, (_, (g, dx, dbias)) in kept]
    testing.assert_close(grads[1], grads[0], 5 * F32)


@pytest.mark.parametrize("fused", [True, False])
def test_cross_attention_projects_the_other_input(fused):
    module = MHA(fuse_qkv_params=fused, attn_mask_type="padding", return_layernorm_output=True)
    source = Y[:, :10]
    mask = jnp.broadcast_to(PADDING[..., 5:15], (B, 1, S, 10))
    variables = steps.randomized(steps.init(module, X, source, mask))
    assert set(variables["params"]) == ({"query", "kv", "out"} if fused else {"query", "key", "value", "out"})
    got = steps.step(lambda v, x, source: module.apply(v, x, source, mask), variables, X, source)
    testing.assert_close(got, steps.step(partial(plain_mha, mask=mask), variables, X, source), 2 * F32)


@pytest.mark.parametrize("rec", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_fp8_is_the_emulated_one(rec):
    module = MHA(use_bias=True)
    run = lambda v, x: module.apply(v, x, x)[0]
    variables = steps.randomized(steps.init(module, X, rec=rec))
    roundings = {name: emulated.roundings(rec) for name in ("qkv", "out")} if not rec.stateful else {}
    with steps.autocast(rec):
        if rec.stateful:
            variables = steps.settle(run, variables, X, steps=4)
            for name, state in variables[STATE_COLLECTION].items():
                scales = [float(one.scale) for one in state["gemm_state"].states().values()]
                roundings[name] = emulated.roundings(rec, scales)
        y, (grads, dx) = steps.step(run, variables, X)
    plain = lambda v, x: plain_mha(v, x, causal=True, roundings=roundings)[0]
    y_, (grads_, dx_) = steps.step(plain, variables, X)

    # The qkv bias reaches the logits only through the query: the key's has no effect, and its gradient is roundings.
    def drop_key_bias(grads):
        qkv = grads["params"]["qkv"]
        return {**grads["params"], "qkv": {**qkv, "bias": qkv["bias"][::2]}}

    got, expected = (y, dx, drop_key_bias(grads)), (y_, dx_, drop_key_bias(grads_))
    testing.assert_close(got, expected, 2 * FLIP)


def test_self_attention_is_told_by_identity_of_any_array():
    numpy = np.asarray(X)
    for args in ((X,), (X, X), (numpy,), (numpy, numpy)):
        assert set(jax.eval_shape(lambda args=args: MHA().init(jax.random.key(0), *args))["params"]) == {"qkv", "out"}


def test_bf16_is_near():
    module = MHA(use_bias=True, layernorm_type="rmsnorm")
    variables = steps.randomized(steps.init(module, X))
    x = X.astype(jnp.bfloat16)
    y, (grads, dx) = steps.step(lambda v, x: module.apply(v, x, x)[0], variables, x)
    y_, (grads_, dx_) = steps.step(lambda v, x: plain_mha(v, x, causal=True)[0], variables, x.astype(jnp.float32))
    assert (y.dtype, dx.dtype, grads["params"]["qkv"]["kernel"].dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    testing.assert_close(
        (y, dx, grads["params"]["qkv"]["kernel"]), (y_, dx_, grads_["params"]["qkv"]["kernel"]), 8 * BF16
    )


def test_transposed_inputs_are_the_same():
    fields = dict(enable_rotary_pos_emb=True, num_gqa_groups=2, return_layernorm_output=True)
    variables = steps.randomized(steps.init(MHA(**fields), X))
    expected = jax.jit(MHA(**fields).apply)(variables, X)
    turn = jnp.swapaxes(X, 0, 1)
    got = jax.jit(MHA(transpose_batch_sequence=True, **fields).apply)(variables, turn)
    testing.assert_close(jax.tree.map(lambda t: jnp.swapaxes(t, 0, 1), got), expected, F32)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("layout", ["qkv", "kv", "separate"])
def test_initial_variance_of_each_projection(layout, scaled):
    groups = H if layout == "qkv" else 2
    module = MHA(fuse_qkv_params=layout != "separate", num_gqa_groups=groups, scaled_query_init=scaled)
    params = steps.init(module, X)["params"]
    if layout == "qkv":
        q, k, v = (params["qkv"]["kernel"][:, i] for i in range(3))
    elif layout == "kv":
        q, k, v = params["query"]["kernel"], *(params["kv"]["kernel"][:, i] for i in range(2))
    else:
        q, k, v = (params[n]["kernel"] for n in ("query", "key", "value"))
    # Variances estimated from 2048 numbers or more are off by sqrt(2 / 2048) = 3 %; four times that.
    assert abs(float(q.var()) * HIDDEN * (D if scaled else 1) - 1) < 0.13
    assert abs(float(k.var()) * HIDDEN - 1) < 0.13 and abs(float(v.var()) * HIDDEN - 1) < 0.13
    assert abs(float(params["out"]["kernel"].var()) * HIDDEN - 1) < 0.13


@pytest.mark.parametrize("fields", [dict(), dict(num_gqa_groups=2), dict(fuse_qkv_params=False)])
def test_initial_values_do_not_depend_on_how_they_are_used(fields):
    first, *others = (
        nn.unbox(MHA(**fields, **special).init(jax.random.key(0), jnp.ones((2, S, HIDDEN)))["params"])
        for special in (dict(), dict(enable_sequence_parallel=True), dict(return_layernorm_output=True))
    )
    for other in others:
        testing.assert_same_bytes(other, first)


def test_scaled_logits_leave_the_query_kernel_alone():
    params = steps.init(MHA(scale_attn_logits=True), X)["params"]
    assert abs(float(params["qkv"]["kernel"][:, 0].var()) * HIDDEN - 1) < 0.13


NORM = {"scale": ((64,), "float32", ("embed",)), "ln_bias": ((64,), "float32", ("embed",))}
OUT = {"out/kernel": ((64, 64), "float32", ("heads", "embed"))}


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, {
            "qkv/scale": NORM["scale"], "qkv/ln_bias": NORM["ln_bias"],
            "qkv/kernel": ((64, 3, 64), "float32", ("embed", "qkv", "heads")), **OUT,
        }),
        ({"num_gqa_groups": 2, "layernorm_type": "rmsnorm"}, {
            "query/scale": NORM["scale"], "query/kernel": ((64, 64), "float32", ("embed", "heads")),
            "kv/kernel": ((64, 2, 32), "float32", ("embed", "qkv", "heads")), **OUT,
        }),
        ({"fuse_qkv_params": False, "input_layernorm": False, "use_bias": True, "num_gqa_groups": 2}, {
            "query/kernel": ((64, 64), "float32", ("embed", "heads")), "query/bias": ((64,), "float32", ("heads",)),
            "key/kernel": ((64, 32), "float32", ("embed", "heads")), "key/bias": ((32,), "float32", ("heads",)),
            "value/kernel": ((64, 32), "float32", ("embed", "heads")), "value/bias": ((32,), "float32", ("heads",)),
            **OUT, "out/bias": ((64,), "float32", ("embed",)),
        }),
        ({"use_bias": True, "input_layernorm": False, "dtype": jnp.bfloat16}, {
            "qkv/kernel": ((64, 3, 64), "bfloat16", ("embed", "qkv", "heads")),
            "qkv/bias": ((3, 64), "bfloat16", ("qkv", "heads")),
            "out/kernel": ((64, 64), "bfloat16", ("heads", "embed")), "out/bias": ((64,), "bfloat16", ("embed",)),
        }),
    ],
)  # fmt: skip
def test_parameters(fields, expected):
    shapes = jax.eval_shape(partial(MHA(**fields).init, jax.random.key(0)), X)
    assert steps.layout(shapes) == expected


@pytest.mark.parametrize(
    "scope, adapted",
    [
        ("none", set()), ("all", {"qkv", "out"}), ("qkv_proj", {"qkv"}), ("output_proj", {"out"}), ("mlp", set()),
        ("exclude_qkv_proj", {"out"}), ("exclude_output_proj", {"qkv"}), ("exclude_mlp", {"qkv", "out"}),
    ],
)  # fmt: skip
def test_low_rank_adaptation_scopes(scope, adapted):
    shapes = jax.eval_shape(partial(MHA(low_rank_adaptation_scope=scope).init, jax.random.key(0)), X)
    assert {name for name, p in shapes["params"].items() if "lora_a_kernel" in p} == adapted


@pytest.mark.parametrize(
    "fused, scope, adapted",
    [
        (True, "all", {"query", "kv", "out"}),
        (False, "qkv_proj", {"query", "key", "value"}),
        (False, "exclude_qkv_proj", {"out"}),
    ],
)
def test_low_rank_adaptation_of_cross_attention_is_one_more_kernel(fused, scope, adapted):
    fields = dict(fuse_qkv_params=fused, attn_mask_type="no_mask", num_gqa_groups=2)
    module = MHA(low_rank_adaptation_scope=scope, low_rank_adaptation_dim=4, low_rank_adaptation_alpha=8.0, **fields)
    variables = steps.randomized(steps.init(module, X, Y))
    merged = {name: dict(p) for name, p in variables["params"].items()}
    assert {name for name, p in merged.items() if "lora_a_kernel" in p} == adapted
    for name in adapted:
        a, b = merged[name].pop("lora_a_kernel"), merged[name].pop("lora_b_kernel")
        merged[name]["kernel"] = merged[name]["kernel"] + 2.0 * jnp.einsum("k...r,...rn->k...n", a, b)
    got = jax.jit(module.apply)(variables, X, Y)[0]
    testing.assert_close(got, plain_mha({"params": merged}, X, Y, groups=2)[0], 5 * F32)


def test_checkpoint_names():
    module = MHA()
    variables = steps.init(module, X)
    jaxpr = str(jax.make_jaxpr(module.apply)(variables, X))
    for name in ("combined_qkv_proj", "logits", "context", "out_proj"):
        assert f"name={name}" in jaxpr
    separate = MHA(fuse_qkv_params=False)
    jaxpr = str(jax.make_jaxpr(lambda: separate.init(jax.random.key(0), X))())
    for name in ("query_proj", "key_proj", "value_proj"):
        assert f"name={name}" in jaxpr
    jaxpr = str(jax.make_jaxpr(lambda: module.init(jax.random.key(0), X, Y))())
    for name in ("query_proj", "combined_kv_proj"):
        assert f"name={name}" in jaxpr


def test_one_array_or_two():
    """nn.remat makes two arrays of one: parameters of the other kind of attention are not taken for these."""
    remat = nn.remat(MultiHeadAttention)(D, H)
    alone, twice = steps.init(MHA(), X), remat.init(jax.random.key(0), X, X)
    for module, variables, inputs in ((remat, alone, (X, X)), (MHA(), twice, (X,))):
        with pytest.raises(ValueError, match="inputs_kv: expected what fits parameters of .*leave it out"):
            module.apply(variables, *inputs)
    testing.assert_close(remat.apply(alone, X), MHA().apply(alone, X), F32)


@pytest.mark.filterwarnings("error:shape requires:DeprecationWarning")  # of what Flax cannot show
def test_flax_shows_results_of_modules():
    variables = steps.init(MHA(), X, rec=DELAYED)
    none = dict(hidden_dropout=0.0, attention_dropout=0.0, intermediate_dropout=0.0)
    lora = TransformerLayer(HIDDEN, 32, H, low_rank_adaptation_scope="all", **none)
    with steps.autocast(DELAYED):
        for module in (MHA(), lora):
            assert type(module).__name__ in module.tabulate(jax.random.key(0), X)
            module.tabulate(jax.random.key(0), X, compute_flops=True)  # which calls what modules call, by itself
        _, updates = MHA().apply(variables, X, capture_intermediates=True, mutable=["intermediates"])
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(updates["intermediates"]))
    assert "qkv" not in updates["intermediates"]  # it has no result of its own


@pytest.mark.parametrize("groups", [2, H])
def test_sizes_may_be_numpys(groups):
    fields = dict(head_dim=D, num_attention_heads=H, num_gqa_groups=groups)
    expected = steps.init(MultiHeadAttention(**fields), X)
    got = steps.init(MultiHeadAttention(**{name: np.int64(size) for name, size in fields.items()}), X)
    testing.assert_same_bytes(got, expected)


def test_empty_batches_and_sequences():
    module, variables = MHA(), steps.init(MHA(), X)
    for shape in ((0, S, HIDDEN), (B, 0, HIDDEN)):
        x = jnp.zeros(shape)
        out, (grads, dx) = steps.step(lambda v, x: module.apply(v, x)[0], variables, x)
        assert out.shape == dx.shape == shape and not any(g.any() for g in jax.tree.leaves(grads))
    key, first = jax.random.key(0), lambda module, *inputs: module.init_with_output(key, *inputs)[0][0]
    testing.assert_same_bytes(first(MHA(attn_mask_type="no_mask"), X, X[:, :0]), jnp.zeros_like(X))
    assert first(MHA(low_rank_adaptation_scope="all"), X[:0]).shape == (0, *X.shape[1:])
