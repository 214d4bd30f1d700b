"""Stands in for ssh inside an emulated cluster on a machine without sshd: enters the other host's namespaces.

    ssh_stand_in.py CLUSTER [ssh's options] HOST [COMMAND...]

As ssh does, it gives the words of the command, joined by blanks, to the user's shell in the home directory. Unlike
ssh it brings the whole environment along (the sshd of an emulated cluster does, too), and nothing goes over the
emulated network. Options are accepted and, but for `-n` and `-G`, without effect.
"""

from __future__ import annotations

import os
import pwd
import sys
from dataclasses import dataclass
from pathlib import Path

_OPTIONS_WITH_VALUE = "BbcDEeFIiJLlmOopQRSWw"
_OPTIONS_ALONE = "46AaCfGgKkMNnqsTtVvXxYy"


@dataclass(frozen=True)
class Request:
    """What ssh was asked to do."""

    host: str
    command: str
    """Empty: a shell."""
    reads_input: bool
    describes: bool
    """-G: say how the host would be reached, only."""


def parse(words: list[str]) -> Request:
    """Understands ssh's command line.

    Raises:
        ValueError: no host, or an option that ssh does not have.
    """
    host, letters, rest = "", "", list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            host = host or (rest.pop(0) if rest else "")
            break
        if not word.startswith("-") or word == "-":
            if host:  # ssh takes options after the host, too, up to the command
                rest.insert(0, word)
                break
            host = word
            continue
        for position, letter in enumerate(word[1:], start=2):
            if letter in _OPTIONS_WITH_VALUE:
                if position == len(word) and rest:
                    rest.pop(0)
                break
            if letter not in _OPTIONS_ALONE:
                raise ValueError(f"unknown option -- {letter}")
            letters += letter
    if not host:
        raise ValueError("no host given")
    return Request(host.rpartition("@")[2], " ".join(rest), "n" not in letters, "G" in letters)


def main() -> None:
    """Becomes the command in the other host; exit code 255 where that cannot be, as ssh's."""
    from clusters import namespaces, plan
    from clusters.plan import Cluster

    try:
        request = parse(sys.argv[2:])
        if request.describes:
            # With a proxy named, nobody looks for an open port.
            print(f"hostname {request.host}\nport 22\nproxycommand nsenter")
            return
        cluster = Cluster.from_json((plan.ROOT_DIRECTORY / sys.argv[1] / "cluster.json").read_text())
        by_address = {cluster.address(host): host for host in cluster.hosts}
        host = by_address.get(request.host, request.host)
        if host not in cluster.hosts:
            raise ValueError(f"{host} is no host of cluster {cluster.name}")
        pid = namespaces.holder_pid(cluster, host)
    except (OSError, ValueError) as error:
        print(f"ssh: {error}", file=sys.stderr)
        sys.exit(255)
    if not request.reads_input:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    user = pwd.getpwuid(os.getuid())
    shell = [user.pw_shell or "/bin/sh"]
    command = plan.enter_command(
        pid, [*shell, "-c", request.command] if request.command else shell, user.pw_dir
    )
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
