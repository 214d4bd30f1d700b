"""The ranks of a real host: memory that they share, a barrier between them, and their GPUs (`host_devices.py`).

Owns where that memory is: a file in /dev/shm, mapped by every rank and unlinked at once, so that the system takes it
back with the last tensor or process, however that ends. (A window of MPI would have to be freed before MPI's end, under
the parameters that alias it.) Knows no MPI: the barrier and the exchange of small objects are given.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from pushreduce.communication.base import DeviceGroup, HostGroup
from pushreduce.communication.host_devices import HostDevices

_DIRECTORY = "/dev/shm"


class HostMemory(HostGroup):
    """See `HostGroup`.

    Args:
        rank, size: of this host's ranks.
        barrier: between them; also orders memory, as MPI's messages inside a host do.
        allgather: of a small object, between them.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        barrier: Callable[[], None],
        allgather: Callable[[Any], list[Any]],
    ) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._allgather = barrier, allgather

    def barrier(self, num_bytes: int = 0) -> None:
        if self.size > 1:
            self._barrier()

    def shared(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        if self.size == 1:
            return torch.empty(num_elements, dtype=dtype)
        path, problem = _new_file(num_elements * dtype.itemsize) if self.rank == 0 else ("", "")
        path, problem = self._allgather((path, problem))[0]
        memory = None
        if not problem:
            try:
                os.stat(path)  # or it would be made anew
                memory = torch.from_file(path, shared=True, size=num_elements, dtype=dtype)
            except (OSError, RuntimeError) as error:
                problem = (
                    f"a rank cannot map its host's shared memory ({error}): let its ranks share {_DIRECTORY}"
                )
        problems = self._allgather(problem)
        if self.rank == 0:
            with suppress(FileNotFoundError):
                os.unlink(path)
        if any(problems):
            raise ValueError(next(filter(None, problems)))
        assert memory is not None
        return memory

    def on_devices(self, scratch: torch.Tensor) -> DeviceGroup:
        return HostDevices(self, scratch)


def _new_file(num_bytes: int) -> tuple[str, str]:
    """(path of a file whose memory is there, "") or ("", what is wrong)"""
    try:
        descriptor, path = tempfile.mkstemp(prefix="pushreduce-", dir=_DIRECTORY)
    except OSError as error:
        return "", f"{_DIRECTORY} cannot be written ({error.strerror}): mount a tmpfs there"
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # else a lack of memory would be a bus error, later
    except OSError as error:
        os.unlink(path)
        return "", (
            f"{_DIRECTORY} has no room for another {num_bytes / 2**20:.0f} MiB ({error.strerror}): enlarge it "
            "(docker run --shm-size), or use --worker process"
        )
    finally:
        os.close(descriptor)
    return path, ""
