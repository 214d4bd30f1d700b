"""The paper's figures 5 and 6 with the predictions beside its points, and how well each single-GPU speed fits.

Owns how they look. Computes nothing: draws what is in the CSV files.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from cluster import CHOICES, Choice
from matplotlib.axes import Axes
from paper import NUM_EPOCHS

from pushreduce.training.curves import COLOURS, STYLE

METHODS = ("SGD-AR", "SGP", "LASGD", "WLASGD")
DECAY_EPOCHS = (30, 60, 80)
_Records = list[dict[str, str]]


def _read(path: Path) -> _Records:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _at_batch_64(records: _Records, choice: Choice) -> _Records:
    wanted = {"precision": choice.precision, "overlap": str(choice.overlap), "batch_per_gpu": "64"}
    return [each for each in records if wanted.items() <= each.items()]


def _colour(method: str) -> str:
    return COLOURS[METHODS.index(method)]


def draw_figure_6(times_csv: Path, png: Path) -> None:
    """Iteration time by nodes at batch 64: the paper's points, and a band over all parameters that fit, by choice."""
    records = _read(times_csv)
    with matplotlib.rc_context(STYLE):
        figure, panels = plt.subplots(1, len(CHOICES), figsize=(12, 3.8), sharey=True, layout="constrained")
        for axes, choice in zip(panels, CHOICES, strict=True):
            for method in METHODS:
                own = [each for each in _at_batch_64(records, choice) if each["method"] == method]
                nodes = [int(each["nodes"]) for each in own]
                low, high = ([float(each[end]) for each in own] for end in ("low_ms", "high_ms"))
                axes.fill_between(nodes, low, high, color=_colour(method), alpha=0.3, linewidth=0)
                for end in (low, high):
                    axes.plot(nodes, end, color=_colour(method), linewidth=0.8)
                paper = [(float(each["paper_ms_low"]) + float(each["paper_ms_high"])) / 2 for each in own]
                axes.plot(nodes, paper, "o--", color=_colour(method), label=method, markersize=5)
            axes.set_title(choice.label)
            axes.set_xticks([8, 16, 32])
            axes.set_xlabel("nodes")
        panels[0].set_ylabel("iteration, ms")
        panels[0].set_ylim(bottom=0)
        _legend(figure, panels[0])
        figure.savefig(png)
        plt.close(figure)


def draw_figure_5(times_csv: Path, png: Path) -> None:
    """The time axis: epochs done by hours, as predicted (bands) and as in the paper (dashes); a row a choice."""
    records = _read(times_csv)
    sizes = (8, 16, 32)
    with matplotlib.rc_context(STYLE):
        figure, panels = plt.subplots(
            len(CHOICES), len(sizes), figsize=(11, 10), sharex="col", sharey=True, layout="constrained"
        )
        for of_choice, choice in zip(panels, CHOICES, strict=True):
            for axes, num_hosts in zip(of_choice, sizes, strict=True):
                _draw_epochs(
                    axes, [each for each in _at_batch_64(records, choice) if each["nodes"] == str(num_hosts)]
                )
                axes.set_title(f"{num_hosts} nodes; {choice.label}")
            of_choice[0].set_ylabel("epochs")
        for axes in panels[-1]:
            axes.set_xlabel("hours")
        panels[0, 0].set_ylim(0, NUM_EPOCHS + 3)
        _legend(figure, panels[0, 0])
        figure.savefig(png, dpi=110)
        plt.close(figure)


def _draw_epochs(axes: Axes, records: Sequence[dict[str, str]]) -> None:
    """One panel, with lines where the learning rate decays."""
    for each in records:
        colour = _colour(each["method"])
        low, high, paper = (float(each[name]) for name in ("low_hours", "high_hours", "paper_hours"))
        axes.fill_betweenx([0, NUM_EPOCHS], [0, low], [0, high], color=colour, alpha=0.3, linewidth=0)
        axes.plot([0, paper], [0, NUM_EPOCHS], "--", color=colour, linewidth=1)
        axes.plot(paper, NUM_EPOCHS, "o", color=colour, label=each["method"])
    for epoch in DECAY_EPOCHS:
        axes.axhline(epoch, color="0.7", linewidth=0.7, zorder=0)
    axes.set_xlim(left=0)


def _legend(figure: plt.Figure, axes: Axes) -> None:
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(METHODS),
        title="points and dashes: the paper; bands: predicted (SGD-AR: fitted)",
    )


def draw_profile(profile_csv: Path, png: Path) -> None:
    """Best misfit to the SGD-AR rows by single-GPU speed, and what LASGD and WLASGD would then take."""
    records = _read(profile_csv)
    with matplotlib.rc_context(STYLE):
        figure, (misfit, times) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
        for overlap, style in (("False", "--"), ("True", "-")):
            own = [each for each in records if each["overlap"] == overlap]
            speeds = [float(each["images_per_second"]) for each in own]
            label = "overlapped" if overlap == "True" else "not overlapped"
            misfit.plot(
                speeds, [float(each["misfit_percent"]) for each in own], f"o{style}", color="k", label=label
            )
            for number, name in enumerate(("lasgd_8", "lasgd_32", "wlasgd_8", "wlasgd_32")):
                times.plot(
                    speeds,
                    [float(each[f"{name}_ms"]) for each in own],
                    style,
                    color=COLOURS[number],
                    label=f"{name.upper().replace('_', ', ')} nodes, {label}",
                )
        misfit.set_ylabel("largest distance from an SGD-AR row, %")
        misfit.set_ylim(bottom=0)
        misfit.legend()
        times.set_ylabel("predicted iteration, ms")
        times.set_ylim(bottom=0)
        for axes in (misfit, times):
            axes.set_xscale("log")
            axes.set_xticks([200, 300, 400, 600, 800, 1200], ["200", "300", "400", "600", "800", "1200"])
            axes.minorticks_off()
            axes.set_xlabel("one GPU alone, images/s")
        figure.legend(*times.get_legend_handles_labels(), loc="outside right center")
        figure.savefig(png)
        plt.close(figure)
