"""What is read off a time line, and the compute times that it begins with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pushreduce.simulation.cluster_model import ClusterModel
from pushreduce.simulation.time_line import TimeLine, draw_compute_seconds, host_compute_seconds

MODEL = ClusterModel(
    num_hosts=4, link_bits_per_second=1e9, latency_seconds=0.0, step_seconds=0.5, step_jitter=0.2
)


def test_iterations_of_equal_workers_are_their_steps() -> None:
    compute = np.full((10, 3), 1.0)
    ends = np.arange(1.0, 11.0)[:, None].repeat(3, axis=1) * 1.5
    line = TimeLine(compute, ends)
    for num_warm_up in (0, 1, 5):
        assert line.iteration_seconds(num_warm_up) == pytest.approx(1.5)
        assert line.mean_blocked_seconds(num_warm_up) == pytest.approx(0.5)
    np.testing.assert_allclose(line.blocked_seconds, 0.5)


def test_workers_of_unequal_pace_count_by_their_steps() -> None:
    """One takes a step a second, the other one in three: together 4/3 steps a second, or 1.5 s each for two workers."""
    compute = np.array([1.0, 3.0])[None, :].repeat(300, axis=0)
    line = TimeLine(compute, np.cumsum(compute, axis=0))
    assert line.iteration_seconds(10) == pytest.approx(1.5, rel=0.01)
    assert line.iteration_seconds(200) == pytest.approx(
        1.5, rel=0.01
    )  # no common time after so long a warm-up
    assert line.mean_blocked_seconds(10) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("spread", [1e-12, 0.1])
def test_workers_that_end_at_nearly_the_same_time_lose_no_step(spread: float) -> None:
    compute = np.ones((30, 4))
    compute[0] += spread * np.arange(4)
    line = TimeLine(compute, np.cumsum(compute, axis=0))
    assert line.iteration_seconds(10) == pytest.approx(1.0, rel=1e-9)


def test_what_is_before_the_end_of_the_warm_up_does_not_count() -> None:
    compute = np.ones((20, 2))
    compute[:5] = 100.0
    line = TimeLine(compute, np.cumsum(compute, axis=0))
    assert line.iteration_seconds(5) == pytest.approx(1.0)


def test_compute_times_have_the_given_mean_spread_and_slowness() -> None:
    model = replace(MODEL, rank_slowness=(1.0, 1.0, 1.0, 2.0))
    draws = draw_compute_seconds(model, 4000, 8, np.random.default_rng(0))
    assert draws.shape == (4000, 8)
    assert np.all(draws > 0)
    means = draws.mean(axis=0)
    np.testing.assert_allclose(means, [0.5, 0.5, 0.5, 1.0] * 2, rtol=0.02)  # repeated in turn
    np.testing.assert_allclose(draws.std(axis=0) / means, 0.2, rtol=0.06)
    again = draw_compute_seconds(model, 4000, 8, np.random.default_rng(0))
    np.testing.assert_array_equal(draws, again)
    still = draw_compute_seconds(replace(MODEL, step_jitter=0.0), 3, 2, np.random.default_rng(0))
    np.testing.assert_allclose(still, 0.5)


def test_a_host_is_as_slow_as_its_slowest_rank_and_sums_and_copies_then() -> None:
    model = replace(MODEL, ranks_per_host=2, in_host_latency_seconds=0.01, in_host_seconds_per_byte=1e-6)
    ranks = np.array([[1.0, 2.0, 4.0, 3.0]])
    in_host = 4 * 0.01 + 2 * 1000e-6  # four barriers; a sum and a copy
    np.testing.assert_allclose(host_compute_seconds(model, ranks, 1000), [[2 + in_host, 4 + in_host]])
