"""What an image data set is to `images.py`: two splits, cut down to a rank's share and read by number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from pushreduce.workloads.batches import Loaded, Request


class ImageSplit(ABC):
    """Labelled images: a `Source` of float32 [batch, C, H, W], normalised, and int64 [batch]."""

    labels: np.ndarray
    """Class of every image, int64 [num_images]."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def select(self, rows: np.ndarray) -> ImageSplit:
        """A split of these images only, which holds no others in memory."""

    @abstractmethod
    def __getitem__(self, request: Request) -> Loaded: ...


@dataclass(frozen=True)
class Normalisation:
    """Pixels in 0..1 -> (pixel - mean) / std, by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, images: Tensor) -> Tensor:
        """New float32 images [N, C, H, W]."""
        return (images - _by_channel(self.mean)).div_(_by_channel(self.std))

    def undo(self, images: Tensor) -> Tensor:
        """New float32 images [N, C, H, W] with pixels in 0..1, up to rounding."""
        return images * _by_channel(self.std) + _by_channel(self.mean)


@dataclass(frozen=True)
class ImageDataset:
    train: ImageSplit
    validation: ImageSplit
    image_shape: tuple[int, int, int]
    """Channels, height, width of what the model is given."""
    class_names: list[str]
    normalisation: Normalisation


@cache
def _by_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None, None]
