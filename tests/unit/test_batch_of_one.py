"""One sample a step: refused where BatchNorm is left with one value a channel, and only there."""

from __future__ import annotations

import pytest
import torch

from pushreduce.settings import DataSettings
from pushreduce.training.model import refuse_batch_of_one
from pushreduce.workloads import build_workload


def workload_of(model: str, image_size: int, batch_size: int | None, num_samples: int = 8):
    data = DataSettings(
        dataset="synthetic",
        model=model,
        image_size=image_size,
        num_synthetic_samples=num_samples,
        batch_size_per_rank=batch_size,
    )
    return build_workload(data, seed=0, rank=0, size=4)


@pytest.mark.parametrize(
    ("model", "image_size", "batch_size"),
    [("cnn", 8, 1), ("resnet18-cifar", 8, 2), ("resnet18-cifar", 16, 1)],
    ids=["no-batch-norm", "two-samples", "several-pixels"],
)
def test_what_can_be_trained_is_left_as_it_is(model, image_size, batch_size):
    workload = workload_of(model, image_size, batch_size)
    built = workload.build_model()
    before = {name: tensor.clone() for name, tensor in built.state_dict().items()}
    refuse_batch_of_one(built, workload)
    assert all(torch.equal(tensor, before[name]) for name, tensor in built.state_dict().items())
    workload.loss(built.train(), next(workload.train_batches())).backward()


@pytest.mark.parametrize(
    ("batch_size", "num_samples"), [(1, 8), (None, 4)], ids=["asked-for", "shards-of-one"]
)
def test_what_cannot_be_trained_is_refused(batch_size, num_samples):
    workload = workload_of("resnet18-cifar", 8, batch_size, num_samples)
    built = workload.build_model()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        workload.loss(built.train(), next(workload.train_batches()))
    with pytest.raises(ValueError, match="give --batch-size-per-rank 2"):
        refuse_batch_of_one(built, workload)
