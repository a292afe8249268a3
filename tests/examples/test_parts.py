"""The parts of the main job, one by one: its data, options, losses, optimizer, model and checkpoints."""

import os
import re
import signal
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import transformer_engine_jax as te

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gpt import data as gpt_data
from gpt import options as gpt_options
from gpt import report, training
from gpt.checkpoint import Checkpoints, Interruption
from gpt.model import GPT
from gpt.record import Record

# --- Data ------------------------------------------------------------------------------------------------------------


def test_folder_is_split_by_file_and_stays_so(tmp_path):
    for index in range(200):
        (tmp_path / f"{index}.txt").write_text(f"<{index}>" * 5)
    before = gpt_data.load(str(tmp_path), seq=8)
    (tmp_path / "another.txt").write_text("another")
    after = gpt_data.load(str(tmp_path), seq=8)
    names = lambda part: set(re.findall(rb"<\d+>", part.tobytes()))
    assert names(before.train) | names(before.validation) == {b"<%d>" % index for index in range(200)}
    assert not names(before.train) & names(before.validation)
    assert names(before.validation) == names(after.validation)


def test_which_files_of_a_folder_are_read(tmp_path):
    """Not hidden or installed ones; whatever their names; each with a byte at its end."""
    for folder in ("", ".git", "site-packages", "inside"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "text").write_text(f"<{folder}>" * 100)
    (tmp_path / os.fsdecode(b"\xff")).write_text("<named by no text>" * 100)
    (tmp_path / "few").write_text("x")
    data = gpt_data.load(str(tmp_path), seq=8)
    read = data.train.tobytes() + data.validation.tobytes()
    assert set(re.findall(rb"<.*?>", read)) == {b"<>", b"<inside>", b"<named by no text>"}
    assert read.count(b"\0") == 4


def test_default_data_is_the_standard_library():
    data = gpt_data.load(None, seq=128)
    assert min(len(data.train), len(data.validation)) > 100_000
    assert b"import " in data.train.tobytes()


def test_unigram_entropy():
    data = gpt_data.Data(np.frombuffer(b"aabb", np.uint8), np.frombuffer(b"ccdd", np.uint8))
    assert data.unigram_entropy == pytest.approx(np.log(4))


def test_batches_depend_on_seed_and_step_alone(text):
    data = gpt_data.load(str(text), seq=16)
    first = data.train_batch(seed=0, step=1, batch=8, seq=16)
    assert first.shape == (8, 17) and first.dtype == np.uint8
    np.testing.assert_array_equal(first, data.train_batch(seed=0, step=1, batch=8, seq=16))
    assert (first != data.train_batch(seed=0, step=2, batch=8, seq=16)).any()
    assert (first != data.train_batch(seed=1, step=1, batch=8, seq=16)).any()
    windows = np.concatenate(list(data.validation_batches(2, 4, 16)))
    assert windows[0].tobytes() == data.validation[:17].tobytes()
    assert windows[-1].tobytes() == data.validation[-17:].tobytes()


def test_batches_and_fingerprints_are_of_all_that_there_is():
    data = gpt_data.Data(np.arange(20, dtype=np.uint8), np.arange(30, dtype=np.uint8))
    windows = data.train_batch(seed=0, step=1, batch=100, seq=16)
    assert set(windows[:, 0].tolist()) == {0, 1, 2, 3} and windows.max() == 19
    other = gpt_data.Data(data.train, data.validation[::-1].copy())
    assert other.fingerprint != data.fingerprint == gpt_data.Data(data.train, data.validation).fingerprint


# --- Parts -----------------------------------------------------------------------------------------------------------


def test_what_follows_from_other_options():
    options = gpt_options.parse(["--steps", "5000", "--hidden", "96"])
    assert (options.mlp, options.warmup, options.eval_every, options.checkpoint_every) == (384, 200, 1250, 1250)
    assert gpt_options.parse(["--steps", "30"]).warmup == 3


def test_final_losses(tmp_path):
    """The mean of the last twenty, and the latest of validation, were it the worst."""
    with Record("f32", tmp_path / "metrics.jsonl", 0) as record:
        for step in range(1, 41):
            record.train(step, float(step), 1.0)
        record.evaluate(20, 1.0)
        record.evaluate(40, 2.0)
    assert record.train_loss == np.mean(range(21, 41)) and record.validation_loss == 2.0


def test_what_the_report_makes_of_losses(tmp_path, capsys):
    records = []
    for name, loss in (("f32", 2.0), ("delayed", 2.5)):
        with Record(name, tmp_path / name, 0) as record:
            record.train(1, loss, 1.0)
            record.evaluate(1, 2 * loss)
        records.append(record)
    report._print_table(records, 3.0)
    assert capsys.readouterr().out.count("+25.00 %") == 2
    curve = np.arange(300.0) ** 2
    smooth = report._smooth(curve)
    np.testing.assert_allclose(smooth[100], curve[97:104].mean())
    np.testing.assert_allclose(smooth[[0, -1]], [curve[:4].mean(), curve[-4:].mean()])
    with report.progress("f32", 25, 0) as show:
        for step in range(1, 26):
            show(step, 1.0, 1.0)
    assert re.findall(r"step (\d+)/25", capsys.readouterr().out) == [str(n) for n in (*range(2, 25, 2), 25)]


def test_an_update_is_clipped_and_vectors_are_not_decayed():
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    adamw = training.adamw(1.0, 0, 10)
    step = lambda scale: adamw.update(jax.tree.map(lambda p: scale * p, params), adamw.init(params), params)
    updates, _ = step(0.0)
    np.testing.assert_allclose(updates["kernel"], -training.WEIGHT_DECAY, rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"], 0)
    for scale in (1e3, 1e6):
        for squares in jax.tree.leaves(optax.tree.get(step(scale)[1], "nu")):
            np.testing.assert_allclose(squares, (1 - 0.95) / 6, rtol=1e-5)  # of six entries that share a norm of 1
    assert training.adamw(1.0, 1, 1).init(params), "all steps may be warm-up"


def test_logits_are_f32():
    model = GPT(1, 32, 2, 64, jnp.bfloat16)
    tokens = jnp.zeros((1, 4), jnp.int32)
    variables = nn.unbox(model.init(jax.random.key(0), tokens))
    variables["params"]["embedding"] = variables["params"]["embedding"].at[:].set(1 + 2.0**-12)
    logits = model.apply(variables, tokens)
    assert logits.dtype == jnp.float32
    (product,) = [row for row in te.explain(model.apply, variables, tokens).rows if row.results[0].shape[-1] == 256]
    assert {str(b.dtype) for b in product.operands} == {"float32"}


def test_the_second_signal_acts_as_usual():
    seen = []
    handler = signal.signal(signal.SIGTERM, lambda *_: seen.append("usual"))
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGTERM)
            assert interruption.requested and not seen
            signal.raise_signal(signal.SIGTERM)
            assert seen == ["usual"]
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_the_last_two_states_are_kept(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 2, 3):
            checkpoints.save(step, training.TrainState({"params": jnp.ones(step)}, ()))
        assert checkpoints.latest_step == 3
    assert {entry.name for entry in tmp_path.iterdir() if entry.name.isdecimal()} == {"2", "3"}


def test_a_run_that_is_over_is_reported_without_its_metrics(tmp_path):
    with Record("f32", tmp_path / "metrics.jsonl", 0) as record:
        pass
    assert np.isnan(record.train_loss)
    report._draw([record], 3.0, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").exists()
