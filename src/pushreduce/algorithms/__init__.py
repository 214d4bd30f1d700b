"""The algorithms, one page each, and the one table of their names."""

from __future__ import annotations

import torch
from torch import nn

from pushreduce.algorithms.allreduce import AllReduceSGD
from pushreduce.algorithms.base import Algorithm, Progress, Recorder, Stats
from pushreduce.algorithms.host_worker import HostWorker
from pushreduce.algorithms.lasgd import LASGD
from pushreduce.algorithms.sgp import SGP
from pushreduce.communication.base import Communicator
from pushreduce.settings import Settings

__all__ = [
    "LASGD",
    "SGP",
    "Algorithm",
    "AllReduceSGD",
    "HostWorker",
    "Progress",
    "Recorder",
    "Stats",
    "build_algorithm",
]


def build_algorithm(
    settings: Settings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    communicator: Communicator,
    recorder: Recorder | None = None,
) -> Algorithm:
    """The algorithm that `settings.algorithm` names, with its own settings, among ranks or among hosts."""
    make = {
        "allreduce": lambda workers, **shared: AllReduceSGD(model, optimizer, workers, **shared),
        "lasgd": lambda workers, **shared: LASGD(model, optimizer, workers, settings.lasgd, **shared),
        "sgp": lambda workers, **shared: SGP(
            model, optimizer, workers, settings.sgp, seed=settings.seed, **shared
        ),
    }[settings.algorithm]

    def build(workers: Communicator) -> Algorithm:
        return make(workers, max_grad_norm=settings.optimizer.max_grad_norm, recorder=recorder)

    if settings.worker == "host":
        return HostWorker(model, optimizer, communicator, build, recorder=recorder)
    return build(communicator)
