"""Builds and removes emulated clusters, and finds what is left of those whose builder was killed.

Owns the cluster's directory, its network namespaces and the process a host that holds the other namespaces. What they
are called and made of is `plan.py`'s, ssh `secure_shell.py`'s. Everything of a cluster is found again by names made
from its own, so that nothing has to have been written down in time.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clusters import plan
from clusters.plan import Cluster, UserError

GRACE_SECONDS = 3.0
"""From SIGTERM to SIGKILL for what still runs in the hosts."""
_DEATH_SECONDS = 10.0
_NETWORK_NAMESPACES = Path("/run/netns")


class SystemRefusalError(RuntimeError):
    """The kernel or a tool of the system would not do what was asked; one line."""


@contextmanager
def lock() -> Iterator[None]:
    """One `up` or `down` at a time on this machine. Ends with the process, so a killed one leaves no lock."""
    descriptor = os.open(plan.ROOT_DIRECTORY.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def build(cluster: Cluster, start_ssh: Callable[[Cluster], None]) -> None:
    """Makes the cluster, or nothing: what a failure or a signal leaves half made is removed.

    Args:
        start_ssh: makes `ssh HOST` work inside the hosts, which then stand.
    """
    try:
        cluster.programs.mkdir(parents=True)
        for name, text in (
            ("cluster.json", cluster.to_json()),
            ("hosts", plan.hosts_file(cluster)),
            ("hostfile", plan.hostfile(cluster)),
            ("machinefile", plan.machinefile(cluster)),
        ):
            (cluster.directory / name).write_text(text)
        _write_attributes(cluster)
        for command in plan.build_commands(cluster):
            call(command)
        _start_holders(cluster)
        start_ssh(cluster)
        (cluster.directory / "ready").touch()
    except BaseException:
        remove(cluster.name)
        raise


def _write_attributes(cluster: Cluster) -> None:
    plan.HOST_FILE.touch()  # for the hosts to mount their own over
    for host in cluster.hosts:
        cluster.host_file(host).parent.mkdir(exist_ok=True)
        cluster.host_file(host).write_text(plan.attributes(cluster, host))


def _start_holders(cluster: Cluster) -> None:
    holders = {}
    (cluster.directory / "holders").mkdir()
    for host in cluster.hosts:
        holders[host] = subprocess.Popen(
            plan.holder_command(cluster, host),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        (cluster.directory / "holders" / host).write_text(str(holders[host].pid))
    for host, holder in holders.items():
        assert holder.stdout is not None
        with holder.stdout:
            said = holder.stdout.readline().decode().strip()
        if said != "ready":
            raise SystemRefusalError(f"{host} cannot have its own hostname, /dev/shm and /etc/hosts: {said}")


def holder_pid(cluster: Cluster, host: str) -> int:
    """The process that holds a host's namespaces.

    Raises:
        UserError: it has ended.
    """
    try:
        pid = int((cluster.directory / "holders" / host).read_text())
        same = os.path.samefile(f"/proc/{pid}/ns/net", _NETWORK_NAMESPACES / cluster.namespace(host))
    except (OSError, ValueError):
        same = False
    if not same:
        raise UserError(
            f"{host} of cluster {cluster.name} is broken: run `down` and `up` with --name {cluster.name}"
        )
    return pid


def find(name: str) -> Cluster:
    """The standing cluster of that name.

    Raises:
        UserError: there is none, or it was never completed.
    """
    plan.check_name(name)
    directory = plan.ROOT_DIRECTORY / name
    if not (directory / "ready").exists():
        raise UserError(
            f"no cluster {name} is up: start one with `scripts/emulated_cluster up --name {name}`"
        )
    return Cluster.from_json((directory / "cluster.json").read_text())


def is_whole(name: str) -> bool:
    """Whether the cluster was completed and all its hosts still stand."""
    try:
        cluster = find(name)
        for host in cluster.hosts:
            holder_pid(cluster, host)
    except UserError:
        return False
    return True


def known_names() -> list[str]:
    """Clusters of which there is anything at all, whole or not."""
    names = set()
    if plan.ROOT_DIRECTORY.is_dir():
        names = {path.name for path in plan.ROOT_DIRECTORY.iterdir() if path.is_dir()}
    for namespace in _network_namespaces():
        match = re.fullmatch(plan.namespace_prefix("(.+)") + r"(?:node[0-9]+|switch)", namespace)
        if match is not None:
            names.add(match[1])
    return sorted(names)


def free_network() -> int:
    """Number of a network that no cluster has."""
    taken = set()
    for name in known_names():
        with suppress(
            OSError, ValueError, TypeError
        ):  # one whose builder was killed may have no such file yet
            text = (plan.ROOT_DIRECTORY / name / "cluster.json").read_text()
            taken.add(Cluster.from_json(text).network)
    free = [network for network in range(plan.NUM_NETWORKS) if network not in taken]
    if not free:
        raise UserError(f"{plan.NUM_NETWORKS} clusters are up: take one down first")
    return free[0]


def remove(name: str) -> bool:
    """Ends every process in the hosts and removes all that is the cluster's. Returns whether there was anything."""
    namespaces = plan.own_namespaces(name, _network_namespaces())
    directory = plan.ROOT_DIRECTORY / name
    existed = bool(namespaces) or directory.exists()
    kill(lambda: pids_in(namespaces))
    for namespace in namespaces:
        call(["ip", "netns", "delete", namespace])
    if directory.exists():
        shutil.rmtree(directory)
    _remove_root_directory()
    return existed


def make_sshd_directory() -> None:
    """/run/sshd, which sshd insists on and which is not there on a machine whose own sshd has never run."""
    with suppress(FileExistsError):
        os.mkdir("/run/sshd", 0o755)
        (plan.ROOT_DIRECTORY / "made_run_sshd").touch()


def _remove_root_directory() -> None:
    """With the last cluster goes what all had in common."""
    if not plan.ROOT_DIRECTORY.is_dir() or any(path.is_dir() for path in plan.ROOT_DIRECTORY.iterdir()):
        return
    marker = plan.ROOT_DIRECTORY / "made_run_sshd"
    if marker.exists():
        with suppress(OSError):  # another sshd may use it by now
            os.rmdir("/run/sshd")
        marker.unlink()
    plan.HOST_FILE.unlink(missing_ok=True)
    plan.ROOT_DIRECTORY.rmdir()


def pids_in(namespaces: Iterable[str]) -> set[int]:
    """Processes whose network is one of these namespaces."""
    return {int(pid) for namespace in namespaces for pid in call(["ip", "netns", "pids", namespace]).split()}


def kill(find_pids: Callable[[], set[int]]) -> None:
    """Ends all processes that `find_pids` finds, by SIGTERM, then SIGKILL; also those started meanwhile.

    Raises:
        SystemRefusalError: some do not end even so.
    """
    start, asked = time.monotonic(), set()
    while pids := find_pids():
        passed = time.monotonic() - start
        if passed > GRACE_SECONDS + _DEATH_SECONDS:
            raise SystemRefusalError(f"processes {sorted(pids)} do not end: look what the kernel waits for")
        for pid in pids:
            with suppress(ProcessLookupError):
                if passed > GRACE_SECONDS:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in asked:
                    os.kill(pid, signal.SIGTERM)
                    asked.add(pid)
        time.sleep(0.02)


def _network_namespaces() -> list[str]:
    return sorted(os.listdir(_NETWORK_NAMESPACES)) if _NETWORK_NAMESPACES.is_dir() else []


def call(command: list[str]) -> str:
    """Standard output of a command of the system.

    Raises:
        SystemRefusalError: it failed, with its reason.
    """
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SystemRefusalError(f"`{' '.join(command)}` failed: {reason}")
    return done.stdout
