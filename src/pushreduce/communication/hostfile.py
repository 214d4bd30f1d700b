"""Hostfiles: the hosts of a job and how many ranks each may have.

    # comment              lines may end in one, too
    node01 slots=4         Open MPI's form
    node02:2               MPICH's form
    node03                 one slot

Owns reading and writing the format; imports nothing of MPI or torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = r"(?P<name>[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?)"
_LINE = re.compile(rf"{_NAME}(?::(?P<colon>\S*)|\s+slots\s*=\s*(?P<slots>\S*))?")


@dataclass(frozen=True)
class Host:
    """One line of a hostfile."""

    name: str
    slots: int
    line: int
    """Number in the file, from 1."""


def parse(text: str, path: str) -> list[Host]:
    """The hosts of a hostfile in order.

    Raises:
        ValueError: one line `path:number: what is wrong and what to write`.
    """
    hosts: list[Host] = []
    for number, whole in enumerate(text.splitlines(), start=1):
        line = whole.split("#", 1)[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"{path}:{number}: {line!r} is not a host; write `node01 slots=4` or `node01:4`")
        given = match["colon"] if match["colon"] is not None else match["slots"]
        slots = 1 if given is None else int(given) if re.fullmatch("[0-9]+", given) else 0
        if slots < 1:
            raise ValueError(f"{path}:{number}: {given!r} slots; a host needs a whole number of at least 1")
        for other in hosts:
            if other.name == match["name"]:
                raise ValueError(
                    f"{path}:{number}: {other.name} was named on line {other.line}; add the slots up there"
                )
        hosts.append(Host(match["name"], slots, number))
    if not hosts:
        raise ValueError(f"{path}: names no host; write a line such as `node01 slots=4`")
    return hosts


def host_list(hosts: list[Host]) -> str:
    """`node01:4,node02:2`, as both MPICH's `-hosts` and Open MPI's `--host` take it."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)
