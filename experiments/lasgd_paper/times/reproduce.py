#!/usr/bin/env python
"""The LASGD paper's times from a model of its cluster, fitted on its SGD-AR rows only: tables 1 to 4, figures 5 and 6.

    python experiments/lasgd_paper/times/reproduce.py      activated environment; two minutes of one core

Writes the CSV and Markdown files and the pictures beside it. Everything is deterministic.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from cluster import CHOICES, Choice, Parameters, iteration_seconds, steps_per_allreduce_percent
from figures import draw_figure_5, draw_figure_6, draw_profile
from fit import Fit, best_fit, fit
from paper import HALF_LAST_DIGIT_SPEED_UP, Interval, Row, hours, read_rows, read_table_2, verdict
from tqdm import tqdm

HERE = Path(__file__).parent
TABLE_4 = {("SGP", 32, None): 1.21, ("LASGD", 32, 1): 1.36, ("LASGD", 32, 5): 1.47}
TABLE_4 |= {("SGP", 64, None): 1.03, ("LASGD", 64, 1): 1.27}
PROFILE_IMAGES_PER_SECOND = (200.0, 229.0, 300.0, 460.0, 700.0, 1200.0)
"""229: what WLASGD's fastest row implies if it waits for nothing."""

Predictions = dict[tuple[Choice, Row], list[float]]
"""Iteration seconds for each of a fit's parameters; the best one's are the first."""


def main() -> None:
    rows = read_rows(HERE.parent / "lasgd_results.csv")
    fitted = [row for row in rows if row.method == "SGD-AR"]
    fits = [fit(fitted, choice) for choice in tqdm(CHOICES, desc="fits", disable=None)]
    write("fits", [record for each in fits for record in fit_records(each)], fit_table(fits))
    predictions: Predictions = {
        (each.choice, row): [iteration_seconds(row, each.choice, parameters) for parameters in each.accepted]
        for each in tqdm(fits, desc="predictions", disable=None)
        for row in rows
    }
    write("times", time_records(predictions), time_table(rows, predictions))
    write("speed_ups", speed_up_records(rows, predictions), speed_up_table(rows, predictions))
    percents = {each.choice: table_2_percents(rows, each) for each in fits}
    paper_percents = read_table_2(HERE.parent / "lasgd_table2.csv")
    write("table_2", table_2_records(paper_percents, percents), table_2_table(paper_percents, percents))
    draw_figure_5(HERE / "times.csv", HERE / "figure_5_time_axis.png")
    draw_figure_6(HERE / "times.csv", HERE / "figure_6.png")
    profile = [
        (
            overlap,
            speed,
            *best_fit(fitted, Choice(overlap, f"{speed:.0f} images/s", speed)),
        )
        for overlap in (False, True)
        for speed in tqdm(PROFILE_IMAGES_PER_SECOND, desc="profile", disable=None)
    ]
    write("profile", profile_records(rows, profile), None)
    draw_profile(HERE / "profile.csv", HERE / "profile.png")


def write(name: str, records: list[dict[str, object]], table: str | None) -> None:
    with (HERE / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    if table is not None:
        (HERE / f"{name}.md").write_text(table)


def interval(values: Sequence[float]) -> Interval:
    return min(values), max(values)


def markdown(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


# -- the fits ----------------------------------------------------------------------------------------------------------

PARAMETER_UNITS = {"latency_seconds": ("ms", 1e3), "step_jitter": ("%", 1e2), "in_host_seconds": ("ms", 1e3)}


def fit_records(each: Fit) -> list[dict[str, object]]:
    return [
        {
            "precision": each.choice.precision,
            "overlap": each.choice.overlap,
            "images_per_second": each.choice.images_per_second,
            "misfit_percent": f"{100 * each.best_misfit:.2f}",
            "num_parameters_kept": len(each.accepted),
            "parameter": f"{name.removesuffix('_seconds')}_{'percent' if unit == '%' else unit}",
            "best": f"{factor * getattr(each.best, name):.3f}",
            "low": f"{factor * min(getattr(one, name) for one in each.accepted):.3f}",
            "high": f"{factor * max(getattr(one, name) for one in each.accepted):.3f}",
        }
        for name, (unit, factor) in PARAMETER_UNITS.items()
    ]


def fit_table(fits: Sequence[Fit]) -> str:
    def cell(each: Fit, name: str) -> str:
        unit, factor = PARAMETER_UNITS[name]
        low, high = interval([factor * getattr(one, name) for one in each.accepted])
        return f"{factor * getattr(each.best, name):.2f} ({low:.2f} … {high:.2f}) {unit}"

    return markdown(
        ["choice", "images/s", "best misfit", "latency a message", "jitter of a step", "average in a host"],
        [
            [
                each.choice.label,
                f"{each.choice.images_per_second:.0f}",
                f"{100 * each.best_misfit:.1f} %",
                *(cell(each, name) for name in PARAMETER_UNITS),
            ]
            for each in fits
        ],
    )


# -- tables 1 and 3, figure 6 ------------------------------------------------------------------------------------------


def time_records(predictions: Predictions) -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    for (choice, row), seconds in predictions.items():
        low, high = interval(seconds)
        records.append(
            {
                "table": row.table,
                "method": row.method,
                "nodes": row.num_hosts,
                "batch_per_gpu": row.batch_size_per_gpu,
                "tau_max": row.tau_max or "",
                "role": "fitted" if row.method == "SGD-AR" else "predicted",
                "precision": choice.precision,
                "overlap": choice.overlap,
                "paper_hours": row.hours,
                "paper_ms_low": f"{1e3 * row.iteration_seconds[0]:.1f}",
                "paper_ms_high": f"{1e3 * row.iteration_seconds[1]:.1f}",
                "best_ms": f"{1e3 * seconds[0]:.1f}",
                "low_ms": f"{1e3 * low:.1f}",
                "high_ms": f"{1e3 * high:.1f}",
                "low_hours": f"{hours(low, row.global_batch_size):.2f}",
                "high_hours": f"{hours(high, row.global_batch_size):.2f}",
                "verdict": verdict(row.iteration_seconds, (low, high)),
            }
        )
    return sorted(records, key=lambda each: (each["table"], each["role"] != "fitted"))


def time_table(rows: Sequence[Row], predictions: Predictions) -> str:
    def cell(choice: Choice, row: Row) -> str:
        low, high = interval(predictions[choice, row])
        said = verdict(row.iteration_seconds, (low, high))
        return f"{1e3 * low:.0f} … {1e3 * high:.0f} {'(fitted)' if row.method == 'SGD-AR' else said}"

    return markdown(
        ["method", "nodes", "batch", "paper, hours", "paper, ms", *(choice.label for choice in CHOICES)],
        [
            [
                row.label,
                str(row.num_hosts),
                str(row.batch_size_per_gpu),
                f"{row.hours:.2f}",
                f"{500 * sum(row.iteration_seconds):.0f}",
                *(cell(choice, row) for choice in CHOICES),
            ]
            for row in rows
        ],
    )


# -- table 4 -----------------------------------------------------------------------------------------------------------


def speed_ups(
    rows: Sequence[Row], predictions: Predictions
) -> list[tuple[Row, float, float, dict[Choice, Interval]]]:
    """(row, as printed, from the hours printed, as predicted with the same parameters for both) of Table 4's cells."""
    cells = []
    for (method, batch_size, tau_max), printed in TABLE_4.items():
        (row,) = (
            each
            for each in rows
            if (each.method, each.batch_size_per_gpu, each.tau_max) == (method, batch_size, tau_max)
            and each.num_hosts == 16
        )
        (baseline,) = (
            each
            for each in rows
            if each.method == "SGD-AR" and each.num_hosts == 16 and each.batch_size_per_gpu == batch_size
        )
        predicted = {
            choice: interval(
                [
                    slow / fast
                    for slow, fast in zip(
                        predictions[choice, baseline], predictions[choice, row], strict=True
                    )
                ]
            )
            for choice in CHOICES
        }
        cells.append((row, printed, baseline.hours / row.hours, predicted))
    return cells


def _printed(speed_up: float) -> Interval:
    return speed_up - HALF_LAST_DIGIT_SPEED_UP, speed_up + HALF_LAST_DIGIT_SPEED_UP


def speed_up_records(rows: Sequence[Row], predictions: Predictions) -> list[dict[str, object]]:
    return [
        {
            "method": row.method,
            "batch_per_gpu": row.batch_size_per_gpu,
            "tau_max": row.tau_max or "",
            "paper": printed,
            "from_paper_hours": f"{of_hours:.3f}",
            "precision": choice.precision,
            "overlap": choice.overlap,
            "low": f"{low:.2f}",
            "high": f"{high:.2f}",
            "verdict": verdict(_printed(of_hours), (low, high)),
        }
        for row, printed, of_hours, predicted in speed_ups(rows, predictions)
        for choice, (low, high) in predicted.items()
    ]


def speed_up_table(rows: Sequence[Row], predictions: Predictions) -> str:
    return markdown(
        ["method", "batch", "paper", "from its hours", *(choice.label for choice in CHOICES)],
        [
            [
                row.label,
                str(row.batch_size_per_gpu),
                f"{printed:.2f}",
                f"{of_hours:.2f}",
                *(
                    f"{low:.2f} … {high:.2f} {verdict(_printed(of_hours), (low, high))}"
                    for low, high in predicted.values()
                ),
            ]
            for row, printed, of_hours, predicted in speed_ups(rows, predictions)
        ],
    )


# -- table 2 -----------------------------------------------------------------------------------------------------------

Percents = dict[int, Interval]


def table_2_percents(rows: Sequence[Row], of: Fit) -> Percents:
    """Over all parameters, of LASGD with tau_max = 5."""
    (row,) = (each for each in rows if each.tau_max == 5)
    each_percents = [steps_per_allreduce_percent(row, of.choice, parameters) for parameters in of.accepted]
    return {steps: interval([each[steps] for each in each_percents]) for steps in each_percents[0]}


def table_2_records(paper: dict[int, float], percents: dict[Choice, Percents]) -> list[dict[str, object]]:
    return [
        {
            "local_steps": f"{steps}+" if steps == max(paper) else steps,
            "paper_percent": percent,
            "precision": choice.precision,
            "overlap": choice.overlap,
            "low_percent": f"{predicted[steps][0]:.1f}",
            "high_percent": f"{predicted[steps][1]:.1f}",
        }
        for steps, percent in paper.items()
        for choice, predicted in percents.items()
    ]


def table_2_table(paper: dict[int, float], percents: dict[Choice, Percents]) -> str:
    return markdown(
        ["local steps", "paper, %", *(choice.label for choice in percents)],
        [
            [
                f"{steps}+" if steps == max(paper) else str(steps),
                f"{percent:.1f}",
                *(f"{each[steps][0]:.0f} … {each[steps][1]:.0f}" for each in percents.values()),
            ]
            for steps, percent in paper.items()
        ],
    )


# -- how far the rows identify anything ---------------------------------------------------------------------------


def profile_records(
    rows: Sequence[Row], profile: Sequence[tuple[bool, float, Parameters, float]]
) -> list[dict[str, object]]:
    """Best misfit, and what it says of the others at batch 64, for single-GPU speeds from no source."""
    shown = [row for row in rows if row.method in ("LASGD", "WLASGD") and row.batch_size_per_gpu == 64]
    return [
        {
            "overlap": overlap,
            "images_per_second": speed,
            "misfit_percent": f"{100 * best_misfit:.2f}",
            **{name: f"{getattr(best, name):.5f}" for name in PARAMETER_UNITS},
            **{
                f"{row.method.lower()}_{row.num_hosts}_ms": f"{1e3 * seconds:.0f}"
                for row in shown
                for seconds in [iteration_seconds(row, Choice(overlap, "", speed), best)]
            },
        }
        for overlap, speed, best, best_misfit in profile
    ]


if __name__ == "__main__":
    main()
