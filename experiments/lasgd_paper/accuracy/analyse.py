"""Answers the experiment's questions from its results: which algorithm loses how much, and does it grow with n.

    python experiments/lasgd_paper/accuracy/analyse.py

Writes answers.md (paired differences with 95 % intervals) from results.csv, also into README.md, and figure_paper.png
(the paper's figures 4 and 5: training loss by epoch and by wall clock, mean over seeds) from curves.csv. What of
curves.csv is missing is read from the runs where they are on this machine.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from pushreduce.training.curves import use_logarithmic_scale
from pushreduce.training.intervals import half_width_95, show_interval
from pushreduce.training.metrics import read_records

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from readme_tables import insert_table  # noqa: E402

RUNS = ROOT / "runs" / "lasgd_paper-accuracy"
SMALL, LARGE = "8 nodes", "32 nodes"
COLOURS = {"SGD-AR": "#0072B2", "SGP": "#D55E00", "LASGD": "#009E73", "WLASGD": "#CC79A7"}
PAPER = {  # table 1, top-1 % of ResNet-50 on ImageNet
    SMALL: {"SGD-AR": 76.2, "SGP": 75.8, "LASGD": 75.9, "WLASGD": 75.8},
    LARGE: {"SGD-AR": 76.0, "SGP": 74.4, "LASGD": 75.0, "WLASGD": 72.8},
}
CONTRASTS = (
    ("SGP", "SGD-AR"),
    ("LASGD", "SGD-AR"),
    ("WLASGD", "SGD-AR"),
    ("SGP", "LASGD"),
    ("WLASGD", "LASGD"),
    ("WLASGD", "SGP"),
)
CURVE_COLUMNS = ("group", "variant", "seed", "epoch", "wall_seconds", "training_loss", "top1_percent")

Top1 = dict[tuple[str, str, int], float]


def main() -> None:
    with (FOLDER / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    top1 = {(row["group"], row["variant"], int(row["seed"])): float(row["top1_percent"]) for row in rows}
    (FOLDER / "answers.md").write_text(answers(top1))
    insert_table(FOLDER / "README.md", FOLDER / "answers.md")
    draw(update_curves(rows))
    print((FOLDER / "answers.md").read_text())


def answers(top1: Top1) -> str:
    """The table of paired differences, as Markdown."""
    lines = [
        "| difference of top-1, points | 8 nodes: paper | here | 32 nodes: paper | here | here, 32 less 8 nodes |",
        "|---|---|---|---|---|---|",
    ]
    for one, other in CONTRASTS:
        cells = [f"{one} - {other}"]
        by_group = {group: differences(top1, group, one, other) for group in (SMALL, LARGE)}
        for group in (SMALL, LARGE):
            cells += [
                f"{PAPER[group][one] - PAPER[group][other]:.1f}",
                verdict(list(by_group[group].values())),
            ]
        both = by_group[SMALL].keys() & by_group[LARGE].keys()
        cells += [verdict([by_group[LARGE][seed] - by_group[SMALL][seed] for seed in sorted(both)])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def differences(top1: Top1, group: str, one: str, other: str) -> dict[int, float]:
    """By seed, of those that both have."""
    return {
        seed: value - top1[group, other, seed]
        for (its_group, variant, seed), value in top1.items()
        if (its_group, variant) == (group, one) and (group, other, seed) in top1
    }


def verdict(values: list[float]) -> str:
    if not values:
        return "-"
    resolved = abs(statistics.mean(values)) > half_width_95(values)
    return f"{show_interval(values)}, n = {len(values)}" + ("" if resolved else ", not resolved")


def update_curves(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    path = FOLDER / "curves.csv"
    curves = []
    if path.exists():
        with path.open(newline="") as file:
            curves = list(csv.DictReader(file))
    known = {(row["group"], row["variant"], row["seed"]) for row in curves}
    for row in rows:
        key = row["group"], row["variant"], row["seed"]
        run = RUNS / "{}-{}-seed{}".format(*key).replace(" ", "-")
        if key not in known and run.is_dir():
            curves += read_curve(run, dict(zip(CURVE_COLUMNS[:3], key, strict=True)))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, CURVE_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(curves)
    return curves


def read_curve(run: Path, key: dict[str, str]) -> list[dict[str, str]]:
    """A row an evaluation; the training loss is the mean over the recorded ranks' steps since the one before."""
    evaluations = [r for r in read_records(run / "metrics.rank0.jsonl") if r["kind"] == "evaluation"]
    sums = [[0.0, 0] for _ in evaluations]
    for path in run.glob("metrics.rank*.jsonl"):
        index = 0
        for record in read_records(path):
            if record["kind"] == "evaluation":
                index += 1
            elif index < len(sums):
                sums[index][0] += record["loss"]
                sums[index][1] += 1
    return [
        {
            **key,
            "epoch": f"{evaluation['epoch']:.3f}",
            "wall_seconds": f"{evaluation['wall_seconds']:.2f}",
            "training_loss": f"{loss / number:.5f}",
            "top1_percent": f"{evaluation['top1_percent']:.2f}",
        }
        for evaluation, (loss, number) in zip(evaluations, sums, strict=True)
    ]


def draw(curves: list[dict[str, str]]) -> None:
    """Rows: training loss by epoch (figure 4), top-1 error by epoch, training loss by wall clock (figure 5)."""
    figure, axes = plt.subplots(3, 2, figsize=(9, 9), sharey="row", layout="constrained")
    panels = (
        ("epoch", "training_loss", 1.0, "training loss"),
        ("epoch", "top1_percent", 1.0, "top-1 error (%)"),
        ("wall_seconds", "training_loss", 60.0, "training loss"),
    )
    for column, group in enumerate((SMALL, LARGE)):
        for variant, colour in COLOURS.items():
            by_seed = defaultdict(list)
            for row in curves:
                if (row["group"], row["variant"]) == (group, variant):
                    by_seed[row["seed"]].append(row)
            if not by_seed:
                continue
            for axis, (x, y, scale, _) in zip(axes[:, column], panels, strict=True):
                values = [
                    [100 - float(row[y]) if y == "top1_percent" else float(row[y]) for row in rows]
                    for rows in zip(*by_seed.values(), strict=True)
                ]
                at = [
                    statistics.mean(float(row[x]) for row in rows) / scale
                    for rows in zip(*by_seed.values(), strict=True)
                ]
                label = f"{variant} (n = {len(by_seed)})"
                axis.plot(
                    at, [statistics.mean(v) for v in values], color=colour, marker="o", ms=3, label=label
                )
                axis.fill_between(
                    at, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15, lw=0
                )
        for axis, (x, _, _, label) in zip(axes[:, column], panels, strict=True):
            axis.set_xlabel("epoch" if x == "epoch" else "virtual time (min)")
            if label == "training loss":
                use_logarithmic_scale(axis)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
            if column == 0:
                axis.set_ylabel(label)
        axes[0, column].set_title(group)
        if axes[0, column].lines:
            axes[0, column].legend(frameon=False)
    figure.savefig(FOLDER / "figure_paper.png", dpi=150)


if __name__ == "__main__":
    main()
