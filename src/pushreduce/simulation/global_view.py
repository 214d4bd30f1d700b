"""The independent oracle: all workers of a run as one matrix, in float64 NumPy, from the papers' formulas.

Owns the optimizers' formulas, SGD-AR and LASGD as seen from outside, and the rules that a trace of events
must keep. Shares no code with `algorithms` or `communication`, and must not: agreement between the two is
evidence only while they have nothing in common but the papers. SGP is `push_sum_view.py`'s, reading traces of
real runs `replay.py`'s.

A trace is one list of events a rank, in that rank's order; events are dictionaries as `--trace` writes them:

    LASGD:
        {"event": "step", "step": k, "num_samples": b, "learning_rate": eta}    local step k, counted from 0
        {"event": "post", "round": t}                                           the snapshot s is sent
        {"event": "apply", "round": t}                                          x += alpha (z_t - s)
    SGD-AR:
        {"event": "round", "round": k, "num_samples": b, "learning_rate": eta}  b = 0: contributes nothing
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Event = dict[str, Any]
Gradient = Callable[[int, int, Vector], Vector]
"""(rank, step, x float64 [d]) -> float64 [d]: the gradient of rank's mini-batch `step` (counted from 0) at
x."""


# -- optimizers


class Rule(Protocol):
    """One worker's optimizer with its state."""

    def update(self, x: Vector, gradient: Vector, learning_rate: float) -> Vector:
        """The parameters after one step from `x`; all float64 [d]."""


def _clip(gradient: Vector, max_norm: float | None) -> Vector:
    """torch.nn.utils.clip_grad_norm_ with the L2 norm, its 1e-6 included."""
    if max_norm is None:
        return gradient
    return gradient * min(1.0, max_norm / (float(np.linalg.norm(gradient)) + 1e-6))


@dataclass
class SGD:
    """torch.optim.SGD with dampening 0: v <- mu v + g; the step is along v, or g + mu v for Nesterov's
    form."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    _velocity: Vector | float = field(default=0.0, init=False)

    def update(self, x: Vector, gradient: Vector, learning_rate: float) -> Vector:
        g = _clip(gradient, self.max_grad_norm) + self.weight_decay * x
        self._velocity = self.momentum * self._velocity + g
        return x - learning_rate * (g + self.momentum * self._velocity if self.nesterov else self._velocity)


@dataclass
class Adam:
    """torch.optim.Adam without amsgrad (weight decay added to the gradient), or AdamW if `decoupled`."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    max_grad_norm: float | None = None
    _mean: Vector | float = field(default=0.0, init=False)
    _square: Vector | float = field(default=0.0, init=False)
    _num_steps: int = field(default=0, init=False)

    def update(self, x: Vector, gradient: Vector, learning_rate: float) -> Vector:
        g = _clip(gradient, self.max_grad_norm)
        if self.decoupled:
            x = x - learning_rate * self.weight_decay * x
        else:
            g = g + self.weight_decay * x
        self._num_steps += 1
        self._mean = self.beta1 * self._mean + (1 - self.beta1) * g
        self._square = self.beta2 * self._square + (1 - self.beta2) * g**2
        mean_hat = self._mean / (1 - self.beta1**self._num_steps)
        square_hat = self._square / (1 - self.beta2**self._num_steps)
        return x - learning_rate * mean_hat / (np.sqrt(square_hat) + self.epsilon)


# -- algorithms


def replay_lasgd(
    x0: Vector,
    events: Sequence[Sequence[Event]],
    gradient: Gradient,
    rule: Rule,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Vector:
    """LASGD (Algorithm 1, elastic form of equations 3-6) along a trace.

    A round is z_t = (1 - beta) z_(t-1) + beta mean_i(s_i) with z_(-1) = x0, and x_i += alpha (z_t - s_i).

    Args:
        x0: where all workers begin, float64 [d].
        events: one trace a rank.
        gradient: see `Gradient`.
        rule: the optimizer in its initial state; every worker gets a copy.
        alpha, beta: of the elastic form.

    Returns:
        The workers' parameters at the end, float64 [n, d].

    Raises:
        ValueError: the trace breaks a rule; names rank and event. Rounds and steps count up from 0; one
            average is outstanding at a time; a round is applied after *every* rank has posted it.
    """
    workers = [_LASGDWorker(rank, x0.astype(np.float64), copy.deepcopy(rule)) for rank in range(len(events))]
    # A worker posts round t having applied t - 1, so when all have posted t nobody needs an older centre.
    centre, num_complete = x0.astype(np.float64), 0  # z_(num_complete - 1)
    snapshots: dict[int, Vector] = {}  # s by rank, of round num_complete

    def advance(worker: _LASGDWorker, event: Event) -> bool:
        """Lets `event` happen; False: it cannot yet."""
        nonlocal centre, num_complete, snapshots
        match event:
            case {"event": "step", "step": step, "num_samples": _, "learning_rate": learning_rate}:
                if step != worker.num_steps:
                    reject(worker.rank, event, f"this is the rank's step {worker.num_steps}")
                worker.num_steps += 1
                g = gradient(worker.rank, step, worker.x.copy())
                worker.x = worker.rule.update(worker.x, g, learning_rate)
            case {"event": "post", "round": t}:
                if worker.snapshot is not None:
                    reject(worker.rank, event, f"round {worker.num_rounds - 1} is still outstanding")
                if t != worker.num_rounds:
                    reject(worker.rank, event, f"this is the rank's round {worker.num_rounds}")
                worker.num_rounds += 1
                worker.snapshot = snapshots[worker.rank] = worker.x.copy()
                if len(snapshots) == len(workers):
                    mean = np.mean([snapshots[rank] for rank in range(len(workers))], axis=0)
                    centre = (1 - beta) * centre + beta * mean
                    num_complete, snapshots = t + 1, {}
            case {"event": "apply", "round": t}:
                if worker.snapshot is None or t != worker.num_rounds - 1:
                    reject(worker.rank, event, "the rank has no such round outstanding")
                if t == num_complete:
                    return False
                worker.x = worker.x + alpha * (centre - worker.snapshot)
                worker.snapshot = None
            case _:
                reject(worker.rank, event, "this is no event of LASGD")
        return True

    next_event = [0] * len(workers)
    progressing = True
    while progressing:
        progressing = False
        for worker, trace in zip(workers, events, strict=True):
            while next_event[worker.rank] < len(trace) and advance(worker, trace[next_event[worker.rank]]):
                next_event[worker.rank] += 1
                progressing = True
    for rank, trace in enumerate(events):
        if next_event[rank] < len(trace):
            missing = [other for other in range(len(workers)) if other not in snapshots]
            reject(rank, trace[next_event[rank]], f"ranks {missing} never post that round")
    return np.stack([worker.x for worker in workers])


@dataclass
class _LASGDWorker:
    rank: int
    x: Vector
    rule: Rule
    num_steps: int = 0
    num_rounds: int = 0
    snapshot: Vector | None = None
    """s of the outstanding round, num_rounds - 1."""


def replay_allreduce(x0: Vector, events: Sequence[Sequence[Event]], gradient: Gradient, rule: Rule) -> Vector:
    """SGD-AR along a trace: x <- rule(x, sum_i b_i g_i / sum_i b_i), the same on all workers.

    A rank's mini-batches are counted by the rounds that it contributes to. A round to which nobody
    contributes changes nothing.

    Args:
        x0, events, gradient, rule: as for `replay_lasgd`.

    Returns:
        The workers' parameters at the end, float64 [n, d]; all rows are equal.

    Raises:
        ValueError: the trace breaks a rule; names rank and event. All ranks take the same rounds, counted
            from 0, and update with the same learning rate.
    """
    x, rule = x0.astype(np.float64), copy.deepcopy(rule)
    num_steps = [0] * len(events)
    num_rounds = max(len(trace) for trace in events)
    for k in range(num_rounds):
        samples, weighted, learning_rates = 0, np.zeros_like(x), []
        for rank, trace in enumerate(events):
            if k == len(trace):
                reject(rank, trace[-1] if trace else {}, f"the trace ends; others go on to round {k}")
            match trace[k]:
                case {"event": "round", "round": number, "num_samples": b, "learning_rate": learning_rate}:
                    if number != k:
                        reject(rank, trace[k], f"this is the rank's round {k}")
                    learning_rates.append(learning_rate)
                    if b > 0:
                        weighted += b * gradient(rank, num_steps[rank], x.copy())
                        num_steps[rank] += 1
                        samples += b
                case _:
                    reject(rank, trace[k], "this is no event of SGD-AR")
        if samples > 0:
            for rank, learning_rate in enumerate(learning_rates):
                if learning_rate != learning_rates[0]:
                    reject(rank, events[rank][k], f"rank 0 updates at learning rate {learning_rates[0]}")
            x = rule.update(x, weighted / samples, learning_rates[0])
    return np.tile(x, (len(events), 1))


def reject(rank: int, event: Event, reason: str) -> NoReturn:
    """Refuses a trace for what `event` of `rank` does."""
    raise ValueError(f"rank {rank}, event {event}: {reason}")


# -- invariants


def mean_drift(before: Vector, after: Vector) -> float:
    """How far an operation moved the workers' mean, relative to the largest parameter; 0 is none.

    A LASGD synchronisation that all workers complete leaves the mean where it is, unless beta < 1.

    Args:
        before, after: the workers' parameters, float64 [n, d].
    """
    scale = max(float(np.abs(before).max()), math.ulp(1.0))
    return float(np.abs(after.mean(axis=0) - before.mean(axis=0)).max()) / scale
