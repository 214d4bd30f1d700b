"""SGP and OSGP under random interleavings: mass, staleness, the blocking rule, ranks that stop at different steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pushreduce.algorithms import SGP
from pushreduce.communication.simulated import SimulatedCluster
from pushreduce.communication.topology import build_topology
from pushreduce.settings import SGPSettings
from pushreduce.simulation import global_view, push_sum_view

DIMENSION = 3
GRAPHS = ["exponential", "bipartite-exponential", "ring", "complete", "random"]


class Quadratic(nn.Module):
    """f(z) = 1/2 ||z - b||^2 with another b at every rank and step."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.linspace(-1.0, 1.0, DIMENSION, dtype=torch.float64))

    def set_gradient(self, rank: int, step: int) -> None:
        self.z.grad = self.z.detach() - torch.from_numpy(target(rank, step))


def target(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(DIMENSION)


def gradient(rank: int, step: int, z: np.ndarray) -> np.ndarray:
    return z - target(rank, step)


@st.composite
def sgp_settings(draw: st.DrawFn, patience: st.SearchStrategy) -> SGPSettings:
    graph = draw(st.sampled_from(GRAPHS))
    exponential = graph == "exponential"
    num_peers = draw(st.sampled_from([1, 2])) if exponential else 1
    return SGPSettings(
        tau=draw(st.integers(0, 4)),
        graph=graph,
        num_peers=num_peers,
        two_peer_rounds=draw(st.integers(0, 9)) if exponential and num_peers == 1 else 0,
        average_rounds=draw(st.sampled_from([0, 0, 1, 5])),
        slot_patience_seconds=draw(patience),
    )


@st.composite
def clusters(draw: st.DrawFn):
    """(a cluster with random timing, steps of every rank, mean compute seconds of every rank)"""
    size = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12]))
    cluster = SimulatedCluster(
        size, seed=draw(st.integers(0, 2**20)), jitter=draw(st.sampled_from([0.0, 1.0, 30.0]))
    )
    steps = draw(st.lists(st.integers(1, 40), min_size=size, max_size=size))
    seconds = draw(st.lists(st.sampled_from([1e-6, 1e-4, 5e-3]), min_size=size, max_size=size))
    return cluster, steps, seconds


def train(communicator, chosen, num_steps, mean_seconds, learning_rate=0.1):
    model, events = Quadratic(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    algorithm = SGP(model, optimizer, communicator, chosen, seed=1, recorder=events.append)
    for step in range(num_steps):
        model.set_gradient(communicator.rank, step)
        communicator.clock.sleep(float(torch.rand(())) * mean_seconds)
        algorithm.step(num_samples=step % 3 + 1)
    algorithm.finish()
    z = model.z.detach().numpy().copy()
    with algorithm.consensus():
        consensus = model.z.detach().numpy().copy()
    algorithm.close()
    return z, consensus, events, algorithm


def run(drawn, chosen, learning_rate=0.1):
    cluster, steps, seconds = drawn
    return cluster.run(lambda c: train(c, chosen, steps[c.rank], seconds[c.rank], learning_rate))


def replay(function, results, chosen):
    topology = build_topology(
        chosen.graph,
        len(results),
        num_peers=chosen.num_peers,
        two_peer_rounds=chosen.two_peer_rounds,
        seed=1,
    )
    return function(
        Quadratic().z.detach().numpy(),
        [events for _, _, events, _ in results],
        gradient,
        global_view.SGD(momentum=0.9),
        topology,
        tau=chosen.tau,
        average_rounds=chosen.average_rounds,
        biased=chosen.biased,
    )


@settings(max_examples=40)
@given(clusters(), sgp_settings(st.none()))
def test_equals_the_global_view_whatever_the_interleaving(drawn, chosen):
    results = run(drawn, chosen)
    expected = replay(push_sum_view.replay_sgp, results, chosen)
    _, steps, _ = drawn
    total_samples = sum(step % 3 + 1 for num_steps in steps for step in range(num_steps))
    for rank, (z, consensus, _, algorithm) in enumerate(results):
        np.testing.assert_allclose(z, expected[rank], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(consensus, results[0][1], rtol=1e-13)
        assert algorithm.progress.samples == algorithm.progress.agreed_samples == total_samples
        assert max(algorithm.stats.staleness, default=0) <= chosen.tau
        assert algorithm.stats.messages_kept_back == 0


@settings(max_examples=30)
@given(clusters(), sgp_settings(st.sampled_from([0.0, 1e-4])))
def test_keeping_the_mass_equals_the_view_by_events(drawn, chosen):
    results = run(drawn, chosen)
    expected = replay(push_sum_view.replay_sgp_by_event, results, chosen)
    for rank, (z, _, _, algorithm) in enumerate(results):
        np.testing.assert_allclose(z, expected[rank], rtol=1e-10, atol=1e-12)
        assert max(algorithm.stats.staleness, default=0) <= chosen.tau


@settings(max_examples=30)
@given(clusters(), sgp_settings(st.sampled_from([None, 0.0])))
def test_without_gradients_mass_is_conserved_and_weights_stay_in_bounds(drawn, chosen):
    cluster, steps, seconds = drawn

    def body(communicator):
        rank, model = communicator.rank, Quadratic()
        algorithm = SGP(model, torch.optim.SGD(model.parameters(), lr=1.0), communicator, chosen)
        weights = []
        for step in range(steps[rank]):
            model.z.grad = torch.full_like(model.z, float(rank + 1) if step == 0 else 0.0)
            communicator.clock.sleep(float(torch.rand(())) * seconds[rank])
            algorithm.step(1)
            weights.append(algorithm.weight)
        algorithm.finish()
        weights.append(algorithm.weight)
        with algorithm.consensus():
            consensus = model.z.detach().numpy().copy()
        algorithm.close()
        return consensus, weights

    results = cluster.run(body)
    size = cluster.num_ranks
    if chosen.average_rounds == 0:
        expected = Quadratic().z.detach().numpy() - (size + 1) / 2
        for consensus, _ in results:
            np.testing.assert_allclose(consensus, expected, rtol=1e-12)
    assert sum(weights[-1] for _, weights in results) == pytest.approx(size, rel=1e-12)
    assert all(0 < weight < size for _, weights in results for weight in weights) or size == 1
    if chosen.tau == 0 and chosen.slot_patience_seconds is None:
        assert all(weight == pytest.approx(1.0, rel=1e-12) for _, weights in results for weight in weights)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("size", [4, 6])
def test_consensus_is_reached_when_gradients_are_zero(graph, tau, size):
    def body(communicator):
        model = Quadratic()
        algorithm = SGP(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            communicator,
            SGPSettings(graph=graph, tau=tau),
        )
        # Enough even where all messages come a round late: on a ring of 6 distances then shrink by 0.96 a round.
        for step in range(100 * max(1, tau)):
            model.z.grad = torch.full_like(model.z, float(communicator.rank + 1) if step == 0 else 0.0)
            communicator.clock.sleep(float(torch.rand(())) * 1e-4)
            algorithm.step(1)
        algorithm.finish()
        algorithm.close()
        return model.z.detach().numpy().copy()

    ends = np.stack(SimulatedCluster(size, seed=size, jitter=3.0).run(body))
    expected = Quadratic().z.detach().numpy() - (size + 1) / 2
    assert np.abs(ends - expected).max() < 0.02 * (size - 1) / 2  # of the largest distance at the beginning


def test_a_message_lost_is_noticed_at_the_drain(monkeypatch):
    """The sum of the weights over the ranks is checked whenever nothing is under way."""
    original = SGP._apply

    def lossy(self, message):
        if message.round_number == 3 and self.communicator.rank == 1:
            return
        original(self, message)

    monkeypatch.setattr(SGP, "_apply", lossy)
    with pytest.raises(RuntimeError, match="lost"):
        SimulatedCluster(4, seed=0).run(lambda c: train(c, SGPSettings(tau=1), 8, 1e-4))


def test_a_bfloat16_model_is_pushed_in_float32():
    """So that mixing, and dividing by the weight, round to bfloat16 once a step and do not add up."""

    def body(communicator):
        model = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        algorithm = SGP(
            model, torch.optim.SGD(model.parameters(), lr=2.0**-8), communicator, SGPSettings(tau=1)
        )
        for _ in range(64):
            model.weight.grad = torch.full_like(model.weight, float(communicator.rank))
            algorithm.step(1)
        with algorithm.consensus():
            consensus = model.weight.detach().double().numpy().copy()
        algorithm.close()
        return consensus

    for consensus in SimulatedCluster(4, jitter=3.0).run(body):
        np.testing.assert_allclose(consensus, 1.0 - 64 * 1.5 * 2.0**-8, atol=2.0**-6)
