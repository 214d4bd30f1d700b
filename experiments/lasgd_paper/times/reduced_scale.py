#!/usr/bin/env python3
"""The paper's speed-ups over SGD-AR beside those measured on emulated clusters, 1 MB at 100 Mbit/s.

    python experiments/lasgd_paper/times/reduced_scale.py     in the activated environment; a second

Reads experiments/speed/emulated.csv (measured by experiments/speed/measure.py); writes reduced_scale.csv and
reduced_scale.md. Owns which measured system stands for which of the paper's methods, and no measurement.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
SPEED = ROOT / "experiments" / "speed"
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmarks"), str(SPEED)]
from pairs import STATISTICS, describe  # noqa: E402
from paper import Row, read_rows  # noqa: E402
from readme_tables import insert_table  # noqa: E402
from tables import write_csv  # noqa: E402

SIZES = (8, 16)
BATCH_SIZE_PER_GPU = 64
"""Of the paper's rows: 174 ms in FP32 at NVIDIA's speed, 2.2 times a message's 80 ms; here it is 3.5 times."""
SYSTEMS = {"SGP": ("SGP", "OSGP(1)"), "LASGD": ("LASGD(1)",)}
"""Method of the paper -> what is measured here."""
BASELINES = ("SGD-AR, no overlap", "SGD-AR")
COLUMNS = ("num_hosts", "method", "paper_speed_up", "system", "baseline", *STATISTICS)
Measured = Mapping[tuple[int, str, str], float]
"""(number of hosts, system, round) -> iteration, ms"""


def main() -> None:
    """Writes the table."""
    with (SPEED / "emulated.csv").open(newline="") as file:
        measured = {
            (int(row["num_hosts"]), row["algorithm"], row["block"]): float(row["iteration_ms"])
            for row in csv.DictReader(file)
        }
    rows = list(speed_ups(measured, read_rows(FOLDER.parent / "lasgd_results.csv")))
    if not rows:
        print("error: experiments/speed/emulated.csv has no cluster of 8 or 16 hosts", file=sys.stderr)
        sys.exit(2)
    write_csv(FOLDER / "reduced_scale.csv", COLUMNS, rows)
    (FOLDER / "reduced_scale.md").write_text(table(rows))
    insert_table(FOLDER / "README.md", FOLDER / "reduced_scale.md")
    print(table(rows), end="")


def speed_ups(measured: Measured, paper: Sequence[Row]) -> Iterable[dict[str, Any]]:
    """SGD-AR's iteration over a method's: the paper's, from its hours, and those of the rounds here."""
    hours = {
        (row.num_hosts, row.method): row.hours
        for row in paper
        if row.table == 1 and row.batch_size_per_gpu == BATCH_SIZE_PER_GPU
    }
    for num_hosts in SIZES:
        rounds = sorted({block for size, _, block in measured if size == num_hosts})
        for method, systems in SYSTEMS.items():
            for system in systems:
                for baseline in BASELINES:
                    values = [
                        measured[num_hosts, baseline, block] / measured[num_hosts, system, block]
                        for block in rounds
                        if {(num_hosts, baseline, block), (num_hosts, system, block)} <= measured.keys()
                    ]
                    if values:
                        yield {
                            "num_hosts": num_hosts,
                            "method": method,
                            "paper_speed_up": hours[num_hosts, "SGD-AR"] / hours[num_hosts, method],
                            "system": system,
                            "baseline": baseline,
                            **describe(values),
                        }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """In the README."""
    lines = [
        "| nodes | method | the paper's speed-up over SGD-AR | measured here | over | median [95 % interval] | n |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['num_hosts']} | {row['method']} | {row['paper_speed_up']:.2f} | {row['system']} "
            f"| {row['baseline']} | {row['median']:.2f} [{row['ci_low']:.2f}, {row['ci_high']:.2f}] | {row['n']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
