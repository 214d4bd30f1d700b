"""The run directory: one outcome on all ranks, nothing overwritten, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from threaded_ranks import error_of, results_of

from pushreduce.communication.base import Communicator
from pushreduce.settings import Settings
from pushreduce.settings_file import load
from pushreduce.training import run_directory
from pushreduce.training.run_directory import RunDirectory

SIZES = pytest.mark.parametrize("size", [1, 2, 5])


def create(size: int, settings: Settings) -> RunDirectory:
    created = results_of(size, lambda communicator: RunDirectory.create(settings, communicator))
    assert len({each.path for each in created}) == 1
    return created[0]


def refusal(size: int, settings: Settings) -> str:
    return str(error_of(size, lambda communicator: RunDirectory.create(settings, communicator)))


def tree(path: Path) -> dict[str, bytes]:
    """Every file but the lock, by its name."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@SIZES
def test_a_new_run_saves_its_settings_and_nothing_else(size: int, tmp_path: Path) -> None:
    settings = replace(Settings(), seed=7, run_dir=str(tmp_path / "a" / "b"))
    created = create(size, settings)
    assert created.path == tmp_path / "a" / "b"
    assert list(tree(tmp_path)) == ["a/b/settings.yaml"]
    # Without the place, so that the file can start another run.
    assert load(created.settings_yaml) == replace(settings, run_dir=None)


def test_default_names_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_directory.time, "strftime", lambda pattern: "TIME")
    names = [create(2, Settings()).path.relative_to(tmp_path).as_posix() for _ in range(3)]
    assert names == [f"runs/digits-lasgd-TIME{end}" for end in ("", "-2", "-3")]


@SIZES
def test_a_directory_that_holds_a_run_is_refused_and_untouched(size: int, tmp_path: Path) -> None:
    settings = replace(Settings(), run_dir=str(tmp_path))
    create(size, settings)
    before = tree(tmp_path)
    assert "already holds a run: add --resume" in refusal(size, replace(settings, seed=1))
    assert tree(tmp_path) == before


@SIZES
def test_resume_needs_a_run_and_changes_nothing(size: int, tmp_path: Path) -> None:
    settings = replace(Settings(), run_dir=str(tmp_path / "run"), resume=True)
    assert "holds no run to go on with" in refusal(size, settings)
    assert not (tmp_path / "run").exists()
    create(size, replace(settings, resume=False))
    before = tree(tmp_path)
    assert create(size, replace(settings, seed=1)).path == tmp_path / "run"
    assert tree(tmp_path) == before


def test_other_files_in_the_directory_do_not_make_it_a_run(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text("x")
    create(1, replace(Settings(), run_dir=str(tmp_path)))
    assert sorted(tree(tmp_path)) == ["job.out", "settings.yaml"]


@pytest.mark.parametrize("existing", [True, False])
def test_a_directory_that_some_ranks_do_not_see_is_refused(
    existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    if existing:
        path.mkdir()
    reads = run_directory._reads
    monkeypatch.setattr(
        run_directory,
        "_reads",
        lambda token: threading.current_thread().name not in ("rank1", "rank3") and reads(token),
    )
    message = refusal(4, replace(Settings(), run_dir=str(path)))
    assert "is not seen by ranks 1, 3: choose a --run-dir on a file system that all hosts share" in message
    assert tree(tmp_path) == {}
    assert path.exists() == existing


@SIZES
def test_a_place_that_cannot_be_written_is_refused(size: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "choose another --run-dir" in refusal(size, replace(Settings(), run_dir=str(tmp_path / "file")))
    assert "choose another --run-dir" in refusal(
        size, replace(Settings(), run_dir=str(tmp_path / "file" / "run"))
    )
    assert tree(tmp_path) == {"file": b"x"}


def test_a_place_below_a_file_named_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("x")
    assert "cannot be used" in refusal(2, Settings())


@pytest.mark.parametrize("num_calls", range(6))
def test_a_full_disk_leaves_nothing_behind(
    num_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(100))
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if next(calls) == num_calls:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    settings = replace(Settings(), run_dir=str(tmp_path / "run"))

    def attempt(communicator: Communicator) -> str:
        try:
            RunDirectory.create(settings, communicator)
        except ValueError as error:
            return str(error)
        return ""

    message = results_of(1, attempt)[0]
    assert list(tree(tmp_path)) == (["run/settings.yaml"] if not message else [])
    assert not message or ("No space left" in message and not (tmp_path / "run").exists())


def test_a_directory_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    hold = f"""
import fcntl, sys
file = open({str(path / ".lock")!r}, "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
    settings = replace(Settings(), run_dir=str(path))
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="in use by another job"):
            create(1, settings)
        assert not (path / "settings.yaml").exists()
        other.communicate(timeout=30)
    create(1, settings)
    assert (path / "settings.yaml").exists()
