"""JAX's own cuDNN call over the compiler's mesh axes: its rules for shards, with plain JAX in cuDNN's place."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import pytest
from hopper import choose_as_on_hopper
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import transformer_engine_jax as te
from transformer_engine_jax import testing

B, S, H, D = 8, 16, 8, 64
CAUSAL = cudnn.MaskType.CAUSAL
BOUND = 2.0**-7  # bf16, of gradients that are summed over repeated heads


def scores_of(q, k, bias, scale, variadic_args, mask_type):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q.astype(jnp.float32), k.astype(jnp.float32)) * scale
    scores = scores + bias.astype(jnp.float32) if variadic_args[0] else scores
    return jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -1e30) if mask_type == CAUSAL else scores


def repeated(q, *arrays):
    return [jnp.repeat(x, q.shape[2] // x.shape[2], axis=2).astype(jnp.float32) for x in arrays]


def attend(q, k, v, bias, *_, is_training=True, scale, variadic_args, mask_type, **__):
    k, v = repeated(q, k, v)
    scores = scores_of(q, k, bias, scale, variadic_args, mask_type)
    logs = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - logs[..., None]), v).astype(q.dtype)
    return [out, logs] if is_training else [out]


def gradients(q, k, v, bias, *others, scale, variadic_args, mask_type, **_):
    """Of the logarithms of sums and the output that are given, which need not be those of these keys alone."""
    *_, logs, out, dout = others
    along = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)

    def weighted(q, k, v, bias):
        k, v = repeated(q, k, v)
        weights = jnp.exp(scores_of(q, k, bias, scale, variadic_args, mask_type) - logs[..., None])
        dscores = weights * (jnp.einsum("bqhd,bkhd->bhqk", dout.astype(jnp.float32), v) - along.mT[..., None])
        constants = jax.lax.stop_gradient((weights, dscores))
        values = jnp.einsum("bhqk,bkhd,bqhd->", constants[0], v, dout.astype(jnp.float32))
        return values + jnp.sum(scores_of(q, k, bias, scale, variadic_args, mask_type) * constants[1])

    dq, dk, dv, dbias = jax.grad(weighted, argnums=(0, 1, 2, 3))(q, k, v, bias)
    return [dq, dk, dv, *([dbias] if variadic_args[1] else [])]


def in_cudnns_place(monkeypatch):
    choose_as_on_hopper(monkeypatch)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91900)
    forward, backward = cudnn._dot_product_attention_fwd_p, cudnn._dot_product_attention_bwd_p
    for primitive, run in ((forward, attend), (backward, gradients)):
        mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True), platform="cpu")


HEADS, EXAMPLES = P("data", None, "model"), P("data")
MASK = jnp.zeros((B, 1, S, S), bool).at[:, :, :, 3].set(True)
CASES = {
    "one group": (1, EXAMPLES, dict(causal=True), {}),
    "fewer groups than devices": (2, EXAMPLES, dict(causal=True), {}),
    "groups over devices": (4, HEADS, dict(causal=True), {}),
    "a bias": (2, EXAMPLES, {}, dict(bias=jnp.full((1, H, S, S), 0.1))),
    "a mask, keys placed otherwise": (8, EXAMPLES, {}, dict(mask=MASK)),
    "one more logit": (2, EXAMPLES, dict(causal=True, softmax_type="learnable"), dict(softmax_offset=jnp.zeros(H))),
}


@pytest.mark.parametrize("groups, of_keys, options, given", CASES.values(), ids=CASES)
def test_query_heads_over_more_devices_than_groups(monkeypatch, groups, of_keys, options, given):
    shapes = (B, S, H, D), (B, S, groups, D), (B, S, groups, D), (B, S, H, D)
    *three, dy = (jnp.asarray(x, jnp.bfloat16) for x in emulated.normal(3, *shapes))
    run = partial(te.dot_product_attention, options=te.Attention(0.25, **options), **given)

    def step(q, k, v, dy):
        out, vjp = jax.vjp(run, q, k, v)
        return out, *vjp(dy)

    mesh = testing.mesh_of((2, 4), ("data", "model"))
    with jax.default_device(mesh.devices.flat[0]):
        expected = jax.device_get(jax.jit(step)(*three, dy))
    in_cudnns_place(monkeypatch)
    resource = te.MeshResource(dp_resource="data", tp_resource="model")
    with testing.on_mesh(mesh), te.autocast(mesh_resource=resource):
        placed = testing.shard(mesh, [*three, dy], [HEADS, of_keys, of_keys, HEADS])
        got = jax.device_get(jax.jit(step)(*placed))
    testing.assert_close(got, expected, BOUND)
