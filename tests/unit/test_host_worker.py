"""Hosts as workers, under random interleavings: the oracle with a worker a host, and what the ranks of a host share."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pushreduce.algorithms import LASGD, SGP, AllReduceSGD, HostWorker, host_worker
from pushreduce.algorithms.host_exchange import (
    DeviceExchange,
    HostExchange,
    SharedMemoryExchange,
    exchange_for,
)
from pushreduce.communication.flat import FlatParameters
from pushreduce.communication.simulated import SimulatedCluster
from pushreduce.communication.topology import build_topology
from pushreduce.settings import LASGDSettings, SGPSettings
from pushreduce.simulation import global_view, push_sum_view

DIMENSION = 5
SGD = {"lr": 0.1, "momentum": 0.9}


class Quadratic(nn.Module):
    """f(x) = 1/2 ||x - b||^2 with another b at every rank and step, over two parameters of which one is optional."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.linspace(-1.0, 1.0, DIMENSION, dtype=torch.float64)
        self.x, self.y = nn.Parameter(values[:2].clone()), nn.Parameter(values[2:].clone())

    def set_gradient(self, rank: int, step: int) -> None:
        b = torch.from_numpy(target(rank, step))
        self.x.grad, self.y.grad = self.x.detach() - b[:2], self.y.detach() - b[2:]

    def vector(self) -> np.ndarray:
        return torch.cat([self.x, self.y]).detach().numpy().copy()


def target(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(DIMENSION)


def num_samples(rank: int, step: int) -> int:
    return (step + rank) % 3 + 1


def build(
    chosen: LASGDSettings | SGPSettings, model: nn.Module, communicator, events=None, **sgd: float
) -> HostWorker:
    optimizer = torch.optim.SGD(model.parameters(), **(sgd or SGD))
    recorder = events.append if events is not None else None

    def build_inner(leaders):
        if isinstance(chosen, LASGDSettings):
            return LASGD(model, optimizer, leaders, chosen, recorder=recorder)
        return SGP(model, optimizer, leaders, chosen, seed=1, recorder=recorder)

    return HostWorker(model, optimizer, communicator, build_inner, recorder=recorder)


EXCHANGES = st.sampled_from([SharedMemoryExchange, DeviceExchange])


def run(cluster: SimulatedCluster, exchange: type[HostExchange], body) -> list[dict]:
    """`body` on all ranks, which exchange within their hosts as ranks on processors do, or as those with a GPU each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_worker, "exchange_for", lambda parameters: exchange)
        return cluster.run(body)


def train(communicator, chosen, steps: list[int], seconds: list[float]):
    model, events, progress = Quadratic(), [], []
    algorithm = build(chosen, model, communicator, events)
    rank = communicator.rank
    for step in range(steps[rank]):
        model.set_gradient(rank, step)
        communicator.clock.sleep(float(torch.rand(())) * seconds[rank])
        algorithm.step(num_samples(rank, step))
        progress.append((algorithm.progress.samples, model.vector().tolist()))
    algorithm.finish()
    with algorithm.consensus():
        consensus = model.vector()
    end = model.vector()
    algorithm.close()
    return {
        "end": end,
        "consensus": consensus,
        "events": events,
        "progress": progress,
        "algorithm": algorithm,
    }


@st.composite
def clusters(draw: st.DrawFn):
    """(a cluster with random timing, steps of every rank, mean compute seconds of every rank)"""
    size = draw(st.integers(1, 9))
    cluster = SimulatedCluster(
        size,
        seed=draw(st.integers(0, 2**20)),
        ranks_per_host=draw(st.integers(1, 4)),  # the last host may have fewer
        jitter=draw(st.sampled_from([0.0, 1.0, 30.0])),
    )
    steps = draw(st.lists(st.integers(1, 25), min_size=size, max_size=size))
    seconds = draw(st.lists(st.sampled_from([1e-6, 1e-4, 5e-3]), min_size=size, max_size=size))
    return cluster, steps, seconds


class Hosts:
    """The cluster's hosts as the oracle is to see them: one worker each, with its ranks' mean gradient over samples."""

    def __init__(self, cluster: SimulatedCluster, steps: list[int]) -> None:
        per_host = cluster.ranks_per_host
        self.ranks = [
            list(range(first, min(first + per_host, cluster.num_ranks)))
            for first in range(0, cluster.num_ranks, per_host)
        ]
        self.steps = steps

    def contributions(self, host: int, step: int) -> list[tuple[int, int]]:
        """(rank, samples) of the ranks of a host that have not ended before its step"""
        return [(rank, num_samples(rank, step)) for rank in self.ranks[host] if step < self.steps[rank]]

    def gradient(self, host: int, step: int, x: np.ndarray) -> np.ndarray:
        parts = self.contributions(host, step)
        return sum(b * (x - target(rank, step)) for rank, b in parts) / sum(b for _, b in parts)


def check(results: list[dict], hosts: Hosts, expected: np.ndarray) -> None:
    """Every rank is where the oracle says that its host is, and what is agreed is so everywhere."""
    total = sum(num_samples(rank, step) for rank, n in enumerate(hosts.steps) for step in range(n))
    for host, ranks in enumerate(hosts.ranks):
        events = [event for event in results[ranks[0]]["events"] if event["event"] in ("step", "average")]
        samples = [event["num_samples"] for event in events if event["num_samples"] > 0]
        steps = range(max(hosts.steps[rank] for rank in ranks))
        assert samples == [sum(b for _, b in hosts.contributions(host, step)) for step in steps]
        for rank in ranks:
            result = results[rank]
            np.testing.assert_allclose(result["end"], expected[host], rtol=1e-10, atol=1e-12)
            assert np.array_equal(result["end"], results[ranks[0]]["end"])
            assert np.array_equal(result["consensus"], results[0]["consensus"])
            progress = result["algorithm"].progress
            assert progress.size == len(hosts.ranks)
            assert progress.samples == progress.agreed_samples == total
            shared = min(len(result["progress"]), len(results[ranks[0]]["progress"]))
            assert result["progress"][:shared] == results[ranks[0]]["progress"][:shared]  # after every step
            assert result["events"][0] == {"event": "worker", "ranks": ranks}
            assert rank == ranks[0] or len(result["events"]) == 1
            assert [result["algorithm"].worker_of_rank[each] for each in ranks] == [host] * len(ranks)


def leaders_events(results: list[dict], hosts: Hosts) -> list[list[dict]]:
    return [results[ranks[0]]["events"][1:] for ranks in hosts.ranks]


@settings(max_examples=25)
@given(clusters(), EXCHANGES, st.integers(0, 4), st.sampled_from([(1.0, 1.0), (0.6, 0.7)]))
def test_lasgd_among_hosts_equals_the_oracle(drawn, exchange, tau_max, elastic):
    cluster, steps, seconds = drawn
    alpha, beta = elastic
    chosen = LASGDSettings(tau_max=tau_max, elastic_alpha=alpha, elastic_beta=beta)
    results = run(cluster, exchange, lambda c: train(c, chosen, steps, seconds))
    hosts = Hosts(cluster, steps)
    expected = global_view.replay_lasgd(
        Quadratic().vector(),
        leaders_events(results, hosts),
        hosts.gradient,
        global_view.SGD(momentum=SGD["momentum"]),
        alpha=alpha,
        beta=beta,
    )
    check(results, hosts, expected)


@settings(max_examples=25)
@given(
    clusters(),
    EXCHANGES,
    st.integers(0, 3),
    st.sampled_from(["exponential", "ring"]),
    st.sampled_from([0, 4]),
)
def test_sgp_among_hosts_equals_the_oracle(drawn, exchange, tau, graph, average_rounds):
    cluster, steps, seconds = drawn
    chosen = SGPSettings(tau=tau, graph=graph, average_rounds=average_rounds)
    results = run(cluster, exchange, lambda c: train(c, chosen, steps, seconds))
    hosts = Hosts(cluster, steps)
    expected = push_sum_view.replay_sgp(  # which checks, too, that mass is conserved
        Quadratic().vector(),
        leaders_events(results, hosts),
        hosts.gradient,
        global_view.SGD(momentum=SGD["momentum"]),
        build_topology(graph, len(hosts.ranks), num_peers=1, two_peer_rounds=0, seed=1),
        tau=tau,
        average_rounds=average_rounds,
        biased=False,
    )
    check(results, hosts, expected)


@settings(max_examples=15)
@given(clusters(), st.sampled_from([LASGDSettings(tau_max=2), SGPSettings(tau=1)]))
def test_constant_gradients_move_the_mean_of_hosts_by_the_mean_step(drawn, chosen):
    cluster, steps, seconds = drawn
    hosts = Hosts(cluster, steps)

    def body(communicator):
        rank, model = communicator.rank, Quadratic()
        algorithm = build(chosen, model, communicator, lr=0.01)
        for step in range(steps[rank]):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, rank + 1.0)
            communicator.clock.sleep(float(torch.rand(())) * seconds[rank])
            algorithm.step(num_samples(rank, step))
        with algorithm.consensus():
            consensus = model.vector()
        algorithm.close()
        return consensus

    moved = 0.0
    for host, ranks in enumerate(hosts.ranks):
        for step in range(max(steps[rank] for rank in ranks)):
            parts = hosts.contributions(host, step)
            moved -= 0.01 * sum(b * (rank + 1.0) for rank, b in parts) / sum(b for _, b in parts)
    for consensus in cluster.run(body):
        np.testing.assert_allclose(
            consensus, Quadratic().vector() + moved / len(hosts.ranks), rtol=1e-10, atol=1e-11
        )


@pytest.mark.parametrize("chosen", [LASGDSettings(tau_max=2), SGPSettings(tau=1)], ids=["lasgd", "sgp"])
def test_one_host_is_plain_sgd_with_the_mean_gradient_bit_for_bit(chosen):
    def plain() -> np.ndarray:
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        for step in range(20):
            parts = []
            for rank in range(4):
                model.set_gradient(rank, step)
                parts.append([num_samples(rank, step) * p.grad for p in model.parameters()])
            samples = float(sum(num_samples(rank, step) for rank in range(4)))
            for parameter, *gradients in zip(model.parameters(), *parts, strict=True):
                total = gradients[0]
                for gradient in gradients[1:]:
                    total = total + gradient
                parameter.grad = total / samples
            optimizer.step()
        return model.vector()

    results = SimulatedCluster(4, ranks_per_host=4, jitter=3.0).run(
        lambda c: train(c, chosen, [20] * 4, [1e-4] * 4)
    )
    for result in results:
        assert np.array_equal(result["end"], plain())


@pytest.mark.parametrize("chosen", [LASGDSettings(tau_max=1), SGPSettings()], ids=["lasgd", "sgp"])
def test_one_rank_a_host_is_a_worker_a_process_bit_for_bit(chosen):
    def of_processes(communicator):
        model, rank = Quadratic(), communicator.rank
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        algorithm = (LASGD if isinstance(chosen, LASGDSettings) else SGP)(
            model, optimizer, communicator, chosen
        )
        for step in range(20):
            model.set_gradient(rank, step)
            algorithm.step(num_samples(rank, step))
        algorithm.finish()
        algorithm.close()
        return model.vector()

    hosts = SimulatedCluster(4).run(lambda c: train(c, chosen, [20] * 4, [0.0] * 4))
    for result, expected in zip(hosts, SimulatedCluster(4).run(of_processes), strict=True):
        assert np.array_equal(result["end"], expected)


@pytest.mark.parametrize("chosen", [LASGDSettings(tau_max=1), SGPSettings()], ids=["lasgd", "sgp"])
@pytest.mark.parametrize("begins_as_host", [True, False])
def test_one_rank_a_host_goes_on_with_the_state_of_a_worker_a_process_and_back(chosen, begins_as_host):
    """Their ranks belong to the same workers, so that a checkpoint of one is restored into the other."""

    def as_process(chosen, model, communicator):
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        kind = LASGD if isinstance(chosen, LASGDSettings) else SGP
        return kind(model, optimizer, communicator, chosen)

    def body(communicator):
        ends = []
        for kinds in ((begins_as_host, begins_as_host), (begins_as_host, not begins_as_host)):
            states = []
            for is_host, steps in zip(kinds, (range(8), range(8, 16)), strict=True):
                model = Quadratic()
                algorithm = (build if is_host else as_process)(chosen, model, communicator)
                for part, state in zip([model, algorithm.optimizer, algorithm], states, strict=False):
                    part.load_state_dict(state)
                for step in steps:
                    model.set_gradient(communicator.rank, step)
                    algorithm.step(1)
                algorithm.finish()
                states = [part.state_dict() for part in (model, algorithm.optimizer, algorithm)]
            ends.append((model.vector(), algorithm.progress.samples))
        return ends

    for (unchanged, _), (changed, samples) in SimulatedCluster(3).run(body):
        assert np.array_equal(unchanged, changed)
        assert samples == 3 * 16


def test_ranks_with_a_device_of_their_own_do_not_share_the_processors_memory():
    kinds = {
        device: exchange_for(FlatParameters([nn.Parameter(torch.empty(3, device=device))]))
        for device in ("cpu", "meta")
    }
    assert kinds == {"cpu": SharedMemoryExchange, "meta": DeviceExchange}


@pytest.mark.parametrize("exchange", [SharedMemoryExchange, DeviceExchange])
def test_where_the_leaders_parameters_were_before_is_given_back(exchange):
    def body(communicator):
        algorithm = build(LASGDSettings(), Quadratic(), communicator)
        communicator.barrier()
        gc.collect()
        parameter = algorithm.parameters.parameters[0]
        kept = [
            each
            for each in gc.get_objects()
            if type(each) is FlatParameters and any(own is parameter for own in each.parameters)
        ]
        algorithm.close()
        return len(kept)

    assert run(SimulatedCluster(4, ranks_per_host=2), exchange, body) == [1] * 4


def test_the_hosts_mean_gradient_is_clipped():
    """Single ranks' gradients of opposite sign are beyond the bound, their mean is not."""

    def body(communicator):
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        algorithm = HostWorker(
            model, optimizer, communicator, lambda c: LASGD(model, optimizer, c, max_grad_norm=1.0)
        )
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 100.0 if communicator.rank == 0 else -99.8)
        algorithm.step(1)
        algorithm.finish()
        return model.vector()

    for end in SimulatedCluster(2, ranks_per_host=2).run(body):
        np.testing.assert_allclose(end, Quadratic().vector() - 0.1, rtol=1e-9)


def test_a_parameter_that_only_some_ranks_have_a_gradient_of():
    """The others count as zero; one that no rank has a gradient of is not updated, not even by its momentum."""

    def body(communicator):
        model = Quadratic()
        algorithm = build(LASGDSettings(), model, communicator, lr=1.0, momentum=0.5)
        for step in range(2):
            model.x.grad = model.y.grad = None
            if step == 0:
                model.y.grad = torch.ones_like(model.y)
                if communicator.rank == 1:
                    model.x.grad = torch.ones_like(model.x)
            else:
                model.x.grad = torch.zeros_like(model.x)
            algorithm.step(1)
        algorithm.finish()
        return model.vector() - Quadratic().vector()

    for moved in SimulatedCluster(2, ranks_per_host=2).run(body):
        np.testing.assert_allclose(moved, [-0.75, -0.75, -1.0, -1.0, -1.0])


def test_what_cannot_be_host_workers_is_refused_on_all_ranks():
    refusals = []

    def body(communicator):
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            HostWorker(model, optimizer, communicator, lambda c: AllReduceSGD(model, optimizer, c))
        except ValueError as error:
            refusals.append(str(error))

    SimulatedCluster(4, ranks_per_host=2).run(body)
    assert len(refusals) == 4
    assert all("SGD-AR" in refusal for refusal in refusals)


def test_a_rank_cannot_take_its_state_in_flight_nor_step_in_consensus_or_after_close():
    def body(communicator):
        model = Quadratic()
        algorithm = build(SGPSettings(tau=1), model, communicator)
        model.set_gradient(communicator.rank, 0)
        algorithm.step(1)
        with pytest.raises(RuntimeError, match="finish"):
            algorithm.state_dict()
        with pytest.raises(ValueError, match="at least one sample"):
            algorithm.step(0)
        with algorithm.consensus(), pytest.raises(RuntimeError, match="consensus"):
            algorithm.step(1)
        algorithm.close()
        with pytest.raises(RuntimeError, match="closed"):
            algorithm.step(1)

    SimulatedCluster(4, ranks_per_host=2).run(body)
