"""The algorithms, one page each, and the one table of their names."""

from __future__ import annotations

import torch
from torch import nn

from pushreduce.algorithms.allreduce import AllReduceSGD
from pushreduce.algorithms.base import Algorithm, Progress, Recorder, Stats
from pushreduce.algorithms.lasgd import LASGD
from pushreduce.algorithms.sgp import SGP
from pushreduce.communication.base import Communicator
from pushreduce.settings import Settings

__all__ = ["LASGD", "SGP", "Algorithm", "AllReduceSGD", "Progress", "Recorder", "Stats", "build_algorithm"]


def build_algorithm(
    settings: Settings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    communicator: Communicator,
    recorder: Recorder | None = None,
) -> Algorithm:
    """The algorithm that `settings.algorithm` names, with its own settings."""
    build = {
        "allreduce": lambda **shared: AllReduceSGD(model, optimizer, communicator, **shared),
        "lasgd": lambda **shared: LASGD(model, optimizer, communicator, settings.lasgd, **shared),
        "sgp": lambda **shared: SGP(
            model, optimizer, communicator, settings.sgp, seed=settings.seed, **shared
        ),
    }[settings.algorithm]
    return build(max_grad_norm=settings.optimizer.max_grad_norm, recorder=recorder)
