"""The links are as slow as they were asked to be, in both directions. An upper bound of speed: load cannot break it."""

from __future__ import annotations

import json

import pytest
from conftest import RATE_BITS_PER_SECOND

NUM_BYTES = 6_000_000
TOLERANCE = 1.1
"""For the bucket that is full at the beginning."""

# The clock is the machine's, so the two ends' times can be compared. All bytes cross after `start` and before `end`.
SEND = """
import json, socket, sys, time
start = time.monotonic()
while True:
    try:
        connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
with connection:
    connection.sendall(bytes(int(sys.argv[3])))
print(json.dumps({"start": start}))
"""
RECEIVE = """
import json, socket, sys, time
with socket.create_server(("", int(sys.argv[1]))) as server, server.accept()[0] as connection:
    num_bytes = 0
    while data := connection.recv(1 << 16):
        num_bytes += len(data)
print(json.dumps({"end": time.monotonic(), "num_bytes": num_bytes}))
"""


def bits_per_second(cluster, pairs) -> float:
    """Of all transfers together, each from one host to another at the same time."""
    processes = []
    for index, (sender, receiver) in enumerate(pairs):
        port = str(5000 + index)
        receive = ["--host", str(receiver), "--", "python", "-c", RECEIVE, port]
        send = ["--host", str(sender), "--", "python", "-c", SEND, f"node{receiver}", port, str(NUM_BYTES)]
        processes += [cluster.start("run", *receive), cluster.start("run", *send)]
    found = {"start": [], "end": [], "num_bytes": []}
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        for key, value in json.loads(out).items():
            found[key].append(value)
    assert found["num_bytes"] == [NUM_BYTES] * len(pairs)
    return 8 * sum(found["num_bytes"]) / (max(found["end"]) - min(found["start"]))


@pytest.mark.parametrize(
    "pairs", [[(0, 2), (1, 2)], [(0, 1), (0, 2)]], ids=["into one host", "out of one host"]
)
def test_a_host_neither_sends_nor_receives_faster_than_its_link(cluster, pairs):
    assert bits_per_second(cluster, pairs) <= TOLERANCE * RATE_BITS_PER_SECOND
