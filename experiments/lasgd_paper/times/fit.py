"""Which parameters agree with the paper's SGD-AR rows, for each choice.

Owns the measure of agreement, the search for the best parameters and for all that are nearly as good. Does not own
what the parameters mean (`cluster.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cluster import BOUNDS, Choice, Parameters, in_vector, iteration_seconds, of_vector
from paper import Interval, Row
from scipy.optimize import differential_evolution

MARGIN = 0.01
"""Accepted are parameters whose misfit is at most this above the best one's."""
_NUM_GENERATIONS = 30
_NUM_PROPOSALS = 400
_NUM_SELECTED = 30
_SEED = 1


@dataclass(frozen=True)
class Fit:
    """Of one choice."""

    choice: Choice
    best: Parameters
    best_misfit: float
    accepted: list[Parameters]
    """Far from each other, those at the ends of every parameter's range among them; the best is the first."""


def distance(seconds: float, paper: Interval) -> float:
    """From a time to the nearest that is rounded to what was printed, relative to the paper's; below 0: faster."""
    beyond = max(0.0, seconds - paper[1]) - max(0.0, paper[0] - seconds)
    return beyond / ((paper[0] + paper[1]) / 2)


def misfit(rows: Sequence[Row], choice: Choice, parameters: Parameters) -> float:
    """The largest distance of any row; 0 where all are within their rounding."""
    return max(
        abs(distance(iteration_seconds(row, choice, parameters), row.iteration_seconds)) for row in rows
    )


def best_fit(rows: Sequence[Row], choice: Choice) -> tuple[Parameters, float]:
    """The parameters with the smallest misfit, and that."""
    result = differential_evolution(
        lambda vector: misfit(rows, choice, of_vector(vector)),
        [(0.0, 1.0)] * len(BOUNDS),
        popsize=8,
        maxiter=_NUM_GENERATIONS,
        rng=_SEED,
        polish=False,
    )
    return of_vector(result.x), float(result.fun)


def fit(rows: Sequence[Row], choice: Choice) -> Fit:
    """Best parameters and a selection of all that are accepted."""
    best, best_misfit = best_fit(rows, choice)
    points = _explore(rows, choice, best, best_misfit + MARGIN)
    return Fit(choice, best, best_misfit, [of_vector(vector) for vector in _far_apart(points, _NUM_SELECTED)])


def _explore(rows: Sequence[Row], choice: Choice, start: Parameters, limit: float) -> np.ndarray:
    """A random walk through the accepted parameters, in steps as wide as what is known of them; vectors, [n, 3]."""
    random = np.random.default_rng(_SEED)
    points = [np.array(in_vector(start))]
    scale = np.full(len(BOUNDS), 0.02)
    for _ in range(_NUM_PROPOSALS):
        origin = points[random.integers(len(points))]
        if len(points) > 2 * len(BOUNDS):
            # Along the difference of two accepted points: the accepted are a thin, oblique body.
            one, other = random.choice(len(points), 2, replace=False)
            step = random.uniform(-1.5, 1.5) * (points[one] - points[other])
            step += 0.003 * random.standard_normal(len(BOUNDS))
        else:
            step = scale * random.standard_normal(len(BOUNDS))
        proposal = np.clip(origin + step, 0.0, 1.0)
        if misfit(rows, choice, of_vector(proposal)) <= limit:
            points.append(proposal)
        elif len(points) <= 2 * len(BOUNDS):
            scale *= 0.97  # the first steps were too wide
    return np.array(points)


def _far_apart(points: np.ndarray, num: int) -> np.ndarray:
    """The first point, the ends of each parameter's range, then always the one farthest from all that are chosen."""
    chosen = [0, *points.argmin(axis=0), *points.argmax(axis=0)]
    chosen = list(dict.fromkeys(int(index) for index in chosen))
    scaled = points / np.maximum(np.ptp(points, axis=0), 1e-12)
    while len(chosen) < min(num, len(points)):
        nearest = np.linalg.norm(scaled[:, None] - scaled[chosen], axis=2).min(axis=1)
        chosen.append(int(nearest.argmax()))
    return points[chosen]
