"""Image data sets: shards, augmentation, evaluation parts, and what is said about bad files."""

import gzip
import struct
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pushreduce.settings import DataSettings
from pushreduce.workloads import Workload, build_workload
from pushreduce.workloads.batches import WORDS_PER_SAMPLE
from pushreduce.workloads.image_arrays import crop_and_flip

SYNTHETIC = DataSettings(dataset="synthetic", image_size=8, num_synthetic_samples=64, num_synthetic_classes=4)


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Three training and two validation images in each of two classes."""
    rng = np.random.default_rng(0)
    for split, num_images in (("train", 3), ("val", 2)):
        for label in ("cat", "dog"):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for i in range(num_images):
                pixels = rng.integers(0, 256, size=(20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.jpg")
    return tmp_path


def open_folder(directory: Path, *, rank: int = 0, size: int = 1, **options) -> Workload:
    settings = DataSettings(dataset="imagefolder", data_dir=str(directory), image_size=16, **options)
    return build_workload(settings, seed=0, rank=rank, size=size)


def validation_images(workload: Workload) -> list[torch.Tensor]:
    return [image for batch in workload.validation_batches() for image in batch.inputs]


@pytest.mark.parametrize("settings", [DataSettings(), SYNTHETIC], ids=["digits", "synthetic"])
@pytest.mark.parametrize("size", [1, 3, 128])
def test_ranks_divide_both_sets_without_overlap(settings: DataSettings, size: int) -> None:
    if settings is SYNTHETIC and size == 128:
        with pytest.raises(ValueError, match="64 training samples cannot be dealt to 128 ranks"):
            build_workload(settings, seed=0, rank=0, size=size)
        return
    workloads = [build_workload(settings, seed=0, rank=rank, size=size) for rank in range(size)]
    assert all(w.shard_sizes == workloads[0].shard_sizes for w in workloads)
    assert sum(workloads[0].shard_sizes) == workloads[0].num_train_samples
    assert {w.batch_size_per_rank for w in workloads} == {min(32, *workloads[0].shard_sizes)}

    whole = build_workload(
        settings, seed=1, rank=0, size=1
    )  # the validation set depends on no seed for digits
    parts = [validation_images(w) for w in workloads]
    assert sum(len(part) for part in parts) == whole.num_validation_samples
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if settings is not SYNTHETIC:
        together = sorted(image.numpy().tobytes() for part in parts for image in part)
        assert together == sorted(image.numpy().tobytes() for image in validation_images(whole))


def test_digits_split_is_stratified_and_normalised() -> None:
    workload = build_workload(DataSettings(batch_size_per_rank=1433), seed=0, rank=0, size=1)
    train = next(workload.train_batches())
    assert workload.num_train_samples + workload.num_validation_samples == 1797
    assert train.inputs.shape == (1433, 1, 8, 8)
    assert abs(train.inputs.mean().item()) < 0.01
    assert abs(train.inputs.std().item() - 1) < 0.01
    validation = torch.cat([batch.targets for batch in workload.validation_batches()])
    shares = torch.bincount(validation) / (torch.bincount(validation) + torch.bincount(train.targets))
    assert (shares - 0.2).abs().max() < 0.01


def test_synthetic_images_depend_on_index_and_seed_only() -> None:
    def images_by_content(seed: int, size: int) -> set[bytes]:
        return {
            image.numpy().tobytes()
            for rank in range(size)
            for workload in [build_workload(SYNTHETIC, seed=seed, rank=rank, size=size)]
            for batch in islice(workload.train_batches(), 64 // size // workload.batch_size_per_rank)
            for image in batch.inputs
        }

    assert len(images_by_content(0, 1)) == 64
    assert images_by_content(0, 1) == images_by_content(0, 4)
    assert images_by_content(0, 1).isdisjoint(images_by_content(1, 1))


def test_crop_and_flip_is_padding_cutting_and_mirroring() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(1, 256, size=(40, 3, 9, 7), dtype=np.uint8)
    words = rng.integers(0, 2**64, size=(40, WORDS_PER_SAMPLE), dtype=np.uint64)
    result = crop_and_flip(torch.from_numpy(images), 2, words).numpy()
    padded = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2)))
    for i in range(40):
        row, column, mirrored = int(words[i, 0] % 5), int(words[i, 1] % 5), bool(words[i, 2] % 2)
        expected = padded[i, :, row : row + 9, column : column + 7]
        np.testing.assert_array_equal(result[i], expected[:, :, ::-1] if mirrored else expected)


@pytest.mark.parametrize("num_loader_workers", [0, 2])
def test_augmentation_of_files_does_not_depend_on_loaders(
    image_folder: Path, num_loader_workers: int
) -> None:
    reference = list(islice(open_folder(image_folder).train_batches(), 4))
    torch.manual_seed(17)
    state = torch.get_rng_state()
    batches = open_folder(image_folder, num_loader_workers=num_loader_workers).train_batches()
    for batch, expected in zip(islice(batches, 4), reference, strict=True):
        assert torch.equal(batch.inputs, expected.inputs)
        assert torch.equal(batch.targets, expected.targets)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(reference[0].inputs.sort(0)[0], reference[1].inputs.sort(0)[0])


def test_odd_but_whole_files_are_read(image_folder: Path) -> None:
    folder = image_folder / "train" / "cat"
    colours = Image.fromarray(np.full((20, 20, 3), 200, dtype=np.uint8))
    colours.convert("CMYK").save(folder / "cmyk.jpg")
    colours.convert("RGBA").save(folder / "rgba.png")
    colours.convert("P").save(folder / "palette.png", transparency=b"\x00\x80")
    colours.convert("L").save(folder / "grey.png")
    colours.save(folder / "exif.jpg", exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x10damaged")
    workload = open_folder(image_folder)
    batch = next(workload.train_batches())
    assert batch.inputs.shape == (11, 3, 16, 16)
    assert torch.isfinite(batch.inputs).all()
    assert workload.num_skipped == 0


@pytest.mark.parametrize("num_loader_workers", [0, 1])
def test_a_corrupt_file_is_named_or_skipped_with_a_count(image_folder: Path, num_loader_workers: int) -> None:
    for path in (image_folder / "train" / "cat" / "1.jpg", image_folder / "val" / "dog" / "0.jpg"):
        path.write_bytes(path.read_bytes()[:300])
    options = {"num_loader_workers": num_loader_workers}
    with pytest.raises(ValueError, match=r"\A[^\n]*train/cat/1.jpg[^\n]*--skip-corrupt\Z"):
        next(open_folder(image_folder, **options).train_batches())
    workload = open_folder(image_folder, skip_corrupt=True, **options)
    batches = list(islice(workload.train_batches(), 3))
    assert {batch.num_samples for batch in batches} == {6}
    assert workload.num_skipped == 1  # the same file, met three times
    assert len(validation_images(workload)) == 3
    assert workload.num_skipped == 2


def test_a_shard_of_corrupt_files_only_is_an_error(image_folder: Path) -> None:
    for path in image_folder.glob("train/*/*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="nor is any other image"):
        next(open_folder(image_folder, skip_corrupt=True).train_batches())


def test_folders_that_do_not_fit_are_refused(image_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no folder .*nowhere/train"):
        open_folder(tmp_path / "nowhere")
    (image_folder / "val" / "emu").mkdir()
    with pytest.raises(ValueError, match=r"\A[^\n]*emu[^\n]*\Z"):
        open_folder(image_folder)
    Image.new("RGB", (9, 9)).save(image_folder / "val" / "emu" / "0.png")
    with pytest.raises(ValueError, match="same classes; only one of them has emu"):
        open_folder(image_folder)


def write_fashion_mnist(directory: Path) -> None:
    rng = np.random.default_rng(0)
    directory.mkdir()
    for prefix, count in (("train", 40), ("t10k", 12)):
        images = rng.integers(0, 256, size=(count, 28, 28), dtype=np.uint8)
        header = struct.pack(">4I", 0x0803, count, 28, 28)
        (directory / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        labels = bytes(i % 10 for i in range(count))
        header = struct.pack(">2I", 0x0801, count)
        (directory / f"{prefix}-labels-idx1-ubyte").write_bytes(header + labels)


def test_fashion_mnist_is_read_and_damage_is_named(tmp_path: Path) -> None:
    settings = DataSettings(dataset="fashion-mnist", data_dir=str(tmp_path / "data"))
    with pytest.raises(ValueError, match=r"scripts/get_fashion_mnist\.sh"):
        build_workload(settings, seed=0, rank=0, size=1)
    write_fashion_mnist(tmp_path / "data")
    workload = build_workload(settings, seed=0, rank=0, size=1)
    assert (workload.num_train_samples, workload.num_validation_samples) == (40, 12)
    targets = torch.cat([batch.targets for batch in workload.validation_batches()])
    assert targets.tolist() == [i % 10 for i in range(12)]
    path = tmp_path / "data" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        build_workload(settings, seed=0, rank=0, size=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (DataSettings(dataset="cifar10", data_dir="nowhere"), "no complete CIFAR-10 in nowhere"),
        (DataSettings(model="resnet81"), "unknown model 'resnet81'; did you mean resnet"),
        (DataSettings(batch_size_per_rank=400), "larger than the smallest shard, 358 samples"),
        (DataSettings(batch_size_per_rank=0), "must be 1 or more"),
        (DataSettings(shard_proportions=(1.0, 2.0)), "2 numbers for 4 ranks"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: DataSettings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_workload(settings, seed=0, rank=0, size=4)


def test_scores_are_sums_and_predictions_have_captions() -> None:
    workload = build_workload(SYNTHETIC, seed=0, rank=0, size=1)
    torch.manual_seed(0)
    model = workload.build_model().eval()
    batch = next(workload.validation_batches())
    score = workload.score(model, batch)
    assert score["num_samples"] == batch.num_samples == 16
    assert score["loss_sum"] == pytest.approx(16 * workload.loss(model, batch).item(), rel=1e-5)
    images, captions = workload.describe_predictions(model, batch, 5)
    assert images.shape == (5, 3, 8, 8)
    assert images.min() >= 0
    assert images.max() <= 1
    assert [int(caption.split("/")[0]) for caption in captions] == batch.targets[:5].tolist()
    predicted_right = sum(
        len(set(c.split("/"))) == 1 for c in workload.describe_predictions(model, batch, 16)[1]
    )
    assert score["num_correct"] == predicted_right


def test_torchvision_is_not_imported_without_need() -> None:
    """It takes seconds and 90 MB of every rank."""
    program = """
import sys
from pushreduce.settings import DataSettings
from pushreduce.workloads import build_workload
for dataset in ("digits", "synthetic"):
    workload = build_workload(DataSettings(dataset=dataset, image_size=16), seed=0, rank=0, size=2)
    workload.build_model()
    next(workload.train_batches())
assert "torchvision" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
