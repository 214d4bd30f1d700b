"""PushSum with whole numbers through real windows: nothing is lost, doubled, torn, or applied too early or too late."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pushreduce.communication.topology import build_topology

NUM_ROUNDS = 40


class Worker:
    """One rank of PushSum: int64 mass, which divides without rounding, and a float64 weight."""

    def __init__(self, mailbox, num_values, tau):
        self.mailbox, self.tau, self.round = mailbox, tau, -1
        self.mass = np.arange(num_values, dtype=np.int64) * 1000 + mailbox.rank
        self.weight, self.num_applied, self.num_kept = 1.0, 0, 0

    def apply(self, message):
        tag, *_ = mass = message.payload.view(np.int64)
        assert tag == message.round_number * 1000 + message.source
        assert self.round - self.tau <= message.round_number <= self.round
        self.mass += mass[1:]
        self.weight += message.weight
        self.num_applied += 1

    def take_round(self, patience_seconds):
        self.round += 1
        mailbox, k = self.mailbox, self.round
        receivers = mailbox.topology.out_neighbours(mailbox.rank, k)
        reserved = [to for to in receivers if mailbox.reserve(k, to, patience_seconds=patience_seconds)]
        if reserved:
            memory = mailbox.outgoing().view(np.int64)
            share = self.mass // (1 + len(receivers))
            memory[0], memory[1:] = k * 1000 + mailbox.rank, share
            weight = self.weight / (1 + len(receivers))
            mailbox.send(k, reserved, weight)
            self.mass -= len(reserved) * share
            self.weight -= len(reserved) * weight
        for to in set(receivers) - set(reserved):
            mailbox.skip(k, to)
            self.num_kept += 1
        self.wait_for(k - self.tau)

    def wait_for(self, round_number):
        mailbox = self.mailbox
        mailbox.wait(lambda: mailbox.num_rounds_received > round_number, self.round, self.apply)


def check_conserved(ranks, worker):
    """All that was there at the beginning is there, message for message and unit for unit."""
    mailbox = worker.mailbox
    rounds = range(worker.round + 1)
    due = sum(len(mailbox.topology.in_neighbours(ranks.rank, k)) for k in rounds)
    everywhere = ranks.allgather((worker.mass, worker.weight, due - worker.num_applied, worker.num_kept))
    masses, weights, missing, kept = zip(*everywhere, strict=True)
    values = np.arange(len(worker.mass)) * 1000
    assert np.array_equal(sum(masses), values * ranks.size + sum(range(ranks.size)))
    assert sum(weights) == pytest.approx(ranks.size, rel=1e-12)
    assert sum(missing) == sum(kept)


@pytest.mark.parametrize("patience_seconds", [np.inf, 0.0, 1e-3])
@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("graph", ["exponential", "bipartite-exponential", "ring", "complete", "random"])
def test_mass_is_conserved_whatever_the_ranks_do_meanwhile(ranks, graph, tau, patience_seconds):
    random = np.random.default_rng([ranks.rank, tau])
    mailbox = ranks.open(graph, num_payload_bytes=8 * 101, num_slot_rounds=tau + 2)
    worker = Worker(mailbox, 100, tau)
    for _ in range(NUM_ROUNDS):
        time.sleep(random.exponential(5e-4) * (random.random() < 0.5))
        worker.take_round(patience_seconds)
    worker.wait_for(worker.round)
    check_conserved(ranks, worker)
    mailbox.free()


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_slow_rank_holds_up_nobody_by_more_than_tau(ranks, slow_rank):
    tau = 3
    mailbox = ranks.open("exponential", num_payload_bytes=8 * 101, num_slot_rounds=tau + 2)
    worker = Worker(mailbox, 100, tau)
    for _ in range(NUM_ROUNDS):
        time.sleep(4e-3 * (ranks.rank == slow_rank))
        worker.take_round(np.inf)
    worker.wait_for(worker.round)
    check_conserved(ranks, worker)
    mailbox.free()


def test_two_peers_then_one(ranks):
    topology = build_topology("exponential", ranks.size, two_peer_rounds=7)
    mailbox = ranks.open(topology, num_payload_bytes=8 * 101, num_slot_rounds=3)
    worker = Worker(mailbox, 100, 1)
    for _ in range(20):
        worker.take_round(np.inf)
    worker.wait_for(worker.round)
    check_conserved(ranks, worker)
    mailbox.free()


@pytest.mark.parametrize("tau", [0, 1])
def test_large_messages(ranks, tau):
    """20 MB, far beyond every eager limit: a counter must not come before its payload."""
    num_values = 2_500_000
    mailbox = ranks.open("exponential", num_payload_bytes=8 * (num_values + 1), num_slot_rounds=tau + 2)
    worker = Worker(mailbox, num_values, tau)
    for _ in range(4):
        worker.take_round(np.inf)
    worker.wait_for(worker.round)
    check_conserved(ranks, worker)
    mailbox.free()


def test_two_mailboxes_side_by_side(ranks):
    workers = [
        Worker(ranks.open(graph, num_payload_bytes=8 * 11, num_slot_rounds=3), 10, 1)
        for graph in ("ring", "random")
    ]
    for _ in range(NUM_ROUNDS):
        for worker in workers:
            worker.take_round(np.inf)
    for worker in workers:
        worker.wait_for(worker.round)
        check_conserved(ranks, worker)
        worker.mailbox.free()
