"""The simulated cluster's mailbox: one-sided puts in virtual time, as adversarial as MPI allows them to be.

Owns when bytes and counters of a message appear at its receiver, and the detection of misuse that real windows cannot
see. Does not own the protocol (`mailbox.py`) or how long a put takes (`simulated_transport.py`).

Nothing orders two messages, nor a message and a counter of another one; a slot holds part of a message and garbage from
the moment of its put until just before its counter changes. Only the counter that two grants share takes them in
order, as MPI promises for accumulates by one rank in one place.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pushreduce.communication.mailbox import Apply, Bytes, Mailbox, Message
from pushreduce.communication.topology import Topology
from pushreduce.communication.virtual_time import Scheduler

_GARBAGE = 0xFF  # NaN in every floating type


class SimulatedMailbox(Mailbox):
    """One rank's mailbox in a simulated run; see `Mailbox`.

    Raises, besides what the contract says, AssertionError with rank and round: a message goes into a slot that its
    receiver has not advanced to that round; a buffer changes before it has left; a message is applied twice; something
    is in flight at `free`.

    Args:
        put, put_counter: as `Transport`'s.
        barrier: the communicator's.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        *,
        num_payload_bytes: int,
        num_slot_rounds: int,
        scheduler: Scheduler,
        put: Callable[[int, int, int, Callable[[], None]], None],
        put_counter: Callable[[int, int, Callable[[], None]], None],
        barrier: Callable[[], None],
    ) -> None:
        super().__init__(
            rank,
            topology,
            num_payload_bytes=num_payload_bytes,
            num_slot_rounds=num_slot_rounds,
            wait_until=scheduler.wait_until,
        )
        self._scheduler, self._barrier = scheduler, barrier
        self._transport_put, self._transport_counter = put, put_counter
        self._mailboxes: Mapping[int, SimulatedMailbox] = {}
        shape = (num_slot_rounds, self.num_places)
        self._slots = np.full((*shape, self.num_message_bytes), _GARBAGE, np.uint8)
        self._arrived = np.zeros(shape, np.int64)
        self._granted = np.zeros((topology.size, num_slot_rounds), np.int64)
        self._counters_changed = False  # since `receive` or `has_news` found nothing more
        self._claimed = np.full(
            shape, -1
        )  # the last round whose sender wrote into each slot, or said that it skips
        self._applied = np.full(shape, -1)  # the last round whose payload was handed out
        self._grants_under_way: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
        self._skips: list[tuple[int, int, tuple[int, int]]] = []  # (round, to, slot), not granted yet
        # As many messages can be under way as on real ranks before `outgoing` waits.
        self._buffers: list[Bytes] = [
            np.zeros(self.num_message_bytes, np.uint8) for _ in range(num_slot_rounds)
        ]

    def connect(self, mailboxes: Mapping[int, SimulatedMailbox]) -> None:
        """Makes the mailboxes of all ranks, by rank, known to this one."""
        self._mailboxes = mailboxes

    # -- sending ---------------------------------------------------------------------------------------------------

    def _take_buffer(self) -> Bytes:
        self._wait_until(lambda: bool(self._buffers), float("inf"))
        return self._buffers.pop()

    def _put(self, buffer: Bytes, round_number: int, slots: list[tuple[int, tuple[int, int]]]) -> None:
        lent = buffer.copy()
        under_way = {to for to, _ in slots}
        for to, slot in slots:
            self._claim(round_number, to, slot)
            memory = self._mailboxes[to]._slot_memory(*slot)
            seen_early = self._scheduler.random.randrange(self.num_message_bytes + 1)
            memory[:seen_early], memory[seen_early:] = buffer[:seen_early], _GARBAGE
            land = partial(self._land, buffer, lent, under_way, round_number, to, slot)
            self._transport_put(self.rank, to, self.num_message_bytes, land)
        if not slots:
            self._buffers.append(buffer)

    def _land(
        self,
        buffer: Bytes,
        lent: Bytes,
        under_way: set[int],
        round_number: int,
        to: int,
        slot: tuple[int, int],
    ) -> None:
        if not np.array_equal(buffer, lent):
            raise AssertionError(
                f"rank {self.rank} changed its message of round {round_number} to {to} under way"
            )
        self._mailboxes[to]._slot_memory(*slot)[:] = buffer
        self._publish(round_number + 1, to, slot)
        under_way.remove(to)
        if not under_way:
            self._buffers.append(buffer)

    def _publish_empty(self, round_number: int, to: int, slot: tuple[int, int]) -> None:
        self._skips.append((round_number, to, slot))
        self._publish_granted_skips()

    def _publish_granted_skips(self) -> None:
        skips, self._skips = self._skips, []
        for round_number, to, slot in skips:
            if self._is_granted(round_number, to):
                self._claim(round_number, to, slot)
                self._publish(-(round_number + 1), to, slot)
            else:
                self._skips.append((round_number, to, slot))

    def _claim(self, round_number: int, to: int, slot: tuple[int, int]) -> None:
        receiver = self._mailboxes[to]
        unread, expected = receiver._unread(slot), int(receiver._expected[slot])
        # A receiver that has not begun may have `begin_at` before it.
        if unread is not None or (receiver._own_round >= receiver._first_round and expected != round_number):
            holds = f"holds round {unread}, unread" if unread is not None else f"awaits round {expected}"
            raise AssertionError(
                f"rank {self.rank} writes its message of round {round_number} into a slot of rank {to} that {holds}"
            )
        receiver._claimed[slot] = round_number

    def _publish(self, value: int, to: int, slot: tuple[int, int]) -> None:
        def arrive() -> None:
            self._mailboxes[to]._arrived[slot] = value
            self._mailboxes[to]._counters_changed = True

        self._transport_counter(self.rank, to, arrive)

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive(self, own_round: int, apply: Apply) -> None:
        self._counters_changed = False
        super().receive(own_round, apply)

    def has_news(self) -> bool:
        # Every waiting rank is asked after every event of any rank: at 256 ranks the flag spares 4/5 of a run's time.
        self._counters_changed = self._counters_changed and super().has_news()
        return self._counters_changed

    def _slot_memory(self, s: int, p: int) -> Bytes:
        return self._slots[s, p]

    def _checked_message(self, round_number: int, source: int, memory: Bytes) -> Message:
        message = super()._checked_message(round_number, source, memory)
        slot = (
            round_number % self.num_slot_rounds,
            self.topology.in_neighbours(self.rank, round_number).index(source),
        )
        if self._applied[slot] >= round_number:
            raise AssertionError(f"rank {self.rank} applies round {round_number} of rank {source} twice")
        self._applied[slot] = round_number
        return message

    def _grant(self, round_number: int, to: int, s: int) -> None:
        self._grants_under_way[to, s].append(round_number + 1)

        def arrive() -> None:
            sender = self._mailboxes[to]
            sender._granted[self.rank, s] = self._grants_under_way[to, s].popleft()
            sender._publish_granted_skips()

        self._transport_counter(self.rank, to, arrive)

    def _read_arrived(self) -> NDArray[np.int64]:
        return self._arrived

    def _read_granted(self, receiver: int, s: int) -> int:
        return int(self._granted[receiver, s])

    def _unread(self, slot: tuple[int, int]) -> int | None:
        """The round of the message that has been begun in `slot`, and that this rank has yet to take out."""
        claimed = int(self._claimed[slot])
        return claimed if claimed >= self._expected[slot] else None

    # -- end -------------------------------------------------------------------------------------------------------

    def _free(self) -> None:
        # A rank that has received all may still have skips waiting for a grant: they go on until all are here.
        self._barrier()
        if self._skips:
            raise AssertionError(
                f"rank {self.rank} frees its mailbox with {self._skips[0]} (round, to, slot) to skip"
            )
        for s, p in np.ndindex(self.num_slot_rounds, self.num_places):
            if (unread := self._unread((s, p))) is not None:
                raise AssertionError(
                    f"rank {self.rank} frees its mailbox with its slot of round {unread} unread"
                )
