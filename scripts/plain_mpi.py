"""Plain MPI and the memory of a host, timed: what lies below the communicator that training uses, for a calibration.

Owns the calls that are timed. Does not own sizes, budgets and repetitions (`simulation/measurement.py`). Messages and
sums are mpi4py's upper-case calls, since a mailbox may be open (`push_sum_window.py` says why).
"""

from __future__ import annotations

import mpi4py
import numpy as np
import torch

from pushreduce.communication.agreement import build_on_all
from pushreduce.communication.base import Communicator
from pushreduce.communication.host_memory import HostMemory

mpi4py.rc.initialize = False  # the program has started MPI, with what it needs in the environment
from mpi4py import MPI  # noqa: E402

_NUM_SUMS = 20


class PlainMPI:
    """See `simulation/measurement.py`, `BelowTheCommunicator`. Collective; of all ranks of the run."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self._world = communicator, MPI.COMM_WORLD.Dup()
        host = self._world.Split_type(MPI.COMM_TYPE_SHARED)

        def barrier() -> None:
            communicator.wait_until(host.Ibarrier().Test)

        self._memory = HostMemory(host.rank, host.size, barrier=barrier, allgather=host.allgather)
        self._first_ranks = {}
        size = self._world.size
        for num_ranks in {max(1, size // 2), size}:
            self._first_ranks[num_ranks] = self._world.Split(self._world.rank < num_ranks, self._world.rank)

    def message_seconds(self, first: int, second: int, num_bytes: int) -> float | None:
        rank, now = self._world.rank, self._communicator.clock.now
        seconds = None
        for size in (8, num_bytes):  # the first brings the two together
            buffer = np.zeros(size, np.uint8)
            if rank == first:
                start = now()
                self._world.Send(buffer, second)
                self._world.Recv(buffer, second)
                seconds = (now() - start) / 2
            elif rank == second:
                self._world.Recv(buffer, first)
                self._world.Send(buffer, first)
        return seconds

    def sum_seconds(self, num_ranks: int) -> float | None:
        if self._world.rank >= num_ranks:
            return None
        summed, total = np.zeros(1), np.zeros(1)
        start = self._communicator.clock.now()
        for _ in range(_NUM_SUMS):
            self._first_ranks[num_ranks].Allreduce(summed, total)
        return (self._communicator.clock.now() - start) / _NUM_SUMS if self._world.rank == 0 else None

    def host_sum_seconds(self, num_bytes: int) -> float | None:
        num_elements = self._memory.size * (num_bytes // 4)
        memory = build_on_all(  # one host may have too little
            self._communicator, lambda: self._memory.shared(num_elements, torch.float32)
        )
        rows = memory.view(self._memory.size, -1)
        rows[self._memory.rank] = 1.0
        self._memory.sum_rows(rows)  # every page of the memory has been touched
        start = self._communicator.clock.now()
        self._memory.sum_rows(rows)
        return self._communicator.clock.now() - start if self._memory.rank == 0 else None
