"""Runs a command in a host of an emulated cluster, and ends with it all that it started in any of the hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from clusters import namespaces, plan, secure_shell
from clusters.plan import Cluster

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run(cluster: Cluster, host: str, command: list[str]) -> int:
    """The command's exit code, 128 + number for one that a signal ended.

    Signals are passed on to the command. However it ends, no process that carries this run's mark is left.
    """
    mark = f"{os.getpid()}.{time.time_ns()}"
    environment = {**secure_shell.environment(cluster), plan.MARK: mark}
    # Only root comes here, whom Open MPI refuses to serve unless told so.
    for family in ("OMPI", "PRTE"):
        for name in (f"{family}_ALLOW_RUN_AS_ROOT", f"{family}_ALLOW_RUN_AS_ROOT_CONFIRM"):
            environment.setdefault(name, "1")
    inside = plan.enter_command(namespaces.holder_pid(cluster, host), command, os.getcwd())
    # On a terminal the command stays in its foreground group, so that it can read, and Ctrl-C reaches it from there.
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    namespaces_of_cluster = [cluster.namespace(each) for each in cluster.hosts]
    children: list[subprocess.Popen[bytes]] = []
    try:
        _pass_on_signals(children, has_terminal)
        child = subprocess.Popen(
            # Where this process is killed, the command is asked to end.
            ["setpriv", "--pdeathsig", "TERM", *inside],
            env=environment,
            start_new_session=not has_terminal,
        )
        children.append(child)
        code = child.wait()
    finally:
        namespaces.kill(lambda: _marked(namespaces.pids_in(namespaces_of_cluster), mark))
    return code if code >= 0 else 128 - code


def _pass_on_signals(children: list[subprocess.Popen[bytes]], has_terminal: bool) -> None:
    """From now on signals go to the children; where there is none yet, this process ends."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if not children:
            sys.exit(128 + number)
        if number != signal.SIGINT:
            children[0].send_signal(number)
        elif not has_terminal and children[0].poll() is None:
            os.killpg(
                children[0].pid, number
            )  # to all in its group, as a terminal does: shells count on that

    for number in _FORWARDED:
        signal.signal(number, pass_on)


def _marked(pids: set[int], mark: str) -> set[int]:
    """Those of the processes that have the mark in their environment."""
    entry = f"{plan.MARK}={mark}".encode()
    found = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            if entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found
