"""SGP and OSGP against the oracle, against plain SGD at n = 1, and their invariants, on simulated and real ranks."""

from __future__ import annotations

import least_squares
import numpy as np
import pytest
import torch

from pushreduce.algorithms import SGP
from pushreduce.communication.base import Communicator
from pushreduce.communication.topology import build_topology
from pushreduce.settings import SGPSettings
from pushreduce.simulation import global_view, push_sum_view

SGD = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}
RULE = global_view.SGD(momentum=SGD["momentum"], nesterov=SGD["nesterov"], weight_decay=SGD["weight_decay"])
SCHEDULES = [
    SGPSettings(),
    SGPSettings(num_peers=2),
    SGPSettings(two_peer_rounds=5),
    SGPSettings(graph="bipartite-exponential"),
    SGPSettings(graph="ring"),
    SGPSettings(graph="complete"),
    SGPSettings(graph="random"),
    SGPSettings(average_rounds=6),
    SGPSettings(tau=1),
    SGPSettings(tau=2, graph="random"),
    SGPSettings(tau=3, average_rounds=4),
    SGPSettings(tau=1, num_peers=2),
    SGPSettings(tau=1, graph="bipartite-exponential"),
    SGPSettings(tau=1, graph="complete"),
    SGPSettings(tau=1, biased=True),
    SGPSettings(slot_patience_seconds=0.0),
    SGPSettings(tau=1, slot_patience_seconds=0.0, graph="ring"),
    SGPSettings(tau=1, slot_patience_seconds=0.001, num_peers=2),
]


def describe(settings: SGPSettings) -> str:
    changed = {name: value for name, value in vars(settings).items() if value != vars(SGPSettings())[name]}
    return "-".join(f"{name}={value}" for name, value in changed.items()) or "default"


def run_sgp(
    communicator: Communicator,
    num_steps: int,
    settings: SGPSettings,
    *,
    speed_seconds: float = 1e-4,
    dtype: torch.dtype = torch.float64,
) -> dict:
    """Trains on the rank's data, at a pace of its own; returns where it ended, and its trace."""
    model, events = least_squares.model(dtype), []
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    algorithm = SGP(model, optimizer, communicator, settings, seed=3, recorder=events.append)
    random = np.random.default_rng(communicator.rank)
    for step in range(num_steps):
        optimizer.zero_grad()
        least_squares.backward(model, communicator.rank, step)
        communicator.clock.sleep(random.exponential(speed_seconds))
        algorithm.step(num_samples=5)
    algorithm.finish()
    own = least_squares.vector(model)
    with algorithm.consensus():
        consensus = least_squares.vector(model)
    algorithm.close()
    return {
        "z": own,
        "consensus": consensus,
        "weight": algorithm.state_dict()["weight"],
        "events": events,
        "progress": algorithm.progress,
        "stats": algorithm.stats,
    }


def oracle(results: list[dict], settings: SGPSettings) -> np.ndarray:
    size = len(results)
    topology = build_topology(
        settings.graph,
        size,
        num_peers=settings.num_peers,
        two_peer_rounds=settings.two_peer_rounds,
        seed=3,
    )
    replay = (
        push_sum_view.replay_sgp
        if settings.slot_patience_seconds is None
        else push_sum_view.replay_sgp_by_event
    )
    return replay(
        least_squares.vector(least_squares.model()),
        [result["events"] for result in results],
        least_squares.gradient,
        RULE,
        topology,
        tau=settings.tau,
        average_rounds=settings.average_rounds,
        biased=settings.biased,
    )


@pytest.mark.parametrize("settings", SCHEDULES, ids=describe)
def test_equals_the_oracle(ranks, settings):
    """Every rank at a pace of its own and with a number of steps of its own."""
    results = ranks.run(lambda c: run_sgp(c, 20 + 7 * c.rank, settings))
    expected = oracle(results, settings)
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["z"], expected[rank], rtol=1e-10, atol=1e-12)
        assert result["stats"].messages_kept_back == 0 or settings.slot_patience_seconds is not None
    assert sum(result["weight"] for result in results) == pytest.approx(ranks.size, rel=1e-13)


@pytest.mark.parametrize("settings", SCHEDULES, ids=describe)
def test_one_rank_is_plain_sgd(ranks, settings):
    if ranks.size > 1:
        pytest.skip("of one rank")
    (result,) = ranks.run(lambda c: run_sgp(c, 50, settings))
    expected = least_squares.train_plainly(50, **SGD)
    assert np.array_equal(result["z"], expected)  # bit for bit
    assert np.array_equal(result["consensus"], expected)


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_constant_gradients_move_the_mean_by_exactly_the_learning_rate(ranks, tau):
    """Whatever is under way, and also where w < 1: nothing halves or scales a step."""
    learning_rate, num_steps = 0.01, 30

    def body(communicator):
        model = least_squares.model()
        algorithm = SGP(
            model, torch.optim.SGD(model.parameters(), lr=learning_rate), communicator, SGPSettings(tau=tau)
        )
        weights = []
        random = np.random.default_rng(communicator.rank)
        for _ in range(num_steps):
            model.weight.grad = torch.full_like(model.weight, float(communicator.rank + 1))
            communicator.clock.sleep(random.exponential(1e-4))
            algorithm.step(1)
            weights.append(algorithm.weight)
        with algorithm.consensus():
            moved = least_squares.vector(model) - least_squares.vector(least_squares.model())
        algorithm.close()
        return moved, weights

    results = ranks.run(body)
    mean_gradient = np.mean([rank + 1 for rank in range(ranks.size)])
    for moved, weights in results:
        np.testing.assert_allclose(moved, -learning_rate * num_steps * mean_gradient, rtol=1e-12)
        assert all(weight > 0 for weight in weights)


def test_progress_is_exact_after_finish(ranks):
    results = ranks.run(lambda c: run_sgp(c, 3 + 11 * c.rank, SGPSettings(tau=1)))
    total = sum(5 * (3 + 11 * rank) for rank in range(ranks.size))
    for result in results:
        assert result["progress"].samples == result["progress"].agreed_samples == total
        assert result["progress"].own_samples == 0
        np.testing.assert_allclose(result["consensus"], results[0]["consensus"], rtol=1e-13)


def test_the_same_number_of_synchronous_steps_needs_no_round_without_a_gradient(ranks):
    """So that a synchronous run does not depend on time."""
    for result in ranks.run(lambda c: run_sgp(c, 12, SGPSettings())):
        rounds = [event["round"] for event in result["events"]]
        assert max(rounds) == 11


@pytest.mark.parametrize("wire_dtype", ["full", "bfloat16", "float16"])
def test_rounding_on_the_wire_loses_no_mass(ranks, wire_dtype):
    """What rounding takes from a message the sender keeps: without gradients the mean stays where it is."""

    def body(communicator):
        model = least_squares.model(torch.float32)
        algorithm = SGP(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            communicator,
            SGPSettings(tau=1, wire_dtype=wire_dtype),
        )
        for step in range(40):
            own_step = float(communicator.rank + 1) if step == 0 else 0.0  # then they differ, and only gossip
            model.weight.grad = torch.full_like(model.weight, own_step)
            algorithm.step(1)
        algorithm.finish()
        own = least_squares.vector(model)
        with algorithm.consensus():
            consensus = least_squares.vector(model)
        algorithm.close()
        return own, consensus

    results = ranks.run(body)
    expected = least_squares.vector(least_squares.model(torch.float32)) - (ranks.size + 1) / 2
    scale = {"full": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}[wire_dtype]
    for own, consensus in results:
        np.testing.assert_allclose(consensus, expected, rtol=0, atol=1e-5)
        assert (
            np.abs(own - consensus).max() <= 8 * scale * np.abs(expected).max()
        )  # consensus to the wire's precision


def test_weights_that_do_not_fit_float16_are_an_error(ranks):
    if ranks.size == 1 or ranks.real:
        pytest.skip("one rank sends nothing; on real ranks averages of the broken run would stay under way")

    def body(communicator):
        model = least_squares.model(torch.float32)
        algorithm = SGP(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            communicator,
            SGPSettings(wire_dtype="float16"),
        )
        model.weight.grad = torch.full_like(model.weight, 1e6)
        with pytest.raises(FloatingPointError, match="bfloat16"):
            algorithm.step(1)
        communicator.barrier()
        algorithm.close()

    ranks.run(body)


def test_weights_that_are_not_finite_are_refused_by_their_receiver(ranks):
    if ranks.size != 2 or ranks.real:
        pytest.skip("of two simulated ranks: on real ones averages of the broken run would stay under way")

    def body(communicator):
        model = least_squares.model(torch.float32)
        algorithm = SGP(model, torch.optim.SGD(model.parameters(), lr=1.0), communicator)
        model.weight.grad = torch.full_like(model.weight, np.inf if communicator.rank == 0 else 0.0)
        if communicator.rank == 0:
            algorithm.step(1)
        else:
            with pytest.raises(FloatingPointError, match="rank 0"):
                algorithm.step(1)
        communicator.barrier()  # and no close(): messages are under way

    ranks.run(body)
