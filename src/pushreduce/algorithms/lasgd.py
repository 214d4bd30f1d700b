"""LASGD, Locally Asynchronous SGD: workers keep taking local steps while an all-reduce of their weights is under way.

The paper's Algorithm 1, in its order. Written `x += z - s`, with s the snapshot x^i_t that was sent, so that one worker
alone is plain SGD bit for bit, and a synchronisation that all workers complete leaves their mean untouched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pushreduce.algorithms.base import Algorithm, Recorder
from pushreduce.algorithms.tally import MAX_RANKS, Tally
from pushreduce.communication.base import Communicator, Handle
from pushreduce.settings import LASGDSettings


class LASGD(Algorithm):
    """Locally Asynchronous SGD; memory beside the model: two payloads (three with elastic_beta < 1).

    Args: those of `Algorithm`, and
        settings: tau_max and the elastic form's alpha and beta; defaults are the paper's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
        settings: LASGDSettings | None = None,
        *,
        max_grad_norm: float | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(model, optimizer, communicator, max_grad_norm=max_grad_norm, recorder=recorder)
        if communicator.size > MAX_RANKS:
            raise ValueError(
                f"LASGD counts exactly up to {MAX_RANKS} ranks, got {communicator.size}: use fewer"
            )
        self.settings = settings or LASGDSettings()
        self._snapshot = self.parameters.new_payload(Tally.LENGTH)  # s
        self._mean = self.parameters.new_payload(Tally.LENGTH)  # z
        # One worker alone is its own mean: x += z - s adds nothing, and only the tally behind the weights is sent.
        plain = self.settings.elastic_alpha == self.settings.elastic_beta == 1.0
        self._first = self.parameters.num_elements if communicator.size == 1 and plain else 0
        self._centre: torch.Tensor | None = None  # z_(t-1), kept where beta < 1 only
        if self.settings.elastic_beta < 1.0:
            self._centre = self.parameters.new_payload()
            self.parameters.copy_to(self._centre)
        self._all_reduce: Handle | None = None
        self._own_samples_sent = 0  # what the message in flight tells of progress.own_samples
        self._round = 0  # t, the global clock
        self._tau = 0  # local steps since the last synchronisation
        self._num_steps = 0  # t^i, the local clock

    def step(self, num_samples: int) -> None:
        self._refuse_in_consensus()
        self._local_update()  # lines 3 and 2: x <- x - eta g(x)
        self._record("step", step=self._num_steps, num_samples=num_samples, learning_rate=self._learning_rate)
        self._num_steps += 1
        self._tau += 1
        self.progress.own_samples += num_samples
        if self._all_reduce is None:
            self._send()  # line 4, before the loop
        elif self._tau == self.settings.tau_max or self._all_reduce.done():
            # Not done after tau_max steps counts as tau_max + 1, the last column of the paper's table 2.
            self.stats.steps_per_allreduce[self._tau + (not self._all_reduce.done())] += 1
            self._synchronise()  # lines 4.1 and 4.2
            self._send()  # line 4.3

    def finish(self) -> None:
        self._refuse_in_consensus()
        if self._all_reduce is None:
            self._send(finishing=True)
        while not self._synchronise():
            # Others still take steps: their all-reduce needs this rank's part, until all say that they finish.
            self._send(finishing=True)

    def _send(self, *, finishing: bool = False) -> None:
        """Line 4.3: the weights go to the all-reduce, and with them what this rank has done since the last time."""
        assert self._all_reduce is None
        with self._timed("communication_seconds"):
            if self._first == 0:
                self.parameters.copy_to(self._snapshot)
            tally = Tally(self.progress.own_samples, int(finishing), int(self._stop_wanted))
            tally.write_to(self._snapshot[self.parameters.num_elements :])
            self._own_samples_sent = self.progress.own_samples
            sent, mean = self._snapshot[self._first :], self._mean[self._first :]
            self._all_reduce = self.communicator.average_async(sent, "weights", out=mean)
        self._record("post", round=self._round)
        self._tau = 0
        self.stats.messages += 1
        self.stats.bytes_sent += sent.nbytes

    def _synchronise(self) -> bool:
        """Line 4.1: x <- z + (x - s), waiting for z if need be. Returns whether all ranks were finishing."""
        assert self._all_reduce is not None
        with self._timed("blocked_seconds"):
            self._all_reduce.wait()
        self._all_reduce = None
        with self._timed("communication_seconds"), torch.no_grad():
            told = Tally.sum_from(self._mean[self.parameters.num_elements :], self.communicator.size)
            if self._first == 0:
                self._apply_mean()
        self._record("apply", round=self._round)
        self._round += 1
        self.progress.agreed_samples += told.samples
        self.progress.own_samples -= self._own_samples_sent
        self.progress.stop_requested = self.progress.stop_requested or told.stop_wanted > 0
        return told.finishing == self.communicator.size

    def _apply_mean(self) -> None:
        mean = self._mean[: self.parameters.num_elements]
        snapshot = self._snapshot[: self.parameters.num_elements]
        if self._centre is not None:
            self._centre.lerp_(mean, self.settings.elastic_beta)  # equation 4
            mean.copy_(self._centre)
        self.parameters.add_(mean.sub_(snapshot), alpha=self.settings.elastic_alpha)  # equation 6

    @contextmanager
    def _parameters_averaged(self) -> Iterator[None]:
        assert self._all_reduce is None  # both payloads are free
        own = self._snapshot[: self.parameters.num_elements]
        self.parameters.copy_to(own)
        mean = self._mean[: self.parameters.num_elements]
        self.parameters.copy_from(self.communicator.average(own, "consensus.weights", out=mean))
        try:
            yield
        finally:
            self.parameters.copy_from(own)

    def state_dict(self) -> dict[str, Any]:
        if self._all_reduce is not None:
            raise RuntimeError("an all-reduce is in flight: call finish() first")
        return {
            "agreed_samples": self.progress.agreed_samples,
            "round": self._round,
            "num_steps": self._num_steps,
            "centre": self._centre,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self._all_reduce is None
        self.progress.agreed_samples = state["agreed_samples"]
        self._round, self._num_steps = state["round"], state["num_steps"]
        if self._centre is not None:
            if state["centre"] is not None:
                self._centre.copy_(state["centre"])
            else:  # beta was 1 until now: the centre was the mean, where all workers are after a drain
                self.parameters.copy_to(self._centre)

    def begin_at(self, samples: int) -> None:
        super().begin_at(samples)
        if self._centre is not None:
            self.parameters.copy_to(self._centre)
