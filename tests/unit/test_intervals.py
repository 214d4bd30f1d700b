"""95 % intervals of means over seeds."""

import math

import numpy as np
import pytest

from pushreduce.training.intervals import half_width_95, show_interval


@pytest.mark.parametrize("num_values", [2, 5, 30])
def test_an_interval_holds_the_truth_in_95_of_100_cases(num_values: int) -> None:
    samples = np.random.default_rng(num_values).normal(3.0, 2.0, size=(1000, num_values))
    held = [abs(values.mean() - 3.0) <= half_width_95(values.tolist()) for values in samples]
    # Binomial(1000, 0.95): 0.69 % are one standard deviation.
    assert 0.95 - 4 * 0.0069 < np.mean(held) < 0.95 + 4 * 0.0069


def test_one_value_says_nothing_about_its_spread() -> None:
    assert math.isinf(half_width_95([1.0]))
    assert show_interval([1.0]) == "1.00"


def test_equal_values_leave_no_doubt() -> None:
    assert half_width_95([0.5, 0.5, 0.5]) == 0.0
    assert show_interval([0.5, 0.5, 0.5]) == "0.50 [0.50, 0.50]"
    assert show_interval([0.5, 0.5, 0.5], 1) == "0.5 [0.5, 0.5]"
