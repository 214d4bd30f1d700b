"""Ranks that average inside their host as ranks with a GPU each do, in real programs; gloo stands for NCCL."""

from __future__ import annotations

import pytest
from launch import ROOT, launched, run_command

PROGRAM = """
import torch, torch.distributed
from pushreduce.algorithms import LASGD, HostWorker, host_worker
from pushreduce.algorithms.host_exchange import DeviceExchange
from pushreduce.communication import host_devices
from pushreduce.communication.startup import connect, shut_down

host_worker.exchange_for = lambda parameters: DeviceExchange
communicator = connect(worker="host")
is_last = communicator.rank == communicator.size - 1


def problem(place):
    if is_last and place == PLACE:
        raise KIND("first line\\nthe last line")


def allocate(*arguments, make=DeviceExchange.__init__):
    problem("allocate")
    make(*arguments)


class Forgetful:
    def __init__(self, group):
        self.group = group

    def allreduce(self, tensor, **options):
        return self.group.allreduce(tensor.clone(), **options)


def new_group(*arguments, make=host_devices._new_group):
    problem("connect")
    group = make(*arguments)
    return Forgetful(group) if is_last and PLACE == "sum" else group


DeviceExchange.__init__, host_devices._new_group = allocate, new_group
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
worker = HostWorker(model, optimizer, communicator, lambda leaders: LASGD(model, optimizer, leaders))
for step in range(5):
    if step == 3:
        problem("step")
    model(torch.ones(2, 4)).sum().backward()
    worker.step(num_samples=2)
    optimizer.zero_grad()
worker.finish()
assert not torch.distributed.is_initialized(), "the user's own group"
devices = worker._exchange._devices
shut_down()
assert devices._group is None
if communicator.rank == 0:
    print("weight", model.weight[0, 0].item())
"""


@pytest.mark.parametrize(
    ("place", "kind", "exit_code", "expected"),
    [
        ("nowhere", "RuntimeError", 0, "weight "),
        ("allocate", "MemoryError", 1, "AgreedError: there is not enough memory"),
        ("connect", "RuntimeError", 2, "cannot average (first line the last line): NCCL_DEBUG"),
        ("sum", "RuntimeError", 2, "cannot average (3 ones make 1.0 to 1.0)"),
        ("step", "KeyError", 1, "the last line"),
    ],
)
def test_programs_end_with_what_was_wrong(place, kind, exit_code, expected, tmp_path):
    """On one rank of three, while the others wait for it."""
    program = tmp_path / "own_loop.py"
    program.write_text(PROGRAM.replace("PLACE", repr(place)).replace("KIND", kind))
    command = launched(3, ["python", str(program)])
    finished = run_command(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "src")}, timeout_seconds=60)
    assert finished.exit_code == exit_code, finished.output
    assert expected in finished.output
    assert ("Traceback" in finished.output) == (exit_code == 1), finished.output
