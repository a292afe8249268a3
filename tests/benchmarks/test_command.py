"""`python -m benchmarks`: what it is asked for, and what it says where that cannot be."""

import re

import jax
import pytest

from benchmarks import __main__ as command
from benchmarks import gemm, peers
from benchmarks.command import chosen
from benchmarks.registry import BENCHMARKS


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_command_has_all_that_it_is_asked_for(name):
    asked = ("add_arguments", "rows", "line", "TITLE", "COLUMNS")
    missing = [attribute for attribute in asked if not hasattr(BENCHMARKS[name], attribute)]
    assert not missing, f"benchmarks/{name}.py: no {', '.join(missing)}"


def test_names_of_contenders():
    ours = ["te-bf16", "te-bf16-rounded", "te-delayed", "te-delayed-fast", "te-delayed-split", "te-delayed-rounded"]
    ours += ["te-delayed-dpa", "te-current"]
    assert chosen(["te", "flax"], peers.CONTENDERS) == [*ours, "flax"]
    assert chosen(["bf16,fp8"], gemm.CONTENDERS) == ["bf16", "fp8-fast", "fp8-split", "fp8-xla"]
    with pytest.raises(SystemExit, match="expected some of flax, flax-fp8, .* got 'torch'"):
        chosen(["torch"], peers.CONTENDERS)


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["layer", "--rounds", "0"], "benchmarks layer: --rounds: expected 2 or more, got 0"),
        (["kernels", "--hidden", "4096", "-1"], "benchmarks kernels: --hidden: expected 1 or more, got -1"),
        (["train", "--steps", "2"], "benchmarks train: --steps: expected 3 or more, got 2"),
        (["stack", "--config", "tiny", "tiny-dropout"], "expected shapes without dropout, got tiny-dropout"),
        (["train", "--config", "tiny-dropout"], "expected shapes without dropout, got tiny-dropout"),
        (["memory", "--layers", "-1"], "benchmarks memory: --layers: expected 0 or more, got -1"),
        (["train", "--first-seed", "-2"], "benchmarks train: --first-seed: expected 0 or more, got -2"),
        (
            ["kernels", "--json", "nowhere/x.json"],
            "--json: expected a file in a folder that exists, got nowhere/x.json",
        ),
        (
            ["train", "--config", "tiny", "--data", "nowhere"],
            "benchmarks: train: --data nowhere: no such file or folder",
        ),
        (["sharded", "--config", "tiny", "--devices", "99"], "benchmarks: sharded: expected 99 devices or more, got "),
        (["kernels", "--json", "."], "benchmarks kernels: --json: expected a file in a folder that exists, got ."),
    ],
)
def test_arguments_that_cannot_be(argv, expected):
    with pytest.raises(SystemExit, match=expected):
        command.main(argv)


def test_profile_lists_kernels_of_a_gpu(capsys):
    profiled = lambda: command.main(["profile", "--config", "tiny", "--against", "te-delayed"])
    if jax.default_backend() == "gpu":
        profiled()
        assert re.search(r"us +\d+\.\d x  .*norm.*\n(.*\n)*.* us busy of ", capsys.readouterr().out)
    else:
        with pytest.raises(SystemExit, match="benchmarks profile: expected a GPU, whose kernels it lists, got cpu"):
            profiled()


def test_where_there_is_no_gpu_rows_are_said_to_take_long(capsys):
    with pytest.raises(SystemExit):
        command.main(["sharded", "--config", "tiny", "--devices", "99"])
    assert ("no GPU here but cpu" in capsys.readouterr().err) == (jax.default_backend() != "gpu")
