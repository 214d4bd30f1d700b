"""What of a run is in a checkpoint, how it comes back, and the final model.

Owns which state is saved; not when (`loop.py`), nor how files are kept whole (`checkpoint.py`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pushreduce.communication.agreement import agree_with_root
from pushreduce.training.atomic_file import atomic_file
from pushreduce.training.checkpoint import CheckpointError, fingerprint
from pushreduce.training.evaluate import reestimate_batch_norm

if TYPE_CHECKING:
    from pushreduce.training.loop import TrainingLoop

logger = logging.getLogger(__name__)


def save(loop: TrainingLoop) -> Path:
    """Saves a checkpoint of the drained run; its directory. Collective; CheckpointError on all ranks alike."""
    samples = loop.algorithm.progress.samples
    loop.record.flush()  # a run resumed here finds all its lines
    with loop.algorithm.consensus():
        consensus = _weights(loop.model) if loop.communicator.rank == 0 else None
    return loop.checkpoints.save(
        loop.num_steps,
        own_state={
            "model": loop.model.state_dict(),
            "optimizer": loop.optimizer.state_dict(),
            "algorithm": loop.algorithm.state_dict(),
            "batches": loop.batches.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(loop.device) if loop.device.type == "cuda" else None,
        },
        consensus_state=consensus,
        facts={
            "samples": samples,
            "algorithm": loop.settings.algorithm,
            "optimizer": loop.settings.optimizer.optimizer,
            "steps_by_rank": loop.communicator.allgather(loop.num_steps),
            "wall_seconds": loop.wall_seconds,
            "milestones": loop.milestones.state_dict(),
        },
    )


def restore(loop: TrainingLoop) -> int:
    """Loads the newest intact checkpoint, if there is one. Returns its global samples. Collective."""
    loaded = loop.checkpoints.load_newest(fingerprint(loop.model.state_dict()))
    if loaded is None:
        return 0
    facts = loaded.facts
    for name, now in (
        ("algorithm", loop.settings.algorithm),
        ("optimizer", loop.settings.optimizer.optimizer),
    ):
        if facts[name] != now:
            raise ValueError(
                f"{loaded.path} is of --{name} {facts[name]}, not {now}: go on with that, or start a new run "
                "with another --run-dir"
            )
    loop.newest_checkpoint = loaded.path
    loop.milestones.load_state_dict(facts["milestones"])
    loop.wall_seconds = facts["wall_seconds"]
    steps_by_rank = dict(enumerate(facts["steps_by_rank"]))
    loop.num_steps = steps_by_rank.get(loop.communicator.rank, 0)
    if loaded.own_state is not None:
        _restore_own(loop, loaded.own_state)
    else:
        assert loaded.consensus_state is not None
        if loop.communicator.rank == 0:
            logger.warning(
                "%s is of %s: all %s begin at its consensus model, with new optimizer state",
                loaded.path,
                describe_workers(facts["num_workers"], facts["num_ranks"]),
                describe_workers(loop.algorithm.progress.size, loop.communicator.size),
            )
        loop.model.load_state_dict(loaded.consensus_state)
        loop.algorithm.begin_at(facts["samples"])
    return int(facts["samples"])


def describe_workers(num_workers: int, num_ranks: int) -> str:
    """ "4 ranks", or "2 workers of 4 ranks" where they are fewer."""
    ranks = f"{num_ranks} ranks" if num_ranks > 1 else "1 rank"
    if num_workers == num_ranks:
        return ranks
    return f"{num_workers} workers of {ranks}" if num_workers > 1 else f"1 worker of {ranks}"


def _restore_own(loop: TrainingLoop, state: dict[str, Any]) -> None:
    loop.model.load_state_dict(state["model"])
    asked = [{k: v for k, v in g.items() if k != "params"} for g in loop.optimizer.param_groups]
    loop.optimizer.load_state_dict(state["optimizer"])
    for group, hyperparameters in zip(loop.optimizer.param_groups, asked, strict=True):
        group.update(hyperparameters)  # the settings' own, which may have been changed for the resumed run
    loop.algorithm.load_state_dict(state["algorithm"])
    loop.batches.load_state_dict(state["batches"])
    torch.set_rng_state(state["torch_rng"])
    if state["cuda_rng"] is not None and loop.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda_rng"], loop.device)


def save_final_model(loop: TrainingLoop) -> None:
    """Writes `model.pt`, the consensus weights. Collective."""
    with loop.algorithm.consensus():
        if loop.settings.training.batch_norm == "reestimate":
            reestimate_batch_norm(loop.model, loop.workload, loop.communicator)
        agree_with_root(loop.communicator, lambda: _write_model(loop))


def _write_model(loop: TrainingLoop) -> None:
    path = loop.run_directory.model_pt
    try:
        with atomic_file(path) as file:
            torch.save(_weights(loop.model), file)
    except OSError as error:
        raise CheckpointError(
            f"cannot save {path} ({error.strerror}): make room, then add --resume"
        ) from error


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A plain state_dict on the CPU, each tensor with its own memory (the model's own are views of one buffer)."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
