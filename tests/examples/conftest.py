"""What tests of the examples share."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """20 kB of words: a model that sees context predicts them far better than one that doesn't."""
    words = ["gradient", "scale", "amax", "history", "tensor", "cast"]
    chosen = np.random.default_rng(0).choice(words, size=4000)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(chosen)[:20_000])
    return path
