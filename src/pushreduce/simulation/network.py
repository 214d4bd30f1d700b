"""The simulated cluster's network: transfers as flows that share the hosts' links fairly, in virtual time.

Owns when the last byte of a transfer arrives. Does not own the clock (`now` and `at` are given), who sends what, or
what a message costs beside its bytes on the wire (`cluster_model.py`).

The model is the fluid one of flow-level simulators (SimGrid's CM02): each transfer flows at a constant rate until
another begins or ends, and the rates are max-min fair: no flow can be given more without taking from one that has no
more than it. Packets, slow starts and losses are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

_TOLERANCE = 1e-9
"""Relative difference below which two rates count as equal."""
_OPEN = -1.0
"""In place of a rate that is yet to be found."""


class Network:
    """Hosts on a non-blocking switch, each with one full-duplex link; concurrent transfers share links max-min fairly.

    A transfer arrives `latency_seconds` after its last byte has left: a lone one after latency + bytes / rate.

    Args:
        num_hosts: hosts are numbered from 0.
        bits_per_second: of every host's link in each direction, or one number a host.
        latency_seconds: from any host to any other, one way.
        now: the virtual time in seconds.
        at: schedules an action for a virtual time, such as `EventQueue.at` and `Scheduler.at`.

    Raises:
        ValueError: no host, a rate that is not positive, a latency that is negative, or not one rate a host.
    """

    def __init__(
        self,
        num_hosts: int,
        *,
        bits_per_second: float | Sequence[float],
        latency_seconds: float,
        now: Callable[[], float],
        at: Callable[[float, Callable[[], None]], None],
    ) -> None:
        rates = (
            [bits_per_second] * num_hosts if isinstance(bits_per_second, (int, float)) else bits_per_second
        )
        if num_hosts < 1 or len(rates) != num_hosts:
            raise ValueError(
                f"{num_hosts} hosts with {len(rates)} link rates: give one host or more, and a rate each"
            )
        if not all(0 < rate < math.inf for rate in rates) or not 0 <= latency_seconds < math.inf:
            raise ValueError(
                f"{bits_per_second=} must be positive and {latency_seconds=} at least 0, and both finite"
            )
        self.num_hosts, self.latency_seconds = num_hosts, latency_seconds
        self._now, self._at = now, at
        self._up = [_Link(rate) for rate in rates]
        self._down = [_Link(rate) for rate in rates]

    def transfer(self, source: int, target: int, num_bytes: float, on_arrival: Callable[[], None]) -> None:
        """Starts to send `num_bytes` between two hosts, now; calls `on_arrival` when all of them have arrived.

        Inside a host (`source == target`) it takes no link and no time. `on_arrival` is never called from here.
        """
        assert 0 <= num_bytes < math.inf, f"cannot send {num_bytes} bytes"
        now = self._now()
        if source == target:
            self._at(now, on_arrival)
            return
        if num_bytes == 0:
            self._at(now + self.latency_seconds, on_arrival)
            return
        up, down = self._up[source], self._down[target]
        flow = _Flow(up, down, 8.0 * num_bytes, now, on_arrival)
        touched = self._release_ended([up, down], now) if up.flows or down.flows else ()
        alone = not up.flows and not down.flows
        up.flows[flow] = down.flows[flow] = None
        if alone:
            # Nobody waits for its end, so one event at its arrival is enough.
            flow.set_rate(min(up.bits_per_second, down.bits_per_second), now)
            flow.event_seconds = flow.end_seconds + self.latency_seconds
            self._at(flow.event_seconds, partial(self._meet, flow))
            touched = [link for link in touched if link.flows and link is not up and link is not down]
        if touched:
            self._share(touched, now)

    def _meet(self, flow: _Flow) -> None:
        """What was scheduled for a flow: its end, its arrival, or what would have been its end at a former rate."""
        now = self._now()
        if flow.event_seconds != now:
            return  # an earlier one has replaced it
        if flow.end_seconds > now:
            self._schedule_end(flow)
            return
        flow.event_seconds = math.inf
        if flow in flow.up.flows:
            touched = [link for link in self._release_ended([flow.up, flow.down], now) if link.flows]
            if touched:
                self._share(touched, now)
        arrival_seconds = flow.end_seconds + self.latency_seconds
        if arrival_seconds <= now:
            flow.on_arrival()
        else:
            self._at(arrival_seconds, flow.on_arrival)

    def _schedule_end(self, flow: _Flow) -> None:
        flow.event_seconds = flow.end_seconds
        self._at(flow.end_seconds, partial(self._meet, flow))

    @staticmethod
    def _release_ended(links: list[_Link], now: float) -> list[_Link]:
        """Takes flows that have ended off their links; returns `links` and all others where that happened."""
        for link in links:  # grows meanwhile
            for flow in [flow for flow in link.flows if flow.end_seconds <= now]:
                for other in (flow.up, flow.down):
                    del other.flows[flow]
                    if other not in links:
                        links.append(other)
        return links

    def _share(self, links: Iterable[_Link], now: float) -> None:
        """Finds the rates after flows have come to or gone from `links`.

        Only flows whose rates change, and their neighbours, are looked at: the flows of `links` first, all others
        staying as they are, then those, too, that would no longer be treated fairly, until none is left. As an
        allocation is max-min fair where every flow has a bottleneck (a full link on which none has more), and only
        there, the result is that of computing all of them.
        """
        rates: dict[_Flow, float] = dict.fromkeys((flow for link in links for flow in link.flows), _OPEN)
        while unfair := _fill(rates):
            rates.update(dict.fromkeys(unfair, _OPEN))
        for flow, rate in rates.items():
            if rate != flow.bits_per_second:
                flow.set_rate(rate, now)
            if flow.end_seconds < flow.event_seconds:
                self._schedule_end(flow)


class _Link:
    """One direction of a host's link."""

    __slots__ = ("bits_per_second", "flows", "free", "highest_kept", "num_open")

    def __init__(self, bits_per_second: float) -> None:
        self.bits_per_second = bits_per_second
        self.flows: dict[_Flow, None] = {}  # a set that keeps its order, so that runs repeat
        # Of use only while rates are found:
        self.num_open = 0
        """Flows whose rates are yet to be found; 0 in between."""
        self.free = 0.0
        """Bits a second that are not yet given away."""
        self.highest_kept = 0.0
        """Of the flows that keep their rates."""


class _Flow:
    """A transfer under way."""

    __slots__ = (
        "bits_per_second",
        "down",
        "end_seconds",
        "event_seconds",
        "num_bits_left",
        "on_arrival",
        "since_seconds",
        "up",
    )

    def __init__(
        self, up: _Link, down: _Link, num_bits: float, now: float, on_arrival: Callable[[], None]
    ) -> None:
        self.up, self.down, self.on_arrival = up, down, on_arrival
        self.num_bits_left, self.since_seconds, self.bits_per_second = num_bits, now, 0.0
        self.end_seconds = math.inf
        """When the last bit leaves, if the rate stays."""
        self.event_seconds = math.inf
        """When the network looks at it next; not after its end where others share its links."""

    def set_rate(self, bits_per_second: float, now: float) -> None:
        self.num_bits_left -= self.bits_per_second * (now - self.since_seconds)
        self.since_seconds, self.bits_per_second = now, bits_per_second
        self.end_seconds = now + max(0.0, self.num_bits_left) / bits_per_second


def _fill(rates: dict[_Flow, float]) -> list[_Flow]:
    """Max-min fair rates of the flows in `rates`, all others keeping theirs: progressive filling.

    Returns:
        Flows not in `rates` whose rates cannot stay as they are; none where all rates are max-min fair.
    """
    links: list[_Link] = []
    for flow in rates:
        rates[flow] = _OPEN
        for link in (flow.up, flow.down):
            if not link.num_open:
                links.append(link)
                link.free, link.highest_kept = link.bits_per_second, 0.0
                if len(link.flows) > 1:
                    for other in link.flows:
                        if other not in rates:
                            link.free -= other.bits_per_second
                            link.highest_kept = max(link.highest_kept, other.bits_per_second)
            link.num_open += 1
    unfair: dict[_Flow, None] = {}
    num_open = len(rates)
    while num_open:
        share = math.inf
        for link in links:
            if link.num_open and link.free < share * link.num_open:
                share, bottleneck = max(0.0, link.free) / link.num_open, link
        highest_fair = share * (1 + _TOLERANCE)
        for flow in bottleneck.flows:
            rate = rates.get(flow)
            if rate == _OPEN:
                num_open -= 1
                rates[flow] = share
                for link in (flow.up, flow.down):
                    link.num_open -= 1
                    link.free -= share
            elif rate is None and flow.bits_per_second > highest_fair:
                unfair[flow] = None
    for link in links:
        if link.highest_kept:
            for flow in link.flows:
                if flow not in rates and not _has_bottleneck(flow, rates):
                    unfair[flow] = None
    return list(unfair)


def _has_bottleneck(kept: _Flow, rates: dict[_Flow, float]) -> bool:
    """Whether one of its links is full, with no flow above it."""
    for link in (kept.up, kept.down):
        on_link = [rates.get(flow, flow.bits_per_second) for flow in link.flows]
        full = sum(on_link) >= link.bits_per_second * (1 - _TOLERANCE)
        if full and max(on_link) <= kept.bits_per_second * (1 + _TOLERANCE):
            return True
    return False
