#!/usr/bin/env python
"""The same contended patterns of messages on the simulated network and in SimGrid.

    apt-get install python3-simgrid
    python experiments/simgrid/compare.py      activated environment; half a minute; writes results.csv, results.md

SimGrid belongs to Debian's own Python and is started there, as `in_simgrid.py`; nothing else needs it.
"""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pushreduce.communication.topology import build_topology
from pushreduce.simulation.collectives import Message, arrival_seconds, ring_allreduce

HERE = Path(__file__).parent
DEBIANS_PYTHON = "/usr/bin/python3"
BITS_PER_SECOND, LATENCY_SECONDS = 10e9, 50e-6
MODEL_BYTES = 100e6
COMPUTE_SECONDS, DEVIATION = 0.18, 0.1
NUM_ROUNDS = 8
NO_WINDOW = "network/TCP-gamma:1e30"
LV08 = ("network/model:LV08", "network/crosstraffic:no")
SETTINGS: dict[str, tuple[tuple[str, ...], float, float]] = {
    # name: (SimGrid's settings, factors on our latency and on our rate)
    # What our network means: the fluid model, without corrections fitted to TCP.
    "same": (("network/model:CM02", "network/crosstraffic:no", NO_WINDOW), 1.0, 1.0),
    "LV08": (LV08, 1.0, 1.0),
    # Two of LV08's corrections are constant factors, which a calibration of our model would have found.
    "LV08, its factors in ours": (LV08, 13.01, 0.97),
    "default": ((), 1.0, 1.0),
}
ORDER = ("same", "LV08, its factors in ours", "LV08", "default")
COLUMNS = "pattern hosts messages ours_seconds settings simgrid_seconds difference largest_difference".split()


def pushes(size: int, num_peers: int, seed: int) -> list[Message]:
    """Rounds of computation, normal in time, and a message to each receiver; a rank then waits for all of its own."""
    topology = build_topology("exponential", size, num_peers=num_peers)
    draw = random.Random(seed)
    messages: list[Message] = []
    received: list[list[int]] = [[] for _ in range(size)]
    for round_number in range(NUM_ROUNDS):
        begun, received = received, [[] for _ in range(size)]
        for rank in range(size):
            seconds = max(0.0, draw.gauss(COMPUTE_SECONDS, DEVIATION * COMPUTE_SECONDS))
            if round_number == 0:
                seconds *= draw.random()  # ranks begin at random times
            for to in topology.out_neighbours(rank, round_number):
                received[to].append(len(messages))
                messages.append(Message(rank, to, MODEL_BYTES, seconds, tuple(begun[rank])))
    return messages


def incast(num_senders: int, seed: int) -> list[Message]:
    """Messages of random sizes to host 0, which begin at random times within one and a half messages' time."""
    draw = random.Random(seed)
    longest = 1.5 * 8 * MODEL_BYTES / BITS_PER_SECOND
    return [
        Message(1 + sender, 0, round(MODEL_BYTES * (0.5 + draw.random())), longest * draw.random())
        for sender in range(num_senders)
    ]


def patterns() -> Iterator[tuple[str, int, list[Message]]]:
    """(name, hosts, messages)"""
    for size in (4, 8, 16, 32):
        yield f"ring, n = {size}", size, ring_allreduce(range(size), MODEL_BYTES)
    for size in (8, 16, 32):
        host_of_rank = [rank // 4 for rank in range(size)]
        random.Random(size).shuffle(host_of_rank)
        messages = ring_allreduce(host_of_rank, MODEL_BYTES)
        yield f"ring, n = {size}, 4 ranks a host, shuffled", size // 4, messages
    for size in (8, 16, 32):
        for num_peers in (1, 2):
            name = f"pushes, n = {size}, peers {num_peers}"
            yield name, size, pushes(size, num_peers, seed=size)
    for num_senders in (2, 4, 8, 16):
        yield f"{num_senders} into one host", num_senders + 1, incast(num_senders, seed=num_senders)


def simgrid_seconds(messages: list[Message], num_hosts: int, settings: tuple[str, ...]) -> list[float]:
    """When SimGrid has each message arrive."""
    pattern = {
        "num_hosts": num_hosts,
        "bits_per_second": BITS_PER_SECOND,
        "latency_seconds": LATENCY_SECONDS,
        "messages": [
            [each.source, each.target, each.num_bytes, each.delay_seconds, each.waits_for]
            for each in messages
        ],
    }
    command = [DEBIANS_PYTHON, str(HERE / "in_simgrid.py"), "--log=root.thres:warning"]
    command += [f"--cfg={setting}" for setting in settings]
    done = subprocess.run(command, input=json.dumps(pattern), capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"SimGrid failed: {done.stderr}")
    return json.loads(done.stdout)


def compare() -> Iterator[dict[str, str]]:
    """A row for every pattern and setting. The largest difference is any message's, of its time since the beginning."""
    for name, num_hosts, messages in patterns():
        for settings_name, (settings, latency_factor, rate_factor) in SETTINGS.items():
            ours = arrival_seconds(
                messages,
                num_hosts,
                bits_per_second=rate_factor * BITS_PER_SECOND,
                latency_seconds=latency_factor * LATENCY_SECONDS,
            )
            theirs = simgrid_seconds(messages, num_hosts, settings)
            # A message inside a host arrives at once, at the very beginning perhaps.
            pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if b > 0]
            yield {
                "pattern": name,
                "hosts": str(num_hosts),
                "messages": str(len(messages)),
                "ours_seconds": f"{max(ours):.6f}",
                "settings": settings_name,
                "simgrid_seconds": f"{max(theirs):.6f}",
                "difference": f"{max(ours) / max(theirs) - 1:.2e}",
                "largest_difference": f"{max(abs(a / b - 1) for a, b in pairs):.2e}",
            }


def table(rows: list[dict[str, str]]) -> str:
    lines = [
        "| pattern | messages | ours, s | SimGrid, s | difference | of any message, up to "
        "| to LV08, its factors in ours | to LV08 | to the default |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["pattern"] for row in rows):
        same, *others = (
            {row["settings"]: row for row in rows if row["pattern"] == name}[each] for each in ORDER
        )
        differences = " | ".join(f"{float(row['difference']):+.1%}" for row in others)
        lines.append(
            f"| {name} | {same['messages']} | {float(same['ours_seconds']):.4f} "
            f"| {float(same['simgrid_seconds']):.4f} | {same['difference']} | {same['largest_difference']} "
            f"| {differences} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    has_simgrid = [DEBIANS_PYTHON, "-c", "import simgrid"]
    if not Path(DEBIANS_PYTHON).exists() or subprocess.run(has_simgrid, capture_output=True).returncode:
        print(f"error: {DEBIANS_PYTHON} has no SimGrid: apt-get install python3-simgrid", file=sys.stderr)
        return 2
    rows = list(compare())
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (HERE / "results.md").write_text(table(rows))
    print(table(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
