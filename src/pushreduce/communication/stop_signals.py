"""A signal asks for a stop: a flag that the training loop reads, and what happens where nobody reads it in time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from pushreduce.communication import startup


def _abort_as_rank(message: str, exit_code: int) -> NoReturn:
    startup.abort(f"rank {startup.rank_without_horovod()}: {message}", exit_code)


def install_signal_flag(
    grace_seconds: float, abort_job: Callable[[str, int], object] = _abort_as_rank
) -> Callable[[], int | None]:
    """SIGTERM, SIGUSR1 and SIGINT set a flag from now on; returns its reader: the first's number, or None.

    SIGUSR1, because Open MPI's mpirun passes it on without killing (`scripts/launch` makes use of that), and
    Slurm is often told to send it. Where the process has not ended `grace_seconds` after the first signal, or on a
    second SIGINT, the job is aborted with exit code 128 + the signal's number, by `abort_job(message, exit code)`.
    """
    received: list[int] = []

    def give_up(number: int, why: str) -> None:
        abort_job(f"{why}; the newest complete checkpoint is intact", 128 + number)

    def note(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and signal.SIGINT in received:
            give_up(number, "interrupted twice, aborting")
        if not received:
            why = f"not ended {grace_seconds:g} s after signal {number} (--grace-seconds), aborting"
            timer = threading.Timer(grace_seconds, give_up, (number, why))
            timer.daemon = True
            timer.start()
        received.append(number)

    for signal_number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(signal_number, note)
    return lambda: received[0] if received else None
