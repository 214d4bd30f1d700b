"""The contract between the training loop (or a user's own loop) and an algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pushreduce.communication.base import Communicator
from pushreduce.communication.flat import FlatParameters


@dataclass
class Progress:
    """How far the whole run is, as this rank knows it."""

    agreed_samples: int = 0
    """Global samples that all ranks have agreed on."""
    own_samples: int = 0
    """This rank's samples that the agreed ones do not contain yet."""
    stop_requested: bool = False
    """All ranks know that at least one wants the run to stop; equal on all ranks after `finish()`."""
    size: int = 1

    @property
    def samples(self) -> int:
        """Global samples: agreed + size x own since then. Exact with one rank, and after `finish()`."""
        return self.agreed_samples + self.size * self.own_samples


@dataclass
class Stats:
    """Cumulative counters of one rank since it started (not since the run did)."""

    bytes_sent: int = 0
    """Payload bytes handed to the communicator (not the bytes on the wire)."""
    messages: int = 0
    local_update_seconds: float = 0.0
    """In the optimizer's own step, clipping included."""
    communication_seconds: float = 0.0
    """Copying, posting and applying: work for communication that is not waiting."""
    blocked_seconds: float = 0.0
    """Waiting for other ranks."""
    steps_per_allreduce: Counter[int] = field(default_factory=Counter)
    """LASGD: how many local steps an all-reduce took -> how often."""


Recorder = Callable[[dict[str, Any]], None]
"""Receives the events of `--trace`, as dictionaries that JSON can hold."""


class Algorithm(ABC):
    """One worker of a decentralised algorithm, around a model and its optimizer.

    The constructor broadcasts rank 0's parameters and buffers, so all ranks begin at the same model, and moves the
    trainable parameters into one flat buffer that they alias from then on; it must come after `model.to(device)`.

    Args:
        model: its parameters are synchronised; tied ones once, frozen ones not at all.
        optimizer: any torch optimizer over the model's parameters; its state stays local.
        communicator: real or simulated.
        max_grad_norm: clip the gradient of the local update to this L2 norm.
        recorder: receives the events of a trace.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        communicator: Communicator,
        *,
        max_grad_norm: float | None = None,
        recorder: Recorder | None = None,
    ) -> None: ...

    @abstractmethod
    def step(self, num_samples: int) -> None:
        """Takes one step of the algorithm; call it once per mini-batch, straight after `backward()`.

        Reads the gradients in `.grad` and does not clear them. On return the model's parameters are where the next
        gradient is to be taken.

        Args:
            num_samples: samples that the gradients are the mean of.
        """

    def accumulating(self) -> AbstractContextManager[None]:
        """Inside it, `backward()` only adds to `.grad`: for all but the last backward of a step."""
        return nullcontext()

    @abstractmethod
    def finish(self) -> None:
        """Drains all that is in flight. Collective, idempotent; `step()` may follow.

        Ranks may enter it after different numbers of steps: inside it a rank keeps answering the others until all
        are in.
        """

    def request_stop(self) -> None:
        """Asks all ranks to stop; they know it by `progress.stop_requested`. Local, returns at once."""

    @property
    @abstractmethod
    def progress(self) -> Progress: ...

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """The mean model of all workers in place of the worker's own, then back. Collective."""
        yield

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All state that is neither the model's nor the optimizer's. Local; RuntimeError while anything is in flight."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`; after the model and the optimizer have been restored."""
