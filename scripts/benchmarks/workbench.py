"""What the pieces of the benchmark are made of: data of Fashion-MNIST's shape, and a training loop as a user has it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pushreduce.communication import startup
from pushreduce.communication.base import Communicator
from pushreduce.settings import DataSettings, OptimizerSettings, Settings, TrainingSettings
from pushreduce.training.loop import TrainingLoop
from pushreduce.training.model import initial_model
from pushreduce.training.run_directory import RunDirectory
from pushreduce.training.schedule import build_optimizer
from pushreduce.training.view import RunView
from pushreduce.workloads import build_workload, models
from pushreduce.workloads.base import Workload

NUM_IMAGES = 60_000
OPTIMIZER = OptimizerSettings(base_lr=0.01)
"""Momentum 0.9, Nesterov, weight decay: the defaults. The rate is low, since the labels are random."""
IMAGE_SHAPES = {"cnn": (1, 28, 28), "resnet18-cifar": (3, 32, 32)}


def write_data(directory: Path) -> None:
    """Random images and labels as the four idx files of Fashion-MNIST: the program reads them like the real ones."""
    rng = np.random.default_rng(0)
    for prefix, number in (("train", NUM_IMAGES), ("t10k", 1000)):
        images = rng.integers(256, size=(number, 28, 28), dtype=np.uint8)
        labels = rng.integers(10, size=number, dtype=np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = np.array([0x0800 + array.ndim, *array.shape], dtype=">u4").tobytes()
            (directory / f"{prefix}-{name}-ubyte").write_bytes(header + array.tobytes())


def start() -> Communicator:
    """This rank's communicator."""
    startup.install_exception_hook()
    startup.start(quiet=True)
    # Imported no earlier: it imports mpi4py.MPI, which would start MPI without the settings that `start` makes.
    from pushreduce.communication.horovod_mpi import HorovodMPI

    return HorovodMPI()


class _Terminal:
    """A stream that passes for a terminal, so that the progress bar is drawn as for a user who watches it."""

    def __init__(self) -> None:
        self._file: TextIO = open(os.devnull, "w")  # noqa: SIM115  # until the process ends

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def build_loop(
    algorithm: str,
    batch_size: int,
    directory: Path,
    communicator: Communicator,
    after_step: Callable[[], int | None],
) -> TrainingLoop:
    """The program's own loop on the small CNN, with record, progress bar and TensorBoard; ends when told to."""
    name = communicator.allgather(f"run-{algorithm}-{os.getpid()}")[0]
    settings = Settings(
        algorithm=algorithm,  # type: ignore[arg-type]
        run_dir=str(directory / name),
        data=DataSettings(dataset="fashion-mnist", data_dir=str(directory), batch_size_per_rank=batch_size),
        optimizer=OPTIMIZER,
        training=TrainingSettings(epochs=1e6, evaluate_every_epochs=1e6, checkpoint_every_epochs=1e6),
    )
    workload: Workload = build_workload(settings.data, seed=0, rank=communicator.rank, size=communicator.size)
    run_directory = RunDirectory.create(settings, communicator)
    cpu = torch.device("cpu")
    model = initial_model(settings, workload, cpu)
    loop = TrainingLoop(settings, communicator, workload, model, run_directory, cpu, after_step)
    if communicator.rank == 0:
        stderr, sys.stderr = sys.stderr, _Terminal()  # type: ignore[assignment]
        loop.view = RunView(
            settings,
            run_directory,
            num_samples=round(settings.training.epochs * workload.num_train_samples),
            resumed_from_samples=0,
        )
        sys.stderr = stderr
    return loop


def run_to_stop(loop: TrainingLoop) -> None:
    """Runs until `after_step` asks for the stop."""
    ended = loop.run()
    assert not ended
    if loop.view:
        loop.view.close({})


class BareLoop:
    """The plainest PyTorch training on tensors in memory: what a program without this package would run."""

    def __init__(self, model_name: str, batch_size: int, num_images: int = NUM_IMAGES) -> None:
        channels, height, width = shape = IMAGE_SHAPES[model_name]
        torch.manual_seed(0)
        self.model: nn.Module = models.build_model(model_name, shape, 10)
        self.optimizer: Any = build_optimizer(OPTIMIZER, self.model)
        # The program's images have their channels last in memory; with them first torch's convolutions are a
        # quarter slower on a CPU, which is none of the loop's business.
        self._inputs = torch.randn(num_images, height, width, channels).permute(0, 3, 1, 2)
        self._targets = torch.randint(10, (num_images,))
        self._batch_size = batch_size
        self._order = torch.randperm(num_images)
        self._position = 0

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, ...] and [batch]."""
        if self._position + self._batch_size > len(self._order):
            self._order, self._position = torch.randperm(len(self._order)), 0
        rows = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        return self._inputs[rows], self._targets[rows]

    def run(self, num_steps: int) -> None:
        """Takes `num_steps` steps."""
        for _ in range(num_steps):
            inputs, targets = self.next_batch()
            loss = functional.cross_entropy(self.model(inputs), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.update()

    def update(self) -> None:
        """What follows `backward()`."""
        self.optimizer.step()
