"""The GPUs of a host's ranks, one each: sums and copies between them by NCCL, past Horovod's queue.

Owns the process's group of torch.distributed, which is that of the host's ranks; on processors, for tests of what is
around it, the group is gloo's. NCCL runs beside Horovod's own on another stream, so neither waits for the other unless
CUDA has one queue for all streams (CUDA_DEVICE_MAX_CONNECTIONS=1), which must not be set.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pushreduce.communication.base import DeviceGroup, HostGroup

_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
_LOOPBACK = "127.0.0.1"
_has_joined = False


class HostDevices(DeviceGroup):
    """See `DeviceGroup`. All ranks of the host make it together.

    Raises:
        ValueError: for a device that NCCL does not know, where it fails, or where torch.distributed is used otherwise.
    """

    def __init__(self, host: HostGroup, device: torch.device) -> None:
        backend = _BACKENDS.get(device.type)
        if backend is None:
            raise ValueError(
                f"--worker host cannot average on a device of type {device.type}: use --device cpu"
            )
        if not dist.is_initialized():
            _join(host, backend)
        if (dist.get_rank(), dist.get_world_size(), dist.get_backend()) != (host.rank, host.size, backend):
            raise ValueError(
                f"--worker host needs torch.distributed for the {host.size} ranks of a host ({backend}), and the "
                f"process has initialised it for {dist.get_world_size()} ({dist.get_backend()}): leave that out"
            )
        self._host = host
        self._try_out(device, backend)

    def _try_out(self, device: torch.device, backend: str) -> None:
        """NCCL makes its connections with the first sum: where it cannot, say so now."""
        one = torch.ones(1, device=device)
        try:
            self.sum_in_place(one)
            problem = "" if one.item() == self._host.size else f"{self._host.size} ones make {one.item()}"
        except RuntimeError as error:
            problem = str(error).strip().splitlines()[0]
        if problem:
            raise ValueError(
                f"{backend} cannot add up between the ranks of a host ({problem}): NCCL_DEBUG=INFO says more; or use "
                "--worker process"
            )

    def sum_in_place(self, tensor: torch.Tensor) -> None:
        self._host.barrier()  # which notices a rank that is gone; NCCL would wait for it
        dist.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._host.barrier()
        dist.broadcast(tensor, src=0)


def leave() -> None:
    """Ends the group, if it was made here; collective among the host's ranks."""
    global _has_joined
    if _has_joined:
        _has_joined = False
        dist.destroy_process_group()


def _join(host: HostGroup, backend: str) -> None:
    """Initialises torch.distributed by way of a free port of this host, which its first rank tells the others."""
    global _has_joined
    port, store = host.shared(1, torch.int64), None
    if host.rank == 0:
        store = dist.TCPStore(_LOOPBACK, 0, host.size, is_master=True, wait_for_workers=False)
        port.fill_(store.port)
    host.barrier()
    if store is None:
        store = dist.TCPStore(_LOOPBACK, int(port), host.size, is_master=False)
    dist.init_process_group(backend, store=store, rank=host.rank, world_size=host.size)
    _has_joined = True
