"""One worker, from the command line to model.pt, is a plain PyTorch loop, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from launch import run
from run_files import losses, model
from torch.nn import functional

from pushreduce import settings_file
from pushreduce.workloads import build_workload

ARGUMENTS = (
    "--epochs 2 --evaluate-every-epochs 1 --warmup-epochs 0.5 --schedule {schedule} --seed 3 "
    "--batch-size-per-rank 48 --base-lr 0.06 --reference-batch-size 32 --momentum 0.8 --weight-decay 0.001 "
    "--run-dir run"
)


def learning_rate(schedule: str, samples: int, num_samples: int) -> float:
    """Warm-up from 0.06 to 0.06 x 48 / 32 in half an epoch, then as `schedule` says to the end at two epochs."""
    peak, epoch = 0.06 * 48 / 32, samples / num_samples
    if epoch < 0.5:
        return 0.06 + (peak - 0.06) * epoch / 0.5
    if schedule == "step":
        return peak * 0.1 ** sum(epoch >= milestone for milestone in (1, 1.5))
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (epoch - 0.5) / 1.5)))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the program has it: more threads sum in another order."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


@pytest.mark.parametrize(("algorithm", "schedule"), [("lasgd", "cosine"), ("allreduce", "step")])
def test_one_worker_is_a_plain_loop(algorithm, schedule, tmp_path):
    arguments = ARGUMENTS.format(schedule=schedule).split()
    if schedule == "step":
        arguments += ["--decay-epochs", "1", "1.5"]
    finished = run(1, [*arguments, "--algorithm", algorithm], cwd=tmp_path)
    assert finished.exit_code == 0, finished.output

    settings = settings_file.load(tmp_path / "run" / "settings.yaml")
    workload = build_workload(settings.data, seed=3, rank=0, size=1)
    torch.manual_seed(3)
    plain = workload.build_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.06, momentum=0.8, nesterov=True, weight_decay=0.001)
    batches, samples, expected = workload.train_batches(), 0, []
    while samples < 2 * 1433:
        optimizer.param_groups[0]["lr"] = learning_rate(schedule, samples, 1433)
        batch = next(batches)
        optimizer.zero_grad()
        loss = functional.cross_entropy(plain(batch.inputs), batch.targets)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
        samples += len(batch.targets)
    assert list(losses(tmp_path / "run").values()) == expected
    assert expected[-1] < expected[0]
    weights = model(tmp_path / "run")
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())
