"""Flat parameters, the consensus model and buffers, for both algorithms, on simulated and real ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pushreduce.algorithms import LASGD, AllReduceSGD

ALGORITHMS = [AllReduceSGD, LASGD]


class _Tied(nn.Module):
    """A tied weight, a frozen one, and one that takes part."""

    def __init__(self, dtype):
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False, dtype=dtype)
        self.out = nn.Linear(4, 4, bias=True, dtype=dtype)
        self.out.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.full((4,), 0.25, dtype=dtype), requires_grad=False)

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x)) + self.frozen)


@pytest.mark.parametrize("algorithm_class", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tied_frozen_and_narrow_parameters(ranks, algorithm_class, dtype):
    def body(communicator):
        torch.manual_seed(communicator.rank)  # the ranks begin apart: the broadcast must put that right
        model = _Tied(dtype)
        frozen = model.frozen.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        algorithm = algorithm_class(model, optimizer, communicator)
        assert algorithm.parameters.num_elements == 20  # 16 tied weights once, 4 biases
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).to(dtype)
        losses = []
        for _ in range(25):
            optimizer.zero_grad()
            loss = (model(x) - x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            algorithm.step(6)
        algorithm.finish()
        assert model.out.weight is model.embed.weight
        assert torch.equal(model.frozen, frozen)
        return losses, nn.utils.parameters_to_vector(model.parameters()).detach().double().numpy()

    results = ranks.run(body)
    for losses, vector in results:
        assert losses[-1] < 0.7 * losses[0]
        tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
        np.testing.assert_allclose(vector, results[0][1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("algorithm_class", ALGORITHMS)
def test_channels_last_is_kept(ranks, algorithm_class):
    def body(communicator):
        torch.manual_seed(communicator.rank)
        model = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        algorithm = algorithm_class(model, torch.optim.SGD(model.parameters(), lr=0.1), communicator)
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        model(torch.ones(1, 3, 4, 4) * communicator.rank).square().sum().backward()
        algorithm.step(1)
        algorithm.finish()
        return model.weight.detach().clone()

    results = ranks.run(body)
    for weight in results:
        torch.testing.assert_close(weight, results[0])


@pytest.mark.parametrize("algorithm_class", ALGORITHMS)
def test_consensus_pools_batch_norm_and_gives_everything_back(ranks, algorithm_class):
    """The pooled statistics are those of the mixture of the workers' distributions, computed here directly."""

    def body(communicator):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        algorithm = algorithm_class(model, torch.optim.SGD(model.parameters(), lr=0.1), communicator)
        norm = model[1]
        random = np.random.default_rng(communicator.rank)
        mean, variance = random.standard_normal(2), random.random(2) + 0.1
        norm.running_mean.copy_(torch.from_numpy(mean))
        norm.running_var.copy_(torch.from_numpy(variance))
        norm.num_batches_tracked.fill_(communicator.rank + 3)
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with algorithm.consensus():
            inside = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for name, tensor in model.state_dict().items():  # draining may round the mean of equal parameters
            torch.testing.assert_close(tensor, own[name], rtol=1e-6, atol=0.0)
        assert inside["1.num_batches_tracked"] == communicator.rank + 3
        return mean, variance, inside["1.running_mean"].numpy(), inside["1.running_var"].numpy()

    results = ranks.run(body)
    means, variances = (
        np.array([result[i] for result in results], np.float32).astype(np.float64) for i in (0, 1)
    )
    for *_, pooled_mean, pooled_variance in results:
        np.testing.assert_allclose(pooled_mean, means.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(pooled_variance, variances.mean(0) + means.var(0), rtol=1e-5)


def test_consensus_is_the_mean_of_the_workers(ranks):
    def body(communicator):
        model = nn.Linear(3, 1)
        algorithm = LASGD(model, torch.optim.SGD(model.parameters(), lr=0.1), communicator)
        algorithm.finish()
        with torch.no_grad():
            model.weight.fill_(float(communicator.rank))
        # consensus() drains first, and draining synchronises: all are at the mean then.
        with algorithm.consensus():
            return model.weight.detach().clone()

    for weight in ranks.run(body):
        torch.testing.assert_close(weight, torch.full((1, 3), (ranks.size - 1) / 2))


@pytest.mark.parametrize("algorithm_class", ALGORITHMS)
def test_clipping_bounds_the_update(ranks, algorithm_class):
    def body(communicator):
        model = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        algorithm = algorithm_class(model, optimizer, communicator, max_grad_norm=0.5)
        before = model.weight.detach().clone()
        (1000.0 * model(torch.ones(2, 3))).sum().backward()
        algorithm.step(2)
        return float((model.weight.detach() - before).norm())

    for distance in ranks.run(body):
        assert distance == pytest.approx(0.5, rel=1e-4)
