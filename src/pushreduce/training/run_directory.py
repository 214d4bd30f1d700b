"""The directory of a run: its name and the paths in it.

Owns where things lie and who makes the directory. Does not own what the files contain (`metrics.py`,
`checkpoint.py`, ...), apart from `settings.yaml`, whose presence says that the directory holds a run; nor how
they are written whole (`atomic_file.py`).
"""

from __future__ import annotations

import fcntl
import itertools
import secrets
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from pushreduce.communication.agreement import agree_with_root
from pushreduce.communication.base import Communicator
from pushreduce.settings import Settings
from pushreduce.settings_file import to_yaml
from pushreduce.training.atomic_file import write_atomically

_locks: list[TextIO] = []  # of this process's runs; closing one would give it up


class RunDirectory:
    """Paths of one run. `create` makes the directory; the constructor only names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings_yaml = path / "settings.yaml"
        self.environment_json = path / "environment.json"
        self.log_txt = path / "log.txt"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.model_pt = path / "model.pt"
        self.summary_json = path / "summary.json"
        self.curves_png = path / "curves.png"

    def metrics(self, rank: int) -> Path:
        return self.path / f"metrics.rank{rank}.jsonl"

    def trace(self, rank: int) -> Path:
        return self.path / f"trace.rank{rank}.jsonl"

    def save_settings(self, settings: Settings) -> None:
        """Writes `settings.yaml`; call it on rank 0 only.

        Without `run_dir` and `resume`, which say where a run lies and not what it is: so the file can be
        given to `--settings` for another run, and the directory can be moved.
        """
        write_atomically(self.settings_yaml, to_yaml(replace(settings, run_dir=None, resume=False)).encode())

    @classmethod
    def create(cls, settings: Settings, communicator: Communicator) -> RunDirectory:
        """The run's directory, the same on all ranks. Collective.

        A new run's directory is made and its settings are saved in it; of a resumed run nothing is changed
        (call `save_settings` once its checkpoint has been restored). Come here last in set-up: after it, the
        directory holds a run.

        Raises:
            ValueError: on all ranks alike, nothing left behind: the directory already holds a run (or, to
                resume, none), cannot be written, or is not on a file system that all ranks share.
        """
        path, token, is_new = agree_with_root(communicator, lambda: _claim(settings))
        # By name, not by listing: a network file system may have cached the directory as it was.
        blind = [rank for rank, seen in enumerate(communicator.allgather(_reads(token))) if not seen]
        agree_with_root(communicator, lambda: _settle(cls(path), settings, token, is_new, blind))
        return cls(path)


def _claim(settings: Settings) -> tuple[Path, Path, bool]:
    """The directory, a token file in it, and whether the directory is new."""
    try:
        path, is_new = _place(settings)
    except OSError as error:
        raise _unwritable(Path(settings.run_dir or "runs").absolute(), error) from error
    # The name is the content, so that no other file can be mistaken for it.
    token = path / f".tmp-shared-{secrets.token_hex(8)}"
    try:
        write_atomically(token, token.name.encode())
    except OSError as error:
        _take_back(RunDirectory(path), settings, token, is_new)
        raise _unwritable(path, error) from error
    return path, token, is_new


def _place(settings: Settings) -> tuple[Path, bool]:
    """The directory, made if need be, and whether it was."""
    if settings.run_dir is None:
        return _make_unused(settings), True
    path = Path(settings.run_dir).absolute()
    holds_run = RunDirectory(path).settings_yaml.exists()
    if settings.resume and not holds_run:
        raise ValueError(f"{path} holds no run to go on with: correct --run-dir, or leave --resume out")
    if holds_run and not settings.resume:
        raise ValueError(f"{path} already holds a run: add --resume to go on, or change --run-dir")
    is_new = not path.is_dir()
    if is_new:
        path.mkdir(parents=True)
    return path, is_new


def _settle(
    run_directory: RunDirectory, settings: Settings, token: Path, is_new: bool, blind: list[int]
) -> None:
    """Takes the token away and saves the settings, or takes everything away and says what is wrong."""
    if blind:
        _take_back(run_directory, settings, token, is_new)
        raise ValueError(
            f"run directory {run_directory.path} is not seen by ranks {', '.join(map(str, blind))}: "
            f"choose a --run-dir on a file system that all hosts share"
        )
    try:
        token.unlink()
        if not _lock(run_directory.path):
            raise ValueError(f"{run_directory.path} is in use by another job: end that, or change --run-dir")
        if not settings.resume:
            run_directory.save_settings(settings)
    except OSError as error:
        _take_back(run_directory, settings, token, is_new)
        raise _unwritable(run_directory.path, error) from error


def _take_back(run_directory: RunDirectory, settings: Settings, token: Path, is_new: bool) -> None:
    token.unlink(missing_ok=True)
    if not settings.resume:
        run_directory.settings_yaml.unlink(missing_ok=True)
    if is_new:
        (run_directory.path / ".lock").unlink(missing_ok=True)
        with suppress(OSError):  # another job has meanwhile put something there: it stays
            run_directory.path.rmdir()


def _lock(path: Path) -> bool:
    """Takes the directory for this process until it ends, however it ends; False where another process has it."""
    file = (path / ".lock").open("w")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        return False
    _locks.append(file)
    return True


def _unwritable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"run directory {path} cannot be used ({error.strerror}): choose another --run-dir")


def _reads(token: Path) -> bool:
    try:
        return token.read_bytes() == token.name.encode()
    except OSError:
        return False


def _make_unused(settings: Settings) -> Path:
    """Makes runs/DATASET-ALGORITHM-TIME below the working directory, with -2, -3, ... where that exists."""
    stem = f"{settings.data.dataset}-{settings.algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        path = Path("runs").absolute() / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            # Another job's of the same second; where `runs` itself is a file, no number helps.
            if not path.exists():
                raise
    raise AssertionError
