"""The contract between an algorithm and the cluster it runs on.

Two classes fulfil it: `horovod_mpi.HorovodMPI` (real and emulated clusters) and `simulated.SimulatedCommunicator`
(virtual time). An algorithm is given one and names neither Horovod, nor MPI, nor a clock of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from pushreduce.communication.mailbox import Mailbox
from pushreduce.communication.topology import Topology


class Clock(Protocol):
    """Time as the cluster sees it, in seconds. Every recorded second comes from here."""

    def now(self) -> float:
        """Seconds since an arbitrary start; monotonic."""

    def sleep(self, seconds: float) -> None:
        """Spends time without occupying the processor (emulated and simulated compute)."""


class Handle(Protocol):
    """An average under way. One name has at most one outstanding handle on a rank."""

    def done(self) -> bool:
        """Whether `wait` would return at once. Lets the others proceed in virtual time; never spin on it."""

    def wait(self) -> torch.Tensor:
        """The mean over all ranks, shape and dtype of the buffer. May be called again, at no cost."""


class DeviceGroup(ABC):
    """The ranks of one host, each with a device of its own. Collectives are matched by order.

    They are in order with what a device computes on its current stream, and need not have ended on return. Only a
    barrier of the host notices a rank that is gone, so there is one before each, `sum_in_place`'s its own.
    """

    @abstractmethod
    def sum_in_place(self, tensor: torch.Tensor) -> None:
        """Leaves the sum of all ranks' `tensor`, of one shape and dtype, in each."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites `tensor` with that of the host's rank 0; to be called right after a barrier of the host."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what it holds of the devices. Collective, idempotent."""


class HostGroup(ABC):
    """The ranks of one host, which share memory. Collectives are matched by order.

    Averages under way, of any size, do not hold them up: in Horovod's queue they would wait behind the slow network.
    """

    rank: int
    """Among the ranks of this host."""
    size: int

    @abstractmethod
    def barrier(self, num_bytes: int = 0) -> None:
        """Returns when every rank of the host has entered; what they wrote to shared memory before is there.

        Args:
            num_bytes: summed up or copied by each rank since the last; only virtual time depends on it.
        """

    @abstractmethod
    def shared(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor [num_elements] in memory that all ranks of the host see, not initialised. Collective.

        The memory lasts as long as any rank's tensor does.

        Raises:
            ValueError: on all ranks of the host alike, where there is not as much shared memory.
        """

    @abstractmethod
    def on_devices(self, scratch: torch.Tensor) -> DeviceGroup:
        """The ranks' devices, of which `scratch` is on this rank's. Collective.

        Args:
            scratch: as large as what will be summed; overwritten.

        Raises:
            ValueError: on all ranks of the host alike: nothing averages between such devices.
        """

    def sum_rows(self, rows: torch.Tensor) -> None:
        """Leaves the sum of all `rows` [size, elements], shared, in the first, added in the order of ranks; blocks.

        Rank i has written row i before, and every rank adds up a part of the columns.
        """
        self.barrier()
        num_elements = rows.shape[1]
        start, stop = (num_elements * rank // self.size for rank in (self.rank, self.rank + 1))
        total = rows[0, start:stop]
        for row in rows[1:, start:stop]:
            total.add_(row)
        self.barrier(rows[0].nbytes)


def dtype_of_sum(dtype: torch.dtype) -> torch.dtype:
    """What an average of `dtype` is sent and summed in: Horovod 0.28 has no bfloat16, and sums float16 in float16."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@dataclass(frozen=True)
class HostSplit:
    """A rank's place where the hosts, not the ranks, are the workers."""

    host: HostGroup
    leaders: Communicator | None
    """Of the first rank of every host, ranked by host; None on the others."""
    host_of_rank: list[int]
    """Hosts are counted in the order of their first ranks."""


class Communicator(ABC):
    """What a rank can do with the others. Collectives are matched by name (averages) or by order (all else).

    The ordering rule: `broadcast`, `allgather` and `barrier` must be called by all ranks in the same order;
    `average_async` may be posted in any order, since the ranks match averages by name.
    """

    rank: int
    size: int
    local_rank: int
    """Rank among the processes of this host."""
    local_size: int
    clock: Clock
    can_wait_in_backward: bool = True
    """Whether a rank may wait or sleep inside a hook that `backward()` runs."""

    @abstractmethod
    def average_async(self, buffer: torch.Tensor, name: str, *, out: torch.Tensor | None = None) -> Handle:
        """Starts the mean of `buffer` over all ranks and returns at once.

        `buffer` must stay unchanged until the handle is done. `out` (same shape, dtype, device) receives the mean;
        `out=buffer` averages in place; None: a new tensor.
        """

    def average(self, buffer: torch.Tensor, name: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The mean of `buffer` over all ranks; blocks."""
        return self.average_async(buffer, name, out=out).wait()

    @abstractmethod
    def broadcast(self, buffer: torch.Tensor, name: str, root: int = 0) -> None:
        """Overwrites `buffer` on every rank with that of `root`; blocks."""

    @abstractmethod
    def allgather(self, value: Any) -> list[Any]:
        """Every rank's `value` (any picklable object; small) in rank order; blocks."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has entered."""

    @abstractmethod
    def wait_until(self, predicate: Callable[[], bool], timeout_seconds: float = math.inf) -> bool:
        """Blocks until `predicate()` is true or the time is over; signals and aborts can enter.

        Returns whether the predicate is true.
        """

    @abstractmethod
    def open_mailbox(self, topology: Topology, *, num_payload_bytes: int, num_slot_rounds: int) -> Mailbox:
        """A mailbox over all ranks; collective. It is freed at the end of the process, or by its `free()`.

        Raises:
            ValueError: on all ranks alike, where windows cannot be made or do not keep what is put into them; with
                the MPI, the transport and the remedy.
        """

    @abstractmethod
    def split_by_host(self) -> HostSplit:
        """The ranks that share memory, and a communicator of their leaders; collective.

        Raises:
            ValueError: on all ranks alike: start-up was not told of it (`startup.connect(worker="host")`).
        """

    @abstractmethod
    def abort(self, message: str, exit_code: int = 1) -> NoReturn:
        """Prints `message` and ends every rank of the job; does not return."""
