"""What a run says about emulated hosts: nothing on real ones, and a warning where their attributes have no effect."""

from __future__ import annotations

from pushreduce.settings import EmulationSettings, Settings
from pushreduce.training.console import about_emulated_hosts


def said(slowness: list[float], time_stretch: float = 1.0, step_seconds: float = 0.1) -> str:
    environment = [
        {
            "time_stretch": time_stretch,
            "host": {"name": f"node{index // 2}", "slowness": slowness[index // 2]},
        }
        for index in range(2 * len(slowness))  # two ranks a host
    ]
    settings = Settings(emulation=EmulationSettings(emulated_step_seconds=step_seconds))
    lines = about_emulated_hosts(settings, environment)
    assert len(lines) <= 1
    assert all("\n" not in line for line in lines)
    return "".join(lines)


def test_of_hosts_that_are_not_emulated_it_says_nothing():
    assert said([1.0, 1.0]) == ""
    assert said([1.0, 1.0], step_seconds=0.0) == ""


def test_every_slow_host_is_named_once():
    line = said([1.0, 2.5, 0.5])
    assert line.count("node1 computes 2.5 times as long") == 1
    assert line.count("node2 computes 0.5 times as long") == 1
    assert "node0" not in line
    assert "warning" not in line
    assert "stretched" not in line


def test_stretched_time_is_said_with_what_to_divide_by():
    assert "divide them by 4" in said([1.0, 1.0], time_stretch=4.0)


def test_it_warns_where_computation_takes_no_time_that_could_be_made_longer():
    for line in (said([1.0, 2.0], step_seconds=0.0), said([1.0, 1.0], time_stretch=4.0, step_seconds=0.0)):
        assert line.startswith("warning: ")
        assert "--emulated-step-seconds" in line
    assert "divide" not in line
