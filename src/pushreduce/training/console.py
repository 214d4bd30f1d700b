"""What rank 0 says at the beginning and at the end of a run, on the terminal and in `log.txt`.

Everything that is logged anywhere in the package goes to both; what the other ranks log goes to the terminal only.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pushreduce.communication.base import Communicator
from pushreduce.settings import Settings
from pushreduce.training.atomic_file import write_atomically
from pushreduce.training.curves import draw_curves
from pushreduce.training.metrics import read_records
from pushreduce.training.run_directory import RunDirectory
from pushreduce.training.run_state import describe_workers
from pushreduce.training.summary import print_summary, summarise, write_summary
from pushreduce.training.view import RunView

if TYPE_CHECKING:
    from pushreduce.training.loop import TrainingLoop

logger = logging.getLogger(__name__)


class _BesideProgressBar(logging.StreamHandler):
    """Writes lines above a progress bar that is on display."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            sys.stderr.write(self.format(record) + "\n")  # at once: launchers label every piece that they get
            sys.stderr.flush()


def open_log(run_directory: RunDirectory, communicator: Communicator) -> None:
    """Sends the package's log to the terminal and, on rank 0, to `log.txt`."""
    package = logging.getLogger("pushreduce")
    package.setLevel(logging.INFO if communicator.rank == 0 else logging.WARNING)
    terminal = _BesideProgressBar()
    terminal.setFormatter(logging.Formatter("%(message)s"))
    package.addHandler(terminal)
    if communicator.rank == 0:
        file = logging.FileHandler(run_directory.log_txt)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        package.addHandler(file)


def announce(settings: Settings, loop: TrainingLoop, environment: list[dict[str, Any]]) -> None:
    """The run on disk and in a few lines, before its first step; from then on `loop` is shown. On rank 0.

    Args:
        environment: of every rank, as from `describe_environment`.
    """
    run_directory = loop.run_directory
    run_directory.save_settings(settings)  # of a resumed run, with the options given now
    write_environment(run_directory, environment, loop.algorithm.worker_of_rank)
    loop.view = RunView(
        settings,
        run_directory,
        num_samples=round(settings.training.epochs * loop.workload.num_train_samples),
        resumed_from_samples=loop.resumed_from_samples,
    )
    workload = loop.workload
    num_parameters = loop.algorithm.parameters.num_elements
    logger.info(
        "%s with %s: %s (%s training images), %s (%s parameters), %d images a rank and step, %g epochs",
        settings.algorithm,
        describe_workers(loop.algorithm.progress.size, loop.communicator.size),
        settings.data.dataset,
        f"{workload.num_train_samples:,}",
        settings.data.model,
        f"{num_parameters:,}",
        workload.batch_size_per_rank * settings.optimizer.accumulation_steps,
        settings.training.epochs,
    )
    for line in about_emulated_hosts(settings, environment):
        logger.warning(line)
    if loop.resumed_from_samples:
        logger.info("resumed at epoch %.2f", loop.resumed_from_samples / workload.num_train_samples)
    logger.info("run directory %s", run_directory.path)
    logger.info("watch it:     tensorboard --logdir %s", shlex.quote(str(run_directory.path)))


def about_emulated_hosts(settings: Settings, by_rank: list[dict[str, Any]]) -> list[str]:
    """What to bear in mind when reading this run's times, or why they mean nothing; nothing on real hosts."""
    time_stretch = by_rank[0]["time_stretch"]
    slowness = {each["host"]["name"]: each["host"]["slowness"] for each in by_rank}
    slow = [f"{name} computes {factor:g} times as long" for name, factor in slowness.items() if factor != 1]
    facts = ", ".join([f"time is stretched by {time_stretch:g}"] * (time_stretch != 1) + slow)
    if not facts:
        return []
    if settings.emulation.emulated_step_seconds == 0:
        return [
            f"warning: {facts} in this emulated cluster, but without --emulated-step-seconds computation is as fast "
            "as ever"
        ]
    if time_stretch == 1:
        return [f"emulated cluster: {facts}"]
    return [
        f"emulated cluster: {facts}; all seconds from here on are stretched: divide them by {time_stretch:g}"
    ]


def write_environment(
    run_directory: RunDirectory, by_rank: list[dict[str, Any]], worker_of_rank: list[int]
) -> None:
    """`environment.json`: that of rank 0, the worker that each rank belongs to, and every host with its ranks."""
    hosts: dict[str, dict[str, Any]] = {}
    for rank, environment in enumerate(by_rank):
        host = environment["host"]
        hosts.setdefault(host["name"], {**host, "ranks": []})["ranks"].append(rank)
    described = {name: value for name, value in by_rank[0].items() if name != "host"}
    described["worker_of_rank"] = worker_of_rank
    described["hosts"] = list(hosts.values())
    write_atomically(run_directory.environment_json, (json.dumps(described, indent=2) + "\n").encode())


def conclude(
    settings: Settings, loop: TrainingLoop, *, ended: bool, start_command: str, **facts: Any
) -> None:
    """Summary, curves and what to do next. On rank 0.

    Args:
        ended: whether the run reached its end.
        start_command: what a person would type before the options, to go on with the run.
        facts: further entries of the summary, `commit` (of the program) and `num_skipped_files` (corrupt ones, that all
            ranks have skipped since this process started) among them.
    """
    num_ranks = loop.communicator.size
    directory = loop.run_directory
    summary = summarise(
        read_records(directory.metrics(0)),
        [read_records(directory.metrics(rank)) for rank in loop.recorded_ranks if rank > 0],
        algorithm=settings.algorithm,
        dataset=settings.data.dataset,
        model=settings.data.model,
        num_ranks=num_ranks,
        num_workers=loop.algorithm.progress.size,
        seed=settings.seed,
        **facts,
    )
    if facts["num_skipped_files"]:
        logger.warning("skipped %d corrupt image files", facts["num_skipped_files"])
    assert loop.view is not None
    loop.view.close(summary)
    resume = f"{start_command} {resume_options(loop)}"
    if not ended:
        logger.info("stopped before the end; the checkpoint is complete. To go on:\n  %s", resume)
        return
    write_summary(directory.summary_json, summary)
    draw_curves([directory.path], directory.curves_png)
    print_summary(summary)
    logger.info("model        %s", directory.model_pt)
    logger.info("curves       %s", directory.curves_png)
    logger.info("tensorboard --logdir %s", shlex.quote(str(directory.path)))
    logger.info("to train it for longer:\n  %s --epochs N", resume)


def launcher_command(communicator: Communicator) -> str:
    """What a person types before the options, to start this program on as many ranks."""
    size, local_size = communicator.size, communicator.local_size
    launcher = f"mpirun -np {size} " if size > 1 else ""
    if local_size < size:  # how the hosts were given is known to the launcher only
        launcher = f"scripts/launch -np {size} --hostfile FILE "
    return f"{launcher}python {shlex.quote(sys.argv[0])}"


def resume_options(loop: TrainingLoop) -> str:
    """The options that go on with the run from its newest checkpoint."""
    options = f"--run-dir {shlex.quote(str(loop.run_directory.path))} --resume"
    if loop.settings.trace:
        options += " --no-trace"  # a trace cannot go on
    return options
