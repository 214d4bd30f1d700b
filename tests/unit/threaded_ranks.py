"""Ranks as threads, for code that needs no more of a communicator than `allgather` and `barrier`."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

from pushreduce.communication.base import Communicator


class ThreadedRank(Communicator):
    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = size
        self._barrier = barrier
        self._slots = slots

    def allgather(self, value: Any) -> list[Any]:
        self._slots[self.rank] = pickle.dumps(value)
        self._barrier.wait()
        gathered = [pickle.loads(each) for each in self._slots]
        self._barrier.wait()
        return gathered

    def barrier(self) -> None:
        self._barrier.wait()

    def average_async(self, *args, **kwargs):
        raise NotImplementedError

    def broadcast(self, *args, **kwargs):
        raise NotImplementedError

    def open_mailbox(self, *args, **kwargs):
        raise NotImplementedError

    def split_by_host(self):
        raise NotImplementedError

    def wait_until(self, predicate):
        raise NotImplementedError

    def abort(self, message, exit_code=1):
        raise NotImplementedError


def outcomes_of(size: int, function: Callable[[Communicator], Any]) -> list[Any]:
    """What `function` returned or raised on each of `size` ranks (threads named rank0, rank1, ...).

    A rank that raises breaks the collectives of the others, as the death of a process does. Not so by
    ValueError, which all raise together: others may still be on their way out of the last collective.
    """
    barrier, slots, outcomes = threading.Barrier(size), [None] * size, [None] * size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = function(ThreadedRank(rank, size, barrier, slots))
        except BaseException as error:
            outcomes[rank] = error
            if not isinstance(error, ValueError):
                barrier.abort()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank{rank}", daemon=True) for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), f"{thread.name} hangs"
    return outcomes


def results_of(size: int, function: Callable[[Communicator], Any]) -> list[Any]:
    """`outcomes_of`, where no rank may raise."""
    outcomes = outcomes_of(size, function)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def error_of(size: int, function: Callable[[Communicator], Any]) -> ValueError:
    """The one-line ValueError that `function` must raise on every rank, the same on all."""
    outcomes = outcomes_of(size, function)
    assert all(isinstance(outcome, ValueError) for outcome in outcomes), outcomes
    assert len({(type(outcome), str(outcome)) for outcome in outcomes}) == 1, outcomes
    assert "\n" not in str(outcomes[0])
    return outcomes[0]
