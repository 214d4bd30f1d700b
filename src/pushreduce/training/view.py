"""What rank 0 shows while a run goes on: a progress bar and TensorBoard. The record proper is `metrics.py`."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from torch import nn

from pushreduce.settings import Settings
from pushreduce.training.progress_bar import ProgressBar
from pushreduce.training.run_directory import RunDirectory
from pushreduce.training.tensorboard_view import TensorBoardView
from pushreduce.workloads.base import Workload

logger = logging.getLogger(__name__)
_NUM_SAMPLE_IMAGES = 16


class RunView:
    """Progress bar and TensorBoard of a run, fed with the records of rank 0."""

    def __init__(
        self, settings: Settings, run_directory: RunDirectory, *, num_samples: int, resumed_from_samples: int
    ) -> None:
        self._settings = settings
        self._bar = ProgressBar(num_samples, initial_samples=resumed_from_samples)
        self._tensorboard = TensorBoardView(
            run_directory.tensorboard, purge_step=resumed_from_samples if settings.resume else None
        )

    def step(self, record: dict[str, Any]) -> None:
        self._bar.step(record)
        self._tensorboard.step(record)

    def evaluation(self, record: dict[str, Any], model: nn.Module, workload: Workload) -> None:
        self._bar.evaluation(record)
        logger.info(
            "epoch %.2f: top-1 %.2f %%, validation loss %.4f, consensus distance %.3g",
            *(record[name] for name in ("epoch", "top1_percent", "validation_loss", "consensus_distance")),
        )
        self._tensorboard.evaluation(record)
        batch = next(workload.validation_batches(), None)
        if batch is None:  # all of this rank's validation images are corrupt, and skipped
            return
        like = next(model.parameters())
        model.eval()
        described = workload.describe_predictions(
            model, batch.to(like.device, like.dtype), _NUM_SAMPLE_IMAGES
        )
        if described is not None:
            images, captions = described
            self._tensorboard.predictions(images, captions, record["samples"])

    def close(self, final_metrics: dict[str, Any]) -> None:
        self._bar.close()
        numbers = {name: value for name, value in final_metrics.items() if isinstance(value, (int, float))}
        self._tensorboard.close(_flat(asdict(self._settings)), numbers)


def _flat(nested: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat
