"""The paper's cluster as a `ClusterModel`, and what the project's timing programs say of it.

Owns what is fixed, what is fitted and which choices there are. Does not own the times (`pushreduce.simulation`), the
paper's numbers (`paper.py`) or the search for parameters (`fit.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache

import numpy as np
from paper import Row

from pushreduce.communication.topology import build_topology
from pushreduce.simulation.cluster_model import ClusterModel
from pushreduce.simulation.push_timing import sgp
from pushreduce.simulation.time_line import Seconds, TimeLine, draw_compute_seconds, host_compute_seconds
from pushreduce.simulation.timing import allreduce, lasgd, overlapped_allreduce

GPUS_PER_HOST = 4
MODEL_SECONDS_ON_LINK = 0.080  # 100 MB at 10 Gbit/s
NUM_ITERATIONS, NUM_WARM_UP = 220, 20
SEED = 0

IMAGES_PER_SECOND = {"FP32": 367.0, "mixed": 1200.0}
"""Of one V100 16 GB training ResNet-50 v1.5: NVIDIA's published figures, see README.md."""


@dataclass(frozen=True)
class Choice:
    """What the paper leaves open and cannot be fitted."""

    overlap: bool
    """SGD-AR averages gradients while the backward pass goes on."""
    precision: str
    images_per_second: float

    @property
    def label(self) -> str:
        return f"{self.precision}, {'overlapped' if self.overlap else 'not overlapped'}"


CHOICES = tuple(
    Choice(overlap, precision, images_per_second)
    for precision, images_per_second in IMAGES_PER_SECOND.items()
    for overlap in (False, True)
)


@dataclass(frozen=True)
class Parameters:
    """What is fitted on the SGD-AR rows."""

    latency_seconds: float
    """Of each of the ring's 2 (n - 1) messages between hosts, beyond its bytes."""
    step_jitter: float
    """Standard deviation of a GPU's step, relative to its mean; lognormal and independent."""
    in_host_seconds: float
    """What averaging the model among a host's 4 GPUs takes."""


BOUNDS = {"latency_seconds": (0.0, 0.010), "step_jitter": (0.0, 1.5), "in_host_seconds": (0.0, 0.200)}
assert list(BOUNDS) == [each.name for each in fields(Parameters)]


@cache
def parameter_bytes() -> tuple[int, ...]:
    """Of ResNet-50, in forward order; 102 MB."""
    import torch  # both take seconds
    from torchvision.models import resnet50

    with torch.device("meta"):
        return tuple(4 * parameter.numel() for parameter in resnet50(weights=None).parameters())


def cluster_model(row: Row, choice: Choice, parameters: Parameters) -> ClusterModel:
    """The hosts of a row. NCCL: one ring of the whole model whatever its size, nothing of Horovod's own."""
    num_bytes = sum(parameter_bytes())
    return ClusterModel(
        num_hosts=row.num_hosts,
        ranks_per_host=GPUS_PER_HOST,
        link_bits_per_second=8 * num_bytes / MODEL_SECONDS_ON_LINK,
        latency_seconds=parameters.latency_seconds,
        step_seconds=row.batch_size_per_gpu / choice.images_per_second,
        step_jitter=parameters.step_jitter,
        ring_from_bytes=1,
        segment_bytes=2 * num_bytes,
        in_host_seconds_per_byte=parameters.in_host_seconds / num_bytes,
        averages_hosts_first=True,
    )


@lru_cache(64)
def _draws(step_jitter: float, num_gpus: int, num_iterations: int) -> Seconds:
    """Compute times of steps with a mean of a second; the same random numbers for all that is compared."""
    model = ClusterModel(
        1, link_bits_per_second=1.0, latency_seconds=0.0, step_seconds=1.0, step_jitter=step_jitter
    )
    return draw_compute_seconds(model, num_iterations, num_gpus, np.random.default_rng(SEED))


def time_line(row: Row, choice: Choice, parameters: Parameters) -> TimeLine:
    """Of the row's method. Equal sizes have equal compute times, whatever the method."""
    model = cluster_model(row, choice, parameters)
    num_bytes = sum(parameter_bytes())
    compute = model.step_seconds * _draws(parameters.step_jitter, row.num_gpus, NUM_ITERATIONS)
    if row.method == "SGD-AR":
        program = overlapped_allreduce if choice.overlap else allreduce
        return program(model, parameter_bytes(), compute, has_tally=False)
    if row.method == "WLASGD":
        assert row.tau_max is not None
        return lasgd(model, num_bytes, compute, row.tau_max)
    # It charges a sum and a copy, as this program's hosts do; NCCL's average leaves the result with all at once.
    once = replace(model, in_host_seconds_per_byte=model.in_host_seconds_per_byte / 2)
    compute = host_compute_seconds(once, compute, num_bytes)
    if row.method == "LASGD":
        assert row.tau_max is not None
        return lasgd(model.leaders(), num_bytes, compute, row.tau_max)
    assert row.method == "SGP", row
    return sgp(model.leaders(), num_bytes, compute, build_topology("exponential", row.num_hosts), tau=1)


def iteration_seconds(row: Row, choice: Choice, parameters: Parameters) -> float:
    """Mean time of an iteration, as in Figure 6."""
    return time_line(row, choice, parameters).iteration_seconds(NUM_WARM_UP)


def steps_per_allreduce_percent(row: Row, choice: Choice, parameters: Parameters) -> dict[int, float]:
    """As in Table 2: by local steps, tau_max + 1 standing for all-reduces that were waited for."""
    counts: Counter[int] = time_line(row, choice, parameters).steps_per_allreduce
    assert row.tau_max is not None
    return {steps: 100 * counts[steps] / counts.total() for steps in range(1, row.tau_max + 2)}


def in_vector(parameters: Parameters) -> Sequence[float]:
    """The parameters, each from 0 to 1 within its bounds."""
    return [(getattr(parameters, name) - low) / (high - low) for name, (low, high) in BOUNDS.items()]


def of_vector(vector: Sequence[float]) -> Parameters:
    """The inverse of `in_vector`."""
    return Parameters(
        **{
            name: low + float(share) * (high - low)
            for share, (name, (low, high)) in zip(vector, BOUNDS.items(), strict=True)
        }
    )
