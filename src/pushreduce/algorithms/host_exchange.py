"""How the ranks of a host add up their payloads, and take over the parameters of its leader, at every step.

Owns where both lie: in memory that the ranks share, where they compute on processors, or on the GPU of each, between
which NCCL sums and copies. When they do is `host_worker.py`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from pushreduce.communication.base import HostGroup
from pushreduce.communication.flat import FlatParameters


class HostExchange(ABC):
    """The leader is rank 0 of the host.

    Args:
        host: its ranks.
        parameters: this rank's.
        num_elements: of a payload, of the parameters' payload type.

    Raises:
        RuntimeError: out of memory; on this rank alone.
    """

    row: torch.Tensor
    """[num_elements]: this rank's payload, to be written before `sum`."""
    total: torch.Tensor
    """[num_elements]: the sum of all rows, after `sum`. The leader's to overwrite; others may see the same memory."""

    def __init__(self, host: HostGroup, parameters: FlatParameters, num_elements: int) -> None:
        # Keeps no `parameters`: the leader's algorithm moves them, and the memory where they were would stay.
        self._host, self._num_elements, self._dtype = host, num_elements, parameters.payload_dtype
        self._layout = [(len(buffer), buffer.dtype) for buffer in parameters.buffers]

    @abstractmethod
    def connect(self) -> None:
        """To be called next, once every rank has its exchange. Collective.

        Raises:
            ValueError: on all ranks of the host alike: too little shared memory, or no way between the devices.
        """

    @abstractmethod
    def sum(self) -> None:
        """Adds up the rows; collective."""

    @abstractmethod
    def adopt(self, parameters: FlatParameters) -> None:
        """Told on the leader, before the first step: these are the parameters that the others take over."""

    @abstractmethod
    def hand_on(self, buffers: Sequence[torch.Tensor]) -> None:
        """Overwrites `buffers`, of the parameters, with the leader's; collective, between two of the host's barriers.

        Args:
            buffers: this rank's; on the leader those that it has adopted.
        """

    def close(self) -> None:  # noqa: B027  # shared memory goes with the last tensor
        """Gives back what it holds of the devices. Collective."""


class SharedMemoryExchange(HostExchange):
    """In the processor's memory: the sum is one pass by all ranks, what is handed on one copy."""

    def connect(self) -> None:
        host, num_elements = self._host, self._num_elements
        self._rows = host.shared(host.size * num_elements, self._dtype).view(host.size, num_elements)
        self._leaders_buffers = [host.shared(length, dtype) for length, dtype in self._layout]
        self.row, self.total = self._rows[host.rank], self._rows[0]

    def sum(self) -> None:
        self._host.sum_rows(self._rows)

    def adopt(self, parameters: FlatParameters) -> None:
        parameters.move_to(self._leaders_buffers)

    def hand_on(self, buffers: Sequence[torch.Tensor]) -> None:
        if self._host.rank > 0:
            for ours, leaders in zip(buffers, self._leaders_buffers, strict=True):
                ours.copy_(leaders)


class DeviceExchange(HostExchange):
    """On every rank's own GPU, in order with what it computes. Sums are rounded in the order that NCCL chooses."""

    def __init__(self, host: HostGroup, parameters: FlatParameters, num_elements: int) -> None:
        super().__init__(host, parameters, num_elements)
        self.row = torch.empty(num_elements, dtype=self._dtype, device=parameters.device)
        self.total = self.row

    def connect(self) -> None:
        self._devices = self._host.on_devices(self.row)

    def sum(self) -> None:
        self._devices.sum_in_place(self.row)

    def adopt(self, parameters: FlatParameters) -> None:
        """They are sent from where they are."""

    def hand_on(self, buffers: Sequence[torch.Tensor]) -> None:
        for buffer in buffers:
            self._devices.broadcast(buffer)

    def close(self) -> None:
        self._devices.close()


def exchange_for(parameters: FlatParameters) -> type[HostExchange]:
    """The kind for where they are."""
    return SharedMemoryExchange if parameters.device.type == "cpu" else DeviceExchange
