"""Calls scripts/emulated_cluster as a user does, and looks at the system from outside it.

Owns names that no other run of the tests has, time limits, and the end of every process started here. Judges nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "emulated_cluster"
TRAIN = ROOT / "src" / "train.py"
TIMEOUT_SECONDS = 120.0
STATE = Path("/run/pushreduce-cluster")
NETWORK_NAMESPACES = Path("/run/netns")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """That of an activated environment, with one thread a rank."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **(extra or {})}


def wait_until(condition: Callable[[], bool], timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Returns when `condition()` holds."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class Emulated:
    """A cluster by its name, whether it is up or not."""

    def __init__(self, kind: str) -> None:
        self.name = f"test_{kind}_{os.getpid()}"
        self.directory = STATE / self.name

    def call(self, action: str, *words: str) -> subprocess.CompletedProcess[str]:
        """The script's `action` on this cluster, to its end."""
        return self.finish(self.start(action, *words))

    def finish(
        self, process: subprocess.Popen[str], timeout_seconds: float = TIMEOUT_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """What `start` has started, to its end; after the time, the cluster goes with it."""
        try:
            out, err = process.communicate(timeout=timeout_seconds)
        except BaseException:
            process.kill()
            self.remove()  # or what the command left behind holds the pipes
            process.communicate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, action: str, *words: str, cwd: Path | None = None, **extra: str) -> subprocess.Popen[str]:
        """The same, running."""
        return subprocess.Popen(
            [str(SCRIPT), action, "--name", self.name, *words],
            cwd=cwd,
            env=environment(extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def up(self, *words: str) -> None:
        done = self.call("up", *words)
        assert done.returncode == 0, done.stderr

    def run(self, *command: str, host: int = 0) -> subprocess.CompletedProcess[str]:
        """A command in a host."""
        return self.call("run", "--host", str(host), "--", *command)

    def output(self, *command: str, host: int = 0) -> str:
        """What a command that succeeds says."""
        done = self.run(*command, host=host)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def remove(self) -> None:
        """Takes it down, or what is left of it."""
        subprocess.run(
            [str(SCRIPT), "down", "--name", self.name], capture_output=True, timeout=TIMEOUT_SECONDS
        )

    def namespaces(self) -> list[Path]:
        """Of the network, by their files."""
        if not NETWORK_NAMESPACES.is_dir():
            return []
        return sorted(path for path in NETWORK_NAMESPACES.iterdir() if f"-{self.name}-" in path.name)

    def pids(self) -> set[int]:
        """Processes in the hosts."""
        return processes_in({path.stat().st_ino for path in self.namespaces()})

    def holder(self, host: str) -> int:
        return int((self.directory / "holders" / host).read_text())


def processes_in(inodes: set[int]) -> set[int]:
    """Processes in any of these network namespaces, also in such as have no name any more."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended
                if (entry / "ns" / "net").stat().st_ino in inodes:
                    found.add(int(entry.name))
    return found
