"""The emulated cluster's arithmetic and command lines, which need neither root nor a kernel that permits anything."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushreduce.communication import emulated_host, hostfile

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from clusters import namespaces, plan, secure_shell, ssh_stand_in  # noqa: E402
from clusters.plan import Cluster, UserError  # noqa: E402


@st.composite
def clusters(draw) -> Cluster:
    num_hosts = draw(st.integers(1, plan.MAX_HOSTS))
    rate = draw(st.sampled_from(["100mbit", "2.5gbit", "500kbit", "unlimited"]))
    slow_hosts = draw(st.dictionaries(st.integers(0, num_hosts - 1), st.floats(0.1, 100), max_size=3))
    return Cluster(
        name=draw(st.from_regex("[a-z0-9][a-z0-9_]{0,30}", fullmatch=True)),
        num_hosts=num_hosts,
        rate=rate,
        network=draw(st.integers(0, plan.NUM_NETWORKS - 1)),
        ssh=draw(st.sampled_from(["sshd", "stand-in"])),
        ranks_per_host=draw(st.integers(1, plan.MAX_RANKS_PER_HOST)),
        slow_hosts=tuple(sorted(slow_hosts.items())),
        time_stretch=1.0 if rate == "unlimited" else draw(st.floats(1, 100)),
    )


CLUSTERS = clusters()


def words_after(command: list[str], word: str) -> str:
    return command[command.index(word) + 1]


@settings(deadline=None)
@given(CLUSTERS)
def test_every_host_has_one_address_and_one_link_shaped_at_both_ends(cluster: Cluster):
    commands = plan.build_commands(cluster)
    addresses = [words_after(command, "add") for command in commands if "addr" in command]
    assert addresses == [f"10.78.{cluster.network}.{index + 1}/24" for index in range(cluster.num_hosts)]
    shaped = [(words_after(c, "-n"), words_after(c, "dev")) for c in commands if c[0] == "tc"]
    ends = [(cluster.namespace(host), "eth0") for host in cluster.hosts]
    ends += [(cluster.switch, host) for host in cluster.hosts]
    assert Counter(shaped) == Counter([] if cluster.rate == "unlimited" else ends)
    assert all(len(host) <= 15 for host in cluster.hosts), "the kernel's limit for interfaces"
    for command in commands:
        made_inside = "netns" in command or command[1] == "-n"
        assert made_inside, "nothing is made in the machine's own namespace"


@settings(deadline=None)
@given(CLUSTERS)
def test_a_cluster_is_read_back_as_it_was_written(cluster: Cluster):
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_a_cluster_that_an_earlier_version_wrote_is_read():
    text = '{"name": "a", "num_hosts": 2, "rate": "1mbit", "network": 3, "ssh": "sshd"}'
    assert Cluster.from_json(text) == Cluster("a", 2, "1mbit", 3, "sshd")


@settings(deadline=None)
@given(CLUSTERS)
def test_a_stretched_link_carries_as_much_and_queues_as_much_in_as_many_times_the_time(cluster: Cluster):
    shaping = [command for command in plan.build_commands(cluster) if command[0] == "tc"]
    for command in shaping:
        bits = plan.bits_per_second(cluster.rate)
        stretched = int(words_after(command, "rate").removesuffix("bit"))
        assert stretched * cluster.time_stretch == pytest.approx(bits, rel=1e-3)
        queue_seconds = float(words_after(command, "latency").removesuffix("ms")) / 1e3
        plain = plan.shaping_command("NAMESPACE", "DEVICE", cluster.rate)
        assert words_after(command, "burst") == words_after(plain, "burst")
        plain_queue_seconds = float(words_after(plain, "latency").removesuffix("ms")) / 1e3
        assert queue_seconds == pytest.approx(plain_queue_seconds * cluster.time_stretch, rel=1e-3)


@settings(deadline=None, max_examples=10)  # each writes and reads a file a host
@given(CLUSTERS)
def test_a_host_reads_its_own_slowness_and_the_stretch(cluster: Cluster):
    assert emulated_host.HOST_FILE == plan.HOST_FILE
    factors = dict(cluster.slow_hosts)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_host, "HOST_FILE", Path(directory) / "host.json")
        assert emulated_host.this_host() == emulated_host.EmulatedHost(1.0, 1.0)
        for index, host in enumerate(cluster.hosts):
            emulated_host.HOST_FILE.write_text(plan.attributes(cluster, host))
            expected = emulated_host.EmulatedHost(factors.get(index, 1.0), cluster.time_stretch)
            assert emulated_host.this_host() == expected
        emulated_host.HOST_FILE.write_text("")
        assert emulated_host.this_host() == emulated_host.EmulatedHost(1.0, 1.0)


@settings(deadline=None)
@given(CLUSTERS, CLUSTERS)
def test_a_cluster_removes_its_own_namespaces_only(one: Cluster, other: Cluster):
    made = {cluster: [cluster.switch, *map(cluster.namespace, cluster.hosts)] for cluster in (one, other)}
    existing = [*made[one], *made[other], "n0", "default", f"{one.switch}es", f"x{one.switch}"]
    mine = made[one] if one.name != other.name else [*made[one], *made[other]]
    assert plan.own_namespaces(one.name, existing) == mine


@settings(deadline=None)
@given(CLUSTERS)
def test_both_hostfiles_name_every_host_with_its_slots(cluster: Cluster):
    for text in (plan.hostfile(cluster), plan.machinefile(cluster)):
        assert [(host.name, host.slots) for host in hostfile.parse(text, "FILE")] == [
            (name, cluster.ranks_per_host) for name in cluster.hosts
        ]
    names = dict(reversed(line.split()) for line in plan.hosts_file(cluster).splitlines())
    assert names == {"localhost": "127.0.0.1"} | {host: cluster.address(host) for host in cluster.hosts}


@pytest.mark.parametrize("rate", ["100", "mbit", "0mbit", "-1mbit", "100 mbit", "100mbps", "1e3mbit", ""])
def test_a_rate_that_tc_would_read_otherwise_is_refused(rate: str):
    with pytest.raises(UserError, match="100mbit"):
        plan.bits_per_second(rate)


@pytest.mark.parametrize(("rate", "expected"), [("100mbit", 1e8), ("2.5gbit", 2.5e9), ("64kbit", 64e3)])
def test_rates(rate: str, expected: float):
    assert plan.bits_per_second(rate) == expected


@given(st.floats(1e3, 1e12))
def test_a_rate_is_written_so_that_it_is_read_back(bits: float):
    written = plan.rate_of(bits)
    assert plan.bits_per_second(written) == pytest.approx(bits, rel=0.006)
    assert plan.rate_of(plan.bits_per_second(written)) == written


def test_slow_hosts():
    assert plan.parse_slow_hosts(["3:2.0", "0:0.5"]) == ((0, 0.5), (3, 2.0))


@pytest.mark.parametrize(
    "word", ["3", "3:", ":2", "-1:2", "1.5:2", "3:0", "3:-2", "3:nan", "3:inf", "a:b", "3:2:1"]
)
def test_what_names_no_slow_host_is_refused(word: str):
    with pytest.raises(UserError, match=r"write 3:2\.0"):
        plan.parse_slow_hosts([word])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slow_hosts": ((2, 2.0),)}, "hosts are 0 to 1"),
        ({"ranks_per_host": 0}, "--ranks-per-host"),
        ({"time_stretch": 0.5}, "--stretch"),
        ({"time_stretch": float("nan")}, "--stretch"),
        ({"time_stretch": 2.0, "rate": "unlimited"}, "cannot be stretched"),
    ],
)
def test_clusters_that_cannot_be_are_refused(fields, message: str):
    with pytest.raises(UserError, match=message):
        Cluster(**{"name": "a", "num_hosts": 2, "rate": "1mbit", "network": 0, "ssh": "sshd"} | fields)


def test_one_host_has_one_factor():
    with pytest.raises(UserError, match="already"):
        plan.parse_slow_hosts(["1:2", "1:3"])


def test_the_end_of_an_outage_waits_for_its_beginning():
    """However short it is: a host that is cut after it has ended would stay so."""
    command = plan.later_command(0.0, [["echo", "joined"]], Cluster("a", 2, "1mbit", 0, "sshd"))
    inside = command[command.index("sh") :]
    with subprocess.Popen(inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as timer:
        with pytest.raises(subprocess.TimeoutExpired):
            timer.wait(0.3)
        assert timer.communicate()[0] == "joined\n"


@pytest.mark.parametrize("name", ["", "A", "a-b", "../x", "_a", "a" * 32, "a b"])
def test_names_that_could_be_paths_or_those_of_others_are_refused(name: str):
    with pytest.raises(UserError, match="--name"):
        plan.check_name(name)


def test_no_two_clusters_get_one_network(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "ROOT_DIRECTORY", tmp_path)
    monkeypatch.setattr(namespaces, "_network_namespaces", list)
    for index in range(3):
        network = namespaces.free_network()
        assert network == index
        cluster = Cluster(f"c{index}", 2, "unlimited", network, "stand-in")
        cluster.directory.mkdir()
        (cluster.directory / "cluster.json").write_text(cluster.to_json())
    (tmp_path / "half").mkdir()
    (tmp_path / "c1" / "cluster.json").write_text("{")
    assert namespaces.free_network() == 1


def test_ssh_is_configured_within_the_cluster_alone(tmp_path):
    for text in (secure_shell.server_settings(tmp_path), secure_shell.client_settings(tmp_path)):
        assert "~" not in text
        paths = [word for word in text.split() if word.startswith("/")]
        assert {path for path in paths if not path.startswith(str(tmp_path))} <= {"/dev/null", "/bin/sh"}


@pytest.mark.parametrize(
    ("line", "host", "command"),
    [
        ("node1", "node1", ""),
        ("node1 hostname -f", "node1", "hostname -f"),
        ("-x node1 orted --x -n", "node1", "orted --x -n"),
        ("-o BatchMode=yes -oPort=22 -p 22 root@node1 ls", "node1", "ls"),
        ("node1 -p 22 -q ls -l", "node1", "ls -l"),
        ("-nTp22 node1 a", "node1", "a"),
        ("-l root -- node1 -x", "node1", "-x"),
        ("-i key node1 a -- b", "node1", "a -- b"),
    ],
)
def test_the_stand_in_reads_ssh_command_lines(line: str, host: str, command: str):
    request = ssh_stand_in.parse(line.split())
    assert (request.host, request.command) == (host, command)
    assert request.reads_input == ("-n" not in line.split(host)[0])


@pytest.mark.parametrize("line", ["", "-x", "-p 22", "-& node1", "--foo node1"])
def test_the_stand_in_refuses_what_ssh_refuses(line: str):
    with pytest.raises(ValueError, match=r"host|option"):
        ssh_stand_in.parse(line.split())


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "sideways",
        "up --hosts x",
        "up --rate",
        "up --nam a",
        "down --rate 1mbit",
        "run --host -- ls",
        "status x",
        "up --stretch x",
        "up --ranks-per-host 1.5",
        "change",
        "change --rate 1mbit --outage-seconds 1",
        "change --rate 1mbit --host node1",
    ],
)
def test_bad_arguments_are_one_line_and_code_2(arguments: str):
    command = [sys.executable, str(ROOT / "scripts" / "emulated_cluster"), *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("action", ["up", "run -- true", "change --rate 1mbit", "status", "down"])
def test_without_root_it_says_so(action: str):
    program = f"import os, runpy, sys; os.geteuid = lambda: 65534; sys.argv = ['x', *{action.split()}]; "
    program += f"runpy.run_path({str(ROOT / 'scripts' / 'emulated_cluster')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "need root" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
