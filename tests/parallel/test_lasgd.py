"""LASGD against the oracle, against plain SGD at n = 1, and its invariants, on simulated and real ranks."""

from __future__ import annotations

import least_squares
import numpy as np
import pytest
import torch

from pushreduce.algorithms import LASGD
from pushreduce.communication.base import Communicator
from pushreduce.settings import LASGDSettings
from pushreduce.simulation import global_view

SGD = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}


def run_lasgd(
    communicator: Communicator, num_steps: int, settings: LASGDSettings, speed_seconds: float = 1e-4
) -> dict:
    """Trains on the rank's data, at a pace of its own; returns where it ended, and its trace."""
    model, events = least_squares.model(), []
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    algorithm = LASGD(model, optimizer, communicator, settings, recorder=events.append)
    random = np.random.default_rng(communicator.rank)
    for step in range(num_steps):
        optimizer.zero_grad()
        least_squares.backward(model, communicator.rank, step)
        communicator.clock.sleep(random.exponential(speed_seconds))
        algorithm.step(num_samples=5)
    algorithm.finish()
    return {
        "x": least_squares.vector(model),
        "events": events,
        "progress": algorithm.progress,
        "stats": algorithm.stats,
    }


def oracle(results: list[dict], settings: LASGDSettings) -> np.ndarray:
    rule = global_view.SGD(
        momentum=SGD["momentum"], nesterov=SGD["nesterov"], weight_decay=SGD["weight_decay"]
    )
    return global_view.replay_lasgd(
        least_squares.vector(least_squares.model()),
        [result["events"] for result in results],
        least_squares.gradient,
        rule,
        alpha=settings.elastic_alpha,
        beta=settings.elastic_beta,
    )


@pytest.mark.parametrize(
    "settings",
    [
        LASGDSettings(tau_max=1),
        LASGDSettings(tau_max=5),
        LASGDSettings(tau_max=0),
        LASGDSettings(tau_max=2, elastic_alpha=0.5, elastic_beta=0.7),
    ],
    ids=lambda s: f"tau{s.tau_max}-alpha{s.elastic_alpha}",
)
def test_equals_the_oracle(ranks, settings):
    """Every rank at a pace of its own and with a number of steps of its own."""
    results = ranks.run(lambda c: run_lasgd(c, 20 + 7 * c.rank, settings))
    expected = oracle(results, settings)
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["x"], expected[rank], rtol=1e-10, atol=1e-12)


def test_one_rank_is_plain_sgd(ranks):
    if ranks.size > 1:
        pytest.skip("of one rank")
    for tau_max in (0, 1, 5):
        (result,) = ranks.run(lambda c, tau_max=tau_max: run_lasgd(c, 50, LASGDSettings(tau_max=tau_max)))
        expected = least_squares.train_plainly(50, **SGD)
        assert np.array_equal(result["x"], expected)  # bit for bit


def test_progress_is_exact_after_finish_and_all_agree(ranks):
    results = ranks.run(lambda c: run_lasgd(c, 3 + 11 * c.rank, LASGDSettings(tau_max=3)))
    total = sum(5 * (3 + 11 * rank) for rank in range(ranks.size))
    for result in results:
        assert result["progress"].samples == result["progress"].agreed_samples == total
        assert result["progress"].own_samples == 0
        np.testing.assert_allclose(result["x"], results[0]["x"], rtol=1e-12, atol=1e-14)


def test_a_synchronisation_keeps_the_mean(ranks):
    """With a learning rate of 0 nothing but synchronisations moves the workers, and those must not move the mean."""

    def body(communicator):
        model = least_squares.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        algorithm = LASGD(model, optimizer, communicator, LASGDSettings(tau_max=2))
        with torch.no_grad():  # after the broadcast: workers that differ
            model.weight += torch.arange(least_squares.NUM_FEATURES) * (communicator.rank + 1)
        before = least_squares.vector(model)
        for step in range(6):
            least_squares.backward(model, communicator.rank, step)
            algorithm.step(5)
        algorithm.finish()
        return before, least_squares.vector(model)

    results = ranks.run(body)
    mean = np.mean([before for before, _ in results], axis=0)
    for _, after in results:
        np.testing.assert_allclose(after, mean, rtol=1e-13, atol=1e-14)
