"""From measured times to the numbers of a `ClusterModel`, each with its uncertainty.

Owns the fit: least squares over everything that was measured at once, relative to each time, with no number below 0.
Does not measure (`measurement.py`), nor say what anything should take: that is the model's, whose times are linear in
all that is fitted here (of the link's rate, in the time of a bit).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pushreduce.simulation.cluster_model import HALF_WIDTH_95, ClusterModel, Uncertainty

Kind = Literal["message", "sum", "average", "put", "puts at once", "in-host sum"]
"""A message between two hosts, one way; an all-reduce of a few bytes by MPI alone; an average of the program's own,
from the last rank's entry; a message of the mailbox, from its sending until its receiver sees it, alone and while every
host sends one; a sum over the ranks of a host."""

_MODEL_ERROR = 0.02
"""Relative standard deviation granted to every modelled time: else the quietest times would decide alone."""
_LARGEST_UNCERTAINTY = 9.9  # relative; what is nearly 0 is uncertain by many times itself
_NO_TIME_BITS_PER_SECOND = 1e30
_NUM_SUMS_OF_A_NEGOTIATION = 2
"""Horovod's ranks agree on an average that they have had before by two small all-reduces of bits."""
_SMALLEST_SLOWNESS = 0.05
_STANDARD_ERRORS_OF_SLOWNESS = 4.0

_FITTED = tuple(item.name for item in fields(Uncertainty) if not item.name.startswith("step_"))


@dataclass(frozen=True)
class Sample:
    """The same thing, timed several times."""

    kind: Kind
    num_bytes: int
    num_ranks: int
    """That took part."""
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return float(np.median(self.seconds))

    @property
    def interval_seconds(self) -> tuple[float, float]:
        """95 % interval of the median, from the order of the times; of fewer than 6 their whole range."""
        ordered = sorted(self.seconds)
        first = max(0, math.floor((len(ordered) - HALF_WIDTH_95 * math.sqrt(len(ordered))) / 2))
        return ordered[first], ordered[-1 - first]

    def predicted_seconds(self, model: ClusterModel) -> float:
        """What the model says that it takes."""
        match self.kind:
            case "message":
                return model.message_seconds(self.num_bytes)
            case "sum":
                per_doubling = model.average_overhead_seconds_per_doubling / _NUM_SUMS_OF_A_NEGOTIATION
                return per_doubling * math.log2(self.num_ranks)
            case "average":
                return model.average_seconds(self.num_bytes, self.num_ranks)
            case "put" | "puts at once":
                return model.put_seconds(self.num_bytes)
            case "in-host sum":
                return model.host_sum_seconds(self.num_bytes)


@dataclass(frozen=True)
class StepTimes:
    """The computation of a step: mean, relative standard deviation, factors by rank (None: alike), uncertainties."""

    seconds: float
    jitter: float
    rank_slowness: tuple[float, ...] | None = None
    seconds_uncertainty: float = 0.0
    jitter_uncertainty: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """A model and what it was made from."""

    model: ClusterModel
    samples: tuple[Sample, ...]

    def relative_error(self, sample: Sample) -> float:
        """Of the modelled time, relative to the measured one; positive where the model is too slow."""
        return sample.predicted_seconds(self.model) / sample.median_seconds - 1.0

    @property
    def largest_relative_error(self) -> float:
        """In absolute value, over all samples."""
        return max(abs(self.relative_error(sample)) for sample in self.samples)


def fit_steps(seconds_by_rank: Sequence[Sequence[float]]) -> StepTimes:
    """The distribution of a step's time.

    Ranks count as alike where their means lie within 5 % of the mean of all, or within four standard errors.

    Args:
        seconds_by_rank: of every rank's steps, at least two a rank, as many on each.
    """
    seconds = np.array(seconds_by_rank, dtype=np.float64)  # [ranks, steps]
    assert seconds.ndim == 2
    assert seconds.shape[1] > 1
    mean = float(seconds.mean())
    slowness = seconds.mean(axis=1) / mean
    deviations = seconds / seconds.mean(axis=1, keepdims=True) - 1.0
    num_free = deviations.size - len(deviations)
    variance = float((deviations**2).sum() / num_free)
    jitter = math.sqrt(variance)
    # The standard error of a variance depends on the fourth moment: rare, long steps make it large.
    excess = float((deviations**4).mean()) / variance**2 - 1.0 if variance > 0 else 0.0
    standard_error = jitter / math.sqrt(seconds.shape[1])
    are_alike = np.all(
        np.abs(slowness - 1.0) <= max(_SMALLEST_SLOWNESS, _STANDARD_ERRORS_OF_SLOWNESS * standard_error)
    )
    return StepTimes(
        mean,
        jitter,
        None if are_alike else tuple(slowness.tolist()),
        HALF_WIDTH_95 * jitter / math.sqrt(seconds.size),
        min(_LARGEST_UNCERTAINTY, HALF_WIDTH_95 * math.sqrt(max(0.0, excess) / num_free) / 2),
    )


def fit(samples: Sequence[Sample], *, num_hosts: int, ranks_per_host: int, steps: StepTimes) -> Calibration:
    """The model whose times come nearest to the samples.

    What no sample depends on stays 0: averages inside a host where there is one rank a host.

    Raises:
        ValueError: the samples do not tell the numbers apart.
    """
    nothing = ClusterModel(
        num_hosts=num_hosts,
        ranks_per_host=ranks_per_host,
        link_bits_per_second=_NO_TIME_BITS_PER_SECOND,
        latency_seconds=0.0,
        step_seconds=0.0,
    )
    names, columns = [], []
    for name in _FITTED:  # 1 bit a second is one second a bit
        only_this = _with_numbers(nothing, {name: 1.0})
        column = np.array(
            [sample.predicted_seconds(only_this) - sample.predicted_seconds(nothing) for sample in samples]
        )
        if column.any():
            names.append(name)
            columns.append(column)
    times = np.array([sample.median_seconds for sample in samples])
    if not np.all(times > 0.0):
        raise ValueError("a measured time is not above 0: the clock is too coarse for this cluster")
    deviations = np.array([_standard_deviation(sample) for sample in samples])
    values, half_widths = _least_squares(
        np.stack(columns, axis=1) / deviations[:, None] if columns else np.empty((len(samples), 0)),
        times / deviations,
        names,
    )
    fitted = dict(zip(names, values.tolist(), strict=True))
    uncertain = {
        name: min(_LARGEST_UNCERTAINTY, half_width / value) if value > 0.0 else 0.0
        for name, value, half_width in zip(names, values.tolist(), half_widths.tolist(), strict=True)
    }
    if fitted["link_bits_per_second"] == 0.0:  # too fast to be seen: the slowest rate that the times allow
        fitted["link_bits_per_second"] = float(half_widths[names.index("link_bits_per_second")])
        uncertain["link_bits_per_second"] = _LARGEST_UNCERTAINTY
    fitted["link_bits_per_second"] = 1.0 / fitted["link_bits_per_second"]
    model = replace(
        _with_numbers(nothing, fitted),
        step_seconds=steps.seconds,
        step_jitter=steps.jitter,
        rank_slowness=steps.rank_slowness,
        relative_uncertainty=Uncertainty(
            **uncertain,
            step_seconds=steps.seconds_uncertainty,
            step_jitter=steps.jitter_uncertainty,
        ),
    )
    return Calibration(model, tuple(samples))


def _with_numbers(model: ClusterModel, numbers: Mapping[str, float]) -> ClusterModel:
    return replace(model, **numbers)  # type: ignore[arg-type]  # all of them floats, by name


def _standard_deviation(sample: Sample) -> float:
    """What the median may differ from its modelled value by."""
    low, high = sample.interval_seconds
    return math.hypot((high - low) / 2 / HALF_WIDTH_95, _MODEL_ERROR * sample.median_seconds)


def _least_squares(
    matrix: NDArray[np.float64], targets: NDArray[np.float64], names: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """x >= 0 that minimises |matrix x - targets|, and the half widths of 95 % intervals.

    The minimum is the unbounded one over some of the columns, the others being 0: with fewer than a dozen, all choices
    are tried. Where a sample's residual is larger than its standard deviation of 1, it counts as that uncertain.

    Args:
        matrix: [samples, numbers], in units of the samples' standard deviations, as `targets` [samples].
        names: of the numbers.
    """
    scales = np.linalg.norm(matrix, axis=0)
    scaled = matrix / scales
    num_samples, num_values = matrix.shape
    if num_samples <= num_values or np.linalg.matrix_rank(scaled, tol=1e-6) < num_values:
        raise ValueError(
            f"too few sizes were measured to tell {', '.join(names)} apart: raise --budget-seconds"
        )
    best, best_error = np.zeros(num_values), float(targets @ targets)
    for size in range(num_values, 0, -1):
        for chosen in map(list, itertools.combinations(range(num_values), size)):
            solution = np.linalg.lstsq(scaled[:, chosen], targets, rcond=None)[0]
            error = float(np.sum((scaled[:, chosen] @ solution - targets) ** 2))
            if np.all(solution >= 0.0) and error < best_error:
                best, best_error = np.zeros(num_values), error
                best[chosen] = solution
        if np.all(best > 0.0):  # nothing can be better than all columns
            break
    # Of each sample, what it misses its modelled value by, but no less than its own standard deviation.
    variances = np.maximum(1.0, (scaled @ best - targets) ** 2)
    half_widths = np.empty(num_values)
    for index in range(num_values):
        # What lies at the bound of 0 is known not to be below, and leaves the others' intervals alone.
        columns = np.flatnonzero((best > 0.0) | (np.arange(num_values) == index))
        inverse = np.linalg.pinv(scaled[:, columns])
        variance = (inverse**2 @ variances)[np.searchsorted(columns, index)]
        half_widths[index] = HALF_WIDTH_95 * math.sqrt(variance)
    return best / scales, half_widths / scales
