"""Clusters come and go, also when their programs are killed, and leave nothing on the machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from emulated import Emulated, processes_in, wait_until

# In each host one that no signal but SIGKILL ends and that has lost its environment, left behind by its parent.
STUBBORN = "env -i setsid sh -c 'trap : TERM; while :; do sleep 1000; done' >/dev/null 2>&1 &"


def links() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def mounts() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if "pushreduce" in line]


def assert_nothing_is_left(cluster: Emulated, inodes: set[int]) -> None:
    assert not cluster.namespaces()
    assert not processes_in(inodes), "and so no namespace either: they live as long as their processes"
    assert not cluster.directory.exists()
    assert not [line for line in mounts() if cluster.name in line]


def inodes(cluster: Emulated) -> set[int]:
    return {path.stat().st_ino for path in cluster.namespaces()}


def sleeps(pid: int) -> bool:
    """Whether the process is `sleep 1000`, and no shell on its way there, which may swallow a signal."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x001000\x00"
    except OSError:
        return False


def test_down_leaves_nothing(own):
    before = (links(), Path("/etc/hosts").read_bytes(), Path("/etc/hosts").stat().st_mtime)
    ssh = Path.home() / ".ssh"
    keys = sorted(ssh.iterdir()) if ssh.exists() else None
    own.up("--hosts", "2")
    used = inodes(own)
    assert len(used) == 3, "two hosts and the switch"
    standing = own.pids()
    own.output("sh", "-c", f'{STUBBORN} ssh node1 "{STUBBORN}"')
    assert len(own.pids() - standing) >= 2, "what gave up its mark stays until `down`"
    assert own.call("down").returncode == 0
    assert_nothing_is_left(own, used)
    assert (links(), Path("/etc/hosts").read_bytes(), Path("/etc/hosts").stat().st_mtime) == before
    assert (sorted(ssh.iterdir()) if ssh.exists() else None) == keys
    again = own.call("down")
    assert again.returncode == 2
    assert len(again.stderr.splitlines()) == 1


@pytest.mark.parametrize("moment", ["cluster.json", "holders/node1", "bin/ssh"])
@pytest.mark.parametrize("repair", ["down", "up"])
def test_a_killed_up_is_cleaned_away(own, moment, repair):
    while True:
        process = own.start("up", "--hosts", "3")
        wait_until((own.directory / moment).exists)
        process.kill()
        process.communicate()
        if not (own.directory / "ready").exists():
            break
        own.remove()  # it was faster than this test
    used = inodes(own)
    if repair == "up":
        own.up("--hosts", "2")
        assert own.output("ssh", "node1", "hostname") == "node1"
        assert len(own.namespaces()) == 3
        used |= inodes(own)
    assert own.call("down").returncode == 0
    assert_nothing_is_left(own, used)


def test_an_up_that_is_interrupted_cleans_up_itself(own):
    process = own.start("up", "--hosts", "8")
    wait_until((own.directory / "cluster.json").exists)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert_nothing_is_left(own, set())


def test_a_cluster_with_a_dead_host_is_refused_and_replaced(own):
    own.up("--hosts", "2")
    os.kill(own.holder("node1"), signal.SIGKILL)
    wait_until(lambda: own.holder("node1") not in own.pids())
    refused = own.run("true", host=1)
    assert refused.returncode == 2
    assert "node1" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    own.up("--hosts", "2")
    assert own.output("hostname", host=1) == "node1"
    twice = own.call("up")
    assert twice.returncode == 2
    assert "is up" in twice.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, None], ids=["SIGINT", "SIGTERM", "own end"]
)
def test_what_a_run_started_ends_with_it(own, number):
    own.up("--hosts", "2")
    standing = own.pids()
    command = "ssh node1 sleep 1000 & ssh node1 sleep 1000 & "
    process = own.start("run", "--", "sh", "-c", command + ("exit 3" if number is None else "sleep 1000"))
    if number is not None:
        wait_until(lambda: sum(map(sleeps, own.pids())) == 3)
        process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (3 if number is None else 128 + number)
    assert own.pids() == standing


def test_a_killed_run_takes_its_command_along(own):
    own.up("--hosts", "1")
    standing = own.pids()
    process = own.start("run", "--", "sleep", "1000")
    wait_until(lambda: any(map(sleeps, own.pids())))
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: own.pids() == standing)


def test_two_clusters_stand_side_by_side(own, cluster):
    own.up("--hosts", "2", "--rate", "unlimited")
    addresses = [each.output("getent", "hosts", "node1").split()[0] for each in (own, cluster)]
    assert addresses[0] != addresses[1]
    unreachable = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=10)"
    refused = own.run("python", "-c", unreachable, addresses[1])
    assert "Network is unreachable" in refused.stderr, "they share no network"
    assert own.call("down").returncode == 0
    assert cluster.output("ssh", "node1", "hostname") == "node1"
