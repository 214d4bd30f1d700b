"""Starts the program as its users do, under mpirun, horovodrun or alone, and brings back what it said.

Owns the command line, the environment, time limits and the end of every process started here. Does not judge
what came back, nor what is in a run directory (`run_files.py`).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from pushreduce.communication.mpi_settings import launcher_is_open_mpi

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "src" / "train.py"
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
TIMEOUT_SECONDS = 150.0

# horovodrun puts the rank in front of every line, Open MPI's the stream as well.
_LABEL = re.compile(r"^\[\d+(?:,\d+)*\](?:<std(?:out|err)>:?)? ?")


@dataclass(frozen=True)
class Finished:
    """A job that has ended."""

    exit_code: int
    output: str
    """Standard output and error of the launcher and all ranks; labels of the launcher removed."""

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error:")]


class Job:
    """A job that was started: see `start`."""

    def __init__(self, command: Sequence[str], cwd: Path | None, env: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment(env),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, timeout_seconds: float = TIMEOUT_SECONDS) -> Finished:
        """Waits for the end; a job that takes longer is killed and fails the test."""
        try:
            exit_code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"no end after {timeout_seconds} s:\n{self.output}") from None
        return Finished(exit_code, self.output)

    @property
    def output(self) -> str:
        """What has been said so far."""
        lines = self._log.read_text(errors="replace").replace("\r", "\n").split("\n")
        return "\n".join(_LABEL.sub("", line) for line in lines)

    def wait_until(self, condition: Callable[[], bool], timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Returns when `condition()` holds; the test fails where the job ends first."""
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"ended, or waited for in vain:\n{self.output}")
            time.sleep(0.05)

    def rank_processes(self) -> dict[int, psutil.Process]:
        """The ranks' processes (not the launcher's, nor loader processes) by rank."""
        found = {}
        for process in [psutil.Process(self._process.pid), *self._descendants()]:
            variables = process.environ()
            rank = next((variables[name] for name in RANK_VARIABLES if name in variables), "0")
            parent = process.parent()
            # Open MPI's mpirun, whose command line names the program as well, is a child of another mpirun.
            if _is_python(process) and (parent is None or not _is_python(parent)):
                found.setdefault(int(rank), process)
        return found

    def terminate_launcher(self) -> None:
        """By the signal that the launcher hands on: at SIGTERM Open MPI's kills the ranks a moment later."""
        self._process.send_signal(signal.SIGUSR1 if is_open_mpi() else signal.SIGTERM)

    def kill(self) -> None:
        """Ends the launcher, its helpers and all ranks. MPICH's helpers leave the launcher's process group."""
        doomed = self._descendants()
        self._process.kill()
        for process in doomed:
            if process.is_running():
                process.kill()
        self._process.wait()

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def is_open_mpi() -> bool:
    """Whether the environment's mpirun is Open MPI's."""
    version = subprocess.run(
        ["mpirun", "--version"], env=environment(), capture_output=True, text=True, check=True
    ).stdout
    return launcher_is_open_mpi(version)


def _is_python(process: psutil.Process) -> bool:
    return str(TRAIN) in process.cmdline() and "python" in process.name()


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """That of an activated environment, with one thread a rank, and `extra`."""
    variables = dict(os.environ)
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables["PATH"]])
    variables["OMP_NUM_THREADS"] = "1"
    # Open MPI: more ranks than cores, and root, who is the only user in many containers.
    variables["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    variables["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    if os.getuid() == 0:
        for family in ("OMPI", "PRTE"):
            variables[f"{family}_ALLOW_RUN_AS_ROOT"] = variables[f"{family}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return variables | dict(extra or {})


def launched(num_ranks: int, program: Sequence[str], launcher: str = "mpirun") -> list[str]:
    """The command that runs `program` on `num_ranks` ranks; one rank by mpirun has no launcher at all."""
    if launcher == "mpirun" and num_ranks == 1:
        return list(program)
    return [launcher, "-np", str(num_ranks), *program]


@contextmanager
def start(
    num_ranks: int,
    arguments: Sequence[str],
    *,
    log: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Job]:
    """`src/train.py` with `arguments`, running; killed on leaving the block. Its output goes to `log`."""
    job = Job(launched(num_ranks, ["python", str(TRAIN), *arguments]), cwd, env or {}, log)
    try:
        yield job
    finally:
        job.kill()


def run_command(
    command: Sequence[str],
    *,
    cwd: Path,
    timeout_seconds: float = TIMEOUT_SECONDS,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """Any command, in the directory `cwd`, to its end."""
    log = cwd / f".output-{time.monotonic_ns()}"
    job = Job(command, cwd, env or {}, log)
    try:
        return job.finish(timeout_seconds)
    finally:
        job.kill()
        log.unlink()


def run(
    num_ranks: int,
    arguments: Sequence[str],
    *,
    cwd: Path,
    launcher: str = "mpirun",
    timeout_seconds: float = TIMEOUT_SECONDS,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """`src/train.py` with `arguments` on `num_ranks` ranks, in the directory `cwd`, to its end."""
    command = launched(num_ranks, ["python", str(TRAIN), *arguments], launcher)
    return run_command(command, cwd=cwd, timeout_seconds=timeout_seconds, env=env)
