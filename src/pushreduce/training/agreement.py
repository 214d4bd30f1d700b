"""A mistake found by one rank becomes the same ValueError on all: none waits for a rank that has gone.

Owns that rule only. Other exceptions pass: they are ours, and end the job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from pushreduce.communication.base import Communicator

T = TypeVar("T")


def agree(communicator: Communicator, action: Callable[[], T]) -> list[T]:
    """Every rank's `action()` (picklable, small), in rank order. Collective.

    Raises:
        ValueError: on all ranks, that of the lowest rank whose `action` raised one.
    """
    outcome: T | ValueError
    try:
        outcome = action()
    except ValueError as error:
        outcome = error
    outcomes = communicator.allgather(outcome)
    results = []
    for each in outcomes:
        if isinstance(each, ValueError):
            raise each
        results.append(each)
    return results


def agree_with_root(communicator: Communicator, action: Callable[[], T]) -> T:
    """Rank 0's `action()` on all ranks, which do not call theirs. Collective; ValueError as in `agree`."""
    results = agree(communicator, action if communicator.rank == 0 else lambda: None)
    return cast(T, results[0])
