"""The fit of a cluster model to times: it finds the numbers that they were made from, and says how well."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushreduce.simulation.calibration import Sample, StepTimes, fit, fit_steps
from pushreduce.simulation.cluster_model import ClusterModel, Uncertainty

MODEL = ClusterModel(
    num_hosts=4,
    ranks_per_host=2,
    link_bits_per_second=1e9,
    latency_seconds=5e-5,
    average_overhead_seconds=1.5e-3,
    average_overhead_seconds_per_doubling=1.2e-4,
    average_seconds_per_byte=1e-9,
    put_overhead_seconds=4e-4,
    put_seconds_per_byte=5e-10,
    in_host_latency_seconds=2e-5,
    in_host_seconds_per_byte=4e-10,
    step_seconds=0.3,
    step_jitter=0.1,
)
STEPS = StepTimes(0.3, 0.1)
SIZES = (8, 1 << 14, 1 << 17, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
FITTED = [item.name for item in fields(Uncertainty) if not item.name.startswith("step_")]


def samples_of(model: ClusterModel, noise: float = 0.0, seed: int = 0, repetitions: int = 9) -> list[Sample]:
    random = np.random.default_rng(seed)
    n = model.num_ranks

    def sample(kind, num_bytes, num_ranks):
        seconds = Sample(kind, num_bytes, num_ranks, ()).predicted_seconds(model)
        times = seconds * np.exp(noise * random.standard_normal(repetitions))
        return Sample(kind, num_bytes, num_ranks, tuple(times.tolist()))

    found = [sample("sum", 8, num_ranks) for num_ranks in (n // 2, n) if num_ranks > 1]
    for num_bytes in SIZES:
        found += [
            sample("message", num_bytes, 2),
            sample("average", num_bytes, n),
            sample("put", num_bytes + 128, 2),
            sample("puts at once", num_bytes + 128, model.num_hosts),
        ]
        if model.ranks_per_host > 1:
            found.append(sample("in-host sum", num_bytes, model.ranks_per_host))
    return found


def fitted(model: ClusterModel, samples: list[Sample]):
    return fit(samples, num_hosts=model.num_hosts, ranks_per_host=model.ranks_per_host, steps=STEPS)


numbers = st.fixed_dictionaries(
    {
        "num_hosts": st.integers(2, 40),
        "ranks_per_host": st.integers(1, 4),
        "link_bits_per_second": st.floats(1e7, 1e11),
        "latency_seconds": st.floats(1e-6, 1e-2),
        "average_overhead_seconds": st.floats(1e-4, 1e-2),
        "average_overhead_seconds_per_doubling": st.floats(1e-5, 1e-3),
        "average_seconds_per_byte": st.floats(1e-10, 1e-8),
        "put_overhead_seconds": st.floats(1e-4, 1e-2),
        "put_seconds_per_byte": st.floats(1e-10, 1e-8),
    }
)


@given(numbers)
@settings(max_examples=30, deadline=None)
def test_exact_times_are_explained_exactly(drawn: dict) -> None:
    model = replace(MODEL, **drawn)
    calibration = fitted(model, samples_of(model))
    assert calibration.largest_relative_error < 1e-6
    for num_bytes in (1000, 300_000, 40_000_000):
        found, true = (m.average_seconds(num_bytes, model.num_ranks) for m in (calibration.model, model))
        assert found == pytest.approx(true, rel=1e-5)


def test_the_numbers_behind_noisy_times_lie_within_their_intervals() -> None:
    """95 % each: of 9 numbers in 40 repetitions, more than 10 % outside would happen once in a thousand trials."""
    outside = 0
    for seed in range(40):
        model = fitted(MODEL, samples_of(MODEL, noise=0.1, seed=seed)).model
        for name in FITTED:
            uncertainty = getattr(model.relative_uncertainty, name)
            assert uncertainty > 0.0 or getattr(model, name) == 0.0
            value, true = getattr(model, name), getattr(MODEL, name)
            outside += abs(value - true) > max(uncertainty * value, 1e-12)
    assert outside <= 0.10 * 40 * len(FITTED)


def test_more_noise_is_more_uncertain() -> None:
    quiet, loud = (
        fitted(MODEL, samples_of(MODEL, noise=noise)).model.relative_uncertainty for noise in (0.01, 0.3)
    )
    for name in ("latency_seconds", "link_bits_per_second", "average_overhead_seconds"):
        assert getattr(loud, name) > 2 * getattr(quiet, name)


def test_a_model_that_does_not_fit_is_uncertain_and_says_so() -> None:
    """The averages of a network whose long messages are slower the more ranks there are, which no number expresses."""
    samples = samples_of(MODEL, noise=0.01)
    bent = [
        replace(each, seconds=tuple(s * (1 + 0.3 * (-1) ** index) for s in each.seconds))
        if each.kind == "average"
        else each
        for index, each in enumerate(samples)
    ]
    straight, crooked = (fitted(MODEL, each) for each in (samples, bent))
    assert straight.largest_relative_error < 0.05 < crooked.largest_relative_error
    name = "average_overhead_seconds"
    assert getattr(crooked.model.relative_uncertainty, name) > 2 * getattr(
        straight.model.relative_uncertainty, name
    )


def test_nothing_is_below_zero_where_averages_are_faster_than_the_links() -> None:
    fast = replace(MODEL, link_bits_per_second=1.3e9, average_seconds_per_byte=0.0)
    samples = [
        sample if sample.kind != "average" else of_fast
        for sample, of_fast in zip(samples_of(MODEL), samples_of(fast), strict=True)
    ]
    calibration = fitted(MODEL, samples)
    assert calibration.model.average_seconds_per_byte == 0.0
    assert all(getattr(calibration.model, name) >= 0.0 for name in FITTED)
    assert 1e9 < calibration.model.link_bits_per_second < 1.3e9


def test_what_nothing_depends_on_stays_zero() -> None:
    alone = replace(MODEL, ranks_per_host=1)
    model = fitted(alone, samples_of(alone)).model
    assert model.in_host_latency_seconds == model.in_host_seconds_per_byte == 0.0
    assert model.relative_uncertainty.in_host_latency_seconds == 0.0
    assert (model.step_seconds, model.step_jitter) == (STEPS.seconds, STEPS.jitter)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "too few sizes"),
        ([each for each in samples_of(MODEL) if each.num_bytes < 200], "too few sizes"),
        ([each for each in samples_of(MODEL) if each.kind == "average"], "too few sizes"),
        ([replace(each, seconds=(0.0,)) for each in samples_of(MODEL)], "clock is too coarse"),
    ],
    ids=["none", "one size", "averages only", "no time"],
)
def test_times_that_do_not_suffice_are_one_line(samples: list[Sample], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        fitted(MODEL, samples)
    assert "\n" not in str(caught.value)


def test_links_too_fast_to_be_seen_are_as_fast_as_the_noise_allows_and_uncertain() -> None:
    fast = replace(MODEL, link_bits_per_second=1e15)
    model = fitted(fast, samples_of(fast, noise=0.3)).model
    assert model.link_bits_per_second > 1e10
    assert model.relative_uncertainty.link_bits_per_second >= 1.0


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60))
def test_the_interval_of_a_median_holds_it(seconds: list[float]) -> None:
    sample = Sample("message", 8, 2, tuple(seconds))
    low, high = sample.interval_seconds
    assert min(seconds) <= low <= sample.median_seconds <= high <= max(seconds)
    if len(seconds) < 6:
        assert (low, high) == (min(seconds), max(seconds))


def steps_of(means, jitter, num_steps=400, seed=0):
    sigma = math.sqrt(math.log1p(jitter**2))
    factors = np.random.default_rng(seed).lognormal(-(sigma**2) / 2, sigma, (len(means), num_steps))
    return (np.array(means)[:, None] * factors).tolist()


def test_the_distribution_of_a_step_is_found() -> None:
    steps = fit_steps(steps_of([0.3, 0.3, 0.3, 0.6], 0.2))
    assert steps.seconds == pytest.approx(0.375, rel=3 * steps.seconds_uncertainty)
    assert steps.jitter == pytest.approx(0.2, rel=3 * steps.jitter_uncertainty)
    assert 0 < steps.seconds_uncertainty < 0.05
    assert 0 < steps.jitter_uncertainty < 0.2
    assert steps.rank_slowness == pytest.approx((0.8, 0.8, 0.8, 1.6), rel=0.05)


def test_ranks_that_differ_by_chance_only_are_alike() -> None:
    assert all(fit_steps(steps_of([0.3] * 8, 0.3, 20, seed)).rank_slowness is None for seed in range(50))


def test_steps_that_always_take_the_same_have_no_jitter() -> None:
    assert fit_steps([[0.25] * 10] * 3) == StepTimes(0.25, 0.0, None, 0.0, 0.0)
