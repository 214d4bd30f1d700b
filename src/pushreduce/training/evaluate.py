"""Evaluation: of the consensus model on the whole validation set, split over ranks, and of every worker's own model.

Sums and counts are reduced, not means of means, and every validation sample is counted once.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from pushreduce.algorithms import Algorithm
from pushreduce.algorithms.buffers import average_buffers
from pushreduce.communication.base import Communicator
from pushreduce.settings import Settings
from pushreduce.training.agreement import agree
from pushreduce.workloads.base import Workload

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_REESTIMATION_BATCHES = 50


@dataclass(frozen=True)
class Evaluation:
    """Results that are equal on all ranks."""

    validation_loss: float
    top1_percent: float
    """Of the consensus model, on the whole validation set."""
    top1_percent_by_rank: list[float]
    """Of each rank's own model, on its own part of the validation set."""
    consensus_distance: float
    """sqrt(mean_i ||x_i - consensus||^2) over the workers' parameters, each where its next gradient is taken."""


class OwnModel:
    """A worker's own model as it was before the algorithm was drained: its scores, and a copy of its parameters."""

    def __init__(self, algorithm: Algorithm, workload: Workload) -> None:
        self.sums = score(algorithm.model, workload)
        self.parameters = algorithm.parameters.new_payload()
        algorithm.parameters.copy_to(self.parameters)


def evaluate(algorithm: Algorithm, workload: Workload, own: OwnModel, *, batch_norm: str) -> Evaluation:
    """Evaluates the consensus of all workers, and with it what each was on its `own`. Collective; drains."""
    communicator = algorithm.communicator
    with algorithm.consensus():
        square = algorithm.parameters.squared_distance(own.parameters)
        if batch_norm == "reestimate":
            reestimate_batch_norm(algorithm.model, workload, communicator)
        loss, top1_percent = score_together(algorithm.model, workload, communicator)
    gathered = communicator.allgather((own.sums["num_correct"], own.sums["num_samples"], square))
    return Evaluation(
        validation_loss=loss,
        top1_percent=top1_percent,
        top1_percent_by_rank=[100.0 * correct / max(samples, 1) for correct, samples, _ in gathered],
        consensus_distance=(sum(square for *_, square in gathered) / communicator.size) ** 0.5,
    )


def score_together(model: nn.Module, workload: Workload, communicator: Communicator) -> tuple[float, float]:
    """(loss, top-1 in percent) of a model that all ranks hold, on the whole validation set. Collective.

    Raises:
        ValueError: on all ranks alike, a validation sample cannot be read.
    """
    gathered = agree(communicator, lambda: score(model, workload))
    loss_sum, num_correct, num_samples = (
        sum(sums[name] for sums in gathered) for name in ("loss_sum", "num_correct", "num_samples")
    )
    return loss_sum / num_samples, 100.0 * num_correct / num_samples


@torch.no_grad()
def score(model: nn.Module, workload: Workload) -> dict[str, float]:
    """Sums of loss and correct answers over this rank's part of the validation set.

    Raises:
        ValueError: a sample cannot be read.
    """
    was_training = model.training
    model.eval()
    like = next(model.parameters())
    sums: dict[str, float] = dict.fromkeys(("loss_sum", "num_correct", "num_samples"), 0.0)
    for batch in workload.validation_batches():
        for name, value in workload.score(model, batch.to(like.device, like.dtype)).items():
            sums[name] += value
    model.train(was_training)
    return sums


def load_model(settings: Settings, workload: Workload, device: torch.device) -> nn.Module:
    """The workload's model with the weights of the file `settings.evaluate`, a plain state_dict.

    Raises:
        ValueError: no such file, no state_dict, or one of another model.
    """
    path = Path(settings.evaluate or "")
    try:
        weights = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(
            f"{path} cannot be read as a model file ({error}): give a run's model.pt".replace("\n", " ")
        ) from error
    model = workload.build_model().to(device, DTYPES[settings.training.dtype])
    try:
        model.load_state_dict(weights)
    except (RuntimeError, AttributeError, TypeError) as error:
        first_line = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} holds another model than {settings.data.model} on {settings.data.dataset} ({first_line}): "
            "give --model and --dataset as in its run"
        ) from error
    return model


def reestimate_batch_norm(model: nn.Module, workload: Workload, communicator: Communicator) -> None:
    """BatchNorm's running statistics from the first batches of every shard, in place of what they were. Collective."""
    like = next(model.parameters())
    batches = islice(workload.train_batches(), _REESTIMATION_BATCHES)
    update_bn((batch.to(like.device, like.dtype).inputs for batch in batches), model)
    average_buffers(model, communicator)
