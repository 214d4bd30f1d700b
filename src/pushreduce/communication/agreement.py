"""A mistake found by one rank becomes the same error on all: none waits for a rank that has gone.

Owns that rule only: for what the user can put right (ValueError) and for files and disks (OSError). Other exceptions
pass: they are ours, and end the job.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar, cast

from pushreduce.communication.base import Communicator

T = TypeVar("T")
_NO_MEMORY = re.compile("can't allocate memory|out of memory|Storage size calculation overflowed")
"""In torch's RuntimeErrors."""


class AgreedError(ValueError):
    """What the user can put right, in one line, raised on all ranks alike."""


def agree(communicator: Communicator, action: Callable[[], T]) -> list[T]:
    """Every rank's `action()` (picklable, small), in rank order. Collective.

    Raises:
        AgreedError: on all ranks, that of the lowest rank whose `action` raised a ValueError, OSError or MemoryError.
    """
    outcome: T | AgreedError
    try:
        outcome = action()
    except AgreedError as error:
        outcome = error
    except ValueError as error:
        outcome = AgreedError(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        outcome = AgreedError(f"{where}{error.strerror or error}; put that right and start again")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _NO_MEMORY.search(str(error)):
            raise
        outcome = AgreedError("there is not enough memory: choose something smaller")
    outcomes = communicator.allgather(outcome)
    results = []
    for each in outcomes:
        if isinstance(each, AgreedError):
            raise each
        results.append(each)
    return results


def agree_with_root(communicator: Communicator, action: Callable[[], T]) -> T:
    """Rank 0's `action()` on all ranks, which do not call theirs. Collective; AgreedError as in `agree`."""
    results = agree(communicator, action if communicator.rank == 0 else lambda: None)
    return cast(T, results[0])


def build_on_all(communicator: Communicator, build: Callable[[], T]) -> T:
    """This rank's `build()`, which need not be picklable. Collective; AgreedError as in `agree`."""
    built: list[T] = []
    agree(communicator, lambda: built.append(build()))
    return built[0]
