"""A file is the old one or the new one, whole, wherever the writing ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pushreduce.training.atomic_file import atomic_file, write_atomically


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("occurrence", [0, 1])
def test_a_file_is_the_old_one_or_the_new_one_whole(
    call: str, occurrence: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    original, calls = getattr(os, call), iter(range(10))

    def killed(*args: object) -> object:
        if next(calls) == occurrence:
            raise Killed
        return original(*args)

    monkeypatch.setattr(os, call, killed)
    try:
        write_atomically(path, b"new")
        # One replacement only: the second one never comes.
        assert (call, occurrence) == ("replace", 1)
    except Killed:
        pass
    assert path.read_bytes() == (b"old" if occurrence == 0 else b"new")


def test_a_writer_that_raises_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write_half() -> None:
        with atomic_file(path) as file:
            file.write(b"half of the ne")
            raise Killed

    with pytest.raises(Killed):
        write_half()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"file": b"old"}
