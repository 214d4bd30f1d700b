"""What rank 0 shows while a run goes on: a progress bar and TensorBoard. The record proper is `metrics.py`."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict
from typing import Any

from torch import Tensor

from pushreduce.settings import Settings
from pushreduce.training.progress_bar import ProgressBar
from pushreduce.training.run_directory import RunDirectory
from pushreduce.training.tensorboard_view import TensorBoardView

logger = logging.getLogger(__name__)

_INTERVAL_SECONDS = 0.1  # between looks at the steps: code that runs once a step finds the caches cold


class RunView:
    """Progress bar and TensorBoard of a run, fed with the records of rank 0."""

    def __init__(
        self, settings: Settings, run_directory: RunDirectory, *, num_samples: int, resumed_from_samples: int
    ) -> None:
        self._settings = settings
        self._unseen: list[dict[str, Any]] = []
        self._bar = ProgressBar(num_samples, initial_samples=resumed_from_samples)
        self._tensorboard = TensorBoardView(
            run_directory.tensorboard, purge_step=resumed_from_samples if settings.resume else None
        )

    def step(self, record: dict[str, Any]) -> None:
        """Takes note of a step; shows it if it is time to."""
        self._unseen.append(record)
        if record["wall_seconds"] - self._unseen[0]["wall_seconds"] >= _INTERVAL_SECONDS:
            self._show_steps()

    def evaluation(self, record: dict[str, Any], predictions: tuple[Tensor, list[str]] | None) -> None:
        """Shows an evaluation; `predictions` are images and captions, as from `Workload.describe_predictions`."""
        self._show_steps()
        self._bar.evaluation(record)
        names = ("epoch", "top1_percent", "validation_loss", "consensus_distance")
        logger.info(
            "epoch %.2f: top-1 %.2f %%, validation loss %.4f, consensus distance %.3g",
            *(math.nan if record[name] is None else record[name] for name in names),
        )
        self._tensorboard.evaluation(record)
        if predictions is not None:
            images, captions = predictions
            self._tensorboard.predictions(images, captions, record["samples"])

    def close(self, final_metrics: dict[str, Any]) -> None:
        self._show_steps()
        self._bar.close()
        # TensorBoard's table begins with the first of them.
        names = sorted(
            final_metrics, key=lambda name: name not in ("top1_percent", "validation_loss", "wall_seconds")
        )
        numbers = {
            name: final_metrics[name] for name in names if isinstance(final_metrics[name], (int, float))
        }
        self._tensorboard.close(asdict(self._settings), numbers)

    def _show_steps(self) -> None:
        for record in self._unseen:
            self._bar.step(record)
            self._tensorboard.step(record)
        self._unseen.clear()
