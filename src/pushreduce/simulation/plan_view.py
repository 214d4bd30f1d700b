"""Predictions as tables (Markdown, CSV) and as a picture.

Owns how a plan looks. Does not compute anything (`planning.py`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, StrMethodFormatter

from pushreduce.simulation.planning import SGD_AR, VARIANTS, Interval, Prediction, Variant
from pushreduce.training.curves import COLOURS, STYLE

CSV_FIELDS = (
    "algorithm",
    "num_ranks",
    "num_draws",
    "iteration_ms",
    "iteration_ms_low",
    "iteration_ms_high",
    "exposed_ms",
    "exposed_ms_low",
    "exposed_ms_high",
    "speed_up",
    "speed_up_low",
    "speed_up_high",
)


def to_markdown(predictions: Sequence[Prediction]) -> str:
    """Three tables, a row for every number of ranks: iteration, exposed communication, speed-up."""
    tables = (
        ("Iteration, ms", lambda each: _milliseconds(each.iteration_seconds)),
        ("Exposed communication, ms an iteration", lambda each: _milliseconds(each.exposed_seconds)),
        (f"Speed-up over {SGD_AR.name}", lambda each: _ratio(each.speed_up)),
    )
    return "\n".join(f"{title}\n\n{_table(predictions, cell)}" for title, cell in tables)


def to_csv(predictions: Sequence[Prediction]) -> str:
    """A line for every number of ranks and variant."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for each in predictions:
        intervals = [(each.iteration_seconds, 1e3), (each.exposed_seconds, 1e3), (each.speed_up, 1.0)]
        numbers = [
            f"{factor * end:.6g}"
            for interval, factor in intervals
            for end in (interval.value, interval.low, interval.high)
        ]
        writer.writerow([each.variant.name, each.num_ranks, each.num_draws, *numbers])
    return text.getvalue()


def draw(predictions: Sequence[Prediction], png: Path, title: str) -> None:
    """Iteration time and speed-up by number of ranks, with their 95 % intervals as bands."""
    with matplotlib.rc_context(STYLE):
        figure, (iteration, speed_up) = plt.subplots(1, 2, figsize=(10, 4.4))
        programs = list(dict.fromkeys(variant.program for variant in VARIANTS))
        for variant in _variants(predictions):
            style = {
                "color": COLOURS[programs.index(variant.program)],
                "linestyle": "--" if variant.worker_is_host else ":" if not variant.options else "-",
                "label": variant.name,
            }
            own = [each for each in predictions if each.variant == variant]
            _draw_line(iteration, own, lambda each: each.iteration_seconds, 1e3, style)
            _draw_line(speed_up, own, lambda each: each.speed_up, 1.0, style)
        iteration.set_ylabel("iteration, ms")
        speed_up.set_ylabel(f"speed-up over {SGD_AR.name}")
        iteration.set_ylim(bottom=0)
        for axes in (iteration, speed_up):
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted({each.num_ranks for each in predictions}))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel("ranks")
        handles, labels = iteration.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center")
        figure.suptitle(title)
        figure.savefig(png)
        plt.close(figure)


def _draw_line(
    axes: Axes,
    predictions: Sequence[Prediction],
    quantity: Callable[[Prediction], Interval],
    factor: float,
    style: dict[str, str],
) -> None:
    ranks = [each.num_ranks for each in predictions]
    value, low, high = (
        [factor * getattr(quantity(each), end) for each in predictions] for end in ("value", "low", "high")
    )
    axes.plot(ranks, value, marker="o", markersize=3, **style)  # type: ignore[arg-type]
    axes.fill_between(ranks, low, high, color=style["color"], alpha=0.12, linewidth=0)


def _variants(predictions: Sequence[Prediction]) -> list[Variant]:
    return sorted({each.variant for each in predictions}, key=VARIANTS.index)


def _table(predictions: Sequence[Prediction], cell: Callable[[Prediction], str]) -> str:
    variants = _variants(predictions)
    cells = {(each.num_ranks, each.variant): cell(each) for each in predictions}
    rows = [["ranks", *(variant.name for variant in variants)]]
    for num_ranks in dict.fromkeys(each.num_ranks for each in predictions):
        rows.append([str(num_ranks), *(cells.get((num_ranks, variant), "") for variant in variants)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, [f"{'-' * (width - 1)}:" for width in widths])
    lines = (" | ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"| {line} |\n" for line in lines)


def _milliseconds(interval: Interval) -> str:
    half_width = 500.0 * (interval.high - interval.low)
    value = 1e3 * interval.value
    digits = 0 if abs(value) >= 100 and half_width >= 1 else 1
    value = round(value, digits) + 0.0  # no -0.0
    return f"{value:.{digits}f} ± {half_width:.{digits}f}"


def _ratio(interval: Interval) -> str:
    return f"{interval.value:.2f} ({interval.low:.2f} … {interval.high:.2f})"
