"""Virtual time without ranks: what happens when, for what is simulated without gradients.

Owns the order of events. Does not own ranks that wait (`communication.virtual_time`, which needs torch).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventQueue:
    """Actions by their virtual time; simultaneous ones in the order in which they were scheduled."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def at(self, time_seconds: float, action: Callable[[], None]) -> None:
        """Schedules `action` for a time that is not over."""
        assert time_seconds >= self._now, f"{time_seconds} s are over: it is {self._now} s"
        self._num_events += 1
        heapq.heappush(self._events, (time_seconds, self._num_events, action))

    def run(self) -> None:
        """Runs all actions, and those that they schedule, until none is left."""
        events = self._events
        while events:
            self._now, _, action = heapq.heappop(events)
            action()
