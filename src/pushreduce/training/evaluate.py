"""Evaluation: of the consensus model on the whole validation set, split over ranks, and of every worker's own model.

Sums and counts are reduced, not means of means, and every validation sample is counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from pushreduce.algorithms import Algorithm
from pushreduce.algorithms.buffers import average_buffers
from pushreduce.communication.agreement import AgreedError, agree
from pushreduce.communication.base import Communicator
from pushreduce.workloads.base import Batch, Workload

_REESTIMATION_BATCHES = 50
_NUM_SAMPLE_IMAGES = 16


class EvaluationStoppedError(AgreedError):
    """A rank was asked to stop while it evaluated: there is no result. Raised on all ranks alike."""


@dataclass(frozen=True)
class Evaluation:
    """Results; all but `predictions` are equal on all ranks."""

    validation_loss: float
    top1_percent: float
    """Of the consensus model, on the whole validation set."""
    top1_percent_by_rank: list[float]
    """Of each rank's own model, on its own part of the validation set."""
    consensus_distance: float
    """sqrt(mean_i ||x_i - consensus||^2) over the workers' parameters, each where its next gradient is taken."""
    predictions: tuple[Tensor, list[str]] | None
    """Rank 0: some images and what the consensus model says of them; None where samples are not images."""


def evaluate(
    algorithm: Algorithm,
    workload: Workload,
    own: Tensor,
    *,
    batch_norm: str,
    stop_wanted: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Evaluates the consensus of all workers, and what each was before they were drained. Collective.

    Call it after `algorithm.finish()`, with no step in between.

    Args:
        own: payload with this worker's parameters before it entered `finish()`; overwritten.
        batch_norm: "mean" or "reestimate", as in the settings.
        stop_wanted: asked between validation batches.

    Raises:
        AgreedError: a validation sample cannot be read.
        EvaluationStoppedError: a rank's `stop_wanted` said so; the workers are as they were.
    """
    model, communicator = algorithm.model, algorithm.communicator
    algorithm.parameters.swap(own)
    try:
        own_sums = agree(communicator, lambda: score(model, workload, stop_wanted)[0])
    finally:
        algorithm.parameters.swap(own)
    with algorithm.consensus():
        square = algorithm.parameters.squared_distance(own)
        if batch_norm == "reestimate":
            reestimate_batch_norm(model, workload, communicator)
        loss, top1_percent, batch = score_together(model, workload, communicator, stop_wanted)
        predictions = None
        if communicator.rank == 0 and batch is not None:
            model.eval()
            predictions = workload.describe_predictions(model, batch, _NUM_SAMPLE_IMAGES)
            model.train()
    squares = dict(zip(algorithm.worker_of_rank, communicator.allgather(square), strict=True))
    return Evaluation(
        validation_loss=loss,
        top1_percent=top1_percent,
        top1_percent_by_rank=[100.0 * s["num_correct"] / max(s["num_samples"], 1.0) for s in own_sums],
        consensus_distance=(sum(squares.values()) / len(squares)) ** 0.5,
        predictions=predictions,
    )


def score_together(
    model: nn.Module,
    workload: Workload,
    communicator: Communicator,
    stop_wanted: Callable[[], bool] = lambda: False,
) -> tuple[float, float, Batch | None]:
    """(loss, top-1 in percent, this rank's first batch) of a model that all ranks hold, on the whole validation set.

    Collective.

    Raises:
        AgreedError: a validation sample cannot be read, or all are skipped.
        EvaluationStoppedError: as in `evaluate`.
    """
    first: list[Batch | None] = []

    def score_own_part() -> dict[str, float]:
        sums, batch = score(model, workload, stop_wanted)
        first.append(batch)
        return sums

    gathered = agree(communicator, score_own_part)
    loss_sum, num_correct, num_samples = (
        sum(sums[name] for sums in gathered) for name in ("loss_sum", "num_correct", "num_samples")
    )
    if num_samples == 0:
        raise AgreedError("no validation image can be read: replace the corrupt files")
    return loss_sum / num_samples, 100.0 * num_correct / num_samples, first[0]


@torch.no_grad()
def score(
    model: nn.Module, workload: Workload, stop_wanted: Callable[[], bool] = lambda: False
) -> tuple[dict[str, float], Batch | None]:
    """Sums of loss and correct answers over this rank's part of the validation set, and its first batch.

    Raises:
        ValueError: a sample cannot be read.
        EvaluationStoppedError: `stop_wanted` said so before a batch; on this rank only.
    """
    was_training = model.training
    model.eval()
    like = next(model.parameters())
    sums: dict[str, float] = dict.fromkeys(("loss_sum", "num_correct", "num_samples"), 0.0)
    first = None
    for batch in workload.validation_batches():
        if stop_wanted():
            raise EvaluationStoppedError("stopped during an evaluation")
        on_device = batch.to(like.device, like.dtype)
        first = on_device if first is None else first
        for name, value in workload.score(model, on_device).items():
            sums[name] += value
    model.train(was_training)
    return sums, first


def reestimate_batch_norm(model: nn.Module, workload: Workload, communicator: Communicator) -> None:
    """BatchNorm's running statistics from the first batches of every shard, in place of what they were. Collective.

    Raises:
        AgreedError: a training sample cannot be read.
    """
    like = next(model.parameters())
    batches = islice(workload.train_batches(), _REESTIMATION_BATCHES)
    inputs = (batch.to(like.device, like.dtype).inputs for batch in batches)
    agree(communicator, lambda: update_bn(inputs, model))
    average_buffers(model, communicator)
