"""experiments/lasgd_paper/times: from the paper's hours to iterations, what counts as inside, the cluster's meaning."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "lasgd_paper" / "times"
sys.path.insert(0, str(EXPERIMENT))
import cluster  # noqa: E402
import fit  # noqa: E402
from cluster import BOUNDS, CHOICES, Choice, Parameters, in_vector, iteration_seconds, of_vector  # noqa: E402
from paper import Row, hours, read_rows, read_table_2, verdict  # noqa: E402
from paper import iteration_seconds as paper_iteration_seconds  # noqa: E402
from reduced_scale import speed_ups  # noqa: E402

ROWS = read_rows(EXPERIMENT.parent / "lasgd_results.csv")
CALM = Parameters(latency_seconds=0.001, step_jitter=0.0, in_host_seconds=0.010)
SEPARATE = Choice(overlap=False, precision="", images_per_second=400.0)


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as the paper says, in equal parameters: without torchvision, which takes seconds to import."""
    monkeypatch.setattr(cluster, "parameter_bytes", lambda: (1_000_000,) * 100)


def row(method: str, num_hosts: int, batch_size: int = 64, tau_max: int | None = None) -> Row:
    (found,) = (
        each
        for each in ROWS
        if (each.method, each.num_hosts, each.batch_size_per_gpu) == (method, num_hosts, batch_size)
        and (tau_max is None or each.tau_max == tau_max)
    )
    return found


# -- the paper's numbers ---------------------------------------------------------------------------------------------


def test_iterations_by_hand() -> None:
    """8 nodes: 90 x 1 281 167 / 2048 = 56 301.3 iterations in 5.75 h = 20 700 s."""
    assert paper_iteration_seconds(5.75, 2048) == pytest.approx(0.36766, abs=1e-5)
    low, high = row("SGD-AR", 8).iteration_seconds
    assert (low, high) == (
        pytest.approx(20_682 / 56_301.3, rel=1e-5),
        pytest.approx(20_718 / 56_301.3, rel=1e-5),
    )
    # Batch 32 on 16 nodes has as many iterations as batch 64 on 8: 3.67 h = 13 212 s.
    assert sum(row("LASGD", 16, 32, 5).iteration_seconds) / 2 == pytest.approx(13_212 / 56_301.3, rel=1e-5)


@given(st.floats(0.01, 100), st.sampled_from([2048, 4096, 8192]))
def test_hours_and_iterations_are_inverses(time: float, batch_size: int) -> None:
    assert hours(paper_iteration_seconds(time, batch_size), batch_size) == pytest.approx(time)


def test_all_rows_are_read() -> None:
    assert len(ROWS) == 16
    assert {each.global_batch_size for each in ROWS} == {2048, 4096, 8192}
    assert all(each.num_gpus == 4 * each.num_hosts for each in ROWS)
    assert sum(read_table_2(EXPERIMENT.parent / "lasgd_table2.csv").values()) == pytest.approx(99.8)


interval = st.tuples(st.floats(0.1, 10), st.floats(0, 1)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(interval, interval)
def test_inside_is_to_have_a_value_in_common(paper, predicted) -> None:
    apart = max(paper[0], predicted[0]) > min(paper[1], predicted[1])
    said = verdict(paper, predicted)
    assert (said == "inside") == (not apart)
    if apart:
        assert said.endswith("below" if predicted[1] < paper[0] else "above")


def test_distances_of_what_is_outside() -> None:
    assert verdict((0.99, 1.01), (0.5, 0.79)) == "outside, 20 % below"
    assert verdict((0.99, 1.01), (1.31, 2.0)) == "outside, 30 % above"
    assert fit.distance(1.0, (0.99, 1.01)) == 0.0
    assert fit.distance(1.11, (0.99, 1.01)) == pytest.approx(0.1)
    assert fit.distance(0.89, (0.99, 1.01)) == pytest.approx(-0.1)


# -- the cluster's meaning, by hand: a step of 64 images takes 160 ms, the model 80 ms on a link ----------------------


@pytest.mark.parametrize("num_hosts", [8, 16, 32])
def test_without_jitter_sgd_ar_is_computation_and_a_ring_of_hosts(num_hosts: int) -> None:
    ring = 2 * (num_hosts - 1) * (0.001 + 0.080 / num_hosts)
    seconds = iteration_seconds(row("SGD-AR", num_hosts), SEPARATE, CALM)
    assert seconds == pytest.approx(0.160 + 0.010 + ring, rel=1e-6)
    overlapped = iteration_seconds(row("SGD-AR", num_hosts), Choice(True, "", 400.0), CALM)
    assert max(0.160, ring) < overlapped < 0.160 + 0.010 + 3 * ring


@pytest.mark.parametrize("num_hosts", [8, 16, 32])
def test_without_jitter_the_others_hide_what_is_shorter_than_a_step(num_hosts: int) -> None:
    ring = 2 * (num_hosts - 1) * (0.001 + 0.080 / num_hosts)
    for method, seconds in {
        "LASGD": max(0.160 + 0.010, ring),
        "WLASGD": max(0.160, 0.010 + ring),
        "SGP": 0.160 + 0.010,  # its message, 80 ms, is hidden
    }.items():
        assert iteration_seconds(row(method, num_hosts), SEPARATE, CALM) == pytest.approx(
            seconds, rel=1e-4
        ), method


def test_local_steps_per_allreduce_without_jitter() -> None:
    """Steps of 80 + 10 ms beside rings of 30 x (latency + 5 ms)."""
    for latency_seconds, num_steps in ((0.0, 2), (0.0009, 2), (0.0011, 3), (0.0029, 3), (0.011, 6)):
        parameters = replace(CALM, latency_seconds=latency_seconds)
        percents = cluster.steps_per_allreduce_percent(row("LASGD", 16, 32, 5), SEPARATE, parameters)
        assert percents == {steps: 100.0 * (steps == num_steps) for steps in range(1, 7)}


# -- the search --------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_vectors_are_parameters(vector: list[float]) -> None:
    parameters = of_vector(vector)
    assert in_vector(parameters) == pytest.approx(vector)
    assert all(low <= getattr(parameters, name) <= high for name, (low, high) in BOUNDS.items())


def test_the_search_finds_the_parameters_that_made_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "NUM_ITERATIONS", 60)
    true = Parameters(latency_seconds=0.002, step_jitter=0.2, in_host_seconds=0.030)
    made = [
        Row(
            1,
            "SGD-AR",
            each.num_hosts,
            each.num_gpus,
            each.batch_size_per_gpu,
            None,
            hours(seconds, each.global_batch_size),
        )
        for each in ROWS
        if each.method == "SGD-AR"
        for seconds in [iteration_seconds(each, SEPARATE, true)]
    ]
    monkeypatch.setattr(fit, "_NUM_PROPOSALS", 60)
    found = fit.fit(made, SEPARATE)
    assert found.best_misfit < 0.002
    assert found.accepted[0] == found.best
    misfits = [fit.misfit(made, SEPARATE, each) for each in found.accepted]
    assert max(misfits) <= found.best_misfit + fit.MARGIN + 1e-12
    assert max(misfits) > found.best_misfit  # it has looked beyond the best
    ranges = np.array([in_vector(each) for each in found.accepted])
    assert np.all(ranges.min(axis=0) - 0.05 <= in_vector(true))
    assert np.all(in_vector(true) <= ranges.max(axis=0) + 0.05)


def test_the_committed_results_are_complete() -> None:
    """A verdict for every row and choice, and the one that its own numbers give."""
    with (EXPERIMENT / "times.csv").open(newline="") as file:
        records = list(csv.DictReader(file))
    assert len(records) == len(ROWS) * len(CHOICES)
    for each in records:
        paper = float(each["paper_ms_low"]), float(each["paper_ms_high"])
        predicted = float(each["low_ms"]), float(each["high_ms"])
        assert predicted[0] <= float(each["best_ms"]) <= predicted[1]
        rounding = 0.1  # of the numbers in the file
        if each["verdict"] == "inside":
            assert predicted[0] - rounding <= paper[1]
            assert paper[0] <= predicted[1] + rounding
        else:
            assert each["verdict"] == verdict(paper, predicted)


# -- beside the emulated cluster --------------------------------------------------------------------------------------


def test_speed_ups_at_reduced_scale_are_of_the_same_round() -> None:
    measured = {
        (8, "SGD-AR", "0"): 400.0,
        (8, "SGD-AR", "1"): 600.0,
        (8, "LASGD(1)", "0"): 200.0,
        (8, "LASGD(1)", "1"): 400.0,
        (8, "LASGD(1)", "2"): 1.0,
        (4, "SGD-AR", "0"): 1.0,
        (4, "LASGD(1)", "0"): 1.0,
    }
    (found,) = speed_ups(measured, ROWS)
    assert (found["num_hosts"], found["method"], found["baseline"]) == (8, "LASGD", "SGD-AR")
    assert (found["min"], found["max"], found["n"]) == (1.5, 2.0, 2)
    assert found["paper_speed_up"] == pytest.approx(5.75 / 4.77)
