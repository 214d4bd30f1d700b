"""scripts/compare, as a user runs it, and the figures it is made of."""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
import yaml
from PIL import Image

from pushreduce.training.curves import draw_curves
from pushreduce.training.metrics import MetricsRecord, read_records
from pushreduce.training.summary import summarise, write_summary

COMPARE = Path(__file__).parents[2] / "scripts" / "compare"


def make_run(run: Path, settings: dict, num_steps: int = 40, *, finished: bool = True) -> Path:
    run.mkdir()
    (run / "settings.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    record = MetricsRecord(run / "metrics.rank0.jsonl")
    for step in range(1, num_steps + 1):
        when = {"step": step, "samples": 64 * step, "epoch": step / 10, "wall_seconds": 0.1 * step}
        record.step(
            **when,
            loss=float("nan") if step == 3 else 1 / step,
            learning_rate=0.1,
            num_samples=32,
            compute_seconds=0.06,
            local_update_seconds=0.01,
            communication_seconds=0.01,
            blocked_seconds=0.01,
            bytes_sent=10,
        )
        if step % 10 == 0:
            record.evaluation(
                **when,
                validation_loss=2 / step,
                top1_percent=50.0 + step,
                top1_percent_by_rank=[49.0 + step, 48.0 + step],
                consensus_distance=1 / step,
                steps_per_allreduce={1: step},
                staleness={},
                messages_kept_back=2,
            )
    record.close()
    if finished:
        facts = {"algorithm": settings["algorithm"], "num_ranks": 2, "num_workers": 2}
        write_summary(run / "summary.json", summarise(read_records(run / "metrics.rank0.jsonl"), **facts))
    return run


@pytest.fixture
def two_runs(tmp_path: Path) -> list[Path]:
    data = {"dataset": "digits", "batch_size_per_rank": 32}
    return [
        make_run(tmp_path / "baseline", {"algorithm": "allreduce", "seed": 0, "run_dir": "a", "data": data}),
        make_run(
            tmp_path / "overlapped",
            {"algorithm": "lasgd", "seed": 0, "run_dir": "b", "lasgd": {"tau_max": 5}, "data": data},
        ),
    ]


def compare(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, COMPARE, *map(str, arguments)], capture_output=True, text=True)


def test_differing_settings_come_first_and_common_ones_below(two_runs: list[Path], tmp_path: Path) -> None:
    done = compare(*two_runs, "--output", tmp_path / "both.png")
    assert done.returncode == 0, done.stderr
    heading, first, second, *rest = done.stdout.splitlines()
    assert heading.split()[:3] == ["run", "algorithm", "ranks"]
    assert first.split()[:2] == ["baseline", "allreduce"]
    assert second.split()[:2] == ["overlapped", "lasgd"]
    assert "90.00" in first
    below = " ".join(rest)
    for common in ("seed 0", "dataset digits", "batch-size-per-rank 32", "tau-max 5"):
        assert common in below
    assert "run-dir" not in done.stdout
    with Image.open(tmp_path / "both.png") as image:
        assert image.format == "PNG"


def test_settings_that_a_run_does_not_use_are_not_compared(tmp_path: Path) -> None:
    every = {"lasgd": {"tau_max": 5}, "sgp": {"tau": 0, "graph": "ring", "num_peers": 1}, "seed": 0}
    overlapped = {**every, "sgp": {**every["sgp"], "tau": 1}}
    runs = [
        make_run(tmp_path / "first", {"algorithm": "lasgd", **every}),
        make_run(tmp_path / "second", {"algorithm": "sgp", **overlapped}),
    ]
    done = compare(*runs, "--output", tmp_path / "both.png")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:3] == ["run", "algorithm", "ranks"]  # lasgd has no tau
    below = " ".join(done.stdout.splitlines()[3:])
    assert "tau-max 5" in below
    assert "graph ring" in below
    assert "num-peers" not in below


def test_stretched_time_is_shown(two_runs: list[Path], tmp_path: Path) -> None:
    summary = two_runs[1] / "summary.json"
    write_summary(summary, json.loads(summary.read_text()) | {"time_stretch": 4.0})
    done = compare(*two_runs, "--output", tmp_path / "both.png")
    assert done.returncode == 0, done.stderr
    heading, *rows = done.stdout.splitlines()
    assert heading.split()[:3] == ["run", "algorithm", "time-stretch"]
    assert [row.split()[2] for row in rows[:2]] == ["1.0", "4.0"]


def test_a_run_can_be_compared_with_another_of_the_same_name(two_runs: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    again = make_run(other / "baseline", {"algorithm": "allreduce", "seed": 1})
    done = compare(two_runs[0], again, "--output", tmp_path / "same.png")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["run", "seed"]
    assert str(again) in done.stdout


def test_what_cannot_be_compared_is_one_line_and_exit_code_2(two_runs: list[Path], tmp_path: Path) -> None:
    unfinished = make_run(tmp_path / "unfinished", {"algorithm": "lasgd"}, finished=False)
    (tmp_path / "no_run").mkdir()
    png = tmp_path / "compare.png"
    for run, expected in (
        (tmp_path / "nowhere", "no directory"),
        (tmp_path / "no_run", "settings.yaml"),
        (unfinished, "has not finished"),
    ):
        done = compare(two_runs[0], run, "--output", png)
        assert done.returncode == 2
        assert expected in done.stderr
        assert run.name in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not done.stdout
        assert not png.exists()


@pytest.mark.parametrize("num_steps", [0, 1, 9, 40])
def test_curves_of_a_run_of_any_length(num_steps: int, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"algorithm": "lasgd"}, num_steps, finished=False)
    draw_curves(run, run / "curves.png")
    draw_curves([run, run], tmp_path / "several.png", ["first", "second"])
    for png in (run / "curves.png", tmp_path / "several.png"):
        with Image.open(png) as image:
            assert image.format == "PNG"
            assert image.width > image.height > 500


def test_seconds_of_a_simulated_run_are_called_virtual(tmp_path: Path) -> None:
    run, svg = make_run(tmp_path / "run", {"algorithm": "lasgd"}, 9), tmp_path / "curves.svg"
    for environment, expected in (
        ({}, "wall clock (s)"),
        ({"simulated": {"num_hosts": 8}}, "virtual time (s)"),
    ):
        (run / "environment.json").write_text(json.dumps(environment))
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            draw_curves(run, svg)
        assert expected in svg.read_text()
