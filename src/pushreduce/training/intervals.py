"""How sure a mean over seeds is: 95 % intervals by Student's t. What is compared is chosen in `scripts/experiment`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def half_width_95(values: Sequence[float]) -> float:
    """Half the width of the mean's 95 % interval, for independent normal values; infinite with fewer than two.

    For a difference between variants that share their seeds give the differences seed by seed: then what a seed does to
    both does not count.
    """
    if len(values) < 2:
        return math.inf
    from scipy.stats import t  # takes a second to import

    return float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def show_interval(values: Sequence[float], num_digits: int = 2) -> str:
    """The mean and its 95 % interval, such as "-0.44 [-0.56, -0.32]"."""
    mean, half = statistics.mean(values), half_width_95(values)
    shown, low, high = (f"{each:.{num_digits}f}" for each in (mean, mean - half, mean + half))
    return shown if math.isinf(half) else f"{shown} [{low}, {high}]"
