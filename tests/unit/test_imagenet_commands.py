"""The ImageNet commands of experiments/lasgd_paper are understood, and are the paper's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pushreduce.command_line import parse
from pushreduce.communication import hostfile
from pushreduce.settings import Settings
from pushreduce.training.schedule import LearningRate

ROOT = Path(__file__).parents[2]
HERE = ROOT / "experiments" / "lasgd_paper" / "imagenet"
NUM_TRAIN_IMAGES = 1_281_167


def commands(kind: str) -> list[list[str]]:
    ((block,),) = [
        re.findall(
            rf"<!-- parsed: {kind} -->\n```bash\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL
        )
    ]
    return [shlex.split(line) for line in block.splitlines()]


def settings_of(command: list[str]) -> tuple[Settings, int]:
    """What a command asks for, and how many ranks."""
    return parse(command[command.index("src/train.py") + 1 :]), int(command[command.index("-np") + 1])


@pytest.mark.parametrize("command", commands("process") + commands("host"), ids=lambda command: command[-1])
def test_a_command_is_the_papers(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings, num_ranks = settings_of(command)
    hosts = hostfile.parse(Path(command[command.index("--hostfile") + 1]).read_text(), "hostfile")
    num_hosts = num_ranks // 4
    filled = hosts[:num_hosts]  # one after the other
    assert len(filled) == num_hosts
    assert [host.slots for host in filled] == [4] * num_hosts
    assert num_ranks == 4 * num_hosts
    assert command[-1].endswith(f"-{num_hosts}")

    batch_size = settings.data.batch_size_per_rank
    assert batch_size == 64
    assert settings.data.model == "resnet50"
    assert settings.data.dataset == "imagefolder"
    assert settings.training.epochs == 90
    optimizer = settings.optimizer
    assert (optimizer.momentum, optimizer.nesterov, optimizer.weight_decay) == (0.9, True, 1e-4)
    rate = LearningRate(
        optimizer,
        global_batch_size=num_ranks * batch_size,
        num_train_samples=NUM_TRAIN_IMAGES,
        epochs=settings.training.epochs,
    )
    peak = 0.1 * num_hosts  # section 5.2
    for epoch, expected in {
        0: 0.1,
        5: peak,
        29.9: peak,
        30: peak / 10,
        60: peak / 100,
        80: peak / 1000,
    }.items():
        assert rate(round(epoch * NUM_TRAIN_IMAGES + 0.5)) == pytest.approx(expected, rel=1e-5)


def test_every_method_and_size_is_there() -> None:
    of = {}
    for command in commands("process") + commands("host"):
        settings, num_ranks = settings_of(command)
        details = {
            "allreduce": (),
            "lasgd": (settings.lasgd.tau_max,),
            "sgp": (settings.sgp.tau, settings.sgp.num_peers),
        }
        of.setdefault((settings.algorithm, settings.worker, *details[settings.algorithm]), []).append(
            num_ranks
        )
    methods = [("allreduce", "process"), ("lasgd", "process", 1), ("lasgd", "host", 1), ("sgp", "host", 1, 1)]
    assert of == {method: [32, 64, 128] for method in methods}
