"""The mailbox's protocol, under a simulated network that reorders all that MPI may reorder: bare PushSum on vectors.

What a rank does in a round is what SGP does without its gradients: reserve, send or keep, receive, and wait at the
round's end for all messages that are more than tau rounds old.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pushreduce.communication.mailbox import MailboxError
from pushreduce.communication.simulated import Deadlock, SimulatedCluster
from pushreduce.communication.simulated_mailbox import SimulatedMailbox
from pushreduce.communication.topology import GRAPHS, Circulant, Topology, build_topology

NUM_NUMBERS = 5
WAIT = float("inf")


class RandomGraphs(Topology):
    """Any graph in any round, places in any order: in- and out-degrees 0 to all, which no real topology has."""

    def __init__(self, size: int, seed: int, num_graphs: int, density: float) -> None:
        self.size = size
        choice = random.Random(seed)
        self.in_lists: list[list[tuple[int, ...]]] = []
        for _ in range(num_graphs):
            graph = []
            for rank in range(size):
                sources = [i for i in range(size) if i != rank and choice.random() < density]
                choice.shuffle(sources)
                graph.append(tuple(sources))
            self.in_lists.append(graph)

    @property
    def max_in_degree(self) -> int:
        return max(1, *(len(sources) for graph in self.in_lists for sources in graph))

    def out_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return tuple(j for j in range(self.size) if rank in self.in_neighbours(j, round_number))

    def in_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return self.in_lists[round_number % len(self.in_lists)][rank]


@dataclass
class Run:
    """What PushSum runs on, and the book that its messages are kept in."""

    topology: Topology
    tau: int
    patience_seconds: float
    num_rounds_per_rank: tuple[int, ...]
    """Rounds that take time; after them a rank takes idle rounds up to the largest number of any."""
    seed: int
    jitter: float = 1.0
    first_round: int = 0
    wait_for_old: bool = True
    under_way: dict[tuple[int, int, int], tuple[bytes, float]] = field(default_factory=dict)
    """(source, receiver, round) -> (payload, weight): sent, not applied."""
    num_applied: int = 0
    delays: set[int] = field(default_factory=set)

    def push_sum(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x [ranks, numbers] at the beginning, and x and w [ranks] at the end, drained."""
        start = np.random.default_rng(self.seed).normal(size=(self.topology.size, NUM_NUMBERS))
        cluster = SimulatedCluster(
            self.topology.size,
            seed=self.seed,
            jitter=self.jitter,
            put_seconds=lambda num_bytes, _: 1e-4 * num_bytes,
        )
        x, w = zip(*cluster.run(lambda communicator: self._body(communicator, start)), strict=True)
        assert not self.under_way
        return start, np.array(x), np.array(w)

    def _body(self, communicator, start):
        rank, topology = communicator.rank, self.topology
        pace = random.Random(1000 * self.seed + rank)
        seconds_per_round = 10 ** pace.uniform(-3, 0)
        x, w, own_round = start[rank].copy(), 1.0, self.first_round
        mailbox = communicator.open_mailbox(
            topology, num_payload_bytes=8 * NUM_NUMBERS, num_slot_rounds=self.tau + 2
        )
        mailbox.begin_at(self.first_round)

        def apply(message):
            nonlocal w
            sent = self.under_way.pop(
                (message.source, rank, message.round_number)
            )  # KeyError: twice, or never sent
            assert sent == (message.payload.tobytes(), message.weight)
            self.delays.add(own_round - message.round_number)
            self.num_applied += 1
            x[:] += message.payload.view(np.float64)
            w += message.weight

        def receive_below(round_number):
            mailbox.receive(own_round, apply)
            while mailbox.num_rounds_received < round_number:
                communicator.wait_until(mailbox.has_news)
                mailbox.receive(own_round, apply)

        end = self.first_round + max(self.num_rounds_per_rank)
        for own_round in range(self.first_round, end):
            if own_round < self.first_round + self.num_rounds_per_rank[rank]:
                communicator.clock.sleep(pace.expovariate(1.0) * seconds_per_round)
            neighbours = topology.out_neighbours(rank, own_round)
            reserved = [
                to
                for to in neighbours
                if mailbox.reserve(own_round, to, patience_seconds=self.patience_seconds)
            ]
            share = 1 / (1 + len(neighbours))
            if reserved:
                payload = mailbox.outgoing().view(np.float64)
                payload[:] = share * x
                for to in reserved:
                    self.under_way[rank, to, own_round] = (payload.tobytes(), share * w)
                mailbox.send(own_round, reserved, share * w)
            for to in set(neighbours) - set(reserved):
                mailbox.skip(own_round, to)
            x *= 1 - share * len(reserved)
            w *= 1 - share * len(reserved)
            if self.wait_for_old:
                receive_below(own_round - self.tau + 1)
        receive_below(end)
        mailbox.free()
        return x, w


@st.composite
def runs(draw, topologies: Callable[[int], st.SearchStrategy[Topology]]) -> Run:
    size = draw(st.integers(2, 8))
    return Run(
        draw(topologies(size)),
        tau=draw(st.integers(0, 3)),
        patience_seconds=draw(st.sampled_from([WAIT, 0.0, 1e-2, 1.0])),
        num_rounds_per_rank=tuple(draw(st.lists(st.integers(1, 40), min_size=size, max_size=size))),
        seed=draw(st.integers(0, 2**32)),
        jitter=draw(st.sampled_from([0.0, 1.0, 30.0])),
        first_round=draw(st.sampled_from([0, 0, 1, 7, 1000])),
    )


def any_topology(size: int) -> st.SearchStrategy[Topology]:
    num_graphs, density = st.integers(1, 7), st.sampled_from([0.2, 0.5, 0.9])
    return st.one_of(
        st.builds(build_topology, st.sampled_from(GRAPHS), st.just(size), seed=st.integers(0, 2**32)),
        st.just(build_topology("exponential", size, num_peers=2)),
        st.builds(build_topology, st.just("exponential"), st.just(size), two_peer_rounds=st.integers(1, 20)),
        st.builds(RandomGraphs, st.just(size), st.integers(0, 2**32), num_graphs, density),
    )


@settings(max_examples=60)
@given(runs(any_topology))
def test_mass_is_conserved_and_no_message_is_late(run):
    start, x, w = run.push_sum()
    scale = np.abs(start).sum(axis=0)
    assert np.all(np.abs(x.sum(axis=0) - start.sum(axis=0)) <= 1e-12 * scale)
    assert abs(w.sum() - run.topology.size) <= 1e-12 * run.topology.size
    assert np.all(w > 0)
    assert run.delays <= set(range(run.tau + 1))
    # z is a mean of the starts, with non-negative weights.
    z = x / w[:, None]
    assert np.all(z <= start.max(axis=0) + 1e-9)
    assert np.all(z >= start.min(axis=0) - 1e-9)
    if run.patience_seconds == WAIT:
        rounds = range(run.first_round, run.first_round + max(run.num_rounds_per_rank))
        ranks = range(run.topology.size)
        assert run.num_applied == sum(len(run.topology.out_neighbours(i, k)) for i in ranks for k in rounds)


@settings(max_examples=10)
@given(st.integers(2, 8), st.integers(0, 3), st.integers(0, 2**32), st.booleans())
def test_consensus(size, tau, seed, one_idle_rank):
    # With patience there is no such bound: all mass can gather at the fastest rank, whose receivers are always late.
    num_rounds = (20 if one_idle_rank else 150, *[150] * (size - 1))
    start, x, w = Run(build_topology("exponential", size), tau, WAIT, num_rounds, seed).push_sum()
    assert np.abs(x / w[:, None] - start.mean(axis=0)).max() < 1e-6


@settings(max_examples=30)
@given(runs(any_topology))
def test_without_delays_a_round_is_its_mixing_matrix(run):
    """Above all: what a round brings is in nothing that the same round sends, however early it is there."""
    run.tau, run.patience_seconds = 0, WAIT
    start, x, w = run.push_sum()
    expected = np.column_stack([start, np.ones(run.topology.size)])
    for k in range(max(run.num_rounds_per_rank)):
        expected = run.topology.mixing_matrix(run.first_round + k) @ expected
    assert np.allclose(np.column_stack([x, w]), expected, rtol=0, atol=1e-12)


def test_patience_decides_whether_mass_is_kept():
    num_applied = []
    for patience_seconds in (0.0, WAIT):
        run = Run(build_topology("exponential", 4), 1, patience_seconds, (30,) * 4, seed=3, jitter=30.0)
        run.push_sum()
        num_applied.append(run.num_applied)
    assert 0 < num_applied[0] < num_applied[1] == 4 * 30


# -- that these tests can fail: each defect that the protocol's rules are made against


# A slot's sender is another one in every turn, and there are two places, of which one is empty at times.
MOVING = {
    "topology": Circulant(6, [(1, 2), (2,), (3, 5), (4, 1)]),
    "tau": 1,
    "patience_seconds": WAIT,
    "num_rounds_per_rank": (30,) * 6,
}


def any_seed_fails(error, match, **changes):
    """Runs under several seeds; some interleaving must meet the defect, and none may end in anything else."""
    caught = 0
    for seed in range(10):
        try:
            Run(**MOVING | changes, seed=seed).push_sum()
        except error as found:
            if match not in str(found):
                raise
            caught += 1
    assert caught > 0


def test_grants_to_the_last_sender_are_noticed(monkeypatch):
    def grant_to_the_last(self, round_number, s, p):
        self._expected[s, p] = later = round_number + self.num_slot_rounds
        senders = self.topology.in_neighbours(self.rank, round_number)
        if p < len(senders):
            self._grant(later, senders[p], s)

    monkeypatch.setattr(SimulatedMailbox, "_advance", grant_to_the_last)
    any_seed_fails(Deadlock, "no rank can proceed")


def test_writing_without_a_grant_is_noticed(monkeypatch):
    monkeypatch.setattr(SimulatedMailbox, "_is_granted", lambda self, round_number, to: True)
    any_seed_fails(AssertionError, "writes its message of round")


def test_reading_before_the_counter_is_noticed(monkeypatch):
    read_arrived = SimulatedMailbox._read_arrived

    def whatever_is_in_the_slot(self):
        return np.where(self._claimed >= self._expected, self._claimed + 1, read_arrived(self))

    monkeypatch.setattr(SimulatedMailbox, "_read_arrived", whatever_is_in_the_slot)
    any_seed_fails(MailboxError, "lost, torn or overwritten")


def test_applying_twice_is_noticed(monkeypatch):
    checked_message = SimulatedMailbox._checked_message

    def twice(self, *args):
        checked_message(self, *args)
        return checked_message(self, *args)

    monkeypatch.setattr(SimulatedMailbox, "_checked_message", twice)
    any_seed_fails(AssertionError, "twice")


def test_not_waiting_for_old_messages_is_noticed():
    any_seed_fails(Deadlock, "no rank can proceed", wait_for_old=False)
