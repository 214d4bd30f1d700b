"""The contract between the training loop (or a user's own loop) and an algorithm, and what all algorithms share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pushreduce.algorithms.buffers import average_buffers
from pushreduce.communication.base import Clock, Communicator
from pushreduce.communication.flat import FlatParameters


@dataclass
class Progress:
    """How far the whole run is, as this rank knows it."""

    size: int
    """Number of workers."""
    agreed_samples: int = 0
    """Global samples that all ranks have agreed on."""
    own_samples: int = 0
    """This worker's samples that the agreed ones do not contain yet."""
    stop_requested: bool = False
    """At least one rank wants the run to stop. The same on all ranks after `finish()`."""
    share: float | None = None
    """Of all samples, those that this worker is to have; None: all workers have equal shares."""

    @property
    def samples(self) -> int:
        """Global samples: agreed + own since then / share. Exact with one worker, and after `finish()`."""
        since = self.size * self.own_samples if self.share is None else round(self.own_samples / self.share)
        return self.agreed_samples + since


@dataclass
class Stats:
    """Cumulative counters of one rank since the algorithm was made."""

    bytes_sent: int = 0
    """Payload handed to the communicator (not the bytes on the wire)."""
    messages: int = 0
    local_update_seconds: float = 0.0
    """In the optimizer's own step, clipping included."""
    communication_seconds: float = 0.0
    """Copying, posting and applying: work for communication that is not waiting."""
    blocked_seconds: float = 0.0
    """Waiting for other ranks."""
    steps_per_allreduce: Counter[int] = field(default_factory=Counter)
    """Local steps that an all-reduce took -> how often; tau_max + 1: not done after tau_max steps (LASGD)."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Rounds from the sending of a message to its application -> how often (SGP)."""
    messages_kept_back: int = 0
    """Messages whose receiver had no free slot in time, so that their mass was kept (SGP)."""


class Timed:
    """Context manager that adds the time inside to a counter; a generator's would cost a small model's step more."""

    __slots__ = ("_clock", "_phase", "_start", "_stats")

    def __init__(self, stats: Stats, phase: str, clock: Clock) -> None:
        self._stats, self._phase, self._clock = stats, phase, clock

    def __enter__(self) -> None:
        self._start = self._clock.now()

    def __exit__(self, *_error: object) -> None:
        seconds = getattr(self._stats, self._phase) + self._clock.now() - self._start
        setattr(self._stats, self._phase, seconds)


Recorder = Callable[[dict[str, Any]], None]
"""Receives the events of a trace, as dictionaries that JSON can hold."""


class Algorithm(ABC):
    """One worker of a decentralised algorithm, around a model and its optimizer.

    The constructor is collective: it broadcasts rank 0's parameters and buffers, so that all ranks begin at the same
    model. It moves the trainable parameters into one flat buffer that they alias from then on, so it must come after
    `model.to(device)`.

    Args:
        model: its parameters are synchronised; tied ones once, frozen ones not at all.
        optimizer: any torch optimizer over the model's parameters; its state stays local.
        communicator: real or simulated.
        max_grad_norm: clip the gradient of an update to this L2 norm; None: do not.
        recorder: receives the events of a trace; None: no trace.

    Raises:
        ValueError: a model without trainable parameters, or on several devices.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
        *,
        max_grad_norm: float | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.communicator = communicator
        self.max_grad_norm = max_grad_norm
        self.parameters = FlatParameters(model.parameters())
        self.worker_of_rank = list(range(communicator.size))
        """Which worker each rank belongs to; every rank is one but where hosts are (`host_worker.py`)."""
        self.progress = Progress(size=communicator.size)
        self.stats = Stats()
        self._recorder = recorder
        self._stop_wanted = False
        self._in_consensus = False
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            communicator.broadcast(tensor.data, f"initial.{name}")

    # -- what a loop calls -----------------------------------------------------------------------------------------

    @abstractmethod
    def step(self, num_samples: int) -> None:
        """Takes one step of the algorithm; call it once per mini-batch, straight after `backward()`.

        Reads the gradients in `.grad` and leaves clearing them to the loop. On return the model's parameters are
        where the next gradient is to be taken.

        Args:
            num_samples: samples that the gradients are the mean of.
        """

    def accumulating(self) -> AbstractContextManager[None]:
        """Inside it `backward()` only adds to `.grad`: for all but the last backward pass of a step."""
        return nullcontext()

    @abstractmethod
    def finish(self) -> None:
        """Drains all that is in flight. Collective, idempotent; `step()` may follow.

        Ranks may enter after different numbers of steps: inside, a rank keeps answering the others until all are in.
        """

    def request_stop(self) -> None:
        """Asks all ranks to stop, at the next agreement; `progress.stop_requested` then says so. Returns at once."""
        self._stop_wanted = True

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """The mean model of all workers in place of the worker's own; afterwards the worker's own again.

        Collective; drains first. The running statistics of BatchNorm are pooled over the workers, see `buffers.py`.
        """
        self.finish()
        own_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        with self._parameters_averaged():
            average_buffers(self.model, self.communicator)
            self._in_consensus = True
            try:
                yield
            finally:
                self._in_consensus = False
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(own_buffers[name])

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All state that is neither the model's nor the optimizer's. Local.

        Raises:
            RuntimeError: while anything is in flight; call `finish()` first.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`; to be called when nothing is in flight, the model having been restored."""

    def begin_at(self, samples: int) -> None:
        """Begins anew at the model's present parameters, equal on all ranks, as if `samples` had been seen."""
        self.progress.agreed_samples = samples

    def close(self) -> None:  # noqa: B027  # most have nothing to give back
        """Gives back what the algorithm holds of the cluster, after `finish()`. Collective, idempotent.

        The end of the process does so, too: only a process that goes on needs it.
        """

    # -- what algorithms are made of -------------------------------------------------------------------------------

    @abstractmethod
    def _parameters_averaged(self) -> AbstractContextManager[None]:
        """The mean of all workers' parameters in place of the own ones, then back. Collective."""

    def _refuse_in_consensus(self) -> None:
        if self._in_consensus:
            raise RuntimeError("the consensus model is in place of the worker's own: leave consensus() first")

    def _local_update(self) -> None:
        """The optimizer's step on the gradients as they are in `.grad`, clipped if asked."""
        with self._timed("local_update_seconds"):
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.parameters.parameters, self.max_grad_norm)
            self.optimizer.step()

    def _record(self, event: str, **facts: Any) -> None:
        if self._recorder is not None:
            self._recorder({"event": event, **facts})

    def _timed(self, phase: str) -> Timed:
        """Adds the time inside to the counter `phase` of `stats`."""
        return Timed(self.stats, phase, self.communicator.clock)

    @property
    def _learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])
