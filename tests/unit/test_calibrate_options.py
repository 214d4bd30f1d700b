"""scripts/calibrate: what contradicts itself or would be ignored is refused in one line; a rank that fails ends all."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
import torch
from PIL import Image

from pushreduce.communication.simulated import Aborted, SimulatedCluster
from pushreduce.settings import DataSettings, SettingsError

SCRIPT = Path(__file__).parents[2] / "scripts" / "calibrate"


@pytest.fixture(scope="module")
def calibrate():
    spec = spec_from_loader("calibrate", SourceFileLoader("calibrate", str(SCRIPT)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def parse(calibrate):
    return calibrate.parse


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "--output"),
        ("--output a.yaml --outputs b.yaml", "--outputs"),
        ("--output a.csv", "ends in .yaml"),
        ("--output a.yaml --budget-seconds 0", "--budget-seconds is 0.0"),
        ("--output a.yaml --budget-seconds nan", "--budget-seconds is nan"),
        ("--output a.yaml --step-jitter 0.1", "belongs to --step-seconds"),
        ("--output a.yaml --step-seconds 0", "--step-seconds is 0.0"),
        ("--output a.yaml --step-seconds nan", "--step-seconds is nan"),
        ("--output a.yaml --step-seconds 1 --step-jitter -1", "--step-jitter is -1.0"),
        ("--output a.yaml --step-seconds 1 --model resnet50", "--model has no effect with --step-seconds"),
        ("--output a.yaml --step-seconds 1 --batch-size-per-rank 8", "--batch-size-per-rank has no effect"),
        ("--output a.yaml --dataset mnist", "choose one of digits"),
        ("--output a.yaml --dataset digits --image-size 64", "--image-size"),
        ("--output a.yaml --batch-size-per-rank 0", "--batch-size-per-rank"),
    ],
)
def test_mistakes(parse, options: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(options.split())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_steps_are_given_or_measured(parse) -> None:
    given = parse("--output a.yaml --step-seconds 0.29".split())
    assert (given.step_seconds, given.step_jitter) == (0.29, 0.0)
    data = parse("--output a.yaml --model resnet50 --image-size 64".split()).data
    assert (data.dataset, data.model, data.image_size, data.batch_size_per_rank) == (
        "synthetic",
        "resnet50",
        64,
        32,
    )


def test_a_file_that_one_rank_cannot_read_ends_all(calibrate, tmp_path: Path) -> None:
    """The others would wait for ever for the times of its steps."""
    for name in ("train/cat/0.png", "train/dog/1.png", "val/cat/0.png", "val/dog/1.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / name)
    (tmp_path / "train/cat/0.png").write_bytes(b"no image")
    data = DataSettings(
        dataset="imagefolder", data_dir=str(tmp_path), image_size=16, batch_size_per_rank=1, model="mlp"
    )

    def body(communicator) -> None:
        take_step = calibrate.build_step(data, communicator, torch.device("cpu"))
        for _ in range(3):
            take_step()
        communicator.barrier()

    with pytest.raises(Aborted, match=r"0\.png") as caught:
        SimulatedCluster(2).run(body)
    assert caught.value.exit_code == 2


def test_an_output_that_cannot_be_written_is_refused_before_the_minute(calibrate, tmp_path: Path) -> None:
    calibrate.check_output(tmp_path / "cluster.yaml")
    (tmp_path / "taken.yaml").mkdir()
    with pytest.raises(ValueError, match="cannot be written"):
        calibrate.check_output(tmp_path / "taken.yaml")
    with pytest.raises(ValueError, match="is no directory"):
        calibrate.check_output(tmp_path / "none" / "cluster.yaml")
