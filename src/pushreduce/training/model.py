"""The model of a run: as it begins, and as a file brings it back."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from pushreduce.settings import Settings
from pushreduce.workloads.base import Workload

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def initial_model(settings: Settings, workload: Workload, device: torch.device) -> nn.Module:
    """The model that a run begins with: the same for a seed, whatever the number of ranks.

    Raises:
        ValueError: the model does not fit the data.
    """
    torch.manual_seed(settings.seed)
    return workload.build_model().to(device, DTYPES[settings.training.dtype])


def refuse_batch_of_one(model: nn.Module, workload: Workload) -> None:
    """Where a rank takes one sample a step, tries whether `model` can be trained so; it stays as it is.

    BatchNorm has nothing to normalise with where that sample leaves it one value a channel.

    Raises:
        ValueError: it cannot.
    """
    if workload.batch_size_per_rank > 1:
        return
    like = next(model.parameters())
    batch = next(workload.train_batches()).to(like.device, like.dtype)
    try:
        with torch.no_grad():
            workload.loss(deepcopy(model).train(), batch)
    except ValueError as error:
        raise ValueError(
            f"the model's BatchNorm cannot be trained with one sample a rank and step ({error}): give "
            "--batch-size-per-rank 2 or more (start fewer ranks if a shard has fewer), or a --model without BatchNorm"
        ) from error


def load_model(settings: Settings, workload: Workload, device: torch.device) -> nn.Module:
    """The workload's model with the weights of the file `settings.evaluate`, a plain state_dict.

    Raises:
        ValueError: no such file, no state_dict, or one of another model.
    """
    path = Path(settings.evaluate or "")
    try:
        weights = torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror or error}): give a run's model.pt"
        ) from error
    except Exception as error:  # torch.load raises whatever a foreign file leads it to
        raise ValueError(
            f"{path} is no model file ({type(error).__name__}): give a run's model.pt"
        ) from error
    model = initial_model(settings, workload, device)
    try:
        model.load_state_dict(weights)
    except (RuntimeError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} holds another model than {settings.data.model} on {settings.data.dataset} ({reason}): "
            "give --model and --dataset as in its run"
        ) from error
    return model
