"""Data sets of small images that are kept in memory: digits, Fashion-MNIST, CIFAR-10."""

from __future__ import annotations

import fcntl
import gzip
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pushreduce.settings import DataSettings
from pushreduce.workloads.base import Batch
from pushreduce.workloads.batches import Loaded, Request
from pushreduce.workloads.image_dataset import ImageDataset, ImageSplit, Normalisation

_DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
_FASHION_CLASSES = [
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "boot",
]
_IDX_OF_UINT8 = 0x0800
_CIFAR10_PADDING = 4


class ImageArrays(ImageSplit):
    """Images as uint8 [N, C, H, W], of which `white` is the brightest, normalised batch by batch."""

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        normalisation: Normalisation,
        *,
        white: int = 255,
        crop_padding: int | None = None,
    ) -> None:
        """With `crop_padding`, training images are shifted by up to so many pixels, and mirrored."""
        assert images.dtype == np.uint8
        self.labels = labels.astype(np.int64)
        self._images = torch.from_numpy(images)
        self._normalisation = normalisation
        self._white = white
        self._crop_padding = crop_padding

    def select(self, rows: np.ndarray) -> ImageArrays:
        return ImageArrays(
            self._images.numpy()[rows],
            self.labels[rows],
            self._normalisation,
            white=self._white,
            crop_padding=self._crop_padding,
        )

    def __getitem__(self, request: Request) -> Loaded:
        images = self._images[torch.from_numpy(request.rows)]
        if self._crop_padding is not None and request.words is not None:
            images = crop_and_flip(images, self._crop_padding, request.words)
        inputs = self._normalisation.apply(images.float().div_(self._white))
        return Loaded(Batch(inputs, torch.from_numpy(self.labels[request.rows])))


def crop_and_flip(images: Tensor, padding: int, words: np.ndarray) -> Tensor:
    """The standard augmentation of CIFAR: pad with black, crop to the old size at random, mirror half.

    Args:
        images: uint8 [N, C, H, W].
        padding: pixels on each side.
        words: random numbers, uint64 [N, 3 or more]: row, column, mirror.
    """
    num_images, _, height, width = images.shape
    padded = functional.pad(images, (padding, padding, padding, padding))
    offsets = torch.from_numpy((words[:, :2] % np.uint64(2 * padding + 1)).astype(np.int64))
    mirrored = torch.from_numpy((words[:, 2] % np.uint64(2)).astype(bool))
    rows = offsets[:, :1] + torch.arange(height)
    columns = offsets[:, 1:] + torch.arange(width)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    cropped = padded[torch.arange(num_images)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2)


def open_digits(_settings: DataSettings, _seed: int) -> ImageDataset:
    """8x8 handwritten digits (1 797, inside scikit-learn); every fifth of each class is for validation."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    labels = digits.target
    is_validation = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        is_validation[np.flatnonzero(labels == label)[::5]] = True
    images = digits.images.astype(np.uint8)[:, None]
    normalisation = Normalisation((0.3053,), (0.3760,))
    return ImageDataset(
        train=ImageArrays(images[~is_validation], labels[~is_validation], normalisation, white=16),
        validation=ImageArrays(images[is_validation], labels[is_validation], normalisation, white=16),
        image_shape=(1, 8, 8),
        class_names=[str(label) for label in range(10)],
        normalisation=normalisation,
    )


def open_fashion_mnist(settings: DataSettings, _seed: int) -> ImageDataset:
    """28x28 articles of clothing (60 000 + 10 000), from the four idx files, compressed or not.

    They are looked for in data_dir, where torchvision puts them below it, and, unless data_dir is set, where
    Debian's package dataset-fashion-mnist does.
    """
    directory = Path(settings.data_dir or "data/fashion-mnist")
    if settings.download:
        from torchvision.datasets import FashionMNIST

        with _download("Fashion-MNIST", directory):
            for is_train in (True, False):
                FashionMNIST(str(directory), train=is_train, download=True)
    folders = [directory, directory / "FashionMNIST" / "raw"]
    if settings.data_dir is None:
        folders.append(_DEBIAN_FASHION_MNIST)
    normalisation = Normalisation((0.2860,), (0.3530,))
    splits = []
    for prefix in ("train", "t10k"):
        images = read_idx(_find_fashion_mnist(f"{prefix}-images-idx3-ubyte", folders))
        labels = read_idx(_find_fashion_mnist(f"{prefix}-labels-idx1-ubyte", folders))
        if images.shape != (len(labels), 28, 28) or not len(labels) or labels.max() > 9:
            raise ValueError(
                f"the {prefix} files of Fashion-MNIST in {directory} do not belong together; fetch them anew"
            )
        splits.append(ImageArrays(images[:, None], labels, normalisation))
    train, validation = splits
    return ImageDataset(train, validation, (1, 28, 28), _FASHION_CLASSES, normalisation)


def open_cifar10(settings: DataSettings, _seed: int) -> ImageDataset:
    """32x32 colour photographs (50 000 + 10 000), as torchvision stores them; augmented in training."""
    from torchvision.datasets import CIFAR10

    directory = Path(settings.data_dir or "data/cifar10")
    if settings.download:
        with _download("CIFAR-10", directory):
            CIFAR10(str(directory), download=True)
    try:
        train, validation = (CIFAR10(str(directory), train=is_train) for is_train in (True, False))
    except RuntimeError as error:
        raise ValueError(
            f"no complete CIFAR-10 in {directory}; fetch it with --download, or set --data-dir to the folder "
            "that holds cifar-10-batches-py"
        ) from error
    normalisation = Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    train_split, validation_split = (
        ImageArrays(
            split.data.transpose(0, 3, 1, 2),
            np.asarray(split.targets),
            normalisation,
            crop_padding=_CIFAR10_PADDING,
        )
        for split in (train, validation)
    )
    return ImageDataset(train_split, validation_split, (3, 32, 32), list(train.classes), normalisation)


def read_idx(path: Path) -> np.ndarray:
    """The array in a file of the idx format of MNIST, uint8, compressed where the name ends in .gz.

    Raises:
        ValueError: damaged or another format.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); fetch it anew") from error
    # Big-endian: element type and number of dimensions, then the dimensions, then the elements.
    magic = int.from_bytes(content[:4], "big")
    num_dimensions = magic & 0xFF
    header_size = 4 + 4 * num_dimensions
    shape = np.frombuffer(content[4:header_size], dtype=">u4") if len(content) >= header_size else None
    if (
        magic - num_dimensions != _IDX_OF_UINT8
        or shape is None
        or len(content) - header_size != math.prod(shape.tolist())
    ):
        raise ValueError(f"{path} is damaged or not an idx file; fetch it anew")
    elements = np.frombuffer(content, dtype=np.uint8, offset=header_size)
    return elements.reshape(shape).copy()  # torch wants it writable


def _find_fashion_mnist(name: str, folders: list[Path]) -> Path:
    for folder in folders:
        for path in (folder / f"{name}.gz", folder / name):
            if path.is_file():
                return path
    raise ValueError(
        f"no {name}.gz of Fashion-MNIST in {folders[0]}; on Debian run scripts/get_fashion_mnist.sh "
        f"{folders[0]}, elsewhere add --download, or set --data-dir"
    )


@contextmanager
def _download(name: str, directory: Path) -> Iterator[None]:
    """One rank of a host downloads, the others wait and find the files there; failures become one line."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / ".download.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{name} could not be downloaded to {directory} ({reason}); "
            "copy it there from a machine with internet"
        ) from error
