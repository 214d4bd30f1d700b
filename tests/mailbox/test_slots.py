"""What a slot brings, when it is free again, and what is refused, on a ring: every rank sends to the next one."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from mpi4py import MPI

from pushreduce.communication import push_sum_window
from pushreduce.communication.mailbox import MailboxError
from pushreduce.communication.push_sum_window import PushSumWindow
from pushreduce.communication.topology import build_topology


def send(mailbox, round_number, payload):
    assert mailbox.reserve(round_number, (mailbox.rank + 1) % mailbox.topology.size)
    mailbox.outgoing()[:] = payload
    mailbox.send(round_number, [(mailbox.rank + 1) % mailbox.topology.size], 0.25 + round_number)


def take(mailbox, round_number):
    """The messages that complete `round`, as (round, source, weight, payload)."""
    found = []

    def apply(message):
        found.append((message.round_number, message.source, message.weight, message.payload.copy()))

    mailbox.wait(lambda: mailbox.num_rounds_received > round_number, round_number, apply)
    return found


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 65, 100_003])
def test_every_byte_arrives(ranks, num_bytes):
    mailbox = ranks.open(num_payload_bytes=num_bytes)
    for round_number in range(7):
        payloads = np.random.default_rng(round_number).integers(0, 256, (ranks.size, num_bytes), np.uint8)
        send(mailbox, round_number, payloads[ranks.rank])
        ((number, source, weight, payload),) = take(mailbox, round_number)
        assert (number, source, weight) == (round_number, (ranks.rank - 1) % ranks.size, 0.25 + round_number)
        assert np.array_equal(payload, payloads[source])
    mailbox.free()


def test_payloads_are_aligned(ranks):
    mailbox = ranks.open(num_payload_bytes=65, num_slot_rounds=3)
    assert mailbox.outgoing().ctypes.data % 64 == 0
    for s in range(3):
        assert mailbox._slot_memory(s, 0).ctypes.data % 64 == 0
    mailbox.free()


def test_a_message_waits_for_its_round(ranks):
    mailbox = ranks.open(num_slot_rounds=3)
    for round_number in range(3):
        send(mailbox, round_number, round_number)
    mailbox.wait(lambda: mailbox._read_arrived().all(), 0, lambda message: None)
    mailbox.receive(0, lambda message: None)
    assert mailbox.num_rounds_received == 1
    assert not mailbox.has_news()
    assert [number for number, *_ in take(mailbox, 2)] == [1, 2]
    mailbox.free()


def test_a_sender_without_patience_keeps_its_mass(ranks):
    mailbox = ranks.open(num_slot_rounds=2)
    to = (ranks.rank + 1) % ranks.size
    for round_number in range(2):
        send(mailbox, round_number, round_number)
    ranks.allgather(None)  # nobody has received yet
    for round_number in range(2, 5):
        assert not mailbox.reserve(round_number, to, patience_seconds=0.0)
        mailbox.skip(round_number, to)
    ranks.allgather(None)
    assert [number for number, *_ in take(mailbox, 4)] == [0, 1]
    send(mailbox, 5, 5)
    assert [number for number, *_ in take(mailbox, 5)] == [5]
    mailbox.free()


def test_buffers_are_lent_until_the_message_has_left(ranks):
    mailbox = ranks.open(num_payload_bytes=4_000_000, num_slot_rounds=4)
    for round_number in range(16):
        send(mailbox, round_number, round_number)  # which writes into a buffer at once
        if round_number % 4 == 3:
            found = take(mailbox, round_number)
            numbers = sorted(number for number, *_ in found)  # nothing orders two messages
            assert numbers == list(range(round_number - 3, round_number + 1))
            assert all((payload == number).all() for number, _, _, payload in found)
    assert mailbox._num_buffers <= 4
    mailbox.free()


class Held(PushSumWindow):
    """The puts of `held_rounds` are done when the test says so."""

    def __init__(self, *args, **kwargs):
        self.held: dict[int, MPI.Grequest] = {}
        self.held_rounds: set[int] = set()
        self.begun: list[int] = []
        self.num_looks = 0
        super().__init__(*args, **kwargs)

    def _begin(self, put):
        super()._begin(put)
        self.begun.append(put.round_number)
        if put.round_number in self.held_rounds:
            self.held[put.round_number] = MPI.Grequest.Start()
            put.requests.append(self.held[put.round_number])

    def _tend_puts(self):
        self.num_looks += 1
        return super()._tend_puts()

    def wait_for_looks(self):
        begin = self.num_looks
        assert self._wait_until(lambda: self.num_looks >= begin + 3, 60.0), "the helper thread sleeps"


def test_a_message_waits_for_an_earlier_one_to_the_same_receiver_and_for_nothing_else(ranks):
    topology = build_topology("exponential", ranks.size)
    num_rounds = topology.period + 1
    mailbox = ranks.open(topology, num_payload_bytes=1000, num_slot_rounds=num_rounds, kind=Held)
    mailbox.held_rounds = {0}
    rounds_by_receiver: dict[int, list[int]] = {}
    for round_number in range(num_rounds):
        (to,) = topology.out_neighbours(ranks.rank, round_number)
        rounds_by_receiver.setdefault(to, []).append(round_number)
        assert mailbox.reserve(round_number, to)
        mailbox.outgoing()[:] = round_number
        mailbox.send(round_number, [to], 1.0)
    behind = rounds_by_receiver[topology.out_neighbours(ranks.rank, 0)[0]][1:]
    others = [number for number in range(1, num_rounds) if number not in behind]

    def has_come(number: int) -> bool:
        return mailbox._read_arrived()[number, 0] == number + 1

    assert mailbox._wait_until(lambda: all(map(has_come, others)), 60.0)
    assert behind  # the last one at least
    assert sorted(mailbox.begun) == [0, *others]
    assert not any(map(has_come, [0, *behind]))
    ranks.allgather(None)
    mailbox.held[0].Complete()
    assert sorted(number for number, *_ in take(mailbox, num_rounds - 1)) == list(range(num_rounds))
    mailbox.free()


def test_a_grant_waits_for_a_put_to_the_same_rank_and_for_nothing_else(ranks):
    """Rank 0's two puts to rank 1 are held, the second of which waits for the first."""
    mailbox = ranks.open(num_payload_bytes=1000, num_slot_rounds=3, kind=Held)
    to, is_last = (ranks.rank + 1) % ranks.size, ranks.rank == ranks.size - 1
    if ranks.rank == 0:
        mailbox.held_rounds = {0, 1}
    send(mailbox, 0, 0)
    send(mailbox, 1, 1)
    if ranks.rank == 0:
        take(mailbox, 0)  # the last rank's: it may send again, if it is told
        mailbox.wait_for_looks()
    ranks.allgather(None)
    if is_last and ranks.size == 2:
        assert not mailbox.is_granted(3, to)
    elif is_last:
        assert mailbox.reserve(3, to)
    ranks.allgather(None)
    if ranks.rank == 0:
        mailbox.held[0].Complete()
    if is_last:
        assert mailbox.reserve(3, to)  # between the two puts
    ranks.allgather(None)
    if ranks.rank == 0:
        assert mailbox._wait_until(lambda: 1 in mailbox.held, 60.0)
        mailbox.held[1].Complete()
    take(mailbox, 1)
    mailbox.free()


def test_the_helper_thread_looks_again_when_it_is_slower_than_its_pauses(ranks, monkeypatch):
    """On a crowded machine it gets no processor for longer than it wanted to sleep."""
    monkeypatch.setattr(push_sum_window, "_SHORTEST_PAUSE_SECONDS", 1e-9)
    monkeypatch.setattr(push_sum_window, "_LONGEST_PAUSE_SECONDS", 1e-9)
    mailbox = ranks.open(num_payload_bytes=1000, num_slot_rounds=3, kind=Held)
    for round_number in range(300):
        mailbox.held_rounds = {round_number}
        send(mailbox, round_number, 1)
        mailbox.wait_for_looks()
        mailbox.held[round_number].Complete()
        ((number, *_),) = take(mailbox, round_number)
        assert number == round_number
        assert mailbox._wait_until(lambda: not mailbox._puts, 60.0)  # else the next is not begun at once
    mailbox.free()


def test_what_is_sent_to_nobody_gives_its_buffer_back(ranks):
    mailbox = ranks.open(num_slot_rounds=2)
    for round_number in range(4):
        mailbox.outgoing()
        mailbox.send(round_number, [], 0.0)
    mailbox.free()


def test_it_may_begin_at_any_round(ranks):
    mailbox = ranks.open(num_slot_rounds=3)
    mailbox.begin_at(1_000_007)
    for round_number in range(1_000_007, 1_000_017):
        send(mailbox, round_number, round_number % 256)
        ((number, *_),) = take(mailbox, round_number)
        assert number == round_number
    mailbox.free()


def test_it_begins_anew_after_a_restart(ranks):
    mailbox = ranks.open(num_slot_rounds=2)
    for _ in range(3):
        for round_number in range(5):
            send(mailbox, round_number, 7 * round_number)
            ((number, *_),) = take(mailbox, round_number)
            assert number == round_number
        mailbox.restart()
    mailbox.free()


@pytest.mark.parametrize("place", [0, 8, 16, -8])
def test_a_damaged_message_is_refused(ranks, place):
    """A byte of the mark, the round, the source, the end mark."""
    mailbox = ranks.open()
    send(mailbox, 0, 1)
    mailbox.wait(lambda: mailbox._read_arrived().any(), -1, lambda message: None)
    mailbox._slot_memory(0, 0)[place] ^= 0x55
    with pytest.raises(MailboxError, match="lost, torn or overwritten"):
        mailbox.receive(0, lambda message: None)
    mailbox.free()


def test_it_can_be_freed_twice_and_then_not_be_used(ranks):
    mailbox = ranks.open()
    to = (ranks.rank + 1) % ranks.size
    mailbox.free()
    mailbox.free()
    for use in (
        lambda: mailbox.reserve(0, to),
        mailbox.outgoing,
        lambda: mailbox.send(0, [to], 1.0),
        lambda: mailbox.skip(0, to),
        lambda: mailbox.receive(0, lambda message: None),
        mailbox.restart,
    ):
        with pytest.raises(RuntimeError, match="has been freed"):
            use()


def test_it_can_be_freed_with_messages_unread_and_owed(ranks):
    """A program may end early."""
    mailbox = ranks.open(num_payload_bytes=1_000_000, num_slot_rounds=2)
    for round_number in range(2):
        send(mailbox, round_number, 1)
    mailbox.skip(2, (ranks.rank + 1) % ranks.size)
    mailbox.free()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_fails_in_the_helper_thread_fails_here(ranks):
    class Broken(PushSumWindow):
        def _publish(self, put):
            raise ZeroDivisionError

    mailbox = ranks.open(kind=Broken)
    send(mailbox, 0, 1)
    with pytest.raises(MailboxError, match="has failed") as raised:
        take(mailbox, 0)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    mailbox._failure = None
    mailbox._puts.clear()  # done: only then it fails
    mailbox.free()
