"""SGP for a long time, and at its end: mass is conserved, nothing grows, and what has been closed is refused."""

from __future__ import annotations

import resource
from pathlib import Path

import least_squares
import numpy as np
import pytest
import torch

from pushreduce.algorithms import SGP
from pushreduce.settings import SGPSettings

NUM_ROUNDS, SETTLED = 10_000, 1_000
LEARNING_RATE = 1e-3


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.real
def test_ten_thousand_rounds(ranks):
    """Every rank at a pace of its own, sometimes far behind; constant gradients say where the mean must be."""
    if ranks.size != 4:
        pytest.skip("of four ranks")

    def body(communicator):
        model = least_squares.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        algorithm = SGP(model, optimizer, communicator, SGPSettings(tau=1))
        model.weight.grad = torch.full_like(model.weight, float(communicator.rank + 1))
        random = np.random.default_rng(communicator.rank)
        settled_bytes = 0
        for round_number in range(NUM_ROUNDS):
            if random.random() < 0.05:
                communicator.clock.sleep(random.exponential(2e-3))
            algorithm.step(1)
            if round_number == SETTLED:
                settled_bytes = resident_bytes()
        algorithm.finish()
        grown = resident_bytes() / settled_bytes
        num_buffers, weight = algorithm._mailbox._num_buffers, algorithm.weight
        with algorithm.consensus():
            moved = least_squares.vector(model) - least_squares.vector(least_squares.model())
        algorithm.close()
        return {
            "grown": grown,
            "num_buffers": num_buffers,
            "weight": weight,
            "moved": moved,
            "staleness": algorithm.stats.staleness,
        }

    results = ranks.run(body)
    mean_gradient = np.mean([rank + 1 for rank in range(ranks.size)])
    assert sum(result["weight"] for result in results) == pytest.approx(ranks.size, rel=1e-12)
    for result in results:
        np.testing.assert_allclose(result["moved"], -LEARNING_RATE * NUM_ROUNDS * mean_gradient, rtol=1e-11)
        assert result["staleness"].total() == NUM_ROUNDS
        assert set(result["staleness"]) <= {0, 1}
        assert result["num_buffers"] <= 3
        assert result["grown"] < 1.02


def test_what_has_been_closed_is_refused(ranks):
    def body(communicator):
        model = least_squares.model()
        algorithm = SGP(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), communicator)
        for step in range(7):
            least_squares.backward(model, communicator.rank, step)
            algorithm.step(5)
        algorithm.finish()
        algorithm.close()
        algorithm.close()
        before = least_squares.vector(model)
        for use in (lambda: algorithm.step(5), algorithm.finish):
            with pytest.raises(RuntimeError, match="has been closed"):
                use()
        return np.array_equal(least_squares.vector(model), before)

    assert all(ranks.run(body))
