"""The edits that make Horovod 0.28.1's source build and run with today's compilers, PyTorch and MPI.

    python scripts/horovod_edits.py SOURCE_DIR --torch 2.14.1 [--gpu]

Owns what is changed in the source; `build_horovod.sh` owns fetching, building and keeping it. The text of
every edit must occur exactly once: a Horovod that does not look as expected is refused, never built without
an edit.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """Replaces `old`, which must occur exactly once in `path` (relative to the source), by `new`."""

    path: str
    old: str
    new: str
    why: str


def cxx_standard(torch_version: str) -> int:
    """The C++ standard that PyTorch's headers of this version (such as "2.14.1+cpu") want."""
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    if match is None:
        raise ValueError(f"torch version {torch_version!r} is not a version number")
    version = (int(match[1]), int(match[2]))
    if version >= (2, 14):
        return 20
    return 17 if version >= (2, 1) else 14


def edits(torch_version: str, gpu: bool) -> list[Edit]:
    """All edits for a build against this PyTorch, with or without GPU operations."""
    standard = f"set(CMAKE_CXX_STANDARD {cxx_standard(torch_version)})"
    chosen = [
        Edit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", standard, "PyTorch's headers"),
        Edit(
            "horovod/torch/CMakeLists.txt",
            "set(CMAKE_CXX_STANDARD 14)",
            standard,
            "the inner file's standard wins over the outer one's",
        ),
        Edit(
            "CMakeLists.txt",
            "set(CMAKE_CXX_STANDARD_REQUIRED ON)",
            "set(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
            "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
            'set(CMAKE_INSTALL_RPATH "$ENV{HOROVOD_RPATH}")',
            "the wheel is kept and installed into other environments: no absolute path of this one in it",
        ),
        Edit(
            "horovod/common/common.h",
            "#include <functional>\n",
            "#include <functional>\n#include <stdexcept>\n",
            "gcc 13",
        ),
        Edit(
            "horovod/common/group_table.h",
            "#include <queue>\n",
            "#include <queue>\n#include <string>\n",
            "gcc 13",
        ),
        Edit(
            "horovod/runner/mpi_run.py",
            "elif 'MPICH' in output:",
            "elif 'MPICH' in output or 'HYDRA' in output:",
            "MPICH's mpirun --version says HYDRA",
        ),
        Edit(
            "horovod/runner/mpi_run.py",
            "['-bind-to none', '-map-by slot']",
            "['--bind-to none', '--map-by slot']",
            "Open MPI 5 takes the `none` of a single-dashed option for the program",
        ),
        Edit(
            "horovod/runner/mpi_run.py",
            "['/bin/sh', '-c', mpirun_command]",
            "['/bin/sh', '-c', 'exec ' + mpirun_command]",
            "a shell in between swallows SIGTERM and leaves the ranks running",
        ),
    ]
    if not gpu:
        chosen.append(
            Edit(
                "cmake/Modules/FindPytorch.cmake",
                'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)',
                "set(Pytorch_CUDA FALSE)",
                "an nvcc on PATH without CUDA's libraries otherwise stops the build",
            )
        )
    return chosen


def apply(source: Path, chosen: list[Edit]) -> None:
    """Applies the edits under `source`.

    Raises:
        ValueError: an edit's text does not occur exactly once.
    """
    for edit in chosen:
        path = source / edit.path
        text = path.read_text()
        if text.count(edit.old) != 1:
            raise ValueError(
                f"{edit.path}: {edit.old!r} occurs {text.count(edit.old)} times instead of once "
                f"({edit.why}): this is not the source of Horovod 0.28.1"
            )
        path.write_text(text.replace(edit.old, edit.new))
        print(f"edited {edit.path}: {edit.why}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--torch", required=True, help="torch.__version__ of the environment")
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    try:
        apply(arguments.source, edits(arguments.torch, arguments.gpu))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
