"""What a cluster takes for the program's own communication and computation, over sizes, within a time budget.

Owns what is timed, how often, and between whom. Everything goes through the communicator that training uses; what lies
below it (plain messages, all-reduces without Horovod, the ranks of a host) is asked of a `BelowTheCommunicator`, so
that the same measurements run in virtual time. Does not fit anything (`calibration.py`).

No two ranks' clocks are compared: a time is read from the clock of one rank, from what it does to what comes back. An
average is timed by the rank that enters it last, on purpose, since the others wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch

from pushreduce.communication.base import Communicator
from pushreduce.communication.mailbox import Mailbox, Message
from pushreduce.communication.topology import Topology
from pushreduce.simulation.calibration import Kind, Sample

T = TypeVar("T")

AVERAGE_BYTES = (8, 1 << 14, 1 << 17, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
MESSAGE_BYTES = (8, 1 << 20, 1 << 22, 1 << 24)
PUT_BYTES = (64, 1 << 20, 1 << 22, 1 << 24)
"""None between: a shaper lets a short burst pass faster than its rate, and MPI changes its protocol."""
IN_HOST_BYTES = (8, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
_ALWAYS_BYTES = 1 << 20
"""Sizes up to this one are measured even where the budget is too small for them."""
_NUM_REPETITIONS = (5, 25)
_NUM_WARM_UPS = (
    2  # the first of a name are negotiated in full, and every slot and buffer must have been touched
)
_NUM_WARM_UP_STEPS = 2
_NUM_STEPS = (5, 200)
_READY_SECONDS = 5e-3
"""After a barrier, which ranks leave up to a millisecond apart: until all of them wait for what comes."""
_RING_ROUNDS = 3
_TURN_ROUNDS = _RING_ROUNDS + 2
_STEPS_SHARE = 0.2
_SHARES: dict[Kind, float] = {
    "message": 0.1,
    "sum": 0.02,
    "average": 0.35,
    "put": 0.3,
    "in-host sum": 0.03,
}
"""Of the budget."""


class BelowTheCommunicator(Protocol):
    """`scripts/plain_mpi.py`, or virtual time's. Called by all ranks alike."""

    def message_seconds(self, first: int, second: int, num_bytes: int) -> float | None:
        """A message from rank `first` to rank `second`, one way: half of there and back. None but on `first`."""

    def sum_seconds(self, num_ranks: int) -> float | None:
        """An all-reduce of 8 bytes over the first `num_ranks` ranks. None but on rank 0."""

    def host_sum_seconds(self, num_bytes: int) -> float | None:
        """A sum over the ranks of each host in their shared memory, all hosts at once. None but on a host's first."""


class Measurer:
    """One rank's part of all measurements; every method is collective.

    Args:
        communicator: of at least two ranks.
        plain: what lies below it.
        budget_seconds: of all measurements together, roughly.
        say: told what comes next, on every rank.
        device: of what is averaged; where the program trains.

    Raises:
        ValueError: on all ranks alike; one rank, or hosts that do not have as many ranks each, in blocks.
    """

    def __init__(
        self,
        communicator: Communicator,
        plain: BelowTheCommunicator,
        *,
        budget_seconds: float,
        say: Callable[[str], None],
        device: torch.device,
    ) -> None:
        self._communicator, self._plain, self._device = communicator, plain, device
        self._budget_seconds, self._say = budget_seconds, say
        size = communicator.size
        if size == 1:
            raise ValueError("one rank has nobody to send to: start two or more, mpirun -np 2 ...")
        places = communicator.allgather((communicator.local_rank, communicator.local_size))
        ranks_per_host = places[0][1]
        for rank, (local_rank, local_size) in enumerate(places):
            if local_size != ranks_per_host or local_rank != rank % ranks_per_host:
                raise ValueError(
                    f"rank {rank} is number {local_rank} of {local_size} on its host: give every host the same number "
                    "of ranks, in blocks (ranks 0 and 1 on the first, 2 and 3 on the second)"
                )
        self.is_one_host = ranks_per_host == size
        """Every rank then counts as a host: links are the memory's."""
        self.ranks_per_host = 1 if self.is_one_host else ranks_per_host
        self.num_hosts = size // self.ranks_per_host
        self._leaders = range(0, size, self.ranks_per_host)

    def messages(self) -> list[Sample]:
        """Plain messages between the first ranks of neighbouring hosts, each pair in turn."""

        def one(num_bytes: int, repetition: int) -> float | None:
            self._communicator.barrier()
            return self._plain.message_seconds(*self._neighbours(repetition), num_bytes)

        return [
            self._sample("message", num_bytes, 2, partial(one, num_bytes))
            for num_bytes in self._ladder("message", MESSAGE_BYTES)
        ]

    def sums(self) -> list[Sample]:
        """All-reduces of 8 bytes by MPI alone, over all ranks and, where those are on several hosts, half of them."""
        size = self._communicator.size
        self._say("small all-reduces without Horovod")
        self._start("sum")
        return [
            self._sample("sum", 8, num_ranks, lambda _, n=num_ranks: self._plain.sum_seconds(n))  # type: ignore[misc]
            for num_ranks in (size // 2, size)
            if num_ranks > self.ranks_per_host
        ]

    def averages(self) -> list[Sample]:
        """The communicator's averages over all ranks, from the last rank's entry; each rank is last in turn."""
        communicator = self._communicator

        def one(buffer: torch.Tensor, result: torch.Tensor, repetition: int) -> float | None:
            is_last = repetition % communicator.size == communicator.rank
            communicator.barrier()
            if is_last:
                communicator.clock.sleep(_READY_SECONDS)
            start = communicator.clock.now()
            communicator.average(buffer, f"calibrate.{buffer.nbytes}", out=result)
            return communicator.clock.now() - start if is_last else None

        samples = []
        for num_bytes in self._ladder("average", AVERAGE_BYTES):
            buffer = torch.zeros(num_bytes // 4, device=self._device)
            repeated = partial(one, buffer, torch.empty_like(buffer))
            samples.append(self._sample("average", num_bytes, communicator.size, repeated))
        return samples

    def puts(self) -> list[Sample]:
        """Messages of the mailbox between the first ranks of the hosts: alone, and while every host sends one."""
        samples = []
        for num_bytes in self._ladder("put", PUT_BYTES):
            turns = _Turns(self._communicator, self._leaders, num_bytes)
            alone, at_once = zip(
                *self._repeat(lambda turn: turns.one(turn, *self._neighbours(turn))),  # noqa: B023
                strict=True,
            )
            samples += [
                Sample("put", turns.num_message_bytes, 2, alone),
                Sample("puts at once", turns.num_message_bytes, self.num_hosts, at_once),
            ]
            turns.free()
        return samples

    def in_host_sums(self) -> list[Sample]:
        """Sums over the ranks of each host; none where that is one."""
        if self.ranks_per_host == 1:
            return []
        return [
            self._sample(
                "in-host sum",
                num_bytes,
                self.ranks_per_host,
                lambda _, b=num_bytes: self._plain.host_sum_seconds(b),  # type: ignore[misc]
            )
            for num_bytes in self._ladder("in-host sum", IN_HOST_BYTES)
        ]

    def steps(self, take_step: Callable[[], None]) -> list[list[float]]:
        """Seconds of steps [ranks][steps], all ranks computing at the same time. `take_step` is one of this rank."""
        communicator = self._communicator
        self._say("the computation of a step")

        def timed() -> float:
            start = communicator.clock.now()
            take_step()
            return communicator.clock.now() - start

        warm_ups = [timed() for _ in range(_NUM_WARM_UP_STEPS)]
        slowest = max(communicator.allgather(min(warm_ups)))
        fewest, most = _NUM_STEPS
        num_steps = int(min(most, max(fewest, _STEPS_SHARE * self._budget_seconds / max(slowest, 1e-9))))
        communicator.barrier()
        return communicator.allgather([timed() for _ in range(num_steps)])

    # -- sizes and repetitions -------------------------------------------------------------------------------------

    def _neighbours(self, turn: int) -> tuple[int, int]:
        """The first ranks of a host and of the next, another host each turn."""
        first, second = (self._leaders[(turn + step) % self.num_hosts] for step in (0, 1))
        return first, second

    def _ladder(self, kind: Kind, sizes: Sequence[int]) -> Iterator[int]:
        """The sizes in turn, smallest first, as far as the budget of this kind reaches."""
        self._start(kind)
        for index, num_bytes in enumerate(sizes):
            self._num_sizes_left = len(sizes) - index
            if num_bytes > _ALWAYS_BYTES:
                growth = num_bytes / sizes[index - 1]
                fewest_seconds = (_NUM_WARM_UPS + _NUM_REPETITIONS[0]) * growth * self._repetition_seconds
                if self._told_by_root(self._seconds_left() < fewest_seconds):
                    return
            self._say(f"{kind}s of {format_bytes(num_bytes)}")
            yield num_bytes

    def _start(self, kind: Kind) -> None:
        self._deadline = self._communicator.clock.now() + _SHARES[kind] * self._budget_seconds
        self._num_sizes_left = 1
        self._repetition_seconds = 0.0

    def _seconds_left(self) -> float:
        return self._deadline - self._communicator.clock.now()

    def _sample(
        self, kind: Kind, num_bytes: int, num_ranks: int, one: Callable[[int], float | None]
    ) -> Sample:
        return Sample(kind, num_bytes, num_ranks, tuple(self._repeat(one)))

    def _repeat(self, one: Callable[[int], T | None]) -> list[T]:
        """What `one(0)`, `one(1)`, ... bring on all ranks, but None; the first ones, warming up, are left out."""
        clock = self._communicator.clock
        for repetition in range(_NUM_WARM_UPS):
            one(repetition)
        start = clock.now()
        found = [one(_NUM_WARM_UPS)]
        self._repetition_seconds = clock.now() - start
        fewest, most = _NUM_REPETITIONS
        affordable = self._seconds_left() / self._num_sizes_left / max(self._repetition_seconds, 1e-9)
        num_repetitions = self._told_by_root(int(min(most, max(fewest, affordable))))
        found += [one(_NUM_WARM_UPS + repetition) for repetition in range(1, num_repetitions)]
        return [each for rank in self._communicator.allgather(found) for each in rank if each is not None]

    def _told_by_root(self, value: T) -> T:
        """Rank 0's `value`: ranks whose clocks say different things must go on alike."""
        return self._communicator.allgather(value)[0]


class _Turns:
    """A mailbox of one message size, and turns of rounds through it; what SGP does with its vectors is in the times."""

    def __init__(self, communicator: Communicator, leaders: Sequence[int], num_bytes: int) -> None:
        self._communicator, self._leaders = communicator, leaders
        self._mailbox: Mailbox = communicator.open_mailbox(
            _TurnTopology(communicator.size, leaders), num_payload_bytes=num_bytes, num_slot_rounds=2
        )
        self._vector = np.zeros(num_bytes // 4, np.float32)
        self.num_message_bytes = self._mailbox.num_message_bytes
        self.free = self._mailbox.free

    def one(self, turn: int, first: int, second: int) -> tuple[float, float] | None:
        """Seconds of a message from `first` to `second`, and of one while every host sends one. None but on `first`.

        Args:
            turn: 0, 1, ... in successive calls; the two ranks are the topology's.
        """
        communicator, clock = self._communicator, self._communicator.clock
        begin = turn * _TURN_ROUNDS

        at_once = 0.0
        for round_number in range(begin, begin + _RING_ROUNDS):
            # Apart, as steps are: else a message's counter shares the link with the sender's next message.
            communicator.barrier()
            clock.sleep(_READY_SECONDS)
            start = clock.now()
            if communicator.rank in self._leaders:
                self._send(round_number)
            self._receive(round_number)
            at_once += (clock.now() - start) / _RING_ROUNDS

        there, back = begin + _RING_ROUNDS, begin + _RING_ROUNDS + 1
        for sender, receiver, round_number in ((first, second, there), (second, first, back)):
            if communicator.rank == sender:
                self._mailbox.reserve(round_number, receiver)
                self._mailbox.outgoing()
        communicator.barrier()
        clock.sleep(_READY_SECONDS if communicator.rank == first else 0.0)
        start = clock.now()
        if communicator.rank == first:
            self._send(there)
        self._receive(there)
        if communicator.rank == second:
            self._send(back)
        self._receive(back)
        alone = (clock.now() - start) / 2
        return (alone, at_once) if communicator.rank == first else None

    def _send(self, round_number: int) -> None:
        """As in a round of SGP with one receiver: half of the vector goes, half stays."""
        (to,) = self._mailbox.topology.out_neighbours(self._communicator.rank, round_number)
        self._mailbox.reserve(round_number, to)
        sent = self._mailbox.outgoing().view(np.float32)
        np.multiply(self._vector, np.float32(0.5), out=sent)
        self._vector -= sent
        self._mailbox.send(round_number, [to], 0.5)

    def _receive(self, round_number: int) -> None:
        mailbox = self._mailbox
        mailbox.wait(lambda: mailbox.num_rounds_received > round_number, round_number, self._apply)

    def _apply(self, message: Message) -> None:
        self._vector += message.payload.view(np.float32)


class _TurnTopology(Topology):
    """Turns of 3 rounds in which every leader sends to the next one, one there and one back between two of them."""

    def __init__(self, size: int, leaders: Sequence[int]) -> None:
        self.size, self._leaders = size, leaders

    @property
    def max_in_degree(self) -> int:
        return 1

    def out_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return tuple(to for sender, to in self._pairs(round_number) if sender == rank)

    def in_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return tuple(sender for sender, to in self._pairs(round_number) if to == rank)

    def _pairs(self, round_number: int) -> list[tuple[int, int]]:
        turn, place = divmod(round_number, _TURN_ROUNDS)
        leaders, num_leaders = self._leaders, len(self._leaders)
        if place < _RING_ROUNDS:
            return [(leaders[i], leaders[(i + 1) % num_leaders]) for i in range(num_leaders)]
        first, second = leaders[turn % num_leaders], leaders[(turn + 1) % num_leaders]
        return [(first, second) if place == _RING_ROUNDS else (second, first)]


def format_bytes(num_bytes: int) -> str:
    """In the largest binary unit that leaves a whole number."""
    for unit, power in (("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.4g} {unit}"
    return f"{num_bytes} B"
