"""What an emulated cluster is made of: names, addresses, the texts of its files and the commands that build it.

Pure arithmetic on names and numbers: nothing is run and nothing is written here (`namespaces.py` does that).

A cluster NAME is one network namespace a host and one more, the switch, which holds the bridge and its ports. So
nothing of it is in the machine's own namespace: no link, no address, no firewall that could drop its packets.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT_DIRECTORY = Path("/run/pushreduce-cluster")
"""Where every cluster of this machine has its directory."""
HOST_FILE = Path("/run/pushreduce-host.json")
"""Inside a host: what it is like (`host_file`), for programs that imitate its speed; an empty file outside."""
DEFAULT_NAME = "default"
INTERFACE = "eth0"
"""In every host, since horovodrun wants one name on all."""
BRIDGE = "bridge"
MAX_HOSTS = 250
MAX_RANKS_PER_HOST = 64
MAX_SLOWNESS = 1000.0
MAX_STRETCH = 1000.0
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
    ranks_per_host: int = 1
    """Slots of every host in the hostfiles."""
    slow_hosts: tuple[tuple[int, float], ...] = ()
    """Numbers of hosts that compute more slowly than the others, ascending, each with its factor."""
    time_stretch: float = 1.0
    """All that can be slowed down takes so many times as long: the links, and what is computed by the clock."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 1 <= self.num_hosts <= MAX_HOSTS:
            raise UserError(f"--hosts {self.num_hosts}: give a number from 1 to {MAX_HOSTS}")
        if not 1 <= self.ranks_per_host <= MAX_RANKS_PER_HOST:
            raise UserError(
                f"--ranks-per-host {self.ranks_per_host}: give a number from 1 to {MAX_RANKS_PER_HOST}"
            )
        if not 1 <= self.time_stretch <= MAX_STRETCH:
            raise UserError(f"--stretch {self.time_stretch:g}: give a number from 1 to {MAX_STRETCH:g}")
        self.check_rate(self.rate)
        for number, _ in self.slow_hosts:
            if number >= self.num_hosts:
                raise UserError(f"--slow-host {number}: the hosts are 0 to {self.num_hosts - 1}")
        assert 0 <= self.network < NUM_NETWORKS
        assert self.ssh in ("sshd", "stand-in")

    def check_rate(self, rate: str) -> None:
        """Refuses what is no rate, or none that this cluster's links can have."""
        if rate != "unlimited":
            bits_per_second(rate)
        elif self.time_stretch != 1:
            raise UserError("--rate unlimited cannot be stretched: give a rate, or leave --stretch out")

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

    def slowness(self, host: str) -> float:
        """How many times as long as on the others a computation takes on a host, without the stretch."""
        return dict(self.slow_hosts).get(self.hosts.index(host), 1.0)

    def host_file(self, host: str) -> Path:
        """What that host sees as HOST_FILE."""
        return self.directory / "attributes" / host

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
        fields = json.loads(text)
        slow_hosts = tuple((number, factor) for number, factor in fields.pop("slow_hosts", ()))
        return Cluster(**fields, slow_hosts=slow_hosts)


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


def rate_of(bits: float) -> str:
    """The inverse of `bits_per_second` to three digits (the kernel rounds, too), in the largest fitting unit."""
    bits = float(f"{bits:.3g}")
    unit = next((unit for unit in ("gbit", "mbit") if bits >= _UNITS[unit]), "kbit")
    return f"{bits / _UNITS[unit]:g}{unit}"


def parse_slow_hosts(words: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """`["3:2.0"]` -> ((3, 2.0),).

    Raises:
        UserError: not of this form, a factor out of range, or a host named twice.
    """
    factors: dict[int, float] = {}
    for word in words:
        number, _, factor = word.partition(":")
        try:
            host, slowness = int(number), float(factor)
        except ValueError:
            host, slowness = -1, math.nan
        if host < 0 or not 0 < slowness <= MAX_SLOWNESS:
            raise UserError(
                f"--slow-host {word}: write 3:2.0 for host 3 to take twice as long (up to {MAX_SLOWNESS:g})"
            )
        if host in factors:
            raise UserError(f"--slow-host {word}: host {host} has a factor already; give one")
        factors[host] = slowness
    return tuple(sorted(factors.items()))


def shaping_command(namespace: str, device: str, rate: str, time_stretch: float = 1.0) -> list[str]:
    """Shapes what `device` of a network namespace sends out. Repeated with another rate, it keeps what is queued.

    Args:
        rate: as it would be if time were not stretched.
    """
    bits = bits_per_second(rate)
    burst = max(_MIN_BURST_BYTES, round(bits / 8 * _BURST_SECONDS))
    shaping = ["tbf", "rate", f"{round(bits / time_stretch)}bit", "burst", f"{burst}b"]
    queue = ["latency", f"{_QUEUE_SECONDS * time_stretch * 1e3:g}ms"]
    return ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shaping, *queue]


def rate_commands(cluster: Cluster, host: str, rate: str, shaped: bool) -> list[list[str]]:
    """The commands that give a host's link another rate, at both ends.

    Args:
        shaped: whether it has one now.
    """
    ends = ((cluster.namespace(host), INTERFACE), (cluster.switch, host))
    if rate != "unlimited":
        return [shaping_command(*end, rate, cluster.time_stretch) for end in ends]
    return [
        ["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"] for namespace, device in ends if shaped
    ]


def build_commands(cluster: Cluster) -> list[list[str]]:
    """The commands that make the network, in order. A link is shaped at both ends: up by the host, down by the port."""
    switch = cluster.switch
    commands = [
        ["ip", "netns", "add", switch],
        ["ip", "-n", switch, "link", "add", BRIDGE, "type", "bridge"],
        ["ip", "-n", switch, "link", "set", BRIDGE, "up"],
    ]
    for host in cluster.hosts:
        namespace = cluster.namespace(host)
        veth = ["type", "veth", "peer", "name", host, "netns", switch]
        commands += [
            ["ip", "netns", "add", namespace],
            ["ip", "link", "add", INTERFACE, "netns", namespace, *veth],
            ["ip", "-n", switch, "link", "set", host, "master", BRIDGE, "up"],
            ["ip", "-n", namespace, "link", "set", "lo", "up"],
            ["ip", "-n", namespace, "addr", "add", f"{cluster.address(host)}/24", "dev", INTERFACE],
            ["ip", "-n", namespace, "link", "set", INTERFACE, "up"],
        ]
        commands += rate_commands(cluster, host, cluster.rate, shaped=False)
    return commands


def cut_command(cluster: Cluster, host: str) -> list[str]:
    """Pulls a host's plug out of the switch: nothing reaches it or comes from it, and its own queue is not touched.

    Not by netem, which many kernels lack, and not by taking its interface down, which would tell its programs.
    """
    return ["ip", "-n", cluster.switch, "link", "set", host, "nomaster"]


def join_command(cluster: Cluster, host: str) -> list[str]:
    """Undoes `cut_command`; without effect where there is nothing to undo."""
    return ["ip", "-n", cluster.switch, "link", "set", host, "master", BRIDGE]


def later_command(seconds: float, commands: Sequence[Sequence[str]], cluster: Cluster) -> list[str]:
    """Runs commands a time after the end of its input, as a process of the cluster's, which `down` therefore ends."""
    script = "; ".join(shlex.join(command) for command in commands)
    return ["ip", "netns", "exec", cluster.switch, "sh", "-ec", f"cat; sleep {seconds:.3f}; {script}"]


# Many systems let nothing below /run be executed.
_HOLDER = """
hostname "$1"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$2" /etc/hosts
mount --bind "$3" "$3"
mount -o remount,bind,exec "$3"
mount --bind "$4" "$5"
echo ready
exec sleep infinity
"""


def holder_command(cluster: Cluster, host: str) -> list[str]:
    """A process that keeps a host's hostname, /dev/shm, /etc/hosts and IPC alive; says `ready` when all are there."""
    paths = (cluster.directory / "hosts", cluster.programs, cluster.host_file(host), HOST_FILE)
    inside = ["sh", "-ec", _HOLDER, "holder", host, *map(str, paths)]
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
    """For horovodrun and Open MPI."""
    return "".join(f"{host} slots={cluster.ranks_per_host}\n" for host in cluster.hosts)


def machinefile(cluster: Cluster) -> str:
    """For MPICH's mpirun."""
    return "".join(f"{host}:{cluster.ranks_per_host}\n" for host in cluster.hosts)


def attributes(cluster: Cluster, host: str) -> str:
    """Content of a host's HOST_FILE, which `pushreduce.communication.emulated_host` reads.

    A file and no variable: what starts processes on other hosts need not hand it on.
    """
    fields = {"slowness": cluster.slowness(host), "time_stretch": cluster.time_stretch}
    return json.dumps({"cluster": cluster.name, "host": host, **fields}) + "\n"
