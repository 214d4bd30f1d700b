"""Makes `ssh HOST` work inside the hosts of an emulated cluster, by sshd or by a stand-in.

Owns the cluster's keys, ssh configuration and the `ssh` that comes first on PATH inside the hosts; all are files in
the cluster's directory, and nobody's ~/.ssh is read or written.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clusters import namespaces, plan
from clusters.namespaces import SystemRefusalError
from clusters.plan import Cluster, UserError

_START_SECONDS = 20.0
_PATH = "PUSHREDUCE_CLUSTER_PATH"
"""PATH under another name: sshd takes every variable that is sent along, and then sets PATH itself."""
_FORCED = f"""export PATH=${_PATH}
[ -n "$SSH_ORIGINAL_COMMAND" ] || exec "$SHELL"
exec "$SHELL" -c "$SSH_ORIGINAL_COMMAND"
"""
_STAND_IN = Path(__file__).with_name("ssh_stand_in.py")


def choose(wanted: str) -> str:
    """`sshd` or `stand-in`, from these or `auto`: the first where openssh-server is installed.

    Raises:
        UserError: sshd is wanted and not there.
    """
    is_there = all(_find(program) for program in ("sshd", "ssh", "ssh-keygen"))
    if wanted == "sshd" and not is_there:
        raise UserError(
            "--ssh sshd: install the packages openssh-server and openssh-client, or use --ssh stand-in"
        )
    if wanted == "auto":
        return "sshd" if is_there else "stand-in"
    return wanted


def environment(cluster: Cluster) -> dict[str, str]:
    """This process's environment with the cluster's `ssh` first on PATH."""
    return {**os.environ, "PATH": f"{cluster.programs}:{os.environ.get('PATH', os.defpath)}"}


def start(cluster: Cluster) -> None:
    """Sets ssh up in all hosts, which stand, and tries it from the first host to each."""
    set_path = ""
    if cluster.ssh == "sshd":
        command = [_find("ssh"), "-F", str(_write_configuration(cluster))]
        set_path = f"export {_PATH}=$PATH; "
        _start_daemons(cluster)
    else:
        # Isolated: the program's environment is the user's, PYTHONPATH included, and goes on to the other host.
        command = [sys.executable, "-I", str(_STAND_IN), cluster.name]
    wrapper = cluster.programs / "ssh"
    wrapper.write_text(f'#!/bin/sh\n{set_path}exec {shlex.join(command)} "$@"\n')
    wrapper.chmod(0o755)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda host: _try(cluster, host), cluster.hosts))


def _find(program: str) -> str:
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin") or ""


def _write_configuration(cluster: Cluster) -> Path:
    """Keys, and the settings of both sides; returns the client's."""
    directory = cluster.directory / "ssh"
    directory.mkdir(mode=0o700)
    for key in ("host_key", "key"):
        make_key = [
            "-q",
            "-t",
            "ed25519",
            "-N",
            "",
            "-C",
            f"cluster {cluster.name}",
            "-f",
            str(directory / key),
        ]
        namespaces.call([_find("ssh-keygen"), *make_key])
    (directory / "authorized_keys").write_text((directory / "key.pub").read_text())
    host_key = (directory / "host_key.pub").read_text()
    known = "".join(f"{host},{cluster.address(host)} {host_key}" for host in cluster.hosts)
    (directory / "known_hosts").write_text(known)
    (directory / "forced_command").write_text(_FORCED)
    (directory / "sshd_config").write_text(server_settings(directory))
    (directory / "config").write_text(client_settings(directory))
    return directory / "config"


def server_settings(directory: Path) -> str:
    """sshd_config: root comes in with the cluster's key only, and brings the whole environment along."""
    return f"""Port 22
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
AcceptEnv *
ForceCommand /bin/sh {directory}/forced_command
MaxStartups 1000
MaxSessions 1000
PrintMotd no
UseDNS no
"""


def client_settings(directory: Path) -> str:
    """ssh_config."""
    return f"""Host *
    User root
    IdentityFile {directory}/key
    IdentitiesOnly yes
    UserKnownHostsFile {directory}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    BatchMode yes
    SendEnv *
    LogLevel ERROR
"""


def _start_daemons(cluster: Cluster) -> None:
    namespaces.make_sshd_directory()
    directory = cluster.directory / "ssh"
    for host in cluster.hosts:
        daemon = [
            _find("sshd"),
            "-D",
            "-f",
            str(directory / "sshd_config"),
            "-E",
            str(directory / f"{host}.log"),
        ]
        subprocess.Popen(
            plan.enter_command(namespaces.holder_pid(cluster, host), daemon, "/"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    deadline = time.monotonic() + _START_SECONDS
    for host in cluster.hosts:
        while not _listens(namespaces.holder_pid(cluster, host)):
            if time.monotonic() > deadline:
                log = directory / f"{host}.log"
                lines = log.read_text().splitlines() if log.exists() else []
                reason = lines[-1] if lines else "it says nothing"
                raise SystemRefusalError(
                    f"sshd does not start in {host}: {reason} (--ssh stand-in does without)"
                )
            time.sleep(0.02)


def _listens(pid: int) -> bool:
    """Whether something listens on port 22 in the network of a process."""
    sockets = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return any(fields[1].endswith(":0016") and fields[3] == "0A" for fields in sockets)


def _try(cluster: Cluster, host: str) -> None:
    first = namespaces.holder_pid(cluster, cluster.hosts[0])
    try:
        ssh = subprocess.run(
            plan.enter_command(first, ["ssh", host, "hostname"], "/"),
            env=environment(cluster),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_START_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise SystemRefusalError(f"ssh to {host} takes more than {_START_SECONDS:g} s") from error
    if ssh.stdout.strip() != host:
        said = ssh.stderr.strip() or ssh.stdout.strip() or f"exit code {ssh.returncode}"
        raise SystemRefusalError(f"ssh does not reach {host}: {said.splitlines()[-1]}")
