"""The real Communicator: averages and broadcasts by Horovod, small objects by mpi4py.

Owns the outstanding Horovod operations, all of them named. Does not start or stop either library (`startup.py`).
Horovod's own `synchronize` sleeps inside C++, where Python's signal handlers cannot run: every wait here polls instead.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable
from typing import Any, NoReturn, cast

import horovod.torch as hvd
import mpi4py
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import _allreduce_async

from pushreduce.communication import host_leaders, startup
from pushreduce.communication.base import Clock, Communicator, Handle, HostSplit, dtype_of_sum
from pushreduce.communication.emulated_host import this_host
from pushreduce.communication.environment import transport_settings
from pushreduce.communication.host_memory import HostMemory
from pushreduce.communication.mailbox import Mailbox, MailboxError
from pushreduce.communication.mailbox_check import LIMIT_SECONDS, LimitedWait, find_problem, num_end_bytes
from pushreduce.communication.mpi_settings import SEGMENT_BYTES
from pushreduce.communication.push_sum_window import PushSumWindow
from pushreduce.communication.topology import Topology

mpi4py.rc.initialize = False  # `startup.py` starts MPI, with what it needs in the environment
from mpi4py import MPI  # noqa: E402

_SHORTEST_PAUSE_SECONDS = 20e-6
_LONGEST_PAUSE_SECONDS = 1e-3  # Horovod's own cycle: looking more often finds nothing new
_SECONDS_UNTIL_RANKS_ARE_LOOKED_FOR = 1.0  # of a wait; most are shorter, and cost nothing more


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class HorovodMPI(Communicator):
    """Communicator over Horovod and MPI, to be made once per process after `startup.start()`.

    Args:
        leaders: None: of all ranks. Else the communicator of the first ranks of all hosts, for `split_by_host`.
    """

    def __init__(self, leaders: MPI.Intracomm | None = None) -> None:
        if leaders is None:
            self._ranks, self._process_set = MPI.COMM_WORLD.Dup(), hvd.global_process_set
            self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        else:
            self._ranks, self._process_set = leaders, host_leaders.process_set or hvd.global_process_set
            self.local_rank, self.local_size = 0, 1
        self.rank, self.size = self._ranks.rank, self._ranks.size
        self.clock: Clock = WallClock()
        self._outstanding: set[str] = set()

    def average_async(self, buffer: torch.Tensor, name: str, *, out: torch.Tensor | None = None) -> Handle:
        if self.size == 1:  # Horovod would wait for its next cycle, a millisecond, to copy it
            return MeanOfOne(buffer.clone() if out is None else out.copy_(buffer))
        result = torch.empty_like(buffer) if out is None else out
        source, work = buffer, result
        if (wire := dtype_of_sum(buffer.dtype)) != buffer.dtype:
            source = work = buffer.to(wire)
        elif buffer.stride() != work.stride():
            source = work.copy_(buffer)
        self._claim(name)
        # In segments, since MPI takes as much memory again as half of a message, or all of it.
        num_elements = SEGMENT_BYTES // work.element_size()
        segments = zip(_linear(source).split(num_elements), _linear(work).split(num_elements), strict=True)
        # With input and output apart, which Horovod has no public call for, its own thread does the copying.
        handles = [
            _allreduce_async(*segment, f"{name}.{index}", hvd.Average, 1.0, 1.0, self._process_set)
            for index, segment in enumerate(segments)
        ]
        return HorovodHandle(self, name, handles, work, result)

    def broadcast(self, buffer: torch.Tensor, name: str, root: int = 0) -> None:
        if buffer.numel() == 0 or self.size == 1:
            return
        self._claim(name)
        as_bytes = _linear(buffer).view(torch.uint8)  # any dtype, bit for bit
        root_of_all = self._process_set.ranks[root]
        handle = hvd.broadcast_async_(as_bytes, root_of_all, name=name, process_set=self._process_set)
        HorovodHandle(self, name, [handle], buffer, buffer).wait()

    def allgather(self, value: Any) -> list[Any]:
        return _allgather(self._ranks, value)

    def barrier(self) -> None:
        _complete(self._ranks.Ibarrier())

    def wait_until(self, predicate: Callable[[], bool], timeout_seconds: float = math.inf) -> bool:
        return _wait_until(predicate, timeout_seconds)

    def open_mailbox(self, topology: Topology, *, num_payload_bytes: int, num_slot_rounds: int) -> Mailbox:
        wait = LimitedWait(self.wait_until)
        try:
            mailbox = PushSumWindow(
                self._ranks,
                topology,
                num_payload_bytes=num_payload_bytes,
                num_slot_rounds=num_slot_rounds,
                wait_until=wait,
            )
        except ValueError as error:
            raise ValueError(self._refusal(str(error))) from error
        startup.before_shut_down(mailbox.free)
        wait.limit_seconds = LIMIT_SECONDS * this_host().time_stretch
        mailbox.send_ends_only(num_end_bytes(mailbox))
        if problem := find_problem(mailbox, self.allgather):
            try:
                mailbox.free()
            except MailboxError:  # a call of MPI that never returns: no rank can end in order
                self.abort(f"error: {self._refusal(problem)}", startup.BAD_INPUT)
            raise ValueError(self._refusal(problem))
        mailbox.restart()
        wait.limit_seconds = math.inf
        return mailbox

    def _refusal(self, problem: str) -> str:
        library = startup.mpi_library()
        where = "on one host" if self.local_size == self.size else "between hosts"
        other = "openmpi" if library.startswith("MPICH") else "mpich"
        variables = ", ".join(transport_settings()) or "default transport"
        return (
            f"one-sided MPI fails {where}: {problem}; MPI: {library}; {variables}; use MPICH from 4 or Open MPI from 5 "
            f"on, such as scripts/setup.sh --mpi {other}"
        )

    def split_by_host(self) -> HostSplit:
        in_host = cast(MPI.Intracomm, self._ranks.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank))
        colour = 0 if in_host.rank == 0 else MPI.UNDEFINED
        between = cast(MPI.Intracomm, self._ranks.Split(colour, key=self.rank))
        leader_of_rank = self.allgather(_allgather(in_host, self.rank)[0])
        leaders = sorted(set(leader_of_rank))
        if 1 < len(leaders) < self.size and host_leaders.process_set is None:
            raise ValueError('hosts are to be workers: tell the start-up, connect(worker="host")')
        # On every rank, also where no mailbox is to be freed: else leaders at their end would wait for the others.
        startup.before_shut_down(in_host.Free)
        return HostSplit(
            host=HostMemory(
                in_host.rank,
                in_host.size,
                barrier=lambda: _complete(in_host.Ibarrier()),
                allgather=lambda value: _allgather(in_host, value),
            ),
            leaders=HorovodMPI(between) if in_host.rank == 0 else None,
            host_of_rank=[leaders.index(leader) for leader in leader_of_rank],
        )

    def abort(self, message: str, exit_code: int = 1) -> NoReturn:
        startup.abort(message, exit_code)

    def _claim(self, name: str) -> None:
        if name in self._outstanding:
            raise RuntimeError(f"'{name}' is already under way: wait for it before you post it again")
        self._outstanding.add(name)


class HorovodHandle:
    """A Horovod operation under way on `work`; `result` is what the caller gets."""

    def __init__(
        self,
        communicator: HorovodMPI,
        name: str,
        handles: list[int],
        work: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        self._communicator, self._name, self._handles = communicator, name, handles
        self._work, self._result = work, result
        self._complete = False

    def done(self) -> bool:
        return self._complete or all(map(hvd.poll, self._handles))

    def wait(self) -> torch.Tensor:
        if not self._complete:
            self._communicator.wait_until(self.done)
            try:
                for handle in self._handles:
                    hvd.synchronize(handle)
            except HorovodInternalError as error:
                raise RuntimeError(
                    f"'{self._name}' failed on rank {self._communicator.rank}, since another rank ended or failed: "
                    f"look for the first error among the other ranks' output ({error})"
                ) from error
            self._complete = True
            self._communicator._outstanding.discard(self._name)
            if self._result is not self._work:
                self._result.copy_(self._work)
        return self._result


class MeanOfOne:
    """The handle where one rank is all: complete from the beginning."""

    def __init__(self, mean: torch.Tensor) -> None:
        self._mean = mean

    def done(self) -> bool:
        return True

    def wait(self) -> torch.Tensor:
        return self._mean


def _wait_until(predicate: Callable[[], bool], timeout_seconds: float = math.inf) -> bool:
    start = time.perf_counter()
    deadline, next_look_for_ranks = start + timeout_seconds, start + _SECONDS_UNTIL_RANKS_ARE_LOOKED_FOR
    has_lost_a_rank = False
    pause = _SHORTEST_PAUSE_SECONDS
    while not predicate():
        now = time.perf_counter()
        if now >= deadline:
            return False
        if now >= next_look_for_ranks:
            if has_lost_a_rank:  # and what it sent before has had its time to arrive
                raise RuntimeError(
                    "another rank has ended, and is waited for: look for the first error among the other ranks' output"
                )
            has_lost_a_rank = startup.has_lost_a_rank()
            next_look_for_ranks = now + startup.seconds_to_come()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True


def _complete(request: MPI.Request) -> None:
    _wait_until(request.Test)


def _allgather(ranks: MPI.Intracomm, value: Any) -> list[Any]:
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    counts = np.empty(ranks.size, np.int64)
    _complete(ranks.Iallgather(np.array([data.size], np.int64), counts))
    gathered = np.empty(counts.sum(), np.uint8)
    _complete(ranks.Iallgatherv(data, [gathered, counts]))
    return [pickle.loads(part.tobytes()) for part in np.split(gathered, np.cumsum(counts)[:-1])]


def _linear(tensor: torch.Tensor) -> torch.Tensor:
    """All elements as one dimension in memory order, without a copy (Horovod wants contiguous tensors)."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    # Dense in another order, such as channels_last: strides are equal on all ranks, so memory order is as good.
    assert torch.ops.aten.is_non_overlapping_and_dense(tensor), "cannot send a tensor with holes"
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
