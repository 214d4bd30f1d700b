"""One average of all gradients at once, weighted by samples: the synchronous rounds of a hybrid schedule.

SGD-AR proper, which sends every gradient as soon as it is there, is `allreduce.py`.
"""

from __future__ import annotations

import torch

from pushreduce.algorithms.base import Algorithm
from pushreduce.communication.base import Handle


class AveragedGradients:
    """The average of a round under way; `apply` puts it in place of the own gradients."""

    def __init__(self, algorithm: Algorithm, num_samples: int, handle: Handle) -> None:
        self._algorithm, self._num_samples, self._handle = algorithm, num_samples, handle

    def done(self) -> bool:
        return self._handle.done()

    def apply(self) -> None:
        """Leaves sum_i b_i g_i / sum_i b_i in `.grad` (None where no rank had one).

        A rank without samples takes the others' learning rates, since its own schedule stands still.
        """
        parameters, groups = self._algorithm.parameters.parameters, self._algorithm.optimizer.param_groups
        sizes = [parameter.numel() for parameter in parameters]
        mean = self._handle.wait()
        *gradients, present, rates, samples = mean.split([*sizes, len(parameters), len(groups), 1])
        for parameter, gradient, is_present in zip(parameters, gradients, present.tolist(), strict=True):
            gradient = gradient.div_(samples).view_as(parameter).to(parameter.dtype)
            parameter.grad = gradient if is_present > 0 else None
        if self._num_samples == 0:
            for group, rate in zip(groups, (rates / samples).tolist(), strict=True):
                group["lr"] = rate


def average_gradients(algorithm: Algorithm, num_samples: int) -> AveragedGradients:
    """Starts the average; with 0 samples this rank's gradients do not count. Collective."""
    flat = algorithm.parameters
    parts: list[torch.Tensor] = []
    for parameter in flat.parameters:
        gradient = parameter.grad if num_samples > 0 else None
        part = torch.zeros_like(parameter) if gradient is None else gradient
        parts.append(part.reshape(-1).to(flat.payload_dtype))
    present = [float(num_samples > 0 and parameter.grad is not None) for parameter in flat.parameters]
    rates = [float(group["lr"]) for group in algorithm.optimizer.param_groups]
    tail = torch.tensor([*present, *rates, 1.0], dtype=flat.payload_dtype, device=flat.device)
    weighted = torch.cat([*parts, tail]).mul_(num_samples)
    return AveragedGradients(
        algorithm, num_samples, algorithm.communicator.average_async(weighted, "averaged.gradients")
    )
