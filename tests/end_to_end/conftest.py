"""The end-to-end tests start programs: they need Horovod and an MPI, but not in their own process."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    own = [item for item in items if here in item.path.parents]
    if (
        own
        and shutil.which("mpirun", path=str(Path(sys.executable).parent)) is None
        and not shutil.which("mpirun")
    ):
        for item in own:
            item.add_marker(pytest.mark.skip(reason="no mpirun: run scripts/setup.sh"))
