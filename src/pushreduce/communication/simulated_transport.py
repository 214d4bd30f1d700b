"""How long what ranks send each other is under way in a simulated run: the contract, and the tests' adversary.

Owns times only. Does not own what is sent (`simulated.py`, `simulated_mailbox.py`) or a model of a cluster
(`simulation.cluster_transport`, the other class that fulfils the contract).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from pushreduce.communication.virtual_time import Scheduler

_COUNTER_BYTES = 8


class Transport(Protocol):
    """What is sent in one run. No call waits; what is given to it is called later, in the scheduler's own greenlet."""

    def collective(
        self,
        members: Sequence[int],
        num_bytes: int,
        *,
        horovod_kind: str | None,
        show_end: Callable[[int], None],
    ) -> None:
        """A collective operation that its last rank has just entered.

        Args:
            members: the ranks that take part.
            num_bytes: of each rank's buffer.
            horovod_kind: what it is to Horovod, which does one operation at a time, but sends averages of one kind that
                are ready together as one. None: a barrier or an exchange of small objects, which go past it.
            show_end: to be called once with each index into `members`, when that rank can see the end.
        """

    def put(self, source: int, target: int, num_bytes: int, on_arrival: Callable[[], None]) -> None:
        """A mailbox's message from rank to rank, which `source` has just handed over."""

    def put_counter(self, source: int, target: int, on_arrival: Callable[[], None]) -> None:
        """A mailbox's counter of 8 bytes, likewise."""


class JitteryTransport:
    """Given times with random delays, nothing slowed down by anything else; see `SimulatedCluster`."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        average_seconds: Callable[[int, int], float],
        put_seconds: Callable[[int, int], float],
        jitter: float,
    ) -> None:
        self._scheduler, self._jitter = scheduler, jitter
        self._average_seconds, self._put_seconds = average_seconds, put_seconds

    def collective(
        self,
        members: Sequence[int],
        num_bytes: int,
        *,
        horovod_kind: str | None,
        show_end: Callable[[int], None],
    ) -> None:
        scheduler, size = self._scheduler, len(members)
        seconds, shared = self._average_seconds(num_bytes, size), scheduler.random.expovariate(1.0)
        for each in range(size):
            delays = shared + scheduler.random.expovariate(1.0)
            end_seconds = scheduler.now + seconds * (1.0 + self._jitter * delays)
            scheduler.at(end_seconds, partial(show_end, each))

    def put(self, source: int, target: int, num_bytes: int, on_arrival: Callable[[], None]) -> None:
        scheduler = self._scheduler
        seconds = self._put_seconds(num_bytes, scheduler.num_ranks)
        seconds *= 1.0 + self._jitter * scheduler.random.expovariate(1.0)
        scheduler.at(scheduler.now + seconds, on_arrival)

    def put_counter(self, source: int, target: int, on_arrival: Callable[[], None]) -> None:
        self.put(source, target, _COUNTER_BYTES, on_arrival)
