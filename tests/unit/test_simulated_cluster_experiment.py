"""experiments/simulated_cluster: what the simulation itself says, taken for measured, is found equal."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
sys.path[:0] = [str(EXPERIMENTS / "simulated_cluster"), str(EXPERIMENTS / "speed")]
import pieces  # noqa: E402
from against_emulated import PARAMETER_BYTES, SYSTEMS, compare, table  # noqa: E402

from pushreduce.simulation.cluster_model import ClusterModel  # noqa: E402

MODEL = ClusterModel(num_hosts=4, link_bits_per_second=5e7, latency_seconds=1e-4, step_seconds=0.58)


def measured_block(system: str, delay_ms: float = 0.0) -> dict:
    compute = 0.58 * np.random.default_rng(1).lognormal(0.0, 0.1, (20, 4))
    ends = 1e3 * SYSTEMS[system](MODEL, compute).end_seconds + delay_ms * np.arange(20)[:, None]
    return {
        "system": system,
        "num_hosts": 4,
        "round": 0,
        "lead_in": 3,
        "stretch": 2.0,
        "rate_mbit": 100.0,
        "compute_ms": (1e3 * compute.T).tolist(),
        "ended_ms": (100.0 + ends.T).tolist(),  # the clock's zero is anywhere
        "cpu_ms": [0.0] * 4,
        "load_average": 0.0,
        "commit": "abc",
    }


@pytest.mark.parametrize("system", SYSTEMS)
def test_its_own_time_line_is_found_again(system):
    (row,) = compare([{"machine": {}}, measured_block(system)], {4: MODEL})
    assert row["measured_ms"] == pytest.approx(row["simulated_ms"], rel=1e-9)
    assert row["measured_ms"] > 280  # in the emulated cluster's time, not the stretched
    assert (row["num_hosts"], row["system"], row["n"]) == (4, system, 1)
    assert "within 5 %" in table([row])


def test_every_system_is_simulated_as_what_it_is():
    assert set(SYSTEMS) == {*pieces.OURS, pieces.NO_JITTER, pieces.INTENSIVE}
    assert sum(PARAMETER_BYTES) == 4 * pieces.NUM_PARAMETERS
    compute = 0.2 * np.random.default_rng(2).lognormal(
        0.0, 0.3, (60, 4)
    )  # a message takes 168 ms, an average 252
    seconds = {name: SYSTEMS[name](MODEL, compute).end_seconds.max() for name in SYSTEMS}
    assert seconds["SGD-AR, no overlap"] > seconds["SGD-AR"] > seconds["LASGD(1)"] > seconds["LASGD(5)"]
    assert seconds["SGP"] > seconds["OSGP(1)"] > compute.sum(axis=0).mean()
    at_once = SYSTEMS[pieces.NO_JITTER](MODEL, np.full((10, 4), 0.58)).end_seconds.max()
    message_seconds = 8 * 4 * pieces.NUM_PARAMETERS / 5e7
    assert at_once == pytest.approx(10 * (0.58 + message_seconds), rel=2e-3)


def test_a_calibration_of_other_links_is_refused():
    with pytest.raises(ValueError, match=r"has links of 100 Mbit/s, the blocks have 100 stretched by 2"):
        list(compare([measured_block("SGP")], {4: replace(MODEL, link_bits_per_second=1e8)}))


def test_what_takes_longer_than_simulated_is_outside():
    (row,) = compare([measured_block("SGP", delay_ms=100.0)], {4: MODEL})
    assert row["median"] < 0.95
    assert "**outside**" in table([row])


def test_what_is_not_simulated_or_not_calibrated_is_left_out():
    foreign = {**measured_block("SGP"), "system": "DDP"}
    assert not list(compare([foreign, {**foreign, "system": pieces.ALL_REDUCE}], {4: MODEL}))
    assert not list(compare([measured_block("SGP")], {8: MODEL}))
