"""One rank of the measurement: every system takes its block of steps in turn, in the same processes.

Started by measure.py on the hosts of an emulated cluster; their clocks are one, since they are one machine. Owns the
systems and what is timed; prints one line of JSON a block, on rank 0. What the numbers mean is tables.py's.

A block begins at a barrier and has some steps of lead-in, which fill the algorithm's pipeline, before those that
count. Afterwards the algorithm drains, so that nothing of it is under way when the next system has its turn.
All systems of a round draw the same computation times.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))
import pieces  # noqa: E402
import workbench  # noqa: E402
from pieces import ALL_REDUCE, NUM_PARAMETERS, WIDTH  # noqa: E402

from pushreduce.algorithms import LASGD, SGP, Algorithm, AllReduceSGD  # noqa: E402
from pushreduce.communication import startup  # noqa: E402
from pushreduce.communication.base import Communicator  # noqa: E402
from pushreduce.settings import EmulationSettings, LASGDSettings, SGPSettings  # noqa: E402
from pushreduce.training.emulated_compute import EmulatedCompute  # noqa: E402

BATCH_SIZE = 1


def build_model() -> nn.Sequential:
    """[batch, WIDTH] -> [batch, WIDTH]; layers of one size, so that all gradients take equally long."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(pieces.NUM_LAYERS):
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        model.extend([layer, nn.ReLU()])
    return model


class System:
    """A way of training the model. This one is what all have in common: a worker that knows no other.

    Args:
        communicator: this rank's.
        compute: the emulated computation; the real one takes a millisecond, a part of it.
    """

    def __init__(self, communicator: Communicator, compute: EmulationSettings) -> None:
        self.communicator, self._clock = communicator, communicator.clock
        self.model = build_model()
        self._net: nn.Module = self.model
        self._initial = self.parameters()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        # First: its hooks must have waited before another's may send the gradient.
        self._compute = EmulatedCompute(
            compute,
            self.model,
            communicator,
            seed=0,
            passes_per_step=1,
            communication_seconds=self.communication_seconds,
        )
        self._ready = (0.0, 0.0)
        next(self.model.parameters()).register_post_accumulate_grad_hook(lambda _: self._note_ready())

    def _note_ready(self) -> None:
        """The first layer, the last in `backward()`, has its gradient. DDP waits before `backward()` returns."""
        self._ready = (self._clock.now(), self.communication_seconds())

    def parameters(self) -> torch.Tensor:
        """A copy, [NUM_PARAMETERS]."""
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def distance_moved(self) -> torch.Tensor:
        """From the initial parameters, [NUM_PARAMETERS]."""
        return self.parameters() - self._initial

    def take_step(self, index: int) -> float:
        """One step on samples that depend on its number and the rank; the seconds of its computation.

        What Horovod's and DDP's hooks take in `backward()` counts as computation and so is hidden in the given time.
        """
        generator = torch.Generator().manual_seed(index * self.communicator.size + self.communicator.rank)
        inputs, targets = torch.randn(2, BATCH_SIZE, WIDTH, generator=generator)
        start, communicated = self._clock.now(), self.communication_seconds()
        self.optimizer.zero_grad()
        with self._compute.spending(index), self.in_backward():
            functional.mse_loss(self._net(inputs), targets).backward()
        ready, communicated_when_ready = self._ready
        self.update()
        return ready - start - (communicated_when_ready - communicated)

    def in_backward(self) -> AbstractContextManager[None]:
        """Around the passes."""
        return nullcontext()

    def communication_seconds(self) -> float:
        """Spent in hooks so far."""
        return 0.0

    def update(self) -> None:
        """What follows `backward()`."""
        self.optimizer.step()

    def steps_per_allreduce(self) -> Counter[int]:
        """LASGD's counter, a copy."""
        return Counter()

    def drain(self) -> None:
        """Leaves nothing under way."""


class Ours(System):
    """One of this package's algorithms."""

    def __init__(
        self,
        communicator: Communicator,
        compute: EmulationSettings,
        build: Callable[..., Algorithm],
        *,
        overlap: bool = True,
    ) -> None:
        self._algorithm: Algorithm | None = None
        self._overlap = overlap
        super().__init__(communicator, compute)
        self._algorithm = build(self.model, self.optimizer, communicator)

    def in_backward(self) -> AbstractContextManager[None]:
        assert self._algorithm is not None
        return nullcontext() if self._overlap else self._algorithm.accumulating()

    def communication_seconds(self) -> float:
        return 0.0 if self._algorithm is None else self._algorithm.stats.communication_seconds

    def update(self) -> None:
        assert self._algorithm is not None
        self._algorithm.step(BATCH_SIZE)

    def steps_per_allreduce(self) -> Counter[int]:
        assert self._algorithm is not None
        return Counter(self._algorithm.stats.steps_per_allreduce)

    def drain(self) -> None:
        assert self._algorithm is not None
        self._algorithm.finish()


class HorovodOptimizer(System):
    """Horovod's own."""

    def __init__(self, communicator: Communicator, compute: EmulationSettings) -> None:
        import horovod.torch as hvd

        super().__init__(communicator, compute)
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer, named_parameters=self.model.named_parameters()
        )


class DDP(System):
    """PyTorch's wrapper, over gloo."""

    def __init__(
        self, communicator: Communicator, compute: EmulationSettings, bucket_mb: float | None
    ) -> None:
        super().__init__(communicator, compute)
        self._net = nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=bucket_mb)  # type: ignore[arg-type]


def _lasgd(tau_max: int) -> partial[Ours]:
    return partial(Ours, build=partial(LASGD, settings=LASGDSettings(tau_max=tau_max)))


def _sgp(tau: int) -> partial[Ours]:
    return partial(Ours, build=partial(SGP, settings=SGPSettings(tau=tau)))


STEP = (pieces.COMPUTE_SECONDS, pieces.JITTER)
SYSTEMS: dict[str, tuple[Callable[..., System], tuple[float, float]]] = {
    "SGD-AR, no overlap": (partial(Ours, build=AllReduceSGD, overlap=False), STEP),
    "SGD-AR": (partial(Ours, build=AllReduceSGD), STEP),
    "Horovod": (HorovodOptimizer, STEP),
    "DDP": (partial(DDP, bucket_mb=pieces.DDP_BUCKET_MB), STEP),
    pieces.ONE_BUCKET: (partial(DDP, bucket_mb=None), STEP),
    "SGP": (_sgp(0), STEP),
    pieces.NO_JITTER: (_sgp(0), (pieces.COMPUTE_SECONDS, 0.0)),
    "OSGP(1)": (_sgp(1), STEP),
    "LASGD(1)": (_lasgd(1), STEP),
    "LASGD(5)": (_lasgd(5), STEP),
    pieces.INTENSIVE: (_lasgd(5), (pieces.INTENSIVE_COMPUTE_SECONDS, pieces.JITTER)),
}
"""How a system is built; the seconds of its step's computation and their jitter."""


def main() -> None:
    """Measures and prints."""
    arguments = parse_arguments()
    communicator = workbench.start()
    if any(name.startswith("DDP") for name in arguments.systems):
        start_gloo(communicator, arguments.directory)
    systems: dict[str, System] = {}
    for name in arguments.systems:
        if name != ALL_REDUCE:
            build, (seconds, jitter) = SYSTEMS[name]
            systems[name] = build(communicator, EmulationSettings(seconds / arguments.speed_up, jitter))
    gc.disable()  # a collection stops one rank, and with it those that wait for it
    for round_number in range(arguments.first_round, arguments.rounds):
        order = arguments.systems if round_number % 2 == 0 else arguments.systems[::-1]
        for name in order:
            gc.collect()
            if name == ALL_REDUCE:
                measured = time_all_reduces(communicator, arguments.steps)
            else:
                measured = time_block(
                    systems[name], communicator, round_number, arguments.lead_in, arguments.steps
                )
            if communicator.rank == 0:
                block = {"system": name, "round": round_number, "lead_in": arguments.lead_in, **measured}
                print(json.dumps(block), flush=True)
        if round_number == arguments.first_round:  # later, rounding errors have grown
            check_same_model([systems[name] for name in pieces.SAME_UPDATES if name in systems])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    communicator.barrier()
    startup.shut_down()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="+", choices=[ALL_REDUCE, *SYSTEMS], required=True)
    parser.add_argument("--first-round", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--lead-in", type=int, required=True, help="steps of a block that do not count")
    parser.add_argument("--steps", type=int, required=True, help="steps of a block that count")
    parser.add_argument("--speed-up", type=float, required=True, help="of the computation")
    parser.add_argument(
        "--directory", type=Path, required=True, help="for temporary files, seen by all hosts"
    )
    return parser.parse_args()


def start_gloo(communicator: Communicator, directory: Path) -> None:
    """The process group that DDP takes, over the emulated network."""
    warnings.filterwarnings("ignore", "Grad strides do not match")
    os.environ.setdefault(
        "GLOO_SOCKET_IFNAME", "eth0" if communicator.local_size < communicator.size else "lo"
    )
    meeting = directory / communicator.allgather(f"gloo-{os.getpid()}")[0]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=communicator.rank, world_size=communicator.size
    )


def time_block(
    system: System, communicator: Communicator, round_number: int, num_lead_in: int, num_steps: int
) -> dict[str, Any]:
    """Computation and end of every step of every rank, in ms (ends: since rank 0 began); the same on all ranks."""
    first = round_number * (num_lead_in + num_steps)
    compute_seconds, ends = [], []
    communicator.barrier()
    start = communicator.clock.now()
    for index in range(num_lead_in + num_steps):
        if index == num_lead_in:
            counted, cpu = system.steps_per_allreduce(), time.process_time()
        compute_seconds.append(system.take_step(first + index))
        ends.append(communicator.clock.now())
    cpu_seconds = time.process_time() - cpu
    counted = system.steps_per_allreduce() - counted
    system.drain()
    communicator.barrier()
    ranks = communicator.allgather((start, compute_seconds, ends, cpu_seconds, counted))
    origin = ranks[0][0]
    return {
        "compute_ms": [_milliseconds(rank[1]) for rank in ranks],
        "ended_ms": [_milliseconds([end - origin for end in rank[2]]) for rank in ranks],
        "cpu_ms": _milliseconds([rank[3] for rank in ranks]),
        "steps_per_allreduce": dict(sorted(sum((rank[4] for rank in ranks), Counter()).items())),
    }


def time_all_reduces(communicator: Communicator, num_repeats: int) -> dict[str, Any]:
    """Each lasts from the moment the last rank begins until the last has the mean; in ms."""
    buffer, mean = torch.ones(NUM_PARAMETERS), torch.empty(NUM_PARAMETERS)
    communicator.average(buffer, "alone", out=mean)
    starts, ends = [], []
    for _ in range(num_repeats):
        communicator.barrier()
        starts.append(communicator.clock.now())
        communicator.average(buffer, "alone", out=mean)
        ends.append(communicator.clock.now())
    ranks = communicator.allgather((starts, ends))
    seconds = [
        max(rank[1][index] for rank in ranks) - max(rank[0][index] for rank in ranks)
        for index in range(num_repeats)
    ]
    return {"all_reduce_ms": _milliseconds(seconds)}


def check_same_model(systems: list[System]) -> None:
    """Each has taken the same updates: else the comparison is of different work."""
    for other in systems[1:]:
        ours, theirs = systems[0].distance_moved(), other.distance_moved()
        error = float((ours - theirs).norm() / ours.norm())
        assert error < 1e-3, f"the models' updates differ by {error:.1e} of their size"


def _milliseconds(seconds: list[float]) -> list[float]:
    return [round(1e3 * each, 2) for each in seconds]


if __name__ == "__main__":
    main()
