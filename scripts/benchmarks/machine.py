"""What a measurement ran on, for its log."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pushreduce.communication.environment import find_commit


def describe_machine() -> dict[str, Any]:
    """Hardware, versions and commit."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "command": sys.argv,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": find_commit(),
        "processor": names[0].split(":")[1].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "horovod", "mpi4py", "numpy")},
        "mpi": subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout[
            :400
        ],
        "load_average": os.getloadavg(),
    }
