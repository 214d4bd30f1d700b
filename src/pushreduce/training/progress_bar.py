"""The progress of a run for the person who watches it: a bar on a terminal, sparse lines in a log file.

Owns what is printed while training, on rank 0. Does not measure: it is given the records of `metrics.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

from pushreduce.training.metrics import Record

_PARTS = ("compute_seconds", "local_update_seconds", "communication_seconds", "blocked_seconds")
_LINE_FORMAT = "{percentage:3.0f}% {n_fmt}/{total_fmt} images [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
# Smoothed over about this many steps, so that neither a single batch nor a single wait makes the display
# jump.
_SMOOTHING_STEPS = 50


class ProgressBar:
    """Global samples done of all, with the time left, the loss, top-1 and the share of time spent blocked.

    Args:
        total_samples: global samples at which the run ends.
        initial_samples: global samples at which this process began (a resumed run).
        stream: default: standard error.
        now: seconds from an arbitrary start, for the spacing of lines and the time left.
    """

    def __init__(
        self,
        total_samples: int,
        *,
        initial_samples: int = 0,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._initial, self._samples = total_samples, initial_samples, initial_samples
        self._stream = stream or sys.stderr
        self._now = now
        self._begun = self._shown = now()
        self._shown_samples = initial_samples
        self._loss: float | None = None
        self._blocked_share = 0.0
        self._top1_percent: float | None = None
        self._bar: tqdm | None = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total_samples,
                initial=initial_samples,
                unit=" images",
                unit_scale=True,
                dynamic_ncols=True,
                file=self._stream,
            )

    def step(self, record: Record) -> None:
        """Takes note of a step; shows it if it is time to."""
        self._samples = min(record["samples"], self._total)
        seconds = sum(record[part] for part in _PARTS)
        blocked_share = record["blocked_seconds"] / seconds if seconds else 0.0
        self._blocked_share += (blocked_share - self._blocked_share) / _SMOOTHING_STEPS
        if record["loss"] is not None:
            loss = record["loss"]
            self._loss = loss if self._loss is None else self._loss + (loss - self._loss) / _SMOOTHING_STEPS
        if self._due():
            self._show()

    def evaluation(self, record: Record) -> None:
        """Takes note of an evaluation; the next display has its top-1."""
        self._top1_percent = record["top1_percent"]

    def close(self) -> None:
        """Shows the final state and leaves the cursor on a new line."""
        self._show()
        if self._bar is not None:
            self._bar.close()

    def _due(self) -> bool:
        waited = self._now() - self._shown
        if self._bar is not None:
            return waited >= 0.2
        # A short run is worth a line every 5 %, a long one every 10 s but not more than a hundred; a line
        # every ten minutes shows that even a very long one is alive.
        share = (self._samples - self._shown_samples) / max(1, self._total)
        return (waited >= 2 and share >= 0.05) or (waited >= 10 and share >= 0.01) or waited >= 600

    def _show(self) -> None:
        self._shown, self._shown_samples = self._now(), self._samples
        if self._bar is not None:
            self._bar.set_postfix_str(self._postfix(), refresh=False)
            # The agreed count of an asynchronous run may fall back a little; a bar that moves back is no
            # harm.
            self._bar.n = self._samples
            self._bar.refresh()
            return
        line = tqdm.format_meter(
            self._samples,
            self._total,
            self._shown - self._begun,
            initial=self._initial,
            unit=" images",
            unit_scale=True,
            postfix=self._postfix(),
            bar_format=_LINE_FORMAT,
        )
        self._stream.write(line + "\n")  # at once: launchers label every piece that they get
        self._stream.flush()

    def _postfix(self) -> str:
        parts = []
        if self._loss is not None:
            parts.append(f"loss {self._loss:.3g}")
        if self._top1_percent is not None:
            parts.append(f"top-1 {self._top1_percent:.1f} %")
        parts.append(f"blocked {100 * self._blocked_share:.0f} %")
        return ", ".join(parts)
