"""What SGD-AR and LASGD would take on a cluster: their time lines without gradients, by recursion over iterations.

Owns when a worker waits and for whom, as `algorithms/allreduce.py` and `algorithms/lasgd.py` do it; a test holds the
pages and this module against each other to 1e-9. SGP's messages share links: `push_timing.py`. Does not own what an
average takes (`cluster_model.py`) or how compute times are distributed: they are given, [iterations, workers].

Where whole hosts are the workers (`--worker host`), give `model.leaders()` and `host_compute_seconds`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pushreduce.settings import FORWARD_SHARE
from pushreduce.simulation.cluster_model import ClusterModel
from pushreduce.simulation.time_line import Seconds, TimeLine

_LASGD_TALLY_BYTES = 16
"""Behind the weights (`algorithms/tally.py`)."""


def allreduce(
    model: ClusterModel, parameter_bytes: Sequence[int], compute_seconds: Seconds, *, has_tally: bool = True
) -> TimeLine:
    """SGD-AR whose gradients are averaged after the backward pass.

    Args:
        parameter_bytes: of each parameter, in forward order.
        compute_seconds: [iterations, workers].
        has_tally: with this program's small average that makes unequal batches right. PyTorch DDP has none.
    """
    num_workers = compute_seconds.shape[1]
    seconds = model.average_seconds(sum(parameter_bytes), num_workers)
    if has_tally:
        seconds += _tally_seconds(model, len(parameter_bytes), num_workers)
    return _in_step(compute_seconds, compute_seconds.max(axis=1) + seconds)


def overlapped_allreduce(
    model: ClusterModel, parameter_bytes: Sequence[int], compute_seconds: Seconds, *, has_tally: bool = True
) -> TimeLine:
    """SGD-AR that sends gradients while the backward pass goes on, as Horovod and PyTorch DDP do.

    The forward pass takes the share of a step that `training/emulated_compute.py` gives it; in the rest gradients
    become ready at equal distances, from the last parameter to the first. Horovod, whenever it is idle, averages all
    gradients that all ranks have ready; what becomes ready meanwhile waits for the next time.

    Args: see `allreduce`.
    """
    num_workers = compute_seconds.shape[1]
    num_parameters = len(parameter_bytes)
    sums = np.concatenate(([0], np.cumsum(parameter_bytes[::-1], dtype=np.int64)))
    ready_shares = FORWARD_SHARE + (1 - FORWARD_SHARE) * np.arange(1, num_parameters + 1) / num_parameters
    known: dict[int, float] = {}  # bytes -> seconds of their average: the same few come again and again

    def average_seconds(num_bytes: int) -> float:
        if num_bytes not in known:
            known[num_bytes] = model.average_seconds(num_bytes, num_workers)
        return known[num_bytes]

    # All begin together, so that a gradient is ready on all ranks when it is on the slowest; iterations are independent
    # of each other, and the k-th averages of all are dealt with at once.
    slowest = compute_seconds.max(axis=1)
    now, num_sent = np.zeros(len(slowest)), np.zeros(len(slowest), np.int64)
    while len(left := np.flatnonzero(num_sent < num_parameters)):
        first = num_sent[left]
        begin = np.maximum(now[left], ready_shares[first] * slowest[left])
        is_timed = slowest[left] > 0  # else all is ready at once
        share = np.divide(begin, slowest[left], out=np.ones(len(left)), where=is_timed)
        num_ready = np.searchsorted(ready_shares, share, side="right")
        num_ready = np.maximum(num_ready, first + 1)  # a quotient that was rounded down must not stop it
        num_bytes = sums[num_ready] - sums[first]
        now[left] = begin + [average_seconds(each) for each in num_bytes.tolist()]
        num_sent[left] = num_ready
    if has_tally:  # it goes with the last gradients
        now += _tally_seconds(model, num_parameters, num_workers)
    return _in_step(compute_seconds, now)


def lasgd(model: ClusterModel, num_model_bytes: int, compute_seconds: Seconds, tau_max: int) -> TimeLine:
    """LASGD: local steps while an all-reduce of the weights is under way.

    The all-reduce begins when the last worker has posted it. A worker asks whether it is done at the end of each of its
    local steps, and waits for it at the end of the tau_max-th (0: never).

    Args:
        num_model_bytes: of the weights.
        compute_seconds: [iterations, workers]. A worker that has taken all its steps goes on to take part, as in
            `finish()`.
    """
    num_iterations, num_workers = compute_seconds.shape
    average_seconds = model.average_seconds(num_model_bytes + _LASGD_TALLY_BYTES, num_workers)
    ends = np.empty_like(compute_seconds)
    steps_per_allreduce: Counter[int] = Counter()
    ends[0] = compute_seconds[0]  # the first step has nothing to wait for: all post
    now = ends[0].copy()
    num_steps = np.ones(num_workers, np.int64)
    while num_steps.min() < num_iterations:
        done_seconds = now.max() + average_seconds
        has_steps = num_steps < num_iterations
        now[~has_steps] = done_seconds  # in finish()
        workers = np.flatnonzero(has_steps)
        tau = 0
        while len(workers):  # those that have not synchronised yet
            tau += 1
            steps = num_steps[workers]
            end = now[workers] + compute_seconds[steps, workers]
            is_done = end >= done_seconds
            num_done = int(np.count_nonzero(is_done))
            steps_per_allreduce[tau] += num_done
            if tau == tau_max:
                steps_per_allreduce[tau + 1] += len(workers) - num_done
                end = np.maximum(end, done_seconds)
                is_done[:] = True
            ends[steps, workers] = now[workers] = end
            num_steps[workers] += 1
            workers = workers[~is_done]
            has_steps = num_steps[workers] < num_iterations
            now[workers[~has_steps]] = done_seconds
            workers = workers[has_steps]
    return TimeLine(compute_seconds, ends, steps_per_allreduce=+steps_per_allreduce)


def _tally_seconds(model: ClusterModel, num_parameters: int, num_workers: int) -> float:
    """SGD-AR's second, small average: 5 counters, a flag a parameter and a learning rate; negotiated with the first."""
    if num_workers == 1:
        return 0.0
    return model.average_message_seconds(8 * (6 + num_parameters), num_workers)


def _in_step(compute_seconds: Seconds, iteration_seconds: Seconds) -> TimeLine:
    """All workers begin every iteration together."""
    ends = np.cumsum(iteration_seconds)[:, None].repeat(compute_seconds.shape[1], axis=1)
    return TimeLine(compute_seconds, ends)
