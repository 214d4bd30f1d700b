"""Files that are whole or absent, whatever ends the process or the machine while they are written.

Owns the writing of one file. Imports nothing heavy, so that whatever reads or repairs a run starts at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that appears at `path` on leaving the block: whole, on disk, in place of any other.

    Where the block raises, `path` stays as it was. OSError as from any writing.
    """
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """`content` at `path`, as `atomic_file` does it."""
    with atomic_file(path) as file:
        file.write(content)


def sync_directory(path: Path) -> None:
    """Returns when the names in the directory `path` are on disk: without it, a crash may undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
