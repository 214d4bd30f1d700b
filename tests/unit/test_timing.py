"""The timing-only programs against the real pages: with the same compute times and costs, steps end at the same times.

The pages run with a tiny model on the simulated cluster; `clock.sleep` stands for the computation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pushreduce.algorithms.allreduce import AllReduceSGD
from pushreduce.algorithms.base import Algorithm
from pushreduce.algorithms.host_worker import HostWorker
from pushreduce.algorithms.lasgd import LASGD
from pushreduce.algorithms.sgp import SGP
from pushreduce.communication import simulated
from pushreduce.communication.base import Communicator
from pushreduce.communication.topology import build_topology
from pushreduce.settings import LASGDSettings, SGPSettings
from pushreduce.simulation import push_timing, timing
from pushreduce.simulation.cluster_model import ClusterModel
from pushreduce.simulation.cluster_transport import simulated_cluster
from pushreduce.simulation.time_line import TimeLine, host_compute_seconds

NUM_PARAMETERS = 1000
NUM_STEPS = 16
MODEL = ClusterModel(
    num_hosts=8,
    link_bits_per_second=8 * 4 * NUM_PARAMETERS / 0.3,  # the weights take 0.3 s
    latency_seconds=0.004,
    step_seconds=1.0,
    ring_from_bytes=1024,
    segment_bytes=1536,
    average_overhead_seconds=0.02,
    average_overhead_seconds_per_doubling=0.01,
    average_seconds_per_byte=1e-6,
    put_overhead_seconds=0.003,
    put_seconds_per_byte=1e-6,
)


@pytest.fixture(autouse=True)
def no_time_for_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that asks `done()` twice at one moment loses a microsecond, so that a loop on it cannot stop the time.

    SGP does so for its tally, once a step.
    """
    monkeypatch.setattr(simulated, "_SPIN_SECONDS", (1e-15, 1e-2))


def compute_seconds(num_ranks: int, seed: int) -> np.ndarray:
    """[NUM_STEPS, num_ranks] around a second; rank 1 is slow, and any step may take three times as long."""
    random = np.random.default_rng([num_ranks, seed])
    seconds = random.lognormal(-0.02, 0.2, (NUM_STEPS, num_ranks))
    seconds[random.random(seconds.shape) < 0.1] *= 3
    seconds[:, 1] *= 1.3
    return seconds


def run_pages(
    model: ClusterModel, compute: np.ndarray, build
) -> tuple[np.ndarray, Counter, Counter, np.ndarray]:
    """The real page on all ranks: ends of steps [NUM_STEPS, num_ranks], the counters of all, blocked seconds a rank."""
    num_ranks = compute.shape[1]

    def body(communicator: Communicator):
        linear = nn.Linear(NUM_PARAMETERS, 1, bias=False)
        algorithm: Algorithm = build(linear, torch.optim.SGD(linear.parameters(), lr=0.01), communicator)
        communicator.barrier()
        start = communicator.clock.now()
        ends = []
        blocked = algorithm.stats.blocked_seconds
        for step in range(NUM_STEPS):
            communicator.clock.sleep(compute[step, communicator.rank])
            linear.weight.grad = torch.full_like(linear.weight, 0.1)
            if isinstance(algorithm, AllReduceSGD):
                algorithm._gradient_ready(0)  # what backward()'s hook does
            algorithm.step(1)
            ends.append(communicator.clock.now() - start)
        blocked = algorithm.stats.blocked_seconds - blocked
        algorithm.finish()
        return ends, algorithm.stats, blocked

    results = simulated_cluster(model, num_ranks=num_ranks).run(body)
    steps_per_allreduce = sum((stats.steps_per_allreduce for _, stats, _ in results), Counter())
    staleness = sum((stats.staleness for _, stats, _ in results), Counter())
    return (
        np.array([ends for ends, _, _ in results]).T,
        steps_per_allreduce,
        staleness,
        np.array([blocked for _, _, blocked in results]),
    )


def assert_same(line: TimeLine, pages) -> None:
    ends, steps_per_allreduce, staleness, blocked = pages
    np.testing.assert_allclose(line.end_seconds, ends, rtol=1e-9)
    np.testing.assert_allclose(line.blocked_seconds.sum(axis=0), blocked, rtol=1e-6, atol=1e-8)
    assert line.steps_per_allreduce == steps_per_allreduce
    assert line.staleness == staleness


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("tau_max", [0, 1, 2, 5])
@pytest.mark.parametrize("weights_seconds", [0.1, 2.0])
def test_lasgd(num_ranks: int, tau_max: int, weights_seconds: float) -> None:
    model = replace(MODEL, link_bits_per_second=8 * 4 * NUM_PARAMETERS / weights_seconds)
    compute = compute_seconds(num_ranks, tau_max)
    line = timing.lasgd(model, 4 * NUM_PARAMETERS, compute, tau_max)
    settings = LASGDSettings(tau_max=tau_max)
    assert_same(line, run_pages(model, compute, lambda *arguments: LASGD(*arguments, settings)))
    assert np.all(line.blocked_seconds > -1e-9)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_allreduce(num_ranks: int) -> None:
    compute = compute_seconds(num_ranks, 0)
    line = timing.allreduce(MODEL, [4 * NUM_PARAMETERS], compute)
    assert_same(line, run_pages(MODEL, compute, AllReduceSGD))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("tau", [0, 1, 2, 3])
@pytest.mark.parametrize("weights_seconds", [0.1, 2.0])
def test_pushes(num_ranks: int, tau: int, weights_seconds: float) -> None:
    model = replace(MODEL, link_bits_per_second=8 * 4 * NUM_PARAMETERS / weights_seconds)
    check_pushes(model, num_ranks, SGPSettings(tau=tau))


@pytest.mark.parametrize("tau", [0, 1])
@pytest.mark.parametrize(
    "settings",
    [
        SGPSettings(num_peers=2),
        SGPSettings(two_peer_rounds=5),
        SGPSettings(graph="bipartite-exponential"),
        SGPSettings(graph="ring"),
        SGPSettings(graph="complete"),
        SGPSettings(graph="random"),
    ],
    ids=lambda settings: f"{settings.graph}-{settings.num_peers}-{settings.two_peer_rounds}",
)
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_pushes_on_other_graphs(num_ranks: int, settings: SGPSettings, tau: int) -> None:
    check_pushes(MODEL, num_ranks, replace(settings, tau=tau))


@pytest.mark.parametrize("tau", [0, 1])
@pytest.mark.parametrize("num_peers", [1, 2])
def test_pushes_of_several_ranks_a_host(num_peers: int, tau: int) -> None:
    model = replace(MODEL, num_hosts=4, ranks_per_host=2)
    check_pushes(model, 8, SGPSettings(num_peers=num_peers, tau=tau))


def test_hosts_as_workers() -> None:
    """Two ranks a host, whose barriers take time, but not the few bytes that they share."""
    model = replace(MODEL, num_hosts=4, ranks_per_host=2, in_host_latency_seconds=0.03)
    compute = compute_seconds(8, 0)
    hosts = host_compute_seconds(model, compute, 4 * NUM_PARAMETERS)
    line = timing.lasgd(replace(model, ranks_per_host=1), 4 * NUM_PARAMETERS, hosts, tau_max=2)

    def build(linear, optimizer, communicator):
        return HostWorker(
            linear,
            optimizer,
            communicator,
            lambda hosts: LASGD(linear, optimizer, hosts, LASGDSettings(tau_max=2)),
        )

    ends, _, _, _ = run_pages(model, compute, build)
    np.testing.assert_array_equal(ends[:, ::2], ends[:, 1::2])
    # The page copies after its algorithm's part of the step: two of the four barriers come later than in the program.
    np.testing.assert_allclose(line.end_seconds, ends[:, ::2], atol=2 * 0.03 + 1e-9)
    np.testing.assert_allclose(
        np.diff(line.end_seconds, axis=0), np.diff(ends[:, ::2], axis=0), atol=2 * 0.03
    )


@pytest.mark.parametrize("seed", [1, 3, 9])
def test_pushes_where_a_fast_sender_waits_before_the_next_one(seed: int) -> None:
    """Steps differ so much that a slot is awaited by a sender of a later round than the next."""
    compute = np.random.default_rng(seed).lognormal(-0.5, 1.0, (NUM_STEPS, 16))
    model = replace(MODEL, num_hosts=16)
    line = push_timing.sgp(model, 4 * NUM_PARAMETERS, compute, build_topology("exponential", 16), 1)
    assert_same(
        line, run_pages(model, compute, lambda *arguments: SGP(*arguments, SGPSettings(tau=1), seed=7))
    )


# -- what the pages cannot do in virtual time ------------------------------------------------------------------------


def test_nothing_overlaps_where_there_is_one_parameter() -> None:
    compute = compute_seconds(4, 0)
    lines = [
        each(MODEL, [4 * NUM_PARAMETERS], compute) for each in (timing.allreduce, timing.overlapped_allreduce)
    ]
    np.testing.assert_allclose(lines[0].end_seconds, lines[1].end_seconds, rtol=1e-12)


@given(
    st.lists(st.integers(1, 10_000), min_size=1, max_size=30),
    st.floats(1e-9, 1e-3),
    st.integers(2, 9),
    st.integers(0, 2**32 - 1),
)
def test_overlap_against_horovods_thread_step_by_step(
    parameter_bytes: list[int], seconds_per_byte: float, num_ranks: int, seed: int
) -> None:
    """The thread looks, takes what all ranks have ready, and averages it before it looks again."""
    model = replace(MODEL, link_bits_per_second=8 / seconds_per_byte)
    compute = np.random.default_rng(seed).uniform(0.1, 1.0, (3, num_ranks))
    now = 0.0
    ends = []
    for step in compute:
        ready = sorted(
            (
                now + max(step) * (1 / 3 + 2 / 3 * (len(parameter_bytes) - index) / len(parameter_bytes)),
                parameter_bytes[index],
            )
            for index in range(len(parameter_bytes))
        )
        while ready:
            now = max(now, ready[0][0])
            batch = [num_bytes for seconds, num_bytes in ready if seconds <= now * (1 + 1e-12)]
            ready = ready[len(batch) :]
            now += model.average_seconds(sum(batch), num_ranks)
        now += model.average_message_seconds(8 * (6 + len(parameter_bytes)), num_ranks)
        ends.append(now)
    line = timing.overlapped_allreduce(model, parameter_bytes, compute)
    np.testing.assert_allclose(line.end_seconds, np.array(ends)[:, None].repeat(num_ranks, axis=1), rtol=1e-9)


def test_a_thousand_workers_are_dealt_with_by_recursion_and_by_events() -> None:
    compute = np.full((3, 1024), 1.0)
    for line in (
        timing.lasgd(MODEL, 4000, compute, 5),
        push_timing.sgp(MODEL, 4000, compute, build_topology("exponential", 1024), 1),
    ):
        assert line.end_seconds.shape == (3, 1024)
        assert np.all(np.ptp(line.end_seconds, axis=1) < 1e-9)  # equal workers stay equal


def check_pushes(model: ClusterModel, num_ranks: int, settings: SGPSettings) -> None:
    compute = compute_seconds(num_ranks, settings.tau)
    topology = build_topology(
        settings.graph,
        num_ranks,
        num_peers=settings.num_peers,
        two_peer_rounds=settings.two_peer_rounds,
        seed=7,
    )
    line = push_timing.sgp(model, 4 * NUM_PARAMETERS, compute, topology, settings.tau)
    assert_same(line, run_pages(model, compute, lambda *arguments: SGP(*arguments, settings, seed=7)))


@pytest.mark.parametrize("program", [timing.allreduce, timing.overlapped_allreduce])
def test_without_a_tally_only_its_average_is_missing(program) -> None:
    compute = compute_seconds(4, 0)
    parameter_bytes = [1000, 2000, 3000]
    with_tally = program(MODEL, parameter_bytes, compute).iteration_seconds(0)
    without = program(MODEL, parameter_bytes, compute, has_tally=False).iteration_seconds(0)
    assert with_tally - without == pytest.approx(MODEL.average_message_seconds(8 * (6 + 3), 4))


def test_without_computation_all_gradients_are_ready_at_once() -> None:
    compute = np.zeros((3, 4))
    np.testing.assert_array_equal(
        timing.overlapped_allreduce(MODEL, [1000, 2000], compute).end_seconds,
        timing.allreduce(MODEL, [1000, 2000], compute).end_seconds,
    )
