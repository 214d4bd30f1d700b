"""The view of a run in TensorBoard, written on rank 0: `tensorboard --logdir <runs>`.

Owns tags, charts and how often a point is written. Owns no number: all of them come from the records of
`metrics.py`, which stay the record of the run.

Horizontal axes: global samples ("images"), except for tags that end in "by wall-clock ms".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pushreduce.training.atomic_file import atomic_file
from pushreduce.training.metrics import Record
from pushreduce.training.summary import PHASES

# TensorBoard orders groups (before the slash) by name and opens the first two: accuracy and loss. It cuts
# titles after some thirty characters, and its custom-scalars page draws nothing for a tag with parentheses.
_TRAINING_LOSS = "loss/training, by images"
_TRAINING_LOSS_BY_TIME = "loss/training, by wall-clock ms"
_VALIDATION_LOSS = "loss/validation, by images"
_TOP1 = "accuracy/top-1 %, by images"
_TOP1_BY_TIME = "accuracy/top-1 %, by wall-clock ms"
_TOP1_OF_RANK = "workers/top-1 % of rank {:03d}"
_DISTANCE = "workers/L2 distance to consensus"
_STEPS_PER_ALLREDUCE = "workers/local steps per all-reduce"
_KEPT_BACK = "workers/messages kept back"
_STALENESS = "workers/rounds that a message was late"
_LEARNING_RATE = "optimizer/learning rate"
_THROUGHPUT = "speed/images per second, all ranks"
_PREDICTIONS = "predictions/true class and prediction"
_ITERATION = "speed/iteration, ms"
_PHASE = "speed/iteration: {}, ms"

# TensorBoard takes the tags for regular expressions that match at the beginning.
_LAYOUT = {
    "Overview": {
        "Top-1 of the consensus model in %, by images": ["Multiline", [_TOP1]],
        "Top-1 of the consensus model in %, by wall-clock ms": ["Multiline", [_TOP1_BY_TIME]],
        "Loss, training and validation, by images": ["Multiline", ["loss/.*, by images"]],
        "Loss, training, by wall-clock ms": ["Multiline", [_TRAINING_LOSS_BY_TIME]],
    },
    "Where the time goes": {
        "One iteration and its parts, ms": ["Multiline", ["speed/iteration.*"]],
        "Images per second, all ranks": ["Multiline", [_THROUGHPUT]],
    },
    "Do the workers agree": {
        "Top-1 of each rank's own model in %": ["Multiline", ["workers/top-1.*"]],
        "Distance of the workers to the consensus model": ["Multiline", [_DISTANCE]],
    },
    "Optimizer": {"Learning rate": ["Multiline", [_LEARNING_RATE]]},
}

# TensorBoard shows a thousand points of a curve. Five points a second at first, then one each 1/2000 of the
# time so far: about ten thousand in a day.
_MIN_INTERVAL_SECONDS = 0.2
_INTERVAL_SHARE = 1 / 2000


class TensorBoardView:
    """Writes the event file of a run.

    Args:
        directory: of the event files, `<run>/tensorboard`.
        purge_step: None: a new run. Otherwise the global samples from which the run goes on: what was shown
            beyond them is removed.
    """

    def __init__(self, directory: Path, *, purge_step: int | None) -> None:
        # Imported here as it costs a second, and only one rank of many needs it.
        from torch.utils.tensorboard import SummaryWriter

        if purge_step is not None:
            for path in sorted(directory.glob("events.out.tfevents.*")):
                _cut_events(path, purge_step)
        # SummaryWriter's own purge_step knows one axis and would cut the tags by time at a number of samples.
        self._writer = SummaryWriter(str(directory), max_queue=1000, flush_secs=5)
        self._writer.add_custom_scalars(_LAYOUT)
        self._shown: Record | None = None
        self._pending: list[Record] = []
        self._last_counts: dict[str, Counter[int]] = {}

    def step(self, record: Record) -> None:
        """Takes note of a step; its mean with those since the last point becomes the next one."""
        if self._shown is None:  # the first step's own length is unknown
            self._shown = record
            self._add(
                {_TRAINING_LOSS: record["loss"], _LEARNING_RATE: record["learning_rate"]}, record["samples"]
            )
            return
        self._pending.append(record)
        waited = record["wall_seconds"] - self._shown["wall_seconds"]
        if waited >= max(_MIN_INTERVAL_SECONDS, _INTERVAL_SHARE * record["wall_seconds"]):
            self._show_steps()

    def evaluation(self, record: Record) -> None:
        """Shows an evaluation."""
        self._show_steps()
        self._shown = record  # so that no iteration contains the evaluation
        samples = record["samples"]
        by_rank = {_TOP1_OF_RANK.format(r): top1 for r, top1 in enumerate(record["top1_percent_by_rank"])}
        self._add(
            {
                _VALIDATION_LOSS: record["validation_loss"],
                _TOP1: record["top1_percent"],
                _DISTANCE: record["consensus_distance"],
                _KEPT_BACK: record["messages_kept_back"] or None,  # no chart where nothing ever is
                **by_rank,
            },
            samples,
        )
        self._add({_TOP1_BY_TIME: record["top1_percent"]}, _milliseconds(record))
        for tag, name in ((_STEPS_PER_ALLREDUCE, "steps_per_allreduce"), (_STALENESS, "staleness")):
            counts: Counter[int] = Counter(record[name])
            self._add_histogram(tag, counts - self._last_counts.get(tag, Counter()), samples)
            self._last_counts[tag] = counts

    def predictions(self, images: torch.Tensor, captions: Sequence[str], step: int) -> None:
        """Shows sample predictions as a grid of images with captions.

        Args:
            images: [num_images, 1 or 3, height, width], any range; each is stretched to the full range of
                grey.
            captions: one an image, such as "3/5": true class and prediction.
            step: global samples so far.
        """
        grid = _draw_grid(images.detach().float().cpu().numpy(), captions)
        self._writer.add_image(_PREDICTIONS, grid, step, dataformats="HWC")

    def close(self, hparams: Mapping[str, Any], final_metrics: Mapping[str, float | None]) -> None:
        """Adds the hyper-parameters with the final metrics to this same run, and closes the file.

        Args:
            hparams: nested settings; shown flat, with dots.
            final_metrics: name with unit -> number; None is left out.
        """
        from torch.utils.tensorboard.summary import hparams as hparam_summaries

        self._show_steps()
        metrics = {f"summary/{name}": value for name, value in final_metrics.items() if value is not None}
        # SummaryWriter.add_hparams would open a run of its own in a subfolder.
        assert self._writer.file_writer is not None
        for summary in hparam_summaries(_flat(hparams), metrics):
            self._writer.file_writer.add_summary(summary)
        self._add(metrics, self._shown["samples"] if self._shown else 0)
        self._writer.close()

    def _show_steps(self) -> None:
        if not self._pending or self._shown is None:
            return
        last, number = self._pending[-1], len(self._pending)
        losses = [record["loss"] for record in self._pending if record["loss"] is not None]
        loss = sum(losses) / len(losses) if losses else None
        seconds = last["wall_seconds"] - self._shown["wall_seconds"]
        values = {
            _TRAINING_LOSS: loss,
            _LEARNING_RATE: last["learning_rate"],
            _ITERATION: 1000 * seconds / number,
        }
        if seconds > 0:
            # Never below 0: the count of an asynchronous run is an estimate between agreements.
            values[_THROUGHPUT] = max(0.0, (last["samples"] - self._shown["samples"]) / seconds)
        for phase in PHASES:
            total = sum(record[f"{phase}_seconds"] for record in self._pending)
            values[_PHASE.format(phase.replace("_", " "))] = 1000 * total / number
        self._add(values, last["samples"])
        self._add({_TRAINING_LOSS_BY_TIME: loss}, _milliseconds(last))
        self._shown = last
        self._pending.clear()

    def _add(self, values: Mapping[str, float | None], step: int) -> None:
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, step)

    def _add_histogram(self, tag: str, counts: Counter[int], step: int) -> None:
        if not counts:
            return
        steps = range(min(counts), max(counts) + 1)
        self._writer.add_histogram_raw(
            tag,
            min=min(counts),
            max=max(counts),
            num=counts.total(),
            sum=sum(k * n for k, n in counts.items()),
            sum_squares=sum(k * k * n for k, n in counts.items()),
            bucket_limits=[k + 0.5 for k in steps],
            bucket_counts=[counts[k] for k in steps],
            global_step=step,
        )


def _milliseconds(record: Record) -> int:
    return round(1000 * record["wall_seconds"])


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    flat: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat


def _cut_events(path: Path, samples: int) -> None:
    """Shortens an event file, whose events are in order of time, to those up to `samples`."""
    from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
        RawEventFileLoader,
    )
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
    from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

    with atomic_file(path) as file:
        writer = RecordWriter(file)
        for raw in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(raw)
            tags = [value.tag for value in event.summary.value]
            if event.step > samples and not all(tag.endswith("ms") for tag in tags):
                break
            # The earlier end of the run is none any more.
            if not any(tag.startswith(("_hparams_/", "summary/")) for tag in tags):
                writer.write(raw)


def _draw_grid(images: np.ndarray, captions: Sequence[str]) -> np.ndarray:
    """Returns uint8 [height, width, 3]. PIL takes milliseconds, matplotlib a second."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    assert len(images) == len(captions), "one caption an image"
    side, text_height, gap = 144, 32, 14
    font = ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), size=28)
    # TensorBoard shows the grid at less than half its size: as large as the longest caption allows.
    longest = max(map(font.getlength, captions), default=0.0)
    font = font.font_variant(size=28 * min(1.0, side / max(longest, 1.0)))
    num_columns = min(4, max(1, len(images)))
    num_rows = -(-len(images) // num_columns)
    size = (num_columns * (side + gap) + gap, num_rows * (side + text_height + gap) + gap)
    grid = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(grid)
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(index, num_columns)
        left, top = gap + column * (side + gap), gap + row * (side + text_height + gap)
        darkest, lightest = image.min(), image.max()
        grey = (image - darkest) / max(lightest - darkest, 1e-12)
        pixels = np.broadcast_to((255 * grey).astype(np.uint8).transpose(1, 2, 0), (*image.shape[1:], 3))
        scaled = Image.fromarray(np.ascontiguousarray(pixels)).resize((side, side), Image.Resampling.NEAREST)
        grid.paste(scaled, (left, top + text_height))
        draw.text((left + side / 2, top + text_height / 2), caption, fill="black", font=font, anchor="mm")
    return np.asarray(grid)
