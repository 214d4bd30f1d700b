"""The record of one rank, `metrics.rankN.jsonl`: one JSON object a line, one line a step or evaluation.

Owns the file's format, its repair when a run is resumed, and reading it back. Does not interpret the numbers
(`summary.py`), show them (`tensorboard_view.py`, `progress_bar.py`) or draw them (`curves.py`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from pushreduce.training.atomic_file import atomic_file

Record = dict[str, Any]

FLUSH_INTERVAL_SECONDS = 2.0

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class MetricsRecord:
    """Appends the steps and evaluations of one rank to its record.

    Lines are buffered; they reach the operating system at least every `FLUSH_INTERVAL_SECONDS` as long as
    steps are recorded, and at every evaluation, `flush()` and `close()`.

    Args:
        path: the file, normally `<run>/metrics.rank<N>.jsonl`; None: nothing is kept.
        keep_until_step: None: a new file. Otherwise the run goes on from a checkpoint of that step: what an
            earlier process recorded beyond it, and a line torn by its death, is dropped first (in one
            rename); a file that is missing (more ranks than before) begins empty.

    Raises:
        FileExistsError: a new file was asked for and there is one.
        ValueError: the file to go on with is damaged elsewhere than in its last line.
    """

    def __init__(self, path: Path | None, *, keep_until_step: int | None = None) -> None:
        self._file: TextIO | None = None
        if path is None:
            pass
        elif keep_until_step is None:
            self._file = path.open("x", encoding="ascii")
        else:
            _keep_until(path, keep_until_step)
            self._file = path.open("a", encoding="ascii")
        self._pending: list[Record] = []  # encoded many at a time: once a step it would find the caches cold
        self._last_flush = time.monotonic()

    def step(
        self,
        *,
        step: int,
        samples: int,
        epoch: float,
        wall_seconds: float,
        loss: float,
        learning_rate: float,
        num_samples: int,
        compute_seconds: float,
        local_update_seconds: float,
        communication_seconds: float,
        blocked_seconds: float,
        bytes_sent: int,
    ) -> Record:
        """Records one local step.

        Args:
            step: local steps of this rank so far, this one included; continues over resumed runs.
            samples: global samples so far, as this rank knows them.
            epoch: `samples` in passes over the training set.
            wall_seconds: since the run began, earlier processes of a resumed run included.
            loss: mean training loss of this step's samples.
            num_samples: this rank's samples of this step.
            compute_seconds, local_update_seconds, communication_seconds, blocked_seconds: this step's parts.
            bytes_sent: payload bytes of this step.

        Returns:
            The record as it reads back; NaN and infinity have become None.
        """
        record = {
            "kind": "step",
            "step": step,
            "samples": samples,
            "epoch": epoch,
            "wall_seconds": wall_seconds,
            "loss": loss,
            "learning_rate": learning_rate,
            "num_samples": num_samples,
            "compute_seconds": compute_seconds,
            "local_update_seconds": local_update_seconds,
            "communication_seconds": communication_seconds,
            "blocked_seconds": blocked_seconds,
            "bytes_sent": bytes_sent,
        }
        record = self._append(record)
        if time.monotonic() - self._last_flush >= FLUSH_INTERVAL_SECONDS:
            self.flush()
        return record

    def evaluation(
        self,
        *,
        step: int,
        samples: int,
        epoch: float,
        wall_seconds: float,
        validation_loss: float,
        top1_percent: float,
        top1_percent_by_rank: Sequence[float],
        consensus_distance: float,
        steps_per_allreduce: Mapping[int, int],
        staleness: Mapping[int, int],
        messages_kept_back: int,
    ) -> Record:
        """Records one evaluation, and flushes.

        Args:
            step, samples, epoch, wall_seconds: when, as in `step()`; `wall_seconds` after the evaluation.
            validation_loss, top1_percent: of the consensus model, on the whole validation set.
            top1_percent_by_rank: of each worker's own model, in rank order.
            consensus_distance: root mean square over workers of the distance to the consensus model.
            steps_per_allreduce: local steps that an all-reduce took -> how often, since this process started.
            staleness: rounds that a message to this rank was late -> how often, likewise.
            messages_kept_back: messages of this rank whose receiver had no free slot in time, likewise.

        Returns:
            The record as it reads back; NaN and infinity have become None.
        """
        record = self._append(
            {
                "kind": "evaluation",
                "step": step,
                "samples": samples,
                "epoch": epoch,
                "wall_seconds": wall_seconds,
                "validation_loss": validation_loss,
                "top1_percent": top1_percent,
                "top1_percent_by_rank": list(top1_percent_by_rank),
                "consensus_distance": consensus_distance,
                "steps_per_allreduce": dict(steps_per_allreduce),
                "staleness": dict(staleness),
                "messages_kept_back": messages_kept_back,
            }
        )
        self.flush()
        return record

    def flush(self) -> None:
        """Hands all lines to the operating system; call it before a checkpoint that a run may go on from."""
        if self._file is not None and self._pending:
            self._file.write("".join(f"{_encode(record)}\n" for record in self._pending))
            self._file.flush()
            self._pending.clear()
        self._last_flush = time.monotonic()

    def close(self) -> None:
        """Flushes and closes; may be called again."""
        if self._file is not None and not self._file.closed:
            self.flush()
            self._file.close()

    def _append(self, record: Record) -> Record:
        # JSON has no NaN and no infinity.
        record = {key: _finite(value) for key, value in record.items()}
        if self._file is not None:
            self._pending.append(record)
        return record


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file in the order of writing, as `MetricsRecord` returned them.

    A last line torn by the death of the run is left out.

    Raises:
        ValueError: a line other than the last is damaged.
    """
    with path.open("rb") as file:
        for _, record in _whole_lines(file, path):
            yield record


def _whole_lines(file: BinaryIO, path: Path) -> Iterator[tuple[bytes, Record]]:
    unreadable: int | None = None
    for number, line in enumerate(file, start=1):
        if unreadable is not None:
            raise ValueError(
                f"{path}, line {unreadable}: not a JSON record; remove the line or restore the file"
            )
        try:
            record = _decode(line)
        except ValueError:
            unreadable = number
        else:
            yield line, record


def _decode(line: bytes) -> Record:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    for name in ("steps_per_allreduce", "staleness"):
        if name in record:  # JSON makes strings of the keys
            record[name] = {int(k): n for k, n in record[name].items()}
    return record


def _keep_until(path: Path, step: int) -> None:
    if not path.exists():
        return
    with path.open("rb") as old, atomic_file(path) as new:
        for line, record in _whole_lines(old, path):
            if record["step"] <= step:
                new.write(line.rstrip(b"\n") + b"\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
