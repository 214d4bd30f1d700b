"""The learning rate by global samples, held against its formula; and what it is at scale."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pushreduce.settings import DataSettings, OptimizerSettings
from pushreduce.training.schedule import LearningRate, build_optimizer
from pushreduce.workloads import build_workload

EPOCH = 1000  # samples


def rate(samples: float, epochs: float = 90.0, global_batch_size: int = 256, **settings) -> float:
    chosen = replace(OptimizerSettings(base_lr=0.1), **settings)
    schedule = LearningRate(
        chosen, global_batch_size=global_batch_size, num_train_samples=EPOCH, epochs=epochs
    )
    return schedule(round(samples))


@pytest.mark.parametrize(
    ("epoch", "factor"), [(0, 1), (29.9, 1), (30, 0.1), (59.9, 0.1), (60, 0.01), (80, 1e-3), (90, 1e-3)]
)
def test_steps_of_the_imagenet_recipe(epoch, factor):
    assert rate(epoch * EPOCH, schedule="step") == pytest.approx(0.1 * factor)


def test_linear_scaling_and_warm_up_from_the_unscaled_rate():
    settings = {
        "schedule": "step",
        "warmup_epochs": 5.0,
        "global_batch_size": 8192,
    }  # Goyal et al.: 0.1 -> 3.2
    assert rate(0, **settings) == pytest.approx(0.1)
    assert rate(2.5 * EPOCH, **settings) == pytest.approx((0.1 + 3.2) / 2)
    assert rate(5 * EPOCH, **settings) == pytest.approx(3.2)


def test_warm_up_begins_at_nought_where_scaling_does_not_raise_the_rate():
    assert rate(0, warmup_epochs=5.0, global_batch_size=64) == 0.0
    assert rate(5 * EPOCH, warmup_epochs=5.0, global_batch_size=64) == pytest.approx(0.1 / 4)


@given(st.floats(0.0, 1.0), st.floats(0.0, 20.0))
def test_cosine_is_the_formula_between_warm_up_and_end(share, warmup_epochs):
    epochs = 40.0
    epoch = warmup_epochs + share * (epochs - warmup_epochs)
    samples = round(epoch * EPOCH)
    done = min(1.0, max(0.0, samples / EPOCH - warmup_epochs) / (epochs - warmup_epochs))
    if samples / EPOCH >= warmup_epochs:
        expected = 0.1 * (1 + math.cos(math.pi * done)) / 2
        actual = rate(samples, epochs=epochs, schedule="cosine", warmup_epochs=warmup_epochs)
        assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_cosine_ends_at_nought_and_stays_there():
    assert rate(40 * EPOCH, epochs=40.0, schedule="cosine") == pytest.approx(0.0, abs=1e-15)
    assert rate(41 * EPOCH, epochs=40.0, schedule="cosine") == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizers_take_their_settings(name):
    model = torch.nn.Linear(2, 1)
    optimizer = build_optimizer(OptimizerSettings(optimizer=name, weight_decay=0.25, momentum=0.5), model)
    assert type(optimizer).__name__.lower() == name
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    if name == "sgd":
        assert optimizer.param_groups[0]["momentum"] == 0.5
        assert optimizer.param_groups[0]["nesterov"]


@pytest.mark.parametrize("size", [1, 4, 32, 128])
def test_default_batch_and_rate_up_to_128_ranks(size):
    """The default batch fits the smallest shard, and the rate follows the global batch."""
    workload = build_workload(DataSettings(), seed=0, rank=size - 1, size=size)
    assert sum(workload.shard_sizes) == workload.num_train_samples
    assert workload.batch_size_per_rank == min(32, min(workload.shard_sizes))
    global_batch_size = workload.batch_size_per_rank * size
    assert rate(0, global_batch_size=global_batch_size) == pytest.approx(0.1 * global_batch_size / 256)
    too_large = DataSettings(batch_size_per_rank=min(workload.shard_sizes) + 1)
    with pytest.raises(ValueError, match="batch"):
        build_workload(too_large, seed=0, rank=0, size=size)
