"""PushSum's mailbox: slots of the receiver's memory that senders write into, one slot a round and in-neighbour.

Owns which slot a message takes, when its sender may write, when its receiver may apply it, and what is checked on it.
How bytes and counters reach another rank is the subclass's: `push_sum_window.py` (MPI), `simulated_mailbox.py`.
Needs NumPy only, and knows nothing of what a payload holds.

A *round* is a sending round, counted from 0 alike on all ranks; the topology says who sends to whom in it. Round k uses
the slots k mod num_slot_rounds, one for each place p in the receiver's list of in-neighbours. A slot goes through

    granted to the sender of round k -> written -> published -> applied, once the receiver's own round is k or later
    -> granted to the sender that the topology has in the same place in round k + num_slot_rounds.

The grant goes to the *next* sender, which is another rank as a rule: an acknowledgement to the last one would free the
slot for the wrong one. Rounds in which a place has no sender pass by themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pushreduce.communication.topology import Topology

Bytes = NDArray[np.uint8]

HEADER_BYTES = 64
TRAILER_BYTES = 64
_MAGIC = 0x5055534852454455  # at both ends of a message, with its round
_HEADER = np.dtype([("magic", "<i8"), ("round", "<i8"), ("source", "<i8"), ("weight", "<f8")])


def num_message_bytes(num_payload_bytes: int) -> int:
    """Of a message, in multiples of 64 bytes, so that every payload is aligned as torch's own tensors are."""
    return HEADER_BYTES + -(-num_payload_bytes // 64) * 64 + TRAILER_BYTES


class MailboxError(RuntimeError):
    """A message was lost, torn or overwritten: the one-sided operations below do not keep their promises."""


class Message(NamedTuple):
    """A message as its receiver sees it."""

    round_number: int
    """The sending round."""
    source: int
    weight: float
    payload: Bytes
    """[num_payload_bytes], the slot itself: valid until the call that was given it returns."""


Apply = Callable[[Message], None]
WaitUntil = Callable[[Callable[[], bool], float], bool]
"""(predicate, timeout in seconds) -> whether the predicate became true; see `Communicator.wait_until`."""


class Mailbox(ABC):
    """One rank's mailbox. Opening and `free()` are collective; all else is this rank's own affair.

    One thread calls it. The receiver of a message takes no part in its transfer. Memory: max_in_degree x
    num_slot_rounds slots, the buffers of messages under way, and num_slot_rounds counters of 8 bytes a rank of the run.

    Args:
        rank: this rank.
        topology: who sends to whom; the same on all ranks.
        num_payload_bytes: of every message.
        num_slot_rounds: rounds that a slot waits until it is used again; tau + 2 for delays of up to tau rounds.
        wait_until: the communicator's.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        *,
        num_payload_bytes: int,
        num_slot_rounds: int,
        wait_until: WaitUntil,
    ) -> None:
        assert topology.size > 1, "one rank alone has nobody to write to"
        assert num_slot_rounds >= 1
        assert num_payload_bytes > 0
        self.rank, self.topology = rank, topology
        self.num_payload_bytes, self.num_slot_rounds = num_payload_bytes, num_slot_rounds
        self.num_places = topology.max_in_degree
        self.num_message_bytes = num_message_bytes(num_payload_bytes)
        self._wait_until = wait_until
        self._first_round = 0
        self._expected = np.arange(num_slot_rounds)[:, None].repeat(self.num_places, axis=1)
        """[num_slot_rounds, num_places]: the round whose message each slot is to bring next."""
        self._own_round = -1
        self._outgoing: Bytes | None = None
        self._open = True

    # -- sending ---------------------------------------------------------------------------------------------------

    def reserve(self, round_number: int, to: int, *, patience_seconds: float = float("inf")) -> bool:
        """Waits until the slot of the round at `to` may be written; returns whether it may. Receives nothing.

        False (after `patience_seconds`): keep the mass, and call `skip`. Nobody waits here for ever: the ranks that are
        furthest behind have applied all but the last rounds' messages, so they find their slots free.
        """
        return self._wait_until(lambda: self.is_granted(round_number, to), patience_seconds)

    def outgoing(self) -> Bytes:
        """Memory [num_payload_bytes] for the payload of the next `send`; waits until an earlier one has left it."""
        self._check_open()
        if self._outgoing is None:
            self._outgoing = self._take_buffer()
        return self._payload_of(self._outgoing)

    def send(self, round_number: int, to: Sequence[int], weight: float) -> None:
        """Starts the transfer of what `outgoing()` holds to ranks whose slots are reserved. Returns at once."""
        self._check_open()
        assert self._outgoing is not None, "write to outgoing() first"
        buffer, self._outgoing = self._outgoing, None
        self._header_of(buffer)[0] = (_MAGIC, round_number, self.rank, weight)
        self._trailer_of(buffer)[0] = _MAGIC ^ round_number
        self._put(buffer, round_number, [(receiver, self._slot(round_number, receiver)) for receiver in to])

    def skip(self, round_number: int, to: int) -> None:
        """Tells `to` that this rank's message of `round` stays out, as soon as the slot is free. Returns at once."""
        self._check_open()
        self._publish_empty(round_number, to, self._slot(round_number, to))

    def is_granted(self, round_number: int, to: int) -> bool:
        """Whether this rank may write its message of the round into the slot at `to`."""
        self._check_open()
        return self._is_granted(round_number, to)

    def _is_granted(self, round_number: int, to: int) -> bool:
        """In `free()`, too, where empty messages that are owed may still be needed."""
        assert self.rank in self.topology.in_neighbours(to, round_number), f"{to} expects nothing"
        if round_number < self._first_round + self.num_slot_rounds:
            return True  # nobody has used it yet
        return self._read_granted(to, round_number % self.num_slot_rounds) >= round_number + 1

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive(self, own_round: int, apply: Apply) -> None:
        """Calls `apply` with every message that has arrived, of rounds up to `own_round`, each exactly once.

        Raises:
            MailboxError: a message is not what its slot was to bring.
        """
        self._check_open()
        assert own_round >= self._own_round, "a rank's own round never falls"
        self._own_round = own_round
        arrived = self._read_arrived()
        for s, p in np.ndindex(*self._expected.shape):
            while (round_number := int(self._expected[s, p])) <= own_round:
                senders = self.topology.in_neighbours(self.rank, round_number)
                if p < len(senders):
                    if abs(arrived[s, p]) != round_number + 1:
                        break
                    if arrived[s, p] > 0:
                        apply(self._checked_message(round_number, senders[p], self._slot_memory(s, p)))
                self._advance(round_number, s, p)

    def has_news(self) -> bool:
        """Whether `receive` with the same own round would find something. Looks at this rank's memory only."""
        arrived = self._read_arrived()
        due = self._expected <= self._own_round
        return bool(np.any(due & (np.abs(arrived) == self._expected + 1)))

    def wait(self, condition: Callable[[], bool], own_round: int, apply: Apply) -> None:
        """Waits until `condition()`, receiving meanwhile."""
        self.receive(own_round, apply)
        while not condition():
            self._wait_until(lambda: condition() or self.has_news(), float("inf"))
            self.receive(own_round, apply)

    @property
    def num_rounds_received(self) -> int:
        """All messages to this rank of the rounds below have been applied, or were skipped."""
        return int(self._expected.min())

    # -- beginning and end -----------------------------------------------------------------------------------------

    def begin_at(self, round_number: int) -> None:
        """Sets the first round of a mailbox that has not been used; all ranks must do so alike."""
        assert self._own_round < 0, "the mailbox is in use"
        self._first_round = round_number
        slots = np.arange(self.num_slot_rounds)[:, None]
        self._expected[:] = round_number + (slots - round_number) % self.num_slot_rounds

    def free(self) -> None:
        """Gives the memory back; collective, idempotent. Nothing may be in flight; later use raises RuntimeError."""
        if self._open:
            self._open = False
            self._free()

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError("the mailbox has been freed: open another one")

    # -- slots -----------------------------------------------------------------------------------------------------

    def _slot(self, round_number: int, receiver: int) -> tuple[int, int]:
        """(slot round, place) of this rank's message of `round` at `receiver`."""
        place = self.topology.in_neighbours(receiver, round_number).index(self.rank)
        return round_number % self.num_slot_rounds, place

    def _advance(self, round_number: int, s: int, p: int) -> None:
        """The slot has served `round`: it is the next sender's."""
        # One counter a receiver and slot round is enough since the grants for it never overtake each other: the
        # algorithm's blocking rule keeps places of one slot round from being a whole turn apart.
        assert self._expected[s].min() >= round_number - self.num_slot_rounds + 1, (
            "receive every round's messages"
        )
        self._expected[s, p] = later = round_number + self.num_slot_rounds
        senders = self.topology.in_neighbours(self.rank, later)
        if p < len(senders):
            self._grant(later, senders[p], s)

    def _checked_message(self, round_number: int, source: int, memory: Bytes) -> Message:
        header, trailer = self._header_of(memory)[0], int(self._trailer_of(memory)[0])
        found = (int(header["magic"]), int(header["round"]), int(header["source"]), trailer)
        if found != (_MAGIC, round_number, source, _MAGIC ^ round_number):
            raise MailboxError(
                f"rank {self.rank} expected the message of round {round_number} from rank {source}; its slot holds "
                f"(mark, round, source, end mark) {found}: a message was lost, torn or overwritten"
            )
        return Message(round_number, source, float(header["weight"]), self._payload_of(memory))

    @staticmethod
    def _header_of(message: Bytes) -> NDArray:
        return message[: _HEADER.itemsize].view(_HEADER)

    def _payload_of(self, message: Bytes) -> Bytes:
        return message[HEADER_BYTES : HEADER_BYTES + self.num_payload_bytes]

    @staticmethod
    def _trailer_of(message: Bytes) -> NDArray[np.int64]:
        return message[-8:].view(np.int64)

    # -- what a subclass does --------------------------------------------------------------------------------------

    @abstractmethod
    def _slot_memory(self, s: int, p: int) -> Bytes:
        """This rank's slot, uint8 [num_message_bytes]."""

    @abstractmethod
    def _take_buffer(self) -> Bytes:
        """Memory for a message, uint8 [num_message_bytes], that no transfer reads; waits for one."""

    @abstractmethod
    def _put(self, buffer: Bytes, round_number: int, slots: list[tuple[int, tuple[int, int]]]) -> None:
        """Starts writing `buffer` into the slots [(receiver, (s, p))], then publishes: sets arrived[s, p] to round + 1.

        A receiver must see all of the message before the counter. The buffer is lent until it has left.
        """

    @abstractmethod
    def _publish_empty(self, round_number: int, to: int, slot: tuple[int, int]) -> None:
        """Sets arrived[slot] of `to` to -(round + 1), once round is granted; returns at once."""

    @abstractmethod
    def _grant(self, round_number: int, to: int, s: int) -> None:
        """Sets granted[own rank, s] of `to` to round + 1; returns at once."""

    @abstractmethod
    def _read_arrived(self) -> NDArray[np.int64]:
        """This rank's counters [num_slot_rounds, num_places], as they are now."""

    @abstractmethod
    def _read_granted(self, receiver: int, s: int) -> int:
        """This rank's counter granted[receiver, s], as it is now."""

    @abstractmethod
    def _free(self) -> None:
        """See `free`."""
