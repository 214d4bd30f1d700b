"""Holds a run made with `--trace` against the oracle: the same events and batches must give the same
parameters.

Owns reading a run directory's trace, recomputing its gradients in float64, and the verdict. The algorithms
are `global_view.py`'s and `push_sum_view.py`'s; batches, model and loss are the workload's own, which the oracle
does not check.

    scripts/replay runs/digits-lasgd
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from pushreduce import settings_file
from pushreduce.communication.topology import build_topology
from pushreduce.settings import OptimizerSettings, Settings
from pushreduce.simulation.global_view import (
    SGD,
    Adam,
    Event,
    Gradient,
    Rule,
    Vector,
    replay_allreduce,
    replay_lasgd,
)
from pushreduce.simulation.push_sum_view import replay_sgp, replay_sgp_by_event
from pushreduce.workloads import Batch, Workload, build_workload

TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
"""Largest relative difference by the run's dtype.

float64: run and oracle differ by rounding alone; 250 steps of the small CNN on digits came to 8e-16, a wrong
alpha (0.999 for 1) in 70 steps to 1e-2. float32: 70 steps came to 4e-6, but 220 to 250 to between 1e-2 and
5e-2. Noise of float32's size can do that: perturbing the start of the oracle by 1e-7 moved its end by 3e-6
or 3e-3, by 1e-6 to 5e-2, on the same traces, presumably where it crosses kinks of ReLU and max-pooling. So
"equal" is evidence in float32, and "different" is none: only float64 tells a fault from rounding.
"""


@dataclass(frozen=True)
class Difference:
    """Between a rank's final parameters and the oracle's."""

    rank: int
    num_steps: int
    absolute: float
    """Largest over the parameters."""
    relative: float
    """The same by the oracle's largest parameter."""


def replay_run(run_dir: Path, settings: Settings, workloads: Sequence[Workload]) -> list[Difference]:
    """Replays the trace in `run_dir`; one difference a rank.

    Args:
        run_dir: of a run from its first step on (not resumed).
        settings: the run's.
        workloads: one a rank, as the run had them.

    Raises:
        ValueError: what is there is no whole trace of such a run, or the run cannot be replayed; one line.
        OSError: a file is missing.
    """
    replayed, num_steps = _replay(run_dir, settings, workloads, build_rule(settings.optimizer))
    differences = []
    for rank, expected in enumerate(replayed):
        final = _read_vector(run_dir / f"trace.final.rank{rank}.pt", len(expected))
        absolute = float(np.abs(final - expected).max())
        relative = absolute / float(np.abs(expected).max())
        differences.append(Difference(rank, num_steps[rank], absolute, relative))
    return differences


def _replay(
    run_dir: Path, settings: Settings, workloads: Sequence[Workload], rule: Rule
) -> tuple[Vector, list[int]]:
    """The oracle's final parameters by rank, float64 [num_ranks, d], and every rank's number of steps."""
    traces = [read_trace(run_dir, rank, len(workloads)) for rank in range(len(workloads))]
    workers = _ranks_of_workers(traces)
    events = [[e for e in traces[ranks[0]] if e["event"] != "worker"] for ranks in workers]
    num_samples = [[e["num_samples"] for e in trace if e.get("num_samples", 0) > 0] for trace in events]
    gradient = _Gradient(workloads, workers, num_samples, settings.optimizer.accumulation_steps)
    initial = _read_vector(run_dir / "trace.initial.pt", gradient.num_parameters)
    match settings.algorithm:
        case "lasgd":
            alpha, beta = settings.lasgd.elastic_alpha, settings.lasgd.elastic_beta
            replayed = replay_lasgd(initial, events, gradient, rule, alpha=alpha, beta=beta)
        case "allreduce":
            replayed = replay_allreduce(initial, events, gradient, rule)
        case "sgp":
            replayed = _replay_sgp(initial, events, gradient, rule, settings)
    worker_of_rank = {rank: worker for worker, ranks in enumerate(workers) for rank in ranks}
    by_rank = [worker_of_rank[rank] for rank in range(len(workloads))]
    return replayed[by_rank], [len(num_samples[worker]) for worker in by_rank]


def _ranks_of_workers(traces: Sequence[Sequence[Event]]) -> list[list[int]]:
    """Every worker's ranks. Where a host is one, all its ranks say so first, and the lowest has the other events."""
    workers: dict[int, list[int]] = {}
    for rank, trace in enumerate(traces):
        ranks = trace[0]["ranks"] if trace and trace[0]["event"] == "worker" else [rank]
        if rank not in ranks or workers.setdefault(ranks[0], ranks) != ranks:
            raise ValueError(f"rank {rank}: the traces disagree about workers: are they of one run?")
    return [workers[first] for first in sorted(workers)]


def _replay_sgp(
    initial: Vector, events: list[list[Event]], gradient: Gradient, rule: Rule, settings: Settings
) -> Vector:
    """By round where senders wait for their slots, by event where they may keep the mass instead."""
    sgp = settings.sgp
    if sgp.wire_dtype != "full":
        raise ValueError(
            f"--wire-dtype {sgp.wire_dtype} rounds what is sent, which the oracle does not know: trace with full"
        )
    topology = build_topology(
        sgp.graph,
        len(events),
        num_peers=sgp.num_peers,
        two_peer_rounds=sgp.two_peer_rounds,
        seed=settings.seed,
    )
    replay = replay_sgp if sgp.slot_patience_seconds is None else replay_sgp_by_event
    return replay(
        initial,
        events,
        gradient,
        rule,
        topology,
        tau=sgp.tau,
        average_rounds=sgp.average_rounds,
        biased=sgp.biased,
    )


def build_rule(settings: OptimizerSettings) -> Rule:
    """The oracle's form of the run's optimizer."""
    decay, max_norm = settings.weight_decay, settings.max_grad_norm
    match settings.optimizer:
        case "sgd":
            return SGD(settings.momentum, settings.nesterov, decay, max_norm)
        case "adam" | "adamw" as name:
            return Adam(weight_decay=decay, decoupled=name == "adamw", max_grad_norm=max_norm)


class _Gradient:
    """`global_view.Gradient` of a run: its own batches and model, in float64. Steps must be asked for in
    order.

    Args:
        workloads: one a rank.
        workers: the ranks of each; all of a worker's take a batch in each of its steps.
        num_samples: of every step, by worker.
        accumulation_steps: batches of a rank and step.
    """

    def __init__(
        self,
        workloads: Sequence[Workload],
        workers: list[list[int]],
        num_samples: list[list[int]],
        accumulation_steps: int,
    ) -> None:
        self._workloads, self._workers, self._num_samples = workloads, workers, num_samples
        self._accumulation_steps = accumulation_steps
        self._batches: list[Iterator[Batch]] = [iter(workload.train_batches()) for workload in workloads]
        self._model: nn.Module = workloads[0].build_model().double().train()
        self._parameters = list(self._model.parameters())
        if not all(parameter.requires_grad for parameter in self._parameters):
            raise ValueError(
                "the model has frozen parameters, which a trace does not hold: it cannot be replayed"
            )
        self.num_parameters = sum(parameter.numel() for parameter in self._parameters)
        self._is_known_to_repeat = False

    def __call__(self, worker: int, step: int, x: Vector) -> Vector:
        vector_to_parameters(torch.from_numpy(x), self._parameters)
        total, num_samples = torch.zeros(self.num_parameters, dtype=torch.float64), 0
        for rank in self._workers[worker]:
            batches = [
                batch.to(torch.device("cpu"), torch.float64)
                for batch in islice(self._batches[rank], self._accumulation_steps)
            ]
            own_samples = sum(len(batch.targets) for batch in batches)
            total += own_samples * self._repeatable_mean(rank, batches)
            num_samples += own_samples
        traced = self._num_samples[worker][step]
        if num_samples != traced:
            raise ValueError(
                f"worker {worker}, step {step}: {traced} samples in the trace, {num_samples} in the batch: are "
                "data and settings those of the run?"
            )
        return (total / num_samples).numpy()

    def _repeatable_mean(self, rank: int, batches: list[Batch]) -> torch.Tensor:
        gradient = self._mean(rank, batches)
        if not self._is_known_to_repeat:
            again = self._mean(rank, batches)
            if not torch.allclose(gradient, again, rtol=1e-6, atol=1e-9 * float(gradient.abs().max())):
                raise ValueError(
                    "the model draws random numbers in training (dropout?): it cannot be replayed"
                )
            self._is_known_to_repeat = True
        return gradient

    def _mean(self, rank: int, batches: list[Batch]) -> torch.Tensor:
        total = torch.zeros(self.num_parameters, dtype=torch.float64)
        for batch in batches:
            loss = self._workloads[rank].loss(self._model, batch)
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            if any(gradient is None for gradient in gradients):
                raise ValueError(
                    "a parameter has no gradient, which a trace does not tell: it cannot be replayed"
                )
            total += parameters_to_vector(gradients)
        return total / len(batches)


# -- files


def read_num_ranks(run_dir: Path) -> int:
    """The size of the run, from rank 0's trace."""
    return int(_read_events(run_dir / "trace.rank0.jsonl")[0].get("size", 0))


def read_trace(run_dir: Path, rank: int, size: int) -> list[Event]:
    """The events of a rank, without the first, which must be its start."""
    path = run_dir / f"trace.rank{rank}.jsonl"
    start, *events = _read_events(path)
    if start != {"event": "start", "rank": rank, "size": size}:
        raise ValueError(f"{path}: begins with {start}, not with the start of rank {rank} of {size}")
    return events


def _read_events(path: Path) -> list[Event]:
    lines = path.read_text().splitlines()
    if not lines:
        raise ValueError(f"{path}: empty; was the run cut short?")
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: no JSON ({error.msg}); was the run cut short?"
            ) from error
    return events


def _read_vector(path: Path, num_parameters: int) -> Vector:
    try:
        vector = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path}: no tensor file; was the run cut short?") from error
    if vector.shape != (num_parameters,):
        raise ValueError(
            f"{path}: shape {tuple(vector.shape)}, but the model has {num_parameters} parameters"
        )
    return vector.double().numpy()


# -- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `scripts/replay`; 0: equal, 1: different, 2: nothing that can be replayed."""
    parser = argparse.ArgumentParser(
        prog="replay", description="Replay a run made with --trace through the float64 oracle."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    run_dir = parser.parse_args(arguments).run
    try:
        return _judge(run_dir)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}; was the run made with --trace?", file=sys.stderr)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


def _judge(run_dir: Path) -> int:
    settings = settings_file.load(run_dir / "settings.yaml")
    dtype = settings.training.dtype
    if dtype not in TOLERANCES:
        raise ValueError(f"{dtype} rounds by too much to tell faults from it: trace with --dtype float64")
    size, tolerance = read_num_ranks(run_dir), TOLERANCES[dtype]
    workloads = [
        build_workload(settings.data, seed=settings.seed, rank=rank, size=size) for rank in range(size)
    ]
    differences = replay_run(run_dir, settings, workloads)
    print("rank   steps   largest difference   relative")
    for each in differences:
        print(f"{each.rank:4}  {each.num_steps:6}   {each.absolute:18.3e}   {each.relative:8.1e}")
    equal = all(each.relative <= tolerance for each in differences)  # NaN is not
    print(f"{'equal' if equal else 'DIFFERENT'} to a relative {tolerance:.0e}, the tolerance for {dtype}")
    if not equal and dtype == "float32":
        print("this may be a fault or rounding (see TOLERANCES): trace the run with --dtype float64 to tell")
    return 0 if equal else 1
