"""Which algorithm will win on a cluster, and by how much: predictions by number of ranks, and a recommendation.

Owns the list of algorithms that are compared, how uncertainty is propagated, and the rule of the recommendation. Does
not own the times (`timing.py`, `push_timing.py`), the cluster's numbers (`cluster_model.py`), or how the result looks
(`plan_view.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student_t

from pushreduce.communication.topology import build_topology
from pushreduce.simulation.cluster_model import ClusterModel
from pushreduce.simulation.push_timing import sgp
from pushreduce.simulation.time_line import (
    Seconds,
    TimeLine,
    draw_compute_seconds,
    host_compute_seconds,
)
from pushreduce.simulation.timing import allreduce, lasgd, overlapped_allreduce

NUM_WARM_UP, NUM_ITERATIONS = 20, 120
_MAX_DRAWS, _MIN_DRAWS = 20, 5
_RANKS_TIMES_DRAWS = 1280  # so that large clusters do not take hours
WORTH_IT = 1.05
"""The least speed-up for which an algorithm that costs accuracy is recommended."""
AS_FAST = 1.1
"""One that asks less of the training is preferred to another that is faster by up to this factor."""

MAX_LOCAL_STEPS = 6.0
"""The most local steps an average of what is recommended: LASGD(5) that waits after five counts as 6."""

_Program = Callable[[ClusterModel, Sequence[int], Seconds], TimeLine]
"""(cluster, bytes of each parameter, compute times [iterations, workers]) -> time line"""


@dataclass(frozen=True)
class Variant:
    """An algorithm with its settings."""

    name: str
    options: str
    """Of `src/train.py`; empty for what is shown for comparison only."""
    program: _Program
    worker_is_host: bool = False
    never_waits: bool = False
    """Workers go on alone for as long as an average takes."""


def _lasgd(tau_max: int) -> _Program:
    return lambda model, parameter_bytes, compute: lasgd(model, sum(parameter_bytes), compute, tau_max)


def _sgp(num_peers: int, tau: int) -> _Program:
    def program(model: ClusterModel, parameter_bytes: Sequence[int], compute: Seconds) -> TimeLine:
        topology = build_topology("exponential", compute.shape[1], num_peers=num_peers)
        return sgp(model, sum(parameter_bytes), compute, topology, tau)

    return program


def _of_hosts(variant: Variant) -> Variant:
    return replace(
        variant,
        name=f"{variant.name} of hosts",
        options=f"{variant.options} --worker host",
        worker_is_host=True,
    )


SGD_AR = Variant("SGD-AR", "--algorithm allreduce", overlapped_allreduce)
"""What the others are measured against."""
_LASGD_1 = Variant("LASGD(1)", "--algorithm lasgd", _lasgd(1))
_SGP = Variant("SGP", "--algorithm sgp", _sgp(1, 0))
_OSGP_1 = Variant("OSGP(1)", "--algorithm sgp --tau 1", _sgp(1, 1))
VARIANTS = (
    Variant("SGD-AR, no overlap", "", allreduce),
    SGD_AR,
    _of_hosts(_LASGD_1),
    _LASGD_1,
    Variant("SGP, 2 peers", "--algorithm sgp --num-peers 2", _sgp(2, 0)),
    _of_hosts(_SGP),
    _SGP,
    _of_hosts(_OSGP_1),
    _OSGP_1,
    Variant("LASGD(5)", "--algorithm lasgd --tau-max 5", _lasgd(5)),
    Variant("LASGD(inf)", "--algorithm lasgd --tau-max 0", _lasgd(0), never_waits=True),
)
"""From the second on by what they ask of the training: the fewer and the fresher the models averaged, the earlier."""


@dataclass(frozen=True)
class Interval:
    """A prediction and its 95 % interval."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


@dataclass(frozen=True)
class Prediction:
    """Of one variant on one number of ranks."""

    variant: Variant
    num_ranks: int
    num_draws: int
    iteration_seconds: Interval
    """A rank's mean time between its steps."""
    exposed_seconds: Interval
    """The part of it that is not the rank's own computation: waiting for messages, or for ranks that are later."""
    speed_up: Interval
    """SGD-AR's time of an iteration over this one's."""
    local_steps: float
    """Mean number of a worker's steps between two averages, as LASGD counts them; 1 of all others."""


def rank_counts(model: ClusterModel, max_ranks: int) -> list[int]:
    """Numbers of ranks from 2 to `max_ranks`, each twice the one before, that fill hosts or lie in one."""
    count = model.ranks_per_host
    while count % 2 == 0:
        count //= 2
    counts = []
    while count <= max_ranks:
        if count >= 2:
            counts.append(count)
        count *= 2
    return counts


def num_draws_of(num_ranks: int) -> int:
    """How many clusters are drawn from the model's uncertainty: 20 up to 64 ranks, fewer above."""
    return max(_MIN_DRAWS, min(_MAX_DRAWS, _RANKS_TIMES_DRAWS // num_ranks))


def variants_of(model: ClusterModel, num_ranks: int) -> list[Variant]:
    """Those that differ: hosts are workers where there are several, of several ranks each; two peers need three."""
    has_host_workers = model.ranks_per_host > 1 and num_ranks > model.ranks_per_host
    return [
        each
        for each in VARIANTS
        if (not each.worker_is_host or has_host_workers)
        and not (each.name == "SGP, 2 peers" and num_ranks == 2)
    ]


def predict(
    model: ClusterModel,
    parameter_bytes: Sequence[int],
    num_ranks: int,
    *,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> list[Prediction]:
    """All variants on a number of ranks, each on the same clusters, drawn from within the model's uncertainty.

    Every draw has its own compute times, so that the intervals contain what chance makes of a run of 100 iterations.

    Args:
        parameter_bytes: of each parameter, in forward order.
        tick: called after every draw.
    """
    variants = variants_of(model, num_ranks)
    num_draws = num_draws_of(num_ranks)
    times = np.empty((3, num_draws, len(variants)))  # iteration and exposed seconds, local steps
    for draw in range(num_draws):
        random = np.random.default_rng([seed, num_ranks, draw])
        drawn = model.drawn(random)
        compute = draw_compute_seconds(drawn, NUM_ITERATIONS, num_ranks, random)
        for index, variant in enumerate(variants):
            times[:, draw, index] = _measures(variant, drawn, parameter_bytes, compute)
        tick()
    iteration, exposed, local_steps = times
    speed_up = iteration[:, [variants.index(SGD_AR)]] / iteration
    return [
        Prediction(
            variant,
            num_ranks,
            num_draws,
            iteration_seconds=_interval(iteration[:, index], is_ratio=True),
            exposed_seconds=_interval(exposed[:, index], is_ratio=False),
            speed_up=_interval(speed_up[:, index], is_ratio=True),
            local_steps=float(local_steps[:, index].mean()),
        )
        for index, variant in enumerate(variants)
    ]


def _measures(
    variant: Variant, model: ClusterModel, parameter_bytes: Sequence[int], compute_seconds: Seconds
) -> tuple[float, float, float]:
    """Iteration seconds, exposed seconds, and local steps an average."""
    worker_seconds = compute_seconds
    if variant.worker_is_host:
        worker_seconds = host_compute_seconds(model, compute_seconds, sum(parameter_bytes))
        model = model.leaders()
    line = variant.program(model, parameter_bytes, worker_seconds)
    in_host = float(worker_seconds.mean() - compute_seconds.mean())  # waiting there, too, is exposed
    num_averages = line.steps_per_allreduce.total()
    local_steps = 1.0
    if num_averages:
        local_steps = sum(steps * count for steps, count in line.steps_per_allreduce.items()) / num_averages
    elif variant.never_waits:  # no average has ended in all the iterations that were looked at
        local_steps = math.inf
    return (
        line.iteration_seconds(NUM_WARM_UP),
        line.mean_blocked_seconds(NUM_WARM_UP) + in_host,
        local_steps,
    )


def _interval(draws: NDArray[np.float64], *, is_ratio: bool) -> Interval:
    """Where one more draw lies in 95 of 100 cases (Student's t), on a logarithmic scale for what is a ratio."""
    values = np.log(draws) if is_ratio else draws
    half_width = student_t.ppf(0.975, len(values) - 1) * values.std(ddof=1) * math.sqrt(1 + 1 / len(values))
    ends = [float(values.mean() + sign * half_width) for sign in (0, -1, 1)]
    return Interval(*(math.exp(end) if is_ratio else end for end in ends))


# -- the recommendation --------------------------------------------------------------------------------------------


def choose(predictions: Sequence[Prediction]) -> Prediction:
    """What is recommended for one number of ranks: SGD-AR, unless another one is more than 5 % faster.

    Of those, the first in the order of `VARIANTS` that is as fast as the fastest, within 10 %. None whose workers go on
    alone for long: what never waits always wins, however rarely it averages.
    """
    baseline = next(each for each in predictions if each.variant == SGD_AR)
    rivals = [each for each in predictions if each.variant.options and each.speed_up.value > WORTH_IT]
    rivals = [each for each in rivals if each.local_steps <= MAX_LOCAL_STEPS]
    if not rivals:
        return baseline
    fastest = max(each.speed_up.value for each in rivals)
    return next(each for each in rivals if each.speed_up.value * AS_FAST >= fastest)


def recommend(predictions: Sequence[Prediction]) -> list[str]:
    """A sentence, with its reason, for every range of ranks with the same choice; `predictions` of all numbers."""
    by_num_ranks: dict[int, list[Prediction]] = {}
    for each in predictions:
        by_num_ranks.setdefault(each.num_ranks, []).append(each)
    ranges: list[list[Prediction]] = []
    for of_one in by_num_ranks.values():
        choice = choose(of_one)
        if not ranges or ranges[-1][0].variant != choice.variant:
            ranges.append([])
        ranges[-1].append(choice)
    return [_sentence(chosen, by_num_ranks[chosen[-1].num_ranks]) for chosen in ranges]


def _sentence(chosen: Sequence[Prediction], others: Sequence[Prediction]) -> str:
    """`others` are all predictions for the last number of ranks in `chosen`, whose times are the reason."""
    first, last = chosen[0].num_ranks, chosen[-1]
    ranks = f"{first} ranks" if first == last.num_ranks else f"{first} to {last.num_ranks} ranks"
    baseline = next(each for each in others if each.variant == SGD_AR)
    waits = (
        f"SGD-AR waits {1e3 * max(0.0, baseline.exposed_seconds.value):.1f} of the "
        f"{1e3 * baseline.iteration_seconds.value:.1f} ms of an iteration"
    )
    if last.variant == SGD_AR:
        rivals = [each for each in others if each.variant.options and each.local_steps <= MAX_LOCAL_STEPS]
        fastest = max(rivals, key=lambda each: each.speed_up.value)
        reason = "no other is faster"
        if fastest is not baseline:
            reason = (
                f"the fastest of the others, {fastest.variant.name}, gains {fastest.speed_up.value - 1:.1%}: less than "
                f"the {WORTH_IT - 1:.0%} that would be worth a loss in accuracy"
            )
        take = f"nothing to gain, take PyTorch DDP or {SGD_AR.options}"
        return f"{ranks}: {take}. With {last.num_ranks} {waits}; {reason}."
    doubt = "" if last.speed_up.low > WORTH_IT else f" Not certain: it may be {last.speed_up.low:.2f} only."
    return (
        f"{ranks}: take {last.variant.options}. With {last.num_ranks} {waits}, {last.variant.name} "
        f"{1e3 * max(0.0, last.exposed_seconds.value):.1f} of {1e3 * last.iteration_seconds.value:.1f} ms: "
        f"{last.speed_up:.2f} times as fast.{doubt} It costs some accuracy: compare short runs."
    )
