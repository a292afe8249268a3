"""Turns, rounds, calls repeated in one program, and the copy that bandwidth is measured with."""

import time

import jax.numpy as jnp

from benchmarks import kernels
from benchmarks.timing import Repeated, Timing, interleaved
from transformer_engine_jax.ops.quantize import quantize


def test_a_turn_is_as_long_as_asked():
    counts = {"slow": 0, "quick": 0}

    def waits(name, seconds):
        def call():
            counts[name] += 1
            time.sleep(seconds)

        return call

    timings = interleaved({"slow": waits("slow", 0.01), "quick": waits("quick", 0.005)}, rounds=2, turn=0.1)
    # 0.1 s of the quick one in each of 3 rounds, and 3 calls before
    assert 3 + 3 * 5 < counts["slow"] == counts["quick"] <= 3 + 3 * 21
    assert 5 <= timings["quick"].median < timings["slow"].median


def test_rounds_differ_in_order_and_runs_do_not():
    def orders():
        turns = []
        calls = {name: lambda name=name: turns.append(name) for name in "abc"}
        interleaved(calls, rounds=8, calls_per_round=1, turn=0.0)
        rounds = turns[9:]  # 3 calls each are not timed
        return [tuple(rounds[i : i + 3]) for i in range(0, len(rounds), 3)]

    assert len(orders()) == 9 and all(sorted(order) == ["a", "b", "c"] for order in orders())
    assert len(set(orders())) > 3
    assert {order[order.index("b") - 1] for order in orders() if order[0] != "b"} == {"a", "c"}
    assert orders() == orders()


def test_the_first_round_finds_a_cool_gpu_and_does_not_count():
    def slows_down():
        done.append(0.0 if len(done) < 3 + 4 else 0.01)
        time.sleep(done[-1])

    done = []
    assert interleaved({"one": slows_down}, rounds=3, calls_per_round=4, turn=0.0)["one"].median >= 10
    assert len(done) == 3 + 4 * 4


def test_a_repeated_call_is_made_on_each_set_and_returns_a_number_of_each_result():
    sets = [[jnp.full((128, 8), 2.0 * i), jnp.float32(16.0)] for i in range(3)]
    repeated = Repeated(lambda x, scale: (x + 1, quantize(x, scale, dtype=jnp.float8_e4m3fn, q_t=True)), sets)
    code = repeated._compiled.as_text()
    assert code.count('custom_call_target="te_quantize"') == repeated.count == 3
    numbers = [[2 * i + 1, 32 * i, 32 * i, 2 * i] for i in range(3)]  # x + 1, q, its transposed copy, amax
    assert repeated().reshape(3, 4).tolist() == numbers


def test_the_copy_is_made_and_of_each_array():
    copied, size = kernels.copying(8, 16)
    assert size == 2 * 2 * 8 * 16
    for x, y in zip(copied.arrays, copied(), strict=True):
        assert (x == y).all() and x.unsafe_buffer_pointer() != y.unsafe_buffer_pointer()


def test_the_spread_is_that_of_the_middle_half():
    assert Timing.of([1, 2, 3, 4, 5, 6, 7]) == (4, 3 / 4)
