"""SGD-AR against the oracle, plain SGD at n = 1, and PyTorch DDP, on simulated and real ranks."""

from __future__ import annotations

import least_squares
import numpy as np
import pytest
import torch
from torch import nn

from pushreduce.algorithms import AllReduceSGD
from pushreduce.simulation import global_view

SGD = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}


def run_allreduce(communicator, num_steps, num_samples=5):
    model, events = least_squares.model(), []
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    algorithm = AllReduceSGD(model, optimizer, communicator, recorder=events.append)
    for step in range(num_steps):
        optimizer.zero_grad()
        least_squares.backward(model, communicator.rank, step, num_samples)
        communicator.clock.sleep(1e-4 * communicator.rank)
        algorithm.step(num_samples)
    algorithm.finish()
    return {"x": least_squares.vector(model), "events": events, "progress": algorithm.progress}


def expected(results, num_samples_of_rank):
    return global_view.replay_allreduce(
        least_squares.vector(least_squares.model()),
        [result["events"] for result in results],
        lambda rank, step, x: least_squares.gradient(rank, step, x, num_samples_of_rank(rank)),
        global_view.SGD(momentum=SGD["momentum"], nesterov=SGD["nesterov"], weight_decay=SGD["weight_decay"]),
    )


@pytest.mark.parametrize(
    ("num_steps_of_rank", "num_samples_of_rank"),
    [
        (lambda rank: 12, lambda rank: 5),
        (lambda rank: 12, lambda rank: 3 + 2 * rank),  # unequal batches: weighted by samples
        (lambda rank: 4 + 9 * rank, lambda rank: 5),  # ranks that run out of data contribute nothing
        (lambda rank: 15 - 3 * rank, lambda rank: 1 + rank),
    ],
    ids=["equal", "unequal-batches", "unequal-steps", "unequal-both"],
)
def test_equals_the_oracle(ranks, num_steps_of_rank, num_samples_of_rank):
    results = ranks.run(lambda c: run_allreduce(c, num_steps_of_rank(c.rank), num_samples_of_rank(c.rank)))
    oracle = expected(results, num_samples_of_rank)
    total = sum(num_steps_of_rank(rank) * num_samples_of_rank(rank) for rank in range(ranks.size))
    for rank, result in enumerate(results):
        np.testing.assert_allclose(result["x"], oracle[rank], rtol=1e-11, atol=1e-13)
        assert np.array_equal(result["x"], results[0]["x"])  # replicas never drift apart
        assert result["progress"].samples == total


def test_one_rank_is_plain_sgd(ranks):
    if ranks.size > 1:
        pytest.skip("of one rank")
    (result,) = ranks.run(lambda c: run_allreduce(c, 50))
    expected = least_squares.train_plainly(50, **SGD)
    assert np.array_equal(result["x"], expected)  # bit for bit


def test_ranks_out_of_data_follow_the_others_schedule(ranks):
    """Replicas stay equal although the learning rate falls on those that still have data only."""

    def body(communicator):
        model = least_squares.model()
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
        algorithm = AllReduceSGD(model, optimizer, communicator)
        for step in range(3 + 6 * communicator.rank):
            optimizer.zero_grad()
            least_squares.backward(model, communicator.rank, step)
            algorithm.step(5)
            scheduler.step()
        algorithm.finish()
        return least_squares.vector(model)

    results = ranks.run(body)
    for x in results:
        np.testing.assert_allclose(x, results[0], rtol=1e-12, atol=1e-14)


def test_accumulated_gradients_equal_one_large_batch(ranks):
    def body(communicator, accumulate):
        model = least_squares.model()
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        algorithm = AllReduceSGD(model, optimizer, communicator)
        for step in range(6):
            optimizer.zero_grad()
            features, targets = map(torch.from_numpy, least_squares.batch(communicator.rank, step, 8))
            parts = (
                list(zip(features.split(2), targets.split(2), strict=True))
                if accumulate
                else [(features, targets)]
            )
            for x, y in parts[:-1]:
                with algorithm.accumulating():
                    ((model(x)[:, 0] - y).square().mean() / len(parts)).backward()
            x, y = parts[-1]
            ((model(x)[:, 0] - y).square().mean() / len(parts)).backward()
            algorithm.step(8)
        return least_squares.vector(model)

    together = ranks.run(lambda c: body(c, False))
    in_parts = ranks.run(lambda c: body(c, True))
    np.testing.assert_allclose(in_parts, together, rtol=1e-12, atol=1e-14)


class _TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3, 1, bias=False, dtype=torch.float64) for _ in range(3))

    def forward(self, x, head):
        return self.heads[head](x).square().mean()


def test_gradients_that_are_none_on_some_ranks(ranks):
    """Head 0 is used everywhere, head 1 by rank 0 only, head 2 nowhere: that one must not even decay."""

    def body(communicator):
        torch.manual_seed(5)
        model = _TwoHeads()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        algorithm = AllReduceSGD(model, optimizer, communicator)
        before = [head.weight.detach().clone() for head in model.heads]
        x = torch.ones(2, 3, dtype=torch.float64)
        loss = model(x, 0) + (model(x, 1) if communicator.rank == 0 else 0.0)
        loss.backward()
        algorithm.step(2)
        return [b.numpy() for b in before], [head.weight.detach().clone().numpy() for head in model.heads]

    for before, after in ranks.run(body):
        share = [1.0, 1.0 / ranks.size, None]
        for old, new, weight in zip(before, after, share, strict=True):
            if weight is None:
                assert np.array_equal(old, new)
            else:
                gradient = weight * 2 * old.sum() * np.ones(3)
                np.testing.assert_allclose(new, old - 0.1 * (gradient + 0.5 * old), rtol=1e-12, atol=1e-14)


@pytest.mark.real
def test_equals_pytorch_ddp(ranks, tmp_path_factory):
    """The same data, seed and optimizer through DistributedDataParallel (gloo)."""
    from mpi4py import MPI

    def network():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 3))

    def train(model, take_step):
        for step in range(10):
            generator = torch.Generator().manual_seed(100 * step + MPI.COMM_WORLD.rank)
            x = torch.randn(8, 7, generator=generator)
            model.zero_grad()
            nn.functional.cross_entropy(model(x), x.argmax(1) % 3).backward()
            take_step()

    def ours(communicator):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        algorithm = AllReduceSGD(model, optimizer, communicator)
        train(model, lambda: algorithm.step(8))
        return nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    def theirs(communicator):
        import torch.distributed as dist

        (store,) = {MPI.COMM_WORLD.bcast(str(tmp_path_factory.mktemp("gloo") / "store"))}
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=communicator.rank, world_size=communicator.size
        )
        try:
            model = nn.parallel.DistributedDataParallel(network())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            train(model, optimizer.step)
            return nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        finally:
            dist.destroy_process_group()

    for a, b in zip(ranks.run(ours), ranks.run(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
