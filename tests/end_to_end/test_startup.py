"""The beginning and the end of real processes: who refuses, who prints, and that nobody is left waiting."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs the mpirun of the environment")

PREAMBLE = """
import os, signal, sys, threading, time
from pushreduce.communication import startup, stop_signals
def say(text): os.write(1, (text + "\\n").encode())
"""
LAUNCH = str(Path(__file__).parents[2] / "scripts/launch")
LAUNCHERS = re.compile(r"(OMPI|PMI|PMIX|PRTE|MPI_LOCAL|HYDI|SLURM)")


@contextlib.contextmanager
def started(tmp_path: Path, body: str, *launcher: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A job of `body` under `launcher` (none: a plain process); its processes do not outlive the test."""
    script = tmp_path / "job.py"
    script.write_text(PREAMBLE + body)
    environment = {name: value for name, value in os.environ.items() if not LAUNCHERS.match(name)}
    for prefix in ("OMPI", "PRTE"):
        environment |= {f"{prefix}_ALLOW_RUN_AS_ROOT": "1", f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment |= {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    job = subprocess.Popen(
        [*launcher, sys.executable, str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | variables,
        start_new_session=True,
        # A shell has what it starts in the background ignore SIGINT, and all of its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM if job.poll() is None else signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def run(tmp_path: Path, body: str, *launcher: str, **variables: str) -> tuple[int, str]:
    """Exit code and output; a job that hangs fails the test."""
    with started(tmp_path, body, *launcher, **variables) as job:
        output, _ = job.communicate(timeout=120)
        return job.returncode, output


def ranks(number: int) -> tuple[str, ...]:
    return ("mpirun", "-np", str(number))


def test_both_libraries_agree_and_settings_are_made(tmp_path: Path) -> None:
    code, output = run(
        tmp_path,
        """
process = startup.start(quiet=True)
import json, torch, horovod.torch as hvd
from mpi4py import MPI
from pushreduce.communication.environment import describe_environment
assert (process.rank, process.size) == (MPI.COMM_WORLD.rank, 3) == (hvd.rank(), hvd.size())
assert (process.local_rank, process.local_size) == (process.rank, 3)
assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
assert torch.get_num_threads() == 1
assert startup.start(quiet=True) == process
assert os.environ["HOROVOD_CONTROLLER"] == "mpi"
assert os.environ["HOROVOD_CYCLE_TIME"] == "3.5"
if process.rank == 0:
    say("environment " + json.dumps(describe_environment(process.size)))
startup.shut_down()
startup.shut_down()
""",
        *ranks(3),
        HOROVOD_CYCLE_TIME="3.5",
        OMP_NUM_THREADS="1",
    )
    assert code == 0, output
    environment = json.loads(output.split("environment ", 1)[1].splitlines()[0])
    assert environment["settings_made"]["HOROVOD_CONTROLLER"] == "mpi"
    assert environment["settings_of_user"]["HOROVOD_CYCLE_TIME"] == "3.5"
    assert environment["num_ranks"] == 3
    assert environment["host"]["cores"] == os.cpu_count()


def test_without_a_launcher_there_is_one_worker(tmp_path: Path) -> None:
    code, output = run(tmp_path, "say(repr(startup.start())); startup.shut_down()")
    assert code == 0, output
    assert "rank=0, size=1, local_rank=0, local_size=1" in output


@pytest.mark.parametrize("first", ["", "startup.start(quiet=True)"])
@pytest.mark.parametrize("launcher", [(), ranks(1), ranks(3), ("horovodrun", "-np", "2")])
def test_bad_input_is_one_line_and_code_2_on_every_rank_count(
    tmp_path: Path, first: str, launcher: tuple[str, ...]
) -> None:
    code, output = run(tmp_path, first + "\nstartup.exit_with_bad_input('there is no such model')", *launcher)
    assert code == 2, output
    assert output.count("error: there is no such model") == 1


def test_bad_input_on_one_rank_ends_the_others_in_a_barrier(tmp_path: Path) -> None:
    code, output = run(
        tmp_path,
        """
from mpi4py import MPI
if startup.start(quiet=True).rank == 2:
    startup.abort("error: rank 2: cat.jpg is not an image", 2)
MPI.COMM_WORLD.Barrier()
""",
        *ranks(3),
    )
    assert code == 2, output
    assert re.search(r"error: rank 2: cat.jpg is not an image", output), output


ON_RANK_1 = 'os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1"'


def test_a_rank_without_mpi_does_not_leave_the_others_in_their_start(tmp_path: Path) -> None:
    code, output = run(
        tmp_path,
        f"""
if {ON_RANK_1}:
    sys.modules["mpi4py.MPI"] = None  # as on a host where its library is missing
startup.connect()
""",
        *ranks(3),
    )
    assert code == 2, output
    assert re.search(r"error: MPI cannot be loaded .* \(rank 1 on ", output), output


def test_an_exception_before_mpi_has_started_ends_all_with_its_traceback(tmp_path: Path) -> None:
    code, output = run(
        tmp_path,
        f"""
if {ON_RANK_1}:
    sys.modules["psutil"] = None
startup.connect()
""",
        *ranks(3),
    )
    assert code not in (0, 2), output
    assert re.search(r"\[rank 1 on .*psutil", output), output


def test_a_rank_that_is_late_at_the_end_is_no_error(tmp_path: Path) -> None:
    code, output = run(
        tmp_path,
        """
communicator = startup.connect()
startup._SECONDS_TO_COME = 0.1
communicator.barrier()
if communicator.rank == 1:
    from mpi4py import MPI
    MPI.COMM_WORLD.isend("its own", 0)
    while not startup.has_lost_a_rank(): time.sleep(0.01)  # the others take it for lost
    say("late")
if communicator.rank == 0:
    from mpi4py import MPI
    assert not startup.has_lost_a_rank()
    MPI.COMM_WORLD.recv(source=1)
""",
        *ranks(3),
    )
    assert code == 0, output
    assert "late" in output
    assert "another rank" not in output


def test_a_rank_that_fails_in_the_imports_of_the_program_ends_all(tmp_path: Path) -> None:
    (tmp_path / "tyro.py").write_text(
        f"""
import os, sys
if {ON_RANK_1}:
    raise ImportError("libtyro.so is not on this host")
sys.path.remove({str(tmp_path)!r})
del sys.modules["tyro"]
import tyro
"""
    )
    body = f"""
import runpy
sys.path.insert(0, {str(tmp_path)!r})
sys.argv[1:] = ["--run-dir", {str(tmp_path / "run")!r}]
runpy.run_path({str(Path(__file__).parents[2] / "src/train.py")!r}, run_name="__main__")
"""
    code, output = run(tmp_path, body, *ranks(3))
    assert code not in (0, 2), output
    assert re.search(r"\[rank 1 on .*libtyro.so", output), output


@pytest.mark.parametrize("wait", ["barrier()", "allgather(1)"])
def test_a_rank_that_leaves_alone_ends_those_who_wait_for_it(tmp_path: Path, wait: str) -> None:
    """By `sys.exit`, past the exception hook, where no operation of Horovod would fail."""
    code, output = run(
        tmp_path,
        f"""
communicator = startup.connect()
if communicator.rank == 1:
    sys.exit(3)
communicator.{wait}
""",
        *ranks(3),
    )
    assert code not in (0, 2), output
    assert "another rank has ended" in output


@pytest.mark.parametrize("where", ["fail()", "threading.Thread(target=fail).start()"])
def test_an_exception_on_one_rank_ends_all_with_its_traceback(tmp_path: Path, where: str) -> None:
    code, output = run(
        tmp_path,
        f"""
def fail(): raise RuntimeError("the cat ate it")
startup.install_exception_hook()
rank = startup.start(quiet=True).rank
from mpi4py import MPI
if rank == 1:
    {where}
MPI.COMM_WORLD.Barrier()
MPI.COMM_WORLD.recv()
""",
        *ranks(3),
    )
    assert code not in (0, 2), output
    assert re.search(r"\[rank 1 on .+\] RuntimeError: the cat ate it", output), output
    assert "in fail" in output


@pytest.mark.parametrize(
    ("launcher", "sent", "seen"),
    [
        (ranks(2), signal.SIGUSR1, {signal.SIGUSR1}),
        ((sys.executable, LAUNCH, "-np", "2"), signal.SIGTERM, {signal.SIGTERM, signal.SIGUSR1}),
        ((sys.executable, LAUNCH, "-np", "2"), signal.SIGINT, {signal.SIGINT, signal.SIGUSR1}),
    ],
)
def test_a_signal_to_the_launcher_lets_every_rank_save(
    tmp_path: Path, launcher: tuple[str, ...], sent: signal.Signals, seen: set[signal.Signals]
) -> None:
    with started(
        tmp_path,
        """
read = stop_signals.install_signal_flag(30)
rank = startup.start(quiet=True).rank
from mpi4py import MPI
assert read() is None
MPI.COMM_WORLD.Barrier()
say("ready")
while read() is None: time.sleep(0.01)
say(f"rank {rank} saves after signal {read()}.")
startup.shut_down()
sys.exit(128 + read())
""",
        *launcher,
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if "ready" in line:
                break
        job.send_signal(sent)
        output, _ = job.communicate(timeout=120)
    numbers = re.findall(r"rank \d saves after signal (\d+)\.", output)
    assert len(numbers) == 2, output
    assert {int(number) for number in numbers} <= seen
    assert job.returncode == 128 + int(numbers[0]), output


def test_a_second_interrupt_aborts(tmp_path: Path) -> None:
    with started(
        tmp_path,
        """
read = stop_signals.install_signal_flag(30)
startup.start()
say(f"pid {os.getpid()}.")
while read() is None: time.sleep(0.01)
say("first")
while True: time.sleep(0.01)
""",
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if "pid" in line or "first" in line:
                job.send_signal(signal.SIGINT)
        job.wait(timeout=120)
    assert job.returncode == 128 + signal.SIGINT


CATCHING = """
try:
    startup.start(quiet=True)
except startup.StartupError as error:
    startup.exit_with_bad_input(str(error))
say("started")
"""


def test_another_mpi_s_launcher_is_refused(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        code, output = run(tmp_path, CATCHING, SLURM_STEP_NUM_TASKS="2", SLURM_PROCID=rank)
        assert code == 2, output
        refusal = "error: the launcher started 2 ranks (SLURM_STEP_NUM_TASKS), but each believes to be alone"
        assert output.count(refusal) == (rank == "0"), output
        assert "started\n" not in output


def test_too_low_a_thread_level_is_refused(tmp_path: Path) -> None:
    begin = "import mpi4py; mpi4py.rc(initialize=False, finalize=True)\nfrom mpi4py import MPI\n"
    code, output = run(tmp_path, begin + "MPI.Init_thread(MPI.THREAD_SINGLE)\n" + CATCHING, *ranks(2))
    assert code == 2, output
    assert re.search("error: .*has no MPI_THREAD_MULTIPLE; use an MPI that has it", output), output
    assert output.count("error: ") == 1


def test_two_mpi_libraries_are_refused(tmp_path: Path) -> None:
    second = f"""
import ctypes, shutil
from pathlib import Path
from pushreduce.communication import mpi_settings
startup.rank_without_horovod()
(library,) = mpi_settings.mpi_libraries(Path("/proc/self/maps").read_text())
copy = f"{tmp_path}/{{os.getpid()}}/" + os.path.basename(library)
os.mkdir(os.path.dirname(copy))
shutil.copy(library, copy)
ctypes.CDLL(copy)
"""
    code, output = run(tmp_path, second + CATCHING, *ranks(2))
    assert code == 2, output
    assert output.count("error: two MPI libraries in one process") == 1, output


@pytest.mark.parametrize(
    ("error", "code"), [("OSError('libcat.so: cannot open')", 2), ("KeyError('libcat')", 1)]
)
def test_a_failure_while_starting_on_one_rank_ends_all(tmp_path: Path, error: str, code: int) -> None:
    """A library that is missing on one host, and an exception where nobody expects one."""
    exit_code, output = run(
        tmp_path,
        f"""
rank = startup.rank_without_horovod()
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "horovod.torch" and rank == 1: raise {error}
sys.meta_path.insert(0, Finder())
startup.connect()
""",
        *ranks(2),
    )
    assert exit_code == code, output
    assert "libcat" in output
