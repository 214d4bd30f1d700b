"""Which GPU a rank takes, on machines that are made up: what each of its processes sees of the GPUs there are."""

from __future__ import annotations

from types import SimpleNamespace

import greenlet
import pytest
import torch

from pushreduce.communication.agreement import AgreedError
from pushreduce.communication.simulated import SimulatedCluster
from pushreduce.main import choose_device


def choose(monkeypatch, wanted: str, visible: list[list[str]], ranks_per_host: int) -> list[str]:
    """The device of every rank, or what is wrong; `visible` has the GPUs that each rank sees."""
    seen: dict[greenlet.greenlet, list[str]] = {}
    chosen: dict[greenlet.greenlet, int] = {}

    def own() -> list[str]:
        return seen[greenlet.getcurrent()]

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=own()[index])

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(own()))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: chosen.update({greenlet.getcurrent(): index}))

    def body(communicator) -> str:
        seen[greenlet.getcurrent()] = visible[communicator.rank]
        try:
            device = choose_device(wanted, communicator)
        except AgreedError as error:
            return str(error)
        assert device.index == chosen.get(greenlet.getcurrent())
        return str(device)

    return SimulatedCluster(len(visible), ranks_per_host=ranks_per_host).run(body)


TWO_HOSTS = [["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]]


@pytest.mark.parametrize(
    ("visible", "ranks_per_host", "expected"),
    [
        (TWO_HOSTS, 2, ["cuda:0", "cuda:1"] * 2),
        ([["a"], ["b"], ["c"], ["d"]], 2, ["cuda:0"] * 4),  # as Slurm's --gpus-per-task shows them
        ([["a", "b"]] * 2 + [["c", "d"]] * 2, 4, ["cuda:0", "cuda:1"] * 2),
        ([["a", "b"]] * 3, 3, ["cpu"] * 3),
        ([["a"], ["a"]], 2, ["cpu"] * 2),
        ([["a"], []], 1, ["cpu"] * 2),
    ],
)
def test_a_gpu_each_or_none(visible, ranks_per_host, expected, monkeypatch):
    assert choose(monkeypatch, "auto", visible, ranks_per_host) == expected
    assert choose(monkeypatch, "cpu", visible, ranks_per_host) == ["cpu"] * len(visible)
    if expected[0] != "cpu":
        assert choose(monkeypatch, "cuda", visible, ranks_per_host) == expected
    else:
        refusals = choose(monkeypatch, "cuda", visible, ranks_per_host)
        assert all(f"no GPU for rank {len(visible) - 1}" in refusal for refusal in refusals)
