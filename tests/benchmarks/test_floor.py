"""What a layer could take at least: what benchmarks/floor.py counts, and of whom it asks."""

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import floor, peers
from benchmarks.shapes import SHAPES, products
from benchmarks.timing import Timing


@pytest.mark.parametrize(
    "config, tflop, gigabytes, of_bf16",
    [("gpt", 19.8, 6.85, 5.2345), ("llama", 21.4, 8.29, 7.080), ("small", 0.618, 0.78, 0.5788)],
)
def test_what_a_floor_counts(config, tflop, gigabytes, of_bf16):
    shape = SHAPES[config]
    assert math.isclose(sum(p.flop for p in products(shape)) / 1e12, tflop, rel_tol=5e-3)
    assert math.isclose(sum(floor.stages(shape, fp8=True).values()) / 1e9, gigabytes, rel_tol=5e-3)
    assert math.isclose(sum(floor.stages(shape, fp8=False).values()) / 1e9, of_bf16, rel_tol=5e-3)
    assert floor.stages(shape, fp8=False).keys() < floor.stages(shape, fp8=True).keys()


def test_parameters_of_16_bits():
    shape = SHAPES["tiny-16bit"]
    x = jax.ShapeDtypeStruct((shape.batch, shape.seq, shape.hidden), jnp.bfloat16)
    for name in ("flax", "te-bf16", "te-delayed"):
        layer, context = peers.CONTENDERS[name](shape)
        with context():
            params = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
        assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}, name
    assert {p.dtype for p in products(shape)} == {"bfloat16"}
    assert floor.stages(shape, fp8=False)["weights"] == 0, "nothing to convert"
    assert floor.stages(shape, fp8=True)["weights"] == 4 * shape.parameters


@pytest.mark.parametrize("fp8", [True, False])
def test_a_floor_asks_every_contender(monkeypatch, fp8):
    """XLA's choice of algorithm too: a floor of our own products alone would follow our own mistakes."""
    asked = []

    def programs(product, against):
        asked.append(set(against))
        return dict.fromkeys(against, lambda: None), {}

    monkeypatch.setattr(floor.gemm, "programs", programs)
    monkeypatch.setattr(floor.attention, "programs", lambda *_: ({"te": lambda: None}, {}))
    monkeypatch.setattr(floor, "interleaved", lambda programs, **_: dict.fromkeys(programs, Timing(1.0, 0.0)))
    for least in floor.Machine((64, 64), turn=0.2).floors(SHAPES["tiny"], fp8).values():
        assert (least.gemms, least.attention) == (12.0, 1.0)
        copied = 2 * 2 * 64 * 64  # bytes that a copy moves in 1 ms here, as all takes
        assert math.isclose(least.bytes, sum(floor.stages(SHAPES["tiny"], fp8).values()) / copied)
    kind = "fp8" if fp8 else "bf16"
    assert asked == 12 * [{name for name in floor.gemm.CONTENDERS if name.startswith(kind)}]
    assert all(f"{kind}-xla" in names for names in asked)


def test_a_floor_of_nothing_says_so(monkeypatch):
    monkeypatch.setattr(floor, "interleaved", lambda programs, **_: dict.fromkeys(programs, Timing(1.0, 0.0)))
    monkeypatch.setattr(floor.gemm, "programs", lambda *_: ({}, {"bf16-xla": "out of memory"}))
    with pytest.raises(RuntimeError, match="floor: nothing that it needs ran: .*out of memory"):
        floor.Machine((64, 64)).floors(SHAPES["tiny"], fp8=False)


def test_turns_that_are_no_longer_have_no_floor_of_their_own(monkeypatch):
    monkeypatch.setattr(floor, "interleaved", lambda programs, **_: dict.fromkeys(programs, Timing(1.0, 0.0)))
    monkeypatch.setattr(floor.gemm, "programs", lambda *_: ({"bf16-xla": lambda: None}, {}))
    monkeypatch.setattr(floor.attention, "programs", lambda *_: ({"te": lambda: None}, {}))
    assert floor.Machine((64, 64), turn=floor.TURN).floors(SHAPES["tiny"], fp8=False).keys() == {"floor"}
