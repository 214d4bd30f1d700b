"""The learning rate as a function of global samples, which all algorithms share since their workers' steps differ.

The rate for the run's global batch is base_lr x global batch / reference batch (linear scaling, Goyal et al. 2017),
where the global batch is what all *ranks* compute between two updates of one worker.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from pushreduce.settings import OptimizerSettings


class LearningRate:
    """Learning rate by global samples: linear warm-up, then constant, steps or cosine.

    Args:
        settings: rates, schedule and their epochs.
        global_batch_size: samples of one step of all ranks, accumulation included.
        num_train_samples: samples of one epoch.
        epochs: length of the run; the cosine ends there.
    """

    def __init__(
        self, settings: OptimizerSettings, *, global_batch_size: int, num_train_samples: int, epochs: float
    ) -> None:
        self.settings = settings
        self.num_train_samples = num_train_samples
        self.epochs = epochs
        self.peak = settings.base_lr * global_batch_size / settings.reference_batch_size
        self.start = settings.base_lr if self.peak > settings.base_lr else 0.0

    def __call__(self, samples: int) -> float:
        """The rate of the step that begins when all ranks together have seen `samples`."""
        epoch = samples / self.num_train_samples
        warmup = self.settings.warmup_epochs
        if epoch < warmup:
            return self.start + (self.peak - self.start) * epoch / warmup
        match self.settings.schedule:
            case "constant":
                return self.peak
            case "step":
                return self.peak * self.settings.decay_factor ** sum(
                    e <= epoch for e in self.settings.decay_epochs
                )
            case "cosine":
                done = min(1.0, (epoch - warmup) / max(self.epochs - warmup, 1e-12))
                return self.peak * 0.5 * (1.0 + math.cos(math.pi * done))


def build_optimizer(settings: OptimizerSettings, model: nn.Module) -> torch.optim.Optimizer:
    """The local optimizer; its learning rate is set before every step by `LearningRate`."""
    match settings.optimizer:
        case "sgd":
            return torch.optim.SGD(
                model.parameters(),
                lr=settings.base_lr,
                momentum=settings.momentum,
                nesterov=settings.nesterov,
                weight_decay=settings.weight_decay,
            )
        case "adam":
            return torch.optim.Adam(
                model.parameters(), lr=settings.base_lr, weight_decay=settings.weight_decay
            )
        case "adamw":
            return torch.optim.AdamW(
                model.parameters(), lr=settings.base_lr, weight_decay=settings.weight_decay
            )
