"""A least-squares problem that every rank has its own data of, in PyTorch for the algorithms, in NumPy for the oracle.

The gradient of mean((A x - y)^2) is 2/b A^T (A x - y); nothing of it passes through the code under test.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

NUM_FEATURES = 7


def batch(rank: int, step: int, num_samples: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Features [num_samples, NUM_FEATURES] and targets [num_samples] of one step of one rank, float64."""
    random = np.random.default_rng([rank, step])
    features = random.standard_normal((num_samples, NUM_FEATURES))
    return features, features @ np.arange(NUM_FEATURES) / NUM_FEATURES + 0.1 * rank


def gradient(rank: int, step: int, x: np.ndarray, num_samples: int = 5) -> np.ndarray:
    features, targets = batch(rank, step, num_samples)
    return 2.0 / num_samples * features.T @ (features @ x - targets)


def model(dtype: torch.dtype = torch.float64) -> nn.Linear:
    linear = nn.Linear(NUM_FEATURES, 1, bias=False, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(torch.linspace(-1.0, 1.0, NUM_FEATURES))
    return linear


def backward(linear: nn.Linear, rank: int, step: int, num_samples: int = 5) -> torch.Tensor:
    """Leaves the gradient of one step in `.grad`; returns the loss."""
    features, targets = (
        torch.from_numpy(array).to(linear.weight.dtype) for array in batch(rank, step, num_samples)
    )
    loss = (linear(features)[:, 0] - targets).square().mean()
    loss.backward()
    return loss.detach()


def train_plainly(num_steps: int, **sgd: float) -> np.ndarray:
    """Where rank 0's data alone leads torch's own SGD: what every algorithm must do with one worker."""
    linear = model()
    optimizer = torch.optim.SGD(linear.parameters(), **sgd)
    for step in range(num_steps):
        optimizer.zero_grad()
        backward(linear, 0, step)
        optimizer.step()
    return vector(linear)


def vector(linear: nn.Linear) -> np.ndarray:
    return linear.weight.detach().double().numpy().reshape(-1).copy()
