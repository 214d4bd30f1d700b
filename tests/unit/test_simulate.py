"""`scripts/simulate`: the same training as the loop on a simulated cluster, and one line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_loop import train

from pushreduce import simulate
from pushreduce.communication import stop_signals
from pushreduce.settings import DataSettings
from pushreduce.simulation.cluster_model import ClusterModel, save_cluster_model
from pushreduce.simulation.cluster_transport import simulated_cluster
from pushreduce.training import loop
from pushreduce.training.metrics import read_records
from pushreduce.workloads import build_workload, images, workload_of_rank

SCRIPT = Path(__file__).parents[2] / "scripts" / "simulate"
CLUSTER = ClusterModel(
    num_hosts=3, link_bits_per_second=1e8, latency_seconds=1e-4, step_seconds=0.2, step_jitter=0.1
)
OPTIONS = (
    "--dataset synthetic --image-size 8 --num-synthetic-samples 400 --model mlp --batch-size-per-rank 8 "
    "--schedule constant --checkpoint-every-epochs 1 --algorithm sgp --tau 1"
).split()


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=200
    )


def test_stopped_and_resumed_it_is_the_loop_on_a_simulated_cluster(tmp_path: Path) -> None:
    save_cluster_model(CLUSTER, tmp_path / "cluster.yaml")
    run = tmp_path / "run"
    first = run_script(
        "--cluster", str(tmp_path / "cluster.yaml"), "--", *OPTIONS, "--epochs", "1", "--run-dir", str(run)
    )
    assert first.returncode == 0, first.stderr
    resumed = run_script("--", "--run-dir", str(run), "--resume", "--epochs", "2")
    assert resumed.returncode == 0, resumed.stderr

    settings, model = simulate._parse(
        ["--cluster", str(tmp_path / "cluster.yaml"), "--", *OPTIONS, "--epochs", "2"]
    )
    cluster = simulated_cluster(model, seed=settings.seed)
    results = train(cluster, replace(settings, run_dir=str(tmp_path / "loop")))
    expected = torch.load(tmp_path / "loop" / "model.pt", weights_only=True)
    actual = torch.load(run / "model.pt", weights_only=True)
    for name, tensor in expected.items():
        # Which of two simultaneous messages is added first depends on what went before, which a resumed run has not.
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-5)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["time"] == "virtual"
    assert summary["num_ranks"] == 3
    assert summary["wall_seconds"] == pytest.approx(results[0][1].wall_seconds)
    steps = [r for r in read_records(run / "metrics.rank1.jsonl") if r["kind"] == "step"]
    assert sum(step["compute_seconds"] for step in steps) / len(steps) == pytest.approx(0.2, rel=0.1)


BAD_INPUT = {
    "without the two dashes": ("--num-workers 2 --algorithm sgp", ("--algorithm", "after `--`")),
    "no-number": ("", ["--num-workers", "--cluster"]),
    "number": ("--num-workers many", ["--num-workers", "whole number", "many"]),
    "nobody": ("--num-workers 0", ["--num-workers", "less than 1"]),
    "unknown": ("--workers 3", ["--workers"]),
    "hosts": ("--num-workers 6 --ranks-per-host 4", ["6 ranks", "hosts of 4"]),
    "no-cluster": ("--cluster nowhere.yaml", ["nowhere.yaml"]),
    "bad-cluster": ("--cluster bad.yaml", ["bad.yaml", "num_host", "num_hosts"]),
    "setting": ("--num-workers 4 -- --taumax 3", ["--taumax", "--tau-max"]),
    "batch": ("--num-workers 4 -- --batch-size-per-rank 800", ["--batch-size-per-rank 800", "shard"]),
    "data": ("--num-workers 4 -- --dataset imagefolder --data-dir nowhere", ["nowhere"]),
    "gpu": ("--num-workers 4 -- --device cuda", ["--device cuda"]),
    "loaders": (
        "--num-workers 4 -- --dataset imagefolder --num-loader-workers 2",
        ["--num-loader-workers", "leave it out"],
    ),
    "evaluate": ("--num-workers 4 -- --evaluate model.pt", ["--evaluate", "src/train.py"]),
    "real-run": ("-- --run-dir real --resume", ["real was not simulated", "src/train.py"]),
}


@pytest.mark.parametrize("name", list(BAD_INPUT))
def test_bad_input_is_one_line_and_leaves_nothing_behind(name, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        stop_signals, "install_signal_flag", lambda *_: lambda: None
    )  # this process is the tests'
    (tmp_path / "bad.yaml").write_text("num_host: 3\n")
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "settings.yaml").write_text("seed: 1\n")
    (tmp_path / "real" / "environment.json").write_text('{"commit": null}')
    before = sorted(tmp_path.rglob("*"))
    arguments, words = BAD_INPUT[name]
    with pytest.raises(SystemExit) as ending:
        simulate.main(arguments.split())
    assert ending.value.code == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    assert captured.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_trace_that_one_rank_cannot_write_is_bad_input_on_all(tmp_path, monkeypatch, capsys) -> None:
    class Unwritable(loop.Trace):
        def __init__(self, run_directory, rank: int, size: int) -> None:
            if rank == 1:
                raise OSError(30, "Read-only file system", "trace.rank1.jsonl")
            super().__init__(run_directory, rank, size)

    monkeypatch.setattr(loop, "Trace", Unwritable)
    monkeypatch.setattr(stop_signals, "install_signal_flag", lambda *_: lambda: None)
    with pytest.raises(SystemExit) as ending:
        simulate.main(f"--num-workers 2 -- --trace --run-dir {tmp_path / 'run'}".split())
    assert ending.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: trace.rank1.jsonl: Read-only file system")


def test_ranks_of_one_process_open_the_data_once(monkeypatch) -> None:
    settings = DataSettings(dataset="digits", shards="dirichlet", shard_proportions=(1.0, 2.0, 1.0))
    opened = []
    open_digits = images._DATASETS["digits"]
    monkeypatch.setitem(images._DATASETS, "digits", lambda *a: opened.append(1) or open_digits(*a))
    workload_of = workload_of_rank(settings, seed=3, size=3)
    workloads = [workload_of(rank) for rank in range(3)]
    assert len(opened) == 1
    for rank, ours in enumerate(workloads):
        alone = build_workload(settings, seed=3, rank=rank, size=3)
        assert (ours.shard_sizes, ours.batch_size_per_rank) == (alone.shard_sizes, alone.batch_size_per_rank)
        for batches in ("train_batches", "validation_batches"):
            one, other = next(iter(getattr(ours, batches)())), next(iter(getattr(alone, batches)()))
            assert torch.equal(one.inputs, other.inputs)
            assert torch.equal(one.targets, other.targets)


def test_of_many_ranks_some_are_recorded(tmp_path: Path) -> None:
    for num_ranks in (1, 15, 16, 17, 128, 1000):
        recorded = simulate.recorded_ranks(num_ranks)
        assert recorded[0] == 0
        assert len(recorded) <= simulate.MAX_RECORDED_RANKS
        assert len(recorded) >= min(num_ranks, simulate.MAX_RECORDED_RANKS // 2)
