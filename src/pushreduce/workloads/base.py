"""What the training loop knows of a workload: batches, a loss, a score. Nothing here is about images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pushreduce.workloads.batches import TrainBatches


class Batch(NamedTuple):
    """Samples along dimension 0 of both tensors."""

    inputs: Tensor
    targets: Tensor

    @property
    def num_samples(self) -> int:
        return self.targets.shape[0]

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """On `device`; floating-point inputs in `dtype`, whole numbers (labels, tokens) as they are."""
        inputs = self.inputs.to(device, dtype if self.inputs.is_floating_point() else None, non_blocking=True)
        return Batch(inputs, self.targets.to(device, non_blocking=True))


class Workload(ABC):
    """One rank's share of a data set, with the model that is trained on it."""

    name: str
    num_train_samples: int
    """Of all ranks together."""
    num_validation_samples: int
    """Of all ranks together."""
    shard_sizes: list[int]
    """Training samples of every rank."""
    batch_size_per_rank: int

    @property
    @abstractmethod
    def num_skipped(self) -> int:
        """Corrupt files that this rank has met and skipped so far."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A new float32 model on the CPU, initialised from torch's global generator, which the caller seeds.

        Raises:
            ValueError: the model does not fit the data.
        """

    @abstractmethod
    def train_batches(self) -> TrainBatches:
        """This rank's endless training batches from the first sample on, each of `batch_size_per_rank`."""

    @abstractmethod
    def validation_batches(self) -> Iterator[Batch]:
        """This rank's part of the validation set, once, in a fixed order.

        The parts are disjoint, differ by at most one sample, and make up the whole set: nothing is padded, so
        with more ranks than samples a rank has no batch.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of the batch's samples, a scalar that `backward()` can start from."""

    @abstractmethod
    def score(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """Sums over the batch, for means over ranks: `loss_sum`, `num_correct`, `num_samples`.

        Keeps no graph, and leaves `model.eval()` to the caller.
        """

    @abstractmethod
    def describe_predictions(
        self, model: nn.Module, batch: Batch, num_images: int
    ) -> tuple[Tensor, list[str]] | None:
        """The first samples as images, float32 [N, C, H, W] in 0..1, and a caption `true/predicted` for each.

        None where samples are not images.
        """
