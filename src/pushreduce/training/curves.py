"""Curves of one or several runs as a PNG: loss and accuracy, by epoch and by wall clock.

Owns the figures that are drawn from run directories. Does not choose or label runs for comparison
(`scripts/compare`), and does not compute the numbers of a summary (`summary.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter, MaxNLocator, StrMethodFormatter

from pushreduce.training.metrics import read_records
from pushreduce.training.summary import PHASES, Summary

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_PHASE_COLOURS = {
    "compute": "#009E73",
    "local_update": "#56B4E9",
    "communication": "#E69F00",
    "blocked": "#D55E00",
    "other": "#BBBBBB",
}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "figure.constrained_layout.use": True,
}
_MAX_LOSS_POINTS = 150
_MIN_STEPS_PER_POINT = 8


@dataclass
class _Curves:
    """Arrays over points; time as (epochs, wall-clock seconds)."""

    loss_at: np.ndarray  # [2, points]
    loss: np.ndarray  # [3, points]: mean, and the 10th and 90th percentile of the steps that make a point
    evaluated_at: np.ndarray  # [2, evaluations]
    validation_loss: np.ndarray  # [evaluations]
    top1_percent: np.ndarray  # [evaluations]
    top1_percent_by_rank: np.ndarray  # [2, evaluations]: lowest and highest


def draw_curves(run_dirs: Path | Sequence[Path], png: Path, labels: Sequence[str] | None = None) -> None:
    """Draws loss and top-1 accuracy, by epoch and by wall clock, from the records of rank 0.

    Args:
        run_dirs: one run, or several to be compared; finished or not.
        png: the file to write.
        labels: one a run; default: the directories' names.

    Raises:
        ValueError: a record is damaged.
        FileNotFoundError: a run directory has no record.
    """
    runs = [run_dirs] if isinstance(run_dirs, Path) else list(run_dirs)
    with matplotlib.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex="col", sharey="row")
        _draw_runs(axes, runs, labels or [run.name for run in runs])
        figure.savefig(png)
        plt.close(figure)


def draw_comparison(
    run_dirs: Sequence[Path], summaries: Sequence[Summary], labels: Sequence[str], png: Path
) -> None:
    """Draws what `draw_curves` does and, below, a bar a run: the mean iteration and what it is made of."""
    with matplotlib.rc_context(STYLE):
        height = 0.9 + 0.32 * len(run_dirs)
        figure = plt.figure(figsize=(9, 6.2 + height))
        grid = figure.add_gridspec(2, 1, height_ratios=(6.2, height))
        above, below = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
        _draw_runs(above.subplots(2, 2, sharex="col", sharey="row"), run_dirs, labels)
        _draw_iterations(below.subplots(), summaries, labels)
        figure.savefig(png)
        plt.close(figure)


def use_logarithmic_scale(axis: Axes) -> None:
    """Of a loss, upwards; with numbers on it also where no power of ten is in sight."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))


def _draw_runs(axes: np.ndarray, run_dirs: Sequence[Path], labels: Sequence[str]) -> None:
    alone = len(run_dirs) == 1
    all_curves = [_read_curves(run_dir) for run_dir in run_dirs]
    longest = max((curves.loss_at[1, -1] for curves in all_curves if curves.loss_at.size), default=0.0)
    divisor, unit = (3600, "h") if longest > 7200 else (60, "min") if longest > 300 else (1, "s")
    for index, (curves, label) in enumerate(zip(all_curves, labels, strict=True)):
        colour = COLOURS[index % len(COLOURS)]
        dashes = ("-", "--", ":", "-.")[index // len(COLOURS) % 4]
        top1 = f" ({curves.top1_percent[-1]:.1f} %)" if curves.top1_percent.size else ""
        for column, scale in enumerate((1, divisor)):
            loss_axis, accuracy_axis = axes[0, column], axes[1, column]
            at, evaluated_at = curves.loss_at[column] / scale, curves.evaluated_at[column] / scale
            middle, low, high = curves.loss
            if alone:
                loss_axis.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
            loss_axis.plot(
                at,
                middle,
                dashes,
                color=colour,
                label="training (band: 80 % of the steps)" if alone else label,
            )
            loss_axis.plot(
                evaluated_at,
                curves.validation_loss,
                "o",
                markersize=3,
                color=COLOURS[1] if alone else colour,
                label="validation, consensus model" if alone else None,
            )
            accuracy_axis.fill_between(
                evaluated_at, *curves.top1_percent_by_rank, color=colour, alpha=0.15, linewidth=0
            )
            accuracy_axis.plot(
                evaluated_at,
                curves.top1_percent,
                dashes,
                marker="o",
                markersize=3,
                color=colour,
                label=label + top1,
            )
    clock = " or ".join(sorted({"virtual time" if _is_simulated(run) else "wall clock" for run in run_dirs}))
    for column, x_label in enumerate(("epoch", f"{clock} ({unit})")):
        if any(
            (curves.loss > 0).any() for curves in all_curves
        ):  # else there is nothing a logarithm can show
            use_logarithmic_scale(axes[0, column])
        axes[1, column].xaxis.set_major_locator(MaxNLocator("auto", steps=(1, 2, 5, 10)))
        axes[1, column].set_xlabel(x_label)
        axes[1, column].set_xlim(left=0)
    axes[0, 0].set_ylabel("loss" if alone else "loss (line: training, dots: validation)")
    axes[1, 0].set_ylabel("top-1 accuracy (%)")
    if alone:
        axes[0, 0].legend()
    axes[1, 0].legend(loc="lower right", title="line: consensus model, band: all ranks", alignment="left")


def _draw_iterations(axis: Axes, summaries: Sequence[Summary], labels: Sequence[str]) -> None:
    parts = {phase: np.array([s[f"{phase}_ms_mean"] or 0.0 for s in summaries]) for phase in PHASES}
    total = np.array([s["iteration_ms_mean"] or 0.0 for s in summaries])
    parts["other"] = np.maximum(0.0, total - sum(parts.values()))
    left = np.zeros(len(summaries))
    for phase, milliseconds in parts.items():
        name = "other (data, records)" if phase == "other" else phase.replace("_", " ")
        axis.barh(labels, milliseconds, left=left, height=0.65, color=_PHASE_COLOURS[phase], label=name)
        left += milliseconds
    for row, end in enumerate(left):
        axis.annotate(f"{end:#.3g} ms", (end, row), xytext=(3, 0), textcoords="offset points", va="center")
    axis.margins(x=0.12)
    axis.set_xlim(left=0)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("mean iteration (ms)")
    axis.legend(ncols=len(parts), loc="lower center", bbox_to_anchor=(0.5, 1.0), columnspacing=1.2)


def _is_simulated(run_dir: Path) -> bool:
    environment = run_dir / "environment.json"
    return environment.is_file() and "simulated" in json.loads(environment.read_text(encoding="utf-8"))


def _read_curves(run_dir: Path) -> _Curves:
    steps: list[tuple[float, float, float]] = []
    evaluations: list[tuple[float, ...]] = []
    for record in read_records(run_dir / "metrics.rank0.jsonl"):
        if record["kind"] == "step":
            steps.append((record["epoch"], record["wall_seconds"], _number(record["loss"])))
        elif record["kind"] == "evaluation":
            by_rank = [_number(top1) for top1 in record["top1_percent_by_rank"]]
            evaluations.append(
                (
                    record["epoch"],
                    record["wall_seconds"],
                    _number(record["validation_loss"]),
                    _number(record["top1_percent"]),
                    min(by_rank),
                    max(by_rank),
                )
            )
    step_columns = np.array(steps).reshape(-1, 3)
    num_points = min(_MAX_LOSS_POINTS, -(-len(steps) // _MIN_STEPS_PER_POINT))
    groups = np.array_split(step_columns, num_points) if num_points else []
    points = np.array(
        [
            [*group[:, :2].mean(0), group[:, 2].mean(), *np.percentile(group[:, 2], (10, 90))]
            for group in groups
        ]
    ).reshape(-1, 5)
    at = np.array(evaluations).reshape(-1, 6)
    return _Curves(points[:, :2].T, points[:, 2:].T, at[:, :2].T, at[:, 2], at[:, 3], at[:, 4:].T)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
