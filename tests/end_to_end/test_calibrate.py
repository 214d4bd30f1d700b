"""scripts/calibrate on real ranks: what it writes is a cluster model with times behind it. Never what a time is."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from launch import ROOT, launched, run_command

from pushreduce.simulation.cluster_model import load_cluster_model

CALIBRATE = ["python", str(ROOT / "scripts" / "calibrate")]


def calibrate(tmp_path: Path, num_ranks: int, options: str):
    return run_command(launched(num_ranks, [*CALIBRATE, *options.split()]), cwd=tmp_path)


def test_a_cluster_file_and_the_times_behind_it(tmp_path: Path) -> None:
    options = "--output cluster.yaml --budget-seconds 1 --dataset digits --batch-size-per-rank 4"
    finished = calibrate(tmp_path, 2, options)
    assert finished.exit_code == 0, finished.output
    model = load_cluster_model(tmp_path / "cluster.yaml")
    assert (model.num_hosts, model.ranks_per_host) == (2, 1)
    assert model.step_seconds > 0
    assert model.average_seconds(1 << 20, 2) > 0
    assert model.put_seconds(1 << 20) > 0
    with (tmp_path / "cluster.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["kind"] for row in rows} == {"message", "sum", "average", "put", "puts at once"}
    for kind in ("message", "average", "put", "puts at once"):
        assert len({row["bytes"] for row in rows if row["kind"] == kind}) >= 2
    for row in rows:
        low, median, high = (float(row[name]) for name in ("ci_low_s", "median_s", "ci_high_s"))
        assert 0 < low <= median <= high
        assert int(row["n"]) >= 5
        error = float(row["modelled_s"]) / median - 1
        assert error == pytest.approx(float(row["relative_error"]), abs=1e-3)
        assert f"{1e3 * median:.3f}" in finished.output
    for said in ("largest error", "rate of a link", "no network was measured", "cluster.yaml"):
        assert said in finished.output


@pytest.mark.parametrize(
    ("num_ranks", "options", "says"),
    [
        (1, "--output cluster.yaml --step-seconds 0.1", "start two or more"),
        (2, "--output cluster.txt", "a name that ends in .yaml"),
    ],
)
def test_mistakes_are_one_line_on_all_ranks(tmp_path: Path, num_ranks: int, options: str, says: str) -> None:
    finished = calibrate(tmp_path, num_ranks, options)
    assert finished.exit_code == 2, finished.output
    (line,) = finished.error_lines
    assert says in line
    assert not list(tmp_path.glob("*.yaml"))
