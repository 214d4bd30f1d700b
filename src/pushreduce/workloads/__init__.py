"""What is trained on what: `build_workload` is the way in, and all else that the program knows is `base`."""

from __future__ import annotations

from collections.abc import Callable

from pushreduce.settings import DataSettings
from pushreduce.workloads.base import Batch, Workload
from pushreduce.workloads.batches import TrainBatches

__all__ = ["Batch", "TrainBatches", "Workload", "build_workload", "workload_of_rank"]


def build_workload(settings: DataSettings, *, seed: int, rank: int, size: int) -> Workload:
    """This rank's share of the data set. Local: ranks agree by computing the same from settings and seed.

    Args:
        seed: deals the shards and orders and augments the samples; not the validation set; not below 0.
        rank: of `size` ranks.

    Raises:
        ValueError: one line with the remedy: missing, empty or damaged data set; unknown model; fewer samples
        than
            ranks; an explicit batch larger than the smallest shard; shard settings that do not fit.
    """
    return workload_of_rank(settings, seed=seed, size=size)(rank)


def workload_of_rank(settings: DataSettings, *, seed: int, size: int) -> Callable[[int], Workload]:
    """`build_workload` for several ranks of one process: the data set is opened, and its samples dealt, only once.

    The data set stays in memory, whole, as long as what is returned does; a rank's workload holds its share only.

    Raises:
        ValueError: as `build_workload`.
    """
    from pushreduce.workloads.images import deal_images

    return deal_images(settings, seed=seed, size=size)
