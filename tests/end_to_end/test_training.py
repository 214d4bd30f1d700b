"""Training from the command line to the run directory, on one, two and four ranks, by every launcher."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from launch import Finished, run
from run_files import checkpoints, losses, model, steps
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pushreduce import settings_file
from pushreduce.settings import Settings
from pushreduce.training.metrics import read_records

SUMMARY_FIELDS = [
    "algorithm",
    "num_ranks",
    "num_workers",
    "top1_percent",
    "iteration_ms_median",
    "compute_ms_median",
    "blocked_ms_median",
    "images_per_second",
    "consensus_distance",
    "wall_seconds",
]
NUM_TRAIN, NUM_VALIDATION = 1433, 364

COMMON = [
    "--epochs",
    "4",
    "--base-lr",
    "0.4",
    "--evaluate-every-epochs",
    "2",
    "--checkpoint-every-epochs",
    "2",
]
RUNS = {
    "alone-lasgd": (1, "mpirun", ["--algorithm", "lasgd"]),
    "two-allreduce": (2, "mpirun", ["--algorithm", "allreduce"]),
    "four-lasgd": (4, "mpirun", ["--algorithm", "lasgd", "--tau-max", "5"]),
    "horovodrun-two-lasgd": (2, "horovodrun", ["--algorithm", "lasgd"]),
}


Trained = tuple[Path, int, Finished]
"""A run's directory, its number of ranks and what it said."""


@pytest.fixture(scope="module")
def train_once(tmp_path_factory) -> Callable[[str], Trained]:
    """Trains what RUNS has by a name, the first time that it is asked for."""

    @cache
    def train(name: str) -> Trained:
        num_ranks, launcher, arguments = RUNS[name]
        cwd = tmp_path_factory.mktemp(name)
        finished = run(num_ranks, [*COMMON, *arguments, "--run-dir", "run"], cwd=cwd, launcher=launcher)
        assert finished.exit_code == 0, finished.output
        return cwd / "run", num_ranks, finished

    return train


@pytest.fixture(params=list(RUNS))
def trained(request, train_once) -> Trained:
    return train_once(request.param)


def test_run_directory_holds_what_the_design_lists_and_nothing_else(trained):
    directory, num_ranks, _ = trained
    expected = {
        "settings.yaml",
        "environment.json",
        "log.txt",
        "tensorboard",
        "checkpoints",
        "model.pt",
        ".lock",
    }
    expected |= {"summary.json", "curves.png"} | {f"metrics.rank{rank}.jsonl" for rank in range(num_ranks)}
    assert {path.name for path in directory.iterdir()} == expected
    assert (directory / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_saved_settings_are_those_of_the_run_resolved(trained):
    directory, _, _ = trained
    settings = settings_file.load(directory / "settings.yaml")
    assert settings.training.epochs == 4
    assert settings.optimizer.base_lr == 0.4
    assert settings.data.batch_size_per_rank == 32
    assert (settings.run_dir, settings.resume) == (None, False)


def test_environment_names_every_rank(trained):
    directory, num_ranks, _ = trained
    environment = json.loads((directory / "environment.json").read_text())
    assert environment["num_ranks"] == num_ranks
    assert sorted(rank for host in environment["hosts"] for rank in host["ranks"]) == list(range(num_ranks))
    assert environment["mpi_library"]
    assert environment["horovod"] == "0.28.1"


def test_ranks_records_agree_with_each_other_and_with_the_end(trained):
    """Every sample counted once: the ranks' own counts add up to the global one, and that to the epochs.

    Ranks of LASGD leave off at their own estimates, so that some samples may be missing at the end.
    """
    directory, num_ranks, _ = trained
    by_rank = [steps(directory, rank) for rank in range(num_ranks)]
    for records in by_rank:
        assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    samples = sum(record["num_samples"] for records in by_rank for record in records)
    final = [list(read_records(directory / f"metrics.rank{rank}.jsonl"))[-1] for rank in range(num_ranks)]
    assert {record["kind"] for record in final} == {"evaluation"}
    assert {record["samples"] for record in final} == {samples}
    assert samples > 3.9 * NUM_TRAIN
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["samples"] == samples
    assert summary["steps_per_rank"] == [len(records) for records in by_rank]


def test_summary_has_the_numbers_that_runs_are_compared_by(trained):
    directory, num_ranks, finished = trained
    summary = json.loads((directory / "summary.json").read_text())
    assert all(summary[name] is not None for name in SUMMARY_FIELDS)
    assert summary["num_ranks"] == summary["num_workers"] == num_ranks
    last = [r for r in read_records(directory / "metrics.rank0.jsonl") if r["kind"] == "evaluation"][-1]
    assert summary["top1_percent"] == last["top1_percent"]
    assert f"{summary['top1_percent']:.2f} %" in finished.output
    assert summary["top1_percent"] * NUM_VALIDATION / 100 == pytest.approx(
        round(summary["top1_percent"] * NUM_VALIDATION / 100)
    )


def test_it_learns(trained):
    directory, _, _ = trained
    values = list(losses(directory).values())
    assert sum(values[-5:]) < 0.8 * sum(values[:5])


def test_tensorboard_shows_the_run(trained):
    directory, num_ranks, _ = trained
    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    scalars = events.Tags()["scalars"]
    summary = json.loads((directory / "summary.json").read_text())
    shown = {tag: [event.value for event in events.Scalars(tag)] for tag in scalars}
    assert any(values[-1] == pytest.approx(summary["top1_percent"]) for values in shown.values())
    assert sum("rank" in tag for tag in scalars) >= num_ranks
    assert events.Tags()["images"]
    assert (directory / "log.txt").read_text().count("top-1") >= 2


def test_model_is_a_plain_state_dict_with_its_own_memory(trained):
    """model.pt is no larger than its tensors: they are not views of the buffer that training uses."""
    directory, _, _ = trained
    weights = model(directory)
    assert all(type(value) is torch.Tensor and value.device.type == "cpu" for value in weights.values())
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in weights.values())
    consensus = torch.load(checkpoints(directory)[-1] / "consensus.pt", weights_only=True)
    assert weights.keys() == consensus.keys()
    assert all(torch.equal(weights[name], consensus[name]) for name in weights)


def test_checkpoints_were_made_at_their_epochs(trained):
    directory, num_ranks, _ = trained
    assert len(checkpoints(directory)) == 2
    for checkpoint in checkpoints(directory):
        expected = {"manifest.json", "consensus.pt"} | {f"rank{rank}.pt" for rank in range(num_ranks)}
        assert {path.name for path in checkpoint.iterdir()} == expected


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_evaluating_the_model_file_gives_the_summary_s_top1(train_once, num_ranks, tmp_path):
    directory, _, _ = train_once("two-allreduce")
    finished = run(num_ranks, ["--evaluate", str(directory / "model.pt")], cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    summary = json.loads((directory / "summary.json").read_text())
    assert re.findall(r"top-1 ([\d.]+) %", finished.output) == [f"{summary['top1_percent']:.2f}"]
    assert list(tmp_path.iterdir()) == []


def test_saved_settings_start_the_same_run_again(train_once, tmp_path):
    """One rank alone is deterministic: the same settings give the same model, bit for bit."""
    directory, _, _ = train_once("alone-lasgd")
    finished = run(1, ["--settings", str(directory / "settings.yaml"), "--run-dir", "again"], cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    first, again = model(directory), model(tmp_path / "again")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert settings_file.load(tmp_path / "again" / "settings.yaml") == settings_file.load(
        directory / "settings.yaml"
    )


VARIANTS = {
    "dirichlet-tau0-accumulated": (
        2,
        # At the others' rate the workers may drift so far apart, while one gets no processor, that nothing is learned.
        "--shards dirichlet --tau-max 0 --accumulation-steps 2 --batch-size-per-rank 8 --base-lr 0.15",
    ),
    "proportions-elastic-clipped": (
        2,
        "--shard-proportions 1 4 --elastic-alpha 0.5 --elastic-beta 0.7 --max-grad-norm 1",
    ),
    "allreduce-proportions-float64-accumulated": (
        4,
        "--algorithm allreduce --shard-proportions 1 2 3 4 --dtype float64 --accumulation-steps 2 "
        "--batch-size-per-rank 8",
    ),
    "bfloat16-step": (2, "--dtype bfloat16 --schedule step --decay-epochs 2 --warmup-epochs 1"),
    "adam-allreduce": (2, "--algorithm allreduce --optimizer adam --base-lr 0.005"),
}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_settings_train_too(name, tmp_path):
    num_ranks, arguments = VARIANTS[name]
    argv = [*COMMON, *arguments.split(), "--run-dir", "run"]
    finished = run(num_ranks, argv, cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    directory = tmp_path / "run"
    values = list(losses(directory).values())
    assert sum(values[-5:]) < 0.9 * sum(values[:5])
    dtype = settings_file.load(directory / "settings.yaml").training.dtype
    assert {str(value.dtype) for value in model(directory).values()} == {f"torch.{dtype}"}
    assert settings_file.load(directory / "settings.yaml") != Settings()
