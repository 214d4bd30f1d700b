"""Synthetic colour images: no files, any size, any number, and something to learn."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from pushreduce.settings import DataSettings
from pushreduce.workloads.base import Batch
from pushreduce.workloads.batches import Loaded, Request
from pushreduce.workloads.image_dataset import ImageDataset, ImageSplit, Normalisation

_PATTERN_SIDE = 4
_NUM_SAMPLES_PER_VALIDATION_SAMPLE = 4
_NOISE_TO_PATTERN = 2.0


class SyntheticImages(ImageSplit):
    """Image i = the smooth pattern of class i mod C + noise that depends on i and the seed only."""

    def __init__(self, indices: np.ndarray, num_classes: int, image_size: int, seed: int) -> None:
        self.labels = indices % num_classes
        self._indices = indices
        self._num_classes = num_classes
        self._image_size = image_size
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        self._patterns = torch.randn(num_classes, 3, _PATTERN_SIDE, _PATTERN_SIDE, generator=generator)
        # An image's noise is a cut-out of this: drawing it anew for every batch would take longer than a step
        # of the models that this data set is to measure.
        self._noise = torch.randn(3, 2 * image_size, 2 * image_size, generator=generator) * _NOISE_TO_PATTERN

    def select(self, rows: np.ndarray) -> SyntheticImages:
        return SyntheticImages(self._indices[rows], self._num_classes, self._image_size, self._seed)

    def __getitem__(self, request: Request) -> Loaded:
        side = self._image_size
        targets = torch.from_numpy(self.labels[request.rows])
        inputs = functional.interpolate(self._patterns[targets], size=(side, side), mode="bilinear")
        for image, index in zip(inputs, self._indices[request.rows], strict=True):
            top, left, gain = np.random.default_rng([self._seed, index]).random(3)
            row, column = int(top * (side + 1)), int(left * (side + 1))
            image += (0.5 + gain) * self._noise[:, row : row + side, column : column + side]
        return Loaded(Batch(inputs, targets))


def open_synthetic(settings: DataSettings, seed: int) -> ImageDataset:
    """num_synthetic_samples training images [3, image_size, image_size], a quarter as many for validation."""
    num_samples, num_classes = settings.num_synthetic_samples, settings.num_synthetic_classes
    num_validation = num_samples // _NUM_SAMPLES_PER_VALIDATION_SAMPLE
    if num_classes < 2 or num_validation < 1 or settings.image_size < 1:
        raise ValueError(
            "the synthetic data set needs --num-synthetic-classes of 2 or more, --num-synthetic-samples of "
            f"{_NUM_SAMPLES_PER_VALIDATION_SAMPLE} or more, and a positive --image-size"
        )
    train, validation = (
        SyntheticImages(indices, num_classes, settings.image_size, seed)
        for indices in np.split(np.arange(num_samples + num_validation), [num_samples])
    )
    return ImageDataset(
        train=train,
        validation=validation,
        image_shape=(3, settings.image_size, settings.image_size),
        class_names=[str(label) for label in range(num_classes)],
        # So that about two standard deviations are between black and white when such an image is shown.
        normalisation=Normalisation((0.5,) * 3, (0.1,) * 3),
    )
