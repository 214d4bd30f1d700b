"""Pairs of equal pieces of work, A and B, done in turn in one process, and the ratio of their times.

The order is A B, B A, A B, ...: what drifts with time (a core's clock, other users of the machine) meets both alike.
Each figure is the median over the pairs, with the range and a bootstrap interval.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

NUM_RESAMPLES = 10_000
STATISTICS = ("median", "ci_low", "ci_high", "min", "max", "n")


def describe(values: Sequence[float]) -> dict[str, Any]:
    """Median, the 95 % bootstrap interval of the median, and the range of `values`."""
    sample = np.asarray(values, dtype=np.float64)
    resamples = np.random.default_rng(0).choice(sample, size=(NUM_RESAMPLES, len(sample)))
    low, high = np.percentile(np.median(resamples, axis=1), [2.5, 97.5])
    return {
        "median": float(np.median(sample)),
        "ci_low": float(low),
        "ci_high": float(high),
        "min": float(sample.min()),
        "max": float(sample.max()),
        "n": len(sample),
    }


def judge(median: float, bound: tuple[str, float] | None) -> tuple[str, str]:
    """A bound such as (">=", 0.97) in words, and whether a median meets it; both empty where there is none."""
    if bound is None:
        return "", ""
    sign, limit = bound
    met = median >= limit if sign == ">=" else median <= limit
    return f"{sign} {limit:g}", "met" if met else "missed"


def report(figure: str, *, values: Sequence[float], **facts: Any) -> None:
    """Prints one figure for `scripts/benchmark`, which adds the bound: a line of JSON. On rank 0 only."""
    print(json.dumps({"figure": figure, **facts, **describe(values), "values": list(values)}), flush=True)


class Stopwatch:
    """Wall-clock seconds and this process's processor seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, time.process_time() - self._cpu


class PausableClock:
    """The communicator's clock without the time in which the other piece of work runs."""

    def __init__(self) -> None:
        self._paused_seconds = 0.0

    def now(self) -> float:
        return time.perf_counter() - self._paused_seconds

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def pause(self, seconds: float) -> None:
        self._paused_seconds += seconds


class Alternation:
    """Runs blocks of B between blocks of steps of a training loop A, which calls it after every step.

    Args:
        other: does `num_steps` steps of B.
        num_pairs: even.
        steps_per_block: of A and of B.
        warm_up_steps: of A and of B, left out.
        clock: A's, which stands still while B runs.
    """

    def __init__(
        self,
        other: Callable[[int], None],
        *,
        num_pairs: int,
        steps_per_block: int,
        warm_up_steps: int,
        clock: PausableClock,
    ) -> None:
        assert num_pairs % 2 == 0, "every A B needs its B A"
        self._other, self._clock = other, clock
        self._num_pairs, self._steps_per_block, self._warm_up_steps = (
            num_pairs,
            steps_per_block,
            warm_up_steps,
        )
        self._steps_left = warm_up_steps
        self._block = Stopwatch()
        self._warm = False
        self.a: list[tuple[float, float]] = []
        """(wall-clock, processor) seconds of each block."""
        self.b: list[tuple[float, float]] = []

    def after_step(self) -> int | None:
        """The training loop's `stop_signal`: None, or 1 once all pairs are complete."""
        if len(self.a) == self._num_pairs:
            return 1  # all ranks agree to stop only in the loop's next step
        self._steps_left -= 1
        if self._steps_left:
            return None
        seconds = self._block.read()
        watch = Stopwatch()
        if not self._warm:
            self._warm = True
            self._other(self._warm_up_steps)
        else:
            self.a.append(seconds)
            if len(self.a) % 2:
                self._run_other()  # this pair's, after its A
                self._run_other()  # the next pair's, before its A
        self._clock.pause(watch.read()[0])
        self._steps_left = self._steps_per_block
        self._block = Stopwatch()
        return 1 if len(self.a) == self._num_pairs else None

    def _run_other(self) -> None:
        watch = Stopwatch()
        self._other(self._steps_per_block)
        self.b.append(watch.read())
