"""Changes the links of a cluster that stands, also while programs use them: their rate, and outages.

Owns what is asked of the kernel and read back from it; which commands those are is `plan.py`'s. A change takes the lock
that `up` and `down` take, so a cluster does not go away under it; an outage lasts without the lock.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from clusters import namespaces, plan
from clusters.namespaces import SystemRefusalError
from clusters.plan import Cluster, UserError


@dataclass(frozen=True)
class Link:
    """The link of one host as it is now."""

    rate: str
    """Each way, as it would be if time were not stretched."""
    is_cut: bool
    """An outage."""


def present(cluster: Cluster) -> dict[str, Link]:
    """Every host's link, as the kernel has it."""
    queues = json.loads(namespaces.call(["tc", "-j", "-n", cluster.switch, "qdisc", "show"]))
    bytes_per_second = {queue["dev"]: queue["options"]["rate"] for queue in queues if queue["kind"] == "tbf"}
    ports = json.loads(namespaces.call(["ip", "-j", "-n", cluster.switch, "link", "show"]))
    joined = {port["ifname"] for port in ports if port.get("master") == plan.BRIDGE}
    links = {}
    for host in cluster.hosts:
        rate = "unlimited"
        if host in bytes_per_second:
            rate = plan.rate_of(8 * bytes_per_second[host] * cluster.time_stretch)
        links[host] = Link(rate, host not in joined)
    return links


def change_rate(name: str, numbers: Sequence[int] | None, rate: str) -> Cluster:
    """Gives the links of some hosts (None: all) another rate. What they hold queued is sent at the new one."""
    with namespaces.lock():
        cluster = namespaces.find(name)
        cluster.check_rate(rate)
        links = present(cluster)
        for host in _chosen(cluster, numbers):
            for command in plan.rate_commands(cluster, host, rate, shaped=links[host].rate != "unlimited"):
                namespaces.call(command)
    return cluster


def cut_for(name: str, numbers: Sequence[int] | None, seconds: float) -> None:
    """Nothing reaches or leaves some hosts (None: all) for a time. Returns when it is over.

    Where it is left early, by an exception or a signal, the outage ends then; where this process is killed, on time.

    Args:
        seconds: as it would be if time were not stretched.

    Raises:
        UserError: there is an outage of such a host already, or the cluster went down meanwhile.
    """
    with namespaces.lock():
        cluster = namespaces.find(name)
        hosts = _chosen(cluster, numbers)
        links = present(cluster)
        if already := [host for host in hosts if links[host].is_cut]:
            raise UserError(f"{already[0]} of cluster {name} is cut off already: wait for the end of that")
        joins = [plan.join_command(cluster, host) for host in hosts]
        # A process of its own, so that no outage outlives a killed command. Its time begins when its input ends, once
        # all are cut: else a short one could be over before the last is, which would then stay so.
        timer = subprocess.Popen(
            plan.later_command(seconds * cluster.time_stretch, joins, cluster),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert timer.stdin is not None
        try:
            for host in hosts:
                namespaces.call(plan.cut_command(cluster, host))
            timer.stdin.close()
        except BaseException:
            _end_now(timer, joins)
            raise
    try:
        code = timer.wait()
    except BaseException:
        with namespaces.lock():
            if _stands(cluster):
                _end_now(timer, joins)
        raise
    with namespaces.lock():
        if not _stands(cluster):
            raise UserError(f"cluster {name} was taken down during the outage")
    if code != 0:
        raise SystemRefusalError(f"the end of the outage failed (exit code {code}): take cluster {name} down")


def _chosen(cluster: Cluster, numbers: Sequence[int] | None) -> list[str]:
    for number in numbers or ():
        if not 0 <= number < cluster.num_hosts:
            raise UserError(f"--host {number}: cluster {cluster.name} has hosts 0 to {cluster.num_hosts - 1}")
    return [host for index, host in enumerate(cluster.hosts) if numbers is None or index in numbers]


def _stands(cluster: Cluster) -> bool:
    with suppress(UserError):
        return namespaces.find(cluster.name) == cluster
    return False


def _end_now(timer: subprocess.Popen[bytes], joins: Sequence[list[str]]) -> None:
    for command in joins:
        namespaces.call(command)
    with suppress(ProcessLookupError):
        os.killpg(timer.pid, signal.SIGTERM)
    timer.wait()
