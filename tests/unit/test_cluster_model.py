"""The cluster model: its file, its ranges, and the closed form of an average against messages counted one by one."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushreduce.settings import SettingsError
from pushreduce.settings_file import dataclass_from_yaml, to_yaml
from pushreduce.simulation.cluster_model import (
    ClusterModel,
    Uncertainty,
    load_cluster_model,
    save_cluster_model,
)

MODEL = ClusterModel(num_hosts=8, link_bits_per_second=8e6, latency_seconds=1e-3, step_seconds=0.3)
"""A byte takes a microsecond."""

positive = st.floats(1e-9, 1e9)


@given(
    st.builds(
        ClusterModel,
        num_hosts=st.integers(1, 5),
        ranks_per_host=st.integers(1, 3),
        link_bits_per_second=positive,
        latency_seconds=positive,
        step_seconds=positive,
        step_jitter=positive,
        average_overhead_seconds=positive,
        relative_uncertainty=st.builds(Uncertainty, step_seconds=st.floats(0, 9)),
    )
)
def test_a_file_gives_back_exactly_what_was_saved(model: ClusterModel) -> None:
    assert dataclass_from_yaml(ClusterModel, to_yaml(model), source="FILE") == model
    slow = replace(model, rank_slowness=(1.5,) * model.num_ranks)
    assert dataclass_from_yaml(ClusterModel, to_yaml(slow), source="FILE") == slow


def test_saving_and_loading(tmp_path: Path) -> None:
    save_cluster_model(MODEL, tmp_path / "cluster.yaml")
    assert load_cluster_model(tmp_path / "cluster.yaml") == MODEL
    with pytest.raises(SettingsError, match=r"cluster file .*none.yaml cannot be read: No such file"):
        load_cluster_model(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("num_hosts: 0", "num_hosts is 0: it must be at least 1"),
        ("num_hosts: 2.5", "num_hosts must be a whole number, but is 2.5"),
        ("link_bits_per_second: 0", "link_bits_per_second is 0.0: it must be above 0"),
        ("latency_seconds: -1", "latency_seconds is -1.0: it must be at least 0"),
        ("step_seconds: .nan", "step_seconds is nan: it must be at least 0"),
        ("step_seconds: .inf", "step_seconds is inf: it must be at least 0 and finite"),
        ("latency_second: 1", "unknown setting latency_second: did you mean latency_seconds?"),
        ("rank_slowness: [1, 2]", "rank_slowness has 2 numbers and there are 8 ranks: give one a rank"),
        (
            "relative_uncertainty: {step_seconds: -1}",
            "relative_uncertainty.step_seconds is -1.0: give a number",
        ),
        ("zzz: 1", "unknown setting zzz: known are num_hosts"),
    ],
)
def test_mistakes_are_one_line(line: str, message: str) -> None:
    name = line.split(":")[0]
    others = [each for each in to_yaml(MODEL).splitlines() if not each.startswith((name + ":", " "))]
    text = "\n".join([line, *(each for each in others if each != "relative_uncertainty:")])
    with pytest.raises(SettingsError) as caught:
        dataclass_from_yaml(ClusterModel, text, source="FILE")
    assert str(caught.value).startswith(f"FILE: {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_number_is_named() -> None:
    with pytest.raises(SettingsError, match="FILE: link_bits_per_second is missing: add it"):
        dataclass_from_yaml(
            ClusterModel, "{num_hosts: 2, latency_seconds: 0, step_seconds: 1}", source="FILE"
        )


# -- averages -------------------------------------------------------------------------------------------------------


def by_messages(model: ClusterModel, num_bytes: float, num_ranks: int) -> float:
    """Recursive halving and doubling, message by message; a power of two of ranks, and of ranks a host."""
    part, seconds, distance = num_bytes, 0.0, 1
    while distance < num_ranks:
        part /= 2
        if distance >= model.ranks_per_host:
            link_bytes = part * model.ranks_per_host
            seconds += 2 * (model.latency_seconds + link_bytes * 8 / model.link_bits_per_second)
        distance *= 2
    return seconds


@pytest.mark.parametrize("ranks_per_host", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", [8, 16, 32])
def test_recursive_halving_and_doubling(ranks_per_host: int, num_ranks: int) -> None:
    model = replace(MODEL, num_hosts=32, ranks_per_host=ranks_per_host, averages_hosts_first=False)
    for num_bytes in (1000, 262143):
        assert model.average_seconds(num_bytes, num_ranks) == pytest.approx(
            by_messages(model, num_bytes, num_ranks)
        )


def test_other_numbers_of_ranks_go_through_a_partner() -> None:
    assert MODEL.average_seconds(1000, 6) == pytest.approx(by_messages(MODEL, 1000, 4) + 2 * (1e-3 + 1000e-6))
    assert MODEL.average_seconds(8, 8) == pytest.approx(3 * (1e-3 + 8e-6))


@given(st.integers(256 * 1024, 60_000_000), st.integers(2, 64))
def test_rings_of_segments(num_bytes: int, num_ranks: int) -> None:
    segments = [MODEL.segment_bytes] * (num_bytes // MODEL.segment_bytes)
    segments += [num_bytes % MODEL.segment_bytes] if num_bytes % MODEL.segment_bytes else []
    expected = sum(
        2 * (num_ranks - 1) * (1e-3 + 1e-6 * each / num_ranks) for each in segments if each >= 256 * 1024
    )
    expected += sum(MODEL.average_seconds(each, num_ranks) for each in segments if each < 256 * 1024)
    assert MODEL.average_seconds(num_bytes, num_ranks) == pytest.approx(expected)


def test_overheads_come_on_top_once() -> None:
    costly = replace(
        MODEL,
        average_overhead_seconds=0.1,
        average_overhead_seconds_per_doubling=0.01,
        average_seconds_per_byte=1e-7,
    )
    for num_bytes in (8, 40_000_000):
        more = costly.average_seconds(num_bytes, 8) - MODEL.average_seconds(num_bytes, 8)
        assert more == pytest.approx(0.1 + 0.03 + 1e-7 * num_bytes)
    assert costly.average_seconds(1000, 1) == 0.0


def test_one_host_needs_no_link() -> None:
    model = replace(MODEL, ranks_per_host=4, in_host_latency_seconds=1e-5, in_host_seconds_per_byte=1e-9)
    assert model.average_seconds(1_000_000, 4) == pytest.approx(1e-5 + 1e-3)
    assert model.in_host_average_seconds(1_000_000) == pytest.approx(1e-5 + 1e-3)
    assert model.host_sum_seconds(1_000_000) == pytest.approx(2e-5 + 1e-3)
    assert model.host_step_seconds(1_000_000) == pytest.approx(4e-5 + 2e-3)
    assert MODEL.in_host_average_seconds(1_000_000) == MODEL.host_step_seconds(1_000_000) == 0.0
    assert [model.host_of(rank) for rank in (0, 3, 4, 31)] == [0, 0, 1, 7]


def test_draws_lie_in_their_intervals_nineteen_times_of_twenty() -> None:
    model = replace(MODEL, relative_uncertainty=Uncertainty(step_seconds=0.2))
    random = np.random.default_rng(1)
    draws = [model.drawn(random) for _ in range(2000)]
    for item in fields(ClusterModel):
        if item.name != "step_seconds":
            assert {getattr(draw, item.name) for draw in draws} == {getattr(model, item.name)}
    logarithms = np.array([math.log(draw.step_seconds / model.step_seconds) for draw in draws])
    assert 0.93 < (np.abs(logarithms) < math.log(1.2)).mean() < 0.97


@given(st.integers(2, 40), st.integers(1, 4), st.integers(1, 100_000_000))
def test_hosts_first_is_an_average_inside_and_one_of_leaders(
    num_hosts: int, ranks_per_host: int, num_bytes: int
) -> None:
    model = replace(
        MODEL,
        num_hosts=num_hosts,
        ranks_per_host=ranks_per_host,
        in_host_latency_seconds=0.003,
        in_host_seconds_per_byte=1e-9,
        averages_hosts_first=True,
    )
    inside = 0.003 + 1e-9 * num_bytes if ranks_per_host > 1 else 0.0
    leaders = replace(MODEL, num_hosts=num_hosts)
    assert model.average_message_seconds(num_bytes, model.num_ranks) == pytest.approx(
        inside + leaders.average_message_seconds(num_bytes, num_hosts)
    )
    assert model.average_message_seconds(num_bytes, ranks_per_host) == pytest.approx(inside)
