"""A simulated run on a model of a cluster: the real algorithms, with real gradients, against a virtual wall clock.

Owns which of the model's costs each operation of a communicator has, and Horovod's queue. Does not own the costs
(`cluster_model.py`) or how concurrent messages share links (`network.py`). Time spent computing is the ranks' own
(`communicator.clock.sleep`).

Horovod's averages, what goes past Horovod, and the messages of mailboxes do not wait for each other. Averages below
`ring_from_bytes`, barriers and counters take nothing from others on the links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pushreduce.communication.simulated import SimulatedCluster
from pushreduce.communication.virtual_time import Scheduler
from pushreduce.simulation.cluster_model import ClusterModel
from pushreduce.simulation.network import Network


def simulated_cluster(
    model: ClusterModel, *, num_ranks: int | None = None, seed: int = 0
) -> SimulatedCluster:
    """The first `num_ranks` ranks of a cluster (default: all) in virtual time.

    Args:
        seed: decides the order of simultaneous events, and each rank's initial torch generator.
    """
    num_ranks = model.num_ranks if num_ranks is None else num_ranks
    if not 1 <= num_ranks <= model.num_ranks:
        raise ValueError(f"{num_ranks} ranks on a cluster of {model.num_ranks}: take 1 to {model.num_ranks}")
    return SimulatedCluster(
        num_ranks,
        seed=seed,
        ranks_per_host=model.ranks_per_host,
        transport=partial(ClusterTransport, model),
    )


class ClusterTransport:
    """`Transport` of one run on a cluster as `model` describes it."""

    def __init__(self, model: ClusterModel, scheduler: Scheduler) -> None:
        self._model, self._scheduler = model, scheduler
        self._network = Network(
            model.num_hosts,
            bits_per_second=model.link_bits_per_second,
            latency_seconds=model.latency_seconds,
            now=lambda: scheduler.now,
            at=scheduler.at,
        )
        self._horovod = _HorovodQueue(model, self._network, scheduler)

    def collective(
        self,
        members: Sequence[int],
        num_bytes: int,
        *,
        horovod_kind: str | None,
        show_end: Callable[[int], None],
    ) -> None:
        """Broadcasts cost like averages here, and what goes past Horovod like the messages of one."""
        scheduler = self._scheduler
        show_all = partial(_show_end_to_all, scheduler, len(members), show_end)
        if len(members) == 1:  # copies, and asks nobody
            scheduler.at(scheduler.now, show_all)
        elif horovod_kind is not None:
            self._horovod.add(_Operation(members, horovod_kind, num_bytes, [show_all]))
        else:
            costs = _costs(self._model, members, num_bytes)
            scheduler.at(scheduler.now + costs.message_seconds, show_all)

    def put(self, source: int, target: int, num_bytes: int, on_arrival: Callable[[], None]) -> None:
        """A transfer between the hosts, once the message is handed over; in a host it is that alone."""
        model, scheduler = self._model, self._scheduler
        hosts = model.host_of(source), model.host_of(target)
        handed_over = scheduler.now + model.hand_over_seconds(num_bytes)
        scheduler.at(handed_over, partial(self._network.transfer, *hosts, num_bytes, on_arrival))

    def put_counter(self, source: int, target: int, on_arrival: Callable[[], None]) -> None:
        """One latency between hosts."""
        is_far = self._model.host_of(source) != self._model.host_of(target)
        latency = self._model.latency_seconds if is_far else 0.0
        self._scheduler.at(self._scheduler.now + latency, on_arrival)


@dataclass
class _Operation:
    """What all of some ranks have posted to Horovod."""

    members: Sequence[int]
    kind: str
    num_bytes: int
    show_ends: list[Callable[[], None]]


class _HorovodQueue:
    """Horovod's thread: whenever it is idle it takes what all ranks have posted, agrees on all of it at once, fuses
    what is alike, and does one after the other.

    A ring is one flow from each host to the next, of all bytes that pass there, and then whatever an undisturbed ring
    takes beyond that. So rings and messages slow each other; but where a ring is held up at one host after another, it
    would in truth be later than the latest of its flows.
    """

    def __init__(self, model: ClusterModel, network: Network, scheduler: Scheduler) -> None:
        self._model, self._network, self._scheduler = model, network, scheduler
        self._posted: list[_Operation] = []
        self._agreed: list[_Operation] = []  # the first is under way
        self._num_flows = 0

    def add(self, operation: _Operation) -> None:
        self._posted.append(operation)
        # In an event of its own, after all that this rank posts at the same moment.
        self._scheduler.at(self._scheduler.now, self._agree)

    def _agree(self) -> None:
        if self._agreed or not self._posted:
            return
        fused: dict[tuple[tuple[int, ...], str], _Operation] = {}
        for operation in self._posted:
            key = tuple(operation.members), operation.kind
            if key in fused:
                fused[key].num_bytes += operation.num_bytes
                fused[key].show_ends += operation.show_ends
            else:
                fused[key] = operation
        self._agreed, self._posted = list(fused.values()), []
        seconds = max(self._model.negotiation_seconds(len(each.members)) for each in self._agreed)
        self._scheduler.at(self._scheduler.now + seconds, self._begin)

    def _begin(self) -> None:
        operation = self._agreed[0]
        costs = _costs(self._model, operation.members, operation.num_bytes)
        if not costs.link_bytes:
            self._scheduler.at(self._scheduler.now + costs.message_seconds, self._end)
            return
        link_seconds = self._model.latency_seconds + 8 * costs.link_bytes / self._model.link_bits_per_second
        rest_seconds = max(0.0, costs.message_seconds - link_seconds)
        self._num_flows = len(costs.hosts)
        arrived = partial(self._flow_arrived, rest_seconds)
        for source, target in zip(costs.hosts, [*costs.hosts[1:], costs.hosts[0]], strict=True):
            self._network.transfer(source, target, costs.link_bytes, arrived)

    def _flow_arrived(self, rest_seconds: float) -> None:
        self._num_flows -= 1
        if not self._num_flows:
            self._scheduler.at(self._scheduler.now + rest_seconds, self._end)

    def _end(self) -> None:
        for show_all in self._agreed.pop(0).show_ends:
            show_all()
        if self._agreed:
            self._begin()
        else:
            self._agree()


def _show_end_to_all(scheduler: Scheduler, size: int, show_end: Callable[[int], None]) -> None:
    for member in range(size):  # in random order
        scheduler.at(scheduler.now, partial(show_end, member))


@dataclass(frozen=True)
class _Costs:
    """Of a collective operation between two ranks or more."""

    message_seconds: float
    """Undisturbed; without negotiation where it is Horovod's."""
    hosts: Sequence[int]
    link_bytes: float
    """That go from each of `hosts` to the next, if it is a ring."""


def _costs(model: ClusterModel, members: Sequence[int], num_bytes: int) -> _Costs:
    size, hosts = len(members), sorted({model.host_of(rank) for rank in members})
    if len(hosts) == size:  # their leaders, of which each has a link to itself
        model = model.leaders()
    ring_size = len(hosts) if model.averages_hosts_first else size
    num_full, rest = divmod(num_bytes, model.segment_bytes)
    ring_bytes = rest if rest >= model.ring_from_bytes else 0
    if model.segment_bytes >= model.ring_from_bytes:
        ring_bytes += num_full * model.segment_bytes
    return _Costs(
        model.average_message_seconds(num_bytes, size),
        hosts,
        2 * (ring_size - 1) / ring_size * ring_bytes if len(hosts) > 1 else 0.0,
    )
