"""experiments/speed without a cluster: what is kept of an interrupted measurement, and what becomes of its blocks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "speed"
sys.path.insert(0, str(EXPERIMENT))
from blocks import keep_complete_rounds, read  # noqa: E402
from pieces import ALL_REDUCE, INTENSIVE, NUM_PARAMETERS, PIECES, TRIAL, Piece  # noqa: E402
from tables import measures, summarise, write  # noqa: E402

PIECE = Piece(8, ("a", "b"), rounds=4, lead_in=1, steps=2, stretch=2.0)


def block(system: str, round_number: int, num_hosts: int = 8, **more) -> dict:
    shared = {"num_hosts": num_hosts, "stretch": 2.0, "rate_mbit": 100.0, "lead_in": 1, "commit": "abc"}
    return {"system": system, "round": round_number, **shared, "load_average": 0.0, **more}


def timed_block(
    system: str, round_number: int, step_ms: float, compute_ms: float, num_hosts: int = 8
) -> dict:
    """All ranks alike, in the stretched cluster's own time; every rank on half a core."""
    ended = [10.0 + 2 * step_ms * index for index in range(4)]
    counted = {"steps_per_allreduce": {}, "cpu_ms": [3 * 2 * step_ms / 2] * num_hosts}
    times = {"ended_ms": [ended] * num_hosts, "compute_ms": [[2 * compute_ms] * 4] * num_hosts}
    return block(system, round_number, num_hosts, **times, **counted)


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_only_complete_rounds_of_the_piece_are_taken_for_measured(tmp_path):
    path = tmp_path / "blocks.jsonl"
    assert keep_complete_rounds(PIECE, path) == 0
    of_others = [{"machine": {"cores": 2}}, block("a", 1, num_hosts=4)]
    complete = [block("a", 0), block("b", 0), block("b", 1), block("a", 1)]
    write_lines(path, [*of_others, *complete, block("a", 2)])
    assert keep_complete_rounds(PIECE, path) == 2
    assert read(path) == [*of_others, *complete]
    assert keep_complete_rounds(PIECE, path) == 2


def test_blocks_of_another_plan_are_refused_and_kept(tmp_path):
    path = tmp_path / "blocks.jsonl"
    write_lines(path, lines := [block("a", 0, stretch=4.0)])
    with pytest.raises(ValueError, match="another plan for 8 hosts"):
        keep_complete_rounds(PIECE, path)
    assert read(path) == lines


def test_an_iteration_is_the_progress_of_the_last_rank_and_the_computation_that_of_the_slowest():
    ended = [[100.0, 400.0, 900.0], [300.0, 500.0, 700.0]]
    compute = [[999.0, 200.0, 400.0], [999.0, 100.0, 300.0]]
    times = {"ended_ms": ended, "compute_ms": compute, "cpu_ms": [60.0, 180.0]}
    row = summarise(block("a", 0, **times), num_cores=2)
    assert row["iteration_ms"] == pytest.approx((900 - 300) / 2 / 2)
    assert row["compute_ms_slowest"] == pytest.approx(300 / 2)
    assert row["compute_ms_mean"] == pytest.approx(250 / 2)
    assert row["cpu_share"] == pytest.approx(240 / 600 / 2)


def test_figures_are_ratios_within_a_round_with_their_bounds():
    machine_speeds = [1.0, 3.0]  # it slows down between the rounds, which no ratio may show
    milliseconds = {"SGD-AR, no overlap": 480.0, "LASGD(1)": 300.0, "OSGP(1)": 330.0, "SGP, no jitter": 0.0}
    size_over_rate = 32 * NUM_PARAMETERS / 100e3
    steps = []
    for number, speed in enumerate(machine_speeds):
        for system, each in milliseconds.items():
            each = speed * each if each else 300 * speed + 1.2 * size_over_rate
            steps.append(summarise(timed_block(system, number, each, 300.0 * speed), num_cores=8))
    ring_ms = 2 * 2 * 7 / 8 * size_over_rate
    all_reduces = [block(ALL_REDUCE, 0, all_reduce_ms=[ring_ms / 0.8, ring_ms / 0.9])]
    found = {row["measure"]: row for row in measures(steps, all_reduces) if row["num_hosts"] != 6}
    for name, value, verdict in (
        ("LASGD(1): iteration / compute", 1.0, "met"),
        ("OSGP(1): iteration / compute", 1.1, "missed"),
        ("SGD-AR, no overlap / LASGD(1)", 1.6, "met"),
        ("SGP without jitter: (iteration - compute) / (size / rate)", 1.2, "met"),
        ("all-reduce: ring bound / measured", 2 / (1 / 0.8 + 1 / 0.9), "missed"),
    ):
        row = found[name]
        assert row["verdict"] == verdict, row
        assert [row["min"], row["max"]] == pytest.approx([value, value])
    assert found["Horovod / LASGD(1)"]["verdict"] == "not measured yet"


def test_everything_is_written_also_of_a_part(tmp_path):
    write(tmp_path)  # of nothing
    assert (tmp_path / "results.md").read_text().count("not measured yet") > 10
    lines: list[dict] = [{"machine": {"cores": 2}}]
    for num_hosts in (4, 16):
        for number in range(2):
            lines += [timed_block(name, number, 400.0, 290.0, num_hosts) for name in ("LASGD(1)", "SGP")]
    lines.append(timed_block(INTENSIVE, 0, 110.0, 105.0, 16) | {"steps_per_allreduce": {"1": 1, "2": 3}})
    write_lines(tmp_path / "blocks.jsonl", lines)
    write(tmp_path)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert len((tmp_path / "emulated.csv").read_text().splitlines()) == 1 + 9
    table = (tmp_path / "results.md").read_text()
    assert "| 2 | 75.0 | 72.8 |" in table
    assert "| SGP | 400 (400 … 400) | 400 (400 … 400) |" in table


def test_the_pieces_measure_what_the_figures_are_made_of():
    eight = PIECES[8]
    assert eight.rounds * eight.steps >= 100
    # A bootstrap interval of fewer than 6 values' median holds it less often than in 95 of 100 cases.
    assert all(piece.rounds >= 6 for piece in PIECES.values() if piece is not TRIAL)
    assert all(piece.rounds % 2 == 0 for piece in PIECES.values())
    assert PIECES[4].stretch == PIECES[16].stretch  # they are compared with each other
    needed = {"SGD-AR, no overlap", "SGD-AR", "LASGD(1)", "LASGD(5)", "SGP", "OSGP(1)"}
    assert all(needed <= set(PIECES[num_hosts].systems) for num_hosts in (4, 8, 16))
    assert all(PIECES[num_hosts].systems.count(ALL_REDUCE) == 1 for num_hosts in (6, 8))
