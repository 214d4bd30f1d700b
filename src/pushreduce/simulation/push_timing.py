"""What SGP and OSGP would take on a cluster: their time lines without gradients, by events on a shared network.

Owns when a worker sends and for whom it waits, as `algorithms/sgp.py` and `communication/mailbox.py` do it: slots and
the grants that free them, buffers, and the blocking rule. A test holds pages and this module against each other to
1e-9. Does not own how messages share links (`network.py`) or who sends to whom (`topology.py`). The tallies of SGP,
which nobody waits for, are left out.
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from pushreduce.communication.mailbox import num_message_bytes
from pushreduce.communication.topology import Topology
from pushreduce.simulation.cluster_model import ClusterModel
from pushreduce.simulation.event_queue import EventQueue
from pushreduce.simulation.network import Network
from pushreduce.simulation.time_line import Seconds, TimeLine

_CANARY_BYTES = 4
_NUM_CACHED_ROUNDS = 256


def sgp(
    model: ClusterModel, num_model_bytes: int, compute_seconds: Seconds, topology: Topology, tau: int
) -> TimeLine:
    """SGP (tau = 0) or OSGP(tau).

    Args:
        num_model_bytes: of the weights.
        compute_seconds: [iterations, workers].
        topology: over the workers.
        tau: rounds that a message may be late; sends are max(1, tau) rounds apart.
    """
    pushing = _Pushing(
        model, num_message_bytes(num_model_bytes + _CANARY_BYTES), compute_seconds, topology, tau
    )
    pushing.run()
    return TimeLine(compute_seconds, np.array(pushing.ends), staleness=pushing.staleness)


@dataclass(frozen=True)
class _Neighbours:
    """Of a sending round, by rank."""

    receivers: list[tuple[int, ...]]
    places: list[tuple[int, ...]]
    """The sender's place in the list of each of its receivers."""
    senders: list[tuple[int, ...]]


class _Worker:
    """One worker's state. A slot has the index (round mod number of slot rounds) x places + place."""

    __slots__ = (
        "arrived",
        "awaited_by",
        "expected",
        "granted_seconds",
        "has_ended",
        "host",
        "is_receiving",
        "num_free_buffers",
        "num_reserved",
        "round_number",
        "sending_round",
        "waits_for_buffer",
    )

    def __init__(self, host: int, num_slot_rounds: int, num_places: int) -> None:
        num_slots = num_slot_rounds * num_places
        self.host = host
        self.round_number = self.sending_round = 0
        self.is_receiving = False
        self.has_ended = False
        """It has taken all its steps and is in finish(), where it goes on receiving."""
        self.num_reserved = 0
        """Receivers of the round whose slots are known to be free."""
        self.num_free_buffers = num_slot_rounds
        self.waits_for_buffer = False
        self.expected = [slot // num_places for slot in range(num_slots)]
        """The sending round that each slot is to bring next."""
        self.arrived = [-1] * num_slots
        """The last sending round whose message has arrived in each slot."""
        self.granted_seconds = [0.0] * num_slots
        """When the sender of the expected round knows that it may write."""
        self.awaited_by: list[dict[int, int]] = [{} for _ in range(num_slots)]
        """Who waits to write into each slot, by sending round: a fast sender may wait before the next one does."""


class _Pushing:
    """One run. The methods are events, in the order of a worker's round."""

    def __init__(
        self,
        model: ClusterModel,
        message_bytes: int,
        compute_seconds: Seconds,
        topology: Topology,
        tau: int,
    ) -> None:
        num_iterations, num_workers = compute_seconds.shape
        assert topology.size == num_workers
        self._topology, self._tau = topology, tau
        self._period, self._num_initial_rounds = topology.period, topology.num_initial_rounds
        self._sending_interval = max(1, tau)
        self._num_slot_rounds = min(tau, 1) + 2
        self._num_places = topology.max_in_degree
        self._message_bytes = message_bytes
        self._hand_over_seconds = model.hand_over_seconds(message_bytes)
        self._latency_seconds = model.latency_seconds
        self._compute_seconds: list[list[float]] = compute_seconds.tolist()
        self._num_iterations = num_iterations
        self._queue = EventQueue()
        num_hosts = model.host_of(num_workers - 1) + 1
        self._network = Network(
            num_hosts,
            bits_per_second=model.link_bits_per_second,
            latency_seconds=model.latency_seconds,
            now=self._queue.now,
            at=self._queue.at,
        )
        self._workers = [
            _Worker(model.host_of(rank), self._num_slot_rounds, self._num_places)
            for rank in range(num_workers)
        ]
        self._neighbours_of_key = lru_cache(_NUM_CACHED_ROUNDS)(self._find_neighbours)
        self.ends = [[0.0] * num_workers for _ in range(num_iterations)]
        self.staleness: Counter[int] = Counter()

    def run(self) -> None:
        for rank in range(len(self._workers)):
            self._queue.at(self._compute_seconds[0][rank], partial(self._computed, rank))
        gc.disable()  # no cycles come about, and looking for them takes a tenth of the time
        try:
            self._queue.run()
        finally:
            gc.enable()
        assert all(worker.has_ended for worker in self._workers), "workers wait for each other"

    def _computed(self, rank: int) -> None:
        """The gradient has been applied: the round's messages are to be sent."""
        worker = self._workers[rank]
        sending_round, is_between = divmod(worker.round_number, self._sending_interval)
        worker.sending_round = sending_round
        if is_between:
            self._receive(rank)
        else:
            worker.num_reserved = 0
            self._reserve(rank)

    def _reserve(self, rank: int) -> None:
        """Goes on as far as slots are free, then sends. Nothing is received meanwhile."""
        worker = self._workers[rank]
        neighbours = self._neighbours(worker.sending_round)
        receivers, places = neighbours.receivers[rank], neighbours.places[rank]
        slot_round = worker.sending_round % self._num_slot_rounds * self._num_places
        now = self._queue.now()
        for number in range(worker.num_reserved, len(receivers)):
            receiver, slot = self._workers[receivers[number]], slot_round + places[number]
            if receiver.expected[slot] != worker.sending_round:
                receiver.awaited_by[slot][worker.sending_round] = rank
                return
            if receiver.granted_seconds[slot] > now:
                self._queue.at(receiver.granted_seconds[slot], partial(self._reserve, rank))
                return
            worker.num_reserved += 1
        if receivers:
            if not worker.num_free_buffers:
                worker.waits_for_buffer = True
                return
            worker.num_free_buffers -= 1
            put = partial(self._put, rank, worker.sending_round, slot_round)
            if self._hand_over_seconds:
                self._queue.at(now + self._hand_over_seconds, put)
            else:
                put()
        self._receive(rank)

    def _put(self, rank: int, sending_round: int, slot_round: int) -> None:
        """The message is on its way to all its receivers."""
        workers, neighbours = self._workers, self._neighbours(sending_round)
        receivers = neighbours.receivers[rank]
        under_way = list(receivers)
        for to, place in zip(receivers, neighbours.places[rank], strict=True):
            landed = partial(self._landed, rank, to, sending_round, slot_round + place, under_way)
            self._network.transfer(workers[rank].host, workers[to].host, self._message_bytes, landed)

    def _landed(self, rank: int, to: int, sending_round: int, slot: int, under_way: list[int]) -> None:
        """The message is in its slot; its counter follows. The buffer is free when all receivers have theirs."""
        worker, receiver = self._workers[rank], self._workers[to]
        under_way.remove(to)
        if not under_way:
            worker.num_free_buffers += 1
            if worker.waits_for_buffer:
                worker.waits_for_buffer = False
                self._reserve(rank)
        arrival = self._queue.now() + (self._latency_seconds if worker.host != receiver.host else 0.0)
        self._queue.at(arrival, partial(self._arrived, to, sending_round, slot))

    def _arrived(self, rank: int, sending_round: int, slot: int) -> None:
        worker = self._workers[rank]
        worker.arrived[slot] = sending_round
        if worker.is_receiving and sending_round <= worker.sending_round:
            self._apply(rank, slot)
            self._go_on_if_complete(rank)

    def _receive(self, rank: int) -> None:
        """The wait at the end of a round begins."""
        worker = self._workers[rank]
        worker.is_receiving = True
        for slot, expected in enumerate(worker.expected):
            if expected <= worker.sending_round:
                self._apply(rank, slot)
        self._go_on_if_complete(rank)

    def _apply(self, rank: int, slot: int) -> None:
        """Applies what has arrived in a slot, and grants it to its next sender."""
        worker = self._workers[rank]
        place = slot % self._num_places
        while (expected := worker.expected[slot]) <= worker.sending_round:
            if worker.arrived[slot] == expected:
                self.staleness[worker.round_number - expected * self._sending_interval] += 1
            elif place < len(self._neighbours(expected).senders[rank]):
                return
            worker.expected[slot] = later = expected + self._num_slot_rounds
            senders = self._neighbours(later).senders[rank]
            if place < len(senders):
                is_far = self._workers[senders[place]].host != worker.host
                granted = self._queue.now() + (self._latency_seconds if is_far else 0.0)
                worker.granted_seconds[slot] = granted
                if (waiting := worker.awaited_by[slot].pop(later, None)) is not None:
                    assert waiting == senders[place]
                    self._queue.at(granted, partial(self._reserve, waiting))

    def _go_on_if_complete(self, rank: int) -> None:
        """The blocking rule: all messages sent in rounds up to k - tau have been applied."""
        worker = self._workers[rank]
        num_due = (worker.round_number - self._tau) // self._sending_interval + 1
        if worker.has_ended or min(worker.expected) < num_due:
            return
        now = self._queue.now()
        self.ends[worker.round_number][rank] = now
        if worker.round_number + 1 == self._num_iterations:
            worker.has_ended = True
            return
        worker.is_receiving = False
        worker.round_number += 1
        self._queue.at(now + self._compute_seconds[worker.round_number][rank], partial(self._computed, rank))

    # -- the graph -------------------------------------------------------------------------------------------------

    def _neighbours(self, sending_round: int) -> _Neighbours:
        if self._period is not None and sending_round >= self._num_initial_rounds:
            sending_round = (
                self._num_initial_rounds + (sending_round - self._num_initial_rounds) % self._period
            )
        return self._neighbours_of_key(sending_round)

    def _find_neighbours(self, sending_round: int) -> _Neighbours:
        topology, ranks = self._topology, range(len(self._workers))
        senders = [topology.in_neighbours(rank, sending_round) for rank in ranks]
        receivers = [topology.out_neighbours(rank, sending_round) for rank in ranks]
        places = [tuple(senders[to].index(rank) for to in receivers[rank]) for rank in ranks]
        return _Neighbours(receivers, places, senders)
