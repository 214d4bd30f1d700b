"""Files of a checkpoint that tell whether they are still what was written: torch states and sealed JSON.

Owns one file at a time, its SHA-256 and what may be in it. Does not own directories or agreement between
ranks (`checkpoint.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any, cast

import torch

from pushreduce.training.atomic_file import write_atomically

SEAL = "sha256_of_the_rest"


def is_plain(value: Any) -> bool:
    """Whether `value` is made of what torch.load(weights_only=True) reads back as it was."""
    if type(value) in (dict, OrderedDict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.Tensor)


def save_state(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Writes `state` (plain) to `path`, on disk on return; its SHA-256 and size, for `damage_of`.

    Raises:
        OSError: it cannot be written; a part of it may be there.
    """
    assert is_plain(state), f"{path.name} would hold a type that torch.load(weights_only=True) refuses"
    with open(path, "wb") as file:
        hashing = _HashingFile(file)
        try:
            torch.save(state, cast(IO[bytes], hashing))
        except RuntimeError:
            if hashing.error is not None:
                raise hashing.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": hashing.sha256.hexdigest(), "num_bytes": hashing.num_bytes}


def load_state(path: Path) -> dict[str, Any]:
    """What `save_state` wrote, tensors on the CPU; runs no code from the file."""
    return cast(dict[str, Any], torch.load(path, map_location="cpu", weights_only=True))


def damage_of(path: Path, record: dict[str, Any]) -> str | None:
    """How the file at `path` differs from what `save_state` returned `record` for; None: not at all."""
    digest = hashlib.sha256()
    try:
        num_bytes = path.stat().st_size
        if num_bytes != record["num_bytes"]:
            return f"{path} has {num_bytes} bytes instead of {record['num_bytes']}"
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None if digest.hexdigest() == record["sha256"] else f"{path} has been altered (SHA-256 differs)"


def write_sealed_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` and its checksum to `path`, whole and on disk on return. OSError if it cannot."""
    # As it will be read: JSON makes lists of tuples and strings of keys.
    content = json.loads(json.dumps(content))
    sealed = {SEAL: _digest(content), **content}
    write_atomically(path, json.dumps(sealed, indent=1).encode())


def read_sealed_json(path: Path) -> tuple[dict[str, Any] | None, str | None]:
    """What `write_sealed_json` wrote and None, or None and what is wrong with the file."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        return None, f"{path} cannot be read ({error.strerror})"
    except ValueError:
        return None, f"{path} is no JSON: it has been truncated or altered"
    if not isinstance(content, dict) or content.pop(SEAL, None) != _digest(content):
        return None, f"{path} has been altered (SHA-256 differs)"
    return content, None


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class _HashingFile:
    """What torch.save writes to: hashes on the way to the disk, so that a large file is not read again.

    Keeps the OSError of a failed write, since torch reports it as a RuntimeError without the reason.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.num_bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sha256.update(data)
        self.num_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()
