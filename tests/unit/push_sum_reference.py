"""SGP as messages between workers that take turns at random: what the oracle is held against; and its events.

Written from the algorithm as one worker sees it, without a matrix, and with momentum SGD of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from pushreduce.communication.topology import Topology, build_topology
from pushreduce.simulation.global_view import SGD
from pushreduce.simulation.push_sum_view import replay_sgp, replay_sgp_by_event

PAIR = build_topology("ring", 2)
BOTH = [replay_sgp, replay_sgp_by_event]


def step(k, s=None, rate=0.5, b=1):
    s = k if s is None else s
    return {"event": "step", "round": k, "step": s, "num_samples": b, "learning_rate": rate}


def average(k, s, b, rate=0.5):
    return {"event": "average", "round": k, "step": s, "num_samples": b, "learning_rate": rate}


def send(k, to, share=0.5, m=None):
    return {"event": "send", "round": k, "sending_round": k if m is None else m, "to": to, "share": share}


def apply(k, m, source):
    return {"event": "apply", "round": k, "sending_round": m, "source": source}


def quadratic(rank, _step, z):
    """Of (z - target)^2 / 2, with the targets 0 and 8."""
    return z - 8.0 * rank


def view(function, traces, topology, gradient=quadratic, x0=(4.0,), rule=None, **options):
    options = {"tau": 0, "average_rounds": 0, "biased": False} | options
    return function(np.array(x0), traces, gradient, rule or SGD(), topology, **options)


SLOW = [step(0), send(0, [0]), step(1), send(1, [0]), apply(1, 0, 0), apply(1, 1, 0)]
"""Rank 1 applies the message of round 0 in round 1, after its own send."""
PROMPT = [step(0), send(0, [1]), apply(0, 0, 1), step(1), send(1, [1]), apply(1, 1, 1)]


def changed(trace, index, *events):
    """`trace` with the event at `index` replaced."""
    return [*trace[:index], *events, *trace[index + 1 :]]


@dataclass
class Worker:
    x: np.ndarray
    num_gradients: int
    w: float = 1.0
    velocity: np.ndarray | float = 0.0
    num_steps: int = 0
    inbox: list[tuple] = field(default_factory=list)
    """(round, sending round, source, payload, weight); payload None: left out."""
    done: set[tuple[int, int]] = field(default_factory=set)
    """(sending round, source) of what has been applied or was left out."""
    trace: list[dict] = field(default_factory=list)


@dataclass
class Reference:
    """A run of `num_rounds` rounds; `num_gradients` a rank, later rounds are taken without one."""

    topology: Topology
    x0: np.ndarray
    gradient: object
    num_gradients: list[int]
    rng: np.random.Generator
    num_rounds: int
    tau: int = 0
    average_rounds: int = 0
    biased: bool = False
    learning_rate: float = 0.1
    momentum: float = 0.0
    skip_probability: float = 0.0
    eager: bool = False
    """Whether ranks receive while they wait to send, too."""

    def run(self) -> tuple[list[list[dict]], np.ndarray, np.ndarray, np.ndarray]:
        """(traces, z [n, d], x [n, d], w [n]) at the end."""
        self.workers = [Worker(self.x0.copy(), number) for number in self.num_gradients]
        for k in range(min(self.average_rounds, self.num_rounds)):
            self.averaged_round(k)
        speeds = self.rng.uniform(0.05, 1.0, len(self.workers))
        turns = {rank: self.pushing_rounds(rank) for rank in range(len(self.workers))}
        while turns:
            ranks = list(turns)
            rank = int(self.rng.choice(ranks, p=speeds[ranks] / speeds[ranks].sum()))
            if next(turns[rank], "ended") == "ended":
                del turns[rank]
        x, w = np.stack([a.x for a in self.workers]), np.array([a.w for a in self.workers])
        return [a.trace for a in self.workers], x if self.biased else x / w[:, None], x, w

    def averaged_round(self, k: int) -> None:
        samples = [int(self.rng.integers(1, 9)) * (a.num_steps < a.num_gradients) for a in self.workers]
        gradients = [
            self.gradient(rank, a.num_steps, a.x) if b else 0.0 * a.x
            for rank, (a, b) in enumerate(zip(self.workers, samples, strict=True))
        ]
        for a, b in zip(self.workers, samples, strict=True):
            a.trace.append(average(k, a.num_steps if b else None, b, self.learning_rate))
            if sum(samples):
                self.move(a, np.average(gradients, axis=0, weights=samples))
            a.num_steps += b > 0

    def pushing_rounds(self, rank: int):
        a, stride = self.workers[rank], max(1, self.tau)
        for k in range(self.average_rounds, self.num_rounds):
            if a.num_steps < a.num_gradients:
                a.trace.append(step(k, a.num_steps, self.learning_rate))
                z = a.x if self.biased else a.x / a.w
                self.move(a, self.gradient(rank, a.num_steps, z))
                a.num_steps += 1
            m, remainder = divmod(k - self.average_rounds, stride)
            if remainder == 0:
                while self.rng.random() < 0.5:
                    if self.eager:
                        self.receive(rank, k, k)
                    yield
                self.send(rank, k, m)
            self.receive(rank, k, k)
            last = self.num_rounds - 1 if k == self.num_rounds - 1 else k - self.tau
            due = {
                (m, source)
                for m in range((last - self.average_rounds) // stride + 1)
                for source in self.topology.in_neighbours(rank, m)
            }
            while not due <= a.done:
                yield
                self.receive(rank, k, k)
            yield

    def send(self, rank: int, k: int, m: int) -> None:
        a = self.workers[rank]
        receivers = self.topology.out_neighbours(rank, m)
        share, to = 1 / (1 + len(receivers)), []
        x, w = a.x.copy(), a.w
        for j in receivers:
            if self.rng.random() < self.skip_probability:
                self.workers[j].inbox.append((k, m, rank, None, 0.0))
                continue
            to.append(j)
            self.workers[j].inbox.append((k, m, rank, share * x, share * w))
            a.x -= share * x
            a.w -= share * w
        a.trace.append(send(k, to, share, m))

    def receive(self, rank: int, own_round: int, up_to_round: int) -> None:
        a = self.workers[rank]
        waiting = []
        for message in a.inbox:
            k, m, source, payload, weight = message
            if k > up_to_round or self.rng.random() < 0.5:
                waiting.append(message)
                continue
            a.done.add((m, source))
            if payload is not None:
                a.x += payload
                a.w += weight
                a.trace.append(apply(own_round, m, source))
        a.inbox = waiting

    def move(self, a: Worker, g: np.ndarray) -> None:
        a.velocity = self.momentum * a.velocity + g
        a.x -= self.learning_rate * a.velocity


# -- drawn at random


GRAPHS = ["exponential", "bipartite-exponential", "ring", "complete", "random"]


def wavy(rank, s, z):
    return 0.5 * z + np.sin(1.0 + rank + 3.0 * s + np.arange(len(z)))


@st.composite
def references(draw, **fixed):
    n = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8]))
    graph = draw(st.sampled_from(GRAPHS))
    peers = (
        draw(st.sampled_from([{}, {"num_peers": 2}, {"two_peer_rounds": 2}]))
        if graph == "exponential"
        else {}
    )
    num_rounds = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    options = {
        "gradient": wavy,
        "tau": draw(st.integers(0, 3)),
        "average_rounds": draw(st.sampled_from([0, 0, 2])),
        "momentum": draw(st.sampled_from([0.0, 0.9])),
        "biased": draw(st.booleans()),
        "skip_probability": draw(st.sampled_from([0.0, 0.3])),
    } | fixed
    x0 = rng.normal(size=3)
    num_gradients = [int(number) for number in rng.integers(0, num_rounds + 1, n)]
    return Reference(
        build_topology(graph, n, seed=7, **peers),
        x0,
        options.pop("gradient"),
        num_gradients,
        rng,
        num_rounds,
        **options,
    )


def replayed(function, reference, traces, **options):
    options = {
        "tau": reference.tau,
        "average_rounds": reference.average_rounds,
        "biased": reference.biased,
    } | options
    if function is replay_sgp:
        options["may_skip"] = reference.skip_probability > 0
    rule = SGD(reference.momentum)
    return function(reference.x0, traces, reference.gradient, rule, reference.topology, **options)
