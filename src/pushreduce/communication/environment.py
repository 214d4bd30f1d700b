"""What a run ran on, for its record and for messages: versions, hardware, settings. Imports neither MPI nor Horovod."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pushreduce.communication import emulated_host, mpi_settings, startup

_SETTINGS = ("HOROVOD_", "OMPI_MCA_", "PRTE_MCA_", "MPIR_CVAR_", "UCX_", "FI_", "NCCL_", "OMP_")
_TRANSPORT = tuple(
    "OMPI_MCA_osc OMPI_MCA_pml OMPI_MCA_btl OMPI_MCA_opal_common_ucx MPIR_CVAR_CH4 UCX_ FI_".split()
)


def describe_environment(num_ranks: int) -> dict[str, Any]:
    """This rank's part of `environment.json`: commit, versions, host, settings. After `startup.start`."""
    ring = "MPIR_CVAR_COLL_SELECTION_TUNING_JSON_FILE" in startup.settings_made
    return {
        **describe_process(num_ranks),
        "horovod": version("horovod"),
        "mpi4py": version("mpi4py"),
        "mpi_library": startup.mpi_library(),
        "all_reduce": f"ring from {mpi_settings.RING_THRESHOLD_BYTES} bytes" if ring else "the MPI's default",
        "settings_made": dict(startup.settings_made),
        "settings_of_user": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_SETTINGS) and name not in startup.settings_made
        },
    }


def describe_process(num_ranks: int) -> dict[str, Any]:
    """The part of it that neither MPI nor Horovod has to do with."""
    import torch

    host = emulated_host.this_host()
    return {
        "commit": find_commit(),
        "command": sys.argv,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "num_ranks": num_ranks,
        "host": {
            "name": socket.gethostname(),
            "cores": startup.num_cores(),
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
            "slowness": host.slowness,
        },
        "time_stretch": host.time_stretch,
        "torch_threads_per_rank": torch.get_num_threads(),
    }


def transport_settings() -> list[str]:
    """NAME=value of every variable that is set about how MPI reaches other ranks."""
    return sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_TRANSPORT))


def find_commit() -> str | None:
    """The checkout's commit, "-dirty" where files differ from it; None outside a checkout."""
    describe = "describe --always --dirty --abbrev=40 --exclude=*".split()
    command = ["git", "-C", str(Path(__file__).parent), *describe]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
