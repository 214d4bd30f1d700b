"""Horovod's process set of the first ranks of all hosts, which average with each other where the hosts are workers.

Owns when there is one: it costs a negotiation in every cycle of Horovod's thread, so only where it was asked for.
Imports neither Horovod nor MPI; `startup.py` hands in the one that it has loaded.
"""

from __future__ import annotations

from typing import Any

process_set: Any = None
"""A `horovod.torch.ProcessSet`; None: not asked for, or the same as no set or all ranks."""


def init_horovod(hvd: Any, places: list[tuple[int, str]]) -> None:
    """Starts Horovod, once. Collective.

    Args:
        hvd: the module `horovod.torch`.
        places: of every rank, its rank in its host, and "host" where it asks for the set.
    """
    global process_set
    if hvd.is_initialized():
        return
    leaders = [rank for rank, (local_rank, _) in enumerate(places) if local_rank == 0]
    if 1 < len(leaders) < len(places) and any(worker == "host" for _, worker in places):
        process_set = hvd.ProcessSet(leaders)
    hvd.init(process_sets=[process_set] if process_set else None)
