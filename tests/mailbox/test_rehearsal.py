"""The check before a run passes on right windows, and catches wrong ones on all ranks, without hanging."""

from __future__ import annotations

import re
import threading

import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from pushreduce.communication.mailbox import MailboxError
from pushreduce.communication.mailbox_check import find_problem, num_end_bytes
from pushreduce.communication.push_sum_window import PushSumWindow

GRAPHS = ["exponential", "bipartite-exponential", "ring", "complete", "random"]


def rehearse(ranks, mailbox, limit_seconds):
    mailbox.limited.limit_seconds = limit_seconds
    mailbox.send_ends_only(num_end_bytes(mailbox))
    return find_problem(mailbox, ranks.allgather)


@pytest.mark.parametrize("num_bytes", [1, 1000, 10_000_007])
@pytest.mark.parametrize("graph", GRAPHS)
def test_right_windows_pass_and_can_be_used(ranks, graph, num_bytes):
    mailbox = ranks.open(graph, num_payload_bytes=num_bytes, num_slot_rounds=3)
    assert rehearse(ranks, mailbox, 30.0) == ""
    mailbox.restart()
    for round_number in range(5):
        receivers = mailbox.topology.out_neighbours(ranks.rank, round_number)
        for to in receivers:
            assert mailbox.reserve(round_number, to)
        mailbox.outgoing()[:] = ranks.rank
        mailbox.send(round_number, receivers, 1.0)
        found = []

        def apply(message, found=found):
            assert (message.payload == message.source).all()
            found.append(message.source)

        mailbox.wait(lambda number=round_number: mailbox.num_rounds_received > number, round_number, apply)
        assert sorted(found) == sorted(mailbox.topology.in_neighbours(ranks.rank, round_number))
    mailbox.free()


class Wrong(PushSumWindow):
    """Does something wrong in the third round of rank 1 only; here nothing."""

    @staticmethod
    def is_wrong(mailbox, round_number):
        return (mailbox.rank, round_number) == (1, 2)

    def _put(self, buffer, round_number, slots):
        if self.is_wrong(self, round_number):
            self.put_wrongly(buffer, round_number, slots)
        else:
            super()._put(buffer, round_number, slots)

    def put_wrongly(self, buffer, round_number, slots):
        super()._put(buffer, round_number, slots)


class Lost(Wrong):
    """Neither the message nor its counter comes."""

    def put_wrongly(self, buffer, round_number, slots):
        self._free_buffers.append(buffer)


class OnlyCounted(Wrong):
    """The counter comes, the message does not."""

    def _begin(self, put):
        if self.is_wrong(self, put.round_number):
            put.requests = []
        else:
            super()._begin(put)


class OneByteWrong(Wrong):
    def put_wrongly(self, buffer, round_number, slots):
        self._payload_of(buffer)[-1] ^= 1
        super().put_wrongly(buffer, round_number, slots)


class Halved(Wrong):
    """The rear of the message does not come."""

    def _begin(self, put):
        ranges = self._put_ranges
        if self.is_wrong(self, put.round_number):
            self._put_ranges = [slice(0, self.num_message_bytes // 128 * 64)]
        super()._begin(put)
        self._put_ranges = ranges


class Displaced(Wrong):
    """The message comes into the next slot, its counter is right."""

    def _begin(self, put):
        slot = s, p = put.slot
        if self.is_wrong(self, put.round_number):
            put.slot = ((s + 1) % self.num_slot_rounds, p)
        super()._begin(put)
        put.slot = slot


class WeightChanged(Wrong):
    def put_wrongly(self, buffer, round_number, slots):
        self._header_of(buffer)["weight"] *= 1 + 1e-6
        super().put_wrongly(buffer, round_number, slots)


class NoGrants(Wrong):
    def _grant(self, round_number, to, s):
        pass


@pytest.mark.parametrize("num_bytes", [1000, 10_000_007])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Lost, "nothing came for 1 s"),
        (OnlyCounted, "lost, torn or overwritten"),
        (OneByteWrong, "1 of .* bytes of the message of round 2 from rank 1 are wrong"),
        (Halved, "lost, torn or overwritten"),
        (Displaced, "lost, torn or overwritten"),
        (WeightChanged, "the weights of .* ranks sum to"),
        (NoGrants, "nothing came for 1 s"),
    ],
)
def test_wrong_windows_are_caught_on_all_ranks(ranks, kind, message, num_bytes):
    # What is displaced comes into a slot that is not written yet: over a message that is just being read, it could be
    # found as wrong bytes of that one, too.
    slots = 4 if kind is Displaced else 2
    mailbox = ranks.open("exponential", num_payload_bytes=num_bytes, num_slot_rounds=slots, kind=kind)
    problems = ranks.allgather(rehearse(ranks, mailbox, 1.0))
    assert len(set(problems)) == 1
    mailbox.free()
    assert re.search(message, problems[0])


def test_a_call_of_mpi_that_never_returns(ranks):
    released = threading.Event()

    class Stuck(Wrong):
        def _publish(self, put):
            if self.is_wrong(self, put.round_number):
                released.wait()
            super()._publish(put)

    mailbox = ranks.open("exponential", num_payload_bytes=1000, num_slot_rounds=2, kind=Stuck)
    problems = ranks.allgather(rehearse(ranks, mailbox, 1.0))
    assert len(set(problems)) == 1
    assert "nothing came for 1 s" in problems[0]
    if ranks.rank != 1:
        mailbox.limited.limit_seconds = 60.0
        mailbox.free()
        return
    with pytest.raises(MailboxError, match="nothing came"):
        mailbox.free()
    released.set()
    mailbox.limited.limit_seconds = 60.0
    assert mailbox._wait_until(lambda: not mailbox._puts, 60.0)
    mailbox._close()
