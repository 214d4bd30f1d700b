"""Mistakes in settings and data: one line with the remedy, exit code 2, nothing written, on any number of ranks."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from launch import ROOT, TRAIN, Finished, launched, run, run_command
from run_files import all_files, checkpoints, make_image_folder, model, steps


def assert_refused(finished: Finished, *words: str) -> None:
    """One line with `words`, code 2, no traceback."""
    assert finished.exit_code == 2, finished.output
    assert len(finished.error_lines) == 1, finished.output
    assert "Traceback" not in finished.output
    for word in words:
        assert word in finished.error_lines[0]


SETTINGS = {
    "unknown": ("--taumax 3", ["--taumax", "--tau-max"]),
    "wrong-type": ("--epochs many", ["many", "--epochs"]),
    "out-of-range": ("--epochs -1", ["--epochs"]),
    "contradictory": ("--algorithm allreduce --tau-max 5", ["--tau-max", "lasgd"]),
    "of-another-algorithm": ("--algorithm lasgd --tau 1", ["--tau", "sgp"]),
    "sgp-out-of-range": ("--algorithm sgp --num-peers 3", ["--num-peers is 3", "[1, 2]"]),
    "sgp-contradictory": ("--algorithm sgp --num-peers 2 --graph ring", ["--num-peers", "exponential"]),
    "sgp-negative": ("--algorithm sgp --tau -1", ["--tau is -1", "[0, inf)"]),
    "sgp-two-ways": (
        "--algorithm sgp --num-peers 2 --two-peer-rounds 9",
        ["--two-peer-rounds", "remove one"],
    ),
    "sgp-without-effect": ("--algorithm sgp --biased", ["--biased", "--tau 1"]),
    "ignored-worker": ("--worker host --algorithm allreduce", ["--worker", "leave it at process"]),
    "bad-yaml": ("--settings bad.yaml", ["bad.yaml, line"]),
    "unknown-in-yaml": ("--settings unknown.yaml", ["unknown.yaml", "lasgd.tau_max"]),
    "resume-nowhere": ("--resume", ["--run-dir"]),
    "resume-nothing": ("--resume --run-dir nothing", ["nothing", "holds no run"]),
}


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_settings(name, num_ranks, tmp_path):
    arguments, words = SETTINGS[name]
    (tmp_path / "bad.yaml").write_text("seed: 1\nlasgd: [1, 2\n")
    (tmp_path / "unknown.yaml").write_text("lasgd: {taumax: 2}\n")
    before = all_files(tmp_path)
    assert_refused(run(num_ranks, arguments.split(), cwd=tmp_path), *words)
    assert all_files(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", "1"], ["--seed", "differs between ranks"]),
        (["--settings", "nowhere.yaml"], ["nowhere.yaml", "rank 1"]),
    ],
    ids=["other-seed", "file-on-one-host"],
)
def test_settings_of_one_rank_only(arguments, words, tmp_path):
    """As on hosts that hold different files, or where one of them is missing."""
    ours, theirs = ([sys.executable, str(TRAIN), "--run-dir", "run", *more] for more in ([], arguments))
    command = ["mpirun", "-np", "1", *ours, ":", "-np", "1", *theirs]
    assert_refused(run_command(command, cwd=tmp_path), *words)
    assert not (tmp_path / "run").exists()


DATA = {
    "unknown-model": (1, "--model resnet19", ["resnet19", "did you mean"]),
    "unknown-model-four-ranks": (4, "--model resnet19", ["resnet19", "did you mean"]),
    "batch-larger-than-shard": (2, "--batch-size-per-rank 800", ["--batch-size-per-rank 800", "shard"]),
    "batch-norm-of-one": (
        2,
        "--model resnet18-cifar --batch-size-per-rank 1",
        ["BatchNorm", "--batch-size-per-rank 2"],
    ),
    "shard-proportions": (2, "--shard-proportions 1 1 1", ["3 numbers for 2 ranks"]),
    "missing-data": (2, "--dataset imagefolder --data-dir nowhere", ["nowhere"]),
    "missing-data-alone": (1, "--dataset imagefolder --data-dir nowhere", ["nowhere"]),
    "missing-cifar": (1, "--dataset cifar10 --data-dir nowhere", ["nowhere", "--download"]),
    "empty-data": (2, "--dataset imagefolder --data-dir empty", ["empty"]),
    "fewer-samples-than-ranks": (2, "--dataset imagefolder --data-dir single", ["1 training", "2 ranks"]),
    "evaluate-nothing": (2, "--evaluate nowhere/model.pt", ["nowhere/model.pt"]),
}


@pytest.mark.parametrize("name", list(DATA))
def test_data(name, tmp_path):
    num_ranks, arguments, words = DATA[name]
    (tmp_path / "empty" / "train").mkdir(parents=True)
    (tmp_path / "empty" / "val").mkdir()
    make_image_folder(tmp_path / "single", per_class=4)
    for split in ("train", "val"):
        shutil.rmtree(tmp_path / "single" / split / "dark")
    for path in list((tmp_path / "single" / "train" / "bright").iterdir())[1:]:
        path.unlink()
    before = sorted(tmp_path.rglob("*"))
    assert_refused(run(num_ranks, arguments.split(), cwd=tmp_path), *words)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gpu_where_there_is_none(num_ranks, tmp_path):
    assert_refused(run(num_ranks, ["--device", "cuda"], cwd=tmp_path), "--device cuda", "no GPU for rank 0")
    assert list(tmp_path.iterdir()) == []


IMAGES = [
    "--dataset",
    "imagefolder",
    "--data-dir",
    "images",
    "--image-size",
    "16",
    "--epochs",
    "1",
    "--run-dir",
    "run",
]


@pytest.mark.parametrize(("num_ranks", "damaged"), [(1, "train/dark/003.png"), (2, "val/bright/001.png")])
def test_corrupt_image_is_named_or_skipped_and_counted(num_ranks, damaged, tmp_path):
    image = make_image_folder(tmp_path / "images") / damaged
    image.write_bytes(image.read_bytes()[:60])
    assert_refused(run(num_ranks, IMAGES, cwd=tmp_path), damaged, "--skip-corrupt")
    shutil.rmtree(tmp_path / "run")
    loaders = ["--num-loader-workers", str(num_ranks - 1)]
    finished = run(num_ranks, [*IMAGES, "--skip-corrupt", *loaders], cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    assert "skipped 1 corrupt" in finished.output
    assert '"num_skipped_files": 1' in (tmp_path / "run" / "summary.json").read_text()


SHORT = ["--epochs", "1", "--checkpoint-every-epochs", "1", "--run-dir", "run"]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> Path:
    """The directory of a finished run of two ranks; to be copied, not changed."""
    cwd = tmp_path_factory.mktemp("finished")
    finished = run(2, SHORT, cwd=cwd)
    assert finished.exit_code == 0, finished.output
    return cwd / "run"


@pytest.mark.parametrize(
    ("num_ranks", "arguments", "words"),
    [
        (1, ["--run-dir", "run"], ["already holds a run", "--resume"]),
        (2, ["--run-dir", "run"], ["already holds a run", "--resume"]),
        (2, ["--run-dir", "run", "--resume", "--model", "resnet18-cifar"], ["another model", "--model"]),
        (1, ["--run-dir", "run", "--resume", "--dtype", "float64"], ["another model", "float64"]),
    ],
)
def test_a_run_that_is_there_stays_as_it_is(finished_run, num_ranks, arguments, words, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    before = all_files(tmp_path)
    assert_refused(run(num_ranks, arguments, cwd=tmp_path), *words)
    after = all_files(tmp_path)
    after.pop("run/log.txt"), before.pop("run/log.txt")
    assert after == before


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_diverging_run_stops_and_goes_on_from_its_last_good_checkpoint(finished_run, num_ranks, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    (good,) = checkpoints(tmp_path / "run")
    goes_on = [*SHORT, "--resume", "--epochs", "2"]
    diverged = run(num_ranks, [*goes_on, "--base-lr", "1e30"], cwd=tmp_path)
    assert diverged.exit_code == 2, diverged.output
    assert "Traceback" not in diverged.output
    # A rank cannot know whether another says the same.
    assert 1 <= len(diverged.error_lines) <= num_ranks, diverged.output
    assert "rank" in diverged.error_lines[0]
    assert "at step" in diverged.error_lines[0]
    assert str(good) in diverged.error_lines[0]
    assert checkpoints(tmp_path / "run") == [good]
    finished = run(num_ranks, [*goes_on, "--base-lr", "0.1"], cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    assert all(record["loss"] is not None for record in steps(tmp_path / "run"))


LIMITED = """
import resource
from pushreduce.communication import startup
from pushreduce.main import main
startup.start()  # MPI's own shared memory is not to be limited
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
main()
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_full_disk_leaves_the_earlier_checkpoint(finished_run, num_ranks, tmp_path):
    """A limit on the size of files stands for the full disk: a checkpoint's are larger, all others smaller."""
    shutil.copytree(finished_run, tmp_path / "run")
    before = all_files(tmp_path / "run" / "checkpoints"), model(tmp_path / "run")
    goes_on = [*SHORT, "--resume", "--epochs", "2"]
    (tmp_path / "limited.py").write_text(LIMITED)
    limited = launched(num_ranks, ["python", "limited.py", *goes_on])
    environment = {"PYTHONPATH": str(ROOT / "src")}
    assert_refused(run_command(limited, cwd=tmp_path, env=environment), "cannot save", "--resume")
    assert all_files(tmp_path / "run" / "checkpoints") == before[0]
    assert all(torch.equal(value, before[1][name]) for name, value in model(tmp_path / "run").items())
    finished = run(num_ranks, goes_on, cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    assert len(checkpoints(tmp_path / "run")) == 2


CRASHING = """
import torch
from pushreduce.communication import startup
process = startup.start()
startup.install_exception_hook()
from pushreduce.algorithms import LASGD
from pushreduce.communication.horovod_mpi import HorovodMPI

model = torch.nn.Linear(4, 1)
worker = LASGD(model, torch.optim.SGD(model.parameters(), lr=0.1), HorovodMPI())
for step in range(10**9):
    if (step, process.rank) == (3, process.size - 1):
        raise KeyError("the user's own mistake")
    model(torch.ones(2, 4)).sum().backward()
    worker.step(num_samples=2)
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_exception_on_one_rank_ends_all_with_its_traceback(num_ranks, tmp_path):
    """The others are waiting for it in an all-reduce, so that a hang would last for ever."""
    (tmp_path / "own_loop.py").write_text(CRASHING)
    environment = {"PYTHONPATH": str(ROOT / "src")}
    command = launched(num_ranks, ["python", "own_loop.py"])
    finished = run_command(command, cwd=tmp_path, env=environment, timeout_seconds=60)
    assert finished.exit_code not in (0, 2)
    assert f"[rank {num_ranks - 1} on" in finished.output
    assert "Traceback" in finished.output
    assert "the user's own mistake" in finished.output
