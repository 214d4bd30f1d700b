"""Messages that wait for others, run on the simulated network: an all-reduce as what it sends.

Owns such patterns of messages and when each arrives. Serves to check what is taken for granted elsewhere: the closed
form of an average (`cluster_model.py`), and the network itself against another simulator (`experiments/simgrid`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pushreduce.simulation.event_queue import EventQueue
from pushreduce.simulation.network import Network


@dataclass(frozen=True)
class Message:
    """Sent from host to host, `delay_seconds` after the last message that it waits for has arrived."""

    source: int
    target: int
    num_bytes: float
    delay_seconds: float = 0.0
    waits_for: tuple[int, ...] = ()
    """Positions in the pattern of messages; none: for the beginning."""


def ring_allreduce(host_of_rank: Sequence[int], num_bytes: float) -> list[Message]:
    """2 (n - 1) steps in which each of n ranks sends 1/n of the buffer to the next, as soon as it has what it sends.

    In the first half a rank adds what it gets to its own part and sends the sum on, in the second it passes on sums.

    Args:
        host_of_rank: of every rank, in the order of the ring.
        num_bytes: of each rank's buffer.
    """
    size = len(host_of_rank)
    messages = []
    for step in range(2 * (size - 1)):
        for rank in range(size):
            # From the rank before, and after its own previous message.
            steps_before = ((rank - 1) % size, rank) if step else ()
            messages.append(
                Message(
                    source=host_of_rank[rank],
                    target=host_of_rank[(rank + 1) % size],
                    num_bytes=num_bytes / size,
                    waits_for=tuple((step - 1) * size + before for before in steps_before),
                )
            )
    return messages


def arrival_seconds(
    messages: Sequence[Message], num_hosts: int, *, bits_per_second: float, latency_seconds: float
) -> list[float]:
    """When each message has arrived, all of them alone on a network."""
    queue = EventQueue()
    network = Network(
        num_hosts,
        bits_per_second=bits_per_second,
        latency_seconds=latency_seconds,
        now=queue.now,
        at=queue.at,
    )
    arrivals = [0.0] * len(messages)
    num_missing = [len(message.waits_for) for message in messages]
    waiting: list[list[int]] = [[] for _ in messages]
    for index, message in enumerate(messages):
        for before in message.waits_for:
            waiting[before].append(index)

    def start(index: int) -> None:
        message = messages[index]
        network.transfer(message.source, message.target, message.num_bytes, partial(arrive, index))

    def schedule(index: int) -> None:
        queue.at(queue.now() + messages[index].delay_seconds, partial(start, index))

    def arrive(index: int) -> None:
        arrivals[index] = queue.now()
        for later in waiting[index]:
            num_missing[later] -= 1
            if not num_missing[later]:
                schedule(later)

    for index, message in enumerate(messages):
        if not message.waits_for:
            schedule(index)
    queue.run()
    return arrivals
