"""scripts/benchmark runs, and every figure that it promises is there and finite. Never what a figure is."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("horovod.torch")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("part", "figures"),
    [
        ("loop", {"images/s, loop over bare": 4}),
        ("overhead", {"step() over compute": 4, "loop over compute": 4, "messages over compute": 4}),
    ],
)
def test_every_figure_is_there(tmp_path, part, figures):
    command = [sys.executable, ROOT / "scripts" / "benchmark", part, "--pairs", "2", "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    for figure, number in figures.items():
        assert sum(row["figure"] == figure for row in rows) == number
        assert figure in done.stdout
    for row in rows:
        assert int(row["n"]) == 2
        assert all(math.isfinite(float(row[key])) for key in ("median", "ci_low", "ci_high", "min", "max"))
