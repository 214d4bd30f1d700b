"""Training in virtual time: the program of `main.py` with all ranks in this process, on a cluster that does not exist.

Owns the options before `--`, which cluster is meant, and what ranks of one process share: the data set, the log, the
signal flag. The order of set-up is `main.py`'s, the loop and the algorithms are those of every run, and gradients are
real: only time is not. Needs neither MPI nor Horovod.

    python scripts/simulate --num-workers 32 -- --algorithm sgp --tau 1 --emulated-step-seconds 0.18
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pushreduce import command_line
from pushreduce.communication import startup, stop_signals
from pushreduce.settings import EmulationSettings, Settings, SettingsError

if TYPE_CHECKING:
    from pushreduce.communication.simulated import SimulatedCommunicator
    from pushreduce.simulation.cluster_model import ClusterModel

MAX_RECORDED_RANKS = 16
"""Of more ranks, at most so many are recorded, rank 0 and others at equal distances: more files would tell no more."""
_DEFAULT_LINK_BITS_PER_SECOND = 10e9
_DEFAULT_LATENCY_SECONDS = 50e-6


def main(argv: list[str] | None = None) -> None:
    """Runs what `argv` (default: the process's arguments) asks for; ends in SystemExit."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        settings, model = _parse(arguments)
    except SettingsError as error:
        _exit_with_bad_input(str(error))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as on a real cluster; before torch is imported
    from pushreduce.communication.agreement import AgreedError
    from pushreduce.communication.simulated import Aborted

    try:
        exit_code = _run(settings, model)
    except AgreedError as error:
        _exit_with_bad_input(str(error))
    except Aborted as aborted:  # it has said why
        exit_code = aborted.exit_code
    sys.exit(exit_code)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}: see --help")


def _parse(arguments: list[str]) -> tuple[Settings, ClusterModel]:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _Parser(
        prog="scripts/simulate",
        usage="%(prog)s [--num-workers N] [--ranks-per-host R] [--cluster FILE] -- OPTIONS OF src/train.py",
        description="Trains with real gradients on a simulated cluster, in virtual time and in one process. The run "
        "directory is that of any run; its seconds are virtual. `-- --help` shows the options of src/train.py.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--num-workers", type=_positive, metavar="N", help="ranks; default: those of the cluster file"
    )
    parser.add_argument(
        "--ranks-per-host",
        type=_positive,
        metavar="R",
        help="ranks that share a host's link; default: the cluster file's, or 1",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="YAML of scripts/calibrate: link, latency, costs, and the seconds of a step unless "
        "--emulated-step-seconds gives them; default: with --resume the run's own, else links of 10 Gbit/s, 50 us "
        "and no other costs",
    )
    own, others = parser.parse_known_args(arguments[:split])
    if others:
        raise SettingsError(
            f"unknown option {others[0]}: options of src/train.py come after `--`; for the others see --help"
        )
    settings = command_line.parse(arguments[split + 1 :])
    if settings.evaluate is not None:
        raise SettingsError("--evaluate needs no cluster: give it to src/train.py")
    if settings.training.device == "cuda":
        raise SettingsError("--device cuda: the ranks share one process and compute on the CPU: leave it out")
    if settings.data.num_loader_workers > 0:
        raise SettingsError("--num-loader-workers: the ranks share one process and read in it: leave it out")
    model = _cluster_model(own, settings)
    if settings.emulation == EmulationSettings() and model.step_seconds > 0:
        emulation = EmulationSettings(model.step_seconds, model.step_jitter, model.rank_slowness)
        settings = replace(settings, emulation=emulation)
    return settings, model


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


_positive.__name__ = "whole number"  # argparse: invalid whole number value: 'many'


def _cluster_model(own: argparse.Namespace, settings: Settings) -> ClusterModel:
    from pushreduce.simulation.cluster_model import ClusterModel, load_cluster_model

    if own.cluster is not None:
        model = load_cluster_model(own.cluster)
    elif settings.resume:
        model = _cluster_of(Path(settings.run_dir or ""))
    elif own.num_workers is not None:
        model = ClusterModel(
            num_hosts=own.num_workers,
            link_bits_per_second=_DEFAULT_LINK_BITS_PER_SECOND,
            latency_seconds=_DEFAULT_LATENCY_SECONDS,
            step_seconds=0.0,
        )
    else:
        raise SettingsError("of how many ranks? give --num-workers N, or --cluster FILE")
    num_ranks = own.num_workers or model.num_ranks
    ranks_per_host = own.ranks_per_host or model.ranks_per_host
    if num_ranks % ranks_per_host:
        raise SettingsError(
            f"{num_ranks} ranks cannot be dealt to hosts of {ranks_per_host}: give --num-workers a multiple of "
            "--ranks-per-host"
        )
    try:
        return replace(model, num_hosts=num_ranks // ranks_per_host, ranks_per_host=ranks_per_host)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _cluster_of(run: Path) -> ClusterModel:
    """The cluster that a run was simulated on."""
    from pushreduce.settings_file import dataclass_from_yaml
    from pushreduce.simulation.cluster_model import ClusterModel

    path = run / "environment.json"
    try:
        simulated = json.loads(path.read_text(encoding="utf-8")).get("simulated")
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read ({error}): give --cluster FILE") from error
    if simulated is None:
        raise SettingsError(f"{run} was not simulated: go on with it by src/train.py")
    return dataclass_from_yaml(ClusterModel, json.dumps(simulated), source=str(path))  # JSON is YAML, too


def _run(settings: Settings, model: ClusterModel) -> int:
    import torch

    from pushreduce.communication.agreement import AgreedError
    from pushreduce.communication.environment import describe_process
    from pushreduce.main import run_rank
    from pushreduce.simulation.cluster_transport import simulated_cluster
    from pushreduce.workloads import workload_of_rank

    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    num_ranks = model.num_ranks
    start_seconds = time.monotonic()
    try:
        make_workload = workload_of_rank(settings.data, seed=settings.seed, size=num_ranks)
    except (ValueError, OSError) as error:
        raise AgreedError(str(error)) from error
    workloads = [make_workload(rank) for rank in range(num_ranks)]
    del make_workload  # and with it the data set, of which every rank now has its share
    stop_signal = stop_signals.install_signal_flag(settings.training.grace_seconds, _abort)
    environment = {**describe_process(num_ranks), "simulated": asdict(model)}

    def train(communicator: SimulatedCommunicator) -> int:
        return run_rank(
            settings,
            communicator,
            workloads[communicator.rank],
            torch.device("cpu"),
            stop_signal=stop_signal,
            environment=environment,
            start_command=f"python {sys.argv[0]} --",
            in_own_process=False,
            recorded_ranks=recorded_ranks(num_ranks),
            facts=lambda: {"time": "virtual", "simulation_seconds": time.monotonic() - start_seconds},
        )

    return simulated_cluster(model, seed=settings.seed).run(train)[0]


def recorded_ranks(num_ranks: int) -> range:
    """The ranks whose metrics are kept."""
    return range(0, num_ranks, -(-num_ranks // MAX_RECORDED_RANKS))


def _abort(message: str, exit_code: int) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
    os._exit(exit_code)


def _exit_with_bad_input(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(startup.BAD_INPUT)
