"""SGD-AR, synchronous all-reduce SGD: gradients are averaged over all workers before every step.

The average of a parameter's gradient starts as soon as `backward()` has finished it (a post-accumulate-gradient hook),
so that communication overlaps the rest of the backward pass; Horovod fuses what is ready at the same time.

The mean is over samples: sum_i b_i g_i / sum_i b_i, with b_i the samples of rank i in this round, 0 for a rank that has
none left. A hook cannot know b_i yet, so it sends g_i as it is; that is right, up to a factor, when all contributing
ranks have equal b_i. Only where they differ does a second average put it right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pushreduce.algorithms.base import Algorithm, Recorder
from pushreduce.communication.base import Communicator, Handle


class AllReduceSGD(Algorithm):
    """Synchronous all-reduce SGD; memory beside the model and its gradients: one more set of gradients."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
        *,
        max_grad_norm: float | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(model, optimizer, communicator, max_grad_norm=max_grad_norm, recorder=recorder)
        self._trainable = self.parameters.parameters
        self._averages: list[torch.Tensor | None] = [None] * len(self._trainable)
        self._names = [f"gradient.{index}" for index in range(len(self._trainable))]
        self._handles: dict[int, Handle] = {}
        self._accumulating = False
        self._round = 0
        if communicator.size > 1:  # of one rank's gradients the mean is there already
            for index, parameter in enumerate(self._trainable):
                parameter.register_post_accumulate_grad_hook(
                    lambda _, index=index: self._gradient_ready(index)
                )

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def step(self, num_samples: int) -> None:
        self._refuse_in_consensus()
        self._take_round(num_samples)

    def finish(self) -> None:
        self._refuse_in_consensus()
        all_finishing = False
        while not all_finishing:  # others still have data: their rounds need this rank's zeros
            for parameter in self._trainable:
                parameter.grad = None  # what an earlier round left there is not contributed again
            all_finishing = self._take_round(0, finishing=True)

    def _gradient_ready(self, index: int) -> None:
        """Runs inside `backward()`, once a parameter."""
        if self._accumulating:
            return
        if index in self._handles:
            raise RuntimeError(
                "backward() ran twice before step(): wrap all but the last in `with algorithm.accumulating():`"
            )
        clock = self.communicator.clock  # no context manager: this runs once a parameter and step
        start = clock.now()
        self._post(index)
        self.stats.communication_seconds += clock.now() - start

    def _post(self, index: int) -> None:
        gradient = self._trainable[index].grad
        assert gradient is not None
        average = self._averages[index]
        if average is None or average.shape != gradient.shape or average.dtype != gradient.dtype:
            self._averages[index] = average = torch.empty_like(gradient)
        self._handles[index] = self.communicator.average_async(gradient, self._names[index], out=average)
        self.stats.messages += 1
        self.stats.bytes_sent += gradient.nbytes

    def _take_round(self, num_samples: int, *, finishing: bool = False) -> bool:
        """One round of all ranks: averages, then the same update everywhere. Returns whether all were finishing."""
        with self._timed("communication_seconds"):
            # Every rank tells its samples, and which parameters it has a gradient for.
            present = [p.grad is not None for p in self._trainable]
            rates = [group["lr"] if num_samples > 0 else 0.0 for group in self.optimizer.param_groups]
            counts = [num_samples, num_samples**2, num_samples > 0, finishing, self._stop_wanted]
            tally = torch.tensor([*counts, *present, *rates], dtype=torch.float64)
            tally_handle = self.communicator.average_async(tally, "tally")
            for index, parameter in enumerate(self._trainable):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if index not in self._handles and self.communicator.size > 1:
                    self._post(index)
        with self._timed("blocked_seconds"):
            sums = [mean * self.communicator.size for mean in tally_handle.wait().tolist()]
            if self.communicator.size > 1:
                averages = [self._handles.pop(index).wait() for index in range(len(self._trainable))]
            else:
                averages = [gradient for p in self._trainable if (gradient := p.grad) is not None]
        samples, squares, num_contributing, num_finishing, num_stopping = map(round, sums[: len(counts)])
        any_present = [round(total) > 0 for total in sums[len(counts) : len(counts) + len(present)]]
        with self._timed("communication_seconds"), torch.no_grad():
            if num_contributing * squares != samples**2:
                self._correct_for_unequal_samples(averages, num_samples, samples)
            elif 0 < num_contributing < self.communicator.size:
                torch._foreach_mul_(averages, self.communicator.size / num_contributing)
            for index, parameter in enumerate(self._trainable):
                # The gradient's memory and the average's change places. Where no rank had a gradient it stays None,
                # since optimizers treat None (no update) and zero (momentum, weight decay) differently.
                if averages[index] is not parameter.grad:
                    self._averages[index] = parameter.grad
                parameter.grad = averages[index] if any_present[index] else None
        if num_contributing > 0:
            if num_samples == 0:
                self._adopt_learning_rates([total / num_contributing for total in sums[-len(rates) :]])
            self._local_update()
        self._record("round", round=self._round, num_samples=num_samples, learning_rate=self._learning_rate)
        self._round += 1
        self.progress.agreed_samples += samples
        self.progress.stop_requested = self.progress.stop_requested or num_stopping > 0
        return num_finishing == self.communicator.size

    def _adopt_learning_rates(self, rates: list[float]) -> None:
        """A rank without data takes the others' update at their rate, since its own schedule stands still."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if not math.isclose(
                group["lr"], rate, rel_tol=1e-12
            ):  # the mean of equal rates may differ in the last bit
                group["lr"] = rate

    def _correct_for_unequal_samples(
        self, averages: list[torch.Tensor], num_samples: int, samples: int
    ) -> None:
        """Adds the mean of (n b_i / sum_j b_j - 1) g_i: the sample-weighted mean less the plain one."""
        factor = self.communicator.size * num_samples / samples - 1.0
        handles = [
            self.communicator.average_async(factor * parameter.grad, f"correction.{index}")
            for index, parameter in enumerate(self._trainable)
            if parameter.grad is not None
        ]
        torch._foreach_add_(averages, [handle.wait() for handle in handles])

    @contextmanager
    def _parameters_averaged(self) -> Iterator[None]:
        yield  # all workers hold the same parameters

    def state_dict(self) -> dict[str, Any]:
        if self._handles:
            raise RuntimeError("gradients are in flight: call step() first")
        return {"agreed_samples": self.progress.agreed_samples, "round": self._round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.progress.agreed_samples, self._round = state["agreed_samples"], state["round"]
