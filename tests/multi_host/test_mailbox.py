"""The mailbox's own tests, with every rank on a host of its own: windows over TCP instead of shared memory."""

from __future__ import annotations

import pytest
from conftest import MAILBOX_RATE
from emulated import ROOT
from test_launchers import mpirun_hosts

TIMEOUT_SECONDS = 240


@pytest.mark.timeout(2 * TIMEOUT_SECONDS)
@pytest.mark.parametrize(
    ("num_hosts", "tests"), [(2, "tests/mailbox"), (4, "tests/mailbox/test_conservation.py")]
)
def test_between_hosts(own, num_hosts, tests):
    own.up("--hosts", str(num_hosts), "--rate", MAILBOX_RATE)
    hosts = mpirun_hosts(str(own.directory))
    pytest_command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    process = own.start("run", "--", "mpirun", "-np", str(num_hosts), *hosts, *pytest_command, cwd=ROOT)
    done = own.finish(process, TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
