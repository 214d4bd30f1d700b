"""The same tests on simulated and on real ranks.

    pytest tests/parallel                                         simulated clusters of 1, 2, 3 and 4 ranks
    mpirun -np 4 python -m pytest tests/parallel --cluster real   this launcher's ranks, over Horovod and MPI

A test asks for `ranks` and calls `ranks.run(body)`: `body(communicator)` runs on every rank, and what the bodies return
comes back as a list in rank order, on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pushreduce.communication.base import Communicator
from pushreduce.communication.simulated import SimulatedCluster

SIMULATED_SIZES = (1, 2, 3, 4)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cluster", choices=["simulated", "real"], default="simulated")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    config.addinivalue_line("markers", "real: only meaningful on real ranks")
    if config.getoption("--cluster") == "real":
        from pushreduce.communication import startup

        config.communicator = startup.connect()  # type: ignore[attr-defined]


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "communicator"):
        from pushreduce.communication import startup

        startup.shut_down()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--cluster") == "simulated":
        for item in items:
            if item.get_closest_marker("real"):
                item.add_marker(pytest.mark.skip(reason="needs real ranks: mpirun ... --cluster real"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # The other ranks would wait for this one in their next collective: a failure ends all of them.
    if report.failed and "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        print(
            f"rank {MPI.COMM_WORLD.rank}: {report.nodeid} failed\n{report.longreprtext}",
            file=sys.stderr,
            flush=True,
        )
        MPI.COMM_WORLD.Abort(1)


class Ranks:
    """A cluster of `size` ranks, real or simulated."""

    def __init__(self, size: int, communicator: Communicator | None) -> None:
        self.size, self._communicator = size, communicator
        self.real = communicator is not None

    def run(
        self,
        body: Callable[[Communicator], Any],
        *,
        seed: int = 0,
        jitter: float = 3.0,
        ranks_per_host: int = 1,
    ) -> list[Any]:
        """What `body(communicator)` returned on each rank. `seed` and `jitter` decide simulated interleavings.

        Simulated hosts have `ranks_per_host`, the last one those that remain; all real ranks are on one host.
        """
        if self._communicator is not None:
            return self._communicator.allgather(body(self._communicator))
        cluster = SimulatedCluster(self.size, seed=seed, jitter=jitter, ranks_per_host=ranks_per_host)
        return cluster.run(body)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" in metafunc.fixturenames:
        communicator = getattr(metafunc.config, "communicator", None)
        if communicator is not None:
            metafunc.parametrize(
                "ranks", [Ranks(communicator.size, communicator)], ids=[f"n{communicator.size}"]
            )
        else:
            metafunc.parametrize(
                "ranks", [Ranks(n, None) for n in SIMULATED_SIZES], ids=[f"n{n}" for n in SIMULATED_SIZES]
            )
