"""The edits to Horovod's source: all applied, or none of it is built."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/horovod_edits.py"


@pytest.fixture(scope="module")
def horovod_edits() -> ModuleType:
    spec = spec_from_file_location("horovod_edits", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["horovod_edits"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path: Path, horovod_edits: ModuleType) -> Path:
    """A source in which every edit's text occurs once."""
    for edit in horovod_edits.edits("2.14.1", gpu=False):
        path = tmp_path / edit.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + edit.old + "\n")
    return tmp_path


def run(source: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(source), "--torch", "2.14.1+cpu", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("torch_version", "standard"),
    [("1.13.1", 14), ("2.0.1", 14), ("2.1.0", 17), ("2.13.0+cpu", 17), ("2.14.1", 20), ("3.0", 20)],
)
def test_the_standard_follows_torch(horovod_edits: ModuleType, torch_version: str, standard: int) -> None:
    assert horovod_edits.cxx_standard(torch_version) == standard


def test_all_edits_apply_together(source: Path, horovod_edits: ModuleType) -> None:
    result = run(source)
    assert result.returncode == 0, result.stderr
    for edit in horovod_edits.edits("2.14.1", gpu=False):
        assert edit.new in (source / edit.path).read_text()


def test_a_second_time_is_refused(source: Path) -> None:
    run(source)
    result = run(source)
    assert result.returncode != 0
    assert "occurs 0 times instead of once" in result.stderr


def test_every_missing_or_repeated_text_is_refused_and_named(source: Path, horovod_edits: ModuleType) -> None:
    edits = horovod_edits.edits("2.14.1", gpu=False)
    original = {edit.path: (source / edit.path).read_text() for edit in edits}
    for edit in edits:
        for wrong in ("", edit.old + "\n" + edit.old):
            for path, text in original.items():
                (source / path).write_text(text)
            (source / edit.path).write_text(original[edit.path].replace(edit.old, wrong))
            with pytest.raises(ValueError, match=edit.path):
                horovod_edits.apply(source, edits)


def test_gpu_builds_keep_cuda(horovod_edits: ModuleType) -> None:
    without, with_gpu = horovod_edits.edits("2.14.1", gpu=False), horovod_edits.edits("2.14.1", gpu=True)
    assert {edit.path for edit in without} - {edit.path for edit in with_gpu} == {
        "cmake/Modules/FindPytorch.cmake"
    }
