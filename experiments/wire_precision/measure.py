#!/usr/bin/env python
"""What messages in bfloat16 and float16 cost in agreement: the distance of OSGP(1)'s workers to their mean.

    python experiments/wire_precision/measure.py      in the activated environment; half a minute; writes results.csv

Eight simulated workers hold vectors of the small CNN's size. They begin apart and only gossip, or take a random step of
a given size in every round; nothing is learnt, so what is measured is rounding and mixing alone.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import torch
from torch import nn

from pushreduce.algorithms import SGP
from pushreduce.communication.simulated import SimulatedCluster
from pushreduce.settings import SGPSettings

NUM_RANKS, NUM_ROUNDS, NUM_WEIGHTS, DEVIATION = 8, 60, 260_000, 0.05


def measure(wire_dtype: str, step_size: float, seed: int) -> tuple[float, float]:
    """(RMS distance of a worker to the mean, error of the mean), both relative to the mean's L2 norm."""

    def body(communicator):
        generator = torch.Generator().manual_seed(1000 * seed + communicator.rank + 1)
        model = nn.Linear(NUM_WEIGHTS, 1, bias=False)
        nn.init.normal_(model.weight, std=DEVIATION, generator=torch.Generator().manual_seed(seed))
        settings = SGPSettings(tau=1, wire_dtype=wire_dtype)
        algorithm = SGP(model, torch.optim.SGD(model.parameters(), lr=1.0), communicator, settings)
        expected = model.weight.detach().double().clone()
        for index in range(NUM_ROUNDS):
            # The first step sets the workers apart.
            size = 0.1 * DEVIATION if index == 0 else step_size
            model.weight.grad = size * torch.randn(model.weight.shape, generator=generator)
            expected -= model.weight.grad.double()
            algorithm.step(1)
        algorithm.finish()
        own = model.weight.detach().double().clone()
        with algorithm.consensus():
            mean = model.weight.detach().double().clone()
        algorithm.close()
        return (own - mean).square().sum().item(), mean, expected

    results = SimulatedCluster(NUM_RANKS, seed=seed, jitter=1.0).run(body)
    mean = results[0][1]
    expected = sum(result[2] for result in results) / NUM_RANKS
    norm = mean.norm().item()
    distance = (sum(result[0] for result in results) / NUM_RANKS) ** 0.5
    return distance / norm, (mean - expected).norm().item() / norm


def main() -> None:
    torch.set_num_threads(1)
    rows = [
        {"wire_dtype": wire_dtype, "step_size": step_size, "seed": seed}
        for step_size in (0.0, 1e-4)
        for wire_dtype in ("full", "float16", "bfloat16")
        for seed in (0, 1, 2)
    ]
    with (Path(__file__).parent / "results.csv").open("w", newline="") as file:
        columns = ["wire_dtype", "step_size", "seed", "relative_distance", "relative_error_of_mean"]
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            distance, error = measure(row["wire_dtype"], row["step_size"], row["seed"])
            writer.writerow(
                {**row, "relative_distance": f"{distance:.3g}", "relative_error_of_mean": f"{error:.3g}"}
            )
            print(row, f"{distance:.3g} {error:.3g}", file=sys.stderr)


if __name__ == "__main__":
    main()
