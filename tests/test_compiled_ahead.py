"""What a program is told of its products when it is compiled, and what is measured then, kept, and left out."""

import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from transformer_engine_jax.ops.gemm import gemm
from transformer_engine_jax.ops.quantize import E4M3
from transformer_engine_jax.primitive import _described


def product(a, b):
    return gemm(a, b, None, None, None, None, None, dtype=jnp.bfloat16).d


A, B = jnp.ones((256, 128), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16)


def test_a_call_for_cuda_describes_its_buffers():
    text = jax.jit(product).trace(A, B).lower(lowering_platforms=("cuda",)).as_text()
    numbers = text.split("buffers = dense<[")[1].split("]")[0]
    numbers = [int(n) for n in numbers.split(", ")]
    shapes = []
    while numbers:
        dtype, rank, *numbers = numbers
        shapes.append((dtype, *numbers[:rank]))
        numbers = numbers[rank:]
    bf16, f32, u8 = 16, 11, 6
    absent = (f32, 0)
    assert shapes[:-1] == [(bf16, 256, 128), (bf16, 64, 128), *5 * [absent], (bf16, 256, 64), absent]
    assert shapes[-1][0] == u8 and shapes[-1][1] > 32 << 20


def test_a_call_elsewhere_does_not():
    assert "buffers" not in jax.jit(product).trace(A, B).lower(lowering_platforms=("cpu",)).as_text()


def test_sizes_that_are_not_known_are_not_described():
    (m,) = jax.export.symbolic_shape("m")
    assert not len(_described([A, jax.ShapeDtypeStruct((m, 128), jnp.bfloat16)]))
    a = jax.ShapeDtypeStruct((m, 128), jnp.bfloat16)
    checks = [jax.export.DisabledSafetyCheck.custom_call("te_gemm")]
    exported = jax.export.export(jax.jit(product), platforms=("cuda",), disabled_checks=checks)(a, B)
    assert "@te_gemm" in exported.mlir_module()


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.uint32, jnp.float16, jnp.float32, jnp.bfloat16, E4M3])
def test_every_dtype_has_a_number(dtype):
    assert _described([jax.ShapeDtypeStruct((3,), dtype)]).tolist()[1:] == [1, 3]


PROGRAM = """
import hashlib, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
import transformer_engine_jax as te
from transformer_engine_jax import recipe

x = jax.random.normal(jax.random.key(0), (512, 256), jnp.bfloat16)
kernel = jax.random.normal(jax.random.key(1), (256, 512), jnp.float32) / 16
q = jax.random.normal(jax.random.key(2), (2, 512, 4, 64), jnp.bfloat16)
fp8 = recipe.DelayedScaling(fp8_dpa=True)

def loss(x, kernel, q):
    quantizers = te.gemm_quantizers(te.GemmState.create(fp8), fp8)
    y = te.dense(x, kernel, quantizers=quantizers)
    options = te.Attention(0.125, causal=True, dropout=0.1)
    dropped = te.dot_product_attention(q, q, q, options=options, dropout_key=jax.random.key(3))
    quantizers = te.attention_quantizers(te.AttentionState.create(fp8), fp8)
    o = te.dot_product_attention(q, q, q, options=options._replace(dropout=0.0), quantizers=quantizers)
    return sum(jnp.sum(jnp.sin(z.astype(jnp.float32))) for z in (y, o, dropped))

def kept():
    return sum(len(path.read_text().splitlines()) for path in pathlib.Path(sys.argv[1]).glob("*"))

compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, kernel, q).compile()
before = kept()
grads = compiled(x, kernel, q)
digest = hashlib.sha256(b"".join(np.asarray(g).tobytes() for g in grads)).hexdigest()
print("RESULT", before, kept(), digest)
"""


def run(folder: pathlib.Path, **environment) -> tuple[int, int, str]:
    """(products kept on disk after compiling, after a step, the step's bits) of PROGRAM in a process of its own."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env=os.environ | {"TE_GEMM_TUNING": "1", "XLA_FLAGS": "", "TE_CACHE_DIR": str(folder)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, after, digest = done.stdout.split("RESULT ")[1].split()
    return int(before), int(after), digest


if jax.default_backend() == "gpu":  # elsewhere there is nothing to choose

    def test_algorithms_are_measured_when_compiled_and_kept(tmp_path):
        assert run(tmp_path)[:2] == (3, 3), "forward, and the gradients of x and kernel; none in the step"
        assert run(tmp_path)[:2] == (3, 3), "nothing is measured again"

    def test_processes_that_start_together_measure_each_product_once(tmp_path):
        with ThreadPoolExecutor(3) as pool:
            assert max(after for _, after, _ in pool.map(run, 3 * [tmp_path])) == 3

    def test_a_line_that_is_cut_short_costs_one_measurement(tmp_path):
        run(tmp_path)
        (path,) = (path for path in tmp_path.iterdir() if path.suffix != ".lock")
        path.write_text(path.read_text()[:-5])
        again = [run(tmp_path)[:2] for _ in range(2)]
        assert again == [(4, 4), (4, 4)], "two whole lines, what is left of one, and that one anew"

    def test_nothing_is_measured_where_tuning_is_off(tmp_path):
        assert run(tmp_path, TE_GEMM_TUNING="0")[:2] == (0, 0)

    def test_the_same_bits_in_every_run(tmp_path):
        flags = "--xla_gpu_deterministic_ops=true"
        runs = [run(tmp_path / str(i), XLA_FLAGS=flags) for i in range(3)]
        assert runs[0][:2] == (0, 0), "the first algorithm, unmeasured"
        assert len({digest for *_, digest in runs}) == 1
