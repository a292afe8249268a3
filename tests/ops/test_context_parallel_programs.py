"""Programs of context parallelism: which calls share one."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import pytest
from emulated import F32

from transformer_engine_jax import testing
from transformer_engine_jax.ops.attention import Attention, ContextParallel, dot_product_attention, shards

QKV = emulated.normal(0, (2, 32, 4, 16), (2, 32, 2, 16), (2, 32, 2, 8))


def test_equal_calls_are_compiled_once():
    parallel = ContextParallel("seq")
    options = Attention(scale=0.25, causal=True)
    compiled = lambda: shards._program.cache_info().misses
    before, results = compiled(), []
    for mesh in (testing.mesh_of((2,), ("seq",)), testing.mesh_of((2, 2), ("data", "seq"))):
        with testing.on_mesh(mesh):
            run = lambda: dot_product_attention(*QKV, options=options, context_parallel=parallel)
            results += [jax.device_get(run()), jax.device_get(run())]
    assert compiled() == before + 2
    testing.assert_close(results[1:], results[:1] * 3, F32)


@pytest.mark.parametrize("strategy", ["ALL_GATHER", "RING"])
def test_a_score_mod_is_read_in_each_call(strategy):
    """Not what it was when an equal call was compiled: an nnx.Module is one and the same with other parameters."""

    class Slope:
        def __init__(self, slope):
            self.slope = slope

        def __call__(self, scores, q, k):
            return scores + self.slope * (k - q)

    score_mod, parallel = Slope(jnp.float32(0.1)), ContextParallel("seq", strategy)
    run = partial(dot_product_attention, *QKV, options=Attention(0.25, score_mod=score_mod))
    with testing.on_mesh(testing.mesh_of((2,), ("seq",))):
        for slope in (0.1, -0.3):
            score_mod.slope = jnp.float32(slope)
            testing.assert_close(run(context_parallel=parallel), run(), F32)
