"""What each MPI library and Horovod need in the environment before MPI starts: pure decisions, no MPI.

Whoever starts MPI (`startup.py`) hands in what it knows and puts the answer into `os.environ`. A variable
that the user has set is never touched, so that every line here can be overruled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RING_THRESHOLD_BYTES = 256 * 1024
"""All-reduces between hosts from this size on go round a ring; below, its 2 (n - 1) latencies cost more."""

SEGMENT_BYTES = 16 * 1024 * 1024
"""Longer averages are sent in segments of this size, so that what MPI allocates for a message stays small."""

CYCLE_MILLISECONDS = 1.0
"""Between two looks of Horovod's thread at what is to be done: its default."""

CROWDED_CYCLE_MILLISECONDS = 5.0
"""The same where a host has more ranks than processors."""

STALL_SHUTDOWN_SECONDS = 600
"""A collective that some ranks have not entered for so long ends the job instead of hanging for ever."""

_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_BRIDGE = re.compile(r"(docker|br-|virbr|cni|flannel)")


@dataclass(frozen=True)
class Launch:
    """What the launcher's environment says, before MPI runs; good for preparing and checking, no more."""

    num_ranks: int
    num_local_ranks: int
    """Ranks on this host; `num_ranks` where the launcher does not say."""
    rank: int
    variable: str | None
    """The variable that `num_ranks` comes from; None without a launcher."""


def read_launch(environment: Mapping[str, str], *, on_terminal: bool) -> Launch:
    """Reads the variables of Open MPI's mpirun, MPICH's mpirun and srun; without a launcher: one rank.

    Args:
        on_terminal: whether standard input is one. No task of srun has it, apart from the shell of `srun --pty bash`,
            whose variables tell of that shell's step and not of what is started in it.
    """
    if on_terminal:
        environment = {name: value for name, value in environment.items() if not name.startswith("SLURM_")}

    def first(names: Iterable[str]) -> tuple[str | None, int | None]:
        for name in names:
            if environment.get(name, "").isdigit():
                return name, int(environment[name])
        return None, None

    variable, num_ranks = first(_SIZE_VARIABLES)
    num_ranks = num_ranks or 1
    return Launch(
        num_ranks, first(_LOCAL_SIZE_VARIABLES)[1] or num_ranks, first(_RANK_VARIABLES)[1] or 0, variable
    )


def library_name(library_version: str) -> str:
    """ "mpich" (Intel MPI, MVAPICH and Cray MPI too), "openmpi 4" or "openmpi 5", or "other"."""
    if match := re.search(r"Open MPI v?(\d+)", library_version):
        return "openmpi 4" if int(match[1]) <= 4 else "openmpi 5"
    return "mpich" if re.search(r"MPICH|MVAPICH|Intel\(R\) MPI", library_version) else "other"


def launcher_is_open_mpi(mpirun_version: str) -> bool:
    """Whether `mpirun --version`, which names the library otherwise than the library itself, is Open MPI's."""
    return "Open MPI" in mpirun_version or "OpenRTE" in mpirun_version


def before_mpi(
    library_version: str,
    launch: Launch,
    num_cores: int,
    interfaces: Iterable[str],
    has_rdma: bool,
    environment: Mapping[str, str],
    time_stretch: float = 1.0,
) -> dict[str, str]:
    """The variables to set before MPI starts, without those that the user has set.

    Args:
        library_version: what `MPI_Get_library_version` says.
        num_cores: processors of this host.
        interfaces: names of this host's network interfaces that are up and have an address.
        has_rdma: whether this host has InfiniBand or the like.
        time_stretch: of the emulated cluster that this host is in, else 1.
    """
    library = library_name(library_version)
    several_hosts = launch.num_local_ranks < launch.num_ranks
    interfaces = sorted(interfaces)
    bridges = [name for name in interfaces if _BRIDGE.match(name)]
    wanted: dict[str, str] = {
        "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_CPU_OPERATIONS": "MPI",
        # Else Horovod would put the segments together again, in a buffer of its own.
        "HOROVOD_FUSION_THRESHOLD": str(SEGMENT_BYTES),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_SHUTDOWN_SECONDS),
    }
    is_crowded = launch.num_local_ranks > num_cores
    if is_crowded and library.startswith("openmpi"):
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    # A waiting rank must leave the core to the one that it waits for.
    cycle_milliseconds = time_stretch * (CROWDED_CYCLE_MILLISECONDS if is_crowded else CYCLE_MILLISECONDS)
    if cycle_milliseconds != CYCLE_MILLISECONDS:
        wanted["HOROVOD_CYCLE_TIME"] = f"{cycle_milliseconds:g}"
    if library == "openmpi 4":
        # The default window (osc rdma over TCP) cannot be made between hosts.
        wanted["OMPI_MCA_osc"] = "ucx"
        wanted["OMPI_MCA_opal_common_ucx_tls"] = "any"
        wanted["OMPI_MCA_opal_common_ucx_devices"] = "any"
        # "Read -1, expected N" in containers.
        wanted["OMPI_MCA_btl_vader_single_copy_mechanism"] = "none"
    if library == "openmpi 5":
        wanted["OMPI_MCA_osc"] = "^ucx"
    if (
        library.startswith("openmpi")
        and several_hosts
        and bridges
        and "OMPI_MCA_btl_tcp_if_include" not in environment
    ):
        # Include and exclude exclude each other; the default, the loopback, is replaced: it must be named.
        wanted["OMPI_MCA_btl_tcp_if_exclude"] = ",".join(["lo", *bridges])
    if library == "mpich" and several_hosts and bridges and not has_rdma:
        # UCX knows no exclusion; and naming Ethernet interfaces would take its InfiniBand devices away.
        wanted["UCX_NET_DEVICES"] = ",".join(name for name in interfaces if name not in ("lo", *bridges))
    return {name: value for name, value in wanted.items() if value and name not in environment}


def ring_table(library: Path) -> str | None:
    """MPICH's own table of collective algorithms, with a ring for large all-reduces, as JSON.

    MPICH takes a table from a file only as a whole, and each version knows other algorithms: so the built-in
    one is read out of the library. None where it does not look as expected (the default stays).
    """
    content = library.read_bytes()
    for start in (match.start() for match in re.finditer(rb'\{"collective=', content)):
        try:
            table: dict[str, Any] = json.loads(content[start : content.index(b"\0", start)])
            long_sums = table["collective=allreduce"]["comm_type=intra"]["avg_msg_size=any"][
                "is_op_built_in=yes"
            ]
            default = long_sums["count=any"]
        except (ValueError, KeyError, TypeError):
            continue
        if not any(name.startswith("algorithm=MPIR_Allreduce_intra") for name in default):
            continue
        long_sums["count=any"] = {
            f"avg_msg_size<{RING_THRESHOLD_BYTES}": default,
            "avg_msg_size=any": {"algorithm=MPIR_Allreduce_intra_ring": {}},
        }
        return json.dumps(table)
    return None


def ring_variables(library: Path, launch: Launch, environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that sends MPICH's large all-reduces between hosts round a ring, if any.

    On one host there is none: through shared memory the default is many times faster.
    """
    name = "MPIR_CVAR_COLL_SELECTION_TUNING_JSON_FILE"
    if launch.num_local_ranks >= launch.num_ranks or name in environment:
        return {}
    if "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM" in environment:
        return {}
    table = ring_table(library)
    if table is None:
        return {}
    digest = hashlib.sha256(table.encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir()) / f"pushreduce-mpich-{os.getuid()}-{digest}.json"
    if not path.exists() or path.read_text() != table:
        # All ranks of a host write the same, each into a file of its own first: none reads half of it.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(table)
        os.replace(file.name, path)
    return {name: str(path)}


def mpi_libraries(memory_map: str) -> list[str]:
    """MPI libraries in the text of /proc/self/maps, links resolved, sorted; two of them are two MPIs."""
    found = re.findall(r"\s(/\S*/libmpi(?:_abi|ch)?\.so\S*)", memory_map)
    return sorted({os.path.realpath(path) for path in found})
