"""An emulated cluster for the tests: they need root and iproute2, and say so where they cannot run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated import Emulated

NUM_HOSTS = 4
RATE_BITS_PER_SECOND = 100e6
MAILBOX_RATE = "1gbit"  # its messages of 20 MB would take minutes otherwise


def why_not() -> str | None:
    """What keeps these tests from running here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc", "nsenter", "setpriv") if not shutil.which(program)]
    if missing:
        return f"not installed: {', '.join(missing)} (packages iproute2 and util-linux)"
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode != 0:
        return "this container or kernel permits no network namespaces"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here, reason = Path(__file__).parent, None
    own = [item for item in items if here in item.path.parents]
    if own and (reason := why_not()) is not None:
        for item in own:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Emulated]:
    """Four hosts at 100 Mbit/s, which no test changes."""
    emulated = Emulated("shared")
    emulated.up("--hosts", str(NUM_HOSTS), "--rate", f"{RATE_BITS_PER_SECOND / 1e6:g}mbit")
    try:
        yield emulated
    finally:
        emulated.remove()


@pytest.fixture
def own() -> Iterator[Emulated]:
    """A name of a cluster that the test builds and breaks itself."""
    emulated = Emulated("own")
    try:
        yield emulated
    finally:
        emulated.remove()
