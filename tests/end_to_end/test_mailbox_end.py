"""However a program with an open mailbox ends, all its ranks end."""

from __future__ import annotations

import pytest
from launch import launched, run_command

pytest.importorskip("horovod.torch")

PROGRAM = """
import sys
from pushreduce.communication import startup
from pushreduce.communication.topology import build_topology
communicator = startup.connect()
topology = build_topology("ring", communicator.size)
mailbox = communicator.open_mailbox(topology, num_payload_bytes=100_000, num_slot_rounds=2)
mailbox.outgoing()[:] = 1
mailbox.send(0, [(communicator.rank + 1) % communicator.size], 1.0)
last = communicator.rank == communicator.size - 1
"""


def run(tmp_path, ending):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + ending)
    return run_command(launched(3, ["python", str(program)]), cwd=tmp_path, timeout_seconds=60)


@pytest.mark.parametrize("ending", ["", "startup.shut_down()", "mailbox.free()", "sys.exit(0)"])
def test_an_orderly_end(tmp_path, ending):
    finished = run(tmp_path, ending)
    assert finished.exit_code == 0, finished.output


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("if last: raise ZeroDivisionError", "ZeroDivisionError"),
        ("if last: mailbox._set_counter = lambda *_: 1 / 0; mailbox._grant(0, 0, 0)", "ZeroDivisionError"),
        ("if last: import os; os.kill(os.getpid(), 9)", ""),
        ("if last: sys.exit(3)", "another rank has ended"),
    ],
    ids=["exception", "exception in the helper thread", "killed", "exits"],
)
def test_the_end_of_one_rank_is_the_end_of_all(tmp_path, ending, said):
    waiting = "mailbox.wait(lambda: False, -1, print)"
    finished = run(tmp_path, f"{ending}\n{waiting}\n")
    assert finished.exit_code != 0
    assert said in finished.output
