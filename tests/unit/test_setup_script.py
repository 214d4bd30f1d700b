"""scripts/setup.sh on machines that lack something: one line with the remedy, nothing made."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Machine:
    """A checkout of its own and a PATH on which programs are missing or replaced."""

    def __init__(self, directory: Path) -> None:
        self.checkout, self.programs = directory / "checkout", directory / "programs"
        self.programs.mkdir()
        shutil.copytree(ROOT / "scripts", self.checkout / "scripts")
        for name in ("requirements.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.checkout)
        for folder in os.environ["PATH"].split(os.pathsep):
            for path in Path(folder).glob("*"):
                link = self.programs / path.name
                if path.name not in ("mpicxx", "mpirun", "nvidia-smi") and not link.is_symlink():
                    link.symlink_to(path)

    def without(self, *names: str) -> None:
        for name in names:
            (self.programs / name).unlink(missing_ok=True)

    def replace(self, name: str, script: str) -> None:
        self.without(name)
        (self.programs / name).write_text("#!/bin/sh\n" + script + "\n")
        (self.programs / name).chmod(0o755)

    def refusal(self, *options: str, code: int = 1, **environment: str) -> str:
        """What setup.sh says on stderr, having failed with one line and made nothing."""
        kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "VIRTUAL_ENV")}
        result = subprocess.run(
            [str(self.programs / "bash"), str(self.checkout / "scripts/setup.sh"), *options],
            capture_output=True,
            text=True,
            timeout=120,
            env={
                **kept,
                "XDG_CACHE_HOME": str(self.checkout.parent / "cache"),
                **environment,
                "PATH": str(self.programs),
            },
        )
        assert result.returncode == code, result.stdout
        assert result.stderr.startswith("error: "), result.stderr
        assert result.stderr.count("\n") == 1, result.stderr
        assert not list(self.checkout.glob(".venv*"))
        return result.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_no_compiler(machine: Machine) -> None:
    machine.without("c++")
    assert "no C++ compiler (c++) on PATH" in machine.refusal()
    assert "apt-get install g++" in machine.refusal()


def test_old_compiler(machine: Machine) -> None:
    machine.replace("c++", "echo unknown standard >&2; exit 1")
    assert "does not do C++20" in machine.refusal()


def test_no_make(machine: Machine) -> None:
    machine.without("make")
    assert "no make on PATH" in machine.refusal()


def test_old_python(machine: Machine) -> None:
    machine.without(*(f"python3.{minor}" for minor in range(10, 14)))
    machine.replace("python3", '[ "$1" = --version ] && exec echo Python 3.8.1; exit 1')
    assert "needs Python 3.10 or newer, found Python 3.8.1" in machine.refusal()


def test_full_disk(machine: Machine) -> None:
    machine.replace("df", "printf 'Filesystem blocks Used Available\\nx 9 9 7340032 9%% /\\n'")
    assert "only 7 GB free" in machine.refusal()


def test_unwritable_cache(machine: Machine) -> None:
    message = machine.refusal(XDG_CACHE_HOME="/dev/null/cache")
    assert "cannot write to the cache /dev/null/cache/pushreduce" in message
    assert "XDG_CACHE_HOME" in message


def test_unknown_options(machine: Machine) -> None:
    assert "unknown option --what" in machine.refusal("--what", code=2)
    assert "--mpi lam is not one of" in machine.refusal("--mpi", "lam", code=2)
    assert "--mpi without a value" in machine.refusal("--mpi", code=2)


def test_no_system_mpi(machine: Machine) -> None:
    assert "no mpicxx and mpirun" in machine.refusal("--mpi", "system")


def test_old_system_mpi(machine: Machine) -> None:
    machine.replace("mpicxx", "exit 0")
    machine.replace("mpirun", "echo 'mpirun (Open MPI) 3.1.6'")
    assert "(openmpi 3.1.6) is too old" in machine.refusal("--mpi", "system")


def test_gpu_without_gpu(machine: Machine) -> None:
    assert "nvidia-smi does not list a GPU" in machine.refusal("--gpu")
