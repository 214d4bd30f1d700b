"""scripts/plan as its user meets it: mistakes are one line with the remedy, exit code 2, and nothing is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "hostfiles" / "ten_gigabit.yaml"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--cluster none.yaml --model-bytes 1e6", ["none.yaml cannot be read"]),
        ("--cluster bad.yaml --model-bytes 1e6", ["bad.yaml", "link_bits_per_second is 0.0", "above 0"]),
        ("--cluster {example}", ["--model", "--model-bytes", "required"]),
        ("--cluster {example} --model-bytes 3", ["--model-bytes 3", "from 1e3"]),
        ("--cluster {example} --model-bytes nan", ["--model-bytes nan", "from 1e3"]),
        ("--cluster {example} --model fasterrcnn_resnet50_fpn", ["unknown model", "fasterrcnn"]),
        ("--cluster {example} --model cnn", ["cnn", "give --model-bytes"]),
        ("--cluster {example} --model-bytes 1e6 --max-workers 1", ["--max-workers 1", "from 2 to 1024"]),
        (
            "--cluster {example} --model-bytes 1e6 --max-workers 5000",
            ["--max-workers 5000", "from 2 to 1024"],
        ),
        ("--cluster {example} --model-bytes 1e6 --step-seconds -1", ["step_seconds is -1.0", "at least 0"]),
        ("--cluster {example} --model-bytes 1e6 --step-seconds 0", ["step_seconds is 0", "--step-seconds"]),
        ("--cluster {example} --model-bytes 1e6 --output no/plan.png", ["no is no directory"]),
        ("--cluster {example} --model-bytes 1e6 --output plan.pdf", ["plan.pdf", ".png"]),
        ("--cluster {example} --model-bytes 1e6 --seed -1", ["--seed -1", "0 or more"]),
    ],
)
def test_mistakes(arguments: str, words: list[str], tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("link_bits_per_second: 9.4e+9", "link_bits_per_second: 0")
    (tmp_path / "bad.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "plan", *arguments.format(example=EXAMPLE).split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("plan: ")
    for word in words:
        assert word in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]
