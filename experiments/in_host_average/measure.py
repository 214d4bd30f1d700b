#!/usr/bin/env python
"""Whether the average of gradients inside a host waits for an average between hosts that is under way (--worker host).

    mpirun -np 4 -machinefile FILE python experiments/in_host_average/measure.py      two ranks a host, on two hosts

Two kinds of blocks in turn: in-host averages of 1 MB alone, and the same while 10 MB are averaged between hosts by
Horovod, among the leaders as in training or among all ranks. Writes results.csv and environment.json.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))
import pairs  # noqa: E402

from pushreduce.communication import startup  # noqa: E402
from pushreduce.communication.base import Communicator, HostSplit  # noqa: E402
from pushreduce.communication.environment import describe_environment  # noqa: E402

NUM_PAIRS, AVERAGES_PER_BLOCK, NUM_WARM_UPS = 40, 10, 5
IN_HOST_ELEMENTS, BETWEEN_ELEMENTS = 1_000_000 // 4, 10_000_000 // 4
SETTLING_SECONDS = 0.05  # from the posting of the long average until it is surely on its way
BOUND = 1.2
HERE = Path(__file__).parent


class InHost:
    """Averages of 1 MB inside the host, each rank's from a buffer of its own, as a step of `HostWorker` does them."""

    def __init__(self, split: HostSplit) -> None:
        self._host = split.host
        self._own = torch.ones(IN_HOST_ELEMENTS)
        shared = split.host.shared(split.host.size * IN_HOST_ELEMENTS, torch.float32)
        self._rows = shared.view(split.host.size, IN_HOST_ELEMENTS)

    def block(self) -> float:
        """Seconds of one average, the mean of a block."""
        start = time.perf_counter()
        for _ in range(AVERAGES_PER_BLOCK):
            self._rows[self._host.rank].copy_(self._own)
            self._host.sum_rows(self._rows)
            self._host.barrier()
        seconds = time.perf_counter() - start
        assert bool((self._rows[0] == self._host.size).all()), "not the sum"
        return seconds / AVERAGES_PER_BLOCK


def measure(everyone: Communicator, in_host: InHost, between: Communicator | None) -> tuple[list, list, int]:
    """(seconds alone, seconds meanwhile) of every pair, the slowest rank's; how many long averages outlasted theirs.

    Args:
        between: what this rank takes part in between hosts; None: nothing.
    """
    payload = torch.ones(BETWEEN_ELEMENTS)
    seconds: tuple[list[float], list[float]] = ([], [])
    num_outlasting = 0
    for pair in range(NUM_WARM_UPS + NUM_PAIRS):
        for is_under_way in (False, True) if pair % 2 == 0 else (True, False):
            everyone.barrier()
            handle = between.average_async(payload, "between.hosts") if between and is_under_way else None
            time.sleep(SETTLING_SECONDS)
            own = in_host.block()
            outlasts = handle is None or not handle.done()
            if handle is not None:
                handle.wait()
            told = everyone.allgather((own, outlasts))
            if pair >= NUM_WARM_UPS:
                seconds[is_under_way].append(max(each for each, _ in told))
                num_outlasting += is_under_way and all(outlasted for _, outlasted in told)
    return *seconds, num_outlasting


def main() -> None:
    communicator = startup.connect(worker="host")
    split = communicator.split_by_host()
    num_hosts = max(split.host_of_rank) + 1
    if num_hosts < 2 or num_hosts == communicator.size:
        startup.exit_with_bad_input("start it on two hosts or more, with two ranks or more on each")
    in_host = InHost(split)
    environment = describe_environment(communicator.size)
    figures: list[dict[str, Any]] = []
    for name, between in (("leaders", split.leaders), ("all ranks", communicator)):
        load = os.getloadavg()
        alone, meanwhile, num_outlasting = measure(communicator, in_host, between)
        ratios = [b / a for a, b in zip(alone, meanwhile, strict=True)]
        figure = {
            "between": name,
            "hosts": num_hosts,
            "ranks": communicator.size,
            "alone_ms": 1e3 * float(torch.tensor(alone).median()),
            "meanwhile_ms": 1e3 * float(torch.tensor(meanwhile).median()),
            **pairs.describe(ratios),
            "outlasted": num_outlasting,
            "bound": BOUND,
            "load_average": load[0],
            "commit": environment["commit"],
        }
        figures.append(figure)
        if communicator.rank == 0:
            print(json.dumps(figure), flush=True)
    if communicator.rank == 0:
        with (HERE / "results.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(figures[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(
                {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in figure.items()}
                for figure in figures
            )
        (HERE / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")
    startup.shut_down()


if __name__ == "__main__":
    main()
