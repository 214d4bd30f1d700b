"""What an emulated cluster says of the host that this process runs in.

`scripts/emulated_cluster` gives each of its hosts a file; this reads it. The hosts share one machine's processors, so
that one is slower than the others, or that time is stretched, is up to the programs in them:
`training/emulated_compute.py` makes computation take longer, `mpi_settings.py` what goes by the clock inside Horovod.
The links are the cluster's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

HOST_FILE = Path("/run/pushreduce-host.json")
"""Inside an emulated host. On machines that have none up it does not exist; beside one it is empty."""


@dataclass(frozen=True)
class EmulatedHost:
    """How time passes on a host, against what the user asks for; the defaults are a real host's."""

    slowness: float = 1.0
    """How many times as long as on the cluster's other hosts a computation takes."""
    time_stretch: float = 1.0
    """How many times as long everything takes, on all hosts alike: the links have that part of their rate."""


def this_host() -> EmulatedHost:
    """The host that this process runs in."""
    try:
        text = HOST_FILE.read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    if not text:
        return EmulatedHost()
    fields = json.loads(text)
    return EmulatedHost(fields["slowness"], fields["time_stretch"])
