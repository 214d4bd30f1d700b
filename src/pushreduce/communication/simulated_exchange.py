"""Where the ranks of a simulated cluster meet.

Owns how collectives match, what averages compute, and who has seen their end. Does not own what a rank may ask for
(`simulated.py`), how long anything is under way (`simulated_transport.py`) or the order in which ranks run
(`virtual_time.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch

from pushreduce.communication.base import dtype_of_sum
from pushreduce.communication.simulated_transport import Transport
from pushreduce.communication.virtual_time import Deadlock, Scheduler

_MAX_IDLE_POLLS = 200_000
"""False answers of `done()` in a row, with nothing under way, after which the run counts as hung."""


class Meeting:
    """One collective operation: who has entered with what, and who has seen its end."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size
        self.values: dict[int, Any] = {}
        self.seen_by: set[int] = set()
        self.waiting: set[int] = set()
        self.on_seen: dict[int, Callable[[], None]] = {}
        self._mean: torch.Tensor | None = None

    def mean(self) -> torch.Tensor:
        """Of the tensors of all ranks, summed in rank order."""
        if self._mean is None:
            dtype = self.values[0].dtype
            total = self.values[0].to(dtype_of_sum(dtype), copy=True)
            for rank in range(1, self.size):
                total += self.values[rank]
            self._mean = total.div_(self.size).to(dtype)
        return self._mean

    def describe(self) -> str:
        missing = [rank for rank in range(self.size) if rank not in self.values]
        return f"{self.kind}: " + (f"not entered by ranks {missing}" if missing else "under way")


class Exchange:
    """Where the ranks of a run meet: `members`, which are ranked here in this order."""

    def __init__(self, scheduler: Scheduler, transport: Transport, members: Sequence[int]) -> None:
        self.scheduler, self.members = scheduler, members
        self._transport = transport
        self._meetings: dict[tuple[str, int], Meeting] = {}
        self._parts: dict[Hashable, Exchange] = {}
        self._num_ends_to_come = 0
        self._num_idle_polls = 0

    def part(self, key: Hashable, ranks: Sequence[int]) -> Exchange:
        """Where some of the ranks meet; the same for all that ask with one `key`."""
        members = [self.members[rank] for rank in ranks]
        return self._parts.setdefault(key, Exchange(self.scheduler, self._transport, members))

    def meet(
        self,
        rank: int,
        key: tuple[str, int],
        kind: str,
        value: Any,
        num_bytes: int,
        *,
        horovod_kind: str | None,
    ) -> Meeting:
        """Enters `rank` with `value`; the last to enter starts the operation. Never switches."""
        size = len(self.members)
        self.scheduler.running_rank()
        self._num_idle_polls = 0
        meeting = self._meetings.setdefault(key, Meeting(kind, size))
        if meeting.kind != kind:
            other = min(meeting.values)
            raise ValueError(
                f"rank {rank} calls {kind}, but rank {other} calls {meeting.kind}: they must agree"
            )
        meeting.values[rank] = value
        if len(meeting.values) == size:
            del self._meetings[key]
            self._num_ends_to_come += size
            show_end = partial(self._show_end, meeting)
            self._transport.collective(self.members, num_bytes, horovod_kind=horovod_kind, show_end=show_end)
        return meeting

    def put(self, source: int, target: int, num_bytes: int, on_arrival: Callable[[], None]) -> None:
        """See `Transport`; between members."""
        self._transport.put(self.members[source], self.members[target], num_bytes, on_arrival)

    def put_counter(self, source: int, target: int, on_arrival: Callable[[], None]) -> None:
        """See `Transport`; between members."""
        self._transport.put_counter(self.members[source], self.members[target], on_arrival)

    def wait(self, rank: int, meeting: Meeting) -> None:
        if rank not in meeting.seen_by:
            meeting.waiting.add(rank)
            self.scheduler.wait(meeting.describe)

    def poll(self, rank: int, seconds: float) -> None:
        """Lets the others proceed before the answer of a `done()`."""
        self._num_idle_polls += 1
        if self._num_idle_polls > _MAX_IDLE_POLLS and self._num_ends_to_come == 0:
            others = self.scheduler.describe_waiting() or "all others have ended or poll, too"
            raise Deadlock(f"rank {rank} polls done() of an average that cannot end; {others}")
        self.scheduler.sleep(seconds)

    def _show_end(self, meeting: Meeting, rank: int) -> None:
        self._num_ends_to_come -= 1
        self._num_idle_polls = 0
        meeting.seen_by.add(rank)
        if (receive := meeting.on_seen.pop(rank, None)) is not None:
            receive()
        if rank in meeting.waiting:
            self.scheduler.wake(self.members[rank])
