"""Checkpoints: one directory each, complete or invisible, checked by SHA-256 before anything in it is used.

Owns the directory, the manifest, the agreement of the ranks and which checkpoint counts as the newest. Does
not own how one file is written and verified (`verified_files.py`), nor what a rank's state contains or when
it is saved (`loop.py`); the caller must have drained the algorithm (`finish()`) before.

    checkpoints/0007-step-1200/rank0.pt ... rankN.pt    each rank's own state
                               consensus.pt             the consensus model's state_dict
                               manifest.json            written last, then the directory is renamed into place

A checkpoint's number counts checkpoints, not steps: a run that went back to an earlier step, because the
newest checkpoint was damaged, writes newer ones that must outrank it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pushreduce.communication.agreement import AgreedError, agree, agree_with_root
from pushreduce.communication.base import Communicator
from pushreduce.training.atomic_file import sync_directory
from pushreduce.training.verified_files import (
    damage_of,
    load_state,
    read_sealed_json,
    save_state,
    write_sealed_json,
)

logger = logging.getLogger(__name__)

NAME = re.compile(r"(\d{4,})-step-\d+")


class CheckpointError(AgreedError):
    """A checkpoint cannot be saved, or none can be restored: one line, with the remedy."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint whose files are what was saved; tensors on the CPU."""

    path: Path
    facts: dict[str, Any]
    """What `save` was given as `facts`, and `step`, `num_ranks`, `num_workers`."""
    same_layout: bool
    """Whether it is of as many ranks as there are now, and those are the same workers."""
    own_state: dict[str, Any] | None
    """What this rank saved; only where `same_layout`."""
    consensus_state: dict[str, Any] | None
    """The consensus model's state_dict, on every rank; only where not `same_layout`."""


def fingerprint(model_state: Mapping[str, Any]) -> dict[str, str]:
    """Name -> type and shape ("float32[3, 4]") of every tensor in a model's state_dict."""
    return {
        name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for name, value in model_state.items()
        if isinstance(value, torch.Tensor)
    }


class Checkpoints:
    """The checkpoints of one run. All methods are collective.

    Args:
        directory: on a file system that all ranks share; made when needed.
        communicator: the ranks that save and load together.
        keep: complete checkpoints that are kept; older ones are removed after each save.
        worker_of_rank: the worker that each rank belongs to; default: every rank is one.
    """

    def __init__(
        self,
        directory: Path,
        communicator: Communicator,
        *,
        keep: int,
        worker_of_rank: Sequence[int] | None = None,
    ) -> None:
        assert keep >= 1
        self._worker_of_rank = list(worker_of_rank or range(communicator.size))
        self._directory = directory
        self._communicator = communicator
        self._keep = keep

    def save(
        self,
        step: int,
        own_state: dict[str, Any],
        consensus_state: dict[str, Any] | None,
        facts: dict[str, Any],
    ) -> Path:
        """Saves one checkpoint and returns its directory.

        Rank 0's `step`, `consensus_state` and `facts` count.

        Args:
            step: names the checkpoint, for people.
            own_state: this rank's; plain, as `verified_files.is_plain` has it.
            consensus_state: the consensus model's state_dict, on rank 0.
            facts: what JSON can hold (samples, algorithm, ...); kept in the manifest.

        Raises:
            CheckpointError: on all ranks alike, if any cannot write; the earlier checkpoints are untouched.
        """
        communicator = self._communicator
        temporary, final = agree_with_root(communicator, lambda: self._begin(step))
        try:
            written = agree(
                communicator, lambda: self._write_own(temporary, final, own_state, consensus_state)
            )
            files = {name: record for records in written for name, record in records.items()}
            agree_with_root(
                communicator,
                lambda: self._publish(temporary, final, files, consensus_state, {**facts, "step": step}),
            )
        except CheckpointError:
            if communicator.rank == 0:
                # What cannot be removed now is invisible and goes when the run is resumed.
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def load_newest(self, model_fingerprint: Mapping[str, str]) -> LoadedCheckpoint | None:
        """The newest checkpoint that is whole on all ranks; None where the run has saved none.

        Damaged ones are passed over with a warning that names the file. Removes what interrupted saves left.

        Raises:
            CheckpointError: on all ranks alike: there are checkpoints, and all are damaged.
            ValueError: on all ranks alike: it is of another model (the first difference is named).
        """
        names = agree_with_root(self._communicator, self._tidy)
        for name in reversed(names):
            path = self._directory / name
            manifest, damage = agree_with_root(
                self._communicator, partial(read_sealed_json, path / "manifest.json")
            )
            if manifest is not None:
                if "worker_of_rank" not in manifest:  # saved before hosts could be workers
                    manifest["worker_of_rank"] = list(range(manifest["num_ranks"]))
                _refuse_other_model(path, manifest["model"], model_fingerprint)
                damage = self._find_damage(path, manifest)
                if damage is None:
                    return self._load(path, manifest)
            if self._communicator.rank == 0:
                logger.warning("%s: this checkpoint is not used, the one before it is tried", damage)
        if names:
            raise CheckpointError(
                f"all checkpoints in {self._directory} are damaged: restore one from a backup, or start anew "
                f"with another --run-dir"
            )
        return None

    def _find_damage(self, path: Path, manifest: dict[str, Any]) -> str | None:
        """What any rank finds wrong with a file that is needed; the same on all ranks."""
        rank, files = self._communicator.rank, manifest["files"]
        same_layout = manifest["worker_of_rank"] == self._worker_of_rank
        wanted = [f"rank{rank}.pt"] if same_layout else []
        if rank == 0 or not same_layout:
            wanted.append("consensus.pt")
        own_damage = [damage for name in wanted if (damage := damage_of(path / name, files[name]))]
        found = self._communicator.allgather(own_damage)
        return next((damage for each in found for damage in each), None)

    def _load(self, path: Path, manifest: dict[str, Any]) -> LoadedCheckpoint:
        workers = manifest["worker_of_rank"]
        same_layout = workers == self._worker_of_rank
        return LoadedCheckpoint(
            path=path,
            facts={**manifest["facts"], "num_ranks": len(workers), "num_workers": len(set(workers))},
            same_layout=same_layout,
            own_state=load_state(path / f"rank{self._communicator.rank}.pt") if same_layout else None,
            consensus_state=None if same_layout else load_state(path / "consensus.pt"),
        )

    def _names(self) -> list[str]:
        """Complete checkpoints, oldest first."""
        found = [path.name for path in self._directory.iterdir() if NAME.fullmatch(path.name)]
        return sorted(found, key=lambda name: int(name.split("-")[0]))

    def _tidy(self) -> list[str]:
        """Removes what interrupted saves left; complete checkpoints, oldest first."""
        if not self._directory.is_dir():
            return []
        try:
            for left_over in self._directory.glob(".tmp-*"):
                shutil.rmtree(left_over)
            return self._names()
        except OSError as error:
            raise CheckpointError(
                f"{error.filename} cannot be tidied ({error.strerror}): give this user the rights to it"
            ) from error

    def _begin(self, step: int) -> tuple[Path, Path]:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            names = self._names()
            number = int(names[-1].split("-")[0]) + 1 if names else 1
            final = self._directory / f"{number:04}-step-{step}"
            temporary = self._directory / f".tmp-{final.name}"
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir()
        except OSError as error:
            raise self._cannot_save(self._directory, error) from error
        return temporary, final

    def _write_own(
        self,
        temporary: Path,
        final: Path,
        own_state: dict[str, Any],
        consensus_state: dict[str, Any] | None,
    ) -> dict[str, dict[str, Any]]:
        """Writes this rank's files; name -> SHA-256 and size of each."""
        states = {f"rank{self._communicator.rank}.pt": own_state}
        if self._communicator.rank == 0:
            assert consensus_state is not None
            states["consensus.pt"] = consensus_state
        records = {}
        for name, state in states.items():
            try:
                records[name] = save_state(temporary / name, state)
            except OSError as error:
                raise self._cannot_save(final / name, error) from error
        return records

    def _publish(
        self,
        temporary: Path,
        final: Path,
        files: dict[str, dict[str, Any]],
        consensus_state: dict[str, Any] | None,
        facts: dict[str, Any],
    ) -> None:
        assert consensus_state is not None
        manifest = {
            "facts": facts,
            "worker_of_rank": self._worker_of_rank,
            "files": files,
            "model": fingerprint(consensus_state),
        }
        try:
            write_sealed_json(temporary / "manifest.json", manifest)
            os.replace(temporary, final)
            sync_directory(self._directory)
        except OSError as error:
            raise self._cannot_save(final, error) from error
        self._prune()

    def _prune(self) -> None:
        for name in self._names()[: -self._keep]:
            # Out of sight first: a removal that is interrupted must not leave half a checkpoint visible.
            doomed = self._directory / f".tmp-{name}"
            try:
                os.replace(self._directory / name, doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                raise CheckpointError(
                    f"old checkpoint {self._directory / name} cannot be removed ({error.strerror}): "
                    f"remove it by hand, or raise --keep-checkpoints"
                ) from error

    def _cannot_save(self, path: Path, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"rank {self._communicator.rank} cannot save {path} ({error.strerror}): make room, then add "
            f"--resume; the earlier checkpoints are intact"
        )


def _refuse_other_model(path: Path, saved: Mapping[str, str], present: Mapping[str, str]) -> None:
    for name in [*present, *saved]:
        if saved.get(name) != present.get(name):
            raise ValueError(
                f"{path} is of another model: {name} is {saved.get(name, 'absent')} there and "
                f"{present.get(name, 'absent')} here; choose the --model that it was saved from"
            )
