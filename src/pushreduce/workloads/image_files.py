"""Folders of image files in the layout of ImageNet: DATA_DIR/train/CLASS/* and DATA_DIR/val/CLASS/*.

Imports torchvision, so it is itself imported only when such a data set is opened.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms
from torchvision.datasets import ImageFolder

from pushreduce.settings import DataSettings
from pushreduce.workloads.base import Batch
from pushreduce.workloads.batches import Loaded, Request
from pushreduce.workloads.image_dataset import ImageDataset, ImageSplit, Normalisation

_IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_RESIZE_TO_CROP = 256 / 224
_DAMAGE = (
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""What Pillow raises on damaged files, besides an OSError without an errno."""

# Damaged EXIF leaves the pixels intact, and ImageNet has such files: a warning for each would fill the log.
warnings.filterwarnings("ignore", message=r"(?i).*(exif|truncated file read|metadata)", category=UserWarning)


class ImageFiles(ImageSplit):
    """Images read from their files at every use, with the standard transforms of ImageNet."""

    def __init__(self, paths: list[str], labels: np.ndarray, image_size: int, *, skip_corrupt: bool) -> None:
        self.labels = labels
        self._paths = paths
        self._image_size = image_size
        self._skip_corrupt = skip_corrupt
        to_input = [transforms.ToTensor(), transforms.Normalize(_IMAGENET.mean, _IMAGENET.std)]
        self._train_transform = transforms.Compose(
            [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip(), *to_input]
        )
        self._validation_transform = transforms.Compose(
            [
                transforms.Resize(round(image_size * _RESIZE_TO_CROP)),
                transforms.CenterCrop(image_size),
                *to_input,
            ]
        )

    def select(self, rows: np.ndarray) -> ImageFiles:
        return ImageFiles(
            [self._paths[row] for row in rows],
            self.labels[rows],
            self._image_size,
            skip_corrupt=self._skip_corrupt,
        )

    def __getitem__(self, request: Request) -> Loaded:
        images, rows, skipped = [], [], []
        for i, row in enumerate(request.rows.tolist()):
            # In training a corrupt file is replaced by the next in the shard, so positions stay what they
            # are.
            num_candidates = 1 if request.words is None else len(self)
            for candidate in ((row + k) % len(self) for k in range(num_candidates)):
                try:
                    image = read_image(self._paths[candidate])
                except CorruptImageError as error:
                    if not self._skip_corrupt:
                        return self._failed(
                            f"{error}; repair or remove it, or skip such files with --skip-corrupt"
                        )
                    skipped.append(self._paths[candidate])
                    continue
                except OSError as error:
                    return self._failed(
                        f"{self._paths[candidate]}: {error.strerror}; put it back, or remove its name"
                    )
                images.append(
                    self._transform(image, None if request.words is None else int(request.words[i, 0]))
                )
                rows.append(candidate)
                break
            else:
                if request.words is not None:
                    return self._failed(
                        f"{self._paths[row]}: nor is any other image of this rank's shard readable"
                    )
        inputs = torch.stack(images) if images else self._no_images()
        return Loaded(Batch(inputs, torch.from_numpy(self.labels[rows])), tuple(skipped))

    def _transform(self, image: Image.Image, word: int | None) -> Tensor:
        if word is None:
            return self._validation_transform(image)
        # torchvision's transforms draw from the process-wide generator, which belongs to the model.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(word >> 1)  # a signed 64-bit number
            return self._train_transform(image)

    def _failed(self, error: str) -> Loaded:
        return Loaded(Batch(self._no_images(), torch.empty(0, dtype=torch.int64)), error=error)

    def _no_images(self) -> Tensor:
        return torch.empty(0, 3, self._image_size, self._image_size)


class CorruptImageError(Exception):
    """The file is there and can be read, but not as an image. One line."""


def read_image(path: str) -> Image.Image:
    """The image as RGB, whatever its mode (grey, CMYK, palette, with transparency) and metadata.

    Raises:
        CorruptImageError: names the file.
        OSError: the file cannot be read at all.
    """
    try:
        with Image.open(path) as image:
            if image.mode == "P" and "transparency" in image.info:
                return image.convert("RGBA").convert("RGB")
            return image.convert("RGB")
    except OSError as error:
        if error.errno is not None:  # the file system's trouble, not the file's
            raise
        raise CorruptImageError(_describe(path, error)) from error
    except _DAMAGE as error:
        raise CorruptImageError(_describe(path, error)) from error


def _describe(path: str, error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{path} is not a readable image ({reason})"


def open_image_folder(settings: DataSettings, _seed: int) -> ImageDataset:
    """Classes are the folders' names in alphabetical order, and must be the same in train and val."""
    if settings.image_size < 1:
        raise ValueError(f"--image-size must be positive, not {settings.image_size}")
    directory = Path(settings.data_dir or "data/imagefolder")
    train, validation = (_scan(directory / name) for name in ("train", "val"))
    if train.classes != validation.classes:
        different = sorted(set(train.classes) ^ set(validation.classes))
        raise ValueError(
            f"train and val in {directory} must hold the same classes; only one of them has "
            + ", ".join(different[:5])
            + (f" and {len(different) - 5} more" if len(different) > 5 else "")
        )
    train_split, validation_split = (
        ImageFiles(
            [path for path, _ in split.samples],
            np.array(split.targets, dtype=np.int64),
            settings.image_size,
            skip_corrupt=settings.skip_corrupt,
        )
        for split in (train, validation)
    )
    shape = (3, settings.image_size, settings.image_size)
    return ImageDataset(train_split, validation_split, shape, list(train.classes), _IMAGENET)


def _scan(folder: Path) -> Any:
    if not folder.is_dir():
        raise ValueError(
            f"no folder {folder}; --data-dir must hold train and val, each with one folder of images a class"
        )
    try:
        return ImageFolder(str(folder))
    except FileNotFoundError as error:  # no class, or a class without an image
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{reason.rstrip('. ')}; put images there, one folder a class, or remove the empty folder"
        ) from error
