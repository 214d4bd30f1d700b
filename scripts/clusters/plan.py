"""What an emulated cluster is made of: names, addresses, the texts of its files and the commands that build it.

Pure arithmetic on names and numbers: nothing is run and nothing is written here (`namespaces.py` does that).

A cluster NAME is one network namespace a host and one more, the switch, which holds the bridge and its ports. So
nothing of it is in the machine's own namespace: no link, no address, no firewall that could drop its packets.
"""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT_DIRECTORY = Path("/run/pushreduce-cluster")
"""Where every cluster of this machine has its directory."""
DEFAULT_NAME = "default"
INTERFACE = "eth0"
"""In every host, since horovodrun wants one name on all."""
MAX_HOSTS = 250
NUM_NETWORKS = 256
MARK = "PUSHREDUCE_CLUSTER_RUN"
"""Environment variable by which the processes of one `run` know each other again, on whichever host."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,30}")
_RATE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>kbit|mbit|gbit)")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_MIN_BURST_BYTES = 64 * 1024
_BURST_SECONDS = 0.002
"""Of the rate: a bucket that fills in less than the kernel's clock ticks would never let the rate be reached."""
_QUEUE_SECONDS = 0.1
"""What waits longer for its turn is dropped, as a switch would; TCP then sends more slowly."""


class UserError(ValueError):
    """A user's mistake, in one line that says what is wrong and what to do."""


@dataclass(frozen=True)
class Cluster:
    """All that is fixed when a cluster is built."""

    name: str
    num_hosts: int
    rate: str
    """Of every link, each way, as tc writes it (100mbit); `unlimited`: not shaped."""
    network: int
    """Third number of its addresses, 10.78.N.x: no two clusters have the same."""
    ssh: str
    """`sshd`: a real one in every host; `stand-in`: a program in its place enters the other host's namespaces."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 1 <= self.num_hosts <= MAX_HOSTS:
            raise UserError(f"--hosts {self.num_hosts}: give a number from 1 to {MAX_HOSTS}")
        if self.rate != "unlimited":
            bits_per_second(self.rate)
        assert 0 <= self.network < NUM_NETWORKS
        assert self.ssh in ("sshd", "stand-in")

    @property
    def directory(self) -> Path:
        """Everything that the cluster has on disk."""
        return ROOT_DIRECTORY / self.name

    @property
    def programs(self) -> Path:
        """What comes first on PATH inside the hosts."""
        return self.directory / "bin"

    @property
    def hosts(self) -> list[str]:
        """Their names, which are also those of the switch's ports: at most 15 characters."""
        return [f"node{index}" for index in range(self.num_hosts)]

    def address(self, host: str) -> str:
        """IPv4 address of a host."""
        return str(ipaddress.IPv4Address("10.78.0.1") + 256 * self.network + self.hosts.index(host))

    def namespace(self, host: str) -> str:
        """Name of the network namespace of a host."""
        return f"{namespace_prefix(self.name)}{host}"

    @property
    def switch(self) -> str:
        """Name of the network namespace with the bridge."""
        return f"{namespace_prefix(self.name)}switch"

    def to_json(self) -> str:
        """See `from_json`."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Cluster:
        """The inverse of `to_json`."""
        return Cluster(**json.loads(text))


def check_name(name: str) -> None:
    """Refuses what is no name of a cluster."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"--name {name!r}: use up to 31 lower-case letters, digits and underscores, the first no underscore"
        )


def namespace_prefix(name: str) -> str:
    """What the names of a cluster's network namespaces begin with."""
    return f"pushreduce-{name}-"


def own_namespaces(name: str, existing: list[str]) -> list[str]:
    """Those of the network namespaces `existing` that are the cluster's, whatever its size was."""
    own = re.compile(re.escape(namespace_prefix(name)) + r"(?:node[0-9]+|switch)")
    return [namespace for namespace in existing if own.fullmatch(namespace)]


def bits_per_second(rate: str) -> float:
    """`100mbit` -> 1e8.

    Raises:
        UserError: not of this form, or zero.
    """
    match = _RATE.fullmatch(rate)
    if match is None or float(match["number"]) == 0:
        raise UserError(f"--rate {rate}: write 100mbit, 2.5gbit, 500kbit or unlimited")
    return float(match["number"]) * _UNITS[match["unit"]]


def shaping_command(namespace: str, device: str, rate: str) -> list[str]:
    """Shapes what `device` of a network namespace sends out."""
    burst = max(_MIN_BURST_BYTES, round(bits_per_second(rate) / 8 * _BURST_SECONDS))
    shaping = ["tbf", "rate", rate, "burst", f"{burst}b", "latency", f"{_QUEUE_SECONDS * 1e3:g}ms"]
    return ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shaping]


def build_commands(cluster: Cluster) -> list[list[str]]:
    """The commands that make the network, in order. A link is shaped at both ends: up by the host, down by the port."""
    switch = cluster.switch
    commands = [
        ["ip", "netns", "add", switch],
        ["ip", "-n", switch, "link", "add", "bridge", "type", "bridge"],
        ["ip", "-n", switch, "link", "set", "bridge", "up"],
    ]
    for host in cluster.hosts:
        namespace = cluster.namespace(host)
        veth = ["type", "veth", "peer", "name", host, "netns", switch]
        commands += [
            ["ip", "netns", "add", namespace],
            ["ip", "link", "add", INTERFACE, "netns", namespace, *veth],
            ["ip", "-n", switch, "link", "set", host, "master", "bridge", "up"],
            ["ip", "-n", namespace, "link", "set", "lo", "up"],
            ["ip", "-n", namespace, "addr", "add", f"{cluster.address(host)}/24", "dev", INTERFACE],
            ["ip", "-n", namespace, "link", "set", INTERFACE, "up"],
        ]
        if cluster.rate != "unlimited":
            commands += [
                shaping_command(namespace, INTERFACE, cluster.rate),
                shaping_command(switch, host, cluster.rate),
            ]
    return commands


# Many systems let nothing below /run be executed.
_HOLDER = """
hostname "$1"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$2" /etc/hosts
mount --bind "$3" "$3"
mount -o remount,bind,exec "$3"
echo ready
exec sleep infinity
"""


def holder_command(cluster: Cluster, host: str) -> list[str]:
    """A process that keeps a host's hostname, /dev/shm, /etc/hosts and IPC alive; says `ready` when all are there."""
    inside = ["sh", "-ec", _HOLDER, "holder", host, str(cluster.directory / "hosts"), str(cluster.programs)]
    # `ip netns exec` enters a mount namespace of its own; what is mounted there is seen by nobody else.
    return ["ip", "netns", "exec", cluster.namespace(host), "unshare", "--uts", "--ipc", *inside]


def enter_command(holder_pid: int, command: list[str], directory: str) -> list[str]:
    """Runs `command` in the namespaces of a host, in the working directory `directory`."""
    enter = ["nsenter", f"--target={holder_pid}", "--net", "--uts", "--ipc", "--mount"]
    # nsenter's own option for the directory opens it before it enters.
    inside = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", directory, *command]
    return [*enter, "--", *inside]


def hosts_file(cluster: Cluster) -> str:
    """/etc/hosts inside the hosts."""
    lines = ["127.0.0.1 localhost"] + [f"{cluster.address(host)} {host}" for host in cluster.hosts]
    return "\n".join(lines) + "\n"


def hostfile(cluster: Cluster) -> str:
    """For horovodrun and Open MPI, one slot a host."""
    return "".join(f"{host} slots=1\n" for host in cluster.hosts)


def machinefile(cluster: Cluster) -> str:
    """For MPICH's mpirun, one slot a host."""
    return "".join(f"{host}:1\n" for host in cluster.hosts)
