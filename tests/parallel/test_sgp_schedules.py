"""SGP's rounds across an interruption, and averaged rounds that a rank takes without a gradient."""

from __future__ import annotations

import least_squares
import numpy as np
import pytest
import torch

from pushreduce.algorithms import SGP
from pushreduce.communication.base import Communicator
from pushreduce.settings import SGPSettings

LEARNING_RATE = 0.01


def build(communicator: Communicator, settings: SGPSettings) -> SGP:
    model = least_squares.model()
    return SGP(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), communicator, settings)


def train(algorithm: SGP, num_steps: int) -> None:
    """Every rank at a pace of its own, with a constant gradient of its own."""
    (parameter,) = algorithm.parameters.parameters
    random = np.random.default_rng(algorithm.communicator.rank)
    for _ in range(num_steps):
        parameter.grad = torch.full_like(parameter, float(algorithm.communicator.rank + 1))
        algorithm.communicator.clock.sleep(random.exponential(1e-4))
        algorithm.step(1)
    algorithm.finish()


@pytest.mark.parametrize("num_steps_before", [2, 5, 6, 7, 8])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SGPSettings(tau=2, average_rounds=3), SGPSettings(tau=2, average_rounds=3)),
        (SGPSettings(tau=3, average_rounds=3), SGPSettings(tau=1, graph="random")),
        (SGPSettings(tau=1), SGPSettings(tau=2, average_rounds=12)),
        (SGPSettings(slot_patience_seconds=0.0), SGPSettings(average_rounds=12)),
    ],
    ids=["the same", "from tau 3 to 1", "averaged rounds after pushed ones", "the same, mass kept before"],
)
def test_a_resumed_run_conserves_the_mean(ranks, before, after, num_steps_before):
    """Wherever between two sends it was interrupted, and with other settings, which a resumed run may have."""
    num_steps_after = 11

    def body(communicator):
        first = build(communicator, before)
        train(first, num_steps_before)
        saved = first.model.state_dict(), first.state_dict()
        resumed = build(communicator, after)
        resumed.model.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(resumed, num_steps_after)
        with resumed.consensus():
            consensus = least_squares.vector(resumed.model)
        first.close()
        resumed.close()
        return consensus

    expected = (
        least_squares.vector(least_squares.model())
        - LEARNING_RATE * (num_steps_before + num_steps_after) * (ranks.size + 1) / 2
    )
    for consensus in ranks.run(body):
        np.testing.assert_allclose(consensus, expected, rtol=1e-12)


def test_averaged_rounds_without_a_gradient_leave_none_behind(ranks):
    """A loop may clear gradients after its steps only: the next backward() must not add to the others' mean."""

    def body(communicator):
        algorithm = build(communicator, SGPSettings(average_rounds=20))
        (parameter,) = algorithm.parameters.parameters
        for _ in range(3 + 4 * communicator.rank):
            parameter.grad = torch.ones_like(parameter)
            algorithm.step(1)
            algorithm.optimizer.zero_grad()
        algorithm.finish()
        algorithm.close()
        return parameter.grad

    assert all(gradient is None for gradient in ranks.run(body))


def test_a_state_is_loaded_before_the_first_step_only(ranks):
    """The rounds of messages only go up: a run that goes back must do so with another algorithm."""
    if ranks.size == 1:
        pytest.skip("one rank sends no messages")

    def body(communicator):
        algorithm = build(communicator, SGPSettings())
        train(algorithm, 3)
        with pytest.raises(RuntimeError, match="make another one"):
            algorithm.load_state_dict(algorithm.state_dict())
        train(algorithm, 2)
        algorithm.close()

    ranks.run(body)
