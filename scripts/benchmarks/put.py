"""Two ranks: the rate of the mailbox's messages over that of raw Put + Flush, and what a computing receiver changes.

    mpirun -np 2 python scripts/benchmarks/put.py --directory DIR --pairs 20

Rank 0 sends to rank 1. A message lasts from `send` until its number has been set, and flushed, in the receiver's
memory; a raw put of as many bytes, from and into memory of the same kind, from Put until Flush has returned. An idle
receiver waits for the message or for a barrier, a busy one multiplies matrices; Horovod runs in both.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pairs
import torch
import workbench
from piece import parse_arguments

from pushreduce.communication import startup
from pushreduce.communication.base import Communicator
from pushreduce.communication.topology import Topology

PUTS_PER_BLOCK = {1_000_000: 20, 100_000_000: 1}
NUM_SLOTS = 2  # of both, since what the caches hold differs with it
BUSY_SECONDS_OVER_IDLE = 4.0


class OneWay(Topology):
    """Rank 0 sends to rank 1 in every round."""

    size = 2
    max_in_degree = 1

    def out_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return (1,) if rank == 0 else ()

    def in_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return (0,) if rank == 1 else ()


class Messages:
    """Messages through a mailbox of the run's own kind."""

    def __init__(self, communicator: Communicator, num_bytes: int) -> None:
        self._communicator = communicator
        self._mailbox = communicator.open_mailbox(
            OneWay(), num_payload_bytes=num_bytes, num_slot_rounds=NUM_SLOTS
        )
        self._round = -1
        self._published_at = 0.0
        publish = self._mailbox._publish

        def publish_and_note(put: object) -> None:
            publish(put)
            self._published_at = time.perf_counter()

        self._mailbox._publish = publish_and_note

    def one(self, receiver_does: Callable[[], None] = lambda: None) -> float:
        """Seconds of one message; of use on rank 0."""
        self._round += 1
        mailbox = self._mailbox
        if self._communicator.rank == 0:
            mailbox.reserve(self._round, 1)
            mailbox.outgoing()
            self._published_at = 0.0
        self._communicator.barrier()
        start = time.perf_counter()
        if self._communicator.rank == 0:
            mailbox.send(self._round, [1], 1.0)
            self._communicator.wait_until(lambda: self._published_at > 0)
        else:
            receiver_does()
            mailbox.wait(lambda: mailbox.num_rounds_received > self._round, self._round, lambda message: None)
        return self._published_at - start

    def free(self) -> None:
        self._mailbox.free()


class RawPuts:
    """The same bytes by MPI alone, from and to as many places in turn."""

    def __init__(self, communicator: Communicator, num_bytes: int) -> None:
        from mpi4py import MPI

        self._communicator, self._byte = communicator, MPI.BYTE
        self._window = MPI.Win.Allocate(NUM_SLOTS * num_bytes, 1, comm=MPI.COMM_WORLD)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._sources = [np.zeros(num_bytes, np.uint8) for _ in range(NUM_SLOTS)]
        self._number = 0

    def one(self) -> float:
        """Seconds of one put; of use on rank 0."""
        slot = self._number % NUM_SLOTS
        self._number += 1
        source = self._sources[slot]
        self._communicator.barrier()
        start = time.perf_counter()
        if self._communicator.rank == 0:
            self._window.Put([source, self._byte], 1, (slot * source.size, source.size, self._byte))
            self._window.Flush(1)
        seconds = time.perf_counter() - start
        self._communicator.barrier()
        return seconds

    def free(self) -> None:
        self._window.Unlock_all()
        self._window.Free()


def main() -> None:
    """Measures and prints."""
    arguments = parse_arguments(__doc__)
    communicator = workbench.start()
    for num_bytes, num_puts in PUTS_PER_BLOCK.items():
        messages, raw = Messages(communicator, num_bytes), RawPuts(communicator, num_bytes)
        for _ in range(6):  # every slot and buffer has been touched
            messages.one()
            raw.one()
        kinds: tuple[Messages | RawPuts, Messages | RawPuts] = (messages, raw)
        seconds: tuple[list[float], list[float]] = ([], [])
        for pair in range(arguments.pairs):
            for kind in (0, 1) if pair % 2 == 0 else (1, 0):
                seconds[kind].append(sum(kinds[kind].one() for _ in range(num_puts)))
        # The receiver begins to compute with the send, and ends well after it.
        idle = communicator.allgather(float(np.median(seconds[0])) / num_puts)[0]
        busy = [
            messages.one(lambda: multiply_for(BUSY_SECONDS_OVER_IDLE * idle + 0.02))  # noqa: B023
            for _ in range(arguments.pairs)
        ]
        messages.free()
        raw.free()
        if communicator.rank == 0:
            size = f"{num_bytes // 1_000_000} MB"
            facts = {"algorithm": "sgp", "model": size, "batch_size": "", "num_ranks": communicator.size}
            ours, theirs = np.array(seconds) / num_puts
            pairs.report(
                "message over raw put, rate",
                values=(theirs / ours).tolist(),
                a_step_ms=1e3 * float(np.median(ours)),
                b_step_ms=1e3 * float(np.median(theirs)),
                **facts,
            )
            pairs.report(
                "message, busy over idle receiver",
                values=(np.array(busy) / idle).tolist(),
                a_step_ms=1e3 * float(np.median(busy)),
                b_step_ms=1e3 * idle,
                **facts,
            )
    startup.shut_down()


def multiply_for(seconds: float) -> None:
    """Computes; enters no MPI."""
    matrix = torch.ones(128, 128)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix @ matrix


if __name__ == "__main__":
    main()
