"""Time of a bigger model or a slower machine, spent beside the real computation (`--emulated-step-seconds`).

Owns how long a step takes on this rank and where in it the time passes: a third while the model goes forward, two
thirds while it goes backward, in equal shares of its layers. So a gradient is there no earlier than it would be, and
an algorithm that sends it from inside `backward()` overlaps as much as it really could. Time is spent asleep: the
processor is free for communication, as it is where an accelerator computes.

On a slow host of an emulated cluster, and where such a cluster stretches time, it takes longer by those factors.

The schedule holds points in time, not pauses: the real computation is part of the given time, and only what is longer
than that makes a step longer. What an algorithm's own hooks take in between is not computation and comes on top.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from pushreduce.communication.base import Communicator
from pushreduce.communication.emulated_host import this_host
from pushreduce.settings import FORWARD_SHARE, EmulationSettings


class EmulatedCompute:
    """Slows down this rank's forward and backward passes; does nothing where the time is 0.

    To be made before the algorithm: hooks run in the order in which they were registered, and those of a layer must
    have waited before the algorithm's may send its gradient.

    Args:
        settings: time, jitter and slowness.
        model: the one that is trained.
        communicator: whose clock is slept on.
        seed: with the rank and the number of the step, decides the jitter.
        passes_per_step: forward and backward passes that the time of a step is divided over.
        communication_seconds: a counter of what the algorithm has spent in its hooks so far.

    Raises:
        ValueError: not one slowness a rank; on all ranks alike.
    """

    def __init__(
        self,
        settings: EmulationSettings,
        model: nn.Module,
        communicator: Communicator,
        *,
        seed: int,
        passes_per_step: int,
        communication_seconds: Callable[[], float],
    ) -> None:
        slowness = settings.emulated_rank_slowness
        if slowness is not None and len(slowness) != communicator.size:
            raise ValueError(
                f"--emulated-rank-slowness has {len(slowness)} numbers and there are {communicator.size} ranks: "
                "give one a rank"
            )
        host = this_host()
        factor = (
            host.slowness * host.time_stretch * (1.0 if slowness is None else slowness[communicator.rank])
        )
        self._mean_seconds = settings.emulated_step_seconds * factor / passes_per_step
        # A lognormal time of mean 1 and this standard deviation: never negative, and late more often than early.
        self._sigma = math.sqrt(math.log1p(settings.emulated_jitter**2))
        self._seed, self._rank = seed, communicator.rank
        self._clock = communicator.clock
        self._communication_seconds = communication_seconds
        self._waits_in_backward = communicator.can_wait_in_backward
        self._seconds: float | None = None  # of the pass under way; None: between passes
        self._start = self._communicated_before = 0.0
        self._num_forward = 0
        self._layers_backward: set[int] = set()
        self._num_layers = 0
        if settings.emulated_step_seconds > 0 and self._waits_in_backward:
            self._register_hooks(model)

    def pass_seconds(self, step: int) -> float:
        """How long each forward and backward pass of a step, counted from 0, takes on this rank."""
        if self._sigma == 0.0:
            return self._mean_seconds
        generator = random.Random(f"{self._seed} {self._rank} {step}")
        return self._mean_seconds * generator.lognormvariate(-(self._sigma**2) / 2, self._sigma)

    @contextmanager
    def spending(self, step: int) -> Iterator[None]:
        """Around one forward and backward pass of a step. Leaves when its time is over.

        Where a rank cannot wait inside `backward()` (in virtual time, where computation takes none of its own), all
        of it is spent before: gradients are then sent together, at the end of the computation.
        """
        if self._mean_seconds == 0.0:
            yield
            return
        self._start, self._communicated_before = self._clock.now(), self._communication_seconds()
        self._num_forward = 0
        self._layers_backward.clear()
        self._seconds = self.pass_seconds(step)
        try:
            if not self._waits_in_backward:
                self._sleep_until(1.0)
            yield
            self._sleep_until(1.0)  # also for layers that took no part
        finally:
            self._seconds = None

    def _register_hooks(self, model: nn.Module) -> None:
        for module in model.modules():
            parameters = [p for p in module.parameters(recurse=False) if p.requires_grad]
            if not parameters:
                continue
            module.register_forward_hook(lambda *_: self._after_forward())
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, layer=self._num_layers: self._after_backward(layer)
                )
            self._num_layers += 1

    def _after_forward(self) -> None:
        """A layer has its output. One that is used several times has no more than the share of the others."""
        self._num_forward = min(self._num_forward + 1, self._num_layers)
        self._sleep_until(FORWARD_SHARE * self._num_forward / self._num_layers)

    def _after_backward(self, layer: int) -> None:
        """A parameter has its gradient; the first of a layer waits for all of the layer's."""
        self._layers_backward.add(layer)
        done = len(self._layers_backward) / self._num_layers
        self._sleep_until(FORWARD_SHARE + (1 - FORWARD_SHARE) * done)

    def _sleep_until(self, share: float) -> None:
        if self._seconds is None:  # not in training: an evaluation
            return
        communicated = self._communication_seconds() - self._communicated_before
        computed = self._clock.now() - self._start - communicated
        if computed < share * self._seconds:
            self._clock.sleep(share * self._seconds - computed)
