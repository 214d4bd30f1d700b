"""The GPUs of a host's ranks, one each: sums and copies between them by NCCL, past Horovod's queue.

Owns a process group of torch's for each, which is not the process's default one: that stays the user's. On processors,
for tests of all around it, the group is gloo's. NCCL works beside Horovod's own on another stream; with one queue for
all streams (CUDA_DEVICE_MAX_CONNECTIONS=1) nothing overlaps any more.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from pushreduce.communication import startup
from pushreduce.communication.base import DeviceGroup, HostGroup

_LOOPBACK = "127.0.0.1"
_open: list[HostDevices] = []


class HostDevices(DeviceGroup):
    """See `DeviceGroup`. All ranks of the host make it together.

    NCCL makes its connections when they are first used, so all that will be is tried here. A rank that fails alone
    leaves the others inside NCCL, where nobody reaches them: it ends the job, with one line and exit code 2.

    Args:
        host: its ranks.
        scratch: as large as what will be summed, on this rank's device; overwritten.

    Raises:
        ValueError: on all ranks alike: torch has nothing that averages between such devices.
    """

    def __init__(self, host: HostGroup, scratch: torch.Tensor) -> None:
        self._kind = kind = scratch.device.type
        if (
            not dist.is_available()
            or kind not in ("cuda", "cpu")
            or (kind == "cuda" and not dist.is_nccl_available())
        ):
            raise ValueError(
                f"--worker host: this torch cannot average between devices of type {kind}: use --device cpu"
            )
        self._host = host
        try:
            self._group = _new_group(kind, _meet(host), host)
            problem = self._try_out(scratch)
        except RuntimeError as error:
            problem = (str(error).strip() or type(error).__name__).splitlines()[-1]
        if problem:
            startup.abort(
                f"error: the {host.size} {kind} devices of a host cannot average ({problem}): NCCL_DEBUG=INFO says "
                "more; or use --worker process",
                startup.BAD_INPUT,
            )
        _open.append(self)

    def _try_out(self, scratch: torch.Tensor) -> str:
        """What is wrong; "": nothing."""
        self.sum_in_place(scratch.fill_(1))
        if not bool((scratch == self._host.size).all()):
            return f"{self._host.size} ones make {scratch.min().item()} to {scratch.max().item()}"
        self.broadcast(scratch.fill_(self._host.rank + 1))
        return "" if bool((scratch == 1).all()) else "a broadcast does not arrive"

    def sum_in_place(self, tensor: torch.Tensor) -> None:
        self._host.barrier()  # which notices a rank that is gone; NCCL would wait for it
        self._group.allreduce(tensor).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast(tensor, 0).wait()

    def close(self) -> None:
        """Collective among the host's ranks."""
        if self._kind == "cuda":
            torch.cuda.synchronize()
            self._host.barrier()  # what others wait for has been sent
            self._group.abort()
        self._host.barrier()  # nobody asks the first rank's store any more
        del self._group


def leave() -> None:
    """Closes all groups; collective among the host's ranks."""
    while _open:
        _open.pop().close()


def _meet(host: HostGroup) -> dist.Store:
    """At a free port of this host, which its first rank tells the others."""
    port = host.shared(1, torch.int64)
    store = None
    if host.rank == 0:
        store = dist.TCPStore(_LOOPBACK, 0, host.size, is_master=True, wait_for_workers=False)
        port.fill_(store.port)
    host.barrier()
    return store or dist.TCPStore(_LOOPBACK, int(port), host.size, is_master=False)


def _new_group(kind: str, store: dist.Store, host: HostGroup) -> dist.ProcessGroup:
    """A backend as it is: torch's type hints leave out that it has what a `ProcessGroup` has."""
    if kind == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(store, host.rank, host.size, options))
    return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, host.rank, host.size))
