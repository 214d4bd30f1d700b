"""What the LASGD paper printed: its rows, the iteration times behind its hours, and whether a prediction holds them.

Owns the arithmetic from hours to iterations and intervals. Does not predict anything (`cluster.py`, `fit.py`).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

NUM_EPOCHS = 90
NUM_TRAIN_IMAGES = 1_281_167  # of ImageNet-1k
HALF_LAST_DIGIT_HOURS = 0.005
HALF_LAST_DIGIT_SPEED_UP = 0.005

Interval = tuple[float, float]


@dataclass(frozen=True)
class Row:
    """A cell of tables 1 and 3: a method at a size."""

    table: int
    method: str
    num_hosts: int
    num_gpus: int
    batch_size_per_gpu: int
    tau_max: int | None
    hours: float

    @property
    def label(self) -> str:
        """As tables and figures call it."""
        tau = f", tau_max = {self.tau_max}" if self.tau_max and self.batch_size_per_gpu == 32 else ""
        return f"{self.method}{tau}"

    @property
    def iteration_seconds(self) -> Interval:
        """Of all hours that are rounded to those printed."""
        return tuple(  # type: ignore[return-value]
            iteration_seconds(self.hours + sign * HALF_LAST_DIGIT_HOURS, self.global_batch_size)
            for sign in (-1, 1)
        )

    @property
    def global_batch_size(self) -> int:
        return self.num_gpus * self.batch_size_per_gpu


def iteration_seconds(hours: float, global_batch_size: int) -> float:
    """Mean time between a worker's updates, from the time of all epochs."""
    return hours * 3600 * global_batch_size / (NUM_EPOCHS * NUM_TRAIN_IMAGES)


def hours(seconds: float, global_batch_size: int) -> float:
    """The inverse of `iteration_seconds`."""
    return seconds * NUM_EPOCHS * NUM_TRAIN_IMAGES / (3600 * global_batch_size)


def read_rows(path: Path) -> list[Row]:
    """From `lasgd_results.csv`."""
    with path.open(newline="") as file:
        lines = [line for line in file if not line.startswith("#")]
    names = "table method num_hosts num_gpus batch_size_per_gpu tau_max top1_percent hours".split()
    return [
        Row(
            table=int(each["table"]),
            method=each["method"],
            num_hosts=int(each["num_hosts"]),
            num_gpus=int(each["num_gpus"]),
            batch_size_per_gpu=int(each["batch_size_per_gpu"]),
            tau_max=int(each["tau_max"]) if each["tau_max"] else None,
            hours=float(each["hours"]),
        )
        for each in csv.DictReader(lines, names)
    ]


def read_table_2(path: Path) -> dict[int, float]:
    """Percent of all-reduces by local steps, from `lasgd_table2.csv`; 6 stands for 6 and more."""
    with path.open(newline="") as file:
        lines = [line for line in file if not line.startswith("#")]
    return {
        int(each["num_minibatches"].rstrip("+")): float(each["percent"]) for each in csv.DictReader(lines)
    }


def verdict(paper: Interval, predicted: Interval) -> str:
    """`inside` where the two have a value in common, else how far the prediction is below or above the paper.

    The distance is that of the nearest ends, relative to the paper's value.
    """
    if predicted[0] <= paper[1] and paper[0] <= predicted[1]:
        return "inside"
    middle = (paper[0] + paper[1]) / 2
    if predicted[1] < paper[0]:
        return f"outside, {100 * (paper[0] - predicted[1]) / middle:.0f} % below"
    return f"outside, {100 * (predicted[0] - paper[1]) / middle:.0f} % above"
