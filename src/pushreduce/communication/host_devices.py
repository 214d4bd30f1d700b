"""The GPUs of a host's ranks, one each: sums and copies between them by NCCL, past Horovod's queue.

Owns a process group of torch's for each worker that is a host; the process's default group stays the user's. On
processors, for tests of all around it, it is gloo's. NCCL works beside Horovod's own on another stream; with one queue
for all streams (CUDA_DEVICE_MAX_CONNECTIONS=1) nothing overlaps any more.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pushreduce.communication import startup
from pushreduce.communication.base import DeviceGroup, HostGroup

_LOOPBACK = "127.0.0.1"
_TRIAL_TIMEOUT = timedelta(minutes=1)
"""Devices that cannot reach each other's memory often hang; later, a step's computation may lie before the sum."""


class HostDevices(DeviceGroup):
    """See `DeviceGroup`. All ranks of the host make it together.

    NCCL makes its connections when they are first used, so all that will be is tried here. A rank that fails alone
    leaves the others inside NCCL, where nobody reaches them: it ends the job, with a line of its own and exit code 2.

    Args:
        host: its ranks.
        scratch: as large as what will be summed, on this rank's device; overwritten.

    Raises:
        ValueError: on all ranks alike: torch has nothing that averages between such devices.
    """

    def __init__(self, host: HostGroup, scratch: torch.Tensor) -> None:
        kind = scratch.device.type
        if (
            not dist.is_available()
            or kind not in ("cuda", "cpu")
            or (kind == "cuda" and not dist.is_nccl_available())
        ):
            raise ValueError(
                f"--worker host: this torch cannot average between devices of type {kind}: use --device cpu"
            )
        self._host, self._device = host, scratch.device
        try:
            self._group = _new_group(kind, _meet(host), host)
            problem = self._try_out(scratch)
        except RuntimeError as error:
            problem = " ".join(str(error).split()) or type(error).__name__
        if problem:
            startup.abort(
                f"error: the {host.size} {kind} devices of a host cannot average ({problem}): NCCL_DEBUG=INFO says "
                "more; or use --worker process",
                startup.BAD_INPUT,
            )
        startup.before_shut_down(self.close)

    def _try_out(self, scratch: torch.Tensor) -> str:
        """What is wrong; "": nothing."""
        self._host.barrier()
        self._group.allreduce(scratch.fill_(1), timeout=_TRIAL_TIMEOUT).wait()
        if not bool((scratch == self._host.size).all()):
            return f"{self._host.size} ones make {scratch.min().item()} to {scratch.max().item()}"
        self._group.broadcast(scratch.fill_(self._host.rank + 1), 0, timeout=_TRIAL_TIMEOUT).wait()
        return "" if bool((scratch == 1).all()) else "a broadcast does not arrive"

    def sum_in_place(self, tensor: torch.Tensor) -> None:
        self._host.barrier()
        self._group.allreduce(tensor).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast(tensor, 0).wait()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._host.barrier()  # what others wait for has been sent
            group.abort()
        self._host.barrier()  # nobody asks the first rank's store any more


def _meet(host: HostGroup) -> dist.Store:
    """At a free port of this host, which its first rank tells the others."""
    port = host.shared(1, torch.int64)
    if host.rank > 0:
        host.barrier()
        return dist.TCPStore(_LOOPBACK, int(port), host.size, is_master=False)
    store = dist.TCPStore(_LOOPBACK, 0, host.size, is_master=True, wait_for_workers=False)
    port.fill_(store.port)
    host.barrier()
    return store


def _new_group(kind: str, store: dist.Store, host: HostGroup) -> Any:
    """One of torch's backends as it is, which has more than torch's type hints say."""
    if kind == "cuda":
        return dist.ProcessGroupNCCL(store, host.rank, host.size, dist.ProcessGroupNCCL.Options())
    return dist.ProcessGroupGloo(store, host.rank, host.size)
