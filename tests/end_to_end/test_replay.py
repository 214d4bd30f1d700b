"""Real runs with --trace, replayed by the independent oracle through scripts/replay."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from launch import ROOT, run, run_command

COMMON = ["--epochs", "1", "--evaluate-every-epochs", "1", "--trace", "--run-dir", "run"]
RUNS = {
    "allreduce-1": (1, "--algorithm allreduce --dtype float32 --warmup-epochs 0.5"),
    "lasgd-2": (2, "--dtype float64 --tau-max 5 --shard-proportions 1 3"),
    "lasgd-4": (4, "--dtype float32 --elastic-alpha 0.5 --elastic-beta 0.5"),
    "allreduce-2": (
        2,
        "--algorithm allreduce --dtype float64 --optimizer adam --base-lr 0.01 --max-grad-norm 1",
    ),
    "sgp-4": (4, "--algorithm sgp --tau 1 --average-rounds 3 --dtype float64 --shard-proportions 1 2 3 4"),
    "lasgd-host-2": (2, "--worker host --dtype float64 --shard-proportions 1 3"),
    "sgp-kept-3": (
        3,
        "--algorithm sgp --tau 1 --biased --slot-patience-seconds 0 --dtype float64 --shard-proportions 1 2 3",
    ),
}


def replay(run_dir):
    return run_command([str(ROOT / "scripts" / "replay"), str(run_dir)], cwd=run_dir.parent)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Makes the run that RUNS has by a name, the first time that it is asked for."""

    @cache
    def make(name: str) -> Path:
        num_ranks, arguments = RUNS[name]
        cwd = tmp_path_factory.mktemp(name)
        finished = run(num_ranks, [*COMMON, *arguments.split()], cwd=cwd)
        assert finished.exit_code == 0, finished.output
        return cwd / "run"

    return make


@pytest.mark.parametrize("name", list(RUNS))
def test_the_oracle_reaches_the_parameters_of_the_run(trace, name):
    finished = replay(trace(name))
    assert finished.exit_code == 0, finished.output
    assert "equal to" in finished.output


def change_final(run_dir) -> None:
    path = run_dir / "trace.final.rank0.pt"
    vector = torch.load(path, weights_only=True)
    vector[0] += 0.01 * vector.abs().max()
    torch.save(vector, path)


def change_a_learning_rate(run_dir) -> None:
    for path in run_dir.glob("trace.rank*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for event in events[len(events) // 2 : len(events) // 2 + 8]:
            if "learning_rate" in event:
                event["learning_rate"] *= 3.0
        path.write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize("tamper", [change_final, change_a_learning_rate])
@pytest.mark.parametrize("name", ["lasgd-2", "allreduce-2", "sgp-4"])
def test_what_was_tampered_with_is_found_out(trace, name, tamper, tmp_path):
    shutil.copytree(trace(name), tmp_path / "run")
    tamper(tmp_path / "run")
    finished = replay(tmp_path / "run")
    assert finished.exit_code == 1, finished.output
    assert "DIFFERENT" in finished.output
