"""LASGD and SGD-AR under random interleavings: the oracle, the invariants, and ranks that stop at different steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pushreduce.algorithms import LASGD, AllReduceSGD
from pushreduce.algorithms.tally import MAX_RANKS, Tally
from pushreduce.communication.simulated import SimulatedCluster
from pushreduce.settings import LASGDSettings
from pushreduce.simulation import global_view

DIMENSION = 3


def curvature(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).uniform(0.5, 2.0, DIMENSION)


def target(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(DIMENSION)


def gradient(rank: int, step: int, x: np.ndarray) -> np.ndarray:
    """Of f(x) = 1/2 sum_j a_j (x_j - b_j)^2."""
    return curvature(rank) * (x - target(rank, step))


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.linspace(-1.0, 1.0, DIMENSION, dtype=torch.float64))

    def set_gradient(self, rank: int, step: int) -> None:
        loss = (
            0.5
            * (torch.from_numpy(curvature(rank)) * (self.x - torch.from_numpy(target(rank, step))) ** 2).sum()
        )
        loss.backward()


def train(communicator, build, num_steps, mean_seconds, momentum):
    """Some steps at a random pace; the vector, the trace and the algorithm at the end."""
    model, events = Quadratic(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    algorithm = build(model, optimizer, communicator, events.append)
    for step in range(num_steps):
        optimizer.zero_grad()
        model.set_gradient(communicator.rank, step)
        communicator.clock.sleep(float(torch.rand(())) * mean_seconds)
        algorithm.step(num_samples=step % 3 + 1)
    algorithm.finish()
    return model.x.detach().numpy().copy(), events, algorithm


def total_samples(steps: list[int]) -> int:
    return sum(step % 3 + 1 for num_steps in steps for step in range(num_steps))


@st.composite
def clusters(draw: st.DrawFn, max_ranks: int = 6):
    """(a cluster with random timing, steps of every rank, mean compute seconds of every rank)"""
    size = draw(st.integers(1, max_ranks))
    cluster = SimulatedCluster(
        size, seed=draw(st.integers(0, 2**20)), jitter=draw(st.sampled_from([0.0, 1.0, 30.0]))
    )
    steps = draw(st.lists(st.integers(1, 40), min_size=size, max_size=size))
    seconds = draw(st.lists(st.sampled_from([1e-6, 1e-4, 5e-3]), min_size=size, max_size=size))
    return cluster, steps, seconds


@settings(max_examples=150)
@given(
    clusters(),
    st.integers(0, 6),
    st.sampled_from([(1.0, 1.0), (0.3, 1.0), (1.0, 0.4), (0.6, 0.7)]),
    st.sampled_from([0.0, 0.9]),
)
def test_lasgd_equals_the_oracle_whatever_the_interleaving(drawn, tau_max, elastic, momentum):
    cluster, steps, seconds = drawn
    alpha, beta = elastic
    chosen = LASGDSettings(tau_max=tau_max, elastic_alpha=alpha, elastic_beta=beta)

    def body(communicator):
        rank = communicator.rank
        return train(
            communicator,
            lambda model, optimizer, c, recorder: LASGD(model, optimizer, c, chosen, recorder=recorder),
            steps[rank],
            seconds[rank],
            momentum,
        )

    results = cluster.run(body)
    rule = global_view.SGD(momentum=momentum)
    x0 = Quadratic().x.detach().numpy()
    expected = global_view.replay_lasgd(
        x0, [events for _, events, _ in results], gradient, rule, alpha=alpha, beta=beta
    )
    for rank, (x, _, algorithm) in enumerate(results):
        np.testing.assert_allclose(x, expected[rank], rtol=1e-11, atol=1e-12)
        assert algorithm.progress.samples == algorithm.progress.agreed_samples == total_samples(steps)
        if tau_max > 0:
            assert max(algorithm.stats.steps_per_allreduce, default=0) <= tau_max + 1
    if alpha == beta == 1.0:  # the last synchronisation brought all to one point
        np.testing.assert_allclose(
            [x for x, *_ in results], [results[0][0]] * len(results), rtol=1e-12, atol=1e-14
        )


@settings(max_examples=100)
@given(clusters(max_ranks=5), st.sampled_from([0.0, 0.9]))
def test_allreduce_equals_the_oracle_whatever_the_interleaving(drawn, momentum):
    cluster, steps, seconds = drawn

    def body(communicator):
        rank = communicator.rank
        return train(
            communicator,
            lambda model, optimizer, c, recorder: AllReduceSGD(model, optimizer, c, recorder=recorder),
            steps[rank],
            seconds[rank],
            momentum,
        )

    results = cluster.run(body)
    x0 = Quadratic().x.detach().numpy()
    rule = global_view.SGD(momentum=momentum)
    expected = global_view.replay_allreduce(x0, [events for _, events, _ in results], gradient, rule)
    for rank, (x, _, algorithm) in enumerate(results):
        np.testing.assert_allclose(x, expected[rank], rtol=1e-11, atol=1e-12)
        assert np.array_equal(x, results[0][0])
        assert algorithm.progress.samples == total_samples(steps)


@settings(max_examples=100)
@given(clusters(), st.integers(0, 4))
def test_lasgd_preserves_the_mean_of_constant_gradients(drawn, tau_max):
    """With gradients that do not depend on x, the mean moves by exactly the sum of all local steps over n."""
    cluster, steps, seconds = drawn

    def body(communicator):
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        algorithm = LASGD(model, optimizer, communicator, LASGDSettings(tau_max=tau_max))
        for _ in range(steps[communicator.rank]):
            model.x.grad = torch.full_like(model.x, communicator.rank + 1.0)
            communicator.clock.sleep(float(torch.rand(())) * seconds[communicator.rank])
            algorithm.step(1)
        algorithm.finish()
        return model.x.detach().numpy().copy()

    x = np.mean(cluster.run(body), axis=0)
    moved = np.mean([-0.01 * (rank + 1) * num_steps for rank, num_steps in enumerate(steps)])
    np.testing.assert_allclose(x, np.linspace(-1.0, 1.0, DIMENSION) + moved, rtol=1e-11, atol=1e-12)


def test_algorithm_1_worked_by_hand():
    """Two ranks on f_0 = x^2/2 and f_1 = (x - 4)^2/2 from x = 2, eta = 1/2, tau_max = 1; Algorithm 1 line by line.

    step 0: x = (2 - 1, 2 + 1) = (1, 3), both sent: z_0 = 2
    step 1: x = (1 - 1/2, 3 + 1/2) = (1/2, 7/2); x <- z_0 + (x - s) = (2 - 1/2, 2 + 1/2) = (3/2, 5/2); sent: z_1 = 2
    step 2: x = (3/2 - 3/4, 5/2 + 3/4) = (3/4, 13/4); x <- z_1 + (x - s) = (2 - 3/4, 2 + 3/4) = (5/4, 11/4)
    """

    def body(communicator):
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(model.weight, 2.0)
        algorithm = LASGD(
            model, torch.optim.SGD(model.parameters(), lr=0.5), communicator, LASGDSettings(tau_max=1)
        )
        path = []
        for _ in range(3):
            model.weight.grad = model.weight.detach() - 4.0 * communicator.rank
            algorithm.step(1)
            path.append(model.weight.item())
        algorithm.finish()
        return path, model.weight.item()

    (path_0, end_0), (path_1, end_1) = SimulatedCluster(2).run(body)
    assert path_0 == [1.0, 1.5, 1.25]
    assert path_1 == [3.0, 2.5, 2.75]
    assert end_0 == end_1 == 2.0


def test_two_backward_passes_without_accumulating_are_refused():
    def body(communicator):
        model = Quadratic()
        AllReduceSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), communicator)
        model.set_gradient(communicator.rank, 0)
        model.set_gradient(communicator.rank, 1)

    with pytest.raises(RuntimeError, match="accumulating"):
        SimulatedCluster(2).run(body)


@given(
    st.lists(
        st.tuples(st.integers(0, 4096**2 - 1), st.booleans(), st.booleans()), min_size=1, max_size=MAX_RANKS
    ),
    st.sampled_from([torch.float32, torch.float64]),
)
@settings(deadline=None)
def test_a_tally_is_exact_through_a_float_mean(tallies, dtype):
    tails = torch.empty(len(tallies), Tally.LENGTH, dtype=dtype)
    for tail, (samples, finishing, stop) in zip(tails, tallies, strict=True):
        Tally(samples, int(finishing), int(stop)).write_to(tail)
    summed = Tally.sum_from(tails.mean(dim=0), len(tallies))
    assert summed.samples == sum(samples for samples, _, _ in tallies)
    assert summed.finishing == sum(finishing for _, finishing, _ in tallies)
    assert summed.stop_wanted == sum(stop for *_, stop in tallies)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ReLU(), "no trainable parameters"),
        (
            nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]),
            "several devices",
        ),
    ],
)
def test_models_that_cannot_be_trained_are_refused(model, message):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match=message):
        SimulatedCluster(1).run(lambda c: LASGD(model, optimizer, c))
