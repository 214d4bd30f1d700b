"""The beginning and the end of a process: MPI, then Horovod, in one order everywhere, and the early ends.

Owns the setting of what must be set before MPI starts (decided in `mpi_settings.py`), the checks that MPI and
Horovod are fit to be used together, exit codes and the exception hook. The communication of a run is
`horovod_mpi.py`'s, its orderly stop on signals `stop_signals.py`'s. mpi4py and Horovod are imported inside functions
only: importing this module starts nothing.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from pushreduce.communication import emulated_host, host_leaders, mpi_settings

if TYPE_CHECKING:  # it needs torch, which the messages about bad settings do without
    from pushreduce.communication.base import Communicator

BAD_INPUT = 2
"""Exit code for what the user can put right."""

_OTHER_MPI = "use an MPI that has it (scripts/setup.sh --mpi mpich)"
_SECONDS_TO_FORWARD = 0.5
"""Before an abort: MPICH's launcher drops what it has not yet read from a rank, such as the traceback."""
_SECONDS_TO_COME = 3.0
settings_made: dict[str, str] = {}
"""What was put into the environment before MPI started."""
_before_shut_down: list[Callable[[], object]] = []
_at_end: Any = None
"""A communicator of all ranks for their end; None before the start and after it."""


class StartupError(ValueError):
    """MPI and Horovod cannot be used as they are; one line, with the remedy. Raised on all ranks."""


@dataclass(frozen=True)
class Process:
    """This process's place in the job."""

    rank: int
    size: int
    local_rank: int
    """Rank among the processes of this host."""
    local_size: int
    mpi_library: str
    """First line of what `MPI_Get_library_version` says."""


def start(*, quiet: bool = False, problem: str = "", worker: str = "process") -> Process:
    """Starts MPI at MPI_THREAD_MULTIPLE and Horovod on it. Collective; a second call returns the same.

    Sets one torch thread a rank unless OMP_NUM_THREADS is set. Warns on rank 0, unless `quiet`, where a host
    has more ranks than cores.

    Args:
        problem: what this rank has found wrong before; all ranks then refuse to start.
        worker: "host": gets Horovod ready to average among the first ranks of all hosts (`split_by_host`).

    Raises:
        StartupError: on all ranks alike, where there was a problem, MPI or Horovod is missing, the thread level is
            below MPI_THREAD_MULTIPLE, there are two MPI libraries, or they or the launcher disagree about ranks.
    """
    one_thread = os.environ.setdefault("OMP_NUM_THREADS", "1") == "1"
    mpi = _start_mpi()
    world = mpi.COMM_WORLD
    launch = _launch()
    if world.size == 1 and launch.num_ranks > 1:
        raise StartupError(
            f"the launcher started {launch.num_ranks} ranks ({launch.variable}), but each believes to be "
            f"alone: the launcher is not that of {_library(mpi)}; use mpirun or horovodrun of the activated "
            "environment"
        )
    _agree(world, problem)
    global _at_end
    _at_end = _at_end or world.Dup()
    try:
        import horovod.torch as hvd
    except (ImportError, OSError) as error:  # OSError: a library that it needs is missing
        problem = f"Horovod cannot be loaded ({_one_line(error)}); run scripts/setup.sh"
    else:
        problem = _unfit_before_horovod(mpi)
    _agree(world, problem)
    host = world.Split_type(mpi.COMM_TYPE_SHARED, key=world.rank)
    host_leaders.init_horovod(hvd, world.allgather((host.rank, worker)))
    atexit.unregister(_end)
    atexit.register(_end)  # now, so that it runs before what Horovod has registered
    problem = ""
    if (hvd.rank(), hvd.size()) != (world.rank, world.size):
        problem = (
            f"MPI calls this rank {world.rank} of {world.size}, Horovod {hvd.rank()} of {hvd.size()}: it "
            "does not run on this MPI; unset HOROVOD_CONTROLLER, or build Horovod again with scripts/setup.sh"
        )
    elif not hvd.mpi_threads_supported():
        problem = f"Horovod says that {_library(mpi)} has no MPI_THREAD_MULTIPLE; {_OTHER_MPI}"
    _agree(world, problem)
    import torch

    if one_thread:
        torch.set_num_threads(1)
    process = Process(world.rank, world.size, host.rank, host.size, _library(mpi))
    host.Free()
    crowded = [size for size in world.allgather(process.local_size - num_cores()) if size > 0]
    if crowded and process.rank == 0 and not quiet:
        _say(
            f"warning: a host has {max(crowded)} more ranks than cores: times are not those of a real cluster"
        )
    return process


def connect(problem: str = "", *, worker: str = "process") -> Communicator:
    """The way in for a training script: starts everything and returns this rank's communicator. Collective.

    An uncaught exception on any rank ends all. Where the ranks cannot be started, or any has found a `problem` before
    (a mistake in its settings), all end with one line and exit code 2. `worker` is "host" where `HostWorker` is used.
    """
    install_exception_hook()
    try:
        start(problem=problem, worker=worker)
    except StartupError as error:
        exit_with_bad_input(str(error))
    from pushreduce.communication.horovod_mpi import HorovodMPI

    return HorovodMPI()


def rank_without_horovod() -> int:
    """This process's rank; starts MPI only. For messages about settings, before anything else is imported.

    Where MPI itself cannot be started: the rank that the launcher's environment names, or 0.
    """
    launch = _launch()
    try:
        world = _start_mpi().COMM_WORLD
    except Exception:  # said by whoever needs MPI
        return launch.rank
    # Launched by another MPI's mpirun, every rank is rank 0 of 1 to MPI.
    return launch.rank if world.size == 1 else world.rank


def exit_with_bad_input(message: str) -> NoReturn:
    """Prints `error: message` on rank 0 only and exits with code 2 on all. To be called by all ranks.

    A rank that cannot start MPI says it of itself, as it may be the only one.
    """
    launch = _launch()
    try:
        mpi = _start_mpi()
    except Exception:  # what was wrong is the message, or less than that
        where = f" (rank {launch.rank} on {socket.gethostname()})" if launch.num_ranks > 1 else ""
        _say(f"error: {message}{where}")
        _tell_launcher(BAD_INPUT)
        sys.exit(BAD_INPUT)
    if rank_without_horovod() == 0:
        _say(f"error: {message}")
    # Some launchers end all ranks when the first has gone with a code: the message must be out by then.
    mpi.COMM_WORLD.Barrier()
    shut_down()
    sys.exit(BAD_INPUT)


def abort(message: str, exit_code: int) -> NoReturn:
    """Prints `message` and ends all ranks. For one rank alone, anywhere."""
    _say(message)
    try:
        mpi = _start_mpi()
    except Exception:  # what ends this rank has been said
        _tell_launcher(exit_code)
        os._exit(exit_code)
    time.sleep(_SECONDS_TO_FORWARD)
    mpi.COMM_WORLD.Abort(exit_code)
    os._exit(exit_code)


def _tell_launcher(exit_code: int) -> None:
    """That this rank ends before MPI has begun: MPICH's launcher takes no note of it, and others wait in MPI_Init."""
    if connection := os.environ.get("PMI_FD"):
        time.sleep(_SECONDS_TO_FORWARD)
        os.write(int(connection), f"cmd=abort exitcode={exit_code}\n".encode())


def install_exception_hook() -> None:
    """From now on an uncaught exception in any thread prints its traceback and ends all ranks with code 1."""

    def end(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> None:
        name = f"[rank {rank_without_horovod()} on {socket.gethostname()}] "
        lines = "".join(traceback.format_exception(kind, value, trace)).rstrip().split("\n")
        abort("\n".join(name + line for line in lines), 1)

    def end_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:
            end(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    sys.excepthook = end
    threading.excepthook = end_thread


def before_shut_down(action: Callable[[], object]) -> None:
    """Has `shut_down` call `action` before it stops anything, the latest first. Collective, as `action` may be."""
    _before_shut_down.append(action)


def shut_down() -> None:
    """Stops Horovod; MPI is finalised later, when the interpreter ends. Collective, idempotent."""
    if _at_end is not None:
        _wait_for_all()
    while _before_shut_down:
        _before_shut_down.pop()()
    _stop_horovod()


def _wait_for_all() -> None:
    """Until all ranks are here. One that ends alone, by `sys.exit`, lets fail what others wait for."""
    global _at_end
    ranks, _at_end = _at_end, None
    request = ranks.Ibarrier()
    deadline = time.monotonic() + seconds_to_come()
    has_told = False
    while not request.Test():
        if time.monotonic() > deadline and not has_told:
            has_told = True
            _stop_horovod()
            for to in range(ranks.size):
                ranks.Isend(b"", to)
        time.sleep(1e-3)
    for source in [rank for rank, told in enumerate(ranks.allgather(has_told)) if told]:  # others were late
        ranks.Recv(bytearray(), source)
    ranks.Free()


def seconds_to_come() -> float:
    """How long a rank at its end waits for the others before it takes itself to be the only one."""
    return _SECONDS_TO_COME * emulated_host.this_host().time_stretch


def has_lost_a_rank() -> bool:
    """Whether another rank has come to its end and waits for this one there."""
    return _at_end is not None and _at_end.Iprobe()


def _stop_horovod() -> None:
    if "horovod.torch" in sys.modules:
        import horovod.torch as hvd

        if hvd.is_initialized():
            hvd.shutdown()


def _end() -> None:
    """`shut_down` where a script has not called it: MPI would wait for ever for windows that are still locked."""
    try:
        shut_down()
    except BaseException:
        abort(traceback.format_exc().rstrip(), 1)


def mpi_library() -> str:
    """First line of what `MPI_Get_library_version` says."""
    return _library(_start_mpi())


def num_cores() -> int:
    """Processors of this host; not the affinity, since launchers bind each rank to a core or two."""
    return os.cpu_count() or 1


def _start_mpi() -> Any:
    """The module `mpi4py.MPI`, initialised; what this MPI needs is in the environment before it starts."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise StartupError(f"MPI cannot be loaded ({_one_line(error)}); run scripts/setup.sh") from error
    if not MPI.Is_initialized():
        import psutil

        launch = _launch()
        version = MPI.Get_library_version()
        up = {name for name, state in psutil.net_if_stats().items() if state.isup}
        interfaces = {
            name
            for name, addresses in psutil.net_if_addrs().items()
            if name in up and any(address.family == socket.AF_INET for address in addresses)
        }
        has_rdma = any(Path("/sys/class/infiniband").glob("*"))
        stretch = emulated_host.this_host().time_stretch
        made = mpi_settings.before_mpi(
            version, launch, num_cores(), interfaces, has_rdma, os.environ, stretch
        )
        libraries = mpi_settings.mpi_libraries(Path("/proc/self/maps").read_text())
        if mpi_settings.library_name(version) == "mpich" and len(libraries) == 1:
            made |= mpi_settings.ring_variables(Path(libraries[0]), launch, os.environ)
        os.environ.update(made)
        settings_made.update(made)
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def _launch() -> mpi_settings.Launch:
    return mpi_settings.read_launch(os.environ, on_terminal=os.isatty(0))


def _unfit_before_horovod(mpi: Any) -> str:
    libraries = mpi_settings.mpi_libraries(Path("/proc/self/maps").read_text())
    if len(libraries) > 1:
        return (
            f"two MPI libraries in one process ({', '.join(libraries)}): Horovod and mpi4py were built for "
            "different MPIs; run scripts/setup.sh again, and use mpirun or horovodrun of its environment"
        )
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        return f"{_library(mpi)} has no MPI_THREAD_MULTIPLE; {_OTHER_MPI}"
    return ""


def _agree(world: Any, problem: str) -> None:
    """Raises the first rank's problem on all ranks, so that none goes on alone."""
    problems = world.allgather(problem)
    for rank, other in enumerate(problems):
        if other:
            everywhere = problems.count(other) == world.size
            raise StartupError(other if everywhere else f"{other} (seen on rank {rank})")


def _say(message: str) -> None:
    # One write: a launcher labels, and mixes, what it gets in pieces.
    sys.stdout.flush()
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def _library(mpi: Any) -> str:
    return " ".join(mpi.Get_library_version().split("\n")[0].strip("\0, ").split(",")[0].split())


def _one_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
