"""Reads what runs leave in their directories, and makes what they are fed with: the tests' eyes and hands.

Owns no expectation. `launch.py` starts the runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from pushreduce.training.metrics import read_records


def steps(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The records of a rank's steps."""
    return [record for record in read_records(run / f"metrics.rank{rank}.jsonl") if record["kind"] == "step"]


def losses(run: Path, rank: int = 0) -> dict[int, float]:
    """Step -> loss of a rank."""
    return {record["step"]: record["loss"] for record in steps(run, rank)}


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def model(run: Path) -> dict[str, torch.Tensor]:
    """The final model's weights."""
    return torch.load(run / "model.pt", weights_only=True)


def checkpoints(run: Path) -> list[Path]:
    """The visible checkpoints, oldest first; hidden ones are none."""
    return sorted(path for path in (run / "checkpoints").glob("*") if not path.name.startswith("."))


def all_files(directory: Path) -> dict[str, bytes]:
    """Every file below `directory` and its content."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def make_image_folder(directory: Path, *, per_class: int = 24, side: int = 24) -> Path:
    """Images of two classes, a bright and a dark one, in the layout of ImageNet."""
    rng = np.random.default_rng(0)
    for split, number in (("train", per_class), ("val", per_class // 4)):
        for name, level in (("bright", 190), ("dark", 60)):
            folder = directory / split / name
            folder.mkdir(parents=True)
            for index in range(number):
                pixels = rng.integers(level - 50, level + 50, size=(side, side, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{index:03}.png")
    return directory
