"""Checkpoints: restored exactly or not at all, whatever happens to the files and between the system calls."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from threaded_ranks import error_of, outcomes_of, results_of
from torch import nn

from pushreduce.communication.base import Communicator
from pushreduce.training.checkpoint import CheckpointError, Checkpoints, LoadedCheckpoint, fingerprint
from pushreduce.training.verified_files import damage_of, read_sealed_json

MODEL = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
FINGERPRINT = fingerprint(MODEL.state_dict())
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


class Killed(BaseException):
    """The process ends here."""


def state_of(rank: int, step: int) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "marks": (rank, step),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": {"python": random.Random(step).getstate(), "torch": torch.get_rng_state()},
        "bf16": torch.full((3,), float(rank), dtype=torch.bfloat16),
    }


def consensus_of(step: int) -> dict[str, Any]:
    return {name: torch.full_like(value, step) for name, value in MODEL.state_dict().items()}


def save(directory: Path, size: int, step: int, *, keep: int = 3) -> Path:
    return results_of(size, saving(directory, step, keep=keep))[0]


def saving(directory: Path, step: int, *, keep: int = 3) -> Callable[[Communicator], Path]:
    def run(communicator: Communicator) -> Path:
        return Checkpoints(directory, communicator, keep=keep).save(
            step,
            state_of(communicator.rank, step),
            consensus_of(step) if communicator.rank == 0 else None,
            {"samples": 10 * step, "algorithm": "lasgd", "by_number": {2: "b", 10: "a"}},
        )

    return run


def loading(directory: Path, model: dict[str, str] = FINGERPRINT) -> Callable[[Communicator], Any]:
    return lambda communicator: Checkpoints(directory, communicator, keep=3).load_newest(model)


def load(directory: Path, size: int) -> list[LoadedCheckpoint]:
    return results_of(size, loading(directory))


def loaded_step(directory: Path, size: int) -> int:
    """The step of the newest checkpoint, having checked that each rank gets what it saved then."""
    loaded = load(directory, size)
    (step,) = {each.facts["step"] for each in loaded}
    for rank, each in enumerate(loaded):
        assert each.same_layout
        assert each.own_state is not None
        assert each.own_state["marks"] == (rank, step)
    return step


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@SIZES
def test_every_rank_gets_back_exactly_what_it_saved(size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    states = [state_of(rank, 5) for rank in range(size)]

    def run(communicator: Communicator) -> LoadedCheckpoint | None:
        checkpoints = Checkpoints(tmp_path / "checkpoints", communicator, keep=1)
        checkpoints.save(5, states[communicator.rank], consensus_of(5), {"samples": 50})
        return checkpoints.load_newest(FINGERPRINT)

    for rank, loaded in enumerate(results_of(size, run)):
        assert same(loaded.own_state, states[rank])
        assert loaded.same_layout
        assert loaded.facts == {"samples": 50, "step": 5, "num_ranks": size, "num_workers": size}


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(4, 2), (1, 4), (4, 1)])
def test_another_number_of_ranks_gets_the_consensus_model(
    saved_by: int, loaded_by: int, tmp_path: Path
) -> None:
    save(tmp_path, saved_by, 7)
    for loaded in load(tmp_path, loaded_by):
        assert not loaded.same_layout
        assert loaded.own_state is None
        assert same(loaded.consensus_state, consensus_of(7))
        assert loaded.facts["num_ranks"] == saved_by


def test_as_many_ranks_that_are_other_workers_get_the_consensus_model(tmp_path: Path) -> None:
    """Its leaders' states would be given to ranks that are none."""

    def saving_by_host(communicator: Communicator) -> None:
        checkpoints = Checkpoints(tmp_path, communicator, keep=1, worker_of_rank=[0, 0, 1, 1])
        consensus = consensus_of(7) if communicator.rank == 0 else None
        checkpoints.save(7, state_of(communicator.rank, 7), consensus, {})
        loaded = checkpoints.load_newest(FINGERPRINT)
        assert loaded is not None
        assert loaded.same_layout

    results_of(4, saving_by_host)
    for loaded in load(tmp_path, 4):
        assert not loaded.same_layout
        assert same(loaded.consensus_state, consensus_of(7))
        assert (loaded.facts["num_ranks"], loaded.facts["num_workers"]) == (4, 2)


@pytest.mark.parametrize("exists", [True, False])
def test_a_run_without_checkpoints_has_none_to_load(exists: bool, tmp_path: Path) -> None:
    assert load(tmp_path if exists else tmp_path / "absent", 2) == [None, None]


@pytest.mark.parametrize("keep", [1, 3])
def test_the_last_few_are_kept_in_order_of_saving(keep: int, tmp_path: Path) -> None:
    # An earlier step, as after going back to an older checkpoint; and the same step twice.
    steps = [100, 200, 150, 150, 9, 160]
    for step in steps:
        save(tmp_path, 2, step, keep=keep)
        assert loaded_step(tmp_path, 2) == step
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert [int(name.split("-")[-1]) for name in kept] == steps[-keep:]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def alter_facts(path: Path) -> None:
    manifest = json.loads(path.read_text())
    manifest["facts"]["samples"] += 1
    path.write_text(json.dumps(manifest))


DAMAGES = [
    (name, damage)
    for name in ("rank0.pt", "rank1.pt", "consensus.pt", "manifest.json")
    for damage in (truncate, alter, Path.unlink)
] + [("manifest.json", alter_facts)]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(
    name: str, damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 2, 1)
    newest = save(tmp_path, 2, 2)
    damage(newest / name)
    with caplog.at_level(logging.WARNING):
        assert loaded_step(tmp_path, 2) == 1
    (record,) = caplog.records
    assert str(newest / name) in record.getMessage()
    # What is saved from there on outranks the damaged one, even at an earlier step.
    save(tmp_path, 2, 1)
    assert loaded_step(tmp_path, 2) == 1


def test_where_all_are_damaged_the_run_does_not_begin_anew_unasked(tmp_path: Path) -> None:
    for step in (1, 2):
        alter(save(tmp_path, 2, step) / "rank1.pt")
    assert "all checkpoints in" in str(error_of(2, loading(tmp_path)))


@SIZES
def test_a_checkpoint_of_another_model_is_refused(size: int, tmp_path: Path) -> None:
    save(tmp_path, 2, 1)
    other = fingerprint(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).state_dict())
    message = str(error_of(size, loading(tmp_path, other)))
    assert "0.weight is float32[2, 3] there and float32[2, 4] here" in message
    smaller = fingerprint(nn.Sequential(nn.Linear(3, 2)).state_dict())
    assert "1.weight is float32[2] there and absent here" in str(error_of(size, loading(tmp_path, smaller)))
    double = fingerprint(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double().state_dict())
    assert "0.weight is float32[2, 3] there and float64[2, 3] here" in str(
        error_of(size, loading(tmp_path, double))
    )


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let any file of this process grow further (Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_values", [300_000, 5_000_000])
@SIZES
def test_where_one_rank_cannot_write_all_say_so_and_the_earlier_one_survives(
    size: int, num_values: int, tmp_path: Path
) -> None:
    save(tmp_path, size, 1)

    def run(communicator: Communicator) -> Path:
        own = torch.zeros(num_values if communicator.rank == size - 1 else 1)
        consensus = consensus_of(2) if communicator.rank == 0 else None
        return Checkpoints(tmp_path, communicator, keep=1).save(2, {"own": own}, consensus, {})

    with largest_file(1_000_000):
        error = error_of(size, run)
    assert isinstance(error, CheckpointError)
    assert f"rank {size - 1} cannot save {tmp_path}/0002-step-2/rank{size - 1}.pt (File too large)" in str(
        error
    )
    assert [path.name for path in tmp_path.iterdir()] == ["0001-step-1"]
    assert loaded_step(tmp_path, size) == 1


def is_whole(checkpoint: Path) -> bool:
    manifest, damage = read_sealed_json(checkpoint / "manifest.json")
    assert manifest is not None, damage
    return not any(damage_of(checkpoint / name, record) for name, record in manifest["files"].items())


@pytest.mark.parametrize("victim", ["fsync", "replace", "unlink", "rmdir", "mkdir"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_a_kill_between_any_two_system_calls_leaves_whole_checkpoints(
    victim: str, before: bool, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(os, victim)
    for occurrence in range(100):
        directory = tmp_path / str(occurrence)
        save(directory, size, 1, keep=1)
        calls = iter(range(1000))

        def killed(*args: Any, calls: Any = calls, occurrence: int = occurrence, **kwargs: Any) -> Any:
            is_last = next(calls) == occurrence
            if before and is_last:
                raise Killed
            try:
                return original(*args, **kwargs)
            finally:
                if is_last:
                    raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(os, victim, killed)
            outcomes = outcomes_of(size, saving(directory, 2, keep=1))
        was_killed = any(isinstance(outcome, BaseException) for outcome in outcomes)
        for visible in directory.glob("[!.]*"):
            assert is_whole(visible)
        assert loaded_step(directory, size) in ((1, 2) if was_killed else (2,))
        assert not list(directory.glob(".tmp-*"))
        # Saving goes on as if nothing had happened, and prunes what the kill kept from it.
        save(directory, size, 3, keep=1)
        assert loaded_step(directory, size) == 3
        assert len(list(directory.iterdir())) == 1
        if not was_killed:
            assert occurrence > 0
            return
    raise AssertionError("the save never came to its end")


def test_state_that_could_not_be_read_back_safely_is_our_bug(tmp_path: Path) -> None:
    def run(communicator: Communicator) -> Path:
        return Checkpoints(tmp_path, communicator, keep=1).save(1, {"own": {1, 2}}, consensus_of(1), {})

    assert isinstance(outcomes_of(1, run)[0], AssertionError)
