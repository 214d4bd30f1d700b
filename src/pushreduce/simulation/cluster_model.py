"""What a cluster costs: the numbers that the simulated cluster and `scripts/plan` take their times from.

Owns names, units and ranges of the numbers, their YAML form, and the closed form of an undisturbed average. Does not
measure them (`scripts/calibrate`), nor own how concurrent transfers share links (`network.py`) or how algorithms spend
the time (`timing.py`). Needs neither torch nor MPI.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from pushreduce.communication.mpi_settings import RING_THRESHOLD_BYTES, SEGMENT_BYTES
from pushreduce.settings_file import load_dataclass, to_yaml
from pushreduce.training.atomic_file import write_atomically

_BITS = 8
_BYTES_PER_ELEMENT = 4
HALF_WIDTH_95 = 1.96
"""Half the width of a normal distribution's 95 % interval, in standard deviations."""


@dataclass(frozen=True)
class Uncertainty:
    """Of each calibrated number, the half width of its 95 % interval relative to it; 0 where it is exact."""

    link_bits_per_second: float = 0.0
    latency_seconds: float = 0.0
    average_overhead_seconds: float = 0.0
    average_overhead_seconds_per_doubling: float = 0.0
    average_seconds_per_byte: float = 0.0
    put_overhead_seconds: float = 0.0
    put_seconds_per_byte: float = 0.0
    in_host_latency_seconds: float = 0.0
    in_host_seconds_per_byte: float = 0.0
    step_seconds: float = 0.0
    step_jitter: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            if not 0.0 <= getattr(self, item.name) < 10.0:
                raise ValueError(
                    f"relative_uncertainty.{item.name} is {getattr(self, item.name)}: give a number from 0 to 10"
                )


@dataclass(frozen=True)
class ClusterModel:
    """Hosts on a non-blocking switch, each with one full-duplex link, and what the program needs on them.

    Ranks are dealt to hosts in blocks of `ranks_per_host`.

    Raises:
        ValueError: a number out of range.
    """

    num_hosts: int
    link_bits_per_second: float
    """Of every host's link, in each direction, as seen by MPI (payload, without headers)."""
    latency_seconds: float
    """One small message between two hosts, one way."""
    step_seconds: float
    """Mean time of a step's computation, forward, backward and local update."""
    ranks_per_host: int = 1
    ring_from_bytes: int = RING_THRESHOLD_BYTES
    """All-reduces between hosts from this size on go round a ring; smaller ones halve and double recursively."""
    segment_bytes: int = SEGMENT_BYTES
    """Longer averages are cut into segments of this size, which follow one another."""
    average_overhead_seconds: float = 0.0
    """What an average costs beyond its messages (Horovod's cycle and negotiation): this ..."""
    average_overhead_seconds_per_doubling: float = 0.0
    """... and this times log2 of the number of ranks."""
    average_seconds_per_byte: float = 0.0
    """Copies and sums of an average, beyond the time on the links."""
    put_overhead_seconds: float = 0.0
    """Of a put, beyond its messages (calls, looks of the helper thread); taken as if it came before the bytes."""
    put_seconds_per_byte: float = 0.0
    """Copies of a put, beyond the time on the links."""
    in_host_latency_seconds: float = 0.0
    """A barrier between the ranks of a host."""
    in_host_seconds_per_byte: float = 0.0
    """What is summed up or copied in memory that the ranks of a host share, per byte of a rank's buffer."""
    averages_hosts_first: bool = True
    """Averages over several hosts are taken inside each host first, then over one rank a host, as by MPICH (NCCL's
    rings, too, use each host's link once). False: over all ranks at once."""
    step_jitter: float = 0.0
    """Standard deviation of a step's time, relative to its mean; lognormal."""
    rank_slowness: tuple[float, ...] | None = None
    """Factors on the time of a step, one number a rank, as --emulated-rank-slowness; default: 1."""
    relative_uncertainty: Uncertainty = field(default_factory=Uncertainty)

    def __post_init__(self) -> None:
        for name in ("num_hosts", "ranks_per_host", "ring_from_bytes", "segment_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for item in fields(Uncertainty):
            lowest_included = item.name != "link_bits_per_second"
            value = getattr(self, item.name)
            if not (value >= 0.0 if lowest_included else value > 0.0) or math.isinf(value):
                raise ValueError(
                    f"{item.name} is {value}: it must be {'at least' if lowest_included else 'above'} 0 and finite"
                )
        slowness = self.rank_slowness
        if slowness is not None:
            if len(slowness) != self.num_ranks:
                raise ValueError(
                    f"rank_slowness has {len(slowness)} numbers and there are {self.num_ranks} ranks: give one a rank"
                )
            if not all(0.0 < factor < math.inf for factor in slowness):
                raise ValueError(f"rank_slowness is {slowness}: all its numbers must be above 0")

    @property
    def num_ranks(self) -> int:
        """Of the whole cluster."""
        return self.num_hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        """Where a rank is."""
        return rank // self.ranks_per_host

    def leaders(self) -> ClusterModel:
        """The cluster as the leaders of its hosts see it: one rank a host."""
        return replace(self, ranks_per_host=1, rank_slowness=None)

    def average_seconds(self, num_bytes: int, num_ranks: int) -> float:
        """Seconds of an average of `num_bytes` over the first `num_ranks` ranks, alone on the links.

        From the entry of the last rank to the end, by the algorithms that MPICH uses here (`mpi_settings.ring_table`),
        segment after segment:

        - from `ring_from_bytes` a ring, 2 (n - 1) messages of 1/n of the segment, one after the other;
        - below, a reduce-scatter by recursive halving and an all-gather by recursive doubling: 2 log2 n messages, of
          2 (n - 1)/n of the segment together;
        - with fewer elements than ranks recursive doubling, log2 n messages of the whole.

        The latter two take two more messages of the whole where n is no power of two. Of a ring, the ranks of a host
        use its link one at a time; in the others all at once, but not for the messages within the host. With
        `averages_hosts_first` n is the number of hosts, of one rank each, and the average inside a host comes on top.
        """
        if num_ranks == 1:
            return 0.0
        return self.negotiation_seconds(num_ranks) + self.average_message_seconds(num_bytes, num_ranks)

    def negotiation_seconds(self, num_ranks: int) -> float:
        """Seconds from when the last rank has posted an average, or several, to where Horovod begins with the first."""
        return self.average_overhead_seconds + self.average_overhead_seconds_per_doubling * math.log2(
            num_ranks
        )

    def average_message_seconds(self, num_bytes: int, num_ranks: int) -> float:
        """`average_seconds` without negotiation: of an average that Horovod negotiates together with another one."""
        if num_ranks <= self.ranks_per_host:
            return self.in_host_average_seconds(num_bytes)
        if self.averages_hosts_first and self.ranks_per_host > 1:
            num_hosts = self.host_of(num_ranks - 1) + 1
            return self.in_host_average_seconds(num_bytes) + self.leaders().average_message_seconds(
                num_bytes, num_hosts
            )
        seconds = self.average_seconds_per_byte * num_bytes
        num_full, rest = divmod(num_bytes, self.segment_bytes)
        if num_full:
            seconds += num_full * self._segment_seconds(self.segment_bytes, num_ranks)
        return seconds + (self._segment_seconds(rest, num_ranks) if rest or not num_full else 0.0)

    def _segment_seconds(self, num_bytes: int, num_ranks: int) -> float:
        latency, seconds_per_byte = self.latency_seconds, _BITS / self.link_bits_per_second
        if num_bytes >= self.ring_from_bytes:
            return 2 * (num_ranks - 1) * (latency + num_bytes / num_ranks * seconds_per_byte)
        num_doublings = num_ranks.bit_length() - 1
        power = (
            1 << num_doublings
        )  # of two, the largest up to num_ranks; the other ranks go through a partner
        num_between_hosts = max(0, num_doublings - (self.ranks_per_host.bit_length() - 1))
        sharing = min(self.ranks_per_host, power) * seconds_per_byte
        seconds = 2 * (latency + num_bytes * sharing) if power < num_ranks else 0.0
        if num_bytes <= _BYTES_PER_ELEMENT * power:
            return seconds + num_between_hosts * (latency + num_bytes * sharing)
        # Between hosts go the last, smallest parts of the halving and the first of the doubling.
        share = (2**num_between_hosts - 1) / power
        return seconds + 2 * (num_between_hosts * latency + num_bytes * share * sharing)

    def message_seconds(self, num_bytes: int) -> float:
        """Seconds of a message between two hosts, one way, alone on the links."""
        return self.latency_seconds + num_bytes * _BITS / self.link_bits_per_second

    def put_seconds(self, num_bytes: int) -> float:
        """Seconds from the sending of a mailbox's message to where its receiver has it, alone on the links.

        The message is followed by a counter, one latency more, which tells the receiver of it.
        """
        return self.hand_over_seconds(num_bytes) + self.message_seconds(num_bytes) + self.latency_seconds

    def hand_over_seconds(self, num_bytes: int) -> float:
        """Seconds from the sending of a mailbox's message to where its first byte is on the link, if it takes one."""
        return self.put_overhead_seconds + num_bytes * self.put_seconds_per_byte

    def in_host_average_seconds(self, num_bytes: int) -> float:
        """Seconds of what ends in one barrier of a host's ranks, having summed up or copied `num_bytes`."""
        if self.ranks_per_host == 1:
            return 0.0
        return self.in_host_latency_seconds + num_bytes * self.in_host_seconds_per_byte

    def host_sum_seconds(self, num_bytes: int) -> float:
        """Seconds of a sum over the ranks of one host, in memory that they share: `HostGroup.sum_rows`."""
        return self.in_host_average_seconds(0) + self.in_host_average_seconds(num_bytes)

    def host_step_seconds(self, num_bytes: int) -> float:
        """Seconds that a step of a host as one worker takes beside computation, for `num_bytes` of parameters.

        The sum of its ranks' gradients, and as much again for the way of the leader's parameters to the others.
        """
        return 2 * self.host_sum_seconds(num_bytes)

    def drawn(self, random: np.random.Generator) -> ClusterModel:
        """A model whose numbers are drawn from within their uncertainty (lognormal, so that none is negative)."""
        return replace(
            self,
            **{
                item.name: getattr(self, item.name)
                * math.exp(
                    math.log1p(getattr(self.relative_uncertainty, item.name))
                    / HALF_WIDTH_95
                    * random.standard_normal()
                )
                for item in fields(Uncertainty)
            },
        )


def load_cluster_model(path: Path) -> ClusterModel:
    """The model in a YAML file.

    Raises:
        SettingsError: in one line; the file cannot be read, an unknown or missing name, a value of the wrong type or
            out of range.
    """
    return load_dataclass(ClusterModel, path, kind="cluster file")


def save_cluster_model(model: ClusterModel, path: Path) -> None:
    """Writes the file that `load_cluster_model` reads."""
    write_atomically(path, to_yaml(model).encode())
