"""The entry point of a training process: from the command line to the exit code.

Owns the order of set-up and the way out: exit code 0 when the run reached its end, 2 for bad input (one line, on all
ranks), 128 + the signal's number after a signal (checkpoint saved), 1 with a traceback for anything unforeseen.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pushreduce import command_line
from pushreduce.communication import startup
from pushreduce.settings import Settings, SettingsError

if (
    TYPE_CHECKING
):  # torch, MPI and Horovod are imported after the command line has been read: --help answers at once
    import torch

    from pushreduce.communication.base import Communicator
    from pushreduce.workloads.base import Workload

T = TypeVar("T")


def main(argv: list[str] | None = None) -> None:
    """Runs one rank of what `argv` (default: the process's arguments) asks for; ends in SystemExit."""
    try:
        settings = command_line.parse(sys.argv[1:] if argv is None else argv)
    except SettingsError as error:
        startup.exit_with_bad_input(str(error))
    communicator = startup.connect()
    stop_signal = startup.install_signal_flag(settings.training.grace_seconds)
    try:
        exit_code = _run(settings, communicator, stop_signal)
    except BadInputError as error:
        startup.exit_with_bad_input(str(error))
    startup.shut_down()
    sys.exit(exit_code)


class BadInputError(ValueError):
    """A mistake of the user's, known to all ranks."""


def _run(settings: Settings, communicator: Communicator, stop_signal: Callable[[], int | None]) -> int:
    from pushreduce.training import console
    from pushreduce.training.checkpoint import CheckpointError
    from pushreduce.training.loop import TrainingLoop, initial_model
    from pushreduce.training.run_directory import RunDirectory
    from pushreduce.training.view import RunView

    device = _device(settings, communicator)
    workload = _on_all_ranks(communicator, lambda: _workload(settings, communicator))
    if settings.evaluate is not None:
        _evaluate_file(settings, communicator, workload, device)
        return 0
    model = _on_all_ranks(communicator, lambda: initial_model(settings, workload))
    batch_size = workload.batch_size_per_rank
    settings = replace(settings, data=replace(settings.data, batch_size_per_rank=batch_size))
    run_directory = _on_all_ranks(communicator, lambda: RunDirectory.create(settings, communicator))
    console.open_log(run_directory, communicator)
    loop = _on_all_ranks(
        communicator,
        lambda: TrainingLoop(settings, communicator, workload, model, run_directory, device, stop_signal),
    )
    environment = communicator.allgather(startup.describe_environment())
    if communicator.rank == 0:
        run_directory.save_settings(settings)  # of a resumed run, with the options given now
        console.write_environment(run_directory, environment)
        console.announce(settings, communicator, loop)
        loop.view = RunView(
            settings,
            run_directory,
            num_samples=round(settings.training.epochs * workload.num_train_samples),
            resumed_from_samples=loop.resumed_from_samples,
        )
    try:
        ended = loop.run()
    except CheckpointError as error:
        raise BadInputError(str(error)) from error
    num_skipped = sum(communicator.allgather(workload.num_skipped))
    if communicator.rank == 0:
        console.conclude(settings, communicator, loop, environment[0], num_skipped=num_skipped, ended=ended)
    return 0 if ended else 128 + (stop_signal() or signal.SIGTERM)


def _workload(settings: Settings, communicator: Communicator) -> Workload:
    from pushreduce.workloads import build_workload

    return build_workload(settings.data, seed=settings.seed, rank=communicator.rank, size=communicator.size)


def _device(settings: Settings, communicator: Communicator) -> torch.device:
    """The GPU of the local rank, or the CPU: the same kind on all ranks, since they average with each other."""
    import torch

    has_gpu = torch.cuda.device_count() > communicator.local_rank
    without_gpu = [rank for rank, has_one in enumerate(communicator.allgather(has_gpu)) if not has_one]
    if settings.training.device == "cuda" and without_gpu:
        raise BadInputError(
            f"--device cuda: no GPU for rank {without_gpu[0]}: start at most one rank a GPU, or use --device cpu"
        )
    if settings.training.device == "cpu" or without_gpu:
        return torch.device("cpu")
    torch.cuda.set_device(communicator.local_rank)
    return torch.device("cuda", communicator.local_rank)


def _evaluate_file(
    settings: Settings, communicator: Communicator, workload: Workload, device: torch.device
) -> None:
    from pushreduce.training.evaluate import load_model, score_together

    model = _on_all_ranks(communicator, lambda: load_model(settings, workload, device))
    try:
        loss, top1_percent = score_together(model, workload, communicator)
    except ValueError as error:
        raise BadInputError(str(error)) from error
    if communicator.rank == 0:
        print(
            f"{settings.evaluate} on {settings.data.dataset}: top-1 {top1_percent:.2f} %, loss {loss:.4f} "
            f"({workload.num_validation_samples} images)"
        )


def _on_all_ranks(communicator: Communicator, build: Callable[[], T]) -> T:
    """`build()` on every rank; where it raises ValueError on any, BadInputError on all."""
    from pushreduce.training.agreement import agree

    built: list[T] = []
    try:
        agree(communicator, lambda: built.append(build()))
    except ValueError as error:
        raise BadInputError(str(error)) from error
    return built[0]
