"""The mailbox over real windows; needs mpi4py and a launcher, neither torch nor Horovod.

    mpirun -np 4 python -m pytest tests/mailbox

Every rank runs every test; what a test asserts, it asserts of its own rank. A failure on any rank ends all of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pushreduce.communication import mpi_settings, startup
from pushreduce.communication.mailbox_check import LimitedWait
from pushreduce.communication.topology import Topology, build_topology

HANGS_AFTER_SECONDS = 60.0
_LAUNCHED = mpi_settings.read_launch(os.environ, on_terminal=os.isatty(0)).num_ranks >= 2


def pytest_configure(config: pytest.Config) -> None:
    if _LAUNCHED:
        startup.rank_without_horovod()  # starts MPI


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not _LAUNCHED:
        for item in items:
            item.add_marker(
                pytest.mark.skip(reason="needs two ranks: mpirun -np 2 python -m pytest tests/mailbox")
            )


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # The other ranks would wait for this one: a failure ends all of them.
    if report.failed and _LAUNCHED:
        startup.abort(f"{report.nodeid} failed\n{report.longreprtext}", 1)


def wait_until(predicate: Callable[[], bool], timeout_seconds: float) -> bool:
    """As a communicator's, but what would hang fails."""
    start, pause = time.monotonic(), 20e-6
    while not predicate():
        waited = time.monotonic() - start
        if waited >= timeout_seconds:
            return False
        assert waited < HANGS_AFTER_SECONDS, "waited in vain"
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True


class Ranks:
    """This rank's place, and how it meets the others."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.world.rank, self.world.size
        self.allgather(None)  # the first one holds the interpreter's lock; no mailbox is open yet

    def allgather(self, value: Any) -> list[Any]:
        return self.world.allgather(value)

    def open(
        self,
        topology: Topology | str = "ring",
        *,
        num_payload_bytes: int = 64,
        num_slot_rounds: int = 2,
        kind: type | None = None,
    ) -> Any:
        """A `PushSumWindow`, or another `kind`, with its `LimitedWait` as `limited`."""
        from pushreduce.communication.push_sum_window import PushSumWindow

        if isinstance(topology, str):
            topology = build_topology(topology, self.size)
        limited = LimitedWait(wait_until)
        mailbox = (kind or PushSumWindow)(
            self.world,
            topology,
            num_payload_bytes=num_payload_bytes,
            num_slot_rounds=num_slot_rounds,
            wait_until=limited,
        )
        mailbox.limited = limited
        return mailbox


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    yield Ranks()
    sys.stdout.flush()
