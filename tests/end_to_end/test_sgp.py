"""SGP from the command line: by both launchers, overlapped and hybrid, on the wire in bfloat16, resumed, diverging."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from launch import Finished, run
from run_files import losses, steps

from pushreduce.training.metrics import read_records

NUM_RANKS = 4
COMMON = "--algorithm sgp --epochs 3 --evaluate-every-epochs 3 --run-dir run".split()
RUNS = {
    "overlap-bfloat16": ("horovodrun", "--tau 1 --wire-dtype bfloat16"),
    "hybrid": ("mpirun", "--average-rounds 9 --graph bipartite-exponential"),
}
TAU = {"overlap-bfloat16": 1, "hybrid": 0}

Trained = tuple[Path, Finished]


@pytest.fixture(scope="module")
def train_once(tmp_path_factory) -> Callable[[str], Trained]:
    """Trains what RUNS has by a name, the first time that it is asked for."""

    @cache
    def train(name: str) -> Trained:
        launcher, arguments = RUNS[name]
        cwd = tmp_path_factory.mktemp(name)
        finished = run(NUM_RANKS, [*COMMON, *arguments.split()], cwd=cwd, launcher=launcher)
        assert finished.exit_code == 0, finished.output
        return cwd / "run", finished

    return train


@pytest.mark.parametrize("name", list(RUNS))
def test_it_trains_and_counts(train_once, name):
    """Every sample once, every message late by tau rounds at most, and all of them applied."""
    directory, _ = train_once(name)
    values = list(losses(directory).values())
    assert sum(values[-5:]) < 0.8 * sum(values[:5])
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["algorithm"] == "sgp"
    assert summary["samples"] == sum(r["num_samples"] for i in range(NUM_RANKS) for r in steps(directory, i))
    num_messages = []
    for rank in range(NUM_RANKS):
        last = list(read_records(directory / f"metrics.rank{rank}.jsonl"))[-1]
        assert last["kind"] == "evaluation"
        staleness = {int(rounds): number for rounds, number in last["staleness"].items()}
        assert max(staleness) <= TAU[name]
        num_messages.append(sum(staleness.values()))
    # One a round to and from everybody, and all ranks end at the same round.
    assert len(set(num_messages)) == 1
    assert num_messages[0] >= max(summary["steps_per_rank"]) - 9


def test_evaluating_the_model_file_gives_the_summary_s_top1(train_once, tmp_path):
    directory, _ = train_once("overlap-bfloat16")
    finished = run(1, ["--evaluate", str(directory / "model.pt")], cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    summary = json.loads((directory / "summary.json").read_text())
    assert re.findall(r"top-1 ([\d.]+) %", finished.output) == [f"{summary['top1_percent']:.2f}"]


def test_one_rank_without_a_launcher_goes_on_from_the_consensus_of_four(train_once):
    directory, _ = train_once("hybrid")
    before = losses(directory)
    finished = run(1, ["--run-dir", "run", "--resume", "--epochs", "4"], cwd=directory.parent)
    assert finished.exit_code == 0, finished.output
    assert "consensus model" in finished.output
    after = losses(directory)
    assert {step: after[step] for step in before} == before
    assert after[max(before) + 1] < before[1], "the consensus model, not a new one"


@pytest.mark.parametrize(("wire_dtype", "words"), [("full", "rank"), ("float16", "do not fit float16")])
def test_a_diverging_run_ends_with_one_line_that_names_the_rank(wire_dtype, words, tmp_path):
    finished = run(2, [*COMMON, "--base-lr", "1e6", "--wire-dtype", wire_dtype], cwd=tmp_path)
    assert finished.exit_code == 2, finished.output
    assert "Traceback" not in finished.output
    # A rank cannot know whether another says the same.
    assert 1 <= len(finished.error_lines) <= 2, finished.output
    for line in finished.error_lines:
        assert re.match(r"error: rank [01]: ", line)
        assert "lower --base-lr" in line
    assert any(words in line for line in finished.error_lines)
