"""Max-min fair sharing in exact fractions, all flows anew at every event: what `simulation.network` is held against.

Written from the definition (progressive filling: all rates grow alike until a link is full, which stops its flows), not
from the program, and slow.
"""

from collections import Counter
from fractions import Fraction
from typing import NamedTuple


class Transfer(NamedTuple):
    start_seconds: Fraction
    source: int
    target: int
    num_bits: Fraction


def fair_rates(flows: list[tuple[int, int]], link_rates: list[Fraction]) -> list[Fraction]:
    """Bits per second of each flow (source, target) by progressive filling."""
    rates, growing = [Fraction(0)] * len(flows), set(range(len(flows)))
    while growing:
        used: Counter[tuple[str, int]] = Counter()
        num_growing: Counter[tuple[str, int]] = Counter()
        for i, (source, target) in enumerate(flows):
            for link in (("up", source), ("down", target)):
                used[link] += rates[i]
                num_growing[link] += i in growing
        growth = min((link_rates[link[1]] - used[link]) / k for link, k in num_growing.items() if k)
        for i in growing:
            rates[i] += growth
        full = {link for link, k in num_growing.items() if used[link] + k * growth == link_rates[link[1]]}
        growing = {
            i for i in growing if ("up", flows[i][0]) not in full and ("down", flows[i][1]) not in full
        }
    return rates


def arrivals(
    transfers: list[Transfer], link_rates: list[Fraction], latency_seconds: Fraction
) -> list[Fraction]:
    """When each transfer (between different hosts) has arrived."""
    left = {i: transfer.num_bits for i, transfer in enumerate(transfers)}
    ends: dict[int, Fraction] = {}
    now = Fraction(0)
    while left:
        active = [i for i in left if transfers[i].start_seconds <= now]
        rates = fair_rates([(transfers[i].source, transfers[i].target) for i in active], link_rates)
        starts = [transfers[i].start_seconds for i in left if transfers[i].start_seconds > now]
        following = min([*starts, *(now + left[i] / rate for i, rate in zip(active, rates, strict=True))])
        for i, rate in zip(active, rates, strict=True):
            left[i] -= rate * (following - now)
            if left[i] == 0:
                ends[i] = following
                del left[i]
        now = following
    return [ends[i] + latency_seconds for i in range(len(transfers))]
