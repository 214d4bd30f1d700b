"""Ranks as greenlets in virtual time: the engine of the simulated cluster.

Owns the virtual clock, the order in which ranks run, torch's process-wide state of each rank, and the
diagnosis of ranks that wait for ever. Knows nothing of collectives (`simulated.py`).

One rank runs at a time, until it sleeps or has to wait. Simultaneous events come in random order, by the
seed; the same seed gives the same interleaving.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet

T = TypeVar("T")


class Deadlock(Exception):  # noqa: N818
    """No rank can proceed. The message says what each waits for."""


class Scheduler:
    """Runs one body a rank, from time 0 to the end of the last. Used for one run.

    "Ranks only" marks what a rank's body calls; all else is called by actions, in the scheduler's own
    greenlet.

    Args:
        num_ranks: how many bodies `run` will get.
        seed: decides the order of simultaneous events, and each rank's initial torch generator.
    """

    def __init__(self, num_ranks: int, seed: int) -> None:
        self.num_ranks, self.now = num_ranks, 0.0
        self.random = random.Random(seed)
        self.running: int | None = None
        self._seed, self._open = seed, True
        self._end: Exception | None = None
        self._waiting: dict[int, Callable[[], str]] = {}  # rank -> what it waits for, in words
        self._predicates: dict[int, Callable[[], bool]] = {}  # of those that wait in wait_until
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._num_events = 0

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """What the bodies return, in rank order.

        Raises:
            Deadlock: ranks wait for what cannot happen.
            BaseException: whatever a rank raised first, with its rank as a note; the other ranks are ended.
        """
        results: dict[int, T] = {}

        def run_rank(rank: int) -> None:
            results[rank] = bodies[rank]()

        self._scheduler = getcurrent()
        self._greenlets = [greenlet(partial(run_rank, rank)) for rank in range(self.num_ranks)]
        outside = _TorchState()
        self._torch_states = [outside.with_seed(self._seed, rank) for rank in range(self.num_ranks)]
        self._owner: int | None = None  # whose torch state is in force
        try:
            for rank in range(self.num_ranks):
                self.at(0.0, partial(self._resume, rank))
            while self._events:
                self.now, _, _, action = heapq.heappop(self._events)
                action()
                if self._end is not None:
                    raise self._end
                self._poll_predicates()
            if self._waiting:
                raise Deadlock(f"no rank can proceed at {self.now:.6g} s: {self.describe_waiting()}")
        finally:
            self._open = False
            self._end_ranks()
            outside.restore()
        return [results[rank] for rank in range(self.num_ranks)]

    def at(self, time_seconds: float, action: Callable[[], None]) -> None:
        """Schedules `action`; it runs in the scheduler's greenlet and must not wait."""
        self._num_events += 1
        heapq.heappush(self._events, (time_seconds, self.random.random(), self._num_events, action))

    def sleep(self, seconds: float) -> None:
        """Lets everything that happens within `seconds` happen. Ranks only."""
        rank, time_seconds = self.running_rank(), self.now + seconds
        if not self._predicates and (not self._events or self._events[0][0] > time_seconds):
            self.now = time_seconds
        else:
            self.at(time_seconds, partial(self._resume, rank))
            self._pause()

    def wait(self, description: Callable[[], str]) -> None:
        """Waits until `wake`. `description` says for what, after a deadlock. Ranks only."""
        self._waiting[self.running_rank()] = description
        self._pause()

    def wait_until(self, predicate: Callable[[], bool], timeout_seconds: float = math.inf) -> bool:
        """Waits until `predicate()`, evaluated after every event in the scheduler's greenlet. Ranks only.

        Returns whether it is true; False once `timeout_seconds` are over.
        """
        assert timeout_seconds >= 0, f"a wait of {timeout_seconds} s would turn the time back"
        rank, deadline = self.running_rank(), self.now + timeout_seconds
        if timeout_seconds < math.inf:
            self.at(deadline, lambda: None)  # an event, after which the predicates are evaluated
        while not predicate():
            if self.now >= deadline:
                return False
            self._predicates[rank] = lambda: self.now >= deadline or predicate()
            self.wait(lambda: f"wait_until({getattr(predicate, '__qualname__', predicate)})")
        return True

    def wake(self, rank: int) -> None:
        """Lets a waiting rank go on, now."""
        del self._waiting[rank]
        self._resume(rank)

    def end_run(self, error: Exception) -> NoReturn:
        """Makes `run` raise `error`; the rank that calls it cannot catch it. In a predicate, raises here."""
        self._end = error
        if self.running is None:
            raise error
        self._scheduler.switch()
        raise AssertionError("a rank that ended the run was resumed")

    def running_rank(self) -> int:
        """The rank that runs now; raises where nothing may wait or communicate."""
        if not self._open:
            raise RuntimeError("the simulated run has ended")
        assert self.running is not None, "a predicate of wait_until must not communicate or sleep"
        return self.running

    def describe_waiting(self) -> str:
        return "; ".join(f"rank {rank} waits for {what()}" for rank, what in sorted(self._waiting.items()))

    def _pause(self) -> None:
        if torch._C._current_graph_task_id() != -1 or torch.is_inference_mode_enabled():
            # Neither can be saved and restored at a switch.
            raise RuntimeError("a simulated rank must not wait inside backward() or torch.inference_mode()")
        self._scheduler.switch()

    def _resume(self, rank: int) -> None:
        if self._owner != rank:
            if self._owner is not None:
                self._torch_states[self._owner] = _TorchState()
            self._torch_states[rank].restore()
            self._owner = rank
        self.running = rank
        try:
            self._greenlets[rank].switch()
        except BaseException as error:
            if sys.version_info >= (3, 11):
                error.add_note(
                    f"Raised by rank {rank} of {self.num_ranks} at {self.now:.6g} s of virtual time."
                )
            raise
        finally:
            self.running = None

    def _poll_predicates(self) -> None:
        for rank, predicate in list(self._predicates.items()):
            try:
                ready = predicate()
            except Exception:
                ready = True  # the rank evaluates it again and meets the error in its own frame
            if ready:
                del self._predicates[rank]
                self.at(self.now, partial(self.wake, rank))

    def _end_ranks(self) -> None:
        for rank, rank_greenlet in enumerate(self._greenlets):
            if not rank_greenlet.dead:
                try:
                    rank_greenlet.throw(GreenletExit)
                except Exception as error:  # a consequence only: what ended the run is being raised
                    print(f"rank {rank}, while being ended: {error!r}", file=sys.stderr)


class _TorchState:
    """What torch keeps process-wide: grad mode, autocast with its nesting, the default CPU generator.

    Python's and NumPy's global generators are left out: they cost 14 and 78 us a switch, torch's costs 1.
    Ranks share them.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        ]
        self._autocast_cache = torch.is_autocast_cache_enabled()
        torch.autocast_increment_nesting()
        self._autocast_nesting = torch.autocast_decrement_nesting()
        self._generator_state = torch.default_generator.get_state()

    def with_seed(self, seed: int, rank: int) -> _TorchState:
        """A copy whose generator is `rank`'s own."""
        state = _TorchState.__new__(_TorchState)
        state.__dict__ |= self.__dict__
        state._generator_state = torch.Generator().manual_seed(hash((seed, rank)) % 2**63).get_state()
        return state

    def restore(self) -> None:
        torch.set_grad_enabled(self._grad)
        for device, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._autocast_cache)
        # Autocast forgets its cast weights where the nesting returns to 0: with other ranks' regions counted,
        # weights cast before an optimizer step would be used after it.
        nesting = torch.autocast_increment_nesting()
        while nesting > self._autocast_nesting:
            nesting = torch.autocast_decrement_nesting()
        while nesting < self._autocast_nesting:
            nesting = torch.autocast_increment_nesting()
        torch.default_generator.set_state(self._generator_state)
