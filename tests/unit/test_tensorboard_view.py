"""The TensorBoard view, read back with TensorBoard's own reader."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from pushreduce.training.metrics import Record
from pushreduce.training.tensorboard_view import TensorBoardView

LOSS = "loss/training, by images"
LOSS_BY_TIME = "loss/training, by wall-clock ms"
STEP_SECONDS = 0.03


def step_record(step: int) -> Record:
    return {
        "kind": "step",
        "step": step,
        "samples": 128 * step,
        "epoch": step / 100,
        "wall_seconds": STEP_SECONDS * step,
        "loss": 1 / step,
        "learning_rate": 0.1,
        "num_samples": 32,
        "compute_seconds": 0.02,
        "local_update_seconds": 0.002,
        "communication_seconds": 0.001,
        "blocked_seconds": 0.005,
        "bytes_sent": 1000,
    }


def evaluation_record(step: int) -> Record:
    return {
        "kind": "evaluation",
        "step": step,
        "samples": 128 * step,
        "epoch": step / 100,
        "wall_seconds": STEP_SECONDS * step,
        "validation_loss": 2 / step,
        "top1_percent": 90.0,
        "top1_percent_by_rank": [89.0, 88.0],
        "consensus_distance": 0.2,
        "steps_per_allreduce": {1: step, 3: step // 2},
        "staleness": {0: step, 1: step // 3},
        "messages_kept_back": step,
    }


def show(view: TensorBoardView, first_step: int, last_step: int) -> None:
    for step in range(first_step, last_step + 1):
        view.step(step_record(step))
        if step % 100 == 0:
            view.evaluation(evaluation_record(step))


def read(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    return events.Reload()


@pytest.fixture
def finished_run(tmp_path: Path) -> EventAccumulator:
    view = TensorBoardView(tmp_path, purge_step=None)
    show(view, 1, 400)
    view.predictions(torch.rand(6, 1, 8, 8), [f"said {k}" for k in range(6)], 128 * 400)
    view.predictions(torch.rand(2, 3, 32, 32), ["cat", "dog"], 128 * 401)
    view.close(
        {"algorithm": "lasgd", "lasgd": {"tau_max": 5}, "data": {"data_dir": None}}, {"top1_percent": 90.0}
    )
    return read(tmp_path)


def test_a_chart_of_the_overview_exists_for_every_tag_it_names(finished_run: EventAccumulator) -> None:
    layout = Layout.FromString(finished_run.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    scalars = finished_run.Tags()["scalars"]
    patterns = [
        tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag
    ]
    assert len(patterns) >= 8
    for pattern in patterns:
        assert any(re.match(pattern, tag) for tag in scalars), pattern
    # TensorBoard's custom-scalars page draws nothing for a tag with parentheses.
    assert not [tag for tag in scalars if "(" in tag]


def test_points_are_means_of_at_most_five_a_second(finished_run: EventAccumulator) -> None:
    points = finished_run.Scalars(LOSS)
    steps = [0, *(point.step // 128 for point in points)]
    assert len(points) <= 400 * STEP_SECONDS * 5 + 5
    for (first, last), point in zip(pairwise(steps), points, strict=True):
        expected = sum(1 / step for step in range(first + 1, last + 1)) / (last - first)
        assert point.value == pytest.approx(expected, rel=1e-5)
    assert steps[-1] == 400


def test_the_second_axis_is_the_wall_clock(finished_run: EventAccumulator) -> None:
    by_images = {point.value: point.step for point in finished_run.Scalars(LOSS)}
    for point in finished_run.Scalars(LOSS_BY_TIME):
        samples = by_images[point.value]
        assert point.step == pytest.approx(1000 * STEP_SECONDS * samples / 128, abs=1)


def test_speeds(finished_run: EventAccumulator) -> None:
    for tag, expected in {
        "speed/images per second, all ranks": 128 / STEP_SECONDS,
        "speed/iteration, ms": 1000 * STEP_SECONDS,
        "speed/iteration: compute, ms": 20.0,
        "speed/iteration: local update, ms": 2.0,
        "speed/iteration: communication, ms": 1.0,
        "speed/iteration: blocked, ms": 5.0,
    }.items():
        assert all(point.value == pytest.approx(expected, rel=1e-3) for point in finished_run.Scalars(tag)), (
            tag
        )


def test_histograms_add_up_to_the_cumulative_counts(finished_run: EventAccumulator) -> None:
    total: Counter[int] = Counter()
    for event in finished_run.Histograms("workers/local steps per all-reduce"):
        for limit, count in zip(
            event.histogram_value.bucket_limit, event.histogram_value.bucket, strict=True
        ):
            total[round(limit - 0.5)] += int(count)
    assert +total == Counter({1: 400, 3: 200})


def test_hyper_parameters_are_in_the_run_itself(finished_run: EventAccumulator, tmp_path: Path) -> None:
    assert all(path.is_file() for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 1
    metadata = finished_run.SummaryMetadata("_hparams_/session_start_info")
    assert b"lasgd.tau_max" in metadata.plugin_data.content
    assert finished_run.Scalars("summary/top1_percent")[0].value == 90.0


def test_predictions_are_shown(finished_run: EventAccumulator) -> None:
    grey, colour = finished_run.Images("predictions/true class and prediction")
    assert grey.width == colour.width * 2 or grey.width > colour.width
    assert grey.height > colour.height


@pytest.mark.parametrize(("last_step", "finished"), [(350, False), (350, True), (200, True)])
def test_a_resumed_run_shows_what_an_undisturbed_one_does(
    last_step: int, finished: bool, tmp_path: Path
) -> None:
    """On both axes: nothing of what the first process did beyond the checkpoint at step 200 remains."""
    for name, resumed in (("undisturbed", False), ("resumed", True)):
        view = TensorBoardView(tmp_path / name, purge_step=None)
        show(view, 1, 200)
        if resumed:
            show(view, 201, last_step)
            if finished:
                view.close({"epochs": 3}, {"top1_percent": 1.0})
            else:
                view._writer.close()
            view = TensorBoardView(tmp_path / name, purge_step=128 * 200)
        show(view, 201, 400)
        view.close({"epochs": 4}, {"top1_percent": 90.0})
    undisturbed, resumed_run = read(tmp_path / "undisturbed"), read(tmp_path / "resumed")
    assert undisturbed.Tags()["scalars"] == resumed_run.Tags()["scalars"]
    for tag in (LOSS, LOSS_BY_TIME, "accuracy/top-1 %, by images", "summary/top1_percent"):
        steps = [point.step for point in resumed_run.Scalars(tag)]
        assert steps == sorted(set(steps)), tag
        assert resumed_run.Scalars(tag)[-1].value == undisturbed.Scalars(tag)[-1].value, tag
    for tag in ("accuracy/top-1 %, by images", "summary/top1_percent"):
        steps = [point.step for point in undisturbed.Scalars(tag)]
        assert [point.step for point in resumed_run.Scalars(tag)] == steps, tag
    points = {point.step for point in undisturbed.Scalars(LOSS) if point.step <= 128 * 200}
    assert points <= {point.step for point in resumed_run.Scalars(LOSS)}


def test_a_torn_event_file_is_resumed(tmp_path: Path) -> None:
    view = TensorBoardView(tmp_path, purge_step=None)
    show(view, 1, 200)
    view._writer.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    TensorBoardView(tmp_path, purge_step=128 * 100).close({}, {})
    assert max(point.step for point in read(tmp_path).Scalars(LOSS)) == 128 * 100


def test_a_loss_that_is_not_a_number_leaves_a_gap(tmp_path: Path) -> None:
    view = TensorBoardView(tmp_path, purge_step=None)
    for step in range(1, 100):
        view.step({**step_record(step), "loss": None})
    view.close({}, {"top1_percent": None})
    events = read(tmp_path)
    assert LOSS not in events.Tags()["scalars"]
    assert "speed/iteration, ms" in events.Tags()["scalars"]
