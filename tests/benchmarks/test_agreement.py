"""Random modules are compared, and one that differs is told."""

import itertools

import jax
import numpy as np

from benchmarks import agreement

SEED = 3  # a DenseGeneral


def test_a_case_agrees_and_is_the_same_again(tmp_path):
    first, second = (agreement.draw(SEED) for _ in range(2))
    assert first.module == second.module and first.way == second.way
    jax.tree.map(np.testing.assert_array_equal, first.inputs, second.inputs)
    off, _ = agreement.compared(first)
    assert off < agreement.LIMIT


def test_a_wrong_gradient_and_a_nan_are_told(monkeypatch):
    compiled, calls = agreement.compiled, itertools.count()
    case = agreement.draw(SEED)
    path = "[1][0]['params']['kernel']"
    for wrong, least in ((lambda x: 1.1 * x, agreement.LIMIT), (lambda x: x * np.nan, np.inf)):

        def of_second(case, platform, wrong=wrong):
            run = compiled(case, platform)
            odd = next(calls) % 2
            return lambda *operands: {k: wrong(v) if odd and k == path else v for k, v in run(*operands).items()}

        monkeypatch.setattr(agreement, "compiled", of_second)
        off, where = agreement.compared(case)
        assert off >= least and where == path


def test_a_row_says_what_was_compared_and_what_was_raised(monkeypatch):
    def refuses(case):
        raise TypeError("no such thing\nand more")

    monkeypatch.setattr(agreement, "compared", refuses)
    row = next(agreement.rows(type("", (), dict(first_seed=SEED, cases=1))))
    assert row["where"] == "TypeError: no such thing" and "DIFFERS: TypeError" in agreement.line(row)
    assert {"seed": SEED, "module": "DenseGeneral"}.items() <= row.items()
