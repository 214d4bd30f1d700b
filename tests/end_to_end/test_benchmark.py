"""scripts/benchmark and its pieces run, and every figure is there and finite. Never what a figure is."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("horovod.torch")
SCRIPTS = Path(__file__).parents[2] / "scripts"
STATISTICS = ("median", "ci_low", "ci_high", "min", "max")


def output_of(command):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_part(tmp_path):
    output = output_of(
        [sys.executable, SCRIPTS / "benchmark", "overhead", "--pairs", "2", "--output", tmp_path]
    )
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    runs = {(row["figure"], row["algorithm"], row["num_ranks"]) for row in rows}
    assert runs == {
        (f"{share} over compute", algorithm, num_ranks)
        for share in ("step()", "loop", "messages")
        for algorithm in ("lasgd", "allreduce")
        for num_ranks in "12"
    }
    for row in rows:
        assert row["n"] == "2"
        assert row["figure"] in output
        assert all(math.isfinite(float(row[name])) for name in STATISTICS)


@pytest.mark.parametrize(
    ("piece", "num_ranks", "num_figures"),
    [("loop", 1, 2), ("allreduce", 2, 4), ("memory", 2, 1), ("put", 2, 4)],
)
def test_piece(tmp_path, monkeypatch, piece, num_ranks, num_figures):
    monkeypatch.syspath_prepend(SCRIPTS / "benchmarks")
    import workbench

    workbench.write_data(tmp_path)
    counts = ["--pairs=2", "--steps=1", "--warm-up=1", "--algorithm=allreduce", f"--directory={tmp_path}"]
    program = [sys.executable, SCRIPTS / "benchmarks" / f"{piece}.py", *counts]
    output = output_of(program if num_ranks == 1 else ["mpirun", "-np", str(num_ranks), *program])
    figures = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(figures) == num_figures
    for figure in figures:
        if piece == "memory":
            assert len(figure["peaks_by_rank"]) == num_ranks
            assert all(
                peak > figure["model_bytes"] for rank in figure["peaks_by_rank"] for peak in rank.values()
            )
        else:
            assert all(math.isfinite(figure[name]) for name in STATISTICS)
