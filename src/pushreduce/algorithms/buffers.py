"""What the consensus model does with buffers, which stay local to a worker while it trains.

Running statistics of BatchNorm: their mean over workers; to the variance the spread of the workers' means is added,
since the variance of a mixture is the mean variance plus the variance of the means. Other floating-point buffers are
averaged. Integer buffers (`num_batches_tracked`) are never averaged: each rank keeps its own.
"""

from __future__ import annotations

import torch
from torch import nn

from pushreduce.communication.base import Communicator


@torch.no_grad()
def average_buffers(model: nn.Module, communicator: Communicator) -> None:
    """Replaces the model's floating-point buffers by the workers' pooled ones, in place. Collective."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    if not buffers:
        return
    own_means = [buffers[name] for name in _running_mean_names(model)]
    squares = [mean.double().square() for mean in own_means]
    # One message in float64: a variance is a difference of nearly equal numbers.
    payload = torch.cat([t.double().reshape(-1) for t in [*buffers.values(), *squares]])
    pooled = communicator.average(payload, "consensus.buffers")
    parts = list(pooled.split([t.numel() for t in [*buffers.values(), *squares]]))
    for buffer, part in zip(buffers.values(), parts, strict=False):
        buffer.copy_(part.view_as(buffer))
    mean_of = dict(zip(buffers, parts, strict=False))
    for name, square in zip(_running_mean_names(model), parts[len(buffers) :], strict=True):
        spread = (square - mean_of[name].square()).clamp_(min=0.0)
        variance = buffers[name.removesuffix("running_mean") + "running_var"]
        variance.add_(spread.view_as(variance))


def _running_mean_names(model: nn.Module) -> list[str]:
    return [
        f"{name}.running_mean".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
    ]
