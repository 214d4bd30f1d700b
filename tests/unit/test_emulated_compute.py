"""Emulated compute: how long a step takes, and in which order its gradients come, on clocks that a test moves."""

from __future__ import annotations

import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pushreduce.communication import emulated_host
from pushreduce.communication.simulated import SimulatedCluster
from pushreduce.settings import (
    DataSettings,
    EmulationSettings,
    OptimizerSettings,
    Settings,
    SettingsError,
    TrainingSettings,
    check,
)
from pushreduce.training.emulated_compute import EmulatedCompute
from pushreduce.training.loop import TrainingLoop
from pushreduce.training.metrics import read_records
from pushreduce.training.model import initial_model
from pushreduce.training.run_directory import RunDirectory
from pushreduce.workloads import build_workload


class HandClock:
    """Time passes only where it is spent."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.seconds += seconds


class Slow(nn.Linear):
    """A layer whose real computation takes half a second of `clock`."""

    clock: HandClock

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.clock.seconds += 0.5
        return super().forward(inputs)


def rank_of(size: int, rank: int = 0) -> SimpleNamespace:
    """What emulated compute asks of a communicator that can wait in backward()."""
    return SimpleNamespace(rank=rank, size=size, clock=HandClock(), can_wait_in_backward=True)


def emulate(model: nn.Module, communicator, communication_seconds=lambda: 0.0, seed=0, passes=1, **settings):
    settings.setdefault("emulated_step_seconds", 9.0)
    return EmulatedCompute(
        EmulationSettings(**settings),
        model,
        communicator,
        seed=seed,
        passes_per_step=passes,
        communication_seconds=communication_seconds,
    )


def three_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 1))


def test_gradients_come_layer_by_layer_from_the_last_and_each_after_its_share():
    """What an algorithm's hook sees, with 1 s a layer forward and 2 s a layer backward."""
    model, communicator = three_layers(), rank_of(1)
    clock = communicator.clock
    emulated = emulate(model, communicator)
    seen = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: seen.append((name, clock.now() - 100))
        )
    with emulated.spending(0):
        loss = model(torch.ones(4, 2)).sum()
        assert clock.now() - 100 == pytest.approx(3)
        loss.backward()
    assert clock.now() - 100 == pytest.approx(9)
    times = {name: pytest.approx(seconds) for name, seconds in seen}
    assert times == {
        f"{layer}.{kind}": 3 + 2 * k for k, layer in ((1, 3), (2, 2), (3, 0)) for kind in ("weight", "bias")
    }


def test_real_computation_is_part_of_the_time_and_communication_is_not():
    model, communicator = nn.Sequential(Slow(2, 2), Slow(2, 2)), rank_of(1)
    clock = Slow.clock = communicator.clock
    sent = SimpleNamespace(seconds=0.0)
    emulated = emulate(model, communicator, lambda: sent.seconds)

    def send(_: torch.Tensor) -> None:
        clock.seconds += 0.25
        sent.seconds += 0.25

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(send)
    for step in range(3):
        start = clock.now()
        with emulated.spending(step):
            model(torch.ones(4, 2)).sum().backward()
        assert clock.now() - start == pytest.approx(9 + 4 * 0.25)


def test_computation_that_takes_longer_is_not_stretched():
    model, communicator = nn.Sequential(Slow(2, 2), Slow(2, 2)), rank_of(1)
    clock = Slow.clock = communicator.clock
    with emulate(model, communicator, emulated_step_seconds=0.6).spending(0):
        model(torch.ones(4, 2)).sum().backward()
    assert clock.now() - 100 == pytest.approx(1.0)


def test_layers_without_a_part_and_layers_used_again_change_no_time():
    model, communicator = three_layers(), rank_of(1)
    emulated = emulate(model, communicator)
    with emulated.spending(0):
        model[2](model[2](model[2](torch.ones(4, 3)))).sum().backward()
    assert communicator.clock.now() - 100 == pytest.approx(9)


def test_no_time_passes_outside_training_nor_without_the_setting():
    model, communicator = three_layers(), rank_of(1)
    emulate(model, communicator)
    off = emulate(model, communicator, emulated_step_seconds=0.0)
    model(torch.ones(4, 2)).sum().backward()
    with off.spending(0):
        model(torch.ones(4, 2)).sum().backward()
    assert communicator.clock.now() == 100


def test_jitter_has_the_moments_asked_for_and_follows_seed_rank_and_step():
    def draws(seed: int, rank: int) -> list[float]:
        emulated = emulate(three_layers(), rank_of(2, rank), seed=seed, emulated_jitter=0.3, passes=2)
        return [emulated.pass_seconds(step) for step in range(4000)]

    first = draws(0, 0)
    assert min(first) > 0
    assert statistics.fmean(first) == pytest.approx(4.5, rel=0.02)
    assert statistics.stdev(first) == pytest.approx(0.3 * 4.5, rel=0.1)
    assert first == draws(0, 0)
    assert len({*first, *draws(0, 1), *draws(1, 0)}) == 12000


def test_a_slow_rank_takes_its_factor_and_every_rank_needs_one():
    slow = emulate(three_layers(), rank_of(2, 1), emulated_rank_slowness=(1.0, 2.5))
    assert slow.pass_seconds(0) == pytest.approx(22.5)
    with pytest.raises(ValueError, match="has 2 numbers and there are 3 ranks"):
        emulate(three_layers(), rank_of(3), emulated_rank_slowness=(1.0, 2.5))


def test_a_slow_host_and_stretched_time_multiply_it(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(emulated_host, "HOST_FILE", tmp_path / "host.json")
    emulated_host.HOST_FILE.write_text('{"slowness": 2.0, "time_stretch": 4.0}')
    slow = emulate(three_layers(), rank_of(2, 1), emulated_rank_slowness=(1.0, 2.5), passes=3)
    assert slow.pass_seconds(0) == pytest.approx(9.0 * 2.0 * 4.0 * 2.5 / 3)


@pytest.mark.parametrize("ignored", [{"emulated_jitter": 0.1}, {"emulated_rank_slowness": (1.0, 2.0)}])
def test_settings_that_would_be_ignored_are_refused(ignored):
    with pytest.raises(SettingsError, match="need --emulated-step-seconds"):
        check(Settings(emulation=EmulationSettings(**ignored)))


@pytest.mark.parametrize("algorithm", ["allreduce", "lasgd"])
def test_the_loop_records_it_as_compute(tmp_path: Path, algorithm: str):
    """In virtual time, where nothing else takes any, exactly; with two passes a step."""
    settings = Settings(
        algorithm=algorithm,
        run_dir=str(tmp_path / "run"),
        data=DataSettings(dataset="synthetic", image_size=8, num_synthetic_samples=96, batch_size_per_rank=4),
        optimizer=OptimizerSettings(accumulation_steps=2),
        training=TrainingSettings(epochs=2.0),
        emulation=EmulationSettings(
            emulated_step_seconds=0.3, emulated_jitter=0.2, emulated_rank_slowness=(1.0, 1.0, 2.0)
        ),
    )

    def body(communicator):
        workload = build_workload(settings.data, seed=0, rank=communicator.rank, size=communicator.size)
        cpu = torch.device("cpu")
        model = initial_model(settings, workload, cpu)
        loop = TrainingLoop(
            settings, communicator, workload, model, RunDirectory.create(settings, communicator), cpu
        )
        loop.run()
        return loop

    for rank, loop in enumerate(SimulatedCluster(3).run(body)):
        records = read_records(tmp_path / "run" / f"metrics.rank{rank}.jsonl")
        steps = [record for record in records if record["kind"] == "step"]
        assert len(steps) >= 4
        for index, record in enumerate(steps):
            expected = 2 * loop.emulated_compute.pass_seconds(index)
            assert record["compute_seconds"] == pytest.approx(expected, abs=1e-9)


def test_ddp_sends_each_layer_when_its_time_has_passed_and_before_the_next_layers(tmp_path: Path):
    """So a comparison with it is fair: its buckets (of one layer here) overlap the backward pass as ours do."""
    model, communicator = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))), rank_of(1)
    clock = communicator.clock
    emulated = emulate(model, communicator)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        num_bytes = 4 * model[0].weight.numel()
        parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=num_bytes / 2**20)
        sent = []

        def note(_, bucket):
            sent.append((bucket.buffer().nbytes, clock.now() - start))
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        parallel.register_comm_hook(None, note)
        for step in range(3):  # DDP makes its buckets anew after the first
            start = clock.now()
            sent.clear()
            with emulated.spending(step):
                parallel(torch.ones(4, 8)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert [num for num, _ in sent] == [num_bytes] * 3
    assert [seconds for _, seconds in sent] == pytest.approx([5, 7, 9])
