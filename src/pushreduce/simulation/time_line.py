"""When every worker finished each of its steps, and what follows from it: the result of the timing-only programs.

Owns the summary of a time line. Does not own how it comes about (`timing.py`, `push_timing.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pushreduce.simulation.cluster_model import ClusterModel

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class TimeLine:
    """What a run of equal numbers of steps a worker takes; arrays are float64 [iterations, workers].

    A worker's first step begins at 0, every other one where the one before has ended.
    """

    compute_seconds: Seconds
    """Of a step, up to its first wait; as given."""
    end_seconds: Seconds
    """Since the start of the run, when the worker went on to its next step."""
    steps_per_allreduce: Counter[int] = field(default_factory=Counter)
    """As `Stats.steps_per_allreduce` (LASGD), over all workers."""
    staleness: Counter[int] = field(default_factory=Counter)
    """As `Stats.staleness` (SGP), over all workers."""

    @property
    def step_seconds(self) -> Seconds:
        """Of every step, waiting included."""
        return np.diff(self.end_seconds, axis=0, prepend=0.0)

    @property
    def blocked_seconds(self) -> Seconds:
        """The part of every step that is not computation: the exposed communication."""
        return self.step_seconds - self.compute_seconds

    def iteration_seconds(self, num_warm_up: int) -> float:
        """Mean time of an iteration, by the steps that all workers together take in a time in which all are at work.

        The first `num_warm_up` steps of the slowest worker are left out. Of a step that is within that time in part,
        this part counts: workers that end at nearly the same time would otherwise lose their last steps, all but one.
        """
        begin, end = self._window(num_warm_up)
        numbers = np.arange(len(self.end_seconds) + 1)
        num_steps = sum(
            float(np.diff(np.interp((begin, end), (0.0, *ends), numbers))[0])
            for ends in self.end_seconds.T.tolist()
        )
        return (end - begin) * self.end_seconds.shape[1] / num_steps

    def mean_blocked_seconds(self, num_warm_up: int) -> float:
        """Mean of `blocked_seconds` over the steps that `iteration_seconds` counts."""
        begin, end = self._window(num_warm_up)
        return float(self.blocked_seconds[(self.end_seconds > begin) & (self.end_seconds <= end)].mean())

    def _window(self, num_warm_up: int) -> tuple[float, float]:
        assert num_warm_up < len(self.end_seconds) - 1, "nothing is left after the warm-up"
        begin = self.end_seconds[num_warm_up - 1].max() if num_warm_up else 0.0
        end = self.end_seconds[-1].min()
        if (
            begin >= end
        ):  # the fastest was through before the slowest had warmed up: their pace is not bound together
            begin = 0.0
        return float(begin), float(end)


def draw_compute_seconds(
    model: ClusterModel, num_iterations: int, num_ranks: int, random: np.random.Generator
) -> Seconds:
    """Compute times [iterations, ranks] of a model: lognormal around each rank's mean.

    `rank_slowness` is repeated in turn where there are more ranks than it has numbers.
    """
    sigma = math.sqrt(math.log1p(model.step_jitter**2))
    slowness = np.resize(model.rank_slowness or (1.0,), num_ranks)
    draws = random.lognormal(-(sigma**2) / 2, sigma, (num_iterations, num_ranks))
    return model.step_seconds * slowness * draws


def host_compute_seconds(model: ClusterModel, compute_seconds: Seconds, num_model_bytes: int) -> Seconds:
    """Compute times [iterations, hosts] of whole hosts as workers from those of their ranks, [iterations, ranks].

    A local step of a host is over when its last rank has computed, the gradients have been averaged inside the host,
    and the parameters have been copied. (In truth, copied after the algorithm's own part of the step.)
    """
    num_iterations, num_ranks = compute_seconds.shape
    assert num_ranks % model.ranks_per_host == 0, "every host has all its ranks"
    slowest = compute_seconds.reshape(num_iterations, -1, model.ranks_per_host).max(axis=2)
    return slowest + model.host_step_seconds(num_model_bytes)
