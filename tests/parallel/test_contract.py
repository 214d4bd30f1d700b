"""What a training loop relies on, whichever the algorithm: ends, state, requests to stop, with messages under way."""

from __future__ import annotations

import io

import least_squares
import numpy as np
import pytest
import torch

from pushreduce.algorithms import LASGD, SGP, Algorithm
from pushreduce.communication.base import Communicator
from pushreduce.settings import LASGDSettings, SGPSettings

SGD = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}
STILL = {"lr": 0.0}


def build(communicator: Communicator, settings: LASGDSettings | SGPSettings, sgd: dict = SGD) -> Algorithm:
    model = least_squares.model()
    optimizer = torch.optim.SGD(model.parameters(), **sgd)
    if isinstance(settings, LASGDSettings):
        return LASGD(model, optimizer, communicator, settings)
    return SGP(model, optimizer, communicator, settings)


def train(algorithm: Algorithm, steps: range) -> None:
    for step in steps:
        algorithm.optimizer.zero_grad()
        least_squares.backward(algorithm.model, algorithm.communicator.rank, step)
        algorithm.step(5)


@pytest.mark.parametrize("settings", [LASGDSettings(), SGPSettings(tau=1)], ids=["lasgd", "sgp"])
def test_finish_is_idempotent_and_steps_may_follow(ranks, settings):
    def body(communicator):
        algorithm = build(communicator, settings)
        snapshots = []
        for step in range(4):
            train(algorithm, range(step, step + 1))
            for _ in range(2):
                algorithm.finish()
                snapshots.append(least_squares.vector(algorithm.model))
        algorithm.close()
        return snapshots, algorithm.progress.samples

    for snapshots, samples in ranks.run(body):
        assert samples == 20 * ranks.size
        for once, twice in zip(snapshots[::2], snapshots[1::2], strict=True):
            if isinstance(settings, SGPSettings):  # a second finish() takes no round
                assert np.array_equal(once, twice)
            np.testing.assert_allclose(once, twice, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "is_exact"),
    [
        # tau_max = 1 makes the interleaving, and so the result, independent of time.
        (LASGDSettings(tau_max=1, elastic_beta=0.5), False),
        (SGPSettings(), True),
        (SGPSettings(average_rounds=7), False),
    ],
    ids=["lasgd", "sgp", "sgp-hybrid"],
)
def test_state_is_refused_in_flight_and_restores_the_run(ranks, settings, is_exact):
    def body(communicator):
        undisturbed = build(communicator, settings)
        train(undisturbed, range(5))
        with pytest.raises(RuntimeError, match="finish"):
            undisturbed.state_dict()
        undisturbed.finish()
        file = io.BytesIO()
        torch.save(
            [undisturbed.model.state_dict(), undisturbed.optimizer.state_dict(), undisturbed.state_dict()],
            file,
        )
        train(undisturbed, range(5, 12))
        undisturbed.finish()

        file.seek(0)
        model_state, optimizer_state, own_state = torch.load(file, weights_only=True)
        resumed = build(communicator, settings)
        resumed.model.load_state_dict(model_state)
        resumed.optimizer.load_state_dict(optimizer_state)
        resumed.load_state_dict(own_state)
        train(resumed, range(5, 12))
        resumed.finish()
        undisturbed.close()
        resumed.close()
        return least_squares.vector(undisturbed.model), least_squares.vector(resumed.model)

    for undisturbed, resumed in ranks.run(body):
        if is_exact:
            assert np.array_equal(undisturbed, resumed)
        np.testing.assert_allclose(undisturbed, resumed, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("settings", [LASGDSettings(tau_max=2), SGPSettings(tau=1)], ids=["lasgd", "sgp"])
def test_a_request_to_stop_reaches_all_alike(ranks, settings):
    def body(communicator):
        algorithm = build(communicator, settings, STILL)
        num_steps = 0
        while not algorithm.progress.stop_requested:
            if communicator.rank == communicator.size - 1 and num_steps == 7:
                algorithm.request_stop()
            train(algorithm, range(num_steps, num_steps + 1))
            num_steps += 1
        algorithm.finish()
        algorithm.close()
        return algorithm.progress.stop_requested, num_steps

    for stopped, num_steps in ranks.run(body):
        assert stopped
        assert num_steps >= 1
