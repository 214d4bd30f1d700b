"""All gradients at once as one payload, weighted by samples: what ranks or workers add up to average them.

Owns the payload's layout, and the average over workers in the synchronous rounds of a hybrid schedule. The sum inside a
host is `host_worker.py`'s; SGD-AR proper, which sends every gradient as soon as it is there, is `allreduce.py`.
"""

from __future__ import annotations

import torch

from pushreduce.algorithms.base import Algorithm
from pushreduce.communication.base import Handle


class GradientPayload:
    """The payloads of one algorithm: [num_elements], of its parameters' payload type.

    They hold b g, and behind it b times: whether each parameter has a gradient, the learning rates, and 1; so the sum
    of several, or their mean, has all that is needed for the mean over samples.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self._parameters, self._optimizer = algorithm.parameters, algorithm.optimizer
        num_flags = len(self._parameters.parameters)
        self._num_tail = num_flags + len(self._optimizer.param_groups) + 1
        self.num_elements = self._parameters.num_elements + self._num_tail

    def new(self) -> torch.Tensor:
        """An uninitialised payload."""
        return self._parameters.new_payload(self._num_tail)

    def write(self, num_samples: int, payload: torch.Tensor) -> None:
        """Writes this rank's part; with 0 samples its gradients do not count. Gradients may alias `payload`."""
        flat, offset = self._parameters, 0
        for parameter in flat.parameters:
            part = payload[offset : offset + parameter.numel()]
            if num_samples > 0 and parameter.grad is not None:
                torch.mul(parameter.grad.reshape(-1).to(flat.payload_dtype), num_samples, out=part)
            else:
                part.zero_()
            offset += parameter.numel()
        present = [float(num_samples > 0 and parameter.grad is not None) for parameter in flat.parameters]
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        tail = torch.tensor([*present, *rates, 1.0], dtype=flat.payload_dtype, device=flat.device)
        payload[offset:] = tail.mul_(num_samples)

    def read(self, num_samples: int, payload: torch.Tensor) -> None:
        """Leaves sum_i b_i g_i / sum_i b_i in `.grad` (None where no rank had one), as views of `payload`.

        A rank without samples takes the others' learning rates, since its own schedule stands still.

        Args:
            num_samples: b of this rank.
            payload: the sum or the mean of all ranks' payloads; overwritten.
        """
        parameters, groups = self._parameters.parameters, self._optimizer.param_groups
        sizes = [parameter.numel() for parameter in parameters]
        *gradients, present, rates, samples = payload.split([*sizes, len(parameters), len(groups), 1])
        for parameter, gradient, is_present in zip(parameters, gradients, present.tolist(), strict=True):
            gradient = gradient.div_(samples).view_as(parameter).to(parameter.dtype)
            parameter.grad = gradient if is_present > 0 else None
        if num_samples == 0:
            for group, rate in zip(groups, (rates / samples).tolist(), strict=True):
                group["lr"] = rate


class AveragedGradients:
    """The average of a round under way; `apply` puts it in place of the own gradients."""

    def __init__(self, payload: GradientPayload, num_samples: int, handle: Handle) -> None:
        self._payload, self._num_samples, self._handle = payload, num_samples, handle

    def done(self) -> bool:
        return self._handle.done()

    def apply(self) -> None:
        """See `GradientPayload.read`."""
        self._payload.read(self._num_samples, self._handle.wait())


def average_gradients(algorithm: Algorithm, num_samples: int) -> AveragedGradients:
    """Starts the average; with 0 samples this rank's gradients do not count. Collective."""
    payload = GradientPayload(algorithm)
    own = payload.new()
    payload.write(num_samples, own)
    handle = algorithm.communicator.average_async(own, "averaged.gradients")
    return AveragedGradients(payload, num_samples, handle)
