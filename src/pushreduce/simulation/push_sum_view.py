"""SGP from the global view, in float64 NumPy: X(k+1) = (X(k) - gamma grad F(Z(k))) P(k)^T along a trace.

Owns the matrices P(k) of the supplement ("augmented" by virtual nodes that hold the messages in transit), the same
replay with one matrix an event, and the mass invariant. Which traces are sound is `push_sum_trace.py`'s.

A node is a row [x, w] of d + 1 numbers: numerator and weight always move by the same matrix. Nodes 0 to n - 1 are the
ranks; virtual nodes begin at zero. Optimizers run at z = x / w, and their displacement goes into x as it is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import numpy as np

from pushreduce.communication.topology import Topology
from pushreduce.simulation.global_view import Event, Gradient, Rule, Vector, reject
from pushreduce.simulation.push_sum_trace import Message, RankTrace, Rules, check_trace

MASS_TOLERANCE = 1e-9
"""Of `mass_drift` at the end of a replay: rounding in 10 000 rounds is below a thousandth of it."""


def replay_sgp(
    x0: Vector,
    events: Sequence[Sequence[Event]],
    gradient: Gradient,
    rule: Rule,
    topology: Topology,
    *,
    tau: int,
    average_rounds: int,
    biased: bool,
    may_skip: bool = False,
) -> Vector:
    """SGP along a trace, all ranks' rounds together: one matrix P(k) a round.

    Args:
        x0: where all ranks begin, float64 [d].
        events: one trace a rank, as `push_sum_trace.py` describes them.
        gradient: see `Gradient`; a rank's steps are asked for in order.
        rule: the optimizer in its initial state; every rank gets a copy.
        topology: who sends to whom, by sending round.
        tau: the largest delay in rounds, and the rounds between sends (0: every round, as 1).
        average_rounds: rounds with averaged gradients that come first, in which nothing is sent.
        biased: z = x, the ablation.
        may_skip: some of a round's messages may have been left out, their mass kept.

    Returns:
        The ranks' models z at the end, float64 [n, d].

    Raises:
        ValueError: the trace breaks a rule of `check_trace`; or a rank adds a message in a round before its own send of
            that round, and so passes a share of it on at once, which no P(k) of the supplement does
            (`replay_sgp_by_event` follows it). Names rank and event.
    """
    rules = Rules(topology, tau, average_rounds, may_skip)
    traces = check_trace(events, rules)
    applications = [(trace.rank, each) for trace in traces for each in trace.applications.values()]
    for rank, each in applications:
        if each.before_send:
            reject(rank, each.event, "applied before the rank's own send of that round: this is not X P(k)^T")
    max_delay = max((each.delay for _, each in applications), default=0)
    n = len(traces)
    workers = _Workers(x0, n, gradient, rule, biased)
    nodes = np.concatenate([workers.initial(), np.zeros((n * max_delay, len(x0) + 1))])
    for k in range(max(trace.num_rounds for trace in traces)):
        updates = {trace.rank: trace.updates[k] for trace in traces if k in trace.updates}
        if k < average_rounds:
            workers.average(nodes, updates)
            continue
        for rank, event in updates.items():
            workers.step(nodes, rank, event)
        sending_round, remainder = divmod(k - average_rounds, max(1, tau))
        sends = {}
        if remainder == 0:
            sends = {t.rank: t.sends[sending_round] for t in traces if sending_round in t.sends}
        matrix = _mixing_matrix(n, max_delay, sends, traces)
        _assert_column_stochastic(matrix)
        nodes = matrix @ nodes
    assert not nodes[n:, -1].any(), "a message is still in transit"
    workers.check_mass(nodes)
    return workers.models(nodes)


def _mixing_matrix(n: int, max_delay: int, sends: Mapping[int, Event], traces: Sequence[RankTrace]) -> Vector:
    """P(k), [n (1 + max_delay)] squared, from the sends of round k by rank.

    Node i + n r, the supplement's virtual node i_r, holds what rank i is to apply r rounds on.
    """
    matrix = np.zeros((n * (1 + max_delay),) * 2)
    for i in range(n):
        send = sends.get(i, {"to": [], "share": 0.0})
        matrix[i, i] = 1 - send["share"] * len(send["to"])
        for j in send["to"]:
            delay = traces[j].applications[Message(send["sending_round"], i, j)].delay
            matrix[j + n * delay, i] = send["share"]
    virtual = np.arange(n, len(matrix))
    matrix[virtual - n, virtual] = 1.0
    return matrix


def replay_sgp_by_event(
    x0: Vector,
    events: Sequence[Sequence[Event]],
    gradient: Gradient,
    rule: Rule,
    topology: Topology,
    *,
    tau: int,
    average_rounds: int,
    biased: bool,
) -> Vector:
    """SGP along a trace, one matrix an event, in an order in which every message is sent before it is applied.

    Knows no rounds: a send makes a virtual node for each of its messages, applying one removes it. So it follows any
    interleaving, and messages left out (their mass is kept) are nothing special to it.

    Args, Returns: as for `replay_sgp`.

    Raises:
        ValueError: the trace breaks a rule of `check_trace`, or has no such order; names rank and event.
    """
    check_trace(events, Rules(topology, tau, average_rounds, may_skip=True))
    n = len(events)
    workers = _Workers(x0, n, gradient, rule, biased)
    nodes: dict[int | Message, Vector] = dict(enumerate(workers.initial()))
    next_event = [0] * n
    while next_event[0] < len(events[0]) and events[0][next_event[0]]["event"] == "average":
        workers.average(nodes, {rank: trace[next_event[rank]] for rank, trace in enumerate(events)})
        next_event = [number + 1 for number in next_event]

    def advance(rank: int, event: Event) -> bool:
        """Lets `event` happen; False: it cannot yet."""
        match event["event"]:
            case "step":
                workers.step(nodes, rank, event)
            case "send":
                m, to, share = event["sending_round"], event["to"], event["share"]
                kept = 1 - share * len(to)
                matrix = np.array([[kept]] + [[share]] * len(to))
                _mix(nodes, matrix, [rank], [rank, *(Message(m, rank, j) for j in to)])
            case "apply":
                message = Message(event["sending_round"], event["source"], rank)
                if message not in nodes:
                    return False
                _mix(nodes, np.array([[1.0, 1.0]]), [rank, message], [rank])
        return True

    progressing = True
    while progressing:
        progressing = False
        for rank, trace in enumerate(events):
            while next_event[rank] < len(trace) and advance(rank, trace[next_event[rank]]):
                next_event[rank] += 1
                progressing = True
    for rank, trace in enumerate(events):
        if next_event[rank] < len(trace):
            event = trace[next_event[rank]]
            reject(rank, event, f"rank {event['source']} sends it only after what follows from it: a circle")
    assert nodes.keys() == set(range(n)), "a message is still in transit"
    workers.check_mass(np.stack([nodes[rank] for rank in range(n)]))
    return workers.models(nodes)


def _mix(
    nodes: dict[int | Message, Vector],
    matrix: Vector,
    sources: Sequence[int | Message],
    targets: Sequence[int | Message],
) -> None:
    """Puts `matrix` @ sources [len(targets), len(sources)] in their place; it is the identity on all other nodes."""
    _assert_column_stochastic(matrix)
    before = np.stack([nodes.pop(source) for source in sources])
    nodes.update(zip(targets, matrix @ before, strict=True))


def _assert_column_stochastic(matrix: Vector) -> None:
    assert (matrix >= 0).all(), matrix
    assert np.allclose(matrix.sum(axis=0), 1.0, rtol=0, atol=1e-14), matrix


class _Workers:
    """What the ranks do between mixings: their optimizers, and the mass that there must be."""

    def __init__(self, x0: Vector, num_ranks: int, gradient: Gradient, rule: Rule, biased: bool) -> None:
        self._start = np.append(x0.astype(np.float64), 1.0)
        self._rules = [copy.deepcopy(rule) for _ in range(num_ranks)]
        self._gradient, self._biased = gradient, biased
        self._mass = num_ranks * self._start
        self._turnover = np.abs(self._mass)

    def initial(self) -> Vector:
        """The ranks' nodes at the start, [n, d + 1]: equal x, w = 1."""
        return np.tile(self._start, (len(self._rules), 1))

    def models(self, nodes: Vector | Mapping[int | Message, Vector]) -> Vector:
        """The ranks' z, [n, d]."""
        return np.stack([self._model(nodes[rank]) for rank in range(len(self._rules))])

    def step(self, nodes: Vector | Mapping[int | Message, Vector], rank: int, event: Event) -> None:
        """The rank's own gradient and optimizer step, in place."""
        g = self._gradient(rank, event["step"], self._model(nodes[rank]))
        self._update(nodes[rank], rank, g, event["learning_rate"])

    def average(self, nodes: Vector | Mapping[int | Message, Vector], events: Mapping[int, Event]) -> None:
        """Every rank's optimizer step with sum_i b_i g_i / sum_i b_i, in place; none if nobody contributes."""
        weighted, num_samples = np.zeros(len(self._start) - 1), 0
        for rank, event in events.items():
            if (b := event["num_samples"]) > 0:
                weighted += b * self._gradient(rank, event["step"], self._model(nodes[rank]))
                num_samples += b
        if num_samples > 0:
            for rank, event in events.items():
                self._update(nodes[rank], rank, weighted / num_samples, event["learning_rate"])

    def check_mass(self, nodes: Vector) -> None:
        """The sums of x and of w over the `nodes` [num_nodes, d + 1] are the start's plus all displacements'."""
        drift = mass_drift(nodes, self._mass, self._turnover)
        assert not drift > MASS_TOLERANCE, drift  # NaN: the run diverged

    def _update(self, node: Vector, rank: int, g: Vector, learning_rate: float) -> None:
        z = self._model(node)
        displacement = self._rules[rank].update(z, g, learning_rate) - z
        node[:-1] += displacement
        self._mass[:-1] += displacement
        self._turnover[:-1] += np.abs(displacement)

    def _model(self, node: Vector) -> Vector:
        return node[:-1].copy() if self._biased else node[:-1] / node[-1]


# -- invariants


def mass_drift(nodes: Vector, mass: Vector, turnover: Vector) -> float:
    """How far the sums of numerators and of weights are from what they are to be; 0 is nowhere.

    PushSum conserves both, messages in transit included, under any interleaving.

    Args:
        nodes: [x, w] of all nodes, float64 [num_nodes, d + 1].
        mass: what their sum is to be: all that ever went in, float64 [d + 1].
        turnover: the same without signs, to which rounding and so the result are relative, float64 [d + 1].
    """
    return float((np.abs(nodes.sum(axis=0) - mass) / np.maximum(turnover, math.ulp(0.0))).max())
