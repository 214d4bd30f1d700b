"""A run that is taken up again goes on as if nothing had happened."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from launch import run
from run_files import checkpoints, losses, make_image_folder, model, steps

NUM_COMPARED = 20

COMMON = [
    "--epochs",
    "2",
    "--checkpoint-every-epochs",
    "1",
    "--evaluate-every-epochs",
    "2",
    "--keep-checkpoints",
    "5",
    "--run-dir",
    "run",
]
AUGMENTED = (
    "--dataset imagefolder --data-dir images --image-size 12 --batch-size-per-rank 2 --model resnet18-cifar "
    "--algorithm allreduce"
)
RUNS = {
    "lasgd-1": (1, "--algorithm lasgd"),
    "images-1": (1, AUGMENTED),
    "allreduce-2": (2, "--algorithm allreduce"),
    "lasgd-2": (2, "--algorithm lasgd --tau-max 1"),
    "sgp-2": (2, "--algorithm sgp --schedule constant"),
}


@dataclass(frozen=True)
class Undisturbed:
    """A run that was at a checkpoint after its first epoch, and went on."""

    cwd: Path
    num_ranks: int

    def copy_to(self, cwd: Path) -> Path:
        """The same directory again; returns the newest of its two checkpoints."""
        shutil.copytree(self.cwd, cwd, dirs_exist_ok=True)
        first, newest = checkpoints(cwd / "run")
        assert first.name < newest.name
        return newest


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    @cache
    def train(name: str) -> Undisturbed:
        num_ranks, arguments = RUNS[name]
        cwd = tmp_path_factory.mktemp(name)
        if "imagefolder" in arguments:
            make_image_folder(cwd / "images")
        finished = run(num_ranks, [*COMMON, *arguments.split()], cwd=cwd)
        assert finished.exit_code == 0, finished.output
        return Undisturbed(cwd, num_ranks)

    return train


def next_losses(run_dir: Path, rank: int, after: int) -> list[float]:
    """The losses of the steps that follow step `after`."""
    by_step = losses(run_dir, rank)
    return [by_step[after + 1 + i] for i in range(NUM_COMPARED)]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("lasgd-1", []),
        ("images-1", ["--num-loader-workers", "2"]),
        ("allreduce-2", []),
        ("lasgd-2", []),
        ("sgp-2", []),
    ],
)
def test_the_next_losses_are_those_of_the_undisturbed_run(undisturbed, name, arguments, tmp_path):
    """Bit for bit, for LASGD on two ranks to float tolerance. The newest checkpoint is damaged: named, not used.

    Of several ranks of LASGD or SGP one may end the run a step earlier: then the final models differ.
    """
    whole = undisturbed(name)
    newest = whole.copy_to(tmp_path)
    damaged = newest / f"rank{whole.num_ranks - 1}.pt"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    finished = run(whole.num_ranks, ["--run-dir", "run", "--resume", *arguments], cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    assert str(damaged) in finished.output
    assert "the one before it is tried" in finished.output
    after = int(checkpoints(whole.cwd / "run")[0].name.split("-")[-1])
    tolerance = 1e-3 if name == "lasgd-2" else 0.0
    for rank in range(whole.num_ranks):
        expected = next_losses(whole.cwd / "run", rank, after)
        assert len(set(expected)) > NUM_COMPARED / 2
        assert next_losses(tmp_path / "run", rank, after) == pytest.approx(expected, rel=tolerance, abs=0.0)
    if whole.num_ranks == 1 or name.startswith("allreduce"):
        first, again = model(whole.cwd / "run"), model(tmp_path / "run")
        assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_number_of_ranks_begins_at_the_consensus_and_says_so(undisturbed, num_ranks, tmp_path):
    whole = undisturbed("allreduce-2")
    newest = whole.copy_to(tmp_path)
    before = [record["step"] for record in steps(tmp_path / "run")]
    finished = run(num_ranks, ["--run-dir", "run", "--resume", "--epochs", "3"], cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    assert f"{newest} is of 2 ranks" in finished.output
    assert "consensus model" in finished.output
    assert "resumed at epoch 2." in finished.output
    after = [record["step"] for record in steps(tmp_path / "run")]
    assert after[: len(before)] == before
    assert len(after) > len(before)
    assert (tmp_path / "run" / f"metrics.rank{num_ranks - 1}.jsonl").stat().st_size > 0
    assert f"rank{num_ranks - 1}.pt" in {path.name for path in checkpoints(tmp_path / "run")[-1].iterdir()}
    by_step = losses(tmp_path / "run")
    assert by_step[before[-1] + 1] < by_step[1], "the consensus model, not a new one"


def test_a_finished_run_is_trained_for_longer(undisturbed, tmp_path):
    whole = undisturbed("lasgd-1")
    whole.copy_to(tmp_path)
    finished = run(1, ["--run-dir", "run", "--resume", "--epochs", "3"], cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    before, after = losses(whole.cwd / "run"), losses(tmp_path / "run")
    assert {step: after[step] for step in before} == before
    assert len(after) > len(before)
    assert len(checkpoints(tmp_path / "run")) == 3
