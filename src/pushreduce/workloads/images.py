"""Image classification: the common part of all image data sets, and the table of their names.

The data sets themselves are in `image_arrays.py` (in memory), `image_files.py` (folders) and
`synthetic_images.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pushreduce.settings import DataSettings
from pushreduce.workloads import image_arrays, models, partition, synthetic_images
from pushreduce.workloads.base import Batch, Workload
from pushreduce.workloads.batches import Request, TrainBatches, load_batches
from pushreduce.workloads.image_dataset import ImageDataset


def _open_image_folder(settings: DataSettings, seed: int) -> ImageDataset:
    from pushreduce.workloads.image_files import open_image_folder  # imports torchvision, which takes seconds

    return open_image_folder(settings, seed)


_DATASETS: dict[str, Callable[[DataSettings, int], ImageDataset]] = {
    "digits": image_arrays.open_digits,
    "fashion-mnist": image_arrays.open_fashion_mnist,
    "cifar10": image_arrays.open_cifar10,
    "imagefolder": _open_image_folder,
    "synthetic": synthetic_images.open_synthetic,
}
_LARGEST_DEFAULT_BATCH = 32


def deal_images(settings: DataSettings, *, seed: int, size: int) -> Callable[[int], ImageClassification]:
    """Opens the data set and deals it to `size` ranks; what is returned makes the workload of a rank.

    Raises:
        ValueError: with the remedy; see `build_workload`.
    """
    models.check_model_name(settings.model)
    dataset = _DATASETS[settings.dataset](settings, seed)
    labels = dataset.train.labels
    shard_sizes = partition.compute_shard_sizes(len(labels), size, settings.shard_proportions)
    batch_size = _resolve_batch_size(settings.batch_size_per_rank, shard_sizes)
    if settings.shards == "dirichlet":
        shards = partition.deal_dirichlet(labels, shard_sizes, settings.dirichlet_alpha, seed)
    else:
        shards = partition.deal_iid(shard_sizes, seed)
    return lambda rank: ImageClassification(settings, dataset, shards, batch_size, seed=seed, rank=rank)


class ImageClassification(Workload):
    """One rank's shard of an image data set, and a classifier.

    Args:
        settings: as they were given; the batch size may be open in them.
        dataset: the whole; only this rank's share of it is kept.
        shards: for every rank the numbers of its training samples, int64.
        batch_size: of a rank.
        seed: orders and augments the samples.
        rank: whose shard.
    """

    def __init__(
        self,
        settings: DataSettings,
        dataset: ImageDataset,
        shards: Sequence[np.ndarray],
        batch_size: int,
        *,
        seed: int,
        rank: int,
    ) -> None:
        self.name = settings.dataset
        self.num_train_samples = len(dataset.train)
        self.num_validation_samples = len(dataset.validation)
        self.shard_sizes = [len(shard) for shard in shards]
        self.batch_size_per_rank = batch_size
        self._train = dataset.train.select(shards[rank])
        self._validation = dataset.validation.select(np.arange(rank, len(dataset.validation), len(shards)))
        self._model = settings.model
        self._image_shape = dataset.image_shape
        self._class_names = dataset.class_names
        self._normalisation = dataset.normalisation
        self._num_loader_workers = settings.num_loader_workers if settings.dataset == "imagefolder" else 0
        self._seed = seed
        self._rank = rank
        self._skipped_files: set[str] = set()

    @property
    def num_skipped(self) -> int:
        return len(self._skipped_files)

    def build_model(self) -> nn.Module:
        return models.build_model(self._model, self._image_shape, len(self._class_names))

    def train_batches(self) -> TrainBatches:
        return TrainBatches(
            self._train,
            self.batch_size_per_rank,
            seed=self._seed,
            rank=self._rank,
            num_loader_workers=self._num_loader_workers,
            skipped_files=self._skipped_files,
        )

    def validation_batches(self) -> Iterator[Batch]:
        rows = np.arange(len(self._validation))
        step = self.batch_size_per_rank
        requests = (Request(rows[start : start + step], None) for start in range(0, len(rows), step))
        return load_batches(self._validation, requests, self._num_loader_workers, self._skipped_files)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(_at_least_float32(model(batch.inputs)), batch.targets)

    @torch.no_grad()
    def score(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        logits = _at_least_float32(model(batch.inputs))
        return {
            "loss_sum": functional.cross_entropy(logits, batch.targets, reduction="sum").item(),
            "num_correct": float((logits.argmax(dim=1) == batch.targets).sum().item()),
            "num_samples": float(batch.num_samples),
        }

    @torch.no_grad()
    def describe_predictions(
        self, model: nn.Module, batch: Batch, num_images: int
    ) -> tuple[Tensor, list[str]]:
        inputs = batch.inputs[:num_images]
        predicted = model(inputs).argmax(dim=1).tolist()
        names = self._class_names
        captions = [
            f"{names[true]}/{names[guess]}"
            for true, guess in zip(batch.targets[:num_images].tolist(), predicted, strict=True)
        ]
        return self._normalisation.undo(inputs.float().cpu()).clamp(0, 1), captions


def _at_least_float32(logits: Tensor) -> Tensor:
    """In bfloat16 the sum of a few hundred losses would lose whole units."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _resolve_batch_size(batch_size: int | None, shard_sizes: list[int]) -> int:
    smallest = min(shard_sizes)
    if batch_size is None:
        return min(_LARGEST_DEFAULT_BATCH, smallest)
    if batch_size < 1:
        raise ValueError(f"--batch-size-per-rank must be 1 or more, not {batch_size}")
    if batch_size > smallest:
        raise ValueError(
            f"--batch-size-per-rank {batch_size} is larger than the smallest shard, {smallest} samples of "
            f"rank {shard_sizes.index(smallest)}; take a smaller batch or fewer ranks"
        )
    return batch_size
