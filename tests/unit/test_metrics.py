"""The record: what is written reads back, whatever the numbers and wherever the run was killed."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushreduce.training.metrics import MetricsRecord, Record, read_records


def add_step(record: MetricsRecord, step: int, loss: float = 0.5) -> Record:
    return record.step(
        step=step,
        samples=128 * step,
        epoch=step / 10,
        wall_seconds=0.1 * step,
        loss=loss,
        learning_rate=0.1,
        num_samples=32,
        compute_seconds=0.06,
        local_update_seconds=0.01,
        communication_seconds=0.01,
        blocked_seconds=0.02,
        bytes_sent=1000,
    )


def add_evaluation(record: MetricsRecord, step: int, top1_percent: float = 90.0) -> Record:
    return record.evaluation(
        step=step,
        samples=128 * step,
        epoch=step / 10,
        wall_seconds=0.1 * step + 0.05,
        validation_loss=0.4,
        top1_percent=top1_percent,
        top1_percent_by_rank=[top1_percent, math.nan],
        consensus_distance=0.3,
        steps_per_allreduce={1: 4, 5: 2},
        staleness={0: 3, 1: 3},
        messages_kept_back=2,
    )


def write_run(path: Path, num_steps: int = 12) -> list[Record]:
    record = MetricsRecord(path)
    written = []
    for step in range(1, num_steps + 1):
        written.append(add_step(record, step))
        if step % 4 == 0:
            written.append(add_evaluation(record, step))
    record.close()
    return written


@given(losses=st.lists(st.floats(), min_size=1), top1_percent=st.floats())
def test_every_line_is_strict_json_and_reads_back(
    losses: list[float], top1_percent: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.rank0.jsonl"
    record = MetricsRecord(path)
    written = [add_step(record, step, loss) for step, loss in enumerate(losses)]
    written.append(add_evaluation(record, len(losses), top1_percent))
    record.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    assert list(read_records(path)) == written
    for loss, one in zip(losses, written, strict=False):
        assert one["loss"] == (loss if math.isfinite(loss) else None)


def test_a_file_cut_anywhere_reads_as_a_prefix_and_can_be_resumed(tmp_path: Path) -> None:
    written = write_run(tmp_path / "whole.jsonl")
    content = (tmp_path / "whole.jsonl").read_bytes()
    path = tmp_path / "cut.jsonl"
    before_line_ends = [index for index, byte in enumerate(content) if byte == ord("\n")]
    for length in [*range(0, len(content), 37), *before_line_ends]:
        path.write_bytes(content[:length])
        prefix = list(read_records(path))
        assert prefix == written[: len(prefix)]
        assert len(prefix) >= content[:length].count(b"\n")

        resumed = MetricsRecord(path, keep_until_step=5)
        new = add_step(resumed, 6, loss=9.0)
        resumed.close()
        assert list(read_records(path)) == [one for one in prefix if one["step"] <= 5] + [new]


def test_resuming_keeps_the_old_file_if_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.rank0.jsonl"
    written = write_run(path)

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        MetricsRecord(path, keep_until_step=3)
    assert list(read_records(path)) == written


def test_a_rank_that_is_new_in_a_resumed_run_begins_an_empty_record(tmp_path: Path) -> None:
    record = MetricsRecord(tmp_path / "metrics.rank7.jsonl", keep_until_step=3)
    new = add_step(record, 4)
    record.close()
    assert list(read_records(tmp_path / "metrics.rank7.jsonl")) == [new]


def test_damage_before_the_last_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.rank0.jsonl"
    write_run(path)
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:20]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="line 3"):
        list(read_records(path))
    with pytest.raises(ValueError, match="line 3"):
        MetricsRecord(path, keep_until_step=100)


def test_a_new_record_does_not_overwrite_another(tmp_path: Path) -> None:
    written = write_run(tmp_path / "metrics.rank0.jsonl")
    with pytest.raises(FileExistsError):
        MetricsRecord(tmp_path / "metrics.rank0.jsonl")
    assert list(read_records(tmp_path / "metrics.rank0.jsonl")) == written


def test_an_evaluation_and_a_flush_reach_the_file_before_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.rank0.jsonl"
    record = MetricsRecord(path)
    written = [add_step(record, 1), add_evaluation(record, 1)]
    assert list(read_records(path)) == written
    written.append(add_step(record, 2))
    record.flush()
    assert list(read_records(path)) == written
    record.close()
    record.close()
