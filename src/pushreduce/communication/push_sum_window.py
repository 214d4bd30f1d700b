"""PushSum's mailbox over one-sided MPI: a message costs its receiver's main thread nothing until it is applied.

Owns two windows (the slots, as bytes, and the counters, as int64), the send buffers, and one helper thread. Which slot
a message takes and when is `mailbox.py`'s; whether MPI keeps its promises is found out by `mailbox_check.py`.

A message is published in this order, since MPI orders nothing inside one put: put of all of it; Flush; then its number
into the receiver's counter, by an atomic Accumulate; Flush. The main thread begins the put where it can, the helper
thread does the rest while the main thread computes. A Flush spins, and takes a core from computation: so that thread
sleeps between looks at a put's requests, and flushes when they are done. And a Flush waits for all that is on its way
to a rank: a put begins when the message before it, to the same receiver, has been published, and other counters are
set between puts to their rank, as a rule. Between hosts both ends of a put need to enter MPI now and then: Horovod's
background thread does, the helper thread while it waits, and every wait here.

Rules that implementations impose: `Win.Allocate` only (memory of one's own loses data on some), no atomics but on
int64, both datatypes of an Accumulate named alike (MPICH refuses a mixture), windows unlocked before MPI's
finalisation. And mpi4py's upper-case calls only, in the program that has a mailbox, too: the first pickled collective
on a communicator keeps the interpreter's lock until all ranks have come, and the helper thread from publishing.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass

import mpi4py
import numpy as np
from numpy.typing import NDArray

from pushreduce.communication.mailbox import Bytes, Mailbox, MailboxError, WaitUntil
from pushreduce.communication.topology import Topology

mpi4py.rc.initialize = False  # whoever makes a mailbox has started MPI, with what it needs in the environment
from mpi4py import MPI  # noqa: E402

_ALIGNMENT_BYTES = 64
_MAX_PROBLEM_BYTES = 400
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5e-5, 1e-3
_PAUSE_SHARE = 1 / 8
"""The helper thread's pause between two looks at what is under way, of the time in which nothing has happened."""
_COUNTER = MPI.INT64_T

_Slots = list[tuple[int, tuple[int, int]]]


@dataclass(eq=False)
class _Put:
    """A message on its way to one receiver, which has not been told of it yet."""

    to: int
    slot: tuple[int, int]
    round_number: int
    buffer: Bytes
    """Lent; shared by the receivers of a message."""
    requests: list[MPI.Request] | None = None
    """None: not begun."""


@dataclass(eq=False)
class _Owed:
    """A counter to be set at `to`: a grant, or an empty message, which waits until its round is granted."""

    to: int
    index: int
    value: int
    awaited_round: int | None = None


class PushSumWindow(Mailbox):
    """See `Mailbox`. MPI runs at MPI_THREAD_MULTIPLE. Collective; until `free()` the windows are locked.

    Args:
        communicator: of all ranks of the topology; duplicated.

    Raises:
        ValueError: on all ranks alike, where no window can be made, or its memory is not what others write to.
    """

    def __init__(
        self,
        communicator: MPI.Intracomm,
        topology: Topology,
        *,
        num_payload_bytes: int,
        num_slot_rounds: int,
        wait_until: WaitUntil,
    ) -> None:
        super().__init__(
            communicator.rank,
            topology,
            num_payload_bytes=num_payload_bytes,
            num_slot_rounds=num_slot_rounds,
            wait_until=wait_until,
        )
        assert topology.size == communicator.size
        assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._communicator = communicator.Dup()
        num_slots = num_slot_rounds * self.num_places
        self._slots, self._counters = self._make_windows(
            num_slots * self.num_message_bytes + _ALIGNMENT_BYTES,
            num_slots + topology.size * num_slot_rounds,
        )
        # MPI aligns to 8 or 16 bytes, differently on each rank.
        memory = np.asarray(self._slots.tomemory())
        start = -memory.ctypes.data % _ALIGNMENT_BYTES
        self._starts = np.empty(topology.size, np.int64)
        self._communicator.Allgather(np.array([start], np.int64), self._starts)
        self._memory = memory[start : start + num_slots * self.num_message_bytes].reshape(
            num_slot_rounds, self.num_places, self.num_message_bytes
        )
        counters = np.asarray(self._counters.tomemory()).view(np.int64)
        self._arrived = counters[:num_slots].reshape(num_slot_rounds, self.num_places)
        self._granted = counters[num_slots:].reshape(topology.size, num_slot_rounds)
        self._put_ranges = [slice(0, self.num_message_bytes)]

        self._num_buffers = 0
        self._free_buffers: deque[Bytes] = deque()
        self._puts: list[_Put] = []  # the main thread appends to both lists, the helper thread removes
        self._owed: list[_Owed] = []
        # Not a SimpleQueue: its get(timeout) may wait for ever where its thread gets the processor after the timeout
        # (CPython 3.11: the time that is left becomes negative, which it takes for none given).
        self._has_work = threading.Event()
        self._is_closing = False
        self._failure: BaseException | None = None
        self._slots.Lock_all(MPI.MODE_NOCHECK)  # nobody locks exclusively
        self._counters.Lock_all(MPI.MODE_NOCHECK)
        self._zero_counters()
        self._helper = threading.Thread(target=self._help, name="mailbox", daemon=True)
        self._helper.start()

    def _make_windows(self, num_slot_bytes: int, num_counters: int) -> tuple[MPI.Win, MPI.Win]:
        """The windows (slots, counters); agreed upon by all ranks."""
        problem, windows = "", []
        for num_bytes, unit in ((num_slot_bytes, 1), (8 * num_counters, 8)):
            try:
                windows.append(MPI.Win.Allocate(num_bytes, unit, comm=self._communicator))
            except MPI.Exception as error:
                problem = f"a window of {num_bytes} bytes cannot be made ({error.error_string})"
            else:
                if windows[-1].model != MPI.WIN_UNIFIED:
                    problem = "windows hold two copies of their memory (they are not MPI_WIN_UNIFIED)"
            problems = np.empty(self._communicator.size, f"S{_MAX_PROBLEM_BYTES}")
            own = np.array([problem.encode()], problems.dtype)
            self._communicator.Allgather([own, MPI.BYTE], [problems, MPI.BYTE])
            if any(problems):
                raise ValueError(next(filter(None, problems)).decode(errors="replace"))
        return windows[0], windows[1]

    # -- the main thread -------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Back to a mailbox that has not been used; collective. All that was sent has been received."""
        self._check_open()
        self._meet()
        self._zero_counters()
        self._put_ranges = [slice(0, self.num_message_bytes)]
        self._own_round = -1
        self.begin_at(0)

    def send_ends_only(self, num_bytes: int) -> None:
        """Until `restart()` only the first and the last `num_bytes` of a longer message are sent, by two puts."""
        assert not self._puts
        if 2 * num_bytes < self.num_message_bytes:
            end = self.num_message_bytes
            self._put_ranges = [slice(0, num_bytes), slice(end - num_bytes, end)]

    def _slot_memory(self, s: int, p: int) -> Bytes:
        return self._memory[s, p]

    def _take_buffer(self) -> Bytes:
        if not self._free_buffers:
            if self._num_buffers < self.num_slot_rounds:
                self._num_buffers += 1
                return _aligned(self.num_message_bytes)

            def is_free() -> bool:
                self._check_failure()
                self._communicator.Iprobe()  # progress of the messages that have the buffers
                return bool(self._free_buffers)

            self._wait_until(is_free, math.inf)
        return self._free_buffers.popleft()

    def _put(self, buffer: Bytes, round_number: int, slots: _Slots) -> None:
        self._check_failure()
        if not slots:
            self._free_buffers.append(buffer)
            return
        puts = [_Put(to, slot, round_number, buffer) for to, slot in slots]
        occupied = {put.to for put in list(self._puts)}
        for put in puts:
            if put.to not in occupied:
                self._begin(put)
        self._puts.extend(puts)
        self._has_work.set()

    def _begin(self, put: _Put) -> None:
        s, p = put.slot
        start = int(self._starts[put.to]) + (s * self.num_places + p) * self.num_message_bytes
        requests = []
        for part in self._put_ranges:
            # In words: a count of bytes would not fit MPI's int from 2 GiB on.
            words = (part.stop - part.start) // 8
            source, target = (put.buffer[part], words, _COUNTER), (start + part.start, words, _COUNTER)
            requests.append(self._slots.Rput(source, put.to, target))
        put.requests = requests

    def _publish_empty(self, round_number: int, to: int, slot: tuple[int, int]) -> None:
        self._owed.append(_Owed(to, self._arrived_index(slot), -(round_number + 1), round_number))
        self._has_work.set()

    def _grant(self, round_number: int, to: int, s: int) -> None:
        index = self._arrived.size + self.rank * self.num_slot_rounds + s
        self._owed.append(_Owed(to, index, round_number + 1))
        self._has_work.set()

    def _read_arrived(self) -> NDArray[np.int64]:
        self._check_failure()
        self._communicator.Iprobe()  # progress: messages on the way to this rank
        self._counters.Sync()
        arrived = self._arrived.copy()
        self._slots.Sync()
        return arrived

    def _read_granted(self, receiver: int, s: int) -> int:
        self._check_failure()
        self._communicator.Iprobe()
        self._counters.Sync()
        return int(self._granted[receiver, s])

    def _free(self) -> None:
        self._meet()
        self._close()

    def _close(self) -> None:
        self._is_closing = True
        self._has_work.set()
        self._helper.join()
        assert not self._puts, "a message is under way"
        # numpy's views of the memory end with it, and the send buffers even where this object is kept.
        del self._memory, self._arrived, self._granted, self._free_buffers
        for window in (self._counters, self._slots):
            window.Unlock_all()
            window.Free()
        self._communicator.Free()

    def _meet(self) -> None:
        """Returns when all ranks have come and this rank's messages have arrived.

        In this order: until all have come, others may still need the empty messages that this rank owes them. Whoever
        owes one afterwards (the program ends early) keeps it.
        """
        self._complete(self._communicator.Ibarrier())

        def is_idle() -> bool:
            self._check_failure()
            self._communicator.Iprobe()  # progress: another rank may be flushing
            return not self._puts and all(owed.awaited_round is not None for owed in list(self._owed))

        self._wait_until(is_idle, math.inf)

    def _zero_counters(self) -> None:
        """All counters 0 on all ranks; collective. Nothing of this rank's is under way."""
        self._complete(self._communicator.Ibarrier())  # nor of another's
        self._arrived[:] = 0
        self._granted[:] = 0
        self._counters.Sync()
        self._complete(self._communicator.Ibarrier())

    def _complete(self, request: MPI.Request) -> None:
        self._wait_until(request.Test, math.inf)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise MailboxError(f"the mailbox of rank {self.rank} has failed") from self._failure

    # -- the helper thread -----------------------------------------------------------------------------------------

    def _help(self) -> None:
        """Tends what the main thread has put into the lists, until that closes the mailbox."""
        last_event = time.perf_counter()
        try:
            while True:
                pause = _PAUSE_SHARE * (time.perf_counter() - last_event)
                pause = min(max(pause, _SHORTEST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
                self._has_work.wait(pause if self._puts or self._owed else None)
                is_new = self._has_work.is_set()
                self._has_work.clear()  # before the looks: what comes after them sets it again
                if self._is_closing:
                    return
                has_published = self._tend_puts()
                num_paid = 0
                for to in {owed.to for owed in list(self._owed)}:
                    if all(put.to != to for put in list(self._puts)):
                        num_paid += self._pay(to)
                if is_new or has_published or num_paid:
                    last_event = time.perf_counter()
        except BaseException as error:
            self._failure = error  # for the main thread, whose next call raises it
            raise  # to threading.excepthook, which prints it

    def _tend_puts(self) -> bool:
        """Begins the puts that nothing is before any more, and publishes those that are done; whether any was."""
        occupied, has_published = set(), False
        for put in list(self._puts):
            if put.to in occupied:
                continue
            if put.requests is None:
                self._begin(put)
            assert put.requests is not None
            if not MPI.Request.Testall(put.requests):
                occupied.add(put.to)
                continue
            self._publish(put)
            self._pay(put.to)  # before the next put to that rank can begin
            self._puts.remove(put)
            if all(other.buffer is not put.buffer for other in list(self._puts)):
                self._free_buffers.append(put.buffer)
            has_published = True
        return has_published

    def _publish(self, put: _Put) -> None:
        self._slots.Flush(put.to)  # done requests say that the buffer has been read, and no more
        self._set_counter(put.to, self._arrived_index(put.slot), put.round_number + 1)

    def _pay(self, to: int) -> int:
        """Sets the counters that are due to a rank to which no put is on its way; how many there were."""
        num_paid = 0
        for owed in list(self._owed):
            if owed.to == to and (owed.awaited_round is None or self._is_granted(owed.awaited_round, to)):
                self._set_counter(to, owed.index, owed.value)
                self._owed.remove(owed)
                num_paid += 1
        return num_paid

    def _set_counter(self, to: int, index: int, value: int) -> None:
        number = np.array([value], np.int64)  # MPI may read it until the flush
        self._counters.Accumulate([number, 1, _COUNTER], to, (index, 1, _COUNTER), op=MPI.REPLACE)
        self._counters.Flush(to)

    def _arrived_index(self, slot: tuple[int, int]) -> int:
        return slot[0] * self.num_places + slot[1]


def _aligned(num_bytes: int) -> Bytes:
    memory = np.zeros(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + num_bytes]
