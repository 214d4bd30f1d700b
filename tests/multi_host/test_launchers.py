"""A plain mpirun and a plain horovodrun over several hosts, and what they rely on: names, ssh and the environment."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import NUM_HOSTS
from emulated import ROOT, TRAIN, environment

from pushreduce.communication.mpi_settings import launcher_is_open_mpi

HOSTS = [f"node{index}" for index in range(NUM_HOSTS)]
TRAINING = "--epochs 1 --checkpoint-every-epochs 1 --trace --dtype float64 --run-dir run".split()


@cache
def mpirun_hosts(directory: str) -> list[str]:
    """How this environment's mpirun is given its hosts."""
    version = subprocess.run(
        ["mpirun", "--version"], env=environment(), capture_output=True, text=True
    ).stdout
    if launcher_is_open_mpi(version):
        # By slot: the tests' policy, which permits more ranks than cores, would put all on the first host.
        return ["--map-by", "slot", "--hostfile", f"{directory}/hostfile"]
    return ["-machinefile", f"{directory}/machinefile"]


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("mpirun", "--algorithm lasgd"),
        ("horovodrun", "--algorithm allreduce"),
        ("mpirun", "--algorithm sgp --tau 1 --slot-patience-seconds 0"),
        ("horovodrun", "--algorithm sgp --tau 1 --num-peers 2"),
    ],
)
def test_training_over_all_hosts_is_what_the_oracle_says(cluster, tmp_path, launcher, options):
    hosts = ["--hostfile", f"{cluster.directory}/hostfile"]
    if launcher == "mpirun":
        hosts = mpirun_hosts(str(cluster.directory))
    command = [
        launcher,
        "-np",
        str(NUM_HOSTS),
        *hosts,
        "python",
        str(TRAIN),
        *TRAINING,
        *options.split(),
    ]
    machines = train_and_replay(cluster, command, tmp_path)
    assert [machine["name"] for machine in machines] == HOSTS
    assert [machine["ranks"] for machine in machines] == [[rank] for rank in range(NUM_HOSTS)]


def test_two_hosts_as_workers_are_what_the_oracle_says(cluster, tmp_path):
    """With gradients averaged over the leaders by Horovod first, then messages through the leaders' windows."""
    command = ["horovodrun", "-np", "4", "-H", "node0:2,node1:2", "python", str(TRAIN), *TRAINING]
    options = "--worker host --algorithm sgp --tau 1 --average-rounds 2"
    machines = train_and_replay(cluster, [*command, *options.split()], tmp_path)
    assert [machine["ranks"] for machine in machines] == [[0, 1], [2, 3]]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["num_ranks"], summary["num_workers"]) == (4, 2)


def train_and_replay(cluster, command: list[str], cwd: Path) -> list[dict]:
    """The hosts in the run's environment.json, once the oracle has found the run to be right."""
    process = cluster.start("run", "--", *command, cwd=cwd)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    replay = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "replay"), str(cwd / "run")],
        capture_output=True,
        text=True,
    )
    assert replay.returncode == 0, replay.stdout + replay.stderr
    return json.loads((cwd / "run" / "environment.json").read_text())["hosts"]


def test_every_host_has_its_own_name_shared_memory_and_interface(cluster):
    cluster.output("touch", "/dev/shm/only_here", host=0)
    for index, host in enumerate(HOSTS):
        said = cluster.output(
            "sh", "-c", "hostname; ls /dev/shm; ls /sys/class/net; getent hosts node1", host=index
        )
        address = json.loads((cluster.directory / "cluster.json").read_text())["network"]
        shared_memory = ["only_here"] if index == 0 else []
        assert said.split() == [host, *shared_memory, "eth0", "lo", f"10.78.{address}.2", "node1"]


def test_ssh_reaches_every_host_with_the_environment(cluster):
    for host in HOSTS:
        command = "hostname; command -v python; echo $OMP_NUM_THREADS $0; cat; exit 7"
        script = f"echo input | ssh -o BatchMode=yes {host} '{command}'; echo $?; ssh -n {host} -T cat"
        said = cluster.output("sh", "-c", script, host=NUM_HOSTS - 1).split()
        assert said[:3] == [host, f"{sys.prefix}/bin/python", "1"]
        assert said[-2:] == ["input", "7"]


def test_run_hands_on_the_working_directory_and_the_exit_code(cluster, tmp_path):
    process = cluster.start("run", "--", "sh", "-c", "pwd; exit 5", cwd=tmp_path)
    assert process.communicate(timeout=60)[0].strip() == str(tmp_path)
    assert process.returncode == 5
