"""From the blocks of measure.py to the tables and the figure.

Writes, beside blocks.jsonl: emulated.csv, a line a block, what simulations are checked against; results.csv and
results.md, the figures with their bounds; steps_per_allreduce.csv; figure.png. All times are those of the cluster that
is emulated: what was measured, divided by the stretch.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmarks")]
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import pieces  # noqa: E402
from blocks import read  # noqa: E402
from pairs import STATISTICS, describe, judge  # noqa: E402
from readme_tables import insert_table  # noqa: E402

from pushreduce.training.curves import COLOURS, STYLE  # noqa: E402

PAPER_TABLE_2 = ROOT / "experiments" / "lasgd_paper" / "lasgd_table2.csv"
COLUMNS = ("num_hosts", "algorithm", "block", "iteration_ms", "compute_ms_slowest", "compute_ms_mean")
COLUMNS += ("num_steps", "rate_mbit", "stretch", "cpu_share", "load_average", "commit")
RESULT_COLUMNS = ("measure", "num_hosts", *STATISTICS, "bound", "verdict", "commits")
Key = tuple[int, str]
"""(number of hosts, system)"""


def write(folder: Path) -> None:
    """All of it, from `folder`/blocks.jsonl; what has not been measured is said to be so."""
    lines = read(folder / "blocks.jsonl")
    cores = next((line["machine"]["cores"] for line in lines if "machine" in line), 1)
    blocks = [line for line in lines if "system" in line]
    steps = [summarise(block, cores) for block in blocks if "compute_ms" in block]
    steps.sort(key=lambda row: (row["num_hosts"], row["algorithm"], row["block"]))
    write_csv(folder / "emulated.csv", COLUMNS, steps)
    results = list(measures(steps, [block for block in blocks if "all_reduce_ms" in block]))
    write_csv(folder / "results.csv", RESULT_COLUMNS, results)
    counts = count_steps_per_allreduce(blocks)
    rows = [{"num_minibatches": key, "count": counts[key]} for key in counts]
    write_csv(folder / "steps_per_allreduce.csv", ("num_minibatches", "count"), rows)
    tables = [table_of_measures(results), table_of_iterations(steps), table_of_counts(counts)]
    (folder / "results.md").write_text("\n".join(tables))
    insert_table(folder / "README.md", folder / "results.md")
    sizes = {row["num_hosts"] for row in steps} - {pieces.TRIAL.num_hosts}
    if sizes:
        draw(by_key(row for row in steps if row["num_hosts"] in sizes), folder / "figure.png")


def summarise(block: Mapping[str, Any], num_cores: int) -> dict[str, Any]:
    """A block's row of emulated.csv.

    An iteration is the time from the moment when the last rank has taken its last step of the lead-in until the last
    has taken its last step, divided by the number of steps in between.
    """
    ended, compute = np.array(block["ended_ms"]), np.array(block["compute_ms"])  # [ranks, steps]
    first = block["lead_in"]
    assert 1 <= first < compute.shape[1]
    num_steps = compute.shape[1] - first
    seconds_ms = ended[:, -1].max() - ended[:, first - 1].max()
    by_rank = compute[:, first:].mean(axis=1) / block["stretch"]
    return {
        "num_hosts": block["num_hosts"],
        "algorithm": block["system"],
        "block": block["round"],
        "iteration_ms": seconds_ms / num_steps / block["stretch"],
        "compute_ms_slowest": by_rank.max(),
        "compute_ms_mean": by_rank.mean(),
        "num_steps": num_steps,
        "rate_mbit": block["rate_mbit"],
        "stretch": block["stretch"],
        # Of all cores, by the ranks' processes: where it comes near 1, processors are measured and no network.
        "cpu_share": sum(block["cpu_ms"]) / (seconds_ms * num_cores),
        "load_average": block["load_average"],
        "commit": block["commit"],
    }


def measures(
    steps: Sequence[Mapping[str, Any]], all_reduces: Sequence[Mapping[str, Any]]
) -> Iterable[dict[str, Any]]:
    """The issue's figures that there are data for, each from one value a round."""
    rows = by_key(steps)

    def of(system: str, num_hosts: int = 8) -> dict[int, Mapping[str, Any]]:
        return {row["block"]: row for row in rows.get((num_hosts, system), ())}

    def paired(a: Mapping[int, Any], b: Mapping[int, Any]) -> list[float]:
        return [a[i]["iteration_ms"] / b[i]["iteration_ms"] for i in sorted(a.keys() & b.keys())]

    figures: list[
        tuple[str, int | str, list[float], tuple[str, float] | None, Iterable[Mapping[str, Any]]]
    ] = []
    for system, bound in (("LASGD(1)", 1.05), ("OSGP(1)", 1.05), ("LASGD(5)", None), ("SGP", None)):
        own = of(system).values()
        ratios = [row["iteration_ms"] / row["compute_ms_slowest"] for row in own]
        figures.append((f"{system}: iteration / compute", 8, ratios, ("<=", bound) if bound else None, own))
    for baseline in pieces.SAME_UPDATES:
        bound = (">=", 1.5) if baseline == "SGD-AR, no overlap" else None
        values = paired(of(baseline), of("LASGD(1)"))
        figures.append((f"{baseline} / LASGD(1)", 8, values, bound, of(baseline).values()))
    for num_hosts in (6, 8):
        own = [block for block in all_reduces if block["num_hosts"] == num_hosts]
        values = [ring_efficiency(block) for block in own]
        figures.append(("all-reduce: ring bound / measured", num_hosts, values, (">=", 0.85), own))
    own = of(pieces.NO_JITTER).values()
    values = [(row["iteration_ms"] - row["compute_ms_slowest"]) / send_ms(row["rate_mbit"]) for row in own]
    figures.append(
        ("SGP without jitter: (iteration - compute) / (size / rate)", 8, values, ("<=", 1.25), own)
    )
    for system in ("LASGD(1)", "OSGP(1)", "SGD-AR"):
        bound = ("<=", 1.05) if system == "LASGD(1)" else None
        values = paired(of(system, 16), of(system, 4))
        figures.append(
            (f"{system}: iteration at 16 hosts / at 4", "16, 4", values, bound, of(system, 16).values())
        )
    for measure, num_hosts, values, bound, own in figures:
        row: dict[str, Any] = {"measure": measure, "num_hosts": num_hosts, "n": 0}
        row |= {"bound": judge(0.0, bound)[0], "verdict": "not measured yet"}
        if values:
            row |= describe(values)
            row["bound"], row["verdict"] = judge(row["median"], bound)
            row["commits"] = " ".join(sorted({str(each["commit"]) for each in own}))
        yield row


def ring_efficiency(block: Mapping[str, Any]) -> float:
    """2 (n - 1) / n x size / rate over the mean measured."""
    num_hosts = block["num_hosts"]
    bound_ms = 2 * (num_hosts - 1) / num_hosts * send_ms(block["rate_mbit"]) * block["stretch"]
    return bound_ms / float(np.mean(block["all_reduce_ms"]))


def send_ms(rate_mbit: float) -> float:
    """The model's size over the rate."""
    return 32 * pieces.NUM_PARAMETERS / (rate_mbit * 1e3)


def count_steps_per_allreduce(blocks: Iterable[Mapping[str, Any]]) -> Counter[int]:
    """Of the runs where an all-reduce takes 1 to 2 gradient computations, on 16 hosts; all ranks together."""
    counts: Counter[int] = Counter(dict.fromkeys(range(1, 7), 0))
    for block in blocks:
        if block["system"] == pieces.INTENSIVE and block["num_hosts"] == 16:
            counts.update({int(key): value for key, value in block["steps_per_allreduce"].items()})
    return counts


def table_of_measures(results: Iterable[Mapping[str, Any]]) -> str:
    lines = [
        "| measure | hosts | must | median [95 % interval] | min … max | n | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results:
        cells = [row["measure"], row["num_hosts"], row["bound"]]
        if row["n"]:
            cells += [f"{row['median']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}]"]
            cells += [f"{row['min']:.3f} … {row['max']:.3f}", row["n"], row["verdict"]]
        else:
            cells += ["", "", 0, row["verdict"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def table_of_iterations(steps: Sequence[Mapping[str, Any]]) -> str:
    """Medians over rounds with the range, in ms."""
    rows = by_key(steps)
    sizes = sorted({num_hosts for num_hosts, _ in rows})
    lines = [
        f"| iteration, ms | {' | '.join(f'{size} hosts' for size in sizes)} |",
        "|---|" + "---|" * len(sizes),
    ]
    systems = list(dict.fromkeys(system for _, system in rows))
    for system in sorted(systems, key=order):
        cells = [system]
        for size in sizes:
            values = [row["iteration_ms"] for row in rows.get((size, system), ())]
            cells.append(f"{np.median(values):.0f} ({min(values):.0f} … {max(values):.0f})" if values else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table_of_counts(counts: Counter[int]) -> str:
    """Beside the paper's table 2."""
    with PAPER_TABLE_2.open() as file:
        paper = {row["num_minibatches"]: row["percent"] for row in csv.DictReader(uncommented(file))}
    total = counts.total()
    lines = ["| local steps per all-reduce | measured, % | the paper's table 2, % |", "|---|---|---|"]
    for key in range(1, 7):
        label = "6+" if key == 6 else str(key)
        measured = f"{100 * counts[key] / total:.1f}" if total else "not measured yet"
        lines.append(f"| {label} | {measured} | {paper[label]} |")
    return "\n".join(lines) + "\n"


def uncommented(lines: Iterable[str]) -> Iterable[str]:
    """Without those that begin with #."""
    return (line for line in lines if not line.startswith("#"))


def by_key(steps: Iterable[Mapping[str, Any]]) -> dict[Key, list[Mapping[str, Any]]]:
    """The rows of emulated.csv by number of hosts and system."""
    rows: dict[Key, list[Mapping[str, Any]]] = {}
    for row in steps:
        rows.setdefault((row["num_hosts"], row["algorithm"]), []).append(row)
    return rows


# Order and look in the figure; a family has a colour. What is not here is a variant, in the tables only.
LOOK = {
    "SGD-AR, no overlap": (1, "o", "-"),
    "SGD-AR": (1, "s", "--"),
    "Horovod": (4, "^", "--"),
    "DDP": (3, "v", "--"),
    "SGP": (5, "D", "-"),
    "OSGP(1)": (2, "D", "--"),
    "LASGD(1)": (0, "o", "-"),
    "LASGD(5)": (0, "s", "--"),
}


def order(system: str) -> tuple[int, str]:
    """Of a system in tables."""
    return (list(LOOK).index(system) if system in LOOK else len(LOOK)), system


def draw(rows: Mapping[Key, Sequence[Mapping[str, Any]]], png: Path) -> None:
    """Iteration time by number of hosts, median and range over rounds; side by side, so that none hides another."""
    sizes = sorted({num_hosts for num_hosts, _ in rows})
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7.5, 4.2))
        for index, (system, (colour, marker, dashes)) in enumerate(LOOK.items()):
            points = [
                (place, rows[size, system]) for place, size in enumerate(sizes) if (size, system) in rows
            ]
            if not points:
                continue
            values = [[row["iteration_ms"] for row in own] for _, own in points]
            middle = np.array([np.median(each) for each in values])
            spread = [middle - [min(each) for each in values], [max(each) for each in values] - middle]
            axis.errorbar(
                [place + 0.07 * (index - (len(LOOK) - 1) / 2) for place, _ in points],
                middle,
                yerr=spread,
                color=COLOURS[colour],
                marker=marker,
                linestyle=dashes,
                markersize=4,
                linewidth=1,
                capsize=2,
                label=system,
            )
        compute = [
            np.median(
                [
                    row["compute_ms_slowest"]
                    for (n, system), own in rows.items()
                    if n == size and system in LOOK
                    for row in own
                ]
            )
            for size in sizes
        ]
        for place, each in enumerate(compute):
            label = "computation alone (slowest rank)" if place == 0 else None
            axis.hlines(
                each, place - 0.4, place + 0.4, color=COLOURS[6], linewidth=1, linestyle=":", label=label
            )
        axis.set_xticks(range(len(sizes)), [f"{size} hosts" for size in sizes])
        axis.set_ylabel("iteration (ms)")
        axis.set_ylim(bottom=0)
        axis.grid(axis="x", visible=False)
        axis.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        figure.savefig(png)
        plt.close(figure)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()})
