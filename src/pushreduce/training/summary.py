"""The summary of a run, `summary.json`: the few numbers by which runs are compared.

Owns how they are computed from the records of `metrics.py`, the file, and its table for a terminal. Does not
draw (`curves.py`) or compare (`scripts/compare`).
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from pushreduce.training.atomic_file import write_atomically
from pushreduce.training.metrics import Record

PHASES = ("compute", "local_update", "communication", "blocked")
"""The parts of an iteration that the record has. What remains is the loop's own: loading data, recording."""

MAX_WARM_UP_STEPS = 20
# A short run must keep enough steps to take a median of.
_WARM_UP_SHARE = 0.1

Summary = dict[str, Any]


def summarise(
    records: Iterable[Record], other_ranks: Sequence[Iterable[Record]] = (), **facts: Any
) -> Summary:
    """Computes the summary of a run.

    Times are of single iterations, pooled over the ranks given, from the end of one step to the end of the
    next. The first `warm_up_steps` of each rank (a tenth of its steps, at most MAX_WARM_UP_STEPS) are left
    out, and so are iterations with an evaluation inside. Medians do not add up, and waiting only now and then
    has a median of nought; so there are means too, whose parts do.

    Args:
        records: of rank 0.
        other_ranks: records of other ranks, where this process can read them.
        facts: further entries (algorithm, num_ranks, num_workers, dataset, model, seed, commit ...);
            they take the place of computed ones of the same name.

    Returns:
        The facts, and samples, epochs, wall_seconds, steps_per_rank (of the ranks given), top1_percent,
        validation_loss, consensus_distance (of the last evaluation), images_per_second (of all ranks together), and for
        iteration and each of PHASES `<name>_ms_median` and `<name>_ms_mean`. None: too short a run.
    """
    ranks = [_Rank(records), *(_Rank(other) for other in other_ranks)]
    first = ranks[0]
    summary: Summary = {
        "samples": first.last.get("samples", 0),
        "epochs": first.last.get("epoch", 0.0),
        "wall_seconds": first.last.get("wall_seconds", 0.0),
        "steps_per_rank": [rank.num_steps for rank in ranks],
        "top1_percent": first.last_evaluation.get("top1_percent"),
        "validation_loss": first.last_evaluation.get("validation_loss"),
        "consensus_distance": first.last_evaluation.get("consensus_distance"),
        "images_per_second": first.images_per_second(),
        "warm_up_steps": first.num_warm_up_steps,
    }
    for column, name in enumerate(("iteration", *PHASES)):
        seconds = np.concatenate([rank.seconds[:, column] for rank in ranks])
        summary[f"{name}_ms_median"] = 1000 * float(np.median(seconds)) if seconds.size else None
        summary[f"{name}_ms_mean"] = 1000 * float(np.mean(seconds)) if seconds.size else None
    return {**summary, **facts}


class _Rank:
    """What a summary needs of one rank's records."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.last: Record = {}
        self.last_evaluation: Record = {}
        self.num_steps = 0
        # A row an iteration: index of its step, samples, seconds in all, seconds of each of PHASES. An array,
        # since there may be millions.
        rows = array("d")
        for record in records:
            if record["kind"] == "evaluation":
                self.last_evaluation = record
            elif record["kind"] == "step":
                if self.last.get("kind") == "step":
                    seconds = record["wall_seconds"] - self.last["wall_seconds"]
                    rows.extend((self.num_steps, record["samples"] - self.last["samples"], seconds))
                    rows.extend(record[f"{phase}_seconds"] for phase in PHASES)
                self.num_steps += 1
            self.last = record
        self.num_warm_up_steps = min(MAX_WARM_UP_STEPS, int(_WARM_UP_SHARE * self.num_steps))
        iterations: np.ndarray = (
            np.frombuffer(rows).reshape(-1, 3 + len(PHASES)) if rows else np.empty((0, 3 + len(PHASES)))
        )
        iterations = iterations[iterations[:, 0] >= self.num_warm_up_steps]
        self.num_samples = float(iterations[:, 1].sum())
        self.seconds = iterations[:, 2:]

    def images_per_second(self) -> float | None:
        seconds = float(self.seconds[:, 0].sum())
        return self.num_samples / seconds if seconds > 0 else None


def write_summary(path: Path, summary: Summary) -> None:
    """Writes `summary.json`, complete or not at all."""
    write_atomically(path, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())


def read_summary(run_dir: Path) -> Summary:
    """The summary of a finished run.

    Raises:
        ValueError: there is none (the run has not finished), or it is damaged.
    """
    path = run_dir / "summary.json"
    if not path.is_file():
        raise ValueError(
            f"{run_dir} has no summary.json: the run has not finished; resume it first (--resume)"
        )
    try:
        summary: Summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    return summary


_ROWS = (
    ("algorithm", "algorithm", "{}"),
    ("dataset", "data set", "{}"),
    ("model", "model", "{}"),
    ("num_ranks", "ranks", "{}"),
    ("num_workers", "workers", "{}"),
    ("top1_percent", "top-1 of the consensus model", "{:.2f} %"),
    ("validation_loss", "validation loss", "{:.4f}"),
    ("consensus_distance", "consensus distance", "{:.3g}"),
    ("epochs", "epochs", "{:.2f}"),
    ("wall_seconds", "wall clock", "{:.1f} s"),
    ("simulation_seconds", "simulating it took", "{:.1f} s"),
    ("images_per_second", "throughput", "{:,.0f} images/s"),
)


def print_summary(summary: Summary, stream: TextIO | None = None) -> None:
    """Prints the summary as a table (default: on standard output)."""
    stream = stream or sys.stdout
    rows = [(label, _format(form, summary.get(key))) for key, label, form in _ROWS if key in summary]
    if summary.get("time") == "virtual":
        rows = [(f"{label} (virtual)" if label == "wall clock" else label, cell) for label, cell in rows]
    width = max(len(label) for label, _ in rows)
    lines = ["", *(f"  {label:<{width}}  {value}" for label, value in rows)]
    lines += ["", f"  {'one iteration, ms':<{width}}  {'median':>9} {'mean':>9}"]
    for name in ("iteration", *PHASES):
        label = "total" if name == "iteration" else "  " + name.replace("_", " ")
        middle, mean = (_format("{:.2f}", summary.get(f"{name}_ms_{which}")) for which in ("median", "mean"))
        lines.append(f"  {label:<{width}}  {middle:>9} {mean:>9}")
    lines += [f"  (without the first {summary['warm_up_steps']} steps and the evaluations)", "", ""]
    stream.write("\n".join(lines))  # at once: horovodrun puts the rank before every piece that it gets
    stream.flush()


def _format(form: str, value: Any) -> str:
    return "-" if value is None else form.format(value)
