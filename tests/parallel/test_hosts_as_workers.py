"""Hosts as workers against the oracle, what a loop relies on, and what the ranks of a host share."""

from __future__ import annotations

import io
from pathlib import Path

import least_squares
import numpy as np
import pytest
import torch
from torch import nn

from pushreduce.algorithms import LASGD, SGP, HostWorker, host_worker
from pushreduce.algorithms.host_exchange import DeviceExchange
from pushreduce.communication.base import Communicator
from pushreduce.communication.topology import build_topology
from pushreduce.settings import LASGDSettings, SGPSettings
from pushreduce.simulation import global_view, push_sum_view

SGD = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}
BOTH = pytest.mark.parametrize("settings", [LASGDSettings(), SGPSettings()], ids=["lasgd", "sgp"])


@pytest.fixture(params=["memory", "devices"])
def exchange(request, monkeypatch) -> None:
    """What ranks with a GPU each do, too, on processors: torch.distributed is gloo then instead of NCCL."""
    if request.param == "devices":
        monkeypatch.setattr(host_worker, "exchange_for", lambda parameters: DeviceExchange)


def build(
    communicator: Communicator,
    settings: LASGDSettings | SGPSettings,
    model: nn.Module,
    events: list[dict] | None = None,
) -> HostWorker:
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    kind = LASGD if isinstance(settings, LASGDSettings) else SGP
    recorder = events.append if events is not None else None
    return HostWorker(
        model,
        optimizer,
        communicator,
        lambda leaders: kind(model, optimizer, leaders, settings, recorder=recorder),
        recorder=recorder,
    )


def num_samples(rank: int) -> int:
    return 3 + 2 * rank


def train(algorithm: HostWorker, steps: range) -> None:
    rank = algorithm.communicator.rank
    for step in steps:
        algorithm.optimizer.zero_grad(set_to_none=step % 2 == 0)
        least_squares.backward(algorithm.model, rank, step, num_samples(rank))
        algorithm.step(num_samples(rank))


@BOTH
def test_equals_the_oracle(ranks, settings, exchange):
    """Every rank with a number of steps and samples of its own."""

    def num_steps(rank: int) -> int:
        return 12 + 5 * (rank % 2) + rank

    def body(communicator):
        events: list[dict] = []
        algorithm = build(communicator, settings, least_squares.model(), events)
        train(algorithm, range(num_steps(communicator.rank)))
        algorithm.finish()
        algorithm.close()
        return least_squares.vector(algorithm.model), events, algorithm.progress

    results = ranks.run(body, ranks_per_host=2)
    hosts = sorted({tuple(events[0]["ranks"]) for _, events, _ in results})

    def gradient(host: int, step: int, x: np.ndarray) -> np.ndarray:
        contributing = [rank for rank in hosts[host] if step < num_steps(rank)]
        parts = [
            num_samples(rank) * least_squares.gradient(rank, step, x, num_samples(rank))
            for rank in contributing
        ]
        return sum(parts) / sum(map(num_samples, contributing))

    events = [results[host[0]][1][1:] for host in hosts]
    rule = global_view.SGD(momentum=SGD["momentum"], nesterov=True, weight_decay=SGD["weight_decay"])
    x0 = least_squares.vector(least_squares.model())
    if isinstance(settings, LASGDSettings):
        expected = global_view.replay_lasgd(x0, events, gradient, rule)
    else:
        topology = build_topology("exponential", len(hosts), num_peers=1, two_peer_rounds=0, seed=0)
        expected = push_sum_view.replay_sgp(
            x0, events, gradient, rule, topology, tau=0, average_rounds=0, biased=False
        )
    total = sum(num_steps(rank) * num_samples(rank) for rank in range(ranks.size))
    for host, members in enumerate(hosts):
        for rank in members:
            x, _, progress = results[rank]
            np.testing.assert_allclose(x, expected[host], rtol=1e-10, atol=1e-12)
            assert np.array_equal(x, results[members[0]][0])
            assert progress.samples == progress.agreed_samples == total


@BOTH
def test_state_restores_the_run(ranks, settings):
    def body(communicator):
        undisturbed = build(communicator, settings, least_squares.model())
        train(undisturbed, range(5))
        with pytest.raises(RuntimeError, match="finish"):
            undisturbed.state_dict()
        undisturbed.finish()
        file = io.BytesIO()
        parts = [undisturbed.model, undisturbed.optimizer, undisturbed]
        torch.save([part.state_dict() for part in parts], file)
        train(undisturbed, range(5, 12))
        undisturbed.finish()

        file.seek(0)
        resumed = build(communicator, settings, least_squares.model())
        parts = [resumed.model, resumed.optimizer, resumed]
        for part, state in zip(parts, torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
        train(resumed, range(5, 12))
        resumed.finish()
        undisturbed.close()
        resumed.close()
        return least_squares.vector(undisturbed.model), least_squares.vector(resumed.model)

    for undisturbed, resumed in ranks.run(body, ranks_per_host=2):
        np.testing.assert_allclose(undisturbed, resumed, rtol=1e-13, atol=1e-14)


@BOTH
def test_a_request_to_stop_reaches_all_ranks(ranks, settings):
    def body(communicator):
        algorithm = build(communicator, settings, least_squares.model())
        num_steps = 0
        while not algorithm.progress.stop_requested:
            if communicator.rank == communicator.size - 1 and num_steps == 7:
                algorithm.request_stop()
            train(algorithm, range(num_steps, num_steps + 1))
            num_steps += 1
        algorithm.finish()
        algorithm.close()
        return algorithm.worker_of_rank[communicator.rank], num_steps

    results = ranks.run(body, ranks_per_host=2)
    assert len(set(results)) == len({host for host, _ in results}), "all ranks of a host stop at one step"


def test_consensus_pools_batch_norm_over_all_ranks_and_gives_back_what_was_there(ranks, exchange):
    def body(communicator):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        algorithm = build(communicator, LASGDSettings(), model)
        model[1].running_mean.fill_(float(communicator.rank))
        own = [tensor.clone() for tensor in model.state_dict().values()]
        with algorithm.consensus():
            pooled = model[1].running_mean.tolist()
        restored = all(map(torch.equal, own, model.state_dict().values()))
        algorithm.close()
        return pooled, restored

    for pooled, restored in ranks.run(body, ranks_per_host=2):
        assert pooled == pytest.approx([(ranks.size - 1) / 2] * 2)
        assert restored


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_ranks_of_a_host_see_one_memory(ranks, dtype):
    def body(communicator):
        host = communicator.split_by_host().host
        memory = host.shared(3 * host.size, dtype).view(host.size, 3)
        read = []
        for round_number in range(20):
            memory[host.rank] = 100 * round_number + host.rank
            host.barrier()
            read.append(memory.tolist())
            host.barrier()
        return host.size, read

    for size, read in ranks.run(body, ranks_per_host=2):
        expected = [[[100 * k + rank] * 3 for rank in range(size)] for k in range(20)]
        assert read == expected


@pytest.mark.parametrize("num_elements", [1, 2, 5, 1000])
def test_rows_are_summed_in_the_order_of_ranks(ranks, num_elements):
    """Bit for bit, with values of which float32 loses some in any other order."""

    def row(rank: int) -> torch.Tensor:
        return torch.full((num_elements,), (1e8, 1.0, -1e8, 0.5)[rank % 4])

    def body(communicator):
        host = communicator.split_by_host().host
        rows = host.shared(host.size * num_elements, torch.float32).view(host.size, num_elements)
        sums = []
        for _ in range(3):
            rows[host.rank] = row(host.rank)
            host.sum_rows(rows)
            sums.append(rows[0].clone())
            host.barrier()
        return host.size, sums

    for size, sums in ranks.run(body, ranks_per_host=4):
        expected = row(0)
        for rank in range(1, size):
            expected = expected + row(rank)
        assert all(torch.equal(each, expected) for each in sums)


def test_devices_sum_and_copy(ranks):
    def body(communicator):
        host = communicator.split_by_host().host
        devices = host.on_devices(torch.empty(5))
        ours = torch.arange(5, dtype=torch.float64) * (host.rank + 1)
        theirs = ours.clone()
        devices.sum_in_place(ours)
        host.barrier()
        devices.broadcast(theirs)
        return host.size, ours.tolist(), theirs.tolist()

    for size, total, copied in ranks.run(body, ranks_per_host=2):
        assert total == [k * size * (size + 1) / 2 for k in range(5)]
        assert copied == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.real
def test_devices_between_which_nothing_averages_are_refused_on_all_ranks(ranks):
    def body(communicator):
        with pytest.raises(ValueError, match="devices of type meta: use --device cpu"):
            communicator.split_by_host().host.on_devices(torch.empty(5, device="meta"))

    ranks.run(body)


@pytest.mark.real
def test_too_little_shared_memory_is_said_on_all_ranks_and_leaves_nothing(ranks):
    def body(communicator):
        host = communicator.split_by_host().host
        before = sorted(Path("/dev/shm").glob("pushreduce-*"))
        with pytest.raises(ValueError, match="no room for another"):
            host.shared(1 << 50, torch.float32)
        communicator.barrier()
        return before, sorted(Path("/dev/shm").glob("pushreduce-*"))

    if ranks.size == 1:
        pytest.skip("of several ranks: one alone shares no memory")
    for before, after in ranks.run(body):
        assert set(after) <= set(before)
