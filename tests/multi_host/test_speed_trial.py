"""experiments/speed measures what it says, of every system, on a cluster of its own that it leaves no trace of."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from itertools import product

import pytest
from emulated import ROOT, Emulated, environment

EXPERIMENT = ROOT / "experiments" / "speed"
sys.path.insert(0, str(EXPERIMENT))
from pieces import ALL_REDUCE, COMPUTE_SECONDS, INTENSIVE, INTENSIVE_COMPUTE_SECONDS, TRIAL  # noqa: E402

TIMEOUT_SECONDS = 200


@pytest.mark.timeout(2 * TIMEOUT_SECONDS)
def test_every_system_is_measured_in_turn(tmp_path):
    cluster = Emulated("speed")
    words = ["--hosts", str(TRIAL.num_hosts), "--name", cluster.name, "--output", str(tmp_path)]
    command = [sys.executable, str(EXPERIMENT / "measure.py"), *words]

    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
        left_behind = cluster.namespaces()
    finally:
        cluster.remove()
    assert done.returncode == 0, done.stdout + done.stderr
    assert left_behind == []
    blocks = [json.loads(line) for line in (tmp_path / "blocks.jsonl").read_text().splitlines()]
    machine, *blocks = blocks
    assert machine["machine"]["cores"] > 0
    order = [
        [block["system"] for block in blocks if block["round"] == number] for number in range(TRIAL.rounds)
    ]
    assert order == [list(TRIAL.systems), list(reversed(TRIAL.systems))]
    computations = {}
    for block in blocks:
        if block["system"] == ALL_REDUCE:
            assert len(block["all_reduce_ms"]) == TRIAL.steps
            continue
        compute, ended = block["compute_ms"], block["ended_ms"]
        num_steps = TRIAL.lead_in + TRIAL.steps
        assert [len(of_rank) for of_rank in compute + ended] == [num_steps] * 2 * TRIAL.num_hosts
        seconds = INTENSIVE_COMPUTE_SECONDS if block["system"] == INTENSIVE else COMPUTE_SECONDS
        for rank, step in product(range(TRIAL.num_hosts), range(num_steps)):
            began = ended[rank][step - 1] if step else -float("inf")
            assert compute[rank][step] <= ended[rank][step] - began + 0.1
            # The jitter's lognormal is hardly ever below two thirds; what is slept is never shorter than drawn.
            assert compute[rank][step] > 1e3 * seconds / TRIAL.speed_up * 0.6
        computations[block["system"], block["round"]] = compute
    with (tmp_path / "emulated.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["algorithm"], int(row["block"])) for row in rows} == set(computations)
