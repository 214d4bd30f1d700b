"""A rank of SGP that ends before its time, by whatever means, while messages are under way: nobody is left waiting."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from launch import ROOT, Job, launched

NUM_RANKS = 3
ENDS_WITHIN_SECONDS = 10.0

OWN_LOOP = """
import os, signal, sys
from pathlib import Path
from pushreduce.communication import startup
communicator = startup.connect()
import torch
from pushreduce.algorithms import SGP
from pushreduce.communication.push_sum_window import PushSumWindow
from pushreduce.settings import SGPSettings

FAULT_ROUND = 20
how, rank = sys.argv[1], communicator.rank
is_faulty = rank == communicator.size - 1
Path(f"pid.rank{rank}").write_text(str(os.getpid()))

def fault():
    Path("fault").touch()
    if how.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        sys.exit(3)
    raise KeyError("the user's own mistake")

publish = PushSumWindow._publish
def fail_before_publishing(self, put):
    if put.round_number == FAULT_ROUND:
        fault()
    publish(self, put)
if is_faulty and how.endswith("in-a-put"):
    PushSumWindow._publish = fail_before_publishing

model = torch.nn.Linear(1000, 1)
worker = SGP(model, torch.optim.SGD(model.parameters(), lr=0.1), communicator, SGPSettings(tau=1))
step = 0
while how != "ends-without-close" or step < 2 * FAULT_ROUND:
    if is_faulty and step == FAULT_ROUND and not how.endswith(("in-a-put", "without-close")):
        fault()
    model(torch.ones(2, 1000)).sum().backward()
    worker.step(num_samples=2)
    step += 1
"""


@contextmanager
def started(how: str, cwd: Path) -> Iterator[Job]:
    (cwd / "own_loop.py").write_text(OWN_LOOP)
    command = launched(NUM_RANKS, ["python", "own_loop.py", how])
    job = Job(command, cwd, {"PYTHONPATH": str(ROOT / "src")}, cwd / "log")
    try:
        yield job
    finally:
        job.kill()


def living_ranks(cwd: Path) -> list[psutil.Process]:
    """Of a job that has ended; none is to be left after a moment."""
    found = []
    for rank in range(NUM_RANKS):
        pid = int((cwd / f"pid.rank{rank}").read_text())
        if psutil.pid_exists(pid):
            found.append(psutil.Process(pid))
    return psutil.wait_procs(found, timeout=ENDS_WITHIN_SECONDS)[1]


@pytest.mark.parametrize("how", ["killed", "killed-in-a-put", "raises", "raises-in-a-put", "exits"])
def test_all_end_soon_after_one_has(how, tmp_path):
    with started(how, tmp_path) as job:
        job.wait_until((tmp_path / "fault").exists)
        finished = job.finish(ENDS_WITHIN_SECONDS)
    assert finished.exit_code not in (0, 2), finished.output
    assert living_ranks(tmp_path) == []
    if how == "killed":
        assert finished.exit_code in (signal.SIGKILL, 128 + signal.SIGKILL)
    if how.startswith("raises"):
        assert f"[rank {NUM_RANKS - 1} on" in finished.output
        assert 'KeyError: "the user\'s own mistake"' in finished.output
    if how == "exits":
        assert "since another rank ended" in finished.output


def test_a_script_may_end_without_finish_and_close(tmp_path):
    with started("ends-without-close", tmp_path) as job:
        finished = job.finish()
    assert finished.exit_code == 0, finished.output
    assert "Traceback" not in finished.output
    assert living_ranks(tmp_path) == []
