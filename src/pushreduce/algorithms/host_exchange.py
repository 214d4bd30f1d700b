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
    """Made by all ranks of a host together. The leader is rank 0 among them."""

    row: torch.Tensor
    """[elements]: this rank's payload, to be written before `sum`."""
    total: torch.Tensor
    """[elements]: the sum of all rows after `sum`. The leader may overwrite it; the others' may be the same memory."""

    @abstractmethod
    def sum(self) -> None:
        """Adds up the rows; collective, blocks."""

    @abstractmethod
    def adopt(self, parameters: FlatParameters) -> None:
        """Told on the leader, before the first step: these are the parameters that the others take over."""

    @abstractmethod
    def hand_on(self, buffers: Sequence[torch.Tensor]) -> None:
        """Overwrites `buffers`, of the parameters, with the leader's; collective, between two of the host's barriers.

        Args:
            buffers: this rank's; on the leader those that it has adopted.
        """


class SharedMemoryExchange(HostExchange):
    """In the processor's memory: the sum is one pass by all ranks, what is handed on one copy."""

    def __init__(self, host: HostGroup, parameters: FlatParameters, num_elements: int) -> None:
        self._host = host
        rows = host.shared(host.size * num_elements, parameters.payload_dtype)
        self._rows = rows.view(host.size, num_elements)
        self._leaders_buffers = [host.shared(len(each), each.dtype) for each in parameters.buffers]
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
    """On every rank's own GPU. Sums are rounded in the order that NCCL chooses."""

    def __init__(self, host: HostGroup, parameters: FlatParameters, num_elements: int) -> None:
        self._devices = host.on_device(parameters.device)
        self.row = torch.empty(num_elements, dtype=parameters.payload_dtype, device=parameters.device)
        self.total = self.row

    def sum(self) -> None:
        self._devices.sum_in_place(self.row)

    def adopt(self, parameters: FlatParameters) -> None:
        """They are sent from where they are."""

    def hand_on(self, buffers: Sequence[torch.Tensor]) -> None:
        for buffer in buffers:
            self._devices.broadcast(buffer)


def open_exchange(host: HostGroup, parameters: FlatParameters, num_elements: int) -> HostExchange:
    """The one for where `parameters` are; collective.

    Args:
        num_elements: of a payload, of the parameters' payload type.

    Raises:
        ValueError: there is too little shared memory, or no way between the devices.
    """
    kind = SharedMemoryExchange if parameters.device.type == "cpu" else DeviceExchange
    return kind(host, parameters, num_elements)
