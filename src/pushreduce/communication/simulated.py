"""A cluster inside one process, in virtual time: the second form of `Communicator`, and the tests' adversary.

Owns what a rank may ask for and what it gets. Does not own how collectives match and what they compute
(`simulated_exchange.py`), how long anything is under way (`simulated_transport.py`), the order in which ranks run
(`virtual_time.py`), how long a gradient takes (`clock.sleep`), or mailboxes (`simulated_mailbox.py`).
"""

from __future__ import annotations

import math
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from pushreduce.communication.base import Communicator, DeviceGroup, HostGroup, HostSplit, dtype_of_sum
from pushreduce.communication.simulated_exchange import Exchange, Meeting
from pushreduce.communication.simulated_mailbox import SimulatedMailbox
from pushreduce.communication.simulated_transport import JitteryTransport, Transport
from pushreduce.communication.topology import Topology
from pushreduce.communication.virtual_time import Deadlock, Scheduler

__all__ = ["Aborted", "Deadlock", "SimulatedCluster", "SimulatedCommunicator"]

T = TypeVar("T")

_SPIN_SECONDS = (1e-6, 1e-2)
"""Virtual time that a rank loses when it asks `done()` again with nothing in between: first, and at most."""


class Aborted(Exception):  # noqa: N818
    """A rank called `abort`. Attributes: `rank`, `message`, `exit_code`."""

    def __init__(self, rank: int, message: str, exit_code: int) -> None:
        super().__init__(f"rank {rank} aborted the run with exit code {exit_code}: {message}")
        self.rank, self.message, self.exit_code = rank, message, exit_code


class SimulatedCluster:
    """`num_ranks` ranks in virtual time, deterministic by seed.

    Args:
        num_ranks: size of the cluster.
        seed: decides every random choice: the order of simultaneous events, jitter, and each rank's initial
            torch generator.
        ranks_per_host: ranks are dealt to hosts in blocks of this size (`local_rank`, `local_size`).
        average_seconds: (bytes of the buffer, ranks) -> seconds from the last rank's entry to the end, of
            every collective. Default: 0.1 ms.
        put_seconds: (bytes, ranks) -> seconds until a message of a mailbox has left its sender and is at its
            receiver; after it a counter of 8 bytes takes its own time. Messages do not slow each other down.
            Default: 0.1 ms.
        jitter: a rank sees the end after average_seconds x (1 + jitter x (E + E_rank)), with E (one an
            operation) and E_rank (one an operation and rank) exponential of mean 1; a put takes put_seconds x
            (1 + jitter x E). 0: exact times.
        transport: in place of the last three, makes what decides all times, for a run's scheduler; see
            `simulation.cluster_transport`.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        seed: int = 0,
        ranks_per_host: int = 1,
        average_seconds: Callable[[int, int], float] | None = None,
        put_seconds: Callable[[int, int], float] | None = None,
        jitter: float = 0.0,
        transport: Callable[[Scheduler], Transport] | None = None,
    ) -> None:
        if num_ranks < 1 or ranks_per_host < 1 or jitter < 0:
            raise ValueError(
                f"{num_ranks=} and {ranks_per_host=} must be at least 1, and {jitter=} at least 0"
            )
        self.num_ranks, self.ranks_per_host = num_ranks, ranks_per_host
        if transport is not None and (average_seconds or put_seconds or jitter):
            raise ValueError("a transport decides all times: give no average_seconds, put_seconds or jitter")
        self.seed = seed
        self._new_transport = transport or partial(
            JitteryTransport,
            average_seconds=average_seconds or (lambda num_bytes, size: 1e-4),
            put_seconds=put_seconds or (lambda num_bytes, size: 1e-4),
            jitter=jitter,
        )

    def run(self, body: Callable[[SimulatedCommunicator], T]) -> list[T]:
        """Runs `body(communicator)` on every rank to its end; another call repeats the interleaving.

        Returns:
            What the bodies returned, in rank order.

        Raises:
            Aborted: a rank called `abort`.
            Deadlock: ranks wait for what cannot happen.
            BaseException: whatever a rank raised first, with its rank as a note; the other ranks are ended.
        """
        scheduler = Scheduler(self.num_ranks, self.seed)
        exchange = Exchange(scheduler, self._new_transport(scheduler), range(self.num_ranks))
        communicators = [
            SimulatedCommunicator(exchange, rank, self.ranks_per_host) for rank in range(self.num_ranks)
        ]
        return scheduler.run([partial(body, communicator) for communicator in communicators])


class SimulatedCommunicator(Communicator):
    """One rank's end of a `SimulatedCluster`. Others run only in calls that wait, sleep or ask `done()`."""

    can_wait_in_backward = False  # a switch to another rank would leave autograd's own frames on the stack

    def __init__(self, exchange: Exchange, rank: int, ranks_per_host: int) -> None:
        self.rank, self.size = rank, len(exchange.members)
        self.local_rank = rank % ranks_per_host
        self.local_size = min(ranks_per_host, self.size - (rank - self.local_rank))
        self.clock = _VirtualClock(exchange.scheduler)
        self._exchange = exchange
        self._num_uses: Counter[str] = Counter()
        self._num_collectives = 0
        self._outstanding: dict[str, _Handle] = {}

    def average_async(self, buffer: torch.Tensor, name: str, *, out: torch.Tensor | None = None) -> _Handle:
        """See the contract. The k-th use of a name meets the k-th use of it on every other rank; never
        switches.

        Raises:
            ValueError: the buffer is not of floating point, or ranks disagree on shape or dtype.
            RuntimeError: `name` is outstanding: since its last use `done()` was never true and `wait()` not
                called. Later, at the end of the average: the buffer was changed meanwhile.
        """
        if not buffer.is_floating_point():
            raise ValueError(
                f"rank {self.rank}: average {name!r} of {buffer.dtype}; convert it to a float type"
            )
        if out is not None and (out.shape, out.dtype) != (buffer.shape, buffer.dtype):
            raise ValueError(f"rank {self.rank}: average {name!r}: `out` needs the buffer's shape and dtype")
        if name in self._outstanding:
            raise RuntimeError(f"rank {self.rank}: average {name!r} is still outstanding; wait for it first")
        use = self._num_uses[name]
        self._num_uses[name] += 1
        kind = f"average {name!r} (use {use}) of {tuple(buffer.shape)} {buffer.dtype}"
        sent = buffer.detach().clone()
        wire = dtype_of_sum(buffer.dtype)
        num_bytes, horovod_kind = buffer.numel() * wire.itemsize, f"average of {wire}"
        meeting = self._exchange.meet(
            self.rank, (name, use), kind, sent, num_bytes, horovod_kind=horovod_kind
        )
        handle = self._outstanding[name] = _Handle(self, name, meeting, buffer.detach(), out)
        return handle

    def broadcast(self, buffer: torch.Tensor, name: str, root: int = 0) -> None:
        kind = f"broadcast {name!r} from rank {root} of {tuple(buffer.shape)} {buffer.dtype}"
        sent = buffer.detach().clone() if self.rank == root else None
        values = self._collective(kind, sent, buffer.nbytes, horovod_kind=kind)
        if self.rank != root:
            buffer.detach().copy_(values[root])

    def allgather(self, value: Any) -> list[Any]:
        pickled = pickle.dumps(value)  # so that ranks share no objects
        values = self._collective("allgather", pickled, len(pickled))
        return [pickle.loads(values[rank]) for rank in range(self.size)]

    def barrier(self) -> None:
        self._collective("barrier", None, 0)

    def wait_until(self, predicate: Callable[[], bool], timeout_seconds: float = math.inf) -> bool:
        """See the contract. The predicate is evaluated whenever anything has happened, not as time passes.

        It may ask `done()`; it must neither communicate nor sleep.
        """
        return self._exchange.scheduler.wait_until(predicate, timeout_seconds)

    def open_mailbox(
        self, topology: Topology, *, num_payload_bytes: int, num_slot_rounds: int
    ) -> SimulatedMailbox:
        mailbox = SimulatedMailbox(
            self.rank,
            topology,
            num_payload_bytes=num_payload_bytes,
            num_slot_rounds=num_slot_rounds,
            scheduler=self._exchange.scheduler,
            put=self._exchange.put,
            put_counter=self._exchange.put_counter,
            barrier=self.barrier,
        )
        kind = f"open_mailbox({num_payload_bytes=}, {num_slot_rounds=})"
        mailbox.connect(self._collective(kind, mailbox, 0))
        return mailbox

    def split_by_host(self) -> HostSplit:
        exchange, first, number = self._exchange, self.rank - self.local_rank, self._num_collectives
        places = self._collective("split_by_host", (self.local_rank, self.local_size), 0)
        leaders = [rank for rank in range(self.size) if places[rank][0] == 0]
        in_host = exchange.part((number, first), range(first, first + self.local_size))
        between = exchange.part((number, "leaders"), leaders)
        host = SimulatedCommunicator(in_host, self.local_rank, self.local_size)
        is_leader = self.local_rank == 0
        return HostSplit(
            host=SimulatedHost(host),
            leaders=SimulatedCommunicator(between, leaders.index(self.rank), 1) if is_leader else None,
            host_of_rank=[leaders.index(rank - places[rank][0]) for rank in range(self.size)],
        )

    def abort(self, message: str, exit_code: int = 1) -> NoReturn:
        """Ends the run, which raises `Aborted`; no rank can catch it."""
        print(message, file=sys.stderr)
        self._exchange.scheduler.end_run(Aborted(self.rank, message, exit_code))

    def _collective(
        self, kind: str, value: Any, num_bytes: int, *, horovod_kind: str | None = None
    ) -> dict[int, Any]:
        key = ("collectives in order", self._num_collectives)
        self._num_collectives += 1
        meeting = self._exchange.meet(self.rank, key, kind, value, num_bytes, horovod_kind=horovod_kind)
        self._exchange.wait(self.rank, meeting)
        return meeting.values


class SimulatedHost(HostGroup):
    """The ranks of one simulated host, by a communicator of theirs. Shared memory begins as garbage."""

    def __init__(self, communicator: SimulatedCommunicator) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator = communicator

    def barrier(self, num_bytes: int = 0) -> None:
        if self.size > 1:
            self._communicator._collective("barrier in a host", None, num_bytes)

    def shared(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        garbage = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
        memory = torch.full((num_elements,), garbage, dtype=dtype) if self.rank == 0 else None
        return self._communicator._collective(f"shared({num_elements}, {dtype})", memory, 0)[0]

    def on_devices(self, scratch: torch.Tensor) -> DeviceGroup:
        return SimulatedDevices(self._communicator)


class SimulatedDevices(DeviceGroup):
    """What GPUs would do, in the processor's memory."""

    def __init__(self, communicator: SimulatedCommunicator) -> None:
        self._communicator = communicator

    def sum_in_place(self, tensor: torch.Tensor) -> None:
        all_ranks = self._communicator._collective("sum in a host", tensor.clone(), tensor.nbytes)
        tensor.copy_(torch.stack([all_ranks[rank] for rank in range(self._communicator.size)]).sum(0))

    def broadcast(self, tensor: torch.Tensor) -> None:
        all_ranks = self._communicator._collective("broadcast in a host", tensor.clone(), tensor.nbytes)
        tensor.copy_(all_ranks[0])

    def close(self) -> None:
        """Holds nothing."""


class _VirtualClock:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def now(self) -> float:
        return self._scheduler.now

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"cannot sleep {seconds} seconds; give a number of at least 0")
        self._scheduler.sleep(seconds)


class _Handle:
    """An average under way, as one rank sees it."""

    def __init__(
        self,
        communicator: SimulatedCommunicator,
        name: str,
        meeting: Meeting,
        buffer: torch.Tensor,
        out: torch.Tensor | None,
    ) -> None:
        self._communicator, self._name, self._meeting = communicator, name, meeting
        self._rank, self._exchange = communicator.rank, communicator._exchange
        self._buffer, self._out = buffer, out
        self._last_poll_seconds, self._spin_seconds = -1.0, 0.0
        meeting.on_seen[self._rank] = self._receive

    def done(self) -> bool:
        scheduler = self._exchange.scheduler
        if self._rank not in self._meeting.seen_by and scheduler.running is not None:
            if self._last_poll_seconds == scheduler.now:
                # Asked again with nothing in between: a loop on done() must not stop the time.
                shortest, longest = _SPIN_SECONDS
                self._spin_seconds = min(max(2 * self._spin_seconds, shortest), longest)
            else:
                self._spin_seconds = 0.0
            self._exchange.poll(self._rank, self._spin_seconds)
            self._last_poll_seconds = scheduler.now
        return self._seen()

    def wait(self) -> torch.Tensor:
        self._exchange.wait(self._rank, self._meeting)
        seen = self._seen()
        assert seen
        assert self._out is not None
        return self._out

    def _seen(self) -> bool:
        seen = self._rank in self._meeting.seen_by
        if seen and self._communicator._outstanding.get(self._name) is self:
            del self._communicator._outstanding[self._name]
        return seen

    def _receive(self) -> None:
        if not torch.equal(_bits(self._buffer), _bits(self._meeting.values[self._rank])):
            raise RuntimeError(
                f"rank {self._rank} changed the buffer of average {self._name!r} before it was done"
            )
        if self._out is None:
            self._out = self._meeting.mean().clone()
        else:
            self._out.detach().copy_(self._meeting.mean())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor`, so that NaN equals itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
