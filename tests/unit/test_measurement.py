"""Calibrating a simulated cluster finds the model that it was made from: the measurements time what they say."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from pushreduce.communication.simulated import SimulatedCluster
from pushreduce.simulation.calibration import fit, fit_steps
from pushreduce.simulation.cluster_model import ClusterModel, Uncertainty
from pushreduce.simulation.measurement import Measurer, _TurnTopology

COUNTER_BYTES = 8
MODEL = ClusterModel(
    num_hosts=3,
    link_bits_per_second=1e9,
    latency_seconds=5e-5,
    average_overhead_seconds=1.5e-3,
    average_overhead_seconds_per_doubling=1.2e-4,
    average_seconds_per_byte=1e-9,
    put_overhead_seconds=4e-4,
    put_seconds_per_byte=5e-10,
    in_host_latency_seconds=2e-5,
    in_host_seconds_per_byte=4e-10,
    step_seconds=0.03,
)


class VirtualMPI:
    """`BelowTheCommunicator` as the model has it; every call must be made by all ranks."""

    def __init__(self, communicator, model: ClusterModel) -> None:
        self._communicator, self._model = communicator, model

    def message_seconds(self, first: int, second: int, num_bytes: int) -> float | None:
        called = self._communicator.allgather((first, second, num_bytes))
        assert len(set(called)) == 1
        assert self._model.host_of(first) != self._model.host_of(second)
        if self._communicator.rank not in (first, second):
            return None
        seconds = self._model.message_seconds(num_bytes)
        self._communicator.clock.sleep(2 * seconds)
        return seconds if self._communicator.rank == first else None

    def sum_seconds(self, num_ranks: int) -> float | None:
        seconds = self._model.average_overhead_seconds_per_doubling / 2 * math.log2(num_ranks)
        return seconds if self._communicator.rank == 0 else None

    def host_sum_seconds(self, num_bytes: int) -> float | None:
        return self._model.host_sum_seconds(num_bytes) if self._communicator.local_rank == 0 else None


def calibrated(model: ClusterModel, *, jitter: float = 0.0, budget_seconds: float = 2.0):
    cluster = SimulatedCluster(
        model.num_ranks,
        ranks_per_host=model.ranks_per_host,
        average_seconds=model.average_seconds,
        put_seconds=lambda num_bytes, _: (
            model.latency_seconds
            if num_bytes == COUNTER_BYTES
            else model.put_seconds(num_bytes) - model.latency_seconds
        ),
        jitter=jitter,
    )

    def body(communicator):
        said: list[str] = []
        measurer = Measurer(
            communicator,
            VirtualMPI(communicator, model),
            budget_seconds=budget_seconds,
            say=said.append,
            device=torch.device("cpu"),
        )
        samples = measurer.messages() + measurer.sums() + measurer.averages() + measurer.puts()
        samples += measurer.in_host_sums()
        slowness = 2.0 if communicator.rank == communicator.size - 1 else 1.0
        steps = fit_steps(measurer.steps(lambda: communicator.clock.sleep(slowness * model.step_seconds)))
        assert said
        return fit(
            samples, num_hosts=measurer.num_hosts, ranks_per_host=measurer.ranks_per_host, steps=steps
        ), communicator.clock.now()

    calibrations = cluster.run(body)
    assert all(calibration == calibrations[0][0] for calibration, _ in calibrations)
    return calibrations[0]


@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (3, 2)], ids=str)
def test_the_model_behind_the_times_is_found(shape) -> None:
    num_hosts, ranks_per_host = shape
    model = replace(MODEL, num_hosts=num_hosts, ranks_per_host=ranks_per_host)
    calibration, _ = calibrated(model)
    assert calibration.largest_relative_error < 1e-6
    for item in fields(Uncertainty):
        if not item.name.startswith(("step_", "in_host" if ranks_per_host == 1 else "step_")):
            true = pytest.approx(getattr(model, item.name), rel=1e-4)
            assert getattr(calibration.model, item.name) == true, item.name
    n = model.num_ranks
    assert calibration.model.step_seconds == pytest.approx(model.step_seconds * (n + 1) / n)
    assert calibration.model.rank_slowness == pytest.approx([n / (n + 1)] * (n - 1) + [2 * n / (n + 1)])
    assert calibration.model.step_jitter == pytest.approx(0.0, abs=1e-9)


def test_the_budget_decides_how_large_messages_become() -> None:
    slow = replace(MODEL, num_hosts=2, link_bits_per_second=1e8)
    largest, took = [], []
    for budget_seconds in (1.0, 30.0):
        calibration, seconds = calibrated(slow, budget_seconds=budget_seconds)
        largest.append(max(sample.num_bytes for sample in calibration.samples))
        took.append(seconds)
    assert 1 << 20 <= largest[0] < 1 << 22 <= largest[1]
    assert 0.2 * 30.0 < took[1] < 1.2 * 30.0


def test_noise_is_seen_as_uncertainty() -> None:
    calm, noisy = (calibrated(MODEL, jitter=jitter)[0].model for jitter in (0.0, 0.3))
    assert noisy.relative_uncertainty.average_overhead_seconds > 2 * max(
        1e-3, calm.relative_uncertainty.average_overhead_seconds
    )


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_host", "says"), [(1, 1, "start two or more"), (3, 2, "in blocks")]
)
def test_clusters_that_cannot_be_described_are_refused_on_all_ranks_alike(
    num_ranks, ranks_per_host, says
) -> None:
    def body(communicator):
        with pytest.raises(ValueError, match=says) as caught:
            Measurer(
                communicator,
                VirtualMPI(communicator, MODEL),
                budget_seconds=1.0,
                say=lambda text: None,
                device=torch.device("cpu"),
            )
        return str(caught.value)

    assert len(set(SimulatedCluster(num_ranks, ranks_per_host=ranks_per_host).run(body))) == 1


def test_ranks_of_one_host_count_as_hosts() -> None:
    def body(communicator):
        measurer = Measurer(
            communicator,
            VirtualMPI(communicator, MODEL),
            budget_seconds=1.0,
            say=lambda text: None,
            device=torch.device("cpu"),
        )
        return measurer.is_one_host, measurer.num_hosts, measurer.ranks_per_host, measurer.in_host_sums()

    assert SimulatedCluster(3, ranks_per_host=3).run(body) == [(True, 3, 1, [])] * 3


@pytest.mark.parametrize("leaders", [range(0, 2), range(0, 6, 2), range(0, 12, 3)])
def test_out_and_in_neighbours_of_the_turns_agree(leaders) -> None:
    topology = _TurnTopology(leaders.stop, leaders)
    for round_number in range(40):
        sends = {(i, j) for i in range(topology.size) for j in topology.out_neighbours(i, round_number)}
        received = {(i, j) for j in range(topology.size) for i in topology.in_neighbours(j, round_number)}
        assert sends == received
        assert {i for pair in sends for i in pair} <= set(leaders)
        assert len(sends) == (len(leaders) if round_number % 5 < 3 else 1)
        assert max(len(topology.in_neighbours(j, round_number)) for j in leaders) <= topology.max_in_degree
