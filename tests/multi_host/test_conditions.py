"""Hosts that are slow, hold several ranks or lose their network for a while, and time that is stretched.

Of times only lower bounds are asserted, where the program sleeps: a loaded machine makes a step longer, never shorter.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from emulated import ROOT, TRAIN, wait_until
from test_launchers import mpirun_hosts

from pushreduce.training.metrics import read_records

STEP_SECONDS = 0.1
SLOWNESS, STRETCH = 2.5, 1.5
OUTAGE_SECONDS = 3.0
SENDS = "import socket, sys, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
SENDS += "while True: s.sendto(b'x', (sys.argv[1], 9)); time.sleep(0.01)"


def status(cluster) -> str:
    """The cluster's part of what `status` says."""
    command = [str(ROOT / "scripts" / "emulated_cluster"), "status"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(part for part in done.stdout.split("\ncluster ") if cluster.name in part)


def is_cut(cluster, host: str) -> bool:
    """Whether the kernel has this host's port outside the bridge."""
    command = ["ip", "-j", "-n", f"pushreduce-{cluster.name}-switch", "link", "show", host]
    return (
        "master"
        not in json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)[0]
    )


def num_datagrams(cluster, host: str) -> int:
    """UDP datagrams that have reached a host on which nobody waits for them."""
    names, values = (
        line.split()
        for line in Path(f"/proc/{cluster.holder(host)}/net/snmp").read_text().splitlines()
        if line.startswith("Udp:")
    )
    return int(values[names.index("NoPorts")])


def steps(run: Path, rank: int) -> list[dict]:
    """The records of a rank's steps."""
    return [record for record in read_records(run / f"metrics.rank{rank}.jsonl") if record["kind"] == "step"]


def test_training_survives_a_slower_network_and_an_outage(own, tmp_path):
    """On hosts of two ranks, the second host slow, in stretched time; the oracle finds nothing lost."""
    own.up(
        *f"--hosts 2 --ranks-per-host 2 --rate 100mbit --slow-host 1:{SLOWNESS} --stretch {STRETCH}".split()
    )
    said = status(own)
    assert "2 ranks each" in said
    assert f"node1 {SLOWNESS:g} times" in said
    assert f"stretched by {STRETCH:g}" in said
    training = f"--epochs 1 --trace --dtype float64 --run-dir run --emulated-step-seconds {STEP_SECONDS}"
    launch = ["horovodrun", "-np", "4", "--hostfile", f"{own.directory}/hostfile"]
    run, log = tmp_path / "run", tmp_path / "run" / "log.txt"
    process = own.start("run", "--", *launch, "python", str(TRAIN), *training.split(), cwd=tmp_path)
    wait_until(lambda: process.poll() is not None or (log.exists() and "watch it" in log.read_text()))
    cut = own.call("change", "--outage-seconds", f"{OUTAGE_SECONDS / STRETCH:g}", "--host", "0")
    assert cut.returncode == 0, cut.stderr
    slower = own.call("change", "--rate", "20mbit", "--host", "1")
    assert slower.returncode == 0, slower.stderr
    assert process.poll() is None, "it trains while its network changes"
    said = status(own)
    assert "changed links: node1 20mbit" in said
    assert "cut off" not in said
    assert own.call("change", "--rate", "100mbit").returncode == 0
    assert "changed" not in status(own)
    done = own.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"divide them by {STRETCH:g}" in log.read_text()

    environment = json.loads((run / "environment.json").read_text())
    assert environment["time_stretch"] == STRETCH
    assert [(host["ranks"], host["slowness"]) for host in environment["hosts"]] == [
        ([0, 1], 1.0),
        ([2, 3], SLOWNESS),
    ]
    assert json.loads((run / "summary.json").read_text())["time_stretch"] == STRETCH
    for rank, factor in enumerate([1.0, 1.0, SLOWNESS, SLOWNESS]):
        shortest = min(record["compute_seconds"] for record in steps(run, rank))
        assert shortest >= 0.99 * STEP_SECONDS * STRETCH * factor
    longest = max(record["blocked_seconds"] for rank in range(4) for record in steps(run, rank))
    assert longest > OUTAGE_SECONDS / 2, "the outage was felt"

    replay = [sys.executable, str(ROOT / "scripts" / "replay"), str(run)]
    replayed = subprocess.run(replay, capture_output=True, text=True)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_mpirun_fills_the_slots_of_every_host(own):
    own.up("--hosts", "2", "--ranks-per-host", "2")
    hosts = mpirun_hosts(str(own.directory))
    said = own.output("mpirun", "-np", "4", *hosts, "hostname")
    assert Counter(said.split()) == {"node0": 2, "node1": 2}


def test_an_outage_lets_nothing_through_and_ends_with_its_command_or_without_it(own):
    own.up("--hosts", "2", "--rate", "1mbit")
    address = own.output("getent", "hosts", "node1").split()[0]
    sender = own.start("run", "--", "python", "-c", SENDS, address)
    wait_until(lambda: num_datagrams(own, "node1") > 10)
    for number, seconds in ((signal.SIGTERM, 1000), (signal.SIGKILL, 3)):
        cut = own.start("change", "--outage-seconds", str(seconds), "--host", "1")
        wait_until(lambda: is_cut(own, "node1"))
        before = num_datagrams(own, "node1")
        if number == signal.SIGTERM:
            assert "cut off: node1" in status(own)
            again = own.call("change", "--outage-seconds", "1")
            assert again.returncode == 2
            assert "cut off already" in again.stderr
            assert num_datagrams(own, "node1") == before
        cut.send_signal(number)
        cut.communicate(timeout=60)
        if number == signal.SIGTERM:
            assert cut.returncode == 128 + signal.SIGTERM
            assert not is_cut(own, "node1")
        wait_until(lambda: not is_cut(own, "node1"))
        wait_until(lambda before=before: num_datagrams(own, "node1") > before)
    sender.send_signal(signal.SIGTERM)
    sender.communicate(timeout=60)


def test_a_cluster_goes_down_also_during_an_outage(own):
    own.up("--hosts", "2")
    cut = own.start("change", "--outage-seconds", "1000")
    wait_until(lambda: is_cut(own, "node1"))
    assert own.call("down").returncode == 0
    _, err = cut.communicate(timeout=60)
    assert cut.returncode == 2
    assert "taken down during the outage" in err
    assert not own.namespaces()
    for words in (["--rate", "1mbit"], ["--outage-seconds", "1"]):
        gone = own.call("change", *words)
        assert gone.returncode == 2
        assert len(gone.stderr.splitlines()) == 1


def test_links_can_be_freed_and_shaped_again(own):
    own.up("--hosts", "2", "--rate", "unlimited")
    for rate, host in (("2.5gbit", "0"), ("unlimited", "0"), ("unlimited", "1")):
        done = own.call("change", "--rate", rate, "--host", host)
        assert done.returncode == 0, done.stderr
        assert ("changed links: node0 2.5gbit" in status(own)) == (rate == "2.5gbit")
    refused = own.call("change", "--rate", "1mbit", "--host", "2")
    assert refused.returncode == 2
    assert "hosts 0 to 1" in refused.stderr
