"""How fast topologies average, held against PushSum itself and known values, and scripts/topology, which prints it."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pushreduce.communication.topology import GRAPHS, Topology, build_topology
from pushreduce.simulation.mixing import consensus_errors, second_singular_value

SCRIPT = Path(__file__).parents[2] / "scripts" / "topology"


class Lopsided(Topology):
    """A ring in which rank 0 also sends to rank 2: column-stochastic only, so that w matters."""

    size = 5
    max_in_degree = 2

    def out_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return (1, 2) if rank == 0 else ((rank + 1) % self.size,)

    def in_neighbours(self, rank: int, round_number: int) -> tuple[int, ...]:
        return (1, 0) if rank == 2 else ((rank - 1) % self.size,)


@pytest.mark.parametrize(
    "topology", [build_topology("exponential", 6), Lopsided()], ids=["exponential", "lopsided"]
)
def test_consensus_errors_are_those_of_push_sum_from_random_starts(topology: Topology) -> None:
    x = np.random.default_rng(0).standard_normal((topology.size, 20000))
    w = np.ones(topology.size)
    mean = x.mean(axis=0)
    start = np.linalg.norm(x - mean)
    for k, error in enumerate(consensus_errors(topology, 6)):
        assert np.linalg.norm(x / w[:, None] - mean) / start == pytest.approx(error, rel=0.02)
        received_x, received_w = np.zeros_like(x), np.zeros_like(w)
        for rank in range(topology.size):
            receivers = (rank, *topology.out_neighbours(rank, k))
            for receiver in receivers:
                received_x[receiver] += x[rank] / len(receivers)
                received_w[receiver] += w[rank] / len(receivers)
        x, w = received_x, received_w


def test_the_second_singular_value_is_the_known_one_of_a_ring() -> None:
    for size in (2, 3, 5, 8, 31):
        ring = build_topology("ring", size)
        assert second_singular_value(ring, 0, 1) == pytest.approx(math.cos(math.pi / size), abs=1e-12)
        assert second_singular_value(ring, 4, 3) == pytest.approx(math.cos(math.pi / size) ** 3, abs=1e-12)
    assert second_singular_value(build_topology("ring", 1), 0, 1) == 0


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_graph_averages(graph: str) -> None:
    for size in (1, 2, 3, 6, 12, 17):
        errors = consensus_errors(build_topology(graph, size), 60)
        assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(errors))
        assert errors[-1] < 0.5


# -- the script


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_script_prints_both_figures() -> None:
    done = run_script("exponential", "12", "--num-peers", "2", "--rounds", "5")
    assert done.returncode == 0, done.stderr
    heading, *rows, last = done.stdout.splitlines()
    assert heading.split("   ") == ["after round", "rank 0 sent to", "consensus error"]
    topology = build_topology("exponential", 12, num_peers=2)
    shown = [float(row.split()[-1]) for row in rows]
    assert shown == pytest.approx(consensus_errors(topology, 5), rel=1e-3)
    assert f"{second_singular_value(topology, 0, 2):.3e}" in last
    assert "over rounds 0 to 1 (one period)" in last


@pytest.mark.parametrize(
    "arguments",
    [
        ("star", "4"),
        ("ring", "0"),
        ("ring", "four"),
        ("ring",),
        ("ring", "4", "--num-peers", "2"),
        ("ring", "5000"),
    ],
    ids=" ".join,
)
def test_the_script_refuses_bad_arguments_in_one_line(arguments: tuple[str, ...]) -> None:
    done = run_script(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("topology: ")
    assert done.stderr.count("\n") == 1
