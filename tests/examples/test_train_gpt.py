"""The main job as a user runs it: it learns, resumes bit for bit, stops politely, shards, and explains mistakes."""

import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_gpt  # noqa: E402
from gpt import options as gpt_options  # noqa: E402
from gpt.options import ordinary_precision  # noqa: E402
from gpt.record import Record  # noqa: E402

TINY = "--layers 1 --hidden 32 --heads 2 --mlp 64 --seq 16 --batch 8 --lr 0.02 --eval-batches 2".split()


@pytest.fixture
def train(text, tmp_path):
    """train("--steps", 8): runs main() on the tiny model; results go to tmp_path/out unless --out is given."""
    return lambda *args: train_gpt.main([*TINY, "--data", str(text), "--out", str(tmp_path / "out"), *map(str, args)])


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """finished(recipe): the folder of a run of 6 steps with a checkpoint halfway. Not to be written to."""

    @functools.cache
    def run(recipe):
        out = tmp_path_factory.mktemp(recipe)
        length = ("--steps", "6", "--checkpoint-every", "3")
        assert train_gpt.main([*TINY, *length, "--data", str(text), "--out", str(out), "--recipe", recipe]) == 0
        return out

    return run


def final_state(run: Path) -> dict:
    return ocp.StandardCheckpointer().restore(run.absolute() / "checkpoints" / "6" / "default")


def losses(run: Path, kind: str = "loss") -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[kind] for line in lines if kind in line}


def script(*args, **kwargs) -> subprocess.Popen:
    """The script in a process of its own on a CPU with the one device it really has."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *map(str, args)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


# --- Training --------------------------------------------------------------------------------------------------------


def test_comparison_learns_and_reports(train, tmp_path, capsys):
    assert train("--steps", 40, "--compare") == 0
    out, printed = tmp_path / "out", capsys.readouterr().out
    entropy = float(re.search(r"unigram entropy: ([0-9.]+)", printed)[1])
    validation = {}
    for name in (ordinary_precision(), "delayed"):
        curve = losses(out / name)
        assert list(curve) == list(range(1, 41))
        validation[name] = losses(out / name, "validation_loss")[40]
        assert validation[name] < entropy - 0.3
        assert f"{validation[name]:.4f}" in printed
    # As good as the baseline, up to the noise of 40 steps on a falling curve (0.02 nats from seed to seed).
    assert validation["delayed"] == pytest.approx(validation[ordinary_precision()], abs=0.1)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert str(out / "loss.png") in printed
    assert "\x1b" not in printed and "\r" not in printed, "no terminal: plain lines"


def test_bf16(train, tmp_path):
    assert train("--steps", 2, "--recipe", "bf16") == 0
    assert np.isfinite(list(losses(tmp_path / "out" / "bf16").values())).all()


@pytest.mark.parametrize("recipe", ["f32", "delayed", "current"])
def test_resumed_run_equals_uninterrupted(finished, tmp_path, recipe):
    whole, resumed = finished(recipe), tmp_path
    shutil.copytree(whole, resumed, dirs_exist_ok=True)
    shutil.rmtree(resumed / recipe / "checkpoints" / "6")
    with (resumed / recipe / "metrics.jsonl").open("a") as file:
        file.write('{"step": 481, "lo')  # what a killed process may leave
    assert train_gpt.main(["--out", str(resumed), "--resume"]) == 0
    tolerance = 0 if jax.default_backend() == "cpu" else 1e-2  # a GPU's GEMMs may sum in another order each time
    for kind in ("loss", "validation_loss"):
        a, b = losses(whole / recipe, kind), losses(resumed / recipe, kind)
        assert list(a) == list(b)
        np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=tolerance, atol=0)
    states = [jax.tree.leaves(final_state(out / recipe)) for out in (whole, resumed)]
    for a, b in zip(*states, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def test_a_run_that_was_stopped_at_its_end_is_evaluated(finished, tmp_path):
    shutil.copytree(finished("f32"), tmp_path, dirs_exist_ok=True)
    metrics = tmp_path / "f32" / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps({'step': n, 'loss': 2.0, 'tokens_per_second': 1.0})}\n" for n in range(7)))
    assert train_gpt.main(["--out", str(tmp_path), "--resume"]) == 0
    expected = losses(finished("f32") / "f32", "validation_loss")[6]
    assert losses(tmp_path / "f32", "validation_loss") == {6: pytest.approx(expected, rel=1e-3)}


def test_checkpoint_holds_fp8_state(finished):
    state = final_state(finished("delayed") / "delayed")["variables"]["_overwrite_with_gradient"]
    scales = [np.asarray(packed)[..., 0] for packed in jax.tree.leaves(state)]  # GemmState.packed
    assert scales and all((scale != 1).all() for scale in scales), "each quantizer has left its initial scale"


def test_mesh_gives_the_curve_of_one_device(text, tmp_path):
    curves = []
    for name, mesh in (("one", ()), ("eight", ("--mesh", "data=4,model=2"))):
        out = tmp_path / name
        process = script(*TINY, "--data", text, "--steps", 10, "--compare", "--out", out, *mesh)
        assert process.wait() == 0, process.stderr.read()
        curves.append({run: list(losses(out / run).values()) for run in ("f32", "delayed")})
    one, eight = curves
    # f32: sums in another order differ by a few ulp (6e-8), which ten steps of AdamW amplify.
    np.testing.assert_allclose(eight["f32"], one["f32"], rtol=1e-4)
    # FP8: such a difference can push a value over a rounding boundary, half an E4M3 step (2**-4) of one of K terms.
    np.testing.assert_allclose(eight["delayed"], one["delayed"], rtol=5e-3)


def test_what_may_differ_when_a_run_is_resumed(finished):
    resumed = ["--out", str(finished("f32")), "--resume", "--steps", "9", "--checkpoint-every", "2"]
    options = gpt_options.parse(resumed)
    assert (options.steps, options.checkpoint_every, options.hidden) == (9, 2, 32)


# --- Interruption ----------------------------------------------------------------------------------------------------


def test_terminated_comparison_resumes(train, tmp_path, capsys, monkeypatch):
    record_step = Record.train

    def terminated(self, step, loss, speed):
        record_step(self, step, loss, speed)
        if step == 3:
            signal.raise_signal(signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        patched.setattr(Record, "train", terminated)
        assert train("--steps", 12, "--compare") == 130
    assert signal.getsignal(signal.SIGTERM) is handler
    assert f"--out {tmp_path / 'out'} --resume" in capsys.readouterr().out
    stopped_at = max(losses(tmp_path / "out" / ordinary_precision()))
    assert 3 <= stopped_at < 12
    assert not (tmp_path / "out" / "delayed" / "metrics.jsonl").exists()
    assert train_gpt.main(["--out", str(tmp_path / "out"), "--resume"]) == 0
    for name in (ordinary_precision(), "delayed"):
        assert list(losses(tmp_path / "out" / name)) == list(range(1, 13))


def test_ctrl_c_in_the_shell(text, tmp_path):
    with script(*TINY, "--data", text, "--steps", 100_000, "--recipe", "f32", "--out", tmp_path / "out") as process:
        metrics = tmp_path / "out" / "f32" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in out and "Traceback" not in err
    assert any(entry.name.isdecimal() for entry in (tmp_path / "out" / "f32" / "checkpoints").iterdir())


def test_a_checkpoint_that_can_not_be_written_is_told_of(text, tmp_path):
    """Files of at most 20 kB: as on a full disk, of which orbax tells late, and tensorstore in lines of its own."""
    small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    args = (*TINY, "--data", text, "--steps", 4, "--recipe", "f32", "--checkpoint-every", 2, "--out", tmp_path / "out")
    with script(*args, preexec_fn=small) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.count("train_gpt: error: a checkpoint could not be written to ") == 1 and "train_gpt.py" not in err


# --- Mistakes --------------------------------------------------------------------------------------------------------

MISTAKES = {
    "missing data": ("--data /nowhere/at/all", "/nowhere/at/all: no such file"),
    "no data": ("--data=", "expected a path, got an empty one"),
    "no out": ("--out=", "expected a path, got an empty one"),
    "too much validation": ("--eval-batches 1000000000000", "--eval-batches 1000000000000: 8000000000000 windows of"),
    "mesh axis twice": ("--mesh data=4,data=2", "expected something like data=4,model=2"),
    "metrics cannot be written": ("--recipe f32 --out {tmp}/taken", "metrics.jsonl: Is a directory"),
    "empty folder": ("--data {tmp}/empty", "holds no bytes"),
    "too little data": ("--seq 50000", "too few for --seq 50000"),
    "unknown recipe": ("--recipe fp4", "invalid choice: 'fp4'"),
    "heads": ("--hidden 32 --heads 3", "--hidden 32 over --heads 3"),
    "no layers": ("--layers 0", "--layers must be at least 1"),
    "no steps": ("--steps -5", "--steps must be at least 1"),
    "not a number": ("--steps many", "invalid int value: 'many'"),
    "warm-up": ("--steps 4 --warmup 5", "--warmup must be between 0 and --steps 4"),
    "seed": ("--seed -1", "--seed must be between 0 and 2**32 - 1, got -1"),
    "abbreviation": ("--lay 1", "unrecognized arguments"),
    "learning rate": ("--lr nan", "--lr must be positive"),
    "learning rate too large": (
        "--recipe f32 --lr 1e30 --warmup 0",
        "the loss of f32 is nan at step 2: take less than --lr",
    ),
    "impossible size": ("--hidden 20000000", "GiB"),
    "mesh grammar": ("--mesh data=4;model=2", "expected something like data=4,model=2"),
    "mesh axis": ("--mesh tensor=2", "expected something like data=4,model=2"),
    "mesh over batch": ("--mesh data=3", "data=3 must divide --batch 8"),
    "mesh over heads": ("--mesh model=4", "model=4 must divide --heads 2"),
    "mesh of too many": ("--batch 4096 --mesh data=4096", "needs 4096 devices"),
    "compare what": ("--compare --recipe f32", "--compare needs an FP8 recipe"),
    "out is a file": ("--out {text}", "Not a directory"),
    "out below a file": ("--out {text}/run", "Not a directory"),
    "a file for checkpoints": ("--recipe f32 --out {tmp}/blocked", "File exists"),
    "resume without out": ("--resume", "holds no run"),
    "unknown option": ("--lehr 1", "unrecognized arguments"),
}


@pytest.mark.parametrize("args, message", MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_one_clear_line(train, text, tmp_path, capsys, args, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken" / "f32" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "blocked" / "f32").mkdir(parents=True)
    (tmp_path / "blocked" / "f32" / "checkpoints").touch()
    assert train("--steps", 4, *args.format(tmp=tmp_path, text=text).split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("train_gpt: error: ") and err.count("\n") == 1


def test_mistakes_about_earlier_runs(finished, text, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(finished("f32"), out)
    other_text = tmp_path / "text"
    other_text.write_text(text.read_text().swapcase())
    options = json.loads((out / "options.json").read_text())
    cases = [
        ([*TINY, "--data", text, "--recipe", "f32"], "already there"),
        (["--resume", "--hidden", 64], "has --hidden 32, not 64"),
        (["--resume", "--eval-every", 3], "has --eval-every "),
        (["--resume", "--recipe", "delayed"], "has --recipe f32, not delayed"),
        (["--resume", "--data", other_text], f"has --data {text}, not {other_text}"),
    ]
    for args, message in cases:
        assert train_gpt.main(["--out", str(out), *map(str, args)]) == 2
        assert message in capsys.readouterr().err
    (out / "options.json").write_text(json.dumps(options | {"data": str(other_text)}))
    assert train_gpt.main(["--out", str(out), "--resume"]) == 2
    assert "the data isn't what the run" in capsys.readouterr().err
    (out / "options.json").write_text(json.dumps(options | {"mlp": 32}))
    assert train_gpt.main(["--out", str(out), "--resume"]) == 2
    assert "is damaged or of another model" in capsys.readouterr().err
    for wrong in ({"heads": "two"}, {"mesh": None}, {"mesh": [1]}):
        (out / "options.json").write_text(json.dumps(options | wrong))
        assert train_gpt.main(["--out", str(out), "--resume"]) == 2
        assert "options.json is damaged" in capsys.readouterr().err
    (out / "options.json").write_text(json.dumps(options))
    assert train_gpt.main(["--out", str(out), "--resume", "--steps", "1"]) == 2
    assert f"--steps 1: the checkpoint of f32 in {out} is at step" in capsys.readouterr().err
    shutil.rmtree(out / "f32" / "checkpoints")
    assert train_gpt.main(["--out", str(out), "--resume"]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
