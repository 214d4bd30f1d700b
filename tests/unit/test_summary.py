"""The summary: its numbers are those of a run whose numbers are known."""

import io
import json
import random
from pathlib import Path

import pytest

from pushreduce.training.metrics import Record
from pushreduce.training.summary import (
    MAX_WARM_UP_STEPS,
    PHASES,
    print_summary,
    read_summary,
    summarise,
    write_summary,
)

SETTLED = {"compute": 0.050, "local_update": 0.004, "communication": 0.006, "blocked": 0.030}
ITERATION_SECONDS = 0.1  # 0.01 more than its phases


def make_run(num_steps: int, slow_steps: int = 0, evaluate_every: int | None = None) -> list[Record]:
    """Steps of 128 samples and ITERATION_SECONDS, the first ones ten times as long; 10 s at an evaluation."""
    records: list[Record] = []
    wall_seconds = 0.0
    for step in range(1, num_steps + 1):
        slower = 10 if step <= slow_steps else 1
        wall_seconds += slower * ITERATION_SECONDS
        phases = {f"{name}_seconds": slower * seconds for name, seconds in SETTLED.items()}
        when = {"step": step, "samples": 128 * step, "epoch": step / 10}
        records.append({"kind": "step", **when, "wall_seconds": wall_seconds, "loss": 1.0, **phases})
        if evaluate_every and step % evaluate_every == 0:
            wall_seconds += 7  # and 3 s after it: a checkpoint
            results = {
                "top1_percent": float(step),
                "validation_loss": 1 / step,
                "consensus_distance": 2 / step,
            }
            records.append({"kind": "evaluation", **when, "wall_seconds": wall_seconds, **results})
            wall_seconds += 3
    return records


def test_warm_up_and_evaluations_are_outside_the_times() -> None:
    summary = summarise(make_run(400, slow_steps=MAX_WARM_UP_STEPS, evaluate_every=10))
    assert summary["warm_up_steps"] == MAX_WARM_UP_STEPS
    assert summary["iteration_ms_median"] == pytest.approx(1000 * ITERATION_SECONDS)
    assert summary["iteration_ms_mean"] == pytest.approx(1000 * ITERATION_SECONDS)
    for phase, seconds in SETTLED.items():
        assert summary[f"{phase}_ms_median"] == pytest.approx(1000 * seconds)
        assert summary[f"{phase}_ms_mean"] == pytest.approx(1000 * seconds)
    assert summary["images_per_second"] == pytest.approx(128 / ITERATION_SECONDS)


def test_results_are_those_of_the_last_evaluation_and_totals_those_of_the_last_record() -> None:
    records = make_run(40, evaluate_every=20)
    summary = summarise(records)
    assert (summary["top1_percent"], summary["validation_loss"], summary["consensus_distance"]) == (
        40,
        1 / 40,
        0.05,
    )
    assert summary["wall_seconds"] == records[-1]["wall_seconds"]
    assert (summary["samples"], summary["epochs"], summary["steps_per_rank"]) == (128 * 40, 4, [40])


def test_rare_waiting_shows_in_the_mean_and_means_add_up() -> None:
    random.seed(1)
    records = make_run(1000)
    for record in records:
        record["blocked_seconds"] = 0.05 if random.random() < 0.2 else 0.0
    summary = summarise(records)
    assert summary["blocked_ms_median"] == 0
    assert summary["blocked_ms_mean"] == pytest.approx(10, rel=0.2)
    phases = sum(summary[f"{phase}_ms_mean"] for phase in PHASES)
    assert summary["iteration_ms_mean"] >= phases


def test_times_are_pooled_over_ranks() -> None:
    fast, slow = make_run(100), make_run(100)
    for record in slow:
        record["compute_seconds"] *= 3
    summary = summarise(fast, [slow])
    assert summary["compute_ms_mean"] == pytest.approx(1000 * 2 * SETTLED["compute"])
    assert summary["steps_per_rank"] == [100, 100]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_run_too_short_to_measure_has_a_summary(num_steps: int) -> None:
    summary = summarise(make_run(num_steps))
    assert (summary["iteration_ms_median"] is None) == (num_steps < 2)
    assert summary["top1_percent"] is None
    print_summary(summary, io.StringIO())


def test_facts_take_precedence_and_the_file_reads_back(tmp_path: Path) -> None:
    summary = summarise(make_run(40), algorithm="lasgd", num_ranks=4, num_workers=4, steps_per_rank=[40, 41])
    assert summary["steps_per_rank"] == [40, 41]
    write_summary(tmp_path / "summary.json", summary)
    assert read_summary(tmp_path) == summary
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    promised = (
        "algorithm num_ranks num_workers top1_percent iteration_ms_median compute_ms_median "
        "blocked_ms_median images_per_second consensus_distance wall_seconds"
    )
    assert set(promised.split()) <= set(json.loads((tmp_path / "summary.json").read_text()))


def test_a_run_without_a_summary_has_not_finished(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has not finished"):
        read_summary(tmp_path)
    (tmp_path / "summary.json").write_text('{"algorithm": ')
    with pytest.raises(ValueError, match="not JSON"):
        read_summary(tmp_path)
