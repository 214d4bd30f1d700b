"""The entry point of a training process: from the command line to the exit code.

Owns the order of set-up (`run_rank`, which `simulate.py` shares) and the way out: exit code 0 when the run reached its
end, 2 for bad input (one line, on all ranks), 128 + the signal's number after a signal (checkpoint saved), 1 with a
traceback for anything unforeseen.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pushreduce import command_line
from pushreduce.communication import startup, stop_signals
from pushreduce.settings import Settings, SettingsError, leaves, option

if (
    TYPE_CHECKING
):  # torch, MPI and Horovod are imported after the command line has been read: --help answers at once
    import torch

    from pushreduce.communication.base import Communicator
    from pushreduce.workloads.base import Workload


def main(argv: list[str] | None = None) -> None:
    """Runs one rank of what `argv` (default: the process's arguments) asks for; ends in SystemExit."""
    settings, problem = Settings(), ""
    try:
        settings = command_line.parse(sys.argv[1:] if argv is None else argv)
    except SettingsError as error:
        problem = str(error)
    communicator = startup.connect(problem, worker=settings.worker)
    from pushreduce.communication.agreement import AgreedError

    try:
        exit_code = _run(settings, communicator)
    except AgreedError as error:
        startup.exit_with_bad_input(str(error))
    startup.shut_down()
    sys.exit(exit_code)


def _run(settings: Settings, communicator: Communicator) -> int:
    from pushreduce.communication.agreement import build_on_all
    from pushreduce.communication.environment import describe_environment
    from pushreduce.training.console import launcher_command

    _refuse_differing_settings(settings, communicator)
    device = choose_device(settings.training.device, communicator)
    workload = build_on_all(communicator, lambda: _workload(settings, communicator))
    if settings.evaluate is not None:
        _evaluate_file(settings, communicator, workload, device)
        return 0
    return run_rank(
        settings,
        communicator,
        workload,
        device,
        stop_signal=stop_signals.install_signal_flag(settings.training.grace_seconds),
        environment=describe_environment(communicator.size),
        start_command=launcher_command(communicator),
    )


def run_rank(
    settings: Settings,
    communicator: Communicator,
    workload: Workload,
    device: torch.device,
    *,
    stop_signal: Callable[[], int | None],
    environment: dict[str, Any],
    start_command: str,
    in_own_process: bool = True,
    recorded_ranks: Sequence[int] | None = None,
    facts: Callable[[], dict[str, Any]] = dict,
) -> int:
    """Trains on one rank, from the model on; its exit code. Collective, the same settings on all ranks.

    Args:
        stop_signal: the number of a signal that asks for a stop, or None.
        environment: of this rank, as from `describe_environment`.
        start_command: what a person would type before the options, to go on with the run.
        in_own_process: False where all ranks share one, of which rank 0 then opens the log.
        recorded_ranks: whose metrics are kept, rank 0's among them; default: those of all.
        facts: further entries of the summary, asked for at the end.

    Raises:
        AgreedError: bad input, on all ranks alike.
    """
    from pushreduce.communication.agreement import agree, agree_with_root, build_on_all
    from pushreduce.training import console
    from pushreduce.training.loop import TrainingLoop
    from pushreduce.training.model import initial_model, refuse_batch_of_one
    from pushreduce.training.run_directory import RunDirectory

    model = build_on_all(communicator, lambda: initial_model(settings, workload, device))
    agree(communicator, lambda: refuse_batch_of_one(model, workload))
    batch_size = workload.batch_size_per_rank
    settings = replace(settings, data=replace(settings.data, batch_size_per_rank=batch_size))
    run_directory = build_on_all(communicator, lambda: RunDirectory.create(settings, communicator))
    if in_own_process:
        build_on_all(communicator, lambda: console.open_log(run_directory, communicator))
    else:
        agree_with_root(communicator, lambda: console.open_log(run_directory, communicator))
    loop = build_on_all(
        communicator,
        lambda: TrainingLoop(
            settings, communicator, workload, model, run_directory, device, stop_signal, recorded_ranks
        ),
    )
    environments = communicator.allgather(environment)
    agree_with_root(communicator, lambda: console.announce(settings, loop, environments))
    ended = loop.run()
    num_skipped = sum(communicator.allgather(workload.num_skipped))
    agree_with_root(
        communicator,
        lambda: console.conclude(
            settings,
            loop,
            ended=ended,
            start_command=start_command,
            num_skipped_files=num_skipped,
            commit=environment["commit"],
            time_stretch=environment["time_stretch"],
            **facts(),
        ),
    )
    return 0 if ended else 128 + (stop_signal() or signal.SIGTERM)


def _refuse_differing_settings(settings: Settings, communicator: Communicator) -> None:
    """Hosts may hold different files of one name."""
    from pushreduce.communication.agreement import AgreedError

    for rank, others in enumerate(communicator.allgather(settings)):
        for (name, ours), (_, theirs) in zip(leaves(settings), leaves(others), strict=True):
            if ours != theirs:
                raise AgreedError(
                    f"{option(name)} differs between ranks (rank {rank} has {theirs}): give all the same options "
                    "and the same --settings file"
                )


def _workload(settings: Settings, communicator: Communicator) -> Workload:
    from pushreduce.workloads import build_workload

    data = settings.data
    if (
        settings.evaluate is not None
    ):  # the batch size of the training may be too large for more ranks' shards
        data = replace(data, batch_size_per_rank=None)
    return build_workload(data, seed=settings.seed, rank=communicator.rank, size=communicator.size)


def choose_device(wanted: str, communicator: Communicator) -> torch.device:
    """A GPU of this rank's own, or the CPU: the same kind on all ranks, since they average with each other.

    Args:
        wanted: "auto", "cpu" or "cuda".

    Raises:
        AgreedError: a rank has no GPU of its own and "cuda" is wanted.
    """
    import torch

    from pushreduce.communication.agreement import AgreedError

    if wanted == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    index = communicator.local_rank % max(visible, 1)  # Slurm may show each rank its own only
    own = str(torch.cuda.get_device_properties(index).uuid) if visible else None
    of_ranks = communicator.allgather(own)
    without = [rank for rank, gpu in enumerate(of_ranks) if gpu is None or gpu in of_ranks[:rank]]
    if wanted == "cuda" and without:
        raise AgreedError(
            f"--device cuda: no GPU for rank {without[0]}: start at most one rank a GPU, or use --device cpu"
        )
    if without:
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _evaluate_file(
    settings: Settings, communicator: Communicator, workload: Workload, device: torch.device
) -> None:
    from pushreduce.communication.agreement import build_on_all
    from pushreduce.training.evaluate import score_together
    from pushreduce.training.model import load_model

    model = build_on_all(communicator, lambda: load_model(settings, workload, device))
    loss, top1_percent, _ = score_together(model, workload, communicator)
    if communicator.rank == 0:
        print(
            f"{settings.evaluate} on {settings.data.dataset}: top-1 {top1_percent:.2f} %, loss {loss:.4f} "
            f"({workload.num_validation_samples} images)"
        )
