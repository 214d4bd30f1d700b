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
        model = least_squares.model()
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        for step in range(50):
            optimizer.zero_grad()
            least_squares.backward(model, 0, step)
            optimizer.step()
        assert np.array_equal(result["x"], least_squares.vector(model))  # bit for bit


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


def test_finish_is_idempotent_and_steps_may_follow(ranks):
    def body(communicator):
        model = least_squares.model()
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        algorithm = LASGD(model, optimizer, communicator)
        snapshots = []
        for step in range(4):
            optimizer.zero_grad()
            least_squares.backward(model, communicator.rank, step)
            algorithm.step(5)
            algorithm.finish()
            snapshots.append(least_squares.vector(model))
            algorithm.finish()
            snapshots.append(least_squares.vector(model))
        return snapshots, algorithm.progress.samples

    for snapshots, samples in ranks.run(body):
        assert samples == 20 * ranks.size
        for once, twice in zip(snapshots[::2], snapshots[1::2], strict=True):
            np.testing.assert_allclose(once, twice, rtol=1e-14, atol=1e-14)


def test_state_is_refused_in_flight_and_restores_the_run(ranks):
    def body(communicator):
        def build():
            model = least_squares.model()
            optimizer = torch.optim.SGD(model.parameters(), **SGD)
            return LASGD(model, optimizer, communicator, LASGDSettings(tau_max=1, elastic_beta=0.5))

        def train(algorithm, steps):
            for step in steps:
                algorithm.optimizer.zero_grad()
                least_squares.backward(algorithm.model, communicator.rank, step)
                algorithm.step(5)

        undisturbed = build()
        train(undisturbed, range(5))
        with pytest.raises(RuntimeError, match="finish"):
            undisturbed.state_dict()
        undisturbed.finish()
        saved = [undisturbed.model.state_dict(), undisturbed.optimizer.state_dict(), undisturbed.state_dict()]
        saved = torch.load(_to_file(saved), weights_only=True)
        train(undisturbed, range(5, 9))
        undisturbed.finish()

        resumed = build()
        resumed.model.load_state_dict(saved[0])
        resumed.optimizer.load_state_dict(saved[1])
        resumed.load_state_dict(saved[2])
        train(resumed, range(5, 9))
        resumed.finish()
        return least_squares.vector(undisturbed.model), least_squares.vector(resumed.model)

    for undisturbed, resumed in ranks.run(body):
        # tau_max = 1 makes the interleaving, and so the result, independent of time.
        np.testing.assert_allclose(undisturbed, resumed, rtol=1e-13, atol=1e-14)


def _to_file(value):
    import io

    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_a_request_to_stop_reaches_all_alike(ranks):
    def body(communicator):
        model = least_squares.model()
        algorithm = LASGD(
            model, torch.optim.SGD(model.parameters(), lr=0.0), communicator, LASGDSettings(tau_max=2)
        )
        num_steps = 0
        while not algorithm.progress.stop_requested:
            if communicator.rank == communicator.size - 1 and num_steps == 7:
                algorithm.request_stop()
            least_squares.backward(model, communicator.rank, num_steps)
            algorithm.step(5)
            num_steps += 1
        algorithm.finish()
        return algorithm.progress.stop_requested, num_steps

    for stopped, num_steps in ranks.run(body):
        assert stopped
        assert num_steps >= 1
